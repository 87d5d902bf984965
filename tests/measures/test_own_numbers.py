"""The numbers of a user's measure are in the frame, trackers, tables and the page of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

import toys
from fedstill.cli.run import _show as show
from fedstill.report.comparison import Comparison
from fedstill.report.page import Report, page
from fedstill.report.rounds import own_measures
from fedstill.report.summary import own_metrics
from fedstill.report.table_files import write_tables
from fedstill.report.terminal import comparison_table
from fedstill.running.frame import load_runs
from fedstill.running.journal import read_journal
from fedstill.running.result import Result
from fedstill.running.runner import run
from pages import as_html, figures_in

MEASURE = '''
from fedstill.core.registry import register
from fedstill.measures.base import Measure


@register("measure", "mine")
class Mine(Measure):
    """Numbers that the server sees, one with the name of the run's own, and one of clients."""

    gives = ("weight",)

    def look(self, result, context):
        return {"deep": {"er": 12345.678 * result.stage.round}, "accuracy": 0.5, "text": "none"}

    def at_client(self, visit):
        return {"weight": 0.25}

    def of_round(self, reports):
        weights = [event["weight"] for event in reports.clients if "weight" in event]
        if not weights:
            return {}
        return {"mean_weight": sum(weights) / len(weights)}
'''

NAMES = {"mine.py/deep/er", "mean_weight"}


class MemoryTracker:
    """A tracker that keeps the numbers of each round."""

    def __init__(self) -> None:
        self.rounds: dict[int, Mapping[str, float]] = {}

    def ready(self) -> None:
        """Always."""

    def begin(self, run: object, memo: object, last: int) -> int:
        return last

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self.rounds[round] = dict(numbers)

    def end(self, how: str, summary: object) -> None:
        """Nothing."""


@dataclass(frozen=True)
class TrackedRuns:
    """A folder with two runs, and the tracker of the one with the measure."""

    folder: Path
    tracker: MemoryTracker


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> TrackedRuns:
    """Runs of two methods, one of which has the measure."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "mine.py").write_text(MEASURE)
    tracker = MemoryTracker()
    measure = (str(folder / "mine.py"),)
    run(toys.toy(measure=measure), folder / "fedavg", toys.blobs(), track=tracker)
    run(toys.toy("fedntd", measure=()), folder / "fedntd", toys.blobs())
    return TrackedRuns(folder, tracker)


def test_trackers_and_the_frame_have_the_numbers(runs: TrackedRuns) -> None:
    rounds = runs.tracker.rounds
    measured_rounds = {index for index, numbers in rounds.items() if numbers.keys() >= NAMES}
    assert measured_rounds == {2, 3}

    frame = load_runs(runs.folder, metrics=["mine.py/deep/er", "mean_weight"])
    of_rounds = frame[frame["stage"].isna() & frame["round"].notna()]
    for index, numbers in rounds.items():
        rows = of_rounds[of_rounds["round"] == index]
        values = dict(zip(rows["metric"], rows["value"], strict=True))
        assert values == {name: numbers[name] for name in NAMES & numbers.keys()}


def test_tables_have_a_column_for_each(runs: TrackedRuns, tmp_path: Path) -> None:
    folder = runs.folder
    comparison = Comparison.of(folder)
    row = comparison.table().set_index("group").loc["fedavg"]
    assert row["mean_weight"] == 0.25
    assert row["mine.py/deep/er"] == pytest.approx(3 * 12345.678)
    assert "mine.py/text" not in row.index
    assert "mine.py/seconds" not in row.index

    write_tables(comparison.groups, tmp_path)
    head, *_ = (tmp_path / "results.csv").read_text().splitlines()
    assert all(f"{name} [latest] mean" in head for name in NAMES)
    console = Console(width=300)
    with console.capture() as capture:
        console.print(comparison_table(comparison.groups))
    assert "37037" in capture.get()
    assert "0.250" in capture.get()


def test_the_closing_table_of_a_run_has_the_latest_of_each(
    runs: TrackedRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs.folder
    assert show(Result.of(folder / "fedavg"), has_queries_each_round=False) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    last_cells = {row[0]: row[-1] for row in rows if row}
    assert last_cells["mine.py/deep/er"] == "37037"
    assert last_cells["mean_weight"] == "0.250"

    show(Result.of(folder / "fedntd"), has_queries_each_round=False)
    assert not any(name in capsys.readouterr().out for name in NAMES)


def test_the_page_draws_each_by_round(runs: TrackedRuns) -> None:
    folder = runs.folder
    text = page(Comparison.of(folder).groups)
    assert 'id="own_measures"' in text
    without = page(Comparison.of(folder / "fedntd").groups)
    assert 'id="own_measures"' not in without


def test_a_number_named_as_the_runs_own_is_drawn_for_its_measure_alone(
    runs: TrackedRuns,
) -> None:
    folder = runs.folder
    compared = Comparison.of(folder).groups
    section = as_html(own_measures(Report(compared)))
    figures = figures_in(section)
    assert len(figures) == len(own_metrics(compared))
    for figure in figures:
        assert [trace["name"] for trace in figure["data"]] == ["fedavg"]
    assert "mine.py/accuracy" in own_metrics(compared)


def test_what_is_listed_of_measures_is_in_no_table_of_rounds(runs: TrackedRuns) -> None:
    folder = runs.folder
    result = Result.of(folder / "fedavg")
    assert not [name for name in result.rounds().columns if name.startswith("of_measures")]
    events = read_journal(folder / "fedntd/journal.jsonl")
    assert not [event for event in events if "of_measures" in event]
