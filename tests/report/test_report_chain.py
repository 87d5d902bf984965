"""Figures of a chain and the time to a target: they show a journal's numbers, and a run without
these measures has none.
"""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path

import pytest
from run_journals import (
    editable_copy,
    events,
    measure_events,
    run_of,
    stop_after,
    write_events,
)

import toys
from fedstill.core.errors import CorruptFile
from fedstill.report import knowledge, overview
from fedstill.report.figures import PERCENT, Line, Style, curves
from fedstill.report.page import page
from fedstill.report.rounds import class_map
from fedstill.report.series import Series
from fedstill.running.runner import run
from fedstill.running.runs import Group, Spread, groups, read_run
from pages import as_json, as_plotly

METHODS = {"seq": "fedseq", "kd": {"name": "sfedkd", "k": 2}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured chains of two methods, seeds 7 and 8."""
    folder = tmp_path_factory.mktemp("chains")
    for name, method in METHODS.items():
        for seed in (7, 8):
            experiment = toys.toy(
                method,
                seed=seed,
                rounds=3,
                topology={"kind": "sequential", "clients": 6, "sampled": 3},
                measure=("chain",),
                measure_every=1,
                plan={"lr": 0.1},
            )
            run(experiment, folder / f"{name}{seed}", data=toys.blobs())
    return folder


@pytest.fixture
def editable_run(runs: Path, tmp_path: Path) -> Path:
    """A copy of fedseq's run with seed 7, whose journal a test may edit."""
    return editable_copy(runs / "seq7", tmp_path / "run")


def test_hops_are_counted_through_all_rounds(runs: Path) -> None:
    (group,) = groups([runs / "seq7"])
    measured = measure_events(runs / "seq7", "chain")
    accuracies = [event["class_accuracy"] for event in measured]

    (hops,) = knowledge.read_hops(group)

    assert hops.accuracy == dict(enumerate(accuracies, start=1))
    assert list(hops.accuracy) == list(range(1, 10))
    assert list(hops.kept) == list(range(2, 10))
    handed_over = [event["handed_over"] for event in measured[1:]]
    assert [hops.handed_over[hop] for hop in range(2, 10)] == handed_over

    losses = []
    for by_hop in zip(*accuracies, strict=True):
        *former, last = by_hop
        losses.append(max(former) - last)
    assert hops.lost[9] == pytest.approx(sum(losses) / 5)


def test_a_client_that_failed_leaves_a_blank_column() -> None:
    row = [0.5, None]
    hops = knowledge.Hops(3, accuracy={1: row, 3: row, 7: row, 8: row})
    assert hops.columns == {1: row, 2: [None, None], 3: row, 7: row, 8: row}, (
        "round 2 was not measured"
    )


def test_a_curve_has_a_gap_where_hops_were_not_measured(runs: Path) -> None:
    compared = groups([runs / "seq7"])
    spreads = [Spread(mean, 0.01, 2) for mean in (0.1, 0.2, 0.3, 0.7, 0.8)]
    lines = [Line(compared[0], Series([1, 2, 3, 7, 8], spreads))]

    band, line = as_json(curves(lines, Style(compared), "hop", PERCENT))["data"]

    assert line["x"] == [1, 2, 3, None, 7, 8]
    assert line["y"] == [0.1, 0.2, 0.3, None, 0.7, 0.8]
    assert line["customdata"][3] is None
    assert band["x"] == [1, 2, 3, 3, 2, 1, None, 7, 8, 8, 7]
    assert band["y"] == [0.11, 0.21, 0.31, 0.29, 0.19, 0.09, None, 0.71, 0.81, 0.79, 0.69]
    rounds = curves(lines, Style(compared), "round", PERCENT)
    assert rounds.traces[1]["x"] == [1, 2, 3, 7, 8], "a measure every few rounds is one line"


def test_a_map_has_only_the_measured_hops_and_not_a_tick_for_each_round() -> None:
    accuracies = {3: [0.5], 30: [0.5], 58: [0.5]}
    by_hop = as_plotly(class_map(accuracies, ["a"], "hop"))
    assert by_hop.layout.xaxis.type == "category", "numbers would have cells from hop to hop"
    by_round = as_plotly(class_map(accuracies, ["a"], "round"))
    assert by_round.layout.xaxis.dtick is None, "58 rounds have no tick each"


def test_the_page_has_the_figures_of_a_chain(runs: Path) -> None:
    text = page(groups([runs]))
    for title in (
        "Forgetting along the chain",
        "Consistency of successive models",
        "Forgetting F along",
        "Model drift",
        "Time to target",
    ):
        assert title in text
    assert text.count("hop %{x}") >= 5


def test_a_run_without_the_measure_has_no_figures_of_a_chain(finished: Path) -> None:
    assert "Forgetting along the chain" not in page(groups([finished / "avg7"]))


def test_seconds_to_a_target_are_sums_of_clients_training(runs: Path) -> None:
    chain = read_run(runs / "kd7")
    seconds = list(accumulate(event["seconds_clients"] for event in chain.rounds))
    accuracies = [event["accuracy"] for event in chain.rounds]
    best = max(accuracies)
    assert overview.seconds_to(chain, accuracies[0]) == pytest.approx(seconds[0])
    assert overview.seconds_to(chain, best) == pytest.approx(seconds[accuracies.index(best)])
    assert overview.seconds_to(chain, 1.01) is None


def test_the_seconds_of_long_runs_have_no_exponent() -> None:
    start = {"event": "start", "classes": ["a", "b"]}
    runs = []
    for seconds in (913.0, 2474.0):
        number = {"event": "round", "round": 1, "accuracy": 0.5, "seconds_clients": seconds}
        runs.append(run_of([start, number]))
    assert overview._times_to(Group("two seeds", runs), 0.5) == "1,694 ± 1,104"
    assert overview._times_to(Group("one seed", runs[:1]), 0.5) == "913"


def test_the_number_of_teachers_stands_in_the_table(runs: Path) -> None:
    text = page(groups([runs]))
    (section,) = re.findall(r'<section[^>]*id="targets".*?</section>', text, re.DOTALL)
    assert ">2<" in section


def test_a_damaged_measurement_is_named(editable_run: Path) -> None:
    journal = events(editable_run)
    measured = next(event for event in journal if event["event"] == "measure")
    measured["class_accuracy"] = ["much"]
    write_events(editable_run, journal)

    line = journal.index(measured) + 1
    with pytest.raises(CorruptFile, match=rf"journal\.jsonl, line {line}: .*class_accuracy"):
        page(groups([editable_run]))


def test_a_run_that_was_stopped_is_drawn_up_to_its_last_round(editable_run: Path) -> None:
    stop_after(editable_run, 1)
    (group,) = groups([editable_run])
    (hops,) = knowledge.read_hops(group)
    assert list(hops.accuracy) == [1, 2, 3]
