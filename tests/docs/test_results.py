"""The tables of docs/results.md are what their commands print from results/; the claims' intervals follow from them."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fedstill.cli import call
from fedstill.experiment.run_directory.evidence import readable
from fedstill.experiment.run_directory.journal import read_journal
from fedstill.metrics.ranks import paired_difference
from fedstill.report.groups import groups
from fedstill.report.leaks import leak_rows
from fedstill.report.numbers import COLUMNS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text()
BLOCK = re.compile(r"^( *)```\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
MEASURES = (
    "accuracy",
    "mean_accuracy_last_10",
    "forgetting",
    "query_gain",
    "query_forgetting",
    "query_average_accuracy",
)
INTERVAL = re.compile(r"([+-]\d+\.\d), ([+-]\d+\.\d) to ([+-]\d+\.\d)")
ENDS = re.compile(r"([+-]\d+\.\d) to ([+-]\d+\.\d)")
LABELS = {"central": "fedavg"}
"""Rows that the page calls by another name than the report: FedAvg with all data in one place."""


def shown() -> Iterator[tuple[str, str]]:
    """Blocks of commands, each with the block that comes after it."""
    blocks = [textwrap.dedent(indent + text) for indent, text in BLOCK.findall(PAGE)]
    for first, then in itertools.pairwise(blocks):
        if first.startswith(("fedstill ", "S=")):
            yield first.replace("\\\n", " "), then


TABLES = [(command, table) for command, table in shown() if re.search(r" --table\b", command)]
COMPARED = [(commands, table) for commands, table in shown() if table.lstrip().startswith("accuracy, last")]


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def place(command: str) -> str:
    return re.findall(r"--out (\S+)", command)[0]


def test_there_are_tables_of_both_kinds() -> None:
    assert len(TABLES) > 20
    assert len(COMPARED) > 10


@pytest.mark.parametrize(("command", "table"), TABLES, ids=[place(command) for command, _ in TABLES])
def test_a_papers_table_is_what_its_command_prints(
    command: str, table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert call(shlex.split(command)[1:]) == 0
    printed = iter(lines(capsys.readouterr().out))
    missing = [line for line in lines(table) if line not in printed]  # as an iterator: in this order
    assert missing == []


@pytest.mark.parametrize(("commands", "table"), COMPARED, ids=[place(commands) for commands, _ in COMPARED])
def test_a_row_of_a_comparison_has_the_numbers_of_a_group_of_its_runs(commands: str, table: str) -> None:
    there = [group for folder in sorted(set(re.findall(r"--out (\S+)", commands))) for group in of_groups(folder)]
    checked = 0
    for label, *cells in (re.split(r"\s{2,}", line.rstrip()) for line in table.splitlines() if line[0] != " "):
        method = LABELS.get(label, label.partition(",")[0])
        wanted = {c for c in cells if c}
        assert any(name == method and wanted <= numbers for name, numbers in there), f"no group is {label} {cells}"
        checked += 1
    assert checked


@cache
def of_groups(folder: str) -> list[tuple[str, set[str]]]:
    """What a line of a table says of each group of runs below a folder, with its method; attacks have own lines."""
    every = groups([readable(ROOT / folder)])
    own = [
        (g, [v.text(c.scale, 1) for c in COLUMNS if (v := g.mean_spread(c.key))] + [str(len(g.seeds))]) for g in every
    ]
    return [(g.label.partition(",")[0], set(numbers)) for g, numbers in [*own, *leak_rows(every, ends=False)]]


def test_each_interval_of_the_claims_is_a_paired_difference_of_two_rows() -> None:
    claims = PAGE.partition("## Claims and verdicts")[2].partition("\n## ")[0]
    said = set(INTERVAL.findall(claims))
    folders = {place(command) for command, _ in [*TABLES, *COMPARED]}
    assert len(said) > 20
    assert sorted(said - {d for folder in folders for d in differences(folder)}) == []


def test_each_interval_of_the_text_is_one_of_two_rows_or_stands_in_a_block() -> None:
    """Lines of tables of the page itself, ``| … |``, have tests of their own."""
    prose = "\n".join(line for line in BLOCK.sub("", PAGE).splitlines() if not line.startswith("|"))
    said = set(ENDS.findall(prose))
    folders = {place(command) for command, _ in [*TABLES, *COMPARED]} | {"results/attacks", "results/attacks-none"}
    known = {(low, high) for folder in folders for _, low, high in differences(folder)}
    known |= {ends for _, block in BLOCK.findall(PAGE) for ends in ENDS.findall(block)}
    known |= {(negative(high), negative(low)) for low, high in known}
    assert len(said) > 10
    assert sorted(said - known) == []


def negative(number: str) -> str:
    return number.translate(str.maketrans("+-", "-+"))


def test_what_phases_and_probes_print_is_on_the_page() -> None:
    every = [textwrap.dedent(indent + text) for indent, text in BLOCK.findall(PAGE)]
    shown = [
        (a, b)
        for a, b in itertools.pairwise(every)
        if a.startswith(("python -m benchmarks.phases", "python -m benchmarks.probes"))
    ]
    assert len(shown) == 5
    for command, block in shown:
        words = command.replace("\\\n", " ").replace("python", shlex.quote(sys.executable), 1)
        wide = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
        ran = subprocess.run(["bash", "-c", words], cwd=ROOT, env=wide, capture_output=True, text=True, check=True)
        assert lines(ran.stdout) == lines(block)


def test_the_leads_at_full_size_are_what_the_page_says_of_them() -> None:
    text = " ".join(PAGE.split())
    fedavg, fedntd, fedadkd = (full_size(method) for method in ("FedAvg", "FedNTD", "FedADKD"))
    for one, other in ((fedntd, fedavg), (fedadkd, fedntd)):
        means = [statistics.fmean(a - b for a, b in zip(x[-10:], y[-10:], strict=True)) for x, y in each(one, other)]
        ends = "by {:.1f}, {:.1f} and {:.1f} points".format(*means)
        assert f"on all seeds, {ends} in the mean of the last ten rounds" in text
    leads = [[a - b for a, b in zip(x, y, strict=True)] for x, y in each(fedadkd, fedntd)]
    assert [sum(lead <= 0 for lead in of_seed[100:]) for of_seed in leads] == [0, 2, 0], "rounds not above"
    first, second, third = map(by_fifties, leads)
    assert f"{first} points on the first seed, {second} on the second, {third} on the third" in text
    tens = [[accuracy for curve in row for accuracy in curve[-10:]] for row in (fedavg, fedntd, fedadkd)]
    said = [f"{min(ten):.0f} to {max(ten):.0f} %" for ten in tens]
    assert "are {} for FedAvg, {} for FedNTD, {} for FedADKD".format(*said) in text


def test_fedprox_at_full_size_is_what_the_page_says_of_it() -> None:
    ((fedprox, fedavg),) = each(full_size("FedProx", seeds=(1,)), full_size("FedAvg", seeds=(1,)))
    lead = [a - b for a, b in zip(fedprox, fedavg, strict=True)]
    said = f"by {statistics.fmean(lead[-10:]):.1f} points in the mean of the last ten rounds, and on average over each"
    assert f"{said} fifty rounds by {by_fifties(lead)}." in " ".join(PAGE.split())


def test_the_single_rows_of_table_1_at_full_size_are_what_the_page_says_of_them() -> None:
    text = " ".join(PAGE.partition("## FedADKD, Table I at full size")[2].partition("\n## ")[0].split())
    (fedavg,), (fedprox,), (scaffold,) = (
        full_size(m, (1,), "table1", "s=2") for m in ("FedAvg", "FedProx", "SCAFFOLD")
    )
    leads = [[a - b for a, b in zip(one, fedavg, strict=True)] for one in (fedprox, scaffold)]
    tens = [statistics.fmean(lead[-10:]) for lead in leads]
    assert f"by {tens[0]:.1f} points in the mean of the last ten rounds, and on average" in text
    assert f"it ends at {scaffold[-1]:.1f} %, in the last ten {tens[1]:.1f} points above FedAvg" in text
    for lead in leads:
        assert by_fifties(lead) in text


def test_scaffold_at_full_size_is_what_the_page_says_of_it() -> None:
    (scaffold,) = full_size("SCAFFOLD", seeds=(1,))
    said = f"it ends at {scaffold[-1]:.1f} %, and is never above {max(scaffold):.1f} %"
    assert said in " ".join(PAGE.split())


def test_table_1_at_full_size_is_what_the_page_says_of_it() -> None:
    text = " ".join(PAGE.partition("## FedADKD, Table I at full size")[2].partition("\n## ")[0].split())
    fedavg = full_size("FedAvg", (1, 2, 3), "table1", "s=2")
    fedntd, fedadkd = (full_size(m, (1, 2, 3), "table1", "s=2") for m in ("FedNTD", "FedADKD"))
    assert "{:.1f}, {:.1f} and {:.1f} %, as".format(*(curve[-1] for curve in fedavg)) in text
    tens = [f"{min(curve[-10:]):.0f} to {max(curve[-10:]):.0f}" for curve in fedavg]
    assert "{} % on the first seed, {} on the second, {} on the third".format(*tens) in text
    assert "means are {:.1f}, {:.1f} and {:.1f} %".format(*(statistics.fmean(c[-10:]) for c in fedavg)) in text
    over_fedavg, over_fedntd = (
        [[a - b for a, b in zip(x, y, strict=True)] for x, y in each(one, other)]
        for one, other in ((fedntd, fedavg), (fedadkd, fedntd))
    )
    for leads in (over_fedavg, over_fedntd):
        assert "{:.1f}, {:.1f} and {:.1f}".format(*(lead[-1] for lead in leads)) in text
        assert "{:.1f}, {:.1f} and {:.1f}".format(*(statistics.fmean(lead[-10:]) for lead in leads)) in text
        assert "{} points on the first seed, {} on the second, {} on the third".format(*map(by_fifties, leads)) in text
    assert [sum(v <= 0 for v in lead[100:]) for lead in over_fedntd] == [0, 1, 0], "rounds not above"


def test_the_chain_at_full_size_is_what_the_page_says_of_it() -> None:
    text = " ".join(PAGE.partition("## SFedKD, Table 1, Fashion-MNIST, at full size")[2].partition("\n## ")[0].split())
    folder = readable(ROOT / "results" / "sfedkd-table1-full")
    rows = [read_journal(folder / f"FMNIST_2-.5_{m}/seed1/journal.jsonl") for m in ("FedAvg", "FedSeq", "SFedKD")]
    steps = {sum(e.get("steps", 0) for e in events if e["event"] == "client") for events in rows}
    assert [f"{n:,} steps" in text for n in steps] == [True]
    curves = [[100 * e["accuracy"] for e in events if e["event"] == "round"] for events in rows]
    fedavg, fedseq, sfedkd = ([statistics.fmean(c[i : i + 100]) for i in range(0, 1000, 100)] for c in curves)
    over = [a - b for a, b in zip(fedseq, fedavg, strict=True)]
    assert f"{min(over):.1f} to {max(over):.1f} in the mean of each hundred rounds" in text
    both = [f"{a:.1f} and {b:.1f}" for a, b in zip(sfedkd, fedseq, strict=True)]
    assert (
        "{} in the first, {} in the second, {} in the sixth, {} in the last".format(*(both[i] for i in (0, 1, 5, 9)))
        in text
    )
    leads = [a - b for a, b in zip(sfedkd, fedseq, strict=True)]
    assert min(leads) > 0
    assert f"above in each, by {leads[0]:.1f} points in the first and {leads[-1]:.1f} in the last" in text


def by_fifties(lead: list[float]) -> str:
    return "{}, {}, {} and {}".format(*(f"{statistics.fmean(lead[i : i + 50]):.1f}" for i in range(0, 200, 50)))


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


def differences(folder: str) -> Iterator[tuple[str, str, str]]:
    """Mean and 95 % interval of all measures' differences, in points, between every two rows of one folder."""
    rows: dict[Path, dict[int, dict[str, float]]] = {}
    for path in sorted(readable(ROOT / folder).rglob("summary.json")):
        summary = json.loads(path.read_text())
        rows.setdefault(path.parents[1], {})[summary["seed"]] = summary
    for one, other in itertools.permutations(rows.values(), 2):
        for key in MEASURES:
            apart = paired_difference(
                *({s: r[key] for s, r in row.items() if r.get(key) is not None} for row in (one, other))
            )
            if apart is not None and apart.pairs > 1:
                yield tuple(f"{100 * v:+.1f}" for v in (apart.mean, apart.low, apart.high))  # type: ignore[misc]
