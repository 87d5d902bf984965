"""Clients that fail: a simulation stops at the first, by default; and what a run that failed leaves
behind.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.cli import call
from fedstill.config.experiment import from_tree
from fedstill.config.resolve import resolve
from fedstill.core.errors import (
    ClientFailed,
    ConfigError,
    CorruptFile,
    Diverged,
    TooFewReplies,
    UntrustedCode,
)
from fedstill.core.label_counts import Census
from fedstill.running import journal as journals
from fedstill.running.recording import Quiet
from fedstill.running.runner import resume, run
from flowers import needs_flower
from newcomer import SHAPES, at_the_server, mine, refusals
from run_bits import assert_same_bits, bits

pytestmark = pytest.mark.usefixtures("with_threads")

TO_LEAVE_OUT = 'to leave out clients that fail, set clients.failures = "tolerate"'


@pytest.mark.parametrize("tolerant", [False, True])
@pytest.mark.parametrize(
    ("engine", "who", "failed"),
    [
        ("serial", "client 0", [0]),
        ("pooled", "client 0", [0]),
        ("vectorised", "clients 0, 1, 2, 3 in a stack", [0, 1, 2, 3]),
    ],
)
def test_a_simulation_ends_with_the_clients_own_exception_chained(
    engine: str, who: str, failed: list[int], tolerant: bool, tmp_path: Path
) -> None:
    """By default, and if it is debugged whatever is tolerated; nobody has to look into the
    journal.
    """
    clients = toys.TOLERANT if tolerant else {}
    experiment, line = mine(
        tmp_path, SHAPES, engine=engine, partition={"kind": "iid"}, clients=clients
    )
    with pytest.raises(
        ClientFailed, match=rf"^round 1, stage 'train': {who} failed: RuntimeError: .*"
    ) as caught:
        run(experiment, tmp_path / "run", toys.blobs(), debug=tolerant)
    assert str(caught.value).endswith(f"(mine.py, line {line}, in terms); {TO_LEAVE_OUT}")
    assert caught.value.in_shell.endswith(
        f"in terms); see the traceback with --debug; {TO_LEAVE_OUT}"
    )
    error = caught.value.__cause__
    assert isinstance(error, RuntimeError)
    places = [
        (entry.path.name, entry.lineno + 1)
        for entry in pytest.ExceptionInfo.from_exception(error).traceback
    ]
    assert ("mine.py", line) in places
    assert [e["client"] for e in refusals(tmp_path / "run")] == failed
    with pytest.raises(ClientFailed):
        resume(tmp_path / "run", toys.blobs(), debug=tolerant)


@pytest.mark.parametrize("engine", ["serial", "pooled"])
def test_who_asks_for_tolerance_goes_on_to_the_quorum(engine: str, tmp_path: Path) -> None:
    experiment, _ = mine(tmp_path, SHAPES, engine=engine, clients=toys.TOLERANT)
    with pytest.raises(TooFewReplies, match="0 of 4 clients") as caught:
        run(experiment, tmp_path / "run", toys.blobs())
    assert str(caught.value).endswith("; see the traceback with debug=True")
    assert caught.value.in_shell.endswith("; see the traceback with --debug")
    assert len(refusals(tmp_path / "run")) == 4


@pytest.mark.parametrize(
    ("flower", "said", "comes_to"),
    [
        ({}, {}, "stop"),
        ({}, {"failures": "tolerate"}, "tolerate"),
        ({"federation": "fed"}, {}, "tolerate"),
        ({"federation": "fed"}, {"failures": "stop"}, "stop"),
    ],
)
def test_a_simulation_stops_and_a_federation_tolerates_unless_the_config_says_otherwise(
    flower: dict[str, str], said: dict[str, str], comes_to: str, tmp_path: Path
) -> None:
    settings = resolve(toys.toy(engine="flower", flower=flower, clients=said, base=tmp_path))
    assert settings.rules.failures == comes_to
    written = tomllib.loads(settings.toml)["clients"]
    unwritten = bool(flower) and comes_to == "tolerate"
    assert written.get("failures") == (None if unwritten else comes_to), (
        "what sites have accepted keeps its bytes"
    )
    assert resolve(from_tree(tomllib.loads(settings.toml), {}, tmp_path)).toml == settings.toml


def test_a_failure_in_the_census_stops_the_run_and_is_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(self: Census, params: Any, start: Any, result: Any, view: Any, world: Any) -> Any:
        if view.client == 2:
            raise OSError("no labels here")
        return whole(self, params, start, result, view, world)

    whole = Census.end
    monkeypatch.setattr(Census, "end", end)
    with pytest.raises(ClientFailed, match=r"stage 'census': client 2 .*OSError"):
        run(toys.toy("toy_logits", data={"public": toys.PUBLIC}), tmp_path / "run", toys.blobs())
    assert [(e["round"], e["client"]) for e in refusals(tmp_path / "run")] == [(0, 2)]


def test_what_is_not_a_number_is_refused_and_stops_no_simulation(tmp_path: Path) -> None:
    """A refusal is no exception: the others go on, and the end of the run says who was left out."""
    nan = toys.toy(
        {"name": "toy_failing", "who": 1, "how": "nan"}, topology={"clients": 6, "sampled": 6}
    )
    done = run(nan, tmp_path / "run", toys.blobs())
    assert [e["refused"] for e in done.history] == [0, 1, 1]


@needs_flower
def test_on_flower_the_reason_that_a_site_gives_has_file_and_line_and_its_traceback_stays_there(
    tmp_path: Path,
) -> None:
    experiment, line = mine(tmp_path, SHAPES, engine="flower")
    with pytest.raises(
        ClientFailed, match=rf"client 0 failed: .*\(mine\.py, line {line}, in terms\)"
    ):
        run(experiment, tmp_path / "run", toys.blobs())
    assert [e["client"] for e in refusals(tmp_path / "run")] == [0]
    with pytest.raises(TooFewReplies, match=rf"\(mine\.py, line {line}, in terms\)"):
        run(replace(experiment, clients=toys.TOLERANT), tmp_path / "tolerant", toys.blobs())
    assert len(refusals(tmp_path / "tolerant")) == 4
    with pytest.raises(ConfigError, match="engine = 'serial'"):
        run(experiment, tmp_path / "again", toys.blobs(), debug=True)
    assert not (tmp_path / "again").exists()


CONFIG = """
rounds = 1
method = "mine.py"
measure = []
reuse = false
model = "logistic"

[data]
name = "digits"
train_size = 200
test_size = 50

[topology]
clients = 4

[plan]
epochs = 1
"""


@pytest.mark.parametrize(
    ("client", "server", "text"),
    [
        (SHAPES, "", "in terms"),
        ("", at_the_server("aggregate", "return state.extra['x']"), "in aggregate"),
    ],
)
def test_the_command_says_one_line_and_with_debug_the_traceback(
    client: str, server: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, line = mine(tmp_path, client, server)
    (tmp_path / "mine.toml").write_text(CONFIG)
    run_it = ["run", str(tmp_path / "mine.toml"), "--quiet", "--out"]
    assert call([*run_it, str(tmp_path / "one")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"(mine.py, line {line}, {text}); see the traceback with --debug" in said
    assert (TO_LEAVE_OUT in said) == bool(client)
    for command in (
        [*run_it, str(tmp_path / "two"), "--debug"],
        ["resume", str(tmp_path / "one"), "-q", "--debug"],
    ):
        assert call(command) == 1
        said = capsys.readouterr().err
        assert "Traceback (most recent call last)" in said
        assert f'mine.py", line {line}, {text}' in said
        assert "The above exception was the direct cause of the following exception" in said
        assert said.splitlines()[-1].startswith("fedstill: round 1, stage 'train': ")


def test_a_comparison_shows_the_traceback_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, line = mine(tmp_path, SHAPES)
    (tmp_path / "mine.toml").write_text(CONFIG)
    compare = [
        "compare",
        str(tmp_path / "mine.toml"),
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--quiet",
        "--out",
    ]
    assert call([*compare, str(tmp_path / "one")]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert call([*compare, str(tmp_path / "two"), "--debug"]) == 1
    assert f'mine.py", line {line}, in terms' in capsys.readouterr().err


def test_a_file_that_was_mended_is_another_run(tmp_path: Path) -> None:
    experiment, _ = mine(tmp_path, SHAPES)
    with pytest.raises(ClientFailed):
        run(experiment, tmp_path / "run", toys.blobs())
    path = tmp_path / "mine.py"
    path.write_text(path.read_text() + "# mended\n")
    with pytest.raises(UntrustedCode, match=r"mine\.py"):
        resume(tmp_path / "run", toys.blobs())
    with pytest.raises(CorruptFile, match=r"mine\.py"):
        resume(tmp_path / "run", toys.blobs(), trust_code=True)


class ClosesAfter(Quiet):
    """Takes a file away when a round is done."""

    def __init__(self, gate: Path, round: int) -> None:
        self.gate, self.last = gate, round

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        if round == self.last:
            self.gate.unlink()


def test_a_run_that_failed_has_its_refusals_in_the_journal_and_goes_on_to_the_same_bits(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    client = f"""
    def begin(self, payload, client_state, view, world):
        from pathlib import Path

        if view.client > 0 and not Path({str(gate)!r}).exists():
            raise OSError("the network is gone")
        return TrainingStart(params=payload.params)
    """
    experiment, _ = mine(
        tmp_path, client, measure=("local",), measure_every=1, clients=toys.TOLERANT
    )
    gate.touch()
    run(experiment, tmp_path / "whole", toys.blobs())
    with pytest.raises(TooFewReplies, match="round 2"):
        run(experiment, tmp_path / "run", toys.blobs(), watch=ClosesAfter(gate, 1))
    for _ in range(2):  # it fails once more, and the journal does not grow by that
        gone = refusals(tmp_path / "run")
        assert [(e["round"], e["client"]) for e in gone] == [(2, 1), (2, 2), (2, 3)]
        assert all("OSError: the network is gone (mine.py, line " in e["refused"] for e in gone)
        last = journals.read_journal(tmp_path / "run" / "journal.jsonl")[-4:]
        assert [e["client"] for e in last] == [0, 1, 2, 3], "who replied well stands there too"
        with pytest.raises(TooFewReplies):
            resume(tmp_path / "run", toys.blobs())
    gate.touch()
    resume(tmp_path / "run", toys.blobs())
    assert_same_bits(bits(tmp_path / "run"), bits(tmp_path / "whole"))
    assert refusals(tmp_path / "run") == []


def test_who_diverged_is_in_the_journal(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="round 1"):
        run(
            toys.toy(plan={"epochs": 2, "batch": 10, "lr": 1e4}),
            tmp_path / "run",
            data=toys.blobs(),
        )
    gone = refusals(tmp_path / "run")
    assert len(gone) == 4
    assert all("norm" in e["refused"] or "not finite" in e["refused"] for e in gone)
