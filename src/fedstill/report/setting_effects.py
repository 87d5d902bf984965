"""How results depend on the values of settings: sections on one number of the split or of the
method, and the page of a search by ``fedstill tune``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.core.files import PAGE, replace_file
from fedstill.metrics.classification import METRICS
from fedstill.report.blocks import Block, Chart, Gallery, Paragraph, Section, Table
from fedstill.report.figures import (
    COLOURS,
    PERCENT,
    Figure,
    Trace,
    escaped,
    flat_range,
    layout,
    new_trace,
    rounded,
    y_values,
)
from fedstill.report.page import Report, document
from fedstill.report.summary import NONE
from fedstill.running.runs import Group, differing, group_labels, method_of, spread
from fedstill.running.tuning import Trial, Tuning

if TYPE_CHECKING:
    import plotly.graph_objects as go


REPORT_SEEDS = 5
"""On how many other seeds the chosen values are to be reported."""


def trial_lines(tuning: Tuning) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table, the best trial first."""
    unit = _unit_of(tuning.metric)
    goal = f"{tuning.goal or 'goal'} [{unit.name}]"
    head = ["trial", *(d.key for d in tuning.space), goal, "seeds", ""]
    return head, [_trial_line(trial, tuning, unit) for trial in tuning.ranked()]


@dataclass(frozen=True)
class _Unit:
    """How a goal is shown: its unit, what it is multiplied by, and the decimals."""

    name: str
    scale: float
    digits: int


def _unit_of(name: str) -> _Unit:
    metric = METRICS.get(name)
    if metric is None:
        return _Unit("%", 100, 2)
    return _Unit(metric.unit, metric.scale, metric.digits)


def _trial_line(trial: Trial, tuning: Tuning, unit: _Unit) -> list[str]:
    score = spread(list(trial.scores.values()))
    cells = [json.dumps(trial.values[d.key], ensure_ascii=False).strip('"') for d in tuning.space]
    return [
        str(trial.number),
        *cells,
        score.text(unit.scale, unit.digits) if score else NONE,
        str(len(trial.scores)),
        trial.problem,
    ]


def advice(tuning: Tuning, config: str, overrides: Sequence[str]) -> str:
    """What to report, and on which seeds, as a command: not on those that chose the values."""
    best = tuning.ranked()[0]
    if not best.scores:
        return "no trial finished, so there is nothing to report"
    fresh_seeds = (seed for seed in range(1, 10**6) if seed not in tuning.seeds)
    other = list(islice(fresh_seeds, REPORT_SEEDS))
    values = [f"{key}={_written(value)}" for key, value in best.values.items()]
    words = " ".join([config, *(f"-s '{v}'" for v in (*overrides, *values))]).strip()
    return (
        f"trial {best.number} is the best of {len(tuning.trials)}. Its number is too good, because "
        "it is the best of many; report the values on other seeds:\n"
        f"  fedstill compare {words} --seeds {','.join(map(str, other))}"
    )


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write_tuning_page(tuning: Tuning, out: Path) -> Path:
    """Write a page with two figures, the goal by trial and over each key, to a file; it needs no
    network.
    """
    head, rows = trial_lines(tuning)
    seeds = ", ".join(map(str, tuning.seeds))
    point = f"the mean over the seeds {seeds}"
    if len(tuning.seeds) == 1:
        point = f"a run with seed {seeds}"
    about = (
        f"Each point is {point}. Do not report these numbers, because they decided which values "
        "were chosen."
    )
    blocks: list[Block] = [Paragraph(about)]
    if any(trial.scores for trial in tuning.trials):
        blocks += _trial_charts(tuning)
    blocks.append(Table(head, rows, "numbers"))
    page = document("Tuning", [], [Section("tuning", "Tuning", blocks)])
    replace_file(out, page.encode(), PAGE)
    return out


def _trial_charts(tuning: Tuning) -> list[Chart]:
    """The goal by trial, and over each key, as Optuna draws them."""
    from optuna.visualization import plot_optimization_history, plot_slice

    history = _with_our_layout(plot_optimization_history(tuning.study, target_name=tuning.goal))
    slices = _with_our_layout(plot_slice(tuning.study, target_name=tuning.goal))
    return [
        Chart([history], "The line is the best so far.", "The goal by trial"),
        Chart([slices], "Darker points are later trials.", "The goal over each key"),
    ]


def _with_our_layout(drawn: go.Figure) -> Figure:
    """A figure of Optuna's with the layout of all our figures: the page gives it colours for light
    and dark.
    """
    figure = json.loads(drawn.to_json())
    settings: dict[str, Any] = figure["layout"]
    axes = {}
    for key, axis in settings.items():
        if key.startswith(("xaxis", "yaxis")):
            title = {**axis.get("title", {}), "standoff": 12}
            axes[key] = {**axis, "title": title, "automargin": True}
    return Figure(figure["data"], layout(hovermode="closest", **axes))


NOT_VARIED = ("partition.seed", "partition.min_size", "partition.clients")
"""Numbers of a partition that do not say how uneven it is."""

MORE_UNEVEN = {"alpha": "smaller is more uneven", "shards": "fewer classes a client is more uneven"}

ABOUT_SPLITS = (
    "Each line is one method on splits that differ in one number only. A flat line means that the "
    "method is robust to uneven data."
)
ABOUT_METHODS = (
    "Each line is one method on one split; its runs differ in one number only. Dotted: other "
    "methods on that split. A flat line means that the number needs no tuning."
)


@dataclass(frozen=True)
class Effect:
    """A measure that is drawn over the number; ``key`` as in ``summary.COLUMNS``."""

    key: str
    title: str


SERVER_EFFECTS = (Effect("forgetting", "Forgetting F"), Effect("accuracy", "Accuracy"))
CLIENT_EFFECTS = (
    Effect("personal_forgetting", "Forgetting at clients"),
    Effect("personal_accuracy", "Accuracy for the clients"),
)
"""Of runs whose clients have models of their own."""


@dataclass(frozen=True)
class Point:
    """A group and its value of the number."""

    value: float
    group: Group


@dataclass(frozen=True)
class VariedSetting:
    """Groups that differ in one number only, as points sorted by it, under the label of what they
    have in common.
    """

    label: str
    points: Sequence[Point]

    @property
    def surroundings(self) -> str:
        """All settings of its groups but those of the method."""
        return _surroundings(self.points[0].group)


def heterogeneity(report: Report) -> Section | None:
    """Accuracy and forgetting over a parameter of the split; None if no such parameter varies."""
    charts = []
    for key in _varied_keys(report.groups, "partition."):
        charts += _charts(key, varied_settings(report.groups, key), [])
    if not charts:
        return None
    blocks = [Paragraph(ABOUT_SPLITS), Gallery(charts)]
    return Section("heterogeneity", "Effect of uneven data", blocks)


def sensitivity(report: Report) -> Section | None:
    """Accuracy and forgetting over a number of the method; None if none varies with all else
    equal.
    """
    charts = []
    for key in _varied_keys(report.groups, "method."):
        varied = varied_settings(report.groups, key)
        charts += _charts(key, varied, _other_methods(report.groups, varied))
    if not charts:
        return None
    blocks = [Paragraph(ABOUT_METHODS), Gallery(charts)]
    return Section("sensitivity", "Effect of a hyper-parameter", blocks)


# Which groups differ in one number only


def _varied_keys(groups: Sequence[Group], prefix: str) -> list[str]:
    """The keys of a table of the config whose numbers are not the same in all groups."""
    keys = [key for key in differing([group.settings for group in groups]) if key not in NOT_VARIED]
    return [key for key in keys if key.startswith(prefix) and _has_number(groups, key)]


def _has_number(groups: Sequence[Group], key: str) -> bool:
    return any(_is_number(group.settings.get(key)) for group in groups)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def varied_settings(groups: Sequence[Group], key: str) -> list[VariedSetting]:
    """Groups that are equal in all settings but one number; no group that is alone."""
    by_rest: dict[str, list[Point]] = {}
    for group in groups:
        if _is_number(group.settings.get(key)):
            rest = json.dumps(_without(group, key), sort_keys=True, default=str)
            point = Point(float(group.settings[key]), group)
            by_rest.setdefault(rest, []).append(point)
    several = [points for points in by_rest.values() if len(points) > 1]
    labels = group_labels([_without(points[0].group, key) for points in several])
    return [
        VariedSetting(label, sorted(points, key=lambda point: point.value))
        for label, points in zip(labels, several, strict=True)
    ]


def _without(group: Group, key: str) -> dict[str, Any]:
    return {name: value for name, value in group.settings.items() if name != key}


def _other_methods(groups: Sequence[Group], varied: Sequence[VariedSetting]) -> list[Group]:
    """Groups of other methods, on the splits and with the plans of those that are drawn."""
    drawn = [point.group for setting in varied for point in setting.points]
    methods = {method_of(group.settings) for group in drawn}
    surroundings = {_surroundings(group) for group in drawn}
    others = [group for group in groups if method_of(group.settings) not in methods]
    return [group for group in others if _surroundings(group) in surroundings]


def _surroundings(group: Group) -> str:
    settings = {k: v for k, v in group.settings.items() if not k.startswith("method.")}
    return json.dumps(settings, sort_keys=True, default=str)


# Charts


def _charts(
    key: str, varied: Sequence[VariedSetting], other_methods: Sequence[Group]
) -> list[Chart]:
    """A chart for each effect of a number; none where nothing differs in it alone."""
    name = key.rpartition(".")[2]
    hint = ""
    if key.startswith("partition.") and name in MORE_UNEVEN:
        hint = f" ({MORE_UNEVEN[name]})"
    charts = []
    for effect in _effects(varied):
        about = (
            f"{effect.title} after the last round over {name}{hint}; bars are one standard "
            "deviation over seeds."
        )
        figure = _figure(varied, effect.key, name, other_methods)
        charts.append(Chart([figure], about, f"{effect.title} against {name}"))
    return charts


def _effects(varied: Sequence[VariedSetting]) -> list[Effect]:
    """The measures of the server's models and of clients' own, as the groups have them."""
    groups = [point.group for setting in varied for point in setting.points]
    effects: list[Effect] = []
    if any(not group.has_personal_models for group in groups):
        effects += SERVER_EFFECTS
    if any(group.has_personal_models for group in groups):
        effects += CLIENT_EFFECTS
    return effects


def _figure(
    varied: Sequence[VariedSetting], measure: str, name: str, other_methods: Sequence[Group]
) -> Figure:
    traces = [_line(setting, measure, index) for index, setting in enumerate(varied)]
    for index, setting in enumerate(varied):
        for group in other_methods:
            if _surroundings(group) == setting.surroundings:
                traces += _level(setting, group, measure, index)
    values = sorted({point.value for setting in varied for point in setting.points})
    tick_labels = [f"{value:g}" for value in values]
    across = {
        "title": {"text": name},
        "tickmode": "array",
        "tickvals": values,
        "ticktext": tick_labels,
    }
    if values[0] > 0:
        across["type"] = "log"
    up = {**PERCENT, **flat_range(y_values(traces), PERCENT)}
    return Figure(traces, layout(xaxis=across, yaxis=up))


def _line(setting: VariedSetting, measure: str, index: int) -> Trace:
    """A measure over the number, with the spread over seeds."""
    x = []
    means = []
    deviations = []
    for point in setting.points:
        value = point.group.mean_spread(measure)
        if value is not None:
            x.append(point.value)
            means.append(rounded(value.mean))
            deviations.append(rounded(value.std))
    return new_trace(
        "scatter",
        mode="lines+markers",
        name=escaped(setting.label),
        x=x,
        y=means,
        error_y={"type": "data", "array": deviations, "thickness": 1.2, "width": 3},
        hovertemplate="%{y:.2%}",
        line={"color": _colour(index), "width": 2},
        marker={"size": 7},
    )


def _level(setting: VariedSetting, group: Group, measure: str, index: int) -> list[Trace]:
    """A level line for another method, in the colour of the line that it stands beside; none where
    it has no such number.
    """
    value = group.mean_spread(measure)
    if value is None:
        return []
    ends = [point.value for point in setting.points]
    line = new_trace(
        "scatter",
        mode="lines",
        name=escaped(group.label),
        hovertemplate="%{y:.2%}",
        x=[min(ends), max(ends)],
        y=[rounded(value.mean)] * 2,
        line={"color": _colour(index), "width": 1.5, "dash": "dot"},
    )
    return [line]


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
