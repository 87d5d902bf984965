"""Results and comparisons in Python: data frames with documented columns, short texts, tables for
notebooks.
"""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pandas import DataFrame
from torch import Tensor

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ConfigError
from fedstill.data.sources import from_clients
from fedstill.metrics import forgetting
from fedstill.report.comparison import Comparison
from fedstill.report.summary import COLUMNS
from fedstill.running.result import MOST_CLASSES, Result, forgotten_table, notebook_table, shaded
from fedstill.running.runner import run
from fedstill.running.runs import groups
from journals import journal_events

ROOT = Path(__file__).parents[2]


@pytest.fixture
def result(finished: Path) -> Result:
    """The result of fedavg, seed 7."""
    return Result.of(finished / "avg7")


def percent(share: float) -> str:
    """A share as a notebook shows it."""
    return f"{100 * share:.1f} %"


def documented_columns(heading: str) -> list[str]:
    """The columns that the page documents below a heading.

    A name with a placeholder in capitals stands for many columns.
    """
    page = (ROOT / "docs" / "use_the_model.md").read_text()
    section = page.partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    first_cells = [row.split("|")[1] for row in rows]
    return re.findall(r"`([^`]+)`", " ".join(first_cells))


def assert_documented(frame: DataFrame, heading: str) -> None:
    """The page documents all columns of a data frame."""
    names = [re.escape(name) for name in documented_columns(heading)]
    patterns = [re.sub(r"[A-Z]+", ".+", name) for name in names]
    documented = re.compile("|".join(patterns))
    assert [column for column in frame.columns if not documented.fullmatch(column)] == []


def assert_result_documented(result: Result) -> None:
    """The page documents all columns of a result's data frames."""
    assert_documented(result.rounds(), "The columns of `result.rounds()`")
    assert_documented(result.clients(), "The columns of `result.clients()`")


def test_each_round_is_a_row_and_each_number_a_column(result: Result) -> None:
    frame = result.rounds()
    assert frame["round"].tolist() == [1, 2, 3]
    for row, event in enumerate(result.history):
        assert frame["accuracy"][row] == event["accuracy"]
        by_class = [frame[f"class_accuracy.{name}"][row] for name in result.classes]
        assert by_class == event["class_accuracy"]

    is_missing = frame["in_local_accuracy"].isna()
    assert is_missing.tolist() == [True, False, False], "measured in rounds 2 and 3"
    assert {str(kind) for kind in frame.dtypes} <= {"int64", "float64"}
    assert_documented(frame, "The columns of `result.rounds()`")


def test_each_client_of_a_stage_is_a_row_with_the_reason_of_a_refusal(finished: Path) -> None:
    result = Result.of(finished / "deeper" / "failing7")
    clients = journal_events(result.directory, event="client")

    frame = result.clients()

    assert frame["client"].tolist() == [event["client"] for event in clients]
    assert frame["refused"].tolist() == [event.get("refused", "") for event in clients]
    assert (frame["refused"] != "").any()
    assert frame["loss.ce"].isna().tolist() == ["refused" in event for event in clients]
    by_class = [name for name in frame.columns if name.startswith("correct_by_class.")]
    assert by_class == [f"correct_by_class.{name}" for name in result.classes]
    assert_documented(frame, "The columns of `result.clients()`")


MEASURES = {
    "fedmd": ("local", "private_public"),
    "fedavg": ("local", "epochs", "personal"),
    "ensemble": ("local",),
    "qkt": ("local",),
}
"""Measures whose columns are examined, by method."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qkt", marks=pytest.mark.uses("querying")),
        pytest.param("ensemble", marks=pytest.mark.uses("querying")),
        "fedmd",
        "fedavg",
    ],
)
def test_columns_of_other_methods_are_documented_too(name: str, tmp_path: Path) -> None:
    values = {**toys.suited(name), "measure": MEASURES[name], "measure_every": 1}
    result = run(toys.toy(name, **values), tmp_path / "run", data=toys.blobs())
    assert_result_documented(result)
    if name == "qkt":
        transfers = result.clients().query("name == 'transfer'")
        queries = transfers["query"].dropna()
        assert len(queries)
        assert queries.str.fullmatch(r"\d").all()


def test_columns_of_a_stream_of_tasks_are_documented_too(tmp_path: Path) -> None:
    experiment = toys.toy(rounds=2, stream={"kind": "classes", "tasks": 2})
    assert_result_documented(run(experiment, tmp_path / "run", data=toys.blobs()))


def test_columns_of_contributions_are_documented_too(tmp_path: Path) -> None:
    experiment = toys.toy("fd", rounds=1, measure=("contributions",), measure_every=1)
    result = run(experiment, tmp_path / "run", data=toys.blobs())
    assert_result_documented(result)
    assert f"correct_after.{result.classes[-1]}" in result.clients().columns


def client_data(client: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A client's training and test examples."""
    examples = toys.blobs(seed=client, size=60).train
    train = (examples.values[:40], examples.labels[:40])
    test = (examples.values[40:], examples.labels[40:])
    return train, test


def test_columns_of_clients_with_their_own_tests_are_documented_too(tmp_path: Path) -> None:
    data = from_clients("own", [client_data(0), client_data(1)])
    experiment = Experiment(method="local_only", rounds=1, model="logistic", measure=())
    assert_result_documented(run(experiment, tmp_path / "run", data=data))


@pytest.mark.uses("querying")
def test_columns_of_queries_raised_in_a_run_are_documented_too(tmp_path: Path) -> None:
    assert_result_documented(run(toys.asking_again(), tmp_path / "run", data=toys.blobs()))


def test_a_result_is_one_short_line(result: Result) -> None:
    assert repr(result) == (
        f"<Result: fedavg on blobs, seed 7: accuracy {percent(result.accuracy)}, "
        f"forgetting {percent(result.forgetting)}; 3 rounds, in {result.directory}>"
    )


class StrictTable(HTMLParser):
    """The cells of a table in HTML, of which each tag is closed and none executes code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"div", "b", "br", "table", "thead", "tbody", "tr", "th", "td"}
        assert {name for name, _ in attrs} <= {"style"}
        if tag != "br":
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


def test_a_notebook_shows_how_much_each_class_was_forgotten(result: Result) -> None:
    cells = StrictTable(result._repr_html_()).cells
    rows = [cells[start : start + 4] for start in range(0, len(cells), 4)]
    assert [row[0] for row in rows] == list(result.classes)
    for label, row in enumerate(rows):
        history = [[event["class_accuracy"][label]] for event in result.history]
        assert row[1] == percent(history[-1][0])
        assert row[3] == percent(forgetting(history))


def test_of_many_classes_the_most_forgotten_are_shown_and_names_are_escaped() -> None:
    classes = [f"<b{number}>" for number in range(100)]
    accuracies = [[1.0] * 100, [number / 100 for number in range(100)]]
    history = []
    for number, row in enumerate(accuracies, start=1):
        history.append({"event": "round", "round": number, "class_accuracy": row})

    text = forgotten_table(classes, history)

    assert StrictTable(text).cells[::4] == classes[:MOST_CLASSES]
    assert "of 100 classes" in text
    unmeasured = {**history[0], "class_accuracy": [None] * 100}
    assert forgotten_table(classes, [unmeasured]) == ""
    assert "background" not in notebook_table(["a", "b"], [["x", shaded(float("nan"))]])


@pytest.fixture(scope="module")
def personal_result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The result of a run with a model for each client and no global one."""
    experiment = toys.toy("local_only", rounds=1, topology={"clients": 6})
    return run(experiment, tmp_path_factory.mktemp("personal") / "run", data=toys.blobs())


def test_a_result_with_a_model_for_each_client_begins_with_the_clients_accuracy(
    personal_result: Result,
) -> None:
    result = personal_result
    accuracy = percent(result.summary["personal_accuracy"])
    assert repr(result) == (
        f"<Result: local_only on blobs, seed 7: for the clients {accuracy}, "
        f"forgetting at clients 0.0 %; 1 round, in {result.directory}>"
    )
    by_class = result.history[-1]["personal_class_accuracy"]
    assert StrictTable(result._repr_html_()).cells[1::4] == list(map(percent, by_class))
    assert result.rounds()["accuracy"].isna().all()


def test_a_comparison_has_columns_of_the_clients_accuracy(personal_result: Result) -> None:
    comparison = Comparison.of(personal_result)
    accuracies = comparison.table()["personal_accuracy"]
    assert accuracies.tolist() == [personal_result.summary["personal_accuracy"]]
    assert "for the clients [%]" in repr(comparison)
    assert "time [s]" in repr(comparison)


def test_numbers_that_were_not_measured_are_dashes(personal_result: Result) -> None:
    summary = dict(personal_result.summary)
    summary["personal_accuracy"] = None
    summary["personal_forgetting"] = None
    unmeasured = replace(personal_result, summary=summary)
    assert "accuracy –, forgetting –" in repr(unmeasured)
    assert StrictTable(replace(unmeasured, history=[])._repr_html_()).cells == []


def test_a_comparison_is_a_table_of_means_over_seeds(finished: Path) -> None:
    comparison = Comparison.of(finished)
    table = comparison.table()
    runs = comparison.runs()

    assert table["group"].tolist() == [group.label for group in groups([finished])]
    assert table["seeds"].tolist() == [2, 2]
    assert sorted(runs["seed"]) == [7, 7, 8, 8]
    for row in table.itertuples():
        accuracies = runs[runs["group"] == row.group]["accuracy"]
        assert row.accuracy == pytest.approx(accuracies.mean())
        assert row.accuracy_std == pytest.approx(accuracies.std())

    means = {column.key for column in COLUMNS}
    spreads = {f"{key}_std" for key in means}
    assert set(table.columns) <= means | spreads | {"group", "seeds", "finished"}


def test_a_comparison_of_single_runs_has_no_spread(finished: Path) -> None:
    result = Result.of(finished / "avg7")
    table = Comparison.of(result, finished / "deeper" / "failing8").table()
    assert table["seeds"].tolist() == [1, 1]
    assert table["accuracy_std"].isna().all()


def test_a_comparison_of_a_directory_that_does_not_exist_is_refused(finished: Path) -> None:
    with pytest.raises(ConfigError, match="there is no directory"):
        Comparison.of(finished / "nowhere")


def test_a_comparison_is_printed_as_the_command_prints_it(finished: Path) -> None:
    heading, *rows = repr(Comparison.of(finished)).splitlines()
    assert heading.split()[:3] == ["accuracy,", "last", "[%]"]
    assert [row.split()[0].rstrip(",") for row in rows] == ["fedavg", "toy_failing"]


def test_a_notebook_shows_a_comparison_by_class(finished: Path) -> None:
    comparison = Comparison.of(finished)
    averaging, failing = comparison.groups
    cells = StrictTable(comparison._repr_html_()).cells
    assert cells[0] == "fedavg"

    width = 1 + toys.CLASSES
    assert cells[-width] == failing.label
    name, *forgotten = cells[-2 * width : -width]
    assert name == "fedavg"
    for label in range(toys.CLASSES):
        by_seed = []
        for seed_run in averaging.runs:
            history = [[event["class_accuracy"][label]] for event in seed_run.rounds]
            by_seed.append(forgetting(history))
        assert forgotten[label] == percent(sum(by_seed) / 2)


def test_a_comparison_without_runs_is_empty() -> None:
    assert repr(Comparison([])) == "<Comparison of 0 runs>"
    assert StrictTable(Comparison([])._repr_html_()).cells == []
