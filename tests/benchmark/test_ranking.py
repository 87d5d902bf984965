"""The ranking's tables and page have the same numbers, and the CSV gives the same results."""

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
import pandas as pd
import pytest
from scipy import stats

from fedstill.benchmark.page import LabelledPoint, label_sides, ranking_page, scatter
from fedstill.benchmark.standings import RankedRow, Standings, standings
from fedstill.benchmark.suites import TEST_SEEDS, Suite, load_suite
from fedstill.benchmark.tables import (
    AGREEMENT_TITLE,
    agreement_lines,
    description,
    markdown_agreement,
    markdown_tables,
    parse_run_table,
    run_table,
    standing_table,
    write_ranking_files,
)
from fedstill.core.errors import ConfigError
from made_up_scores import made_up_score

NAME = "digits-space"


def runs_csv(standings_of_suites: list[Standings]) -> str:
    """The text of table.csv."""
    return run_table(standings_of_suites).csv()


def row(suite: Suite, name: str, mean: float, seed: int) -> RankedRow:
    """Made-up runs of a row, spread by five points."""
    draw = np.random.default_rng(seed)
    scores = {}
    for cell in itertools.product(suite.columns_of(name), TEST_SEEDS):
        accuracy = float(np.clip(mean + draw.normal(0, 0.05), 0, 1))
        learned = min(1.0, accuracy + 0.1)
        scores[cell] = made_up_score(accuracy, learned=learned, seconds_cpu=2.0)
    return RankedRow(name, scores, {}, 5)


def made_up_rows(suite: Suite, means: dict[str, float]) -> list[RankedRow]:
    """Rows with these mean accuracies."""
    return [row(suite, name, mean, seed) for seed, (name, mean) in enumerate(means.items())]


def without_kept(row: RankedRow) -> RankedRow:
    """A row whose runs do not say how much they kept."""
    scores = {cell: replace(score, kept=math.nan) for cell, score in row.scores.items()}
    return replace(row, scores=scores)


@pytest.fixture(scope="module")
def suite_rows() -> list[RankedRow]:
    """Five rows, of which SCAFFOLD has a run that diverged."""
    means = {"FedAvg": 0.5, "FedProx": 0.52, "FedNTD": 0.8, "SCAFFOLD": 0.3, "joint": 0.95}
    fedavg, fedprox, fedntd, scaffold, joint = made_up_rows(load_suite(NAME), means)
    diverged = {("two shards", 3): "round 7: not finite"}
    return [fedavg, fedprox, fedntd, replace(scaffold, diverged=diverged), joint]


@pytest.fixture(scope="module")
def digits(suite_rows: list[RankedRow]) -> Standings:
    """The standings of these rows."""
    return standings(load_suite(NAME), suite_rows)


def test_rows_of_another_processor_are_named_and_their_seconds_not_compared(
    suite_rows: list[RankedRow],
) -> None:
    suite = load_suite(NAME)
    same = standings(suite, [replace(row, processor="A (AVX2)") for row in suite_rows])
    assert "A (AVX2)" in description(same)
    assert not any(math.isnan(placed.cpu) for placed in same.placed)

    processors = {row.name: "A (AVX2)" for row in suite_rows}
    processors |= {"FedNTD": "B (AVX512)", "joint": ""}
    mixed = standings(suite, [replace(row, processor=processors[row.name]) for row in suite_rows])
    assert "FedNTD on B (AVX512)" in description(mixed)
    assert description(mixed) != description(same)
    assert [placed.row.name for placed in mixed.placed if math.isnan(placed.cpu)] == ["FedNTD"]

    parsed_rows = parse_run_table(runs_csv([mixed]))[NAME]
    assert {row.name: row.processor for row in parsed_rows} == processors


LATEX = {
    "$-$": "−",
    "$\\pm$": "±",
    "\\pm": "±",
    "--": "–",
    "\\%": "%",
    "\\_": "_",
    "$": "",
}
"""How LaTeX writes what other tables have as characters."""


def bare_cells(text: str) -> list[str]:
    """The cells of a line of a table as bare text."""
    for latex, character in LATEX.items():
        text = text.replace(latex, character)
    return text.split()


def test_markdown_csv_latex_and_page_hold_the_same_numbers(
    digits: Standings, tmp_path: Path
) -> None:
    write_ranking_files([digits], tmp_path)
    table = standing_table(digits)
    assert {len(line) for line in table.lines} == {len(table.head)}

    _, *csv_lines = csv.reader(io.StringIO((tmp_path / "standings.csv").read_text()))
    assert [line[1:] for line in csv_lines] == table.lines

    markdown = (tmp_path / "table.md").read_text().splitlines()
    _, *markdown_lines = [line for line in markdown if line.startswith("| ")]
    latex = (tmp_path / "table.tex").read_text().splitlines()
    _, *latex_lines = [line.removesuffix("\\\\") for line in latex if line.endswith("\\\\")]
    page = html.unescape(ranking_page([digits]))
    page_lines = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page)
    for number, line in enumerate(table.lines):
        markdown_cells = markdown_lines[number].strip("|").split(" | ")
        assert [cell.strip() for cell in markdown_cells] == line
        assert bare_cells(latex_lines[number]) == bare_cells(" & ".join(line))
        name, cells = page_lines[number]
        rank, *numbers = re.findall("<td>(.*?)</td>", cells)
        assert [rank, name, *numbers] == line


def test_only_tables_of_the_ranking_are_overwritten(digits: Standings, tmp_path: Path) -> None:
    paths = write_ranking_files([digits], tmp_path)
    contents = [path.read_bytes() for path in paths]
    assert write_ranking_files([digits], tmp_path) == paths
    assert [path.read_bytes() for path in paths] == contents
    for path, content in zip(paths, contents, strict=True):
        path.write_text("mine")
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            write_ranking_files([digits], tmp_path)
        assert path.read_text() == "mine"
        path.write_bytes(content)


def accuracies_in_csv(folder: Path) -> pd.DataFrame:
    """The accuracies in table.csv: a row for each method, and a column for each pair of a column of
    the suite and a seed.
    """
    runs = pd.read_csv(folder / "table.csv")
    assert len(runs) == 5 * 2 * 5
    return runs.pivot(index="method", columns=["column", "seed"], values="accuracy")


def test_ranks_from_the_csv_are_those_of_the_standings(digits: Standings, tmp_path: Path) -> None:
    write_ranking_files([digits], tmp_path)
    accuracies = accuracies_in_csv(tmp_path).drop(index="joint")
    mean_ranks = accuracies.rank(ascending=False).mean(axis=1)

    ranks = {placed.row.name: placed.rank for placed in digits.placed}
    assert ranks == pytest.approx(mean_ranks.to_dict())
    assert list(ranks) == list(mean_ranks.sort_values().index)


def test_differences_from_the_csv_are_those_of_the_standings(
    digits: Standings, tmp_path: Path
) -> None:
    write_ranking_files([digits], tmp_path)
    accuracies = accuracies_in_csv(tmp_path)
    base = accuracies.loc["FedAvg"]
    without_difference = []
    for placed in digits.placed:
        row = accuracies.loc[placed.row.name]
        assert placed.accuracy == pytest.approx(row.mean(), abs=1e-12)
        assert placed.learned * placed.kept == pytest.approx(placed.accuracy, abs=1e-12)
        if placed.difference is None:
            without_difference.append(placed.row.name)
            continue

        differences = (row - base).to_numpy()
        assert placed.difference.mean == pytest.approx(differences.mean(), abs=1e-12)
        exact = stats.permutation_test(
            (differences,), np.mean, permutation_type="samples", n_resamples=np.inf
        )
        assert placed.difference.p == pytest.approx(exact.pvalue, abs=1e-12)
        for column in digits.columns:
            interval = stats.ttest_rel(row[column], base[column]).confidence_interval(0.95)
            difference = digits.difference(placed.row, column)
            assert difference is not None
            assert difference.low == pytest.approx(interval.low, abs=1e-12)
            assert difference.high == pytest.approx(interval.high, abs=1e-12)
    assert without_difference == ["FedAvg"]


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
    slower_and_slower = []
    for number, ranked_row in enumerate(made_up_rows(suite, dict.fromkeys(rows, 0.5))):
        scores = {}
        for cell, score in ranked_row.scores.items():
            scores[cell] = replace(score, seconds_cpu=2.0 + number)
        slower_and_slower.append(replace(ranked_row, scores=scores))

    ranking = standings(suite, slower_and_slower)

    table = standing_table(ranking)
    column = table.head.index(f"CPU × {unit}")
    assert {line[1] for line in table.lines if line[column] == "1.00"} == {unit}
    assert f"CPU × {unit}" in html.unescape(ranking_page([ranking]))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("digits-both", "in digits-time, on the column 5 class tasks."),
        ("digits-space", "on the column Dirichlet .1."),
    ],
)
def test_page_and_markdown_name_the_column_on_which_fields_were_chosen(
    name: str, place: str
) -> None:
    suite = load_suite(name)
    ranking = standings(suite, [row(suite, "FedAvg", 0.5, 0)])
    assert f"chosen {place}" in markdown_tables(ranking)
    page = html.unescape(ranking_page([ranking]))
    assert f"chosen {place}" in page


def test_a_bound_that_is_no_ceiling_is_shown_and_ends_no_gap() -> None:
    suite = load_suite("digits-both")
    means = {"FedAvg": 0.2, "replay": 0.6, "past kept": 0.9, "joint": 0.7}
    ranking = standings(suite, made_up_rows(suite, means))
    assert [row.name for row in ranking.bounds] == ["past kept", "joint"]
    ceiling = ranking.ceiling("5 class tasks")
    assert ceiling is not None
    assert ceiling.name == "joint"


def test_bounds_are_not_ranked_and_the_gap_goes_from_floor_to_ceiling(digits: Standings) -> None:
    shares = {placed.row.name: placed.share for placed in digits.placed}
    assert "joint" not in shares
    assert shares["FedAvg"] == 0
    assert shares["SCAFFOLD"] < 0 < shares["FedNTD"] < 1
    assert [row.name for row in digits.bounds] == ["joint"]
    assert "FedNova" in digits.missing


def test_a_run_that_diverged_is_marked(digits: Standings) -> None:
    names = [line[1] for line in standing_table(digits).lines]
    assert [name for name in names if "†" in name] == ["SCAFFOLD †"]


def test_kept_is_not_shown_for_rows_whose_runs_do_not_say_it() -> None:
    """In a suite of few rounds no row has it, and there is no picture; else the rows that lack it
    are left out.
    """
    suite = load_suite(NAME)
    means = {"FedAvg": 0.5, "FedNTD": 0.5, "joint": 0.5}
    fedavg, *further_rows = made_up_rows(suite, means)
    lacking = list(map(without_kept, further_rows))
    of_fedavg_alone = standings(suite, [fedavg, *lacking])
    of_no_row = standings(suite, lacking)

    table = standing_table(of_fedavg_alone)
    column = table.head.index("kept [%]")
    is_missing = {line[1]: line[column] == "–" for line in table.lines}
    assert is_missing == {"FedAvg": False, "FedNTD": True, "joint": True}
    traces = scatter(of_fedavg_alone).traces
    assert [trace["name"] for trace in traces if "name" in trace] == ["FedAvg"]
    assert "Learned and kept" in ranking_page([of_fedavg_alone])
    assert "Learned and kept" not in ranking_page([of_no_row])


def test_the_best_is_first_and_bars_join_rows_that_cannot_be_told_apart(digits: Standings) -> None:
    assert digits.placed[0].row.name == "FedNTD"
    bars = list(map(set, digits.bars))
    assert not any({"FedNTD", "FedAvg"} <= bar for bar in bars)
    assert any({"FedAvg", "FedProx"} <= bar for bar in bars)


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
    equal_rows = made_up_rows(suite, dict.fromkeys(suite.ranked_rows, 0.5))
    (bar,) = standings(suite, equal_rows).bars
    assert set(bar) == set(suite.ranked_rows)


def test_a_table_of_all_runs_is_read_back_as_it_was_written(digits: Standings) -> None:
    text = runs_csv([digits])
    parsed_rows = parse_run_table(text)[NAME]
    parsed = standings(digits.suite, parsed_rows)
    assert [row.name for row in parsed_rows] == [row.name for row in digits.rows]
    assert runs_csv([parsed]) == text
    assert standing_table(parsed).lines == standing_table(digits).lines


@pytest.fixture(scope="module")
def larger() -> Standings:
    """The same methods in another tier, a little nearer to one another."""
    small = load_suite("small-space")
    means = {"FedAvg": 0.5, "FedProx": 0.52, "FedNTD": 0.8, "SCAFFOLD": 0.3}
    return standings(small, made_up_rows(small, means))


def test_how_far_tiers_agree_is_the_tau_of_their_ranks(
    digits: Standings, larger: Standings
) -> None:
    ranks = {placed.row.name: placed.rank for placed in digits.placed}
    larger_ranks = {placed.row.name: placed.rank for placed in larger.placed}
    names = sorted(ranks)
    tau, p = stats.kendalltau(
        [ranks[name] for name in names], [larger_ranks[name] for name in names]
    )

    (line,) = agreement_lines([digits, larger])

    assert line[:5] == ["space", "digits and small", "4", f"{tau:.2f}", f"{p:.3f}"]
    page = ranking_page([digits, larger])
    assert AGREEMENT_TITLE in page
    assert "".join(f"<td>{cell}</td>" for cell in line[1:]) in page
    assert f"| {' | '.join(line)} |" in "".join(markdown_agreement([digits, larger]))


def test_one_tier_alone_has_nothing_to_agree_with(digits: Standings) -> None:
    assert agreement_lines([digits]) == markdown_agreement([digits]) == []
    assert AGREEMENT_TITLE not in ranking_page([digits])


def test_of_pairs_that_both_tiers_tell_apart_it_is_counted_how_many_have_one_order() -> None:
    """Where FedNTD, the best of one tier, is the last of the other, each of its pairs has the other
    order there.
    """
    digits = load_suite(NAME)
    digits_means = {
        "FedNTD": 0.9,
        "FedProx": 0.7,
        "FedAvg": 0.5,
        "FedNova": 0.3,
        "SCAFFOLD": 0.1,
    }
    digits_standings = standings(digits, made_up_rows(digits, digits_means))
    small = load_suite("small-space")
    small_means = {"FedAvg": 0.5, "FedNTD": 0.1, "SCAFFOLD": 0.3}
    small_standings = standings(small, made_up_rows(small, small_means))
    assert small_standings.bars == []

    (line,) = agreement_lines([digits_standings, small_standings])

    assert line[5:] == ["3", "3", "1", "FedAvg above FedNTD, SCAFFOLD above FedNTD"]
    assert float(line[3]) == pytest.approx(-1 / 3, abs=0.005)


def test_one_row_alone_has_a_table_and_no_intervals_against_itself() -> None:
    suite = load_suite(NAME)
    alone = standings(suite, [row(suite, "FedAvg", 0.5, 0)])
    (line,) = standing_table(alone).lines
    assert line[:3] == ["1", "FedAvg", "1.00"]
    assert ranking_page([alone])
    assert standings(suite, []).placed == ()


def test_the_page_needs_no_network_and_shows_the_fields_to_copy(digits: Standings) -> None:
    text = ranking_page([digits])
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)
    assert '<table class="numbers wide sortable">' in text
    assert '[method]\nname = "fedntd"\nbeta = 1.0' in html.unescape(text)


def test_labels_of_near_points_stand_on_different_sides_and_one_without_room_is_left_out() -> None:
    distant = [LabelledPoint("FedAvg", 0.2, 0.2), LabelledPoint("FedNTD", 0.8, 0.8)]
    assert label_sides(distant, 1.0, 1.0) == ["top center", "top center"]
    near = [LabelledPoint("FedAvg", 0.5, 0.5), LabelledPoint("FedNTD", 0.5, 0.54)]
    assert label_sides(near, 1.0, 1.0) == ["bottom center", "top center"]
    crowd = [LabelledPoint(f"method {i}", 0.5, 0.5) for i in range(30)]
    sides = label_sides(crowd, 1.0, 1.0)
    assert "" in sides
    shown_sides = [side for side in sides if side]
    assert len(set(shown_sides)) == len(shown_sides)
