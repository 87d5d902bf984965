"""Compares the pages below docs/results with the runs in ``results/``.

A block of commands is followed by a block that shows their output. Each command is executed, and
its output is compared with the second block. A block may leave out lines of the output, so
``tools.docs_check --write`` does not write these blocks.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from fedstill.cli import call
from fedstill.report.leaks import leak_rows
from fedstill.report.summary import COLUMNS
from fedstill.running.packs import readable
from fedstill.running.runs import Group, groups

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "results"
BLOCK = re.compile(r"^( *)```\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
COMMANDS = (
    "fedstill ",
    "S=",
    "python -m benchmarks.phases",
    "python -m benchmarks.probes",
    "python -m benchmarks.forgotten",
)
METHOD_OF_LABEL = {"central": "fedavg"}
"""Rows that the page calls by another name than the report: FedAvg with all data in one place."""


@dataclass(frozen=True)
class CommandBlock:
    """A block of commands, and the block after it, which shows what the last of them printed."""

    commands: str
    output: str

    @property
    def folders(self) -> list[str]:
        """The folders that the commands write to, sorted."""
        return sorted(set(re.findall(r"--out (\S+)", self.commands)))


def text_of_pages() -> str:
    """The text of all pages of results; the page with the claims comes first."""
    index = PAGES / "index.md"
    paths = [index, *sorted(set(PAGES.glob("*.md")) - {index})]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def blocks(page: str) -> list[str]:
    """The blocks that have no language, without their indentation."""
    return [textwrap.dedent(indent + text) for indent, text in BLOCK.findall(page)]


def command_blocks() -> Iterator[CommandBlock]:
    """All blocks of commands."""
    for first, second in pairwise(blocks(text_of_pages())):
        if first.startswith(COMMANDS):
            yield CommandBlock(first.replace("\\\n", " "), second)


def paper_tables() -> list[CommandBlock]:
    """Papers' tables: a command with ``--table``."""
    return [block for block in command_blocks() if re.search(r" --table\b", block.commands)]


def comparisons() -> list[CommandBlock]:
    """Comparisons: a line for each group of runs."""
    return [
        block for block in command_blocks() if block.output.lstrip().startswith("accuracy, last")
    ]


def lines(text: str) -> list[str]:
    """The lines of a text that are not empty, with single spaces."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def absent(expected: Sequence[str], printed: Sequence[str]) -> list[str]:
    """The lines that are not among the printed ones in this order."""
    remaining = iter(printed)
    return [line for line in expected if line not in remaining]


def captured(arguments: Sequence[str]) -> str:
    """What ``fedstill`` prints to a standard output that is no terminal; raises ValueError if it
    fails.
    """
    buffer = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with redirect_stdout(buffer):
        status = call(list(arguments))
    if status:
        raise ValueError(f"fedstill {shlex.join(arguments)} failed")
    return text_of(buffer)


def text_of(buffer: io.TextIOWrapper) -> str:
    """What was written to a buffer."""
    buffer.seek(0)
    return buffer.read()


def wrong_paper_tables() -> Iterator[str]:
    """Lines of papers' tables that their commands do not print."""
    os.environ.pop("COLUMNS", None)
    tables = paper_tables()
    if len(tables) < 20:
        yield f"only {len(tables)} tables of papers were found: has the form of the pages changed?"
    for block in tables:
        printed = lines(captured(shlex.split(block.commands)[1:]))
        missing = absent(lines(block.output), printed)
        # After the first missing line, the order of the remaining lines is not informative.
        yield from (
            f"the command for {' '.join(block.folders)} does not print: {line}"
            for line in missing[:1]
        )


def wrong_comparisons() -> Iterator[str]:
    """Rows of comparisons whose numbers no group of runs has."""
    tables = comparisons()
    if len(tables) < 10:
        yield f"only {len(tables)} comparisons were found: has the form of the pages changed?"
    for block in tables:
        groups_of_runs: list[Row] = []
        for folder in block.folders:
            groups_of_runs += rows_of(folder)
        rows = [line.rstrip() for line in block.output.splitlines() if not line.startswith(" ")]
        if not rows:
            yield f"{block.commands.strip()}: the comparison has no row"
        for row in rows:
            label, *cells = re.split(r"\s{2,}", row)
            method = METHOD_OF_LABEL.get(label, label.partition(",")[0])
            numbers = {cell for cell in cells if cell}
            if not any(group.has(method, numbers) for group in groups_of_runs):
                yield f"{' '.join(block.folders)} has no group with the numbers of: {row}"


@dataclass(frozen=True)
class Row:
    """The numbers of a group of runs, as a comparison prints them."""

    method: str
    numbers: frozenset[str]

    def has(self, method: str, numbers: set[str]) -> bool:
        """Whether the group is of this method and has these numbers."""
        return self.method == method and numbers <= self.numbers


@cache
def rows_of(folder: str) -> list[Row]:
    """The rows of all groups below a folder; attacks on privacy have rows of their own."""
    runs = groups([readable(ROOT / folder)])
    numbers = [(group, printed_numbers(group)) for group in runs]
    numbers += [(row.group, row.plain_cells) for row in leak_rows(runs)]
    return [Row(group.label.partition(",")[0], frozenset(cells)) for group, cells in numbers]


def printed_numbers(group: Group) -> list[str]:
    """Mean and spread of each column that a group has, and the number of its seeds."""
    spreads = [(column, group.mean_spread(column.key)) for column in COLUMNS]
    cells = [spread.text(column.scale, 1) for column, spread in spreads if spread]
    return [*cells, str(len(group.seeds))]


def wrong_benchmarks() -> Iterator[str]:
    """Blocks of benchmarks that read journals, where these print something else."""
    os.environ.pop("COLUMNS", None)
    outputs = [
        block for block in command_blocks() if block.commands.startswith("python -m benchmarks.")
    ]
    if len(outputs) < 5:
        yield (
            f"only {len(outputs)} outputs of benchmarks were found: has the form of the page "
            "changed?"
        )
    for block in outputs:
        program, arguments = words_of(block.commands)
        if lines(printed_by(program, arguments)) != lines(block.output):
            yield f"{block.commands.strip()} prints something else"


def words_of(command: str) -> tuple[str, list[str]]:
    """Module and arguments of ``python -m MODULE ARGUMENTS``, with the braces that a shell
    expands.
    """
    expand = ["bash", "-c", f"printf '%s\\n' {command}"]
    expanded = subprocess.run(
        expand, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return expanded[2], expanded[3:]


def printed_by(module: str, arguments: Sequence[str]) -> str:
    """What a module prints when it is executed in this process."""
    buffer = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    original = sys.argv
    sys.argv = [module, *arguments]
    try:
        with redirect_stdout(buffer):
            runpy.run_module(module, run_name="__main__")
    finally:
        sys.argv = original
    return text_of(buffer)
