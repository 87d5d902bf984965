"""The ranking's tables and page: the same numbers everywhere, and those that other code computes
from the CSV.
"""

from __future__ import annotations

import csv
import html
import io
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedstill.benchmark.page import LabelledPoint, label_sides, ranking_page, scatter
from fedstill.benchmark.scoring import Score
from fedstill.benchmark.standings import RankedRow, Standings, standings
from fedstill.benchmark.suites import TEST_SEEDS, Suite, load_suite
from fedstill.benchmark.tables import (
    agreement_lines,
    description,
    markdown_agreement,
    markdown_tables,
    parse_run_table,
    run_table,
    standing_table,
    write_ranking_files,
)

NAME = "digits-space"


def runs_csv(of: list[Standings]) -> str:
    """The text of table.csv."""
    return run_table(of).csv()


def score(accuracy: float, learned: float, cpu: float = 2.0) -> Score:
    return Score(
        accuracy,
        learned,
        accuracy / learned,
        0.1,
        float("nan"),
        float("nan"),
        10**6,
        10**6,
        cpu,
        30,
    )


def row(suite: Suite, name: str, mean: float, seed: int, **more: object) -> RankedRow:
    """Made-up runs of a row, spread by five points."""
    draw = np.random.default_rng(seed)
    scores = {
        (c, s): score(a := float(np.clip(mean + draw.normal(0, 0.05), 0, 1)), min(1.0, a + 0.1))
        for c in suite.columns_of(name)
        for s in TEST_SEEDS
    }
    return RankedRow(name, scores, {}, 5, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def suite_rows() -> list[RankedRow]:
    suite = load_suite(NAME)
    means = {"FedAvg": 0.5, "FedProx": 0.52, "FedNTD": 0.8, "SCAFFOLD": 0.3, "joint": 0.95}
    diverged = {("two shards", 3): "round 7: not finite"}
    return [
        row(suite, n, m, i, diverged=diverged if n == "SCAFFOLD" else {})
        for i, (n, m) in enumerate(means.items())
    ]


@pytest.fixture(scope="module")
def one(suite_rows: list[RankedRow]) -> Standings:
    return standings(load_suite(NAME), suite_rows)


def test_rows_of_another_processor_are_named_and_their_seconds_not_compared(
    suite_rows: list[RankedRow],
) -> None:
    suite = load_suite(NAME)
    same = standings(suite, [replace(r, processor="A (AVX2)") for r in suite_rows])
    assert "A (AVX2)" in description(same)
    assert not any(math.isnan(p.cpu) for p in same.placed)
    other = {"FedNTD": "B (AVX512)", "joint": ""}
    mixed = standings(
        suite, [replace(r, processor=other.get(r.name, "A (AVX2)")) for r in suite_rows]
    )
    assert "FedNTD on B (AVX512)" in description(mixed)
    assert description(mixed) != description(same)
    assert [p.row.name for p in mixed.placed if math.isnan(p.cpu)] == ["FedNTD"]
    read = parse_run_table(runs_csv([mixed]))[NAME]
    assert {r.name: r.processor for r in read} == {r.name: r.processor for r in mixed.rows}


def numbers(text: str) -> list[str]:
    """The cells of a table, however it is written, as bare text."""
    for old, new in (
        ("$-$", "−"),
        ("$\\pm$", "±"),
        ("\\pm", "±"),
        ("--", "–"),
        ("\\%", "%"),
        ("\\_", "_"),
        ("$", ""),
    ):
        text = text.replace(old, new)
    return text.split()


def test_markdown_csv_latex_and_page_hold_the_same_numbers(one: Standings, tmp_path: Path) -> None:
    write_ranking_files([one], tmp_path)
    lines = standing_table(one).lines
    listed = list(csv.reader(io.StringIO((tmp_path / "standings.csv").read_text())))[1:]
    assert [line[1:] for line in listed] == lines
    md = [m for m in (tmp_path / "table.md").read_text().splitlines() if m.startswith("| ")]
    tex = [t for t in (tmp_path / "table.tex").read_text().splitlines() if t.endswith("\\\\")]
    page = html.unescape(ranking_page([one]))
    shown = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page)
    for i, line in enumerate(lines):
        assert [c.strip() for c in md[i + 1].strip("|").split(" | ")] == line
        assert numbers(tex[i + 1].removesuffix("\\\\")) == numbers(" & ".join(line))
        cells = re.findall("<td>(.*?)</td>", shown[i][1])
        assert [cells[0], shown[i][0], *cells[1:]] == line
    assert {len(line) for line in lines} == {len(standing_table(one).head)}


def test_other_code_finds_the_same_from_the_csv(one: Standings, tmp_path: Path) -> None:
    write_ranking_files([one], tmp_path)
    runs = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert len(runs) == 5 * 2 * 5
    cells = {(r["method"], r["column"], int(r["seed"])): float(r["accuracy"]) for r in runs}
    names = [n for n in dict.fromkeys(r["method"] for r in runs) if n != "joint"]
    blocks = sorted({(c, s) for _, c, s in cells})
    table = np.array([[cells[n, c, s] for c, s in blocks] for n in names])
    mean_ranks = np.mean([stats.rankdata(-block) for block in table.T], axis=0)
    assert {p.row.name: p.rank for p in one.placed} == pytest.approx(
        dict(zip(names, mean_ranks, strict=True))
    )
    assert [p.row.name for p in one.placed] == [names[i] for i in np.argsort(mean_ranks)]
    base = table[names.index("FedAvg")]
    for placed in one.placed:
        own = table[names.index(placed.row.name)]
        assert placed.accuracy == pytest.approx(own.mean(), abs=1e-12)
        assert placed.learned * placed.kept == pytest.approx(placed.accuracy, abs=1e-12)
        if placed.difference is None:
            assert placed.row.name == "FedAvg"
            continue
        assert placed.difference.mean == pytest.approx((own - base).mean(), abs=1e-12)
        exact = stats.permutation_test(
            ((own - base),), np.mean, permutation_type="samples", n_resamples=np.inf
        )
        assert placed.difference.p == pytest.approx(exact.pvalue, abs=1e-12)
        for column in one.columns:
            pair = [[cells[n, column, s] for s in range(5)] for n in (placed.row.name, "FedAvg")]
            interval = stats.ttest_rel(*pair).confidence_interval(0.95)
            apart = one.difference(placed.row, column)
            assert apart is not None
            assert (apart.low, apart.high) == pytest.approx(
                (interval.low, interval.high), abs=1e-12
            )


@pytest.mark.parametrize(
    ("name", "rows", "unit"),
    [
        ("digits-peers", ["local only", "QKT"], "local only"),
        ("digits-chain", ["FedSeq", "CWC", "FedAvg"], "FedAvg"),
        ("digits-chain", ["FedSeq", "CWC"], "FedSeq"),
    ],
)
def test_the_head_names_the_row_whose_cpu_seconds_are_one(
    name: str, rows: list[str], unit: str
) -> None:
    suite = load_suite(name)
    made = [row(suite, n, 0.5, i) for i, n in enumerate(rows)]
    slower = [
        replace(r, scores={k: replace(s, seconds_cpu=2.0 + i) for k, s in r.scores.items()})
        for i, r in enumerate(made)
    ]
    one = standings(suite, slower)
    at = standing_table(one).head.index(f"CPU × {unit}")
    assert {line[1] for line in standing_table(one).lines if line[at] == "1.00"} == {unit}
    assert f"CPU × {unit}" in html.unescape(ranking_page([one]))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digits-both", "in digits-time, on the column 5 class tasks."),
        ("digits-space", "on the column Dirichlet .1."),
    ],
)
def test_page_and_markdown_say_where_the_fields_were_chosen(name: str, said: str) -> None:
    suite = load_suite(name)
    one = standings(suite, [row(suite, "FedAvg", 0.5, 0)])
    assert f"chosen {said}" in markdown_tables(one)
    page = html.unescape(ranking_page([one]))
    assert f"chosen {said}" in page


def test_a_bound_that_is_no_ceiling_is_shown_and_ends_no_gap() -> None:
    suite = load_suite("digits-both")
    means = {"FedAvg": 0.2, "replay": 0.6, "past kept": 0.9, "joint": 0.7}
    both = standings(suite, [row(suite, n, m, i) for i, (n, m) in enumerate(means.items())])
    assert [r.name for r in both.bounds] == ["past kept", "joint"]
    ceiling = both.ceiling("5 class tasks")
    assert ceiling is not None
    assert ceiling.name == "joint"


def test_bounds_are_not_ranked_and_the_gap_goes_from_floor_to_ceiling(one: Standings) -> None:
    shares = {p.row.name: p.share for p in one.placed}
    assert "joint" not in shares
    assert shares["FedAvg"] == 0
    assert shares["SCAFFOLD"] < 0 < shares["FedNTD"] < 1
    assert [r.name for r in one.bounds] == ["joint"]
    assert "FedNova" in one.missing


def test_a_run_that_diverged_is_marked(one: Standings) -> None:
    assert [line[1] for line in standing_table(one).lines if "†" in line[1]] == ["SCAFFOLD †"]


def test_what_was_kept_is_not_shown_where_a_run_does_not_say_it() -> None:
    """In a suite of few rounds no row has it, and there is no picture; else the rows that lack it
    are left out.
    """
    suite = load_suite(NAME)
    known, *others = (
        row(suite, name, 0.5, i) for i, name in enumerate(("FedAvg", "FedNTD", "joint"))
    )
    lacking = [
        replace(r, scores={k: replace(s, kept=math.nan) for k, s in r.scores.items()})
        for r in others
    ]
    some, none = standings(suite, [known, *lacking]), standings(suite, lacking)
    at = standing_table(some).head.index("kept [%]")
    assert {line[1]: line[at] == "–" for line in standing_table(some).lines} == {
        "FedAvg": False,
        "FedNTD": True,
        "joint": True,
    }
    assert [trace["name"] for trace in scatter(some).traces if "name" in trace] == ["FedAvg"]
    assert "Learned and kept" in ranking_page([some])
    assert "Learned and kept" not in ranking_page([none])


def test_who_wins_and_who_cannot_be_told_apart(one: Standings) -> None:
    assert one.placed[0].row.name == "FedNTD"
    assert not any({"FedNTD", "FedAvg"} <= set(group) for group in one.bars)
    assert any({"FedAvg", "FedProx"} <= set(group) for group in one.bars)


def test_methods_share_a_bar_exactly_if_they_are_closer_than_the_critical_difference(
    larger: Standings,
) -> None:
    """So the bars never contradict the number that stands above them."""
    for first, second in itertools.combinations(larger.placed, 2):
        names = {first.row.name, second.row.name}
        share_bar = any(names <= set(bar) for bar in larger.bars)
        assert share_bar == (second.rank - first.rank < larger.critical_difference)
    assert larger.bars
    assert f"{larger.critical_difference:.2f} ranks" in description(larger)


def test_equal_methods_are_all_on_one_bar() -> None:
    """In a test of each pair on its own, some of their 91 pairs would differ."""
    suite = load_suite(NAME)
    equal = standings(suite, [row(suite, name, 0.5, i) for i, name in enumerate(suite.ranked_rows)])
    assert [set(bar) for bar in equal.bars] == [set(suite.ranked_rows)]


def test_a_table_of_all_runs_is_read_back_as_it_was_written(one: Standings) -> None:
    back = parse_run_table(runs_csv([one]))[NAME]
    assert [r.name for r in back] == [r.name for r in one.rows]
    assert runs_csv([standings(one.suite, back)]) == runs_csv([one])
    assert standing_table(standings(one.suite, back)).lines == standing_table(one).lines


@pytest.fixture(scope="module")
def larger() -> Standings:
    """The same methods in another tier, a little nearer to one another."""
    small = load_suite("small-space")
    means = {"FedAvg": 0.5, "FedProx": 0.52, "FedNTD": 0.8, "SCAFFOLD": 0.3}
    return standings(small, [row(small, n, m, i) for i, (n, m) in enumerate(means.items())])


def test_how_far_tiers_agree_is_the_tau_of_their_ranks(one: Standings, larger: Standings) -> None:
    (line,) = agreement_lines([one, larger])
    first, second = ({p.row.name: p.rank for p in s.placed} for s in (one, larger))
    names = sorted(first)
    tau, p = stats.kendalltau([first[n] for n in names], [second[n] for n in names])
    assert line[:5] == ["space", "digits and small", "4", f"{tau:.2f}", f"{p:.3f}"]
    page = ranking_page([one, larger])
    assert "".join(f"<td>{cell}</td>" for cell in line[1:]) in page
    assert f"| {' | '.join(line)} |" in "".join(markdown_agreement([one, larger]))
    assert agreement_lines([one]) == markdown_agreement([one]) == []
    assert "Execute the tiers agree?" not in ranking_page([one])


def test_of_pairs_that_both_tiers_tell_apart_it_is_counted_how_many_have_one_order() -> None:
    """Where FedNTD, the best of one tier, is the last of the other, each of its pairs has the other
    order there.
    """
    digits = load_suite(NAME)
    order = ("FedNTD", "FedProx", "FedAvg", "FedNova", "SCAFFOLD")
    one = standings(digits, [row(digits, n, 0.9 - 0.2 * i, i) for i, n in enumerate(order)])
    small = load_suite("small-space")
    means = {"FedAvg": 0.5, "FedNTD": 0.1, "SCAFFOLD": 0.3}
    turned = standings(small, [row(small, n, m, i) for i, (n, m) in enumerate(means.items())])
    assert turned.bars == []
    (line,) = agreement_lines([one, turned])
    assert line[5:] == ["3", "3", "1", "FedAvg above FedNTD, SCAFFOLD above FedNTD"]
    assert float(line[3]) == pytest.approx(-1 / 3, abs=0.005)


def test_one_row_alone_has_a_table_and_no_intervals_against_itself() -> None:
    suite = load_suite(NAME)
    alone = standings(suite, [row(suite, "FedAvg", 0.5, 0)])
    (line,) = standing_table(alone).lines
    assert line[:3] == ["1", "FedAvg", "1.00"]
    assert ranking_page([alone])
    assert standings(suite, []).placed == ()


def test_the_page_needs_no_network_and_shows_the_fields_to_copy(one: Standings) -> None:
    text = ranking_page([one])
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)
    assert '<table class="numbers wide sortable">' in text
    assert '[method]\nname = "fedntd"\nbeta = 1.0' in html.unescape(text)


def test_labels_of_near_points_stand_on_different_sides_and_one_without_room_is_left_out() -> None:
    apart = [LabelledPoint("FedAvg", 0.2, 0.2), LabelledPoint("FedNTD", 0.8, 0.8)]
    assert label_sides(apart, 1.0, 1.0) == ["top center", "top center"]
    near = [LabelledPoint("FedAvg", 0.5, 0.5), LabelledPoint("FedNTD", 0.5, 0.54)]
    assert label_sides(near, 1.0, 1.0) == ["bottom center", "top center"]
    crowd = [LabelledPoint(f"method {i}", 0.5, 0.5) for i in range(30)]
    sides = label_sides(crowd, 1.0, 1.0)
    assert len({side for side in sides if side}) == len([side for side in sides if side])
    assert "" in sides
