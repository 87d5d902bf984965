from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from run_journals import events

import toys
from fedstill.core.errors import ConfigError
from fedstill.report.table_files import export, export_tensorboard
from fedstill.running import runner
from fedstill.running.trackers import AboutRun


class Kept:
    """A tracker that keeps what it is given."""

    every: dict[str, list[tuple[str, float, int]]]

    def __init__(self, folder: Path) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        Kept.every[folder.name] = self.scalars

    def ready(self) -> None:
        """Always."""

    def begin(self, run: AboutRun, memo: dict[str, str], last: int) -> int:
        return last

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self.scalars += [(name, value, round) for name, value in numbers.items()]

    def end(self, how: str, summary: Mapping[str, object]) -> None:
        self.scalars.append((how, 0.0, -1))


def test_a_tracker_gets_every_number_of_a_run(finished: Path, tmp_path: Path) -> None:
    Kept.every = {}
    folders = export([finished], tmp_path / "out", Kept)
    assert [f.name for f in folders] == [
        "fedavg-seed7",
        "fedavg-seed8",
        "toy_failing-seed7",
        "toy_failing-seed8",
    ]
    taken = Kept.every["fedavg-seed7"]
    said = events(finished / "avg7")
    assert ("accuracy", said[-1]["accuracy"], 3) in taken
    assert ("class_accuracy/class 4", said[-1]["class_accuracy"][4], 3) in taken
    assert {n for name, _, n in taken if name == "accuracy"} == {0, 1, 2, 3}
    assert taken[-1][0] == "finished"


def test_a_tracker_gets_what_measures_saw(tmp_path: Path) -> None:
    Kept.every = {}
    changes = {"model": {"name": "mlp", "hidden": (8,)}, "rounds": 2, "measure_every": 1}
    runner.run(
        toys.toy(measure=["alignment", "divergence"], **changes),
        tmp_path / "run",
        data=toys.blobs(),
    )
    export([tmp_path / "run"], tmp_path / "out", Kept)
    (taken,) = Kept.every.values()
    for event in (e for e in events(tmp_path / "run") if e["event"] == "measure"):
        key, value = "divergence/mean_l2", event.get("mean_l2")
        if event["measure"] == "alignment":
            key, value = "alignment/layers/features/local", event["layers"]["features"]["local"]
        assert (key, value, event["round"]) in taken
    assert not [name for name, *_ in taken if name.endswith(("/round", "/stage"))]


def test_tensorboard_reads_what_was_written(finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, *_ = export_tensorboard([finished / "avg7"], tmp_path / "out")
    written = {
        e.step: e.value for e in EventAccumulator(str(folder)).Reload().Scalars("forgetting")
    }
    said = events(finished / "avg7")
    assert written == pytest.approx(
        {e["round"]: e["forgetting"] for e in said if e["event"] == "round"}
    )
    with pytest.raises(ConfigError, match="is not empty"):
        export_tensorboard([finished / "avg7"], tmp_path / "out")


def test_without_the_extra_it_says_how_to_get_it(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedstill\[tensorboard\]'"):
        export_tensorboard([finished], tmp_path / "out")
