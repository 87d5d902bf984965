"""The numbers in the text beside the tables at the papers' own size follow from their journals.

The tests look for the numbers in the text of a section, whatever the words around them.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path

from tools.results_page import text_of_pages

from fedstill.benchmark.recipes import load_recipe
from fedstill.running.journal import read_journal
from fedstill.running.packs import readable

ROOT = Path(__file__).parents[2]
PAGE = text_of_pages()


def test_the_leads_at_full_size_are_what_the_page_says_of_them() -> None:
    text = " ".join(PAGE.split())
    fedavg, fedntd, fedadkd = (full_size(method) for method in ("FedAvg", "FedNTD", "FedADKD"))
    for one, other in ((fedntd, fedavg), (fedadkd, fedntd)):
        means = [
            statistics.fmean(a - b for a, b in zip(x[-10:], y[-10:], strict=True))
            for x, y in each(one, other)
        ]
        assert min(means) > 0
        assert "{:.1f}, {:.1f} and {:.1f} points".format(*means) in text
    leads = [[a - b for a, b in zip(x, y, strict=True)] for x, y in each(fedadkd, fedntd)]
    assert [sum(lead <= 0 for lead in of_seed[100:]) for of_seed in leads] == [0, 2, 0], (
        "rounds not above"
    )
    assert all(by_fifties(lead) in text for lead in leads)
    tens = [
        [accuracy for curve in row for accuracy in curve[-10:]] for row in (fedavg, fedntd, fedadkd)
    ]
    assert all(f"{min(ten):.0f} to {max(ten):.0f} %" in text for ten in tens)


def test_fedprox_at_full_size_is_what_the_page_says_of_it() -> None:
    ((fedprox, fedavg),) = each(full_size("FedProx", seeds=(1,)), full_size("FedAvg", seeds=(1,)))
    lead = [a - b for a, b in zip(fedprox, fedavg, strict=True)]
    text = " ".join(PAGE.split())
    assert f"by {statistics.fmean(lead[-10:]):.1f} points in the mean of the last ten" in text
    assert by_fifties(lead) in text


def test_the_single_rows_of_table_1_at_full_size_are_what_the_page_says_of_them() -> None:
    text = " ".join(
        PAGE.partition("## FedADKD, Table I at full size")[2].partition("\n## ")[0].split()
    )
    (fedavg,), (fedprox,), (scaffold,) = (
        full_size(m, (1,), "table1", "s=2") for m in ("FedAvg", "FedProx", "SCAFFOLD")
    )
    leads = [[a - b for a, b in zip(one, fedavg, strict=True)] for one in (fedprox, scaffold)]
    tens = [statistics.fmean(lead[-10:]) for lead in leads]
    assert f"by {tens[0]:.1f} points in the mean of the last ten rounds" in text
    assert f"{scaffold[-1]:.1f} %" in text
    assert f"{tens[1]:.1f} points above FedAvg" in text
    for lead in leads:
        assert by_fifties(lead) in text


def test_scaffold_at_full_size_is_what_the_page_says_of_it() -> None:
    (scaffold,) = full_size("SCAFFOLD", seeds=(1,))
    said = f"it ends at {scaffold[-1]:.1f} %, and is never above {max(scaffold):.1f} %"
    assert said in " ".join(PAGE.split())


def test_table_1_at_full_size_is_what_the_page_says_of_it() -> None:
    text = " ".join(
        PAGE.partition("## FedADKD, Table I at full size")[2].partition("\n## ")[0].split()
    )
    fedavg = full_size("FedAvg", (1, 2, 3), "table1", "s=2")
    fedntd, fedadkd = (full_size(m, (1, 2, 3), "table1", "s=2") for m in ("FedNTD", "FedADKD"))
    assert "{:.1f}, {:.1f} and {:.1f} %".format(*(curve[-1] for curve in fedavg)) in text
    tens = [f"{min(curve[-10:]):.0f} to {max(curve[-10:]):.0f}" for curve in fedavg]
    assert "{} % on the first seed, {} on the second, {} on the third".format(*tens) in text
    assert (
        "means are {:.1f}, {:.1f} and {:.1f} %".format(*(statistics.fmean(c[-10:]) for c in fedavg))
        in text
    )
    over_fedavg, over_fedntd = (
        [[a - b for a, b in zip(x, y, strict=True)] for x, y in each(one, other)]
        for one, other in ((fedntd, fedavg), (fedadkd, fedntd))
    )
    for leads in (over_fedavg, over_fedntd):
        assert "{:.1f}, {:.1f} and {:.1f}".format(*(lead[-1] for lead in leads)) in text
        assert (
            "{:.1f}, {:.1f} and {:.1f}".format(*(statistics.fmean(lead[-10:]) for lead in leads))
            in text
        )
        assert all(by_fifties(lead) in text for lead in leads)
    assert [sum(v <= 0 for v in lead[100:]) for lead in over_fedntd] == [0, 1, 0], (
        "rounds not above"
    )


def test_the_chain_at_full_size_is_what_the_page_says_of_it() -> None:
    text = " ".join(
        PAGE.partition("## SFedKD, Table 1, Fashion-MNIST, at full size")[2]
        .partition("\n## ")[0]
        .split()
    )
    folder = readable(ROOT / "results" / "sfedkd-table1-full")
    rows = [
        read_journal(folder / f"FMNIST_2-.5_{m}/seed1/journal.jsonl")
        for m in ("FedAvg", "FedSeq", "SFedKD")
    ]
    steps = {sum(e.get("steps", 0) for e in events if e["event"] == "client") for events in rows}
    assert [f"{n:,} steps" in text for n in steps] == [True]
    curves = [[100 * e["accuracy"] for e in events if e["event"] == "round"] for events in rows]
    fedavg, fedseq, sfedkd = (
        [statistics.fmean(c[i : i + 100]) for i in range(0, 1000, 100)] for c in curves
    )
    over = [a - b for a, b in zip(fedseq, fedavg, strict=True)]
    assert f"{min(over):.1f} to {max(over):.1f}" in text
    both = [f"{a:.1f} and {b:.1f}" for a, b in zip(sfedkd, fedseq, strict=True)]
    assert all(both[i] in text for i in (0, 1, 5, 9))
    leads = [a - b for a, b in zip(sfedkd, fedseq, strict=True)]
    assert min(leads) > 0
    assert f"by {leads[0]:.1f} points in the first and {leads[-1]:.1f} in the last" in text


def test_fedntds_own_table_is_as_far_from_both_papers_as_the_page_says() -> None:
    section = PAGE.partition("## FedNTD, Table 1, two shards, at full size")[2].partition("\n## ")[
        0
    ]
    rows = [
        line.strip("| ").split(" | ")
        for line in section.splitlines()
        if re.match(r"\| [A-Z]", line)
    ]
    ours = [by_round(name) for name, *_ in rows]
    column = [(name, "CIFAR-10 s=2") for name, *_ in rows]
    later, own = (
        [load_recipe(name).published[c].values for c in column]
        for name in ("fedadkd/table1", "fedntd/table1_sharding")
    )
    lower = [
        name
        for (name, *_), (accuracy, _), paper in zip(rows, ours, own, strict=True)
        if accuracy[-1] > paper["accuracy"]
    ]
    assert {name for name, *_ in rows} - {*lower} == {"FedNova"}
    for (_, *numbers), (accuracy, lost), there, paper in zip(rows, ours, later, own, strict=True):
        shown = [
            f"{accuracy[-1]:.1f}",
            f"{there['accuracy']:.2f}",
            f"{paper['accuracy']:.2f}",
            f"{lost[-1]:.1f}",
        ]
        assert numbers == [*shown, f"{paper['forgetting']:.0f}"]

    def off(papers: list[Mapping[str, float]], round: int, key: str = "accuracy") -> float:
        values = [one[("accuracy", "forgetting").index(key)][round - 1] for one in ours]
        return math.sqrt(
            statistics.fmean((v - p[key]) ** 2 for v, p in zip(values, papers, strict=True))
        )

    def both(round: int) -> tuple[float, float]:
        return off(own, round), off(own, round, "forgetting")

    nearest = min(range(2, 201), key=lambda round: math.hypot(*both(round)))
    away = (
        f"{off(later, 200):.1f} points from FedADKD's (root mean square) and {off(own, 200):.1f} "
        "from FedNTD's"
    )
    points, in_f = both(nearest)
    said = (
        f"ours are {away}. Of our rounds, round {nearest} is nearest to FedNTD's numbers: "
        f"{points:.1f} points away in accuracy, {in_f:.1f} in F. In the last round, F is "
        f"{both(200)[1]:.1f} points away."
    )
    assert said in " ".join(section.split())
    assert math.hypot(*both(151)) < math.hypot(*both(nearest)) + 0.1, "as near"


def by_round(method: str) -> tuple[list[float], list[float]]:
    """Accuracy and F of a row of FedNTD's Table 1, two shards, by round [%]; F of the first round
    is 0.
    """
    journal = (
        readable(ROOT / "results" / "fedntd-table1-full")
        / f"CIFAR-10_s=2_{method}"
        / "seed1"
        / "journal.jsonl"
    )
    rounds = [e for e in read_journal(journal) if e["event"] == "round"]
    return [100 * e["accuracy"] for e in rounds], [100 * e["forgetting"] for e in rounds]


def by_fifties(lead: list[float]) -> str:
    return "{}, {}, {} and {}".format(
        *(f"{statistics.fmean(lead[i : i + 50]):.1f}" for i in range(0, 200, 50))
    )


def full_size(
    method: str, seeds: tuple[int, ...] = (1, 2, 3), table: str = "table2", column: str = ".1"
) -> list[list[float]]:
    """The accuracies [%] by round of each seed of a row of a table of FedADKD's at full size."""
    row = readable(ROOT / "results" / f"fedadkd-{table}-full") / f"CIFAR-10_{column}_{method}"
    journals = [read_journal(row / f"seed{seed}" / "journal.jsonl") for seed in seeds]
    curves = [[100 * e["accuracy"] for e in events if e["event"] == "round"] for events in journals]
    assert [len(curve) for curve in curves] == [200] * len(seeds)
    return curves


def each(one: list[list[float]], other: list[list[float]]) -> list[tuple[list[float], list[float]]]:
    return list(zip(one, other, strict=True))
