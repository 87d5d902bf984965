"""Exports of finished runs to a tracker, and to TensorBoard."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from run_journals import events, measure_events, round_events

import toys
from fedstill.core.errors import ConfigError
from fedstill.report.table_files import export, export_tensorboard
from fedstill.running import runner
from fedstill.running.trackers import AboutRun


@dataclass(frozen=True)
class Scalar:
    """A number that a tracker received."""

    name: str
    value: object
    round: int


class RecordingTracker:
    """A tracker that records what it receives, by the name of its folder."""

    runs: ClassVar[dict[str, RecordingTracker]] = {}

    def __init__(self, folder: Path) -> None:
        self.scalars: list[Scalar] = []
        self.ending = ""
        self.runs[folder.name] = self

    def ready(self) -> None:
        """Always."""

    def begin(self, run: AboutRun, memo: dict[str, str], last: int) -> int:
        return last

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        assert not self.ending, "nothing comes after the end"
        for name, value in numbers.items():
            self.scalars.append(Scalar(name, value, round))

    def end(self, how: str, summary: Mapping[str, object]) -> None:
        self.ending = how


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> dict[str, RecordingTracker]:
    """The trackers of the exported runs, by name."""
    runs: dict[str, RecordingTracker] = {}
    monkeypatch.setattr(RecordingTracker, "runs", runs)
    return runs


def test_a_tracker_gets_every_number_of_a_run(
    finished: Path, tmp_path: Path, trackers: dict[str, RecordingTracker]
) -> None:
    folders = export([finished], tmp_path / "out", RecordingTracker)

    assert [folder.name for folder in folders] == [
        "fedavg-seed7",
        "fedavg-seed8",
        "toy_failing-seed7",
        "toy_failing-seed8",
    ]
    tracker = trackers["fedavg-seed7"]
    last = events(finished / "avg7")[-1]
    assert Scalar("accuracy", last["accuracy"], 3) in tracker.scalars
    assert Scalar("class_accuracy/class 4", last["class_accuracy"][4], 3) in tracker.scalars
    rounds = {scalar.round for scalar in tracker.scalars if scalar.name == "accuracy"}
    assert rounds == {0, 1, 2, 3}
    assert tracker.ending == "finished"


def test_a_tracker_gets_the_results_of_measures(
    tmp_path: Path, trackers: dict[str, RecordingTracker]
) -> None:
    folder = tmp_path / "run"
    measures = ["alignment", "divergence"]
    experiment = toys.toy(measure=measures, rounds=2, measure_every=1)
    runner.run(experiment, folder, data=toys.blobs())

    export([folder], tmp_path / "out", RecordingTracker)

    (tracker,) = trackers.values()
    for event in measure_events(folder, "alignment"):
        value = event["layers"]["features"]["local"]
        scalar = Scalar("alignment/layers/features/local", value, event["round"])
        assert scalar in tracker.scalars
    for event in measure_events(folder, "divergence"):
        scalar = Scalar("divergence/mean_l2", event["mean_l2"], event["round"])
        assert scalar in tracker.scalars

    names = {scalar.name for scalar in tracker.scalars}
    assert not [name for name in names if name.endswith(("/round", "/stage"))]


def test_tensorboard_reads_the_exported_numbers(finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, *_ = export_tensorboard([finished / "avg7"], tmp_path / "out")

    scalars = EventAccumulator(str(folder)).Reload().Scalars("forgetting")
    exported = {scalar.step: scalar.value for scalar in scalars}
    rounds = round_events(finished / "avg7")
    assert exported == pytest.approx({event["round"]: event["forgetting"] for event in rounds})

    with pytest.raises(ConfigError, match="is not empty"):
        export_tensorboard([finished / "avg7"], tmp_path / "out")


def test_without_the_extra_the_error_is_how_to_install_it(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedstill\[tensorboard\]'"):
        export_tensorboard([finished], tmp_path / "out")
