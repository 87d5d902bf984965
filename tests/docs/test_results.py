"""The tables of docs/results.md are what their commands print from results/; the claims' intervals
follow from them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fedstill.cli import call
from fedstill.experiment.run_directory.evidence import readable
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
COMPARED = [
    (commands, table) for commands, table in shown() if table.lstrip().startswith("accuracy, last")
]


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def place(command: str) -> str:
    return re.findall(r"--out (\S+)", command)[0]


def test_there_are_tables_of_both_kinds() -> None:
    assert len(TABLES) > 20
    assert len(COMPARED) > 10


@pytest.mark.parametrize(
    ("command", "table"), TABLES, ids=[place(command) for command, _ in TABLES]
)
def test_a_papers_table_is_what_its_command_prints(
    command: str, table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert call(shlex.split(command)[1:]) == 0
    printed = iter(lines(capsys.readouterr().out))
    # as an iterator: in this order
    missing = [line for line in lines(table) if line not in printed]
    assert missing == []


@pytest.mark.parametrize(
    ("commands", "table"), COMPARED, ids=[place(commands) for commands, _ in COMPARED]
)
def test_a_row_of_a_comparison_has_the_numbers_of_a_group_of_its_runs(
    commands: str, table: str
) -> None:
    there = [
        group
        for folder in sorted(set(re.findall(r"--out (\S+)", commands)))
        for group in of_groups(folder)
    ]
    checked = 0
    for label, *cells in (
        re.split(r"\s{2,}", line.rstrip()) for line in table.splitlines() if line[0] != " "
    ):
        method = LABELS.get(label, label.partition(",")[0])
        wanted = {c for c in cells if c}
        assert any(name == method and wanted <= numbers for name, numbers in there), (
            f"no group is {label} {cells}"
        )
        checked += 1
    assert checked


@cache
def of_groups(folder: str) -> list[tuple[str, set[str]]]:
    """What a line of a table says of each group of runs below a folder, with its method; attacks
    have own lines.
    """
    every = groups([readable(ROOT / folder)])
    own = [
        (
            g,
            [v.text(c.scale, 1) for c in COLUMNS if (v := g.mean_spread(c.key))]
            + [str(len(g.seeds))],
        )
        for g in every
    ]
    return [
        (g.label.partition(",")[0], set(numbers))
        for g, numbers in [*own, *leak_rows(every, ends=False)]
    ]


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
    folders = {place(command) for command, _ in [*TABLES, *COMPARED]} | {
        "results/attacks",
        "results/attacks-none",
    }
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
        ran = subprocess.run(
            ["bash", "-c", words], cwd=ROOT, env=wide, capture_output=True, text=True, check=True
        )
        assert lines(ran.stdout) == lines(block)


def differences(folder: str) -> Iterator[tuple[str, str, str]]:
    """Mean and 95 % interval of all measures' differences, in points, between every two rows of one
    folder.
    """
    rows: dict[Path, dict[int, dict[str, float]]] = {}
    for path in sorted(readable(ROOT / folder).rglob("summary.json")):
        summary = json.loads(path.read_text())
        rows.setdefault(path.parents[1], {})[summary["seed"]] = summary
    for one, other in itertools.permutations(rows.values(), 2):
        for key in MEASURES:
            apart = paired_difference(
                *(
                    {s: r[key] for s, r in row.items() if r.get(key) is not None}
                    for row in (one, other)
                )
            )
            if apart is not None and apart.pairs > 1:
                yield tuple(f"{100 * v:+.1f}" for v in (apart.mean, apart.low, apart.high))  # type: ignore[misc]
