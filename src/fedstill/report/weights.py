"""What training does to weights: alignment, divergence and diversity; and on which data local
models are good.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedstill.report.figures import (
    MOST_IN_LEGEND,
    PERCENT,
    Figure,
    Style,
    faint,
    layout,
    lines,
    named,
    rounded,
)
from fedstill.report.groups import Group
from fedstill.report.knowledge import measured
from fedstill.report.markup import Html, choice, figure, grid, key, section, sentence
from fedstill.report.measured import looks, reading

LAYERS = {"last hidden layer": "features", "classifier": "classifier"}
FAINTEST = 0.15


def weight_changes(groups: Sequence[Group], style: Style) -> Html | None:
    """Alignment, divergence and diversity by round; None if none of them was measured."""
    figures, parts = [], [key(groups, style)]
    if measured(groups, "alignment/layers/features/local"):
        parts.append(choice("layer", "Alignment of the", list(LAYERS)))
        for side, who in (("local", "local models"), ("global", "the new global model")):
            says = (
                f"Share of units that stand for the same class in {who} as in the received model. "
                "Higher: more is kept."
            )
            drawn = [
                lines(groups, style, f"alignment/layers/{k}/{side}", **PERCENT)
                for k in LAYERS.values()
            ]
            figures.append(figure(drawn, says, f"Alignment, {who}", "layer"))
    if measured(groups, "divergence/mean_l2"):
        says = (
            "Each point is a client in a round; later rounds are darker. Horizontal: how far the "
            "client's labels "
            "are from what the global model predicts. Vertical: how far training moved its weights."
        )
        figures.append(
            figure(
                [_scatter(groups, style)], says, "Weight divergence against distribution distance"
            )
        )
        says = "Euclidean distance between local and received weights, mean over clients."
        figures.append(
            figure([lines(groups, style, "divergence/mean_l2")], says, "Weight divergence by round")
        )
        says = (
            "Distance between a client's labels and what the global model predicts, mean over "
            "clients. 0: equal. "
            "2: nothing in common."
        )
        figures.append(
            figure(
                [lines(groups, style, "divergence/mean_distance")],
                says,
                "Distribution distance by round",
            )
        )
    for name, says in (
        (
            "gradients",
            "How far the clients' gradients at the received model differ, before training. 1: all "
            "agree.",
        ),
        ("updates", "How far the updates that clients sent differ. 1: all agree."),
    ):
        if measured(groups, f"diversity/{name}"):
            figures.append(
                figure([lines(groups, style, f"diversity/{name}")], says, f"Diversity of {name}")
            )
    if not figures:
        return None
    return section(
        "What training does to the weights", *parts, grid(figures, "small"), name="weights"
    )


def personal(groups: Sequence[Group], style: Style) -> Html | None:
    """Local train, personalised and server accuracy by round; None if they were not measured."""
    if not measured(groups, "personal/local_train_accuracy"):
        return None
    curves = (
        (
            "personal/local_train_accuracy",
            "Local train",
            "Local models on the data they were trained on.",
        ),
        (
            "personal/personalised_accuracy",
            "Personalised",
            "Local models on test examples in their client's class proportions.",
        ),
        ("accuracy", "Server", "The global model on the whole test set."),
    )
    figures = [
        figure([lines(groups, style, k, **PERCENT)], says, title) for k, title, says in curves
    ]
    says = (
        "Three accuracies of one training. If local train accuracy is high and server accuracy is "
        "low, "
        "clients learn for themselves and the global model gains little."
    )
    return section(
        "Local, personalised and server accuracy",
        sentence(says),
        key(groups, style),
        grid(figures, "small"),
        name="personal",
    )


def _scatter(groups: Sequence[Group], style: Style) -> Figure:
    data = []
    last = max(look.event["round"] for g in groups for look in looks(g, "divergence"))
    for group in groups:
        points = []
        for look in looks(group, "divergence"):
            with reading(look) as event:
                number = event["round"]
                rows = zip(event["distance"], event["l2"], event["clients"], strict=True)
                points += [
                    (float(d), float(w), int(c), number) for d, w, c in rows if d is not None
                ]
        # the darkest first: its colour stands in the legend
        points.sort(key=lambda point: -point[3])
        if points:
            shades = [
                faint(style.colour(group), rounded(FAINTEST + (1 - FAINTEST) * (r / last) ** 2))
                for *_, r in points
            ]
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": named(group),
                    "x": [rounded(d) for d, *_ in points],
                    "y": [rounded(w) for _, w, *_ in points],
                    "customdata": [[c, r] for _, _, c, r in points],
                    "marker": {"size": 8, "color": shades, "line": {"width": 0}},
                    "hovertemplate": "client %{customdata[0]}, round %{customdata[1]}: %{x:.2f}, "
                    "%{y:.3g}",
                }
            )
    axes = {
        "xaxis": {"title": {"text": "distribution distance"}},
        "yaxis": {"title": {"text": "weights moved (L2)"}},
    }
    return {
        "data": data,
        "layout": layout(hovermode="closest", showlegend=len(groups) <= MOST_IN_LEGEND, **axes),
    }
