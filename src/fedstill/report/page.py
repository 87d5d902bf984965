"""The report: one HTML file that holds everything it shows and needs no network."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path

from fedstill.errors import ConfigError
from fedstill.experiment.run_directory.journal import VERSIONS
from fedstill.files import as_named
from fedstill.report import sections
from fedstill.report.asked import asked, noise_probes
from fedstill.report.chain_hops import chain
from fedstill.report.clients import clients
from fedstill.report.contributors import contributors
from fedstill.report.data_split import split_section
from fedstill.report.decision_planes import boundaries
from fedstill.report.features import sphere, tsne, units
from fedstill.report.figures import Style
from fedstill.report.groups import Group, groups, method_of, said, split_of
from fedstill.report.heterogeneity import heterogeneity, sensitivity
from fedstill.report.joint import joint
from fedstill.report.knowledge import knowledge
from fedstill.report.landscapes import landscape
from fedstill.report.leaks import leaks
from fedstill.report.local_epochs import epochs
from fedstill.report.markup import Html, escape, facts
from fedstill.report.over_tasks import over_tasks
from fedstill.report.refused import refused
from fedstill.report.table_files import group_named
from fedstill.report.targets import targets
from fedstill.report.told_data import data_section
from fedstill.report.weights import personal, weight_changes
from fedstill.written_over import PAGE, refuse_other_kind, write_over

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
"""What a browser may load for the page: nothing from anywhere else."""

TROUBLE = (
    "The figures could not be drawn: they need JavaScript and a browser of 2023 or later. The "
    "tables show all results."
)


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
    style = Style(compared)
    parts = [
        _head(compared),
        sections.results_section(compared, style, group_named(against, compared)),
        asked(compared, style),
        boundaries(compared, style),
        sections.over_rounds(compared, style),
        over_tasks(compared, style),
        heterogeneity(compared),
        sensitivity(compared),
        sections.class_maps(compared, style),
        contributors(compared, style),
        data_section(compared),
        split_section(compared),
        noise_probes(compared),
        knowledge(compared, style),
        epochs(compared, style),
        clients(compared, style),
        personal(compared, style),
        weight_changes(compared, style),
        units(compared, style),
        tsne(compared, style),
        joint(compared, style),
        sphere(compared, style),
        landscape(compared, style),
        chain(compared, style),
        leaks(compared, style),
        targets(compared, style),
        sections.cost(compared, style),
        sections.failures(compared, style),
        sections.settings(compared, style),
    ]
    main = "\n".join(p.text for p in parts if p is not None)
    return document(_title(compared), main)


def _title(compared: Sequence[Group]) -> str:
    labels = [g.label for g in compared]
    named = (
        labels if len(labels) <= 4 else list(dict.fromkeys(method_of(g.settings) for g in compared))
    )
    shown = named if len(named) <= 6 else [*named[:5], f"{len(named) - 5} more"]
    listed = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{listed} on {_every(compared, 'data.name')}"


def _head(compared: Sequence[Group]) -> Html:
    runs = [r for g in compared for r in g.runs]
    seeds = sorted({r.seed for r in runs})
    unfinished = sum(not r.finished for r in runs)
    written = datetime.fromtimestamp(max(r.written for r in runs))
    versions = {
        name: ", ".join(sorted({version for r in runs for version in r.versions(name)}))
        for name in VERSIONS
    }
    pairs = {
        "data": _every(compared, "data.name"),
        "split": ", ".join(dict.fromkeys(split_of(g.settings) for g in compared)),
        "clients": _every(compared, "topology.clients"),
        "topology": _every(compared, "topology.kind"),
        "model": _every(compared, "model.name"),
        "rounds": _every(compared, "rounds"),
        "runs": f"{len(runs)}, seeds {', '.join(map(str, seeds))}",
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items() if v),
        "last run written": f"{written:%Y-%m-%d %H:%M}",
    }
    note = ""
    if unfinished:
        how_many = (
            f"{unfinished} of {len(runs)} runs are unfinished; they are shown up to their last "
            "round."
        )
        note = f'<p class="note">{how_many}</p>'
    for line in refused({g.label: g.started for g in compared}):
        note += f'<p class="note">{escape(line)}. All reasons are below, under Failures.</p>'
    return Html(f"<header><h1>{escape(_title(compared))}</h1>{facts(pairs).text}{note}</header>")


def _every(compared: Sequence[Group], key: str) -> str:
    values = dict.fromkeys(said(g.settings[key]) for g in compared if key in g.settings)
    return ", ".join(v.rpartition("/")[2] if key.endswith(".name") else v for v in values) or "–"


def document(title: str, main: str) -> str:
    """A whole page: a title, and what is in it; it holds what draws its figures."""
    assets = resources.files("fedstill.report") / "assets"
    style, script = (
        (assets / "page.css").read_text(encoding="utf-8"),
        (assets / "page.js").read_text(encoding="utf-8"),
    )
    about, library = _plotly()
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main>
<noscript><p class="note">{TROUBLE}</p></noscript>
<p class="note" id="trouble" hidden>{TROUBLE}</p>
{main}
<footer>Made by fedstill on {datetime.now():%Y-%m-%d} from the runs' journals. Figures are drawn by {escape(about)},
which this file contains in compressed form. Nothing is loaded from the network.</footer>
</main>
<script type="application/octet-stream" id="plotly">{library}</script>
<script>
{script}</script>
</body>
</html>
"""  # noqa: E501


def _plotly() -> tuple[str, str]:
    from plotly.offline import get_plotlyjs

    code = get_plotlyjs()
    lines = (line.strip(" *") for line in code[:400].splitlines())
    about = next((line for line in lines if line.startswith("plotly.js v")), "plotly.js")
    packed = gzip.compress(code.encode(), 9, mtime=0)
    return f"{about} (© Plotly, Inc., MIT licence)", base64.b64encode(packed).decode()
