"""The numbers in the text beside the tables at the papers' own size follow from their journals.

The tests look for the numbers in the text of a section, whatever the words around them.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from tools.results_page import text_of_pages

from fedstill.benchmark.recipes import load_recipe
from fedstill.running.journal import read_journal
from fedstill.running.packs import readable

ROOT = Path(__file__).parents[2]
PAGE = text_of_pages()
LAST_TEN = slice(-10, None)

Curve = list[float]
"""A number in percent or in points, by round."""


def section(heading: str) -> str:
    """The section of the page below a heading, with its line breaks."""
    return PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]


def words(text: str) -> str:
    """A text without line breaks."""
    return " ".join(text.split())


def differences(curve: Curve, reference: Curve) -> Curve:
    """How far a curve is above another one, by round."""
    pairs = zip(curve, reference, strict=True)
    return [value - reference_value for value, reference_value in pairs]


def leads(curves: list[Curve], references: list[Curve]) -> list[Curve]:
    """How far the curve of each seed is above that of another method."""
    return list(map(differences, curves, references))


def last_ten(curve: Curve) -> float:
    """The mean of the last ten rounds."""
    return statistics.fmean(curve[LAST_TEN])


def listed(values: Iterable[float]) -> str:
    """Three numbers or more in a sentence, with one digit after the point."""
    *first, last = [f"{value:.1f}" for value in values]
    return f"{', '.join(first)} and {last}"


def by_blocks(curve: Curve, length: int) -> Curve:
    """The mean of each block of rounds of this length."""
    starts = range(0, len(curve), length)
    return [statistics.fmean(curve[start : start + length]) for start in starts]


def by_fifties(lead: Curve) -> str:
    """The means of each fifty rounds, in a sentence."""
    return listed(by_blocks(lead, 50))


def rounds_not_above(lead: Curve) -> int:
    """In how many of the last hundred rounds a curve is not above the other."""
    return sum(value <= 0 for value in lead[100:])


def accuracy_curve(journal: Path) -> Curve:
    """The accuracy [%] of a run by round."""
    events = read_journal(journal)
    return [100 * event["accuracy"] for event in events if event["event"] == "round"]


def full_size(
    method: str, seeds: tuple[int, ...] = (1, 2, 3), table: str = "table2", column: str = ".1"
) -> list[Curve]:
    """The accuracies [%] by round of each seed of a row of a table of FedADKD's at full size."""
    row = readable(ROOT / "results" / f"fedadkd-{table}-full") / f"CIFAR-10_{column}_{method}"
    curves = [accuracy_curve(row / f"seed{seed}" / "journal.jsonl") for seed in seeds]
    assert [len(curve) for curve in curves] == [200] * len(seeds)
    return curves


def test_the_leads_at_full_size_are_those_of_the_page() -> None:
    text = words(PAGE)
    fedavg = full_size("FedAvg")
    fedntd = full_size("FedNTD")
    fedadkd = full_size("FedADKD")
    over_fedavg = leads(fedntd, fedavg)
    over_fedntd = leads(fedadkd, fedntd)

    for lead_by_seed in (over_fedavg, over_fedntd):
        means = list(map(last_ten, lead_by_seed))
        assert min(means) > 0
        assert f"{listed(means)} points" in text

    assert list(map(rounds_not_above, over_fedntd)) == [0, 2, 0]
    for lead in over_fedntd:
        assert by_fifties(lead) in text

    for curves in (fedavg, fedntd, fedadkd):
        accuracies = list(chain.from_iterable(curve[LAST_TEN] for curve in curves))
        assert f"{min(accuracies):.0f} to {max(accuracies):.0f} %" in text


def test_fedprox_at_full_size_is_that_of_the_page() -> None:
    (fedprox,) = full_size("FedProx", seeds=(1,))
    (fedavg,) = full_size("FedAvg", seeds=(1,))
    lead = differences(fedprox, fedavg)
    text = words(PAGE)
    assert f"by {last_ten(lead):.1f} points in the mean of the last ten" in text
    assert by_fifties(lead) in text


TABLE_1 = "FedADKD, Table I at full size"


def test_the_single_rows_of_table_1_at_full_size_are_those_of_the_page() -> None:
    text = words(section(TABLE_1))
    (fedavg,) = full_size("FedAvg", (1,), "table1", "s=2")
    (fedprox,) = full_size("FedProx", (1,), "table1", "s=2")
    (scaffold,) = full_size("SCAFFOLD", (1,), "table1", "s=2")
    lead_of_fedprox = differences(fedprox, fedavg)
    lead_of_scaffold = differences(scaffold, fedavg)

    fedprox_points = last_ten(lead_of_fedprox)
    assert f"by {fedprox_points:.1f} points in the mean of the last ten rounds" in text
    assert by_fifties(lead_of_fedprox) in text

    assert f"{scaffold[-1]:.1f} %" in text
    assert f"{last_ten(lead_of_scaffold):.1f} points above FedAvg" in text
    assert by_fifties(lead_of_scaffold) in text


def test_scaffold_at_full_size_is_that_of_the_page() -> None:
    (scaffold,) = full_size("SCAFFOLD", seeds=(1,))
    sentence = f"it ends at {scaffold[-1]:.1f} %, and is never above {max(scaffold):.1f} %"
    assert sentence in words(PAGE)


def test_table_1_at_full_size_is_that_of_the_page() -> None:
    text = words(section(TABLE_1))
    fedavg = full_size("FedAvg", table="table1", column="s=2")
    fedntd = full_size("FedNTD", table="table1", column="s=2")
    fedadkd = full_size("FedADKD", table="table1", column="s=2")

    assert f"{listed(curve[-1] for curve in fedavg)} %" in text
    first, second, third = [
        f"{min(curve[LAST_TEN]):.0f} to {max(curve[LAST_TEN]):.0f}" for curve in fedavg
    ]
    assert f"{first} % on the first seed, {second} on the second, {third} on the third" in text
    assert f"means are {listed(map(last_ten, fedavg))} %" in text

    over_fedntd = leads(fedadkd, fedntd)
    for lead_by_seed in (leads(fedntd, fedavg), over_fedntd):
        assert listed(lead[-1] for lead in lead_by_seed) in text
        assert listed(map(last_ten, lead_by_seed)) in text
        for lead in lead_by_seed:
            assert by_fifties(lead) in text
    assert list(map(rounds_not_above, over_fedntd)) == [0, 1, 0]


def chain_journal(method: str) -> Path:
    """The journal of a row of SFedKD's Table 1."""
    folder = readable(ROOT / "results" / "sfedkd-table1-full")
    return folder / f"FMNIST_2-.5_{method}" / "seed1" / "journal.jsonl"


def client_steps(journal: Path) -> int:
    """The number of batches that the clients of a run trained on."""
    clients = [event for event in read_journal(journal) if event["event"] == "client"]
    return sum(event.get("steps", 0) for event in clients)


def test_the_chain_at_full_size_is_that_of_the_page() -> None:
    text = words(section("SFedKD, Table 1, Fashion-MNIST, at full size"))
    journals = [chain_journal(method) for method in ("FedAvg", "FedSeq", "SFedKD")]

    (steps,) = {client_steps(journal) for journal in journals}
    assert f"{steps:,} steps" in text

    curves = [accuracy_curve(journal) for journal in journals]
    assert [len(curve) for curve in curves] == [1000, 1000, 1000]
    fedavg, fedseq, sfedkd = [by_blocks(curve, 100) for curve in curves]
    over_fedavg = differences(fedseq, fedavg)
    assert f"{min(over_fedavg):.1f} to {max(over_fedavg):.1f}" in text
    for block in (0, 1, 5, 9):
        assert f"{sfedkd[block]:.1f} and {fedseq[block]:.1f}" in text
    lead = differences(sfedkd, fedseq)
    assert min(lead) > 0
    assert f"by {lead[0]:.1f} points in the first and {lead[-1]:.1f} in the last" in text


@dataclass(frozen=True)
class TableRow:
    """A row of FedNTD's Table 1, two shards: its cells on the page, our run, and both papers.

    accuracy, forgetting: [%] by round; the forgetting of round 1 is 0. fedntd, fedadkd: the numbers
    of this row in the paper of FedNTD, and in that of FedADKD.
    """

    method: str
    cells: list[str]
    accuracy: Curve
    forgetting: Curve
    fedntd: Mapping[str, float]
    fedadkd: Mapping[str, float]


def table_row(method: str, cells: list[str]) -> TableRow:
    """The row of a method, whose cells on the page these are."""
    folder = readable(ROOT / "results" / "fedntd-table1-full")
    journal = folder / f"CIFAR-10_s=2_{method}" / "seed1" / "journal.jsonl"
    rounds = [event for event in read_journal(journal) if event["event"] == "round"]
    column = (method, "CIFAR-10 s=2")
    return TableRow(
        method=method,
        cells=cells,
        accuracy=[100 * event["accuracy"] for event in rounds],
        forgetting=[100 * event["forgetting"] for event in rounds],
        fedntd=load_recipe("fedntd/table1_sharding").published[column].values,
        fedadkd=load_recipe("fedadkd/table1").published[column].values,
    )


FEDNTD_TABLE = "FedNTD, Table 1, two shards, at full size"


@pytest.fixture(scope="module")
def fedntd_rows() -> list[TableRow]:
    """The rows of the page's table with FedNTD's Table 1."""
    rows = []
    for line in section(FEDNTD_TABLE).splitlines():
        if re.match(r"\| [A-Z]", line):
            method, *cells = line.strip("| ").split(" | ")
            rows.append(table_row(method, cells))
    return rows


def root_mean_square(values: Iterable[float]) -> float:
    """The root of the mean of the squares."""
    return math.sqrt(statistics.fmean(value**2 for value in values))


def accuracy_distance(rows: Sequence[TableRow], round: int) -> float:
    """How far our accuracies after a round are from those of FedNTD's paper."""
    return root_mean_square(row.accuracy[round - 1] - row.fedntd["accuracy"] for row in rows)


def forgetting_distance(rows: Sequence[TableRow], round: int) -> float:
    """How far our forgetting after a round is from that of FedNTD's paper."""
    return root_mean_square(row.forgetting[round - 1] - row.fedntd["forgetting"] for row in rows)


def distance(rows: Sequence[TableRow], round: int) -> float:
    """How far accuracy and forgetting after a round are from FedNTD's paper."""
    return math.hypot(accuracy_distance(rows, round), forgetting_distance(rows, round))


def test_fedntds_table_shows_our_numbers_and_those_of_both_papers(
    fedntd_rows: list[TableRow],
) -> None:
    for row in fedntd_rows:
        assert row.cells == [
            f"{row.accuracy[-1]:.1f}",
            f"{row.fedadkd['accuracy']:.2f}",
            f"{row.fedntd['accuracy']:.2f}",
            f"{row.forgetting[-1]:.1f}",
            f"{row.fedntd['forgetting']:.0f}",
        ]

    not_above = [row for row in fedntd_rows if row.accuracy[-1] <= row.fedntd["accuracy"]]
    assert [row.method for row in not_above] == ["FedNova"]


def test_fedntds_table_is_as_far_from_both_papers_as_the_page_states(
    fedntd_rows: list[TableRow],
) -> None:
    rows = fedntd_rows
    from_fedadkd = root_mean_square(row.accuracy[-1] - row.fedadkd["accuracy"] for row in rows)
    from_fedntd = accuracy_distance(rows, 200)
    nearest = min(range(2, 201), key=lambda round: distance(rows, round))

    sentences = (
        f"ours are {from_fedadkd:.1f} points from FedADKD's (root mean square) and "
        f"{from_fedntd:.1f} from FedNTD's. "
        f"Of our rounds, round {nearest} is nearest to FedNTD's numbers: "
        f"{accuracy_distance(rows, nearest):.1f} points away in accuracy, "
        f"{forgetting_distance(rows, nearest):.1f} in F. "
        f"In the last round, F is {forgetting_distance(rows, 200):.1f} points away."
    )
    assert sentences in words(section(FEDNTD_TABLE))
    assert distance(rows, 151) < distance(rows, nearest) + 0.1, "as near"
