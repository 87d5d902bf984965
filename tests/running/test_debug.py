"""Clients that fail: by default, a simulation stops at the first failure. Its error, its traceback
and its journal name the cause.
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
from journals import refusals
from newcomer import SHAPES, at_the_server, mine
from run_bits import assert_same_bits, bits

pytestmark = pytest.mark.usefixtures("with_threads")

TO_LEAVE_OUT = 'to leave out clients that fail, set clients.failures = "tolerate"'


@pytest.mark.parametrize(
    ("clients", "debug"), [({}, False), (toys.TOLERANT, True)], ids=["by default", "in debugging"]
)
@pytest.mark.parametrize(
    ("engine", "actors", "failed"),
    [
        ("serial", "client 0", [0]),
        ("pooled", "client 0", [0]),
        ("vectorised", "clients 0, 1, 2, 3 in a stack", [0, 1, 2, 3]),
    ],
)
def test_the_error_of_a_simulation_has_the_exception_of_the_client_as_its_cause(
    engine: str,
    actors: str,
    failed: list[int],
    clients: dict[str, str],
    debug: bool,
    tmp_path: Path,
) -> None:
    """In debugging, also if the config tolerates failures."""
    experiment, line = mine(
        tmp_path, SHAPES, engine=engine, partition={"kind": "iid"}, clients=clients
    )
    message = rf"^round 1, stage 'train': {actors} failed: RuntimeError: .*"
    with pytest.raises(ClientFailed, match=message) as caught:
        run(experiment, tmp_path / "run", toys.blobs(), debug=debug)

    assert str(caught.value).endswith(f"(mine.py, line {line}, in terms); {TO_LEAVE_OUT}")
    assert caught.value.in_shell.endswith(
        f"in terms); see the traceback with --debug; {TO_LEAVE_OUT}"
    )
    error = caught.value.__cause__
    assert isinstance(error, RuntimeError)
    traceback = pytest.ExceptionInfo.from_exception(error).traceback
    assert ("mine.py", line) in [(entry.path.name, entry.lineno + 1) for entry in traceback]
    assert [event["client"] for event in refusals(tmp_path / "run")] == failed
    with pytest.raises(ClientFailed):
        resume(tmp_path / "run", toys.blobs(), debug=debug)


@pytest.mark.parametrize("engine", ["serial", "pooled"])
def test_a_tolerant_run_ends_if_it_misses_the_quorum(engine: str, tmp_path: Path) -> None:
    experiment, _ = mine(tmp_path, SHAPES, engine=engine, clients=toys.TOLERANT)
    with pytest.raises(TooFewReplies, match="0 of 4 clients") as caught:
        run(experiment, tmp_path / "run", toys.blobs())
    assert str(caught.value).endswith("; see the traceback with debug=True")
    assert caught.value.in_shell.endswith("; see the traceback with --debug")
    assert len(refusals(tmp_path / "run")) == 4


@pytest.mark.parametrize(
    ("flower", "clients", "failures"),
    [
        ({}, {}, "stop"),
        ({}, {"failures": "tolerate"}, "tolerate"),
        ({"federation": "fed"}, {}, "tolerate"),
        ({"federation": "fed"}, {"failures": "stop"}, "stop"),
    ],
)
def test_a_simulation_stops_and_a_federation_tolerates_unless_the_config_sets_it(
    flower: dict[str, str], clients: dict[str, str], failures: str, tmp_path: Path
) -> None:
    settings = resolve(toys.toy(engine="flower", flower=flower, clients=clients, base=tmp_path))
    assert settings.rules.failures == failures

    written = tomllib.loads(settings.toml)["clients"]
    unwritten = bool(flower) and failures == "tolerate"
    if unwritten:
        assert "failures" not in written, "a config that sites have accepted keeps its bytes"
    else:
        assert written["failures"] == failures

    assert resolve(from_tree(tomllib.loads(settings.toml), {}, tmp_path)).toml == settings.toml


def test_a_failure_in_the_census_stops_the_run_and_is_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpatched_end = Census.end

    def end(census: Census, *args: Any) -> Any:
        _params, _start, _result, view, _world = args
        if view.client == 2:
            raise OSError("no labels here")
        return unpatched_end(census, *args)

    monkeypatch.setattr(Census, "end", end)
    experiment = toys.toy("toy_logits", data={"public": toys.PUBLIC})
    with pytest.raises(ClientFailed, match=r"stage 'census': client 2 .*OSError"):
        run(experiment, tmp_path / "run", toys.blobs())

    (refusal,) = refusals(tmp_path / "run")
    assert (refusal["round"], refusal["client"]) == (0, 2)


def test_a_reply_that_is_not_finite_is_refused_and_does_not_stop_a_simulation(
    tmp_path: Path,
) -> None:
    """A refusal is no exception: the run continues with the other clients."""
    experiment = toys.toy(
        {"name": "toy_failing", "who": 1, "how": "nan"}, topology={"clients": 6, "sampled": 6}
    )
    result = run(experiment, tmp_path / "run", toys.blobs())
    assert [event["refused"] for event in result.history] == [0, 1, 1]


@needs_flower
def test_on_flower_a_site_sends_file_and_line_of_its_error_and_no_traceback(
    tmp_path: Path,
) -> None:
    experiment, line = mine(tmp_path, SHAPES, engine="flower")
    place = rf"\(mine\.py, line {line}, in terms\)"
    with pytest.raises(ClientFailed, match=rf"client 0 failed: .*{place}"):
        run(experiment, tmp_path / "run", toys.blobs())
    assert [event["client"] for event in refusals(tmp_path / "run")] == [0]

    tolerant = replace(experiment, clients=toys.TOLERANT)
    with pytest.raises(TooFewReplies, match=place):
        run(tolerant, tmp_path / "tolerant", toys.blobs())
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
def test_the_command_prints_one_line_and_with_debug_the_traceback(
    client: str, server: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, line = mine(tmp_path, client, server)
    (tmp_path / "mine.toml").write_text(CONFIG)
    train = ["run", str(tmp_path / "mine.toml"), "--quiet", "--out"]
    assert call([*train, str(tmp_path / "one")]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert f"(mine.py, line {line}, {text}); see the traceback with --debug" in errors
    assert (TO_LEAVE_OUT in errors) == bool(client)

    train_another = [*train, str(tmp_path / "two")]
    continue_first = ["resume", str(tmp_path / "one"), "-q"]
    for command in (train_another, continue_first):
        assert call([*command, "--debug"]) == 1
        errors = capsys.readouterr().err
        assert "Traceback (most recent call last)" in errors
        assert f'mine.py", line {line}, {text}' in errors
        assert "The above exception was the direct cause of the following exception" in errors
        assert errors.splitlines()[-1].startswith("fedstill: round 1, stage 'train': ")


def test_a_comparison_shows_the_traceback_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, line = mine(tmp_path, SHAPES)
    (tmp_path / "mine.toml").write_text(CONFIG)
    options = ["--seeds", "1", "--jobs", "1", "--quiet", "--out"]
    compare = ["compare", str(tmp_path / "mine.toml"), *options]

    assert call([*compare, str(tmp_path / "one")]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert call([*compare, str(tmp_path / "two"), "--debug"]) == 1
    assert f'mine.py", line {line}, in terms' in capsys.readouterr().err


def test_a_run_is_not_resumed_with_a_method_whose_file_was_corrected(tmp_path: Path) -> None:
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
    """Deletes a file at the end of a round."""

    def __init__(self, gate: Path, round: int) -> None:
        self.gate = gate
        self.last = round

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        if round == self.last:
            self.gate.unlink()


def test_a_run_that_failed_has_its_refusals_in_the_journal_and_can_be_continued(
    tmp_path: Path,
) -> None:
    """Its refusals leave the journal again, which then has the bits of a run without failures."""
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

    for _ in range(2):  # it fails once more, which does not make the journal longer
        failures = refusals(tmp_path / "run")
        assert {event["round"] for event in failures} == {2}
        assert [event["client"] for event in failures] == [1, 2, 3]
        for event in failures:
            assert "OSError: the network is gone (mine.py, line " in event["refused"]
        last_events = journals.read_journal(tmp_path / "run" / "journal.jsonl")[-4:]
        assert [event["client"] for event in last_events] == [0, 1, 2, 3], "the good reply too"
        with pytest.raises(TooFewReplies):
            resume(tmp_path / "run", toys.blobs())

    gate.touch()
    resume(tmp_path / "run", toys.blobs())
    assert_same_bits(bits(tmp_path / "run"), bits(tmp_path / "whole"))
    assert refusals(tmp_path / "run") == []


def test_clients_that_diverged_are_in_the_journal(tmp_path: Path) -> None:
    experiment = toys.toy(plan={"epochs": 2, "batch": 10, "lr": 1e4})
    with pytest.raises(Diverged, match="round 1"):
        run(experiment, tmp_path / "run", toys.blobs())

    reasons = [event["refused"] for event in refusals(tmp_path / "run")]
    assert len(reasons) == 4
    for reason in reasons:
        assert "norm" in reason or "not finite" in reason
