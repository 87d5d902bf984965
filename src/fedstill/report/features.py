"""Figures of features: t-SNE, classes on a circle, units, and decision boundaries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedstill.core.errors import CorruptFile
from fedstill.data.dataset import stratified
from fedstill.measures.boundaries import STEPS
from fedstill.measures.context import MEASURES_FOLDER
from fedstill.measures.features import embedded
from fedstill.report.figures import COUNTS, Figure, Style, layout, named, plain, rounded
from fedstill.report.markup import (
    Html,
    choice,
    escape,
    figure,
    grid,
    labelled,
    named_colour,
    section,
    sentence,
)
from fedstill.report.series import Look, last_looks, looks, matrix, reading
from fedstill.running.groups import Group

# Pictures of features and units: t-SNE, classes on a circle, and which class each unit stands for.


CLASSES = (
    "#4E79A7", "#F28E2B", "#59A14F", "#E15759", "#B07AA1",
    "#9C755F", "#EDC948", "#76B7B2", "#FF9DA7", "#79706E",
)  # fmt: skip
"""The colour of each class, the same in all these pictures; they repeat after ten."""

GLOBALS = {"received": "#6B7280", "aggregated": "#D7263D"}
BARE = {"showgrid": False, "zeroline": False, "showticklabels": False, "ticks": ""}
HIDDEN_AXIS = {"visible": False}
SEEN = 0.01
"""Below this share of the highest bump nothing is drawn: there the circle is bare."""

BANDWIDTH = 8.0
"""Degrees of the Gaussian that smooths counts of angles."""


def tsne(groups: Sequence[Group], style: Style) -> Html | None:
    """Test features under the global and local models on one plane; None if it was not measured."""
    looks = last_looks(groups, "tsne")
    if not looks:
        return None
    says = (
        "Every point is a test image as one of the models sees it. Images are near each other if "
        "their "
        "features are alike (joint t-SNE; large distances mean nothing). By class: where classes "
        "mix, the "
        "models cannot tell them apart. By model: a local model whose points lie on those of the "
        "global model"
        " forgot little; a group of points of one model only has features that no other model has."
    )
    figures = [
        figure(
            [_places(look, by) for by in ("class", "model")],
            f"{look.place}: {says}",
            labelled(look.group, style, look.place),
            "tsne",
        )
        for look in looks
    ]
    parts = [choice("tsne", "Colour by", ["class", "model"]), grid(figures)]
    return section("Features of the test examples", sentence(says), *parts, name="tsne")


def sphere(groups: Sequence[Group], style: Style) -> Html | None:
    """Where the classes are on the circle, model by model; None if it was not measured."""
    looks = last_looks(groups, "sphere")
    if not looks:
        return None
    says = (
        "Features of this network are points on a circle. Each bump is a class: its position is "
        "the direction"
        " of the class's features, its height the number of test examples there. If bumps of a "
        "local model "
        "merge or move, it has forgotten those classes."
    )
    figures = [
        figure([_circles(look)], f"{look.place}: {says}", labelled(look.group, style, look.place))
        for look in looks
    ]
    return section(
        "Classes on the circle", sentence(says), _class_key(looks[0].group), *figures, name="sphere"
    )


def units(groups: Sequence[Group], style: Style) -> Html | None:
    """Which class each unit of the last hidden layer stands for, model by model; None if it was not
    measured.
    """
    looks = last_looks(groups, "units")
    if not looks:
        return None
    says = (
        "Each column is a unit of the last hidden layer. Its colour is the class for which the "
        "unit is most "
        "active. Columns are sorted by the model that clients received (top row). A model whose "
        "row has the "
        "same colours kept what it knew."
    )
    figures = [
        figure([_units(look)], f"{look.place}: {says}", labelled(look.group, style, look.place))
        for look in looks
    ]
    return section(
        "The class of each unit",
        sentence(says),
        _class_key(looks[0].group),
        grid(figures),
        name="units",
    )


def class_colour(number: int) -> str:
    """The colour of a class."""
    return CLASSES[number % len(CLASSES)]


def _places(look: Look, by: str) -> Figure:
    with reading(look) as event:
        models, labels = [str(m) for m in event["models"]], [int(v) for v in event["labels"]]
        x, y = (matrix(event[k], len(models), len(labels)) for k in ("x", "y"))
        traces = []
        if by == "class":
            for c in sorted(set(labels)):
                own = [
                    (x[m][i], y[m][i])
                    for m in range(len(models))
                    for i, v in enumerate(labels)
                    if v == c
                ]
                traces.append(dots(plain(class_name(look, c)), own, class_colour(c), 4))
        else:
            local = [m for m in models if m not in GLOBALS]
            for name in [*local, *(m for m in models if m in GLOBALS)]:
                colour = GLOBALS.get(name) or class_colour(local.index(name))
                m = models.index(name)
                traces.append(
                    dots(
                        plain(name),
                        list(zip(x[m], y[m], strict=True)),
                        colour,
                        5 if name in GLOBALS else 4,
                    )
                )
    return on_plane(traces)


def on_plane(traces: Sequence[dict[str, Any]]) -> Figure:
    """Points without axes, as t-SNE's have no units."""
    about = layout(
        height=460,
        hovermode="closest",
        xaxis=HIDDEN_AXIS,
        yaxis={**HIDDEN_AXIS, "scaleanchor": "x"},
    )
    return {
        "data": list(traces),
        "layout": {**about, "legend": {**about["legend"], "itemsizing": "constant"}},
    }


def dots(
    name: str, points: Sequence[tuple[float, float]], colour: str, size: int
) -> dict[str, Any]:
    """Points of one kind."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [p[0] for p in points],
        "y": [p[1] for p in points],
        "marker": {"size": size, "color": colour, "opacity": 0.75, "line": {"width": 0}},
        "hovertemplate": f"{name}<extra></extra>",
    }


def _circles(look: Look) -> Figure:
    traces: list[dict[str, Any]] = []
    notes = []
    with reading(look) as event:
        models, classes = [str(m) for m in event["models"]], len(look.group.classes)
        bins = len(event["counts"][0][0])
        for i, (name, by_class) in enumerate(zip(models, event["counts"], strict=True)):
            densities = [smoothed(row) for row in matrix(by_class, classes, bins)]
            top = max((max(d) for d in densities), default=0.0) or 1.0
            traces.append(_ring(3.2 * i, [1.0] * bins, "#9aa4b0", ""))
            for c, density in enumerate(densities):
                radius = [1 + 0.5 * d / top if d > SEEN * top else None for d in density]
                traces.append(_ring(3.2 * i, radius, class_colour(c), plain(class_name(look, c))))
            notes.append({"text": plain(name), "x": 3.2 * i, "y": 0, "showarrow": False})
    span = [-1.6, 3.2 * (len(models) - 1) + 1.6]
    axes = {
        "xaxis": {**HIDDEN_AXIS, "range": span},
        "yaxis": {**HIDDEN_AXIS, "scaleanchor": "x", "range": [-1.6, 1.6]},
    }
    return {
        "data": traces,
        "layout": {
            **layout(height=280, hovermode="closest", showlegend=False, **axes),
            "annotations": notes,
        },
    }


def _ring(centre: float, radius: Sequence[float | None], colour: str, name: str) -> dict[str, Any]:
    steps = len(radius)
    angles = [-math.pi + 2 * math.pi * (k + 0.5) / steps for k in range(steps)]
    x = [
        None if r is None else round(centre + r * math.cos(a), 4)
        for a, r in zip(angles, radius, strict=True)
    ]
    y = [
        None if r is None else round(r * math.sin(a), 4)
        for a, r in zip(angles, radius, strict=True)
    ]
    line = {"color": colour, "width": 2 if name else 1}
    hover = {"hovertemplate": f"{name}<extra></extra>"} if name else {"hoverinfo": "skip"}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [*x, x[0]],
        "y": [*y, y[0]],
        "line": line,
        **hover,
    }


def smoothed(counts: Sequence[float], bandwidth: float = BANDWIDTH) -> list[float]:
    """Counts around a circle as a density: each is spread by a Gaussian of so many degrees; the sum
    stays.
    """
    bins = len(counts)
    step = 360 / bins
    kernel = [math.exp(-0.5 * (min(k, bins - k) * step / bandwidth) ** 2) for k in range(bins)]
    total = sum(kernel)
    return [
        sum(counts[j] * kernel[(i - j) % bins] for j in range(bins)) / total for i in range(bins)
    ]


def _units(look: Look) -> Figure:
    with reading(look) as event:
        models = [str(m) for m in event["models"]]
        rows = matrix(event["classes"], len(models), len(event["classes"][0]))
        order = sorted(range(len(rows[0])), key=lambda u: rows[0][u])
        shown = [[int(row[u]) % len(CLASSES) for u in order] for row in rows]
        names = [[plain(class_name(look, int(row[u]))) for u in order] for row in rows]
    steps = [(i + j) / len(CLASSES) for i in range(len(CLASSES)) for j in (0, 1)]
    colours = [CLASSES[i] for i in range(len(CLASSES)) for _ in (0, 1)]
    trace = {
        "type": "heatmap",
        "y": [plain(m) for m in models],
        "z": shown,
        "customdata": names,
        "zmin": 0,
        "zmax": len(CLASSES),
        "colorscale": [list(pair) for pair in zip(steps, colours, strict=True)],
        "showscale": False,
        "ygap": 2,
        "hovertemplate": "%{y}: unit stands for %{customdata}<extra></extra>",
    }
    axes = {
        "xaxis": {**BARE, "title": {"text": f"{len(order)} units"}},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
    }
    return {
        "data": [trace],
        "layout": layout(
            height=90 + 26 * len(models), hovermode="closest", showlegend=False, **axes
        ),
    }


def class_name(look: Look, number: int) -> str:
    """A class's name, or its number where it has none."""
    names = look.group.classes
    return str(names[number]) if number < len(names) else str(number)


def _class_key(group: Group) -> Html:
    names = [
        named_colour(class_colour(i), n) for i, n in enumerate(group.classes[: 2 * len(CLASSES)])
    ]
    return Html(f'<div class="key">{"".join(n.text for n in names)}</div>')


# Runs that started from one model, in one t-SNE: what each method, or each split, does with the
# same features.


RECEIVED, AGGREGATED = "received", "aggregated"
POINTS = 3000
"""So many points are embedded at most: the time grows faster than their number."""

ABOUT_JOINT = (
    "One t-SNE of the test examples' features: of the model that all these runs received, and of "
    "the local "
    "models of each run. By run: where a run's points lie on those of the received model, training "
    "kept "
    "its features; where they lie apart, training changed them. By class: whether the images of a "
    "class "
    "stay together."
)


@dataclass(frozen=True)
class Kept:
    """The features of one look: (n, D) of each model, and the images' labels (n,)."""

    look: Look
    features: Mapping[str, Tensor]
    labels: Tensor

    @property
    def group(self) -> Group:
        """The group of the run."""
        return self.look.group


def joint(groups: Sequence[Group], style: Style) -> Html | None:
    """A figure for each model from which several groups' runs started; None if there is no such
    model.
    """
    families = _families(
        [k for look in last_looks(groups, "tsne") if (k := _kept(look)) is not None]
    )
    if not families:
        return None
    figures = [
        figure(_figures(family, style), ABOUT_JOINT, _title(family), "joint") for family in families
    ]
    parts = [choice("joint", "Colour by", ["run", "class"]), *figures]
    return section("Runs that started from one model", sentence(ABOUT_JOINT), *parts, name="joint")


def _title(family: Sequence[Kept]) -> Html:
    """Which runs, and of which seed; the section says the rest."""
    return Html(
        escape(f"{', '.join(k.group.label for k in family)} (seed {family[0].look.run.seed})")
    )


def _kept(look: Look) -> Kept | None:
    """What the measure kept beside the journal; None where nothing was kept, or the file was left
    behind.
    """
    with reading(look) as event:
        name, labels = (
            Path(str(event.get("features") or "")).name,
            [int(v) for v in event["labels"]],
        )
    path = look.run.folder / MEASURES_FOLDER / name
    if not name or not path.is_file():
        return None
    try:
        features = safetensors.torch.load(path.read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error
    shapes = {tuple(v.shape) for v in features.values()}
    if (
        RECEIVED not in features
        or len(shapes) != 1
        or features[RECEIVED].dim() != 2
        or len(features[RECEIVED]) != len(labels)
    ):
        raise CorruptFile(
            f"{path} is damaged: it must hold features of {len(labels)} images for each model"
        )
    return Kept(look, features, torch.tensor(labels))


def _families(kept: Sequence[Kept]) -> list[list[Kept]]:
    """Looks whose runs received the same model, two groups or more."""
    families: list[list[Kept]] = []
    for one in kept:
        own = one.features[RECEIVED]
        for family in families:
            first = family[0].features[RECEIVED]
            if first.shape == own.shape and torch.equal(first, own):
                family.append(one)
                break
        else:
            families.append([one])
    return [family for family in families if len(family) > 1]


def _figures(family: Sequence[Kept], style: Style) -> list[Figure]:
    """The embedding, coloured by run and by class."""
    models = [
        (None, RECEIVED),
        *((k, m) for k in family for m in k.features if m not in (RECEIVED, AGGREGATED)),
    ]
    labels = family[0].labels
    few = min(len(labels), max(1, POINTS // len(models)))
    some = torch.arange(len(labels)) if few == len(labels) else stratified(labels, few, seed=0)
    rows = torch.cat([(k or family[0]).features[m][some] for k, m in models])
    places = embedded(rows.float(), seed=0).reshape(len(models), few, 2)
    own = {
        id(k): [p for (o, _), p in zip(models, places, strict=True) if o is k]
        for k in (None, *family)
    }
    by_run = [
        dots(named(k.group), _pairs(torch.cat(own[id(k)])), style.colour(k.group), 4)
        for k in sorted(family, key=lambda k: -len(own[id(k)]))
    ]
    by_run.append(dots("the model received", _pairs(own[id(None)][0]), GLOBALS[RECEIVED], 5))
    classes = labels[some]
    by_class = [
        dots(
            plain(class_name(family[0].look, c)),
            _pairs(places[:, classes == c].reshape(-1, 2)),
            class_colour(c),
            4,
        )
        for c in sorted(set(classes.tolist()))
    ]
    return [on_plane(by_run), on_plane(by_class)]


def _pairs(places: Tensor) -> list[tuple[float, float]]:
    return [(round(x, 1), round(y, 1)) for x, y in places.tolist()]


# Decision boundaries of a client that asked, stage by stage, with its accuracy by class below.


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
