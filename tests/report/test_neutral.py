"""Names from elsewhere command nothing: no terminal, spreadsheet, browser or typesetter."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
from markdown_it import MarkdownIt
from rich.table import Table
from rich.text import Text

import toys
from fedstill.benchmark.suites import UNSAFE
from fedstill.cli.app import say
from fedstill.core.files import neutral
from fedstill.report import table_files, terminal
from fedstill.report.page import write_page
from fedstill.report.table_files import TextTable
from fedstill.running.runner import run

TERMINAL = [
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\b\b",
    "\r",
    "\u202e",
    "a\u200bb",
    "a\u061cb",
    "a\u2060b",
    "\x1b]8;;http://x\x1b\\",
]
FORMULAS = ["=cmd|' /C calc'!A0", "+1+cmd", "-2+3+cmd", "@SUM(1)", "\t=1", "-", "=1"]
MARKUP = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "[x](javascript:alert(1))",
    "![x](http://example.com/track.png)",
    "<http://example.com>",
    "a | b",
    "a\n\n# b",
]
COMMANDS = [
    r"\input{/etc/passwd}",
    r"\write18{id}",
    "a & b",
    "50 %",
    "$x$",
    "a\n\nb",
    "x^^5c",
    "#{~}",
]


@pytest.mark.parametrize("name", TERMINAL)
def test_a_terminal_gets_no_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    screen = terminal.console()
    table = Table(title=name)
    table.add_column(name)
    table.add_row(Text(name), name)
    for shown in (name, Text(f"a {name}"), table, f"[link=http://x]{name}[/link]"):
        screen.print(shown)
    screen.print(f"one\ttwo {name}")
    say(f"unknown class {name}", 2)
    captured = capsys.readouterr()
    for printed in (captured.out, captured.err):
        assert not set(printed) & set("\x1b\x9b\x07\b\r\u202e\u200b\u061c\u2060")


DIRECTION = "\u202e\u2066\u200f"


def test_a_page_s_text_keeps_its_direction(tmp_path: Path) -> None:
    """Names of classes, columns' values and runs may come from sites and strangers: with an
    override, "client 1" looks like "client 2".
    """
    classes = [f"{DIRECTION}class {number}" for number in range(toys.CLASSES)]
    data = replace(toys.blobs(), classes=tuple(classes))
    folder = tmp_path / f"run{DIRECTION}"
    result = run(toys.toy("fedntd", rounds=2, measure_every=1), folder, data)
    write_page([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "class 3" in page
    for shown in (page, result._repr_html_()):
        assert not set(shown) & set(DIRECTION)
        assert "u202e" not in shown, "escaped for a script"


@pytest.mark.parametrize("name", FORMULAS)
def test_a_spreadsheet_gets_no_formulas(name: str) -> None:
    head, line = csv.reader(io.StringIO(TextTable([name, "b"], [[name, "-0.5"]]).csv()))
    assert head[0] == line[0] == f"'{name}"
    assert line[1] == "-0.5"


def test_numbers_stay_numbers() -> None:
    for number in ("-1", "+1.5", "-1e-07", "-inf", "-.5", "1", "nan"):
        assert neutral(number, "csv") == number


def test_a_runs_table_gets_no_formulas() -> None:
    table = pandas.DataFrame({"=1": ["@a", None, "b"], "x": [-1.0, 2.0, None]})
    safe = table_files._without_formulas(table)
    assert list(safe) == ["'=1", "x"]
    assert safe["'=1"].tolist()[::2] == ["'@a", "b"]
    assert safe["x"].tolist()[:2] == [-1.0, 2.0]


@pytest.mark.parametrize("name", MARKUP)
def test_markdown_shows_markup_as_text(name: str) -> None:
    page = (
        MarkdownIt("commonmark", {"html": True})
        .enable("table")
        .render(TextTable([name, "n"], [[name, "1"]]).markdown())
    )
    assert page.count("<table>") == page.count("<tbody>") == 1
    assert page.count("<td") == page.count("<th") - page.count("<thead") == 2
    for tag in ("<img", "<script", "<a ", "<h1"):
        assert tag not in page


@pytest.mark.parametrize("name", COMMANDS)
def test_latex_shows_commands_as_text(name: str) -> None:
    text = TextTable([name, "n"], [[name, "1"]]).latex()
    body = text.partition("\\toprule\n")[2]
    assert not any(command in body for command in ("\\input", "\\write", "^^", "\n\n", " $x$"))
    assert [line.count(" & ") for line in body.splitlines() if " & " in line] == [1, 1]


@pytest.mark.parametrize(
    "name", ["é", "<b>", "a|b", "`a`", "=1", "@x", "[x](y)", "\x1b", " a", "a ", "\u202e", "a\\b"]
)
def test_names_in_the_ranking_are_plain(name: str) -> None:
    assert UNSAFE.search(name)


def test_names_of_the_ranking_so_far_are_plain() -> None:
    for name in ("fedntd", "FedAvg + SAM", "mine.py", "x86_64 (AVX2)", "2.6.0+cpu", "0.1 %"):
        assert not UNSAFE.search(name)
