"""The report: one HTML file that holds everything it shows and needs no network."""

from __future__ import annotations

import base64
import gzip
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path

from fedstill import manifest
from fedstill.core.errors import ConfigError
from fedstill.core.files import PAGE, as_named, refuse_other_kind, write_over
from fedstill.report import figures as heatmaps
from fedstill.report.clients import clients
from fedstill.report.costs import megabytes, seconds_by_measure, seconds_by_phase, targets
from fedstill.report.data_split import data_section, heterogeneity, sensitivity, split_section
from fedstill.report.features import boundaries, joint, sphere, tsne, units
from fedstill.report.figures import PERCENT, Style, lines, over_seconds
from fedstill.report.knowledge import chain, epochs, knowledge, measured
from fedstill.report.leaks import leaks
from fedstill.report.markup import (
    Cell,
    Html,
    choice,
    escape,
    facts,
    figure,
    folded,
    grid,
    html_table,
    key,
    labelled,
    section,
    sentence,
)
from fedstill.report.series import seconds as seconds_of
from fedstill.report.summary import NONE, Column, Row, best_first, columns, rows, said_of_order
from fedstill.report.table_files import difference_lines, differences, group_named
from fedstill.report.tasks import over_tasks
from fedstill.report.weights import landscape, personal, weight_changes
from fedstill.running.groups import (
    UNSET,
    Group,
    differing,
    differing_schedule,
    groups,
    method_of,
    said,
    schedule_cells,
    split_of,
)
from fedstill.running.journal import VERSIONS
from fedstill.running.result import Refusals
from fedstill.running.runs import Run

# Clients that were left out, said beside the numbers: a table without them would look as usual.


def refused(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """A sentence for each name of which a run has refusals: those of its first such run, and which
    others have some.
    """
    told = []
    for name, own in runs.items():
        said = {run.seed: text for run in own if (text := refusals_of(run).said)}
        if said:
            (seed, text), *others = said.items()
            more = f"; seeds with refusals: {', '.join(map(str, said))}" if others else ""
            told.append(f"{name}{f', seed {seed}' if len(own) > 1 else ''}: {text}{more}")
    return told


def refusals_of(run: Run) -> Refusals:
    """What was refused in a run, finished or not."""
    return Refusals.of(run.clients, int(run.settings.get("topology.clients", 0)), len(run.rounds))


# The parts of the page, each from the groups of runs it compares.


MOST_REASONS = 12

OF_CLIENTS = (
    (
        "personal_accuracy",
        "Each client's answer, its own model or else the global one, on test examples in the "
        "client's proportions of "
        "classes; mean over clients. Higher is better.",
        "Accuracy for the clients by round",
    ),
    (
        "personal_forgetting",
        "How far the own classes of clients with own models are below their best earlier look. "
        "Lower is better.",
        "Forgetting at clients by round",
    ),
    (
        "own_test_accuracy",
        "Each client's answer on the client's own test set; mean over clients. Higher is better.",
        "Accuracy on own tests by round",
    ),
)
"""What is drawn by round where clients have models of their own: key, sentence and title."""


def results_section(groups: Sequence[Group], style: Style, base: Group) -> Html:
    """The table of measures, and the differences to one of the groups."""
    ordered, by = best_first(groups)
    lines = rows(ordered)
    shown = columns(lines)
    schedule = differing_schedule(groups)
    head: list[Cell] = [
        "",
        *schedule.values(),
        "seeds",
        *(Html(f"{escape(m.title)}<br><small>{m.unit}</small>") for m in shown),
    ]
    body = [
        [
            labelled(g, style, r.note),
            *schedule_cells(g, schedule),
            r.seeds,
            *(_cell(r, m) for m in shown),
        ]
        for g, r in zip(ordered, lines, strict=True)
    ]
    says = (
        "One line for each group of runs that differ only in their seed: mean ± one standard "
        "deviation over seeds."
    )
    says = f"{says} {said_of_order(by)}".strip()
    legend = "; ".join(f"{m.title}: {m.says}" for m in shown)
    legend = f"{legend[:1].upper()}{legend[1:]}." if shown else "No run has finished a round yet."
    return section(
        "Results",
        sentence(says),
        html_table(head, body, "numbers wide"),
        Html(f'<p class="legend" style="margin-top:10px">{escape(legend)}</p>'),
        _apart(groups, base),
        name="results",
    )


def _apart(groups: Sequence[Group], base: Group) -> Html | None:
    """Differences to a group, folded; None where no other one shares two seeds with it."""
    if not any(len({*g.seeds} & {*base.seeds}) > 1 for g in groups if g is not base):
        return None
    says = (
        f"How far each line is from {base.label}, paired by seed, with the 95 % interval of the "
        "mean and p of the "
        "paired t test. An interval that holds 0 does not tell two methods apart."
    )
    head, lines = difference_lines(list(differences(groups, base)))
    table = html_table(head, lines, "numbers wide")
    return folded(f"Differences to {base.label}", Html(f"{sentence(says).text}{table.text}"))


def over_rounds(groups: Sequence[Group], style: Style) -> Html | None:
    """Accuracy and forgetting by round; None if neither was measured."""
    accuracy = "The global model on the common test set. Higher is better."
    forgetting = (
        "How far the classes are below the best accuracy of their earlier rounds, on average. "
        "Lower is better; "
        "below 0, they are above it."
    )
    first = OF_CLIENTS if any(g.own_models for g in groups) else ()
    figures = [
        figure([lines(groups, style, key, **PERCENT)], text, title)
        for key, text, title in (
            *first,
            ("accuracy", accuracy, "Accuracy by round"),
            ("forgetting", forgetting, "Forgetting F by round"),
        )
        if measured(groups, key)
        and ("accuracy" in key or any(len(r.rounds) > 1 for g in groups for r in g.runs))
    ]
    if not figures:
        return None
    says = (
        "Each line is the mean over seeds; its band is one standard deviation above and below. "
        "Where accuracy"
        " falls and F rises, the model forgot classes that it knew."
    )
    return section(
        "Learning and forgetting", sentence(says), key(groups, style), grid(figures), name="rounds"
    )


def class_maps(groups: Sequence[Group], style: Style) -> Html | None:
    """Class-wise accuracy by round; None if it was not measured."""
    some = [g for g in groups if heatmaps.has_class_accuracy(g)]
    if not some:
        return None
    views = heatmaps.views(some)
    shares = f"{views[0]}, as shares of each round's sum"
    says = (
        "Each row is a class, each column a round. The colour is the accuracy on that class. A row "
        "that turns"
        " bright and then dark again is a class learned and forgotten. Round 0 is the model before "
        "training."
    )
    says += (
        " As shares: a round's accuracies are divided by their sum, and yellow is the largest "
        "share in the figure."
    )
    if len(views) > 1:
        says += (
            " Seeds forget at different times, and the mean hides that: choose one seed to see it."
        )
    stops = ", ".join(f"{c} {100 * p:.0f}%" for p, c in heatmaps.ACCURACY)
    scale = Html(
        f'<p class="scale">0 % <i style="background:linear-gradient(90deg, {stops})"></i> 100 % '
        "accuracy</p>"
    )
    drawn = [
        [
            *(heatmaps.class_by_round(g, v) for v in views),
            heatmaps.class_by_round(g, views[0], shares=True),
        ]
        for g in some
    ]
    figures = [
        figure(variants, f"{g.label}: {says}", labelled(g, style), "classes")
        for g, variants in zip(some, drawn, strict=True)
    ]
    parts = [choice("classes", "Show", [*views, shares]), scale, grid(figures, "small")]
    return section("Which classes are remembered", sentence(says), *parts, name="classes")


def settings(groups: Sequence[Group], style: Style) -> Html:
    """What differs between groups, and folded what does not."""
    every = [g.settings for g in groups]
    keys = differing(every)
    equal = [(k, said(v)) for k, v in every[0].items() if k not in keys]
    parts = []
    if keys:
        head: list[Cell] = ["setting", *(labelled(g, style) for g in groups)]
        body = [[k, *(said(s.get(k, UNSET)) for s in every)] for k in keys]
        parts = [
            sentence("The settings in which the groups differ."),
            html_table(head, body, "settings"),
        ]
    elif len(groups) == 1:
        parts = [sentence("There is one group only: its runs differ at most in their seed.")]
    every_equal = folded(
        f"{len(equal)} settings that are equal in all runs",
        html_table(["setting", "value"], equal, "settings"),
    )
    return section(
        "Settings", *parts, every_equal, folded("All runs", _runs(groups)), name="settings"
    )


def cost(groups: Sequence[Group], style: Style) -> Html | None:
    """Seconds and bytes; None if no round is finished."""
    some = [g for g in groups if g.started]
    if not some:
        return None
    times = (
        "A method that takes longer for a round lies further right. Both axes are means over seeds "
        "after each round."
    )
    phases = (
        "Seconds of a run, mean over seeds: training at the clients (full colour), measuring "
        "(lighter), and "
        "the rest, such as aggregation and checkpoints (lightest)."
    )
    sent = (
        "Megabytes of a run, mean over seeds: what clients sent (up, full colour) and received "
        "(down, lighter)."
    )
    figures = [
        figure([seconds_by_phase(some, style)], phases, "Seconds by phase"),
        figure([megabytes(some, style)], sent, "Megabytes sent"),
    ]
    if measured(some, "accuracy"):
        figures.insert(0, figure([over_seconds(some, style)], times, "Accuracy by seconds"))
    if any(seconds_of(g) for g in some):
        looked = (
            "Seconds that each measure took in a run, mean over seeds. Local models are measured "
            "at the clients."
        )
        figures.append(figure([seconds_by_measure(some, style)], looked, "Seconds by measure"))
    says = "Seconds depend on the machine and on what else ran on it. Bytes do not."
    return section(
        "What it costs", sentence(says), key(some, style), grid(figures, "small top"), name="cost"
    )


def failures(groups: Sequence[Group], style: Style) -> Html | None:
    """Replies that were refused, by reason; None if there are none."""
    lines: list[list[Cell]] = []
    for group in groups:
        refused = [e for r in group.runs for e in r.clients if "refused" in e]
        counts = Counter(str(e["refused"]) for e in refused)
        for reason, count in counts.most_common(MOST_REASONS):
            own = [e for e in refused if str(e["refused"]) == reason]
            lines.append(
                [
                    labelled(group, style),
                    reason,
                    str(count),
                    _ids(own, "client"),
                    _ids(own, "round"),
                ]
            )
        if len(counts) > MOST_REASONS:
            rest = sum(counts.values()) - sum(n for _, n in counts.most_common(MOST_REASONS))
            more = f"{len(counts) - MOST_REASONS} more reasons"
            lines.append([labelled(group, style), more, str(rest), NONE, NONE])
    if not lines:
        return None
    ended = {
        e["round"] <= len(r.rounds)
        for g in groups
        for r in g.runs
        for e in r.clients
        if "refused" in e
    }
    says = "Replies of clients that failed, or whose numbers were refused."
    if True in ended:
        says += f" The rounds{' that ended' if False in ended else ''} went on without them."
    head: list[Cell] = ["", "reason", "times", "clients", "rounds"]
    return section("Failures", sentence(says), html_table(head, lines, "wide"), name="failures")


def _cell(row: Row, measure: Column) -> Cell:
    mean, sign, std = row.text(measure).partition(" ± ")
    return Html(f"{escape(mean)}<small> ± {escape(std)}</small>") if sign else mean


def _runs(groups: Sequence[Group]) -> Html:
    head: list[Cell] = ["directory", "group", "seed", "rounds", "state"]
    body: list[list[Cell]] = []
    for group in groups:
        for run in (*group.runs, *group.repeats):
            state = "finished" if run.finished else "unfinished"
            if run.stop_reason:
                state += f", stopped early: {run.stop_reason}"
            if run.best is not None:
                state += f", round {run.best.round} selected by {run.best.criterion}"
            state += ", left out: another run has this seed" if run in group.repeats else ""
            reached = run.rounds[-1]["round"] if run.rounds else 0
            body.append(
                [str(run.named), group.label, str(run.seed), f"{reached} of {run.asked}", state]
            )
    return html_table(head, body, "settings")


def _ids(events: Sequence[dict[str, object]], key: str) -> str:
    ids = sorted({int(str(e.get(key, -1))) for e in events})
    return ", ".join(map(str, ids[:10])) + (f" … ({len(ids)})" if len(ids) > 10 else "")


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
    inner: dict[str, Html | None] = {
        "results": results_section(compared, style, group_named(against, compared)),
        "boundaries": boundaries(compared, style),
        "rounds": over_rounds(compared, style),
        "tasks": over_tasks(compared, style),
        "heterogeneity": heterogeneity(compared),
        "sensitivity": sensitivity(compared),
        "classes": class_maps(compared, style),
        "data": data_section(compared),
        "split": split_section(compared),
        "knowledge": knowledge(compared, style),
        "epochs": epochs(compared, style),
        "clients": clients(compared, style),
        "personal": personal(compared, style),
        "weights": weight_changes(compared, style),
        "units": units(compared, style),
        "tsne": tsne(compared, style),
        "joint": joint(compared, style),
        "sphere": sphere(compared, style),
        "landscape": landscape(compared, style),
        "chain": chain(compared, style),
        "leaks": leaks(compared, style),
        "targets": targets(compared, style),
        "cost": cost(compared, style),
        "failures": failures(compared, style),
        "settings": settings(compared, style),
    }
    outer = []
    for part in manifest.report_sections():
        make_section = part.load()
        outer.append((part, make_section(compared, style)))
    sections = manifest.placed(inner, outer)
    main = "\n".join(p.text for p in (_head(compared), *sections.values()) if p is not None)
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
