"""Compares the documentation with its sources: ``make docs-check``, or
``python -m tools.docs_check``.

Some texts are generated: a table between two marks of a page, or a whole file. The check generates
them anew and shows where a page differs; ``make docs-tables``
(``python -m tools.docs_check --write``) writes them. Other pages refer to runs, files, names and
settings; the check reports the references that are wrong. Names of entries as arguments restrict
both commands to these: ``python -m tools.docs_check worth sent``.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import multiprocessing
import os
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIFF_LINES = 30
"""Lines of a difference that are printed."""


@dataclass(frozen=True)
class Generated:
    """A text that a function without arguments returns: part of a page, or a whole file."""

    name: str
    path: str
    source: str
    """The function, as ``module:function``."""
    between_marks: bool = True
    """Whether the text stands between ``<!-- NAME -->`` and ``<!-- end of NAME -->``; otherwise it
    is the file.
    """


@dataclass(frozen=True)
class References:
    """What pages refer to; a function without arguments returns one line for each reference that is
    wrong.
    """

    name: str
    path: str
    source: str


Entry = Generated | References

ENTRIES: tuple[Entry, ...] = (
    References("paper tables", "docs/results", "tools.results_page:wrong_paper_tables"),
    Generated("ranking", "docs/ranking/index.md", "tools.ranking:overview", between_marks=False),
    *(
        Generated(
            f"ranking {page}",
            f"docs/ranking/{page}.md",
            f"tools.ranking:{page}",
            between_marks=False,
        )
        for page in ("space", "time", "both", "chain", "public", "peers", "maps")
    ),
    Generated(
        "shipped runs",
        "src/fedstill/recipes/rank/shipped.csv",
        "tools.ranking:table_of_runs",
        between_marks=False,
    ),
    Generated("over time", "docs/results/over_time.md", "tools.over_time:tables"),
    References("comparisons", "docs/results", "tools.results_page:wrong_comparisons"),
    References("benchmarks of journals", "docs/results", "tools.results_page:wrong_benchmarks"),
    Generated("sent", "docs/privacy.md", "tools.sent:sent_table"),
    Generated("combinations", "docs/papers.md", "tools.combinations:table"),
    Generated("worth", "docs/results/methods.md", "tools.worth:table"),
    Generated("attacks", "docs/results/hostile_clients.md", "tools.curves:shipped_attacks"),
    Generated("official code", "docs/papers.md", "tools.official_code:table"),
    Generated("catalogue", "docs/catalogue.md", "tools.catalogue:page", between_marks=False),
    References("links", "all pages", "tools.references:broken_links"),
    References("files", "several pages", "tools.references:missing_files"),
    References("walks", "docs/tour.md", "tools.references:wrong_walks"),
    References("reference", "docs/reference.md", "tools.references:wrong_modules"),
    References("measures", "docs/measures.md", "tools.references:missing_measures"),
    Generated("keys", "docs/configuration.md", "tools.config_keys:tables"),
    References("figures", "docs/papers.md", "tools.references:wrong_figures"),
    References("gallery", "docs/gallery.md", "tools.references:wrong_pictures"),
    References("menu", "mkdocs.yml", "tools.references:wrong_menu"),
    References("commands", "all pages", "tools.commands:wrong_commands"),
)
"""Everything that is checked, the longest first. Neighbours of one module are checked in one
process and share work.
"""


@dataclass(frozen=True)
class Outcome:
    """What checking one entry found."""

    entry: Entry
    problems: tuple[str, ...]
    text: str = ""
    """The generated text."""


def marks(name: str) -> tuple[str, str]:
    """The lines before and after a generated text of a page."""
    return f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"


def with_text(entry: Generated, page: str, text: str) -> str:
    """The page with the generated text in its place; raises ValueError if the page lacks one of the
    marks.
    """
    if not entry.between_marks:
        return text
    first, last = marks(entry.name)
    if first not in page or last not in page:
        lines = f"{first.strip()} and {last.strip()}"
        raise ValueError(f"{entry.path} has no place for {entry.name!r}: add {lines}")
    start = page.index(first) + len(first)
    end = page.index(last)
    return f"{page[:start]}\n{text.strip()}\n\n{page[end:]}"


def difference(entry: Generated, page: str, current: str) -> list[str]:
    """The first lines of a unified diff from the page to the generated text; empty if they are
    equal.
    """
    command = f'python -m tools.docs_check --write "{entry.name}"'
    lines = difflib.unified_diff(
        page.splitlines(), current.splitlines(), entry.path, command, n=0, lineterm=""
    )
    diff = list(lines)
    if len(diff) > DIFF_LINES:
        return [*diff[:DIFF_LINES], f"and {len(diff) - DIFF_LINES} more lines"]
    if not diff and page != current:
        return ["The line ends differ."]
    return diff


def check(entry: Entry) -> Outcome:
    """Check one entry."""
    function: Callable[[], str | Iterable[str]] = pkgutil.resolve_name(entry.source)
    result = function()
    if isinstance(entry, References):
        return Outcome(entry, tuple(result))
    text = str(result)
    page = (ROOT / entry.path).read_text(encoding="utf-8")
    current = with_text(entry, page, text)
    return Outcome(entry, tuple(difference(entry, page, current)), text)


def check_module(entries: Sequence[Entry]) -> list[Outcome]:
    """Check the entries of one module; the work that they share is done once."""
    # warnings about the runs that generators prepare
    logging.getLogger("fedstill").setLevel(logging.ERROR)
    return [check(entry) for entry in entries]


def by_module(entries: Iterable[Entry]) -> list[list[Entry]]:
    """The entries in groups of neighbours that have the module of their source in common."""
    groups = groupby(entries, key=lambda entry: entry.source.partition(":")[0])
    return [list(group) for _, group in groups]


def write(outcome: Outcome) -> None:
    """Write a generated text to its place."""
    assert isinstance(outcome.entry, Generated)
    path = ROOT / outcome.entry.path
    page = path.read_text(encoding="utf-8")
    path.write_text(with_text(outcome.entry, page, outcome.text), encoding="utf-8")


def selected(names: Sequence[str], writing: bool) -> list[Entry]:
    """The entries with these names, by default all; only those that can be written, if they are to
    be written.
    """
    entries = {entry.name: entry for entry in ENTRIES}
    if writing:
        entries = {entry.name: entry for entry in ENTRIES if isinstance(entry, Generated)}
    unknown = [name for name in names if name not in entries]
    if unknown:
        choices = ", ".join(entries)
        raise SystemExit(f"docs-check: unknown entry {unknown[0]!r}; choose from {choices}")
    return [entries[name] for name in names or entries]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check or write the entries; return 1 if an entry is wrong and was not written."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.docs_check", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="entries to check; by default all")
    parser.add_argument(
        "--write", action="store_true", help="write the generated texts that are not current"
    )
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    wrong = 0
    # Two processes at least: the tables come from journals, and a process waits for the disk now
    # and then.
    workers = max(2, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        groups = by_module(selected(options.names, options.write))
        for future in as_completed([pool.submit(check_module, group) for group in groups]):
            for outcome in future.result():
                wrong += not report(outcome, options.write)
    return int(wrong > 0)


def report(outcome: Outcome, writing: bool) -> bool:
    """Print the outcome, and write the text if ``writing``; return whether the entry is now
    current.
    """
    title = f"{outcome.entry.path}: {outcome.entry.name}"
    if not outcome.problems:
        print(f"current  {title}", flush=True)
        return True
    if writing:
        write(outcome)
        print(f"written  {title}", flush=True)
        return True
    print(f"WRONG    {title}", *outcome.problems, sep="\n    ", flush=True)
    return False


if __name__ == "__main__":
    raise SystemExit(main())
