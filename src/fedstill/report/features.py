"""The sections on features of test examples, embedded by t-SNE: for a single run, and for runs with
the same initial model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedstill.core.errors import CorruptFile
from fedstill.core.files import read_file
from fedstill.data.dataset import stratified_positions
from fedstill.measures.base import MEASURES_FOLDER
from fedstill.measures.features import tsne_embedding
from fedstill.report.blocks import Chart, Choice, Gallery, Paragraph, Section, group_label
from fedstill.report.class_regions import HIDDEN_AXIS, class_colour, class_name
from fedstill.report.figures import Figure, Style, Trace, escaped, group_name, layout, new_trace
from fedstill.report.page import Report
from fedstill.report.series import Measurement, last_measurements
from fedstill.running.runs import Group

RECEIVED = "received"
AGGREGATED = "aggregated"

GLOBAL_COLOURS = {RECEIVED: "#6B7280", AGGREGATED: "#D7263D"}
"""The colours of global models."""

LOCAL_SIZE = 4
GLOBAL_SIZE = 5
"""The sizes of the points of local and global models, in pixels."""

ABOUT = (
    "Each point shows the features of a test example in one of the models (joint t-SNE). Points "
    "are close if their features are similar; large distances have no meaning. By class: where "
    "classes mix, the models cannot distinguish them. By model: a local model whose points lie on "
    "those of the global model has forgotten little."
)


@dataclass(frozen=True)
class Point:
    """A point in the plane of a t-SNE."""

    x: float | None
    y: float | None


@dataclass(frozen=True)
class Embedding:
    """The t-SNE of a measurement: labels (n,), and points (n,) for each model."""

    group: Group
    labels: Sequence[int]
    places: Mapping[str, Sequence[Point]]


def tsne(report: Report) -> Section | None:
    """Test features under the global and local models on one plane; None if it was not measured."""
    charts = []
    for measurement in last_measurements(report.groups, "tsne"):
        embedding = _embedding(measurement)
        charts.append(
            Chart(
                [_by_class(embedding), _by_model(embedding)],
                f"{measurement.place}: {ABOUT}",
                group_label(measurement.group, report.style, measurement.place),
                "tsne",
                is_explained=True,
            )
        )
    if not charts:
        return None
    choice = Choice("tsne", "Colour by", ["class", "model"])
    blocks = [Paragraph(ABOUT), choice, Gallery(charts)]
    return Section("tsne", "Features of the test examples", blocks)


def _embedding(measurement: Measurement) -> Embedding:
    places = {}
    for model in measurement.look.names("x"):
        x = measurement.look.points(f"x/{model}")
        y = measurement.look.points(f"y/{model}")
        places[model] = [Point(*pair) for pair in zip(x, y, strict=True)]
    return Embedding(measurement.group, _labels(measurement), places)


def _labels(measurement: Measurement) -> list[int]:
    """The labels (n,) of the embedded examples."""
    return [int(label) for label in measurement.look.points("labels") if label is not None]


def _by_class(embedding: Embedding) -> Figure:
    traces = []
    for number in sorted(set(embedding.labels)):
        points = []
        for places in embedding.places.values():
            pairs = zip(places, embedding.labels, strict=True)
            points += [place for place, label in pairs if label == number]
        name = escaped(class_name(embedding.group, number))
        traces.append(dots(name, points, class_colour(number), LOCAL_SIZE))
    return on_plane(traces)


def _by_model(embedding: Embedding) -> Figure:
    """Points by model. Local models come first, so that the points of global models are on top."""
    local_models = [model for model in embedding.places if model not in GLOBAL_COLOURS]
    traces = []
    for index, model in enumerate(local_models):
        points = embedding.places[model]
        traces.append(dots(escaped(model), points, class_colour(index), LOCAL_SIZE))
    for model, points in embedding.places.items():
        if model in GLOBAL_COLOURS:
            traces.append(dots(escaped(model), points, GLOBAL_COLOURS[model], GLOBAL_SIZE))
    return on_plane(traces)


def on_plane(traces: Sequence[Trace]) -> Figure:
    """A figure of points without axes, because t-SNE coordinates have no units."""
    axes = layout(
        height=460,
        hovermode="closest",
        xaxis=HIDDEN_AXIS,
        yaxis={**HIDDEN_AXIS, "scaleanchor": "x"},
    )
    axes["legend"] = {**axes["legend"], "itemsizing": "constant"}
    return Figure(traces, axes)


def dots(name: str, points: Sequence[Point], colour: str, size: int) -> Trace:
    """A trace of points in one colour."""
    return new_trace(
        "scatter",
        mode="markers",
        name=name,
        x=[point.x for point in points],
        y=[point.y for point in points],
        marker={"size": size, "color": colour, "opacity": 0.75, "line": {"width": 0}},
        hovertemplate=f"{name}<extra></extra>",
    )


# A joint t-SNE of runs with the same initial model, which compares the effects of methods or splits
# on the same features


MAX_POINTS = 3000
"""The largest number of points to embed; the time grows faster than linearly."""

ABOUT_JOINT = (
    "A joint t-SNE of the features of test examples, in the model that all these runs received and "
    "in the local models of each run. By run: where a run's points lie on those of the received "
    "model, training has kept its features; elsewhere, training has changed them. By class: "
    "examples of a class should stay together."
)


@dataclass(frozen=True)
class StoredFeatures:
    """The features of a measurement: (n, D) for each model, and the labels (n,) of the images."""

    measurement: Measurement
    features: Mapping[str, Tensor]
    labels: Tensor

    @property
    def group(self) -> Group:
        """The group of the run."""
        return self.measurement.group

    @property
    def received(self) -> Tensor:
        """The features (n, D) of the model that the clients received."""
        return self.features[RECEIVED]

    @property
    def local_features(self) -> list[Tensor]:
        """The features (n, D) of each local model."""
        return [
            values for model, values in self.features.items() if model not in (RECEIVED, AGGREGATED)
        ]


def joint(report: Report) -> Section | None:
    """A chart for each initial model that several groups share; None if there is no such model."""
    stored = [
        _stored_features(measurement) for measurement in last_measurements(report.groups, "tsne")
    ]
    families = _families([features for features in stored if features is not None])
    if not families:
        return None
    charts = [
        Chart(
            _joint_figures(family, report.style),
            ABOUT_JOINT,
            _title(family),
            "joint",
            is_explained=True,
        )
        for family in families
    ]
    choice = Choice("joint", "Colour by", ["run", "class"])
    blocks = [Paragraph(ABOUT_JOINT), choice, *charts]
    return Section("joint", "Runs with the same initial model", blocks)


def _title(family: Sequence[StoredFeatures]) -> str:
    """The labels and the seed of the runs."""
    labels = ", ".join(stored.group.label for stored in family)
    return f"{labels} (seed {family[0].measurement.run.seed})"


def _stored_features(measurement: Measurement) -> StoredFeatures | None:
    """The features that the measure stored next to the journal; None if there is no such file."""
    name = Path(str(measurement.look.texts.get("features", ""))).name
    labels = _labels(measurement)
    path = measurement.run.folder / MEASURES_FOLDER / name
    if not name or not path.is_file():
        return None
    try:
        features = safetensors.torch.load(read_file(path))
    except (OSError, ValueError, SafetensorError) as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error
    if not _are_features(features, len(labels)):
        raise CorruptFile(
            f"{path} is damaged: it must hold features of {len(labels)} images for each model"
        )
    return StoredFeatures(measurement, features, torch.tensor(labels))


def _are_features(features: Mapping[str, Tensor], images: int) -> bool:
    """Whether the received model and all others have features of one shape (images, D)."""
    received = features.get(RECEIVED)
    if received is None or received.dim() != 2 or len(received) != images:
        return False
    return all(values.shape == received.shape for values in features.values())


def _families(stored: Sequence[StoredFeatures]) -> list[list[StoredFeatures]]:
    """The measurements by common received model, if at least two groups share it."""
    families: list[list[StoredFeatures]] = []
    for features in stored:
        for family in families:
            if _are_equal(family[0].received, features.received):
                family.append(features)
                break
        else:
            families.append([features])
    return [family for family in families if len(family) > 1]


def _are_equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second)


def _joint_figures(family: Sequence[StoredFeatures], style: Style) -> list[Figure]:
    """The embedding, coloured by run and by class."""
    received = family[0].received
    local_features = [stored.local_features for stored in family]
    every_model = [received, *(values for models in local_features for values in models)]
    images = _chosen_images(family[0].labels, len(every_model))
    rows = torch.cat([values[images] for values in every_model])
    places = tsne_embedding(rows.float(), seed=0).reshape(len(every_model), len(images), 2)

    places_by_run = torch.split(places[1:], [len(models) for models in local_features])
    run_traces = []
    for stored, own_places in zip(family, places_by_run, strict=True):
        colour = style.colour(stored.group)
        run_traces.append(dots(group_name(stored.group), _points(own_places), colour, LOCAL_SIZE))
    # runs with few points are drawn on top
    run_traces.sort(key=lambda trace: -len(trace["x"]))
    run_traces.append(
        dots("the received model", _points(places[0]), GLOBAL_COLOURS[RECEIVED], GLOBAL_SIZE)
    )

    labels = family[0].labels[images]
    class_traces = []
    for number in sorted(set(labels.tolist())):
        name = escaped(class_name(family[0].group, number))
        points = _points(places[:, labels == number])
        class_traces.append(dots(name, points, class_colour(number), LOCAL_SIZE))
    return [on_plane(run_traces), on_plane(class_traces)]


def _chosen_images(labels: Tensor, models: int) -> Tensor:
    """The images to embed: all, or a stratified part if there are too many."""
    count = min(len(labels), max(1, MAX_POINTS // models))
    if count == len(labels):
        return torch.arange(len(labels))
    return stratified_positions(labels, count, seed=0)


def _points(places: Tensor) -> list[Point]:
    """Convert coordinates (..., 2) to points."""
    return [Point(round(x, 1), round(y, 1)) for x, y in places.reshape(-1, 2).tolist()]
