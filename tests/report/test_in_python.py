"""Results and comparisons in Python: data frames with documented columns, short texts, tables for
notebooks.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
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

ROOT = Path(__file__).parents[2]


@pytest.fixture
def result(finished: Path) -> Result:
    return Result.of(finished / "avg7")


def documented(heading: str) -> list[str]:
    """The columns that the page documents below a heading; one with a placeholder in capitals
    stands for many.
    """
    text = (
        (ROOT / "docs" / "use_the_model.md")
        .read_text()
        .partition(f"\n### {heading}\n")[2]
        .partition("\n#")[0]
    )
    return re.findall(
        r"`([^`]+)`",
        " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `")),
    )


def unknown(columns: list[str], known: list[str]) -> list[str]:
    patterns = [re.compile(re.sub(r"[A-Z]+", ".+", re.escape(name))) for name in known]
    return [c for c in columns if not any(p.fullmatch(c) for p in patterns)]


def test_rounds_have_a_row_each_and_a_column_for_each_number(result: Result) -> None:
    frame = result.rounds()
    assert frame["round"].tolist() == [1, 2, 3]
    for at, event in enumerate(result.history):
        assert frame["accuracy"][at] == event["accuracy"]
        by_class = [frame[f"class_accuracy.{name}"][at] for name in result.classes]
        assert by_class == event["class_accuracy"]
    assert frame["in_local_accuracy"].isna().tolist() == [True, False, False], (
        "measured in rounds 2 and 3"
    )
    assert {str(kind) for kind in frame.dtypes} <= {"int64", "float64"}
    assert not unknown(list(frame.columns), documented("The columns of `result.rounds()`"))


def test_clients_have_a_row_for_each_stage_and_say_who_was_refused(finished: Path) -> None:
    result = Result.of(finished / "deeper" / "failing7")
    frame = result.clients()
    events = [
        json.loads(line) for line in (result.directory / "journal.jsonl").read_text().splitlines()
    ]
    events = [e for e in events if e["event"] == "client"]
    assert frame["client"].tolist() == [e["client"] for e in events]
    assert frame["refused"].tolist() == [e.get("refused", "") for e in events]
    assert (frame["refused"] != "").any()
    assert frame["loss.ce"].isna().tolist() == ["refused" in e for e in events]
    named = [c for c in frame.columns if c.startswith("correct_by_class.")]
    assert named == [f"correct_by_class.{name}" for name in result.classes]
    assert not unknown(list(frame.columns), documented("The columns of `result.clients()`"))


AMONG_PEERS = [
    pytest.param(name, marks=pytest.mark.uses("querying")) for name in ("qkt", "ensemble")
]

OTHERS = {"fedmd": ("local", "private_public"), "fedavg": ("local", "epochs", "personal")}
"""Measures whose fields are looked at."""


@pytest.mark.parametrize("name", [*AMONG_PEERS, "fedmd", "fedavg"])
def test_columns_of_other_methods_are_documented_too(name: str, tmp_path: Path) -> None:
    what = toys.toy(
        name,
        **toys.suited(name),
        measure=("local", "private_public", "epochs")[: 2 if name == "fedmd" else 1],
    )
    result = run(replace(what, measure_every=1), tmp_path / "run", data=toys.blobs())
    assert not unknown(
        list(result.rounds().columns), documented("The columns of `result.rounds()`")
    )
    assert not unknown(
        list(result.clients().columns), documented("The columns of `result.clients()`")
    )
    if name == "qkt":
        asked = result.clients().query("name == 'transfer'")["query"].dropna()
        assert len(asked)
        assert asked.str.fullmatch(r"\d").all()


def halves(client: int) -> list[tuple[Tensor, Tensor]]:
    """A client's training and test examples."""
    some = toys.blobs(seed=client, size=60).train
    return [(some.values[:40], some.labels[:40]), (some.values[40:], some.labels[40:])]


SETTINGS = {
    "tasks": toys.toy(rounds=2, stream={"kind": "classes", "tasks": 2}),
    "contributions": toys.toy("fd", rounds=1, measure=("contributions",), measure_every=1),
    "own tests": Experiment(method="local_only", rounds=1, model="logistic", measure=()),
}


RAISED_QUERIES = pytest.param("raised queries", marks=pytest.mark.uses("querying"))


@pytest.mark.parametrize("setting", [*SETTINGS, RAISED_QUERIES])
def test_so_are_columns_of_other_settings(setting: str, tmp_path: Path) -> None:
    own = from_clients("own", [(halves(c)[0], halves(c)[1]) for c in range(2)])
    experiment = SETTINGS.get(setting) or toys.asking_again()
    data = toys.blobs()
    if setting == "own tests":
        data = own
    result = run(experiment, tmp_path / "run", data=data)
    for frame, heading in (
        (result.rounds(), "result.rounds()"),
        (result.clients(), "result.clients()"),
    ):
        assert not unknown(list(frame.columns), documented(f"The columns of `{heading}`"))
    if setting == "contributions":
        assert f"correct_after.{result.classes[-1]}" in result.clients().columns


def test_a_result_is_one_short_line(result: Result) -> None:
    said = repr(result)
    assert said == (
        f"<Result: fedavg on blobs, seed 7: accuracy {100 * result.accuracy:.1f} %, "
        f"forgetting {100 * result.forgetting:.1f} %; 3 rounds, in {result.directory}>"
    )


class Strict(HTMLParser):
    """Counts cells; every tag is closed, and none runs code."""

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


def test_a_result_shows_what_each_class_lost_in_a_notebook(result: Result) -> None:
    cells = Strict(result._repr_html_()).cells
    rows = [cells[i : i + 4] for i in range(0, len(cells), 4)]
    assert [row[0] for row in rows] == list(result.classes)
    for c, row in enumerate(rows):
        history = [[event["class_accuracy"][c]] for event in result.history]
        assert row[3] == f"{100 * forgetting(history):.1f} %"
        assert row[1] == f"{100 * history[-1][0]:.1f} %"


def test_names_are_escaped_and_of_many_classes_the_most_forgotten_are_shown() -> None:
    classes = [f"<b{c}>" for c in range(100)]
    rows = [[1.0] * 100, [c / 100 for c in range(100)]]
    history = [
        {"event": "round", "round": number, "class_accuracy": row}
        for number, row in enumerate(rows, 1)
    ]
    text = forgotten_table(classes, history)
    cells = Strict(text).cells
    assert cells[::4] == [f"<b{c}>" for c in range(MOST_CLASSES)]
    assert "of 100 classes" in text
    assert forgotten_table(classes, [{**history[0], "class_accuracy": [None] * 100}]) == ""
    assert "background" not in notebook_table(["a", "b"], [["x", shaded(float("nan"))]])


def test_a_result_whose_answer_is_each_clients_model_says_that_first(tmp_path: Path) -> None:
    result = run(
        toys.toy("local_only", rounds=1, topology={"clients": 6}),
        tmp_path / "run",
        data=toys.blobs(),
    )
    mine = (
        f"for the clients {100 * result.summary['personal_accuracy']:.1f} %, forgetting at clients "
        "0.0 %"
    )
    assert (
        repr(result)
        == f"<Result: local_only on blobs, seed 7: {mine}; 1 round, in {result.directory}>"
    )
    cells = Strict(result._repr_html_()).cells
    by_class = result.history[-1]["personal_class_accuracy"]
    assert cells[1::4] == [f"{100 * v:.1f} %" for v in by_class]
    assert result.rounds()["accuracy"].isna().all()
    compared = Comparison.of(result)
    assert compared.table()["personal_accuracy"].tolist() == [result.summary["personal_accuracy"]]
    assert "for the clients [%]" in repr(compared)
    assert "time [s]" in repr(compared)
    unmeasured = replace(
        result, summary={**result.summary, "personal_accuracy": None, "personal_forgetting": None}
    )
    assert "accuracy –, forgetting –" in repr(unmeasured)
    assert Strict(replace(unmeasured, history=[])._repr_html_()).cells == []


def test_a_comparison_is_a_table_of_means_over_seeds(finished: Path) -> None:
    compared = Comparison.of(finished)
    table, runs = compared.table(), compared.runs()
    assert table["group"].tolist() == [g.label for g in groups([finished])]
    assert table["seeds"].tolist() == [2, 2]
    assert sorted(runs["seed"]) == [7, 7, 8, 8]
    for group, mean, std in zip(
        table["group"], table["accuracy"], table["accuracy_std"], strict=True
    ):
        own = runs[runs["group"] == group]["accuracy"]
        assert mean == pytest.approx(own.mean())
        assert std == pytest.approx(own.std())
    known = {f"{m.key}{k}" for m in COLUMNS for k in ("", "_std")}
    assert set(table.columns) - {"group", "seeds", "finished"} <= known
    one = Comparison.of(Result.of(finished / "avg7"), finished / "deeper" / "failing8")
    assert one.table()["accuracy_std"].isna().all() if "accuracy_std" in one.table() else True
    with pytest.raises(ConfigError, match="there is no directory"):
        Comparison.of(finished / "nowhere")


def test_a_comparison_is_shown_as_the_command_prints_it_and_by_class(finished: Path) -> None:
    compared = Comparison.of(finished)
    lines = repr(compared).splitlines()
    assert lines[0].split()[:3] == ["accuracy,", "last", "[%]"]
    assert [line.split()[0].rstrip(",") for line in lines[1:]] == ["fedavg", "toy_failing"]
    cells = Strict(compared._repr_html_()).cells
    assert cells[0] == "fedavg"
    last = cells[-2 * (1 + toys.CLASSES) :]
    assert (last[0], last[1 + toys.CLASSES]) == ("fedavg", compared.groups[1].label)
    own = [[e["class_accuracy"] for e in r.rounds] for r in compared.groups[0].runs]
    lost = [
        sum(forgetting([[row[c]] for row in rows]) for rows in own) / 2 for c in range(toys.CLASSES)
    ]
    assert last[1 : 1 + toys.CLASSES] == [f"{100 * v:.1f} %" for v in lost]
    assert repr(Comparison([])) == "<Comparison of 0 runs>"
    assert Strict(Comparison([])._repr_html_()).cells == []
