"""What holds for every registered method: it runs, learns, and resumes to the same bits after any
of its stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from all_methods import METHODS, data_of_four, four_clients_of

from fedstill.config.experiment import Experiment
from fedstill.core import descriptions, registry
from fedstill.core.errors import Interrupted
from fedstill.running.journal import read_journal, without_times
from fedstill.running.runner import resume, run
from flowers import needs_flower
from run_bits import StopAfter, assert_same_bits, bits, stopped

SLOW_LEARNERS = ("fedbabu", "glfc_local", "hiper_baseline", "hiper_temperature")
"""Methods that know too little after two rounds, and get a third one."""


def short_experiment(name: str) -> Experiment:
    """Two rounds, or as many as the method needs to learn enough."""
    experiment = four_clients_of(name)
    if experiment.rounds < 3 or name in SLOW_LEARNERS:
        return experiment
    return replace(experiment, rounds=2)


@dataclass(frozen=True)
class FinishedRun:
    """An uninterrupted run of a method."""

    method: str
    folder: Path

    @property
    def events(self) -> list[dict[str, Any]]:
        """Its journal."""
        return read_journal(self.folder / "journal.jsonl")

    @property
    def stages(self) -> int:
        """In how many stages clients acted."""
        stages = {(e["round"], e["stage"]) for e in self.events if e["event"] == "client"}
        return len(stages)


@pytest.fixture(scope="module", params=METHODS)
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    """A method's run by three workers, with threads, however small the networks."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSTILL_WORKERS", "3")
        patch.setattr("fedstill.engines.pooled.LIGHT_FLOPS", 0.0)
        experiment = replace(short_experiment(request.param), engine="pooled")
        run(experiment, folder, data=data_of_four())
    return FinishedRun(request.param, folder)


def test_a_method_learns_and_refuses_no_client(finished: FinishedRun) -> None:
    """Chance is 0.2."""
    events = finished.events

    assert not [event for event in events if event["event"] == "client" and "refused" in event]
    last = [event for event in events if event["event"] == "round"][-1]
    measures = ("query_average_accuracy", "accuracy", "personal_accuracy")
    accuracies = [last[name] for name in measures if last.get(name) is not None]
    assert accuracies[0] > 0.4


def test_the_serial_engine_resumed_after_every_stage_gives_the_same_bits(
    finished: FinishedRun, tmp_path: Path
) -> None:
    """Stopped after every single stage, and resumed from what the resumed run before had
    written.
    """
    experiment = replace(short_experiment(finished.method), engine="serial")
    folder = stopped(experiment, tmp_path / "run", 1, data_of_four())
    stops = 1
    while True:
        try:
            resume(folder, data_of_four(), watch=StopAfter(1))
            break
        except Interrupted:
            stops += 1

    assert stops == finished.stages
    ours = bits(folder)
    expected = bits(finished.folder)
    assert ours.pop("config.toml") != expected.pop("config.toml"), "they name the engine"
    assert_same_bits(ours, expected)


@needs_flower
def test_flower_resumed_in_mid_run_gives_the_same_bits(
    finished: FinishedRun, tmp_path: Path
) -> None:
    """Every message is serialised; the second half runs on new nodes, which find what they remember
    on their disks.
    """
    experiment = replace(short_experiment(finished.method), engine="flower")
    folder = tmp_path / "run"
    stopped(experiment, folder, max(1, finished.stages // 2), data_of_four())
    resume(folder, data=data_of_four())

    model = (folder / "model.safetensors").read_bytes()
    assert model == (finished.folder / "model.safetensors").read_bytes()
    events = read_journal(folder / "journal.jsonl")
    assert without_times(events) == without_times(finished.events)


def test_its_summary_and_fields_are_documented(finished: FinishedRun) -> None:
    entry = registry.lookup("method", finished.method)
    assert descriptions.summary(entry).endswith(".")
    module = __import__(entry.target.__module__, fromlist=["__doc__"])
    assert "Source:" in module.__doc__
