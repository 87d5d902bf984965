"""How results depend on the values of settings: sections on one number of the split or of the
method, and the page of a search by ``fedstill tune``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.core.files import PAGE, replace_file
from fedstill.metrics.classification import METRICS
from fedstill.report.blocks import Block, Chart, Gallery, Paragraph, Section, Table
from fedstill.report.figures import (
    NOT_DOTTED,
    PERCENT,
    Figure,
    Trace,
    escaped,
    layout,
    line_colour,
    line_dash,
    new_trace,
    rounded,
)
from fedstill.report.page import Report, document
from fedstill.report.summary import NONE
from fedstill.report.table_files import TextTable
from fedstill.running.runs import Group, differing, group_labels, method_of, spread
from fedstill.running.tuning import Trial, Tuning

if TYPE_CHECKING:
    import plotly.graph_objects as go


REPORT_SEEDS = 5
"""The number of new seeds on which the chosen values should be reported."""


def trial_table(tuning: Tuning) -> TextTable:
    """The table of the trials, best first."""
    unit = _unit_of(tuning.metric)
    goal = f"{tuning.goal or 'goal'} [{unit.name}]"
    head = ["trial", *(dimension.key for dimension in tuning.space), goal, "seeds", ""]
    return TextTable(head, [_trial_line(trial, tuning, unit) for trial in tuning.ranked()])


@dataclass(frozen=True)
class _Unit:
    """How a goal is shown: its unit, the factor for its values, and the decimals."""

    name: str
    scale: float
    digits: int


def _unit_of(name: str) -> _Unit:
    metric = METRICS.get(name)
    if metric is None:
        return _Unit("%", 100, 2)
    return _Unit(metric.unit, metric.scale, metric.digits)


def _trial_line(trial: Trial, tuning: Tuning, unit: _Unit) -> list[str]:
    cells = [
        json.dumps(trial.values[dimension.key], ensure_ascii=False).strip('"')
        for dimension in tuning.space
    ]
    score_text = NONE
    score = spread(list(trial.scores.values()))
    if score is not None:
        score_text = score.text(unit.scale, unit.digits)
    return [str(trial.number), *cells, score_text, str(len(trial.scores)), trial.problem]


def advice(tuning: Tuning, config: str, overrides: Sequence[str]) -> str:
    """The command that runs the best values on new seeds, which were not used to choose them."""
    best = tuning.ranked()[0]
    if not best.scores:
        return "no trial finished, so there is nothing to report"
    unused_seeds = (seed for seed in range(1, 10**6) if seed not in tuning.seeds)
    seeds = ",".join(map(str, islice(unused_seeds, REPORT_SEEDS)))
    values = [f"{key}={_toml_text(value)}" for key, value in best.values.items()]
    words = ["fedstill", "compare"]
    if config:
        words.append(config)
    for setting in (*overrides, *values):
        # The seed was the sampler's, and --seeds would contradict it.
        if setting.partition("=")[0].strip() != "seed":
            words += ["-s", setting]
    command = shlex.join([*words, "--seeds", seeds])
    return (
        f"trial {best.number} is the best of {len(tuning.trials)}. Its score is too optimistic, "
        "because the same seeds selected it. Evaluate its values on other seeds:\n"
        f"  {command}"
    )


def _toml_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)


def write_tuning_page(tuning: Tuning, out: Path) -> Path:
    """Write a self-contained HTML page with two figures: the goal by trial, and over each key."""
    trials = trial_table(tuning)
    seeds = ", ".join(map(str, tuning.seeds))
    point = f"the mean over the seeds {seeds}"
    if len(tuning.seeds) == 1:
        point = f"a run with seed {seeds}"
    about = (
        f"Each point is {point}. Do not report these numbers: they were used to choose the values."
    )
    blocks: list[Block] = [Paragraph(about)]
    if any(trial.scores for trial in tuning.trials):
        blocks += _trial_charts(tuning)
    blocks.append(Table(trials.head, trials.lines, "numbers"))
    page = document("Tuning", [], [Section("tuning", "Tuning", blocks)])
    replace_file(out, page.encode(), PAGE)
    return out


def _trial_charts(tuning: Tuning) -> list[Chart]:
    """Optuna's charts of the goal by trial and over each key."""
    from optuna.visualization import plot_optimization_history, plot_slice

    history = _with_our_layout(plot_optimization_history(tuning.study, target_name=tuning.goal))
    slices = _with_our_layout(plot_slice(tuning.study, target_name=tuning.goal))
    return [
        Chart([history], "The line is the best so far.", "The goal by trial"),
        Chart([slices], "Darker points are later trials.", "The goal over each key"),
    ]


def _with_our_layout(optuna_figure: go.Figure) -> Figure:
    """A figure of Optuna with the layout of the page, which has colours for light and dark."""
    figure = json.loads(optuna_figure.to_json())
    settings: dict[str, Any] = figure["layout"]
    axes = {}
    for key, axis in settings.items():
        if key.startswith(("xaxis", "yaxis")):
            title = {**axis.get("title", {}), "standoff": 12}
            axes[key] = {**axis, "title": title, "automargin": True}
    return Figure(figure["data"], layout(hovermode="closest", **axes))


NOT_VARIED = ("partition.seed", "partition.min_size", "partition.clients")
"""Parameters of a partition that do not determine how uneven it is."""

MORE_UNEVEN = {
    "alpha": "smaller is more uneven",
    "shards": "fewer classes per client are more uneven",
}

ABOUT_SPLITS = (
    "Each line is one method on splits that differ in one number only. A flat line means that the "
    "method is robust to uneven data."
)
ABOUT_METHODS = (
    "Each line is one method on one split; only one setting varies. Dotted lines: other methods on "
    "the same split. A flat line means that the setting needs no tuning."
)


@dataclass(frozen=True)
class Effect:
    """A measure on the vertical axis. ``key``: as in ``summary.COLUMNS``."""

    key: str
    title: str


SERVER_EFFECTS = (Effect("forgetting", "Forgetting F"), Effect("accuracy", "Accuracy"))
CLIENT_EFFECTS = (
    Effect("personal_forgetting", "Forgetting at clients"),
    Effect("personal_accuracy", "Accuracy for the clients"),
)
"""The measures for runs with personal models."""


@dataclass(frozen=True)
class Point:
    """A group and its value of the varied setting."""

    value: float
    group: Group


@dataclass(frozen=True)
class VariedSetting:
    """Groups that differ in one numeric setting only.

    ``label``: their common settings. ``points``: sorted by the setting.
    """

    label: str
    points: Sequence[Point]

    @property
    def surroundings(self) -> str:
        """The common settings of its groups, without those of the method."""
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
    """Accuracy and forgetting over a setting of the method; None if no groups differ in one such
    setting only.
    """
    charts = []
    for key in _varied_keys(report.groups, "method."):
        varied = varied_settings(report.groups, key)
        charts += _charts(key, varied, _other_methods(report.groups, varied))
    if not charts:
        return None
    blocks = [Paragraph(ABOUT_METHODS), Gallery(charts)]
    return Section("sensitivity", "Effect of a hyper-parameter", blocks)


# ---- groups --------------------------------------------------------------------------------------


def _varied_keys(groups: Sequence[Group], prefix: str) -> list[str]:
    """The numeric keys of a config table that differ between groups."""
    keys = [key for key in differing([group.settings for group in groups]) if key not in NOT_VARIED]
    return [key for key in keys if key.startswith(prefix) and _has_number(groups, key)]


def _has_number(groups: Sequence[Group], key: str) -> bool:
    return any(_is_number(group.settings.get(key)) for group in groups)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def varied_settings(groups: Sequence[Group], key: str) -> list[VariedSetting]:
    """Sets of at least two groups that differ in ``key`` only."""
    points_by_settings: dict[str, list[Point]] = {}
    for group in groups:
        if _is_number(group.settings.get(key)):
            common_settings = json.dumps(_without(group, key), sort_keys=True, default=str)
            point = Point(float(group.settings[key]), group)
            points_by_settings.setdefault(common_settings, []).append(point)
    lines = [points for points in points_by_settings.values() if len(points) > 1]
    labels = group_labels([_without(points[0].group, key) for points in lines])
    return [
        VariedSetting(label, sorted(points, key=lambda point: point.value))
        for label, points in zip(labels, lines, strict=True)
    ]


def _without(group: Group, key: str) -> dict[str, Any]:
    return {name: value for name, value in group.settings.items() if name != key}


def _other_methods(groups: Sequence[Group], varied: Sequence[VariedSetting]) -> list[Group]:
    """Groups of other methods with the same settings otherwise."""
    varied_groups = [point.group for setting in varied for point in setting.points]
    methods = {method_of(group.settings) for group in varied_groups}
    surroundings = {_surroundings(group) for group in varied_groups}
    candidates = [group for group in groups if method_of(group.settings) not in methods]
    return [group for group in candidates if _surroundings(group) in surroundings]


def _surroundings(group: Group) -> str:
    settings = {k: v for k, v in group.settings.items() if not k.startswith("method.")}
    return json.dumps(settings, sort_keys=True, default=str)


# ---- charts --------------------------------------------------------------------------------------


def _charts(
    key: str, varied: Sequence[VariedSetting], other_methods: Sequence[Group]
) -> list[Chart]:
    """A chart for each effect of a setting."""
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
    """The measures of the server's model, of personal models, or of both."""
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
    return Figure(traces, layout(xaxis=across, yaxis=PERCENT.fitted(traces)))


def _line(setting: VariedSetting, measure: str, index: int) -> Trace:
    """A measure over the setting, with its standard deviation over seeds."""
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
        line={"color": line_colour(index), "width": 2, "dash": line_dash(index, NOT_DOTTED)},
        marker={"size": 7},
    )


def _level(setting: VariedSetting, group: Group, measure: str, index: int) -> list[Trace]:
    """A horizontal line for another method, in the colour of the setting's line; empty if the
    method lacks the measure.
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
        line={"color": line_colour(index), "width": 1.5, "dash": "dot"},
    )
    return [line]
