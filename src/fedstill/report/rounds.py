"""The sections with values by round: accuracy and forgetting, the user's own measures, further
metrics with the confusion matrix, and accuracy by class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstill.metrics.accuracy import Values
from fedstill.metrics.classification import METRICS, Metric
from fedstill.report.blocks import (
    Chart,
    Choice,
    ColourScale,
    Gallery,
    Paragraph,
    Section,
    group_chart,
    line_key,
)
from fedstill.report.figures import (
    ACCURACY_COLOURS,
    MAX_CELLS,
    NUMBER,
    PERCENT,
    Figure,
    Layout,
    absent_note,
    class_axis,
    class_names,
    heat_map,
    height_of,
    lines,
    measured,
    percentage,
    plain_layout,
    rounded,
    whole_numbers,
)
from fedstill.report.page import Report
from fedstill.report.series import class_means
from fedstill.report.summary import own_metrics
from fedstill.running.runs import Group, Run

# Lines of accuracy and forgetting


@dataclass(frozen=True)
class RoundChart:
    """A chart of one share by round: the key of the measure, a title and a description.

    needs_two_rounds: whether the measure is undefined after one round, as forgetting is.
    """

    key: str
    title: str
    description: str
    needs_two_rounds: bool = False

    def drawn(self, report: Report) -> Chart:
        """The chart with a line for each group."""
        figure = lines(report.groups, report.style, self.key, PERCENT)
        return Chart([figure], self.description, self.title)


OWN_TESTS = RoundChart(
    "own_test_accuracy",
    "Accuracy on own tests by round",
    "The model that each client uses, on the client's own test set, averaged over clients. "
    "Higher is better.",
)

OF_CLIENTS = (
    RoundChart(
        "personal_accuracy",
        "Accuracy for the clients by round",
        "Accuracy of the model that each client uses (its own model or the global one), on test "
        "examples in the client's class proportions, averaged over clients. Higher is better.",
    ),
    RoundChart(
        "personal_forgetting",
        "Forgetting at clients by round",
        "For clients with their own models: the mean drop in accuracy on the client's classes "
        "since their best earlier round. Lower is better.",
        needs_two_rounds=True,
    ),
    OWN_TESTS,
)
"""These charts come first if clients have their own models."""

OF_THE_SERVER = (
    RoundChart(
        "accuracy",
        "Accuracy by round",
        "Accuracy of the global model on the common test set. Higher is better.",
    ),
    RoundChart(
        "forgetting",
        "Forgetting F by round",
        "The mean drop in accuracy over classes since the best earlier round of each class. Lower "
        "is better; negative values mean that classes are better than in any earlier round.",
        needs_two_rounds=True,
    ),
)

ABOUT_LINES = (
    "Lines are means over seeds; bands are one standard deviation above and below. Where accuracy "
    "falls and F rises, the model has forgotten classes that it had learned."
)


def learning_and_forgetting(report: Report) -> Section | None:
    """Accuracy and forgetting by round; None if neither was measured."""
    charts = [*OF_THE_SERVER, OWN_TESTS]
    if any(group.has_personal_models for group in report.groups):
        charts = [*OF_CLIENTS, *OF_THE_SERVER]
    drawn = [chart.drawn(report) for chart in charts if _is_drawn(chart, report.groups)]
    if not drawn:
        return None
    key = line_key(report.groups, report.style)
    about = Paragraph(f"{ABOUT_LINES} {_about_ends(report.groups)}".strip())
    return Section("rounds", "Learning and forgetting", [about, key, Gallery(drawn)])


ABOUT_ENDS = (
    "Some seeds of a group have fewer rounds than others: later values are means over the "
    "remaining seeds, and a single seed has no band."
)


def _about_ends(groups: Sequence[Group]) -> str:
    """A sentence if runs of a group end at different rounds; otherwise empty."""
    for group in groups:
        if len({run.numbers.last_round for run in group.started}) > 1:
            return ABOUT_ENDS
    return ""


def _is_drawn(chart: RoundChart, groups: Sequence[Group]) -> bool:
    if chart.needs_two_rounds and not _has_two_rounds(groups):
        return False
    return measured(groups, chart.key)


def _has_two_rounds(groups: Sequence[Group]) -> bool:
    return any(len(run.rounds) > 1 for group in groups for run in group.runs)


# Lines of the user's own measures


ABOUT_OWN = (
    "Values of your own measures by round, averaged over all stages of a round in which they "
    "were taken."
)


def own_measures(report: Report) -> Section | None:
    """The values of the user's own measures by round; None if no run has any."""
    charts = [
        Chart([lines(report.groups, report.style, metric)], f"{metric}, by round.", metric)
        for metric in own_metrics(report.groups)
    ]
    if not charts:
        return None
    key = line_key(report.groups, report.style)
    about = Paragraph(f"{ABOUT_OWN} {_about_ends(report.groups)}".strip())
    return Section("own_measures", "Your measures", [about, key, Gallery(charts, "small")])


# Heat maps of accuracy by class and round, in which forgetting is visible


ABOUT_MAPS = (
    "Each row is a class, and each column is a round. Colours show the accuracy on the class. A "
    "row that turns bright and then dark is a class that was learned and then forgotten. Round 0 "
    "is the model before training. The view of shares divides the accuracies of a round by their "
    "sum; yellow is the largest share in the figure."
)
ABOUT_SEEDS = "Seeds forget at different times, which the mean hides. Select a seed to see this."


def remembered_classes(report: Report) -> Section | None:
    """Accuracy by class and round; None if it was not measured."""
    groups = [group for group in report.groups if _has_class_accuracy(group)]
    if not groups:
        return None
    shown_views = views(groups)
    about = ABOUT_MAPS
    if len(shown_views) > 1:
        about = f"{ABOUT_MAPS} {ABOUT_SEEDS}"
    charts = [
        group_chart(group, _variants(group, shown_views), about, report.style, "classes")
        for group in groups
    ]
    options = [view.title for view in shown_views]
    options.append(f"{options[0]}, as shares of each round's sum")
    return Section(
        "classes",
        "Accuracy by class and round",
        [
            Paragraph(about),
            Choice("classes", "Show", options),
            ColourScale(ACCURACY_COLOURS),
            Gallery(charts, "small"),
        ],
    )


def _has_class_accuracy(group: Group) -> bool:
    """Whether any class of any round has an accuracy."""
    rows = [row for run in group.started for row in run.numbers.class_accuracy.values()]
    return any(value is not None for row in rows for value in row)


@dataclass(frozen=True)
class View:
    """The runs in a heat map: those of a seed, or all runs if the seed is None."""

    title: str
    seed: int | None = None

    def runs(self, group: Group) -> list[Run]:
        """The runs of a group that the view shows."""
        if self.seed is None:
            return group.started
        return [run for run in group.started if run.seed == self.seed]


MEAN = View("mean over seeds")


def views(groups: Sequence[Group]) -> list[View]:
    """The views that a reader can select: the mean over seeds, and each seed.

    With a single seed, that seed is the only view. If the maps of all seeds would make the page too
    large, the mean is the only view.
    """
    seeds = sorted({seed for group in groups for seed in group.seeds})
    seed_views = [View(f"seed {seed}", seed) for seed in seeds]
    if len(seeds) == 1:
        return seed_views
    runs = [run for group in groups for run in group.runs]
    cells = sum(len(run.rounds) * len(run.classes) for run in runs)
    if cells > MAX_CELLS:
        return [MEAN]
    return [MEAN, *seed_views]


def _variants(group: Group, shown_views: Sequence[View]) -> list[Figure]:
    """The heat map of each view, and the shares in the first view."""
    maps = [class_by_round(group, view) for view in shown_views]
    return [*maps, shares_by_round(group, shown_views[0])]


def class_by_round(group: Group, view: View) -> Figure:
    """Accuracy by class and round, as the mean over seeds or for one seed."""
    columns = class_means(view.runs(group))
    return class_map(columns, group.classes, "round", absent=f"no run with {view.title}")


def shares_by_round(group: Group, view: View) -> Figure:
    """Accuracy of each class as a share of the round's sum over classes.

    Source: FedNTD, appendix E, figure 10.
    """
    columns = {number: _sum_shares(row) for number, row in class_means(view.runs(group)).items()}
    shares = [share for row in columns.values() for share in row if share is not None]
    return class_map(
        columns,
        group.classes,
        "round",
        absent=f"no run with {view.title}",
        # If all shares are 0, the scale is that of accuracies.
        largest=percentage(max(shares, default=0)) or 100,
    )


def _sum_shares(row: Sequence[float | None]) -> list[float | None]:
    """The accuracies of a round as shares of their sum."""
    total = sum(value for value in row if value is not None)
    shares: list[float | None] = []
    for value in row:
        share = None
        if value is not None and total > 0:
            share = value / total
        shares.append(share)
    return shares


def class_map(
    columns: Mapping[int, Sequence[float | None]],
    classes: Sequence[str],
    unit: str,
    *,
    absent: str = "",
    largest: float = 100,
) -> Figure:
    """Accuracy by class (C,) and round or hop.

    unit: "round" or "hop". absent: the text of a heat map without columns. largest: the percentage
    that has the last colour.
    """
    names = class_names(classes)
    if not columns or not classes:
        return Figure([], _map_layout(len(names), unit, max(columns, default=0), absent))
    accuracies_by_class = zip(*columns.values(), strict=True)
    trace = heat_map(
        list(columns),
        names,
        [[percentage(accuracy) for accuracy in row] for row in accuracies_by_class],
        largest=largest,
        hovertemplate=f"class %{{y}}, {unit} %{{x}}: %{{z:.1f}} %<extra></extra>",
    )
    return Figure([trace], _map_layout(len(names), unit, max(columns), absent=""))


def _map_layout(classes: int, unit: str, last: int, absent: str) -> Layout:
    """The layout of a heat map of ``classes`` rows.

    last: the last round or hop. absent: the text of a heat map without columns.
    """
    # Hops are categories without gaps. Rounds are numbers: a cell extends to the next measured
    # round.
    ticks: Mapping[str, Any] = {"type": "category"}
    if unit == "round":
        ticks = whole_numbers(1 + last)
    notes = []
    if absent:
        notes.append(absent_note(absent))
    return plain_layout(
        height=height_of(classes),
        xaxis={"title": {"text": unit}, "showgrid": False, "zeroline": False, **ticks},
        yaxis=class_axis("class"),
        annotations=notes,
    )


MODELS = {
    "": "The server's model on the common test set.",
    "own_test_": (
        "The model that each client uses, on the client's own test set, averaged over clients."
    ),
}
"""Descriptions of the tested model and its test data, by the prefix of a metric's key."""

ABOUT_METRICS = "Lines are means over seeds; bands are one standard deviation above and below."

ABOUT_CONFUSION = (
    "Each row is a class, each column the class that the model predicts in the last round. The "
    "colour is the share of the row's test examples, over all seeds. The diagonal shows "
    "correct predictions."
)


def metrics_by_round(report: Report) -> Section | None:
    """The metrics that the runs record, by round; None if they record none."""
    charts = []
    for prefix in MODELS:
        for name, metric in METRICS.items():
            if measured(report.groups, f"{prefix}{name}"):
                charts.append(_metric_chart(report, metric, prefix))
    if not charts:
        return None
    key = line_key(report.groups, report.style)
    about = Paragraph(f"{ABOUT_METRICS} {_about_ends(report.groups)}".strip())
    return Section("metrics", "Metrics", [about, key, Gallery(charts)])


def _metric_chart(report: Report, metric: Metric, prefix: str) -> Chart:
    """A chart of a metric by round; prefix: a key of ``MODELS``."""
    direction = "Lower"
    if metric.larger_is_better:
        direction = "Higher"
    title = metric.title[0].upper() + metric.title[1:]
    if prefix:
        title = f"{title} on own tests"
    axis = NUMBER
    if metric.unit == "%":
        axis = PERCENT
    figure = lines(report.groups, report.style, f"{prefix}{metric.name}", axis)
    about = f"{metric.description}. {MODELS[prefix]} {direction} is better."
    return Chart([figure], about, f"{title} by round")


def confusion(report: Report) -> Section | None:
    """The confusion matrix of each group in the last round; None if no run records it."""
    charts = []
    for group in report.groups:
        counts = _confusion_counts(group)
        if counts is not None:
            figure = _confusion_map(counts, group.classes)
            charts.append(group_chart(group, [figure], ABOUT_CONFUSION, report.style))
    if not charts:
        return None
    scale = ColourScale(ACCURACY_COLOURS, "of the class")
    blocks = [Paragraph(ABOUT_CONFUSION), scale, Gallery(charts, "small")]
    return Section("confusion", "Confusion matrix", blocks)


def _confusion_counts(group: Group) -> Values | None:
    """The sum of a group's confusion matrices, (C, C); None if there are none."""
    matrices = [run.numbers.confusion() for run in group.started]
    counts = [np.array(matrix, np.float64) for matrix in matrices if matrix]
    if not counts:
        return None
    total: Values = np.sum(counts, axis=0)
    return total


def _confusion_map(counts: Values, classes: Sequence[str]) -> Figure:
    """A heat map of predicted classes as shares of each class's examples; counts: (C, C)."""
    names = class_names(classes)
    totals = counts.sum(1, keepdims=True)
    empty = np.full_like(counts, np.nan)
    percent = np.divide(100 * counts, totals, out=empty, where=totals > 0)
    trace = heat_map(
        names,
        names,
        # None for a class without test examples.
        [[rounded(value, 1) for value in row] for row in percent],
        customdata=counts.astype(int).tolist(),
        hovertemplate="class %{y}, predicted %{x}: %{z:.1f} %, %{customdata} examples"
        "<extra></extra>",
    )
    axes = plain_layout(
        height=height_of(len(names)),
        xaxis={"type": "category", "showgrid": False, "title": {"text": "predicted class"}},
        yaxis=class_axis("class"),
    )
    return Figure([trace], axes)
