"""The page of runs: one HTML file that holds everything it shows and needs no network."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fedstill.core.errors import ConfigError
from fedstill.core.files import PAGE, as_named, refuse_other_kind, write_over
from fedstill.report.blocks import Block, Facts, Notice, Section, templates
from fedstill.report.run_details import refused
from fedstill.report.sections import Report, sections
from fedstill.running.journal import VERSIONS
from fedstill.running.runs import Group, groups, method_of, said, split_of

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
"""What a browser may load for the page: nothing from anywhere else."""

TEMPLATES = resources.files("fedstill.report") / "templates"

MOST_LABELS = 4
"""A title names at most so many groups; of more, their methods."""
MOST_METHODS = 6
"""A title names all methods if there are at most so many."""
FIRST_METHODS = 5
"""How many methods a title names where there are too many."""

COMPRESSION = 6
"""Of plotly.js, with zlib; 9 is 0.2 % smaller and takes twice as long."""


def write_page(directories: Sequence[Path], out: Path, against: str = "") -> Path:
    """Write the report of the runs in (or below) some directories to the file ``out``.

    against: the label of the group that differences are to; empty: the first. Raises ConfigError if
    there is no run in a directory or no group of that label, or if ``out`` cannot be written, or is
    there and no page that fedstill made; CorruptFile for a run that cannot be read.
    """
    refuse_other_kind(out, PAGE)
    text = page(groups(directories), against)
    if out.is_dir():
        raise ConfigError(
            f"{out} is a directory; name a file for the report, e.g. {out / 'report.html'}"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_over(out, text.encode(), PAGE)
    except OSError as error:
        raise ConfigError(f"cannot write the report {out}: {error.strerror}") from as_named(
            error, out
        )
    return out


def page(compared: Sequence[Group], against: str = "") -> str:
    """The page as text; differences are to the group of the label ``against``, or to the first."""
    with ThreadPoolExecutor(1) as pool:
        library = pool.submit(plotly_script)
        introduction = _introduction(compared)
        parts = sections(Report(compared, against))
        return _document(_title(compared), introduction, parts, library.result())


def document(title: str, introduction: Iterable[Block], parts: Iterable[Block]) -> str:
    """A page as text: a title, what stands below it, and sections with other blocks between them.

    The page holds all that draws its figures, and a list of its sections.
    """
    return _document(title, introduction, parts, plotly_script())


def _document(
    title: str, introduction: Iterable[Block], parts: Iterable[Block], library: PlotlyScript
) -> str:
    blocks = list(parts)
    template = templates().get_template("page.html")
    return template.render(
        title=title,
        introduction=list(introduction),
        blocks=blocks,
        sections=[block for block in blocks if isinstance(block, Section)],
        policy=POLICY,
        style=_asset("page.css"),
        script=_asset("page.js"),
        plotly=library,
        date=f"{datetime.now():%Y-%m-%d}",
    )


def _asset(name: str) -> Markup:
    """A file beside the templates, as it is."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class PlotlyScript:
    """plotly.js: its name and version, and its code, compressed and in base64."""

    version: str
    packed: str


def plotly_script() -> PlotlyScript:
    """The plotly.js of the installed plotly.

    It takes 0.15 s, most of it without Python's lock: a thread can do it beside other work.
    """
    code = get_plotlyjs()
    compressed = gzip.compress(code.encode(), COMPRESSION, mtime=0)
    return PlotlyScript(_version_of(code), base64.b64encode(compressed).decode())


def _version_of(code: str) -> str:
    """What plotly.js says in its first lines: its name and version."""
    for line in code[:400].splitlines():
        text = line.strip(" *")
        if text.startswith("plotly.js v"):
            return text
    return "plotly.js"


# What stands above the sections


def _title(compared: Sequence[Group]) -> str:
    names = [group.label for group in compared]
    if len(names) > MOST_LABELS:
        names = list(dict.fromkeys(method_of(group.settings) for group in compared))
    if len(names) > MOST_METHODS:
        names = [*names[:FIRST_METHODS], f"{len(names) - FIRST_METHODS} more"]
    listed = names[0]
    if len(names) > 1:
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{listed} on {_values(compared, 'data.name')}"


def _introduction(compared: Sequence[Group]) -> list[Block]:
    """What the runs have in common, how many there are, and what is not as it should be."""
    blocks: list[Block] = [Facts(_facts(compared))]
    runs = [run for group in compared for run in group.runs]
    unfinished = sum(not run.finished for run in runs)
    if unfinished:
        blocks.append(
            Notice(
                f"{unfinished} of {len(runs)} runs are unfinished; they are shown up to their last "
                "round."
            )
        )
    sentences = refused({group.label: group.started for group in compared})
    blocks += [Notice(f"{text}. All reasons are below, under Failures.") for text in sentences]
    return blocks


def _facts(compared: Sequence[Group]) -> dict[str, str]:
    runs = [run for group in compared for run in group.runs]
    seeds = sorted({run.seed for run in runs})
    written = datetime.fromtimestamp(max(run.written for run in runs))
    versions = []
    for name in VERSIONS:
        used = sorted({version for run in runs for version in run.versions(name)})
        if used:
            versions.append(f"{name} {', '.join(used)}")
    return {
        "data": _values(compared, "data.name"),
        "split": ", ".join(dict.fromkeys(split_of(group.settings) for group in compared)),
        "clients": _values(compared, "topology.clients"),
        "topology": _values(compared, "topology.kind"),
        "model": _values(compared, "model.name"),
        "rounds": _values(compared, "rounds"),
        "runs": f"{len(runs)}, seeds {', '.join(map(str, seeds))}",
        "versions": ", ".join(versions),
        "last run written": f"{written:%Y-%m-%d %H:%M}",
    }


def _values(compared: Sequence[Group], key: str) -> str:
    """The values of a setting in all groups; of files only their names."""
    values = [said(group.settings[key]) for group in compared if key in group.settings]
    if key.endswith(".name"):
        values = [value.rpartition("/")[2] for value in values]
    return ", ".join(dict.fromkeys(values)) or "–"
