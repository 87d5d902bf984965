"""The report page, one HTML file that needs no network: its sections and its introduction.

A section is a function ``(report) -> Section | None``. It returns None if the runs lack its
measurements. To add a section, write the function in the module of its subject and add it to
``SECTIONS``. An outer package adds its sections in ``manifest.py``, each with the name of the
section that it follows.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from importlib import resources
from pathlib import Path

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fedstill import manifest
from fedstill.config.data_table import NO_DATA
from fedstill.core.errors import ConfigError
from fedstill.core.files import PAGE, check_may_overwrite, disk_error, neutral, replace_file
from fedstill.manifest import Part
from fedstill.report.blocks import Block, Facts, Notice, Section, templates
from fedstill.report.figures import Style
from fedstill.report.summary import refusal_sentences, split_text
from fedstill.report.table_files import group_named
from fedstill.running.journal import VERSIONS
from fedstill.running.runs import UNSET, Group, groups, method_of, value_text

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
"""The content security policy of the page: a browser loads nothing from elsewhere."""

TEMPLATES = resources.files("fedstill.report") / "templates"

MAX_LABELS = 4
"""The largest number of groups in a title; for more groups, it contains their methods."""
MAX_METHODS = 6
"""The largest number of methods in a title."""
FIRST_METHODS = 5
"""The number of methods in a title if there are too many."""

COMPRESSION = 6
"""The zlib level for plotly.js. Level 9 is 0.2 % smaller and takes twice as long."""


def write_page(directories: Sequence[Path], out: Path, against: str = "") -> Path:
    """Write the report of the runs in (or below) some directories to the file ``out``.

    against: the label of the baseline of differences; empty for the first group. Raises ConfigError
    for a directory without runs, for an unknown label, and if ``out`` cannot be written or is a
    file that fedstill did not make; CorruptFile for a run that cannot be read.
    """
    check_may_overwrite(out, PAGE)
    if out.is_dir():
        raise ConfigError(
            f"{out} is a directory; name a file for the report, e.g. {out / 'report.html'}"
        )
    text = page(groups(directories), against)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, text.encode(), PAGE)
    except OSError as error:
        raise ConfigError(f"cannot write the report {out}: {error.strerror}") from disk_error(
            error, out
        )
    return out


def page(compared: Sequence[Group], against: str = "") -> str:
    """The page as HTML. against: the label of the baseline of differences, by default the first."""
    parts = sections(Report(compared, against))
    return document(_title(compared), _introduction(compared), parts)


def document(title: str, introduction: Iterable[Block], parts: Iterable[Block]) -> str:
    """A page as HTML: a title, an introduction, and sections with other blocks between them.

    The page contains the code that draws its figures, and a list of its sections.
    """
    blocks = list(parts)
    template = templates().get_template("page.html")
    text = template.render(
        title=title,
        introduction=list(introduction),
        blocks=blocks,
        sections=[block for block in blocks if isinstance(block, Section)],
        policy=POLICY,
        style=_asset("page.css"),
        script=_asset("page.js"),
        plotly=plotly_script(),
        date=f"{datetime.now():%Y-%m-%d}",
    )
    return neutral(text, "html")


def _asset(name: str) -> Markup:
    """The content of a file in the folder of the templates."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class PlotlyScript:
    """plotly.js: its name and version, and its code, compressed and in base64."""

    version: str
    packed: str


def plotly_script() -> PlotlyScript:
    """The plotly.js of the installed plotly."""
    code = get_plotlyjs()
    compressed = gzip.compress(code.encode(), COMPRESSION, mtime=0)
    return PlotlyScript(_version_of(code), base64.b64encode(compressed).decode())


def _version_of(code: str) -> str:
    """The name and version of plotly.js, from its first lines."""
    for line in code[:400].splitlines():
        text = line.strip(" *")
        if text.startswith("plotly.js v"):
            return text
    return "plotly.js"


# The introduction above the sections


def _title(compared: Sequence[Group]) -> str:
    names = [group.label for group in compared]
    if len(names) > MAX_LABELS:
        names = list(dict.fromkeys(method_of(group.settings) for group in compared))
    if len(names) > MAX_METHODS:
        names = [*names[:FIRST_METHODS], f"{len(names) - FIRST_METHODS} more"]
    listed = names[0]
    if len(names) > 1:
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{listed} on {_data_names(compared)}"


def _introduction(compared: Sequence[Group]) -> list[Block]:
    """The common settings of the runs, their number, and notes on unfinished and failed runs."""
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
    sentences = refusal_sentences({group.label: group.started for group in compared})
    blocks += [Notice(f"{text}. All reasons are listed under Failures.") for text in sentences]
    return blocks


def _facts(compared: Sequence[Group]) -> dict[str, str]:
    runs = [run for group in compared for run in group.runs]
    seeds = sorted({run.seed for run in runs})
    written = datetime.fromtimestamp(max(run.last_written for run in runs))
    versions = []
    for name in VERSIONS:
        used = sorted({version for run in runs for version in run.versions(name)})
        if used:
            versions.append(f"{name} {', '.join(used)}")
    return {
        "data": _data_names(compared),
        "split": ", ".join(dict.fromkeys(split_text(group.settings) for group in compared)),
        "clients": _values(compared, "topology.clients"),
        "topology": _values(compared, "topology.kind"),
        "model": _values(compared, "model.name"),
        "rounds": _values(compared, "rounds"),
        "runs": f"{len(runs)}, seeds {', '.join(map(str, seeds))}",
        "versions": ", ".join(versions),
        "last run written": f"{written:%Y-%m-%d %H:%M}",
    }


def _data_names(compared: Sequence[Group]) -> str:
    """The names of the data sets. If the server has no data ("none"), the sites have them."""
    names = _values(compared, "data.name")
    if names == NO_DATA:
        return "local data of the sites"
    return names


def _values(compared: Sequence[Group], key: str) -> str:
    """The values of a setting in all groups; files without their folders."""
    values = [value_text(group.settings[key]) for group in compared if key in group.settings]
    if key.endswith(".name"):
        values = [value.rpartition("/")[2] for value in values]
    return ", ".join(dict.fromkeys(values)) or UNSET


@dataclass(frozen=True)
class Report:
    """The content of a page: at least one group of runs.

    against: the label of the baseline of differences; empty for the first group.
    """

    groups: Sequence[Group]
    against: str = ""

    @cached_property
    def style(self) -> Style:
        """The colour and dash of each group."""
        return Style(self.groups)

    @cached_property
    def baseline(self) -> Group:
        """The baseline of differences; raises ConfigError if no group has its label."""
        return group_named(self.against, self.groups)


SECTIONS = {
    "results": "fedstill.report.overview:results",
    "boundaries": "fedstill.report.class_regions:boundaries",
    "rounds": "fedstill.report.rounds:learning_and_forgetting",
    "metrics": "fedstill.report.rounds:metrics_by_round",
    "confusion": "fedstill.report.rounds:confusion",
    "tasks": "fedstill.report.tasks:over_tasks",
    "heterogeneity": "fedstill.report.setting_effects:heterogeneity",
    "sensitivity": "fedstill.report.setting_effects:sensitivity",
    "classes": "fedstill.report.rounds:remembered_classes",
    "data": "fedstill.report.data_split:data_notes",
    "split": "fedstill.report.data_split:split_maps",
    "knowledge": "fedstill.report.knowledge:knowledge",
    "epochs": "fedstill.report.knowledge:epochs",
    "clients": "fedstill.report.clients:clients",
    "personal": "fedstill.report.weights:personal",
    "weights": "fedstill.report.weights:weight_changes",
    "own_measures": "fedstill.report.rounds:own_measures",
    "units": "fedstill.report.class_regions:units",
    "tsne": "fedstill.report.features:tsne",
    "joint": "fedstill.report.features:joint",
    "sphere": "fedstill.report.class_regions:sphere",
    "landscape": "fedstill.report.weights:landscape",
    "chain": "fedstill.report.knowledge:chain",
    "leakage": "fedstill.report.leaks:leaks",
    "targets": "fedstill.report.overview:targets",
    "cost": "fedstill.report.overview:cost",
    "failures": "fedstill.report.overview:failures",
    "settings": "fedstill.report.overview:settings",
}
"""The sections of this package by name, and where they are. Sections of other packages follow the
sections that they name.
"""


def section_parts() -> list[Part]:
    """The sections of all packages, in the order of the page."""
    own_parts = {name: Part(name, "", target) for name, target in SECTIONS.items()}
    package_parts = [(part, part) for part in manifest.report_sections()]
    return list(manifest.placed(own_parts, package_parts).values())


def sections(report: Report) -> list[Section]:
    """The sections with content."""
    written = []
    for part in section_parts():
        make_section = part.load()
        section = make_section(report)
        if section is not None:
            written.append(section)
    return written
