"""The pictures of a chain and the time to a target: drawn from journals, left out where nothing was
measured.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from run_journals import events, run_of, stop_after

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

CHAIN = {"kind": "sequential", "clients": 6, "sampled": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chains")
    for name, method in (("seq", "fedseq"), ("kd", {"name": "sfedkd", "k": 2})):
        for seed in (7, 8):
            toy = toys.toy(
                method,
                seed=seed,
                rounds=3,
                topology=CHAIN,
                measure=("chain",),
                measure_every=1,
                plan={"lr": 0.1},
            )
            run(toy, folder / f"{name}{seed}", data=toys.blobs())
    return folder


def made(*folders: Path):  # type: ignore[no-untyped-def]
    return groups(folders)


def test_hops_are_counted_through_all_rounds(runs: Path) -> None:
    (group,) = made(runs / "seq7")
    (hops,) = knowledge.read_hops(group)
    looks = [e for e in events(runs / "seq7") if e["event"] == "measure"]
    assert list(hops.accuracy) == list(range(1, 10))
    assert list(hops.accuracy.values()) == [e["class_accuracy"] for e in looks]
    assert list(hops.kept) == list(range(2, 10))
    assert [hops.handed_over[i] for i in range(2, 10)] == [e["handed_over"] for e in looks[1:]]
    best = [max(e["class_accuracy"][c] for e in looks[:-1]) for c in range(5)]
    last = looks[-1]["class_accuracy"]
    assert hops.lost[9] == pytest.approx(sum(b - a for b, a in zip(best, last, strict=True)) / 5)


def test_a_client_that_failed_leaves_a_blank_column() -> None:
    row = [0.5, None]
    hops = knowledge.Hops(3, accuracy={1: row, 3: row, 7: row, 8: row})
    assert hops.columns == {1: row, 2: [None, None], 3: row, 7: row, 8: row}, (
        "round 2 was not measured"
    )


def test_hops_that_nobody_measured_are_left_out(runs: Path) -> None:
    groups_ = made(runs / "seq7")
    measured = Series([1, 2, 3, 7, 8], [Spread(v, 0.01, 2) for v in (0.1, 0.2, 0.3, 0.7, 0.8)])
    lines = [Line(groups_[0], measured)]
    band, line = as_json(curves(lines, Style(groups_), "hop", PERCENT))["data"]
    assert line["x"] == [1, 2, 3, None, 7, 8]
    assert line["y"] == [0.1, 0.2, 0.3, None, 0.7, 0.8]
    assert line["customdata"][3] is None
    assert band["x"] == [1, 2, 3, 3, 2, 1, None, 7, 8, 8, 7]
    assert band["y"] == [0.11, 0.21, 0.31, 0.29, 0.19, 0.09, None, 0.71, 0.81, 0.79, 0.69]
    rounds = curves(lines, Style(groups_), "round", PERCENT)
    assert rounds.traces[1]["x"] == [1, 2, 3, 7, 8], "a measure every few rounds is one line"
    hops, by_round = (
        as_plotly(class_map({hop: [0.5] for hop in (3, 30, 58)}, ["a"], unit))
        for unit in ("hop", "round")
    )
    assert hops.layout.xaxis.type == "category", (
        "an axis of numbers would have cells from hop to hop"
    )
    assert by_round.layout.xaxis.dtick is None, "58 rounds have no tick each"


def test_the_page_shows_them(runs: Path) -> None:
    text = page(made(*sorted(runs.iterdir())))
    for title in (
        "Forgetting along the chain",
        "Consistency of successive models",
        "Forgetting F along",
        "Model drift",
    ):
        assert title in text
    assert "Time to target" in text
    assert text.count("hop %{x}") >= 5


def test_where_nothing_was_measured_nothing_is_shown(runs: Path, finished: Path) -> None:
    assert "Forgetting along the chain" not in page(made(finished / "avg7"))


def test_seconds_to_a_target_are_sums_of_clients_training(runs: Path) -> None:
    one = read_run(runs / "kd7")
    sums, passed = [], 0.0
    for event in one.rounds:
        passed += event["seconds_clients"]
        sums.append(passed)
    reached = [e["accuracy"] for e in one.rounds]
    assert overview.seconds_to(one, reached[0]) == pytest.approx(sums[0])
    best = max(reached)
    assert overview.seconds_to(one, best) == pytest.approx(sums[reached.index(best)])
    assert overview.seconds_to(one, 1.01) is None


def test_long_runs_are_told_in_seconds_without_an_exponent() -> None:
    start = {"event": "start", "classes": ["a", "b"]}
    runs = []
    for seconds in (913.0, 2474.0):
        number = {"event": "round", "round": 1, "accuracy": 0.5, "seconds_clients": seconds}
        runs.append(run_of([start, number]))
    assert overview._times_to(Group("two seeds", runs), 0.5) == "1,694 ± 1,104"
    assert overview._times_to(Group("one seed", runs[:1]), 0.5) == "913"


def test_the_number_of_teachers_stands_in_the_table(runs: Path) -> None:
    text = page(made(*sorted(runs.iterdir())))
    (part,) = re.findall(r'<section[^>]*id="targets".*?</section>', text, re.DOTALL)
    assert ">2<" in part


def test_a_damaged_look_is_named(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.toml", "summary.json", "split.safetensors"):
        (folder / name).write_bytes((runs / "seq7" / name).read_bytes())
    lines = events(runs / "seq7")
    look = next(e for e in lines if e["event"] == "measure")
    look["class_accuracy"] = ["much"]
    (folder / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    place = rf"journal\.jsonl, line {lines.index(look) + 1}: .*class_accuracy"
    with pytest.raises(CorruptFile, match=place):
        page(made(folder))


def test_a_run_that_was_stopped_is_drawn_up_to_there(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.toml", "summary.json", "journal.jsonl", "split.safetensors"):
        (folder / name).write_bytes((runs / "seq7" / name).read_bytes())
    stop_after(folder, 1)
    (hops,) = knowledge.read_hops(made(folder)[0])
    assert list(hops.accuracy) == [1, 2, 3]
