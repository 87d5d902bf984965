"""Over real processes on loopback addresses, with TLS and listed keys: the serial engine's bits.

Slow, and run by hand: ``python -m pytest -m slow tests/deploy -s``. Every number printed is measured here.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import toys
from fedstill.deploy.control import Control
from fedstill.experiment.run_directory.journal import read_journal
from flowers import needs_flower
from processes import Deployment, events, experiment, over, same_bits, serial_of

pytestmark = [pytest.mark.slow, needs_flower]

METHODS = {
    "parallel": "scaffold",
    "sequential": "toys:Chain",
    "public_logits": "toys:Logits",
    "peer_to_peer": "toys:Peers",
}


@pytest.mark.parametrize(("topology", "method"), METHODS.items())
def test_over_the_deployment_the_bits_are_the_serial_engines(
    topology: str, method: str, three: Deployment, tmp_path: Path
) -> None:
    """Two rounds; among peers one, which is all there is."""
    changes = {"rounds": 1} if topology == "peer_to_peer" else {}
    public = {"name": "digits", "public": toys.PUBLIC if topology == "public_logits" else 0}
    what, began = experiment(method, topology, data=public, **changes), time.monotonic()
    done = over(three, what, tmp_path / "run")
    assert done.returncode == 0, done.stderr + three.log("server")[-3000:] + three.log("client0")[-3000:]
    same_bits(tmp_path / "run", serial_of(what, tmp_path / "serial"))
    rounds = [
        f"{e['seconds_training']:.1f}" for e in read_journal(tmp_path / "run/journal.jsonl") if e["event"] == "round"
    ]
    print(f"\n{topology} {method}: same bits; {time.monotonic() - began:.1f} s in all; s a round: {', '.join(rounds)}")


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's own, in packing an app
def test_the_app_runs_by_itself(three: Deployment, tmp_path: Path) -> None:
    """With the trial that the app's own pyproject.toml holds."""
    out = tmp_path / "run"
    Control.of(three.federation).start(three.federation.app, {"out": str(out)})
    three.until(lambda: (out / "summary.json").is_file(), "the app to end")
    assert len([e for e in events(out) if e["event"] == "round"]) == 2
    print("\nthe app by itself: the trial of the app's own pyproject.toml, two rounds")


def test_secure_sums_over_the_deployment_have_the_serial_engine_s_bits(three: Deployment, tmp_path: Path) -> None:
    """Four messages a stage; what a site knows between two of them is on its disk."""
    what, began = experiment("fedavg", "parallel", privacy={"secure_sum": True}, measure=()), time.monotonic()
    done = over(three, what, tmp_path / "run")
    assert done.returncode == 0, done.stderr + three.log("server")[-3000:] + three.log("client0")[-3000:]
    same_bits(tmp_path / "run", serial_of(what, tmp_path / "serial"))
    rounds = [e for e in read_journal(tmp_path / "run/journal.jsonl") if e["event"] == "round"]
    print(f"\nsecure sums: same bits; {time.monotonic() - began:.1f} s; {rounds[-1]['seconds_training']:.1f} s a round")
