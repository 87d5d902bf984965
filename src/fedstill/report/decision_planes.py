"""Decision boundaries of a client that asked, stage by stage, with its accuracy by class below."""

from __future__ import annotations

from collections.abc import Sequence

from fedstill.experiment.measures.boundaries import STEPS
from fedstill.report.features import BARE, CLASSES, class_colour
from fedstill.report.figures import Figure, Style, layout, plain, rounded
from fedstill.report.groups import Group
from fedstill.report.heatmaps import COUNTS
from fedstill.report.markup import Html, figure, grid, labelled, section, sentence
from fedstill.report.measured import Look, looks, matrix, reading

STAGE_TITLES = {"fit": "alone", "transfer": "phase 1", "refine": "phase 2"}
PLANE_HEIGHT = 400


def boundaries(groups: Sequence[Group], style: Style) -> Html | None:
    """For each group the planes of its first seed that has any; None if it was not measured."""
    shown = [seen for g in groups if (seen := _of_last_round(g))]
    if not shown:
        return None
    says = (
        "Each point is a test image of a class that the client asked for (ringed) or has. The axes "
        "are the "
        "first two principal components of the model's features. The background is the class that "
        "the model's"
        " head predicts there. Below: accuracy by class on the whole test set."
    )
    parts = []
    for seen in shown:
        parts += [labelled(seen[0].group, style), grid([_stage(look) for look in seen], "small")]
    return section("Decision boundaries", sentence(says), *parts, name="boundaries")


def _of_last_round(group: Group) -> list[Look]:
    """The looks of the first seed that has any: after the client last trained alone, and in the
    last round.
    """
    every = list(looks(group, "boundaries"))
    own = [look for look in every if look.run is every[0].run]
    last = own[-1].event["round"] if own else 0
    alone = max((look.event["round"] for look in own if look.event["name"] == "fit"), default=0)
    return [
        look
        for look in own
        if look.event["round"] == (alone if look.event["name"] == "fit" else last)
    ]


def _stage(look: Look) -> Html:
    title = STAGE_TITLES.get(str(look.event["name"]), str(look.event["name"]))
    with reading(look):
        plane, bar = _plane(look), _accuracies(look)
        axes = {
            "xaxis": BARE,
            "yaxis": {**BARE, "domain": [0.3, 1]},
            "xaxis2": {"type": "category", "anchor": "y2", "automargin": True},
            "yaxis2": {**BARE, "type": "category", "domain": [0, 0.1]},
        }
        drawn = {
            "data": [*plane, bar],
            "layout": layout(height=PLANE_HEIGHT, hovermode="closest", **axes),
        }
        return figure([drawn], f"{look.place}, client {look.event['client']}", title)


def _plane(look: Look) -> list[Figure]:
    event, names = look.event, [plain(str(c)) for c in look.group.classes]
    plane = matrix(event["plane"], STEPS, STEPS)
    (x0, x1), (y0, y1) = event["x_range"], event["y_range"]
    steps = [(i + j) / len(CLASSES) for i in range(len(CLASSES)) for j in (0, 1)]
    colours = [CLASSES[i] for i in range(len(CLASSES)) for _ in (0, 1)]
    background = {
        "type": "heatmap",
        "x": [rounded(x0 + (x1 - x0) * k / (STEPS - 1)) for k in range(STEPS)],
        "y": [rounded(y0 + (y1 - y0) * k / (STEPS - 1)) for k in range(STEPS)],
        "z": [[int(v) % len(CLASSES) for v in row] for row in plane],
        "customdata": [[names[int(v)] for v in row] for row in plane],
        "zmin": 0,
        "zmax": len(CLASSES),
        "colorscale": [list(pair) for pair in zip(steps, colours, strict=True)],
        "opacity": 0.35,
        "showscale": False,
        "hovertemplate": "the head says %{customdata}<extra></extra>",
    }
    points = []
    for c in [*event["query"], *event["own"]]:
        at = [i for i, label in enumerate(event["labels"]) if label == c]
        ring = {"width": 1.5, "color": "black"} if c in event["query"] else {"width": 0}
        points.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": names[c],
                "x": [event["x"][i] for i in at],
                "y": [event["y"][i] for i in at],
                "marker": {"size": 6, "color": class_colour(c), "line": ring},
                "hovertemplate": f"{names[c]}<extra></extra>",
            }
        )
    return [background, *points]


def _accuracies(look: Look) -> Figure:
    event = look.event
    shown = [*event["query"], *event["own"]]
    names = [
        f"{plain(str(look.group.classes[c]))}{' (asked for)' if c in event['query'] else ''}"
        for c in shown
    ]
    values = [
        None if event["accuracy"][c] is None else rounded(float(event["accuracy"][c]))
        for c in shown
    ]
    return {
        "type": "heatmap",
        "xaxis": "x2",
        "yaxis": "y2",
        "x": names,
        "y": ["accuracy"],
        "z": [values],
        "text": [["" if v is None else f"{v:.0%}" for v in values]],
        "texttemplate": "%{text}",
        "zmin": 0,
        "zmax": 1,
        "colorscale": COUNTS,
        "showscale": False,
        "hovertemplate": "%{x}: %{z:.1%}<extra></extra>",
    }
