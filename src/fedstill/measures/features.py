"""Measures of the classes' positions in feature space: ``sphere`` (directions on a circle),
``tsne`` (points on a plane), and ``boundaries`` (a plane with the predicted classes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.extensions import StageResult
from fedstill.core.records import Examples
from fedstill.core.registry import register
from fedstill.core.trees import on_cpu
from fedstill.measures.base import (
    CompleteModelPasses,
    EvaluationContext,
    Measure,
    Numbers,
    comparable,
    named_models,
    none_for_nan,
    rounded_lists,
)
from fedstill.methods.fit import queries_of
from fedstill.models import contract

SPHERE_MODELS = 3
"""The maximum number of local models whose directions are measured."""

BINS = 72


@register("measure", "sphere")
class Sphere(Measure):
    """Directions of test features by class, for the received model, three local models and the
    aggregated model.

    It needs two-dimensional features, such as those of ``sphere_cnn``. At the end of the run, it
    counts directions in 72 bins of 5 degrees. Source: FedNTD, appendix N, figure 18.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "features", "plane"}
    )
    only_last: ClassVar[bool] = True

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """Counts (models, C, bins) of test examples; bin 0 starts at -180 degrees."""
        if not comparable(result, context):
            return None
        labels = context.test.labels.cpu()
        passes = context.passes()
        counts = {}
        for name, params in named_models(result, context, SPHERE_MODELS):
            features = passes.features(params, context.test).cpu()
            counts[name] = directions(features, labels, context.world.classes)
        return {"models": list(counts), "counts": [v.tolist() for v in counts.values()]}

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """A pass of each model over the test set."""
        return test * (min(clients, SPHERE_MODELS) + 2)


def directions(features: Tensor, labels: Tensor, classes: int, bins: int = BINS) -> Tensor:
    """The number of features (n, 2) of each class in each of ``bins`` equal sectors of the circle:
    (C, bins) int64.

    >>> directions(torch.tensor([[0.0, -1.0], [0.1, 1.0]]), torch.tensor([0, 1]), 2, bins=4)
    tensor([[0, 1, 0, 0],
            [0, 0, 1, 0]])
    """
    angle = torch.atan2(features[:, 1].double(), features[:, 0].double())
    bin_ = ((angle + math.pi) / (2 * math.pi) * bins).floor().long().clamp(0, bins - 1)
    return torch.bincount(labels * bins + bin_, minlength=classes * bins).reshape(classes, bins)


FIGURE_EXAMPLES = 200
"""The maximum number of test examples in a figure."""
MODELS = 10
"""The maximum number of local models in a figure."""
TSNE_DIGITS = 1
PERPLEXITY = 30.0
LEAST_SPREAD = 1e-12
"""With a smaller difference between features, scikit-learn's t-SNE divides by 0 and crashes."""


@register("measure", "tsne")
class JointTSNE(Measure):
    """One joint t-SNE of the features of 200 test examples in the received model, the aggregated
    model and at most ten local models.

    It is computed at the end of the run by scikit-learn, with a fixed seed and one thread, because
    its result depends on the number of threads. The features are stored in a file, so that runs
    from the same initial model can be embedded together. Source: FedNTD, appendix O, figures 19 to
    21.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "features"}
    )
    only_last: ClassVar[bool] = True

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """The labels (n,) of the examples, the names of the models, and the coordinates (models, n)
        of each example in each model.
        """
        if not comparable(result, context):
            return None
        stage = result.stage
        images = context.some(FIGURE_EXAMPLES)
        passes = context.passes()
        models = dict(named_models(result, context, MODELS))
        by_model = {name: passes.features(p, images).cpu() for name, p in models.items()}
        features = torch.cat(list(by_model.values()))
        places = tsne_embedding(features, int(context.draw("tsne").initial_seed() % 2**32))
        x, y = places.reshape(len(models), len(images), 2).unbind(2)
        return {
            "models": list(models),
            "labels": images.labels.tolist(),
            "x": rounded_lists(x, TSNE_DIGITS),
            "y": rounded_lists(y, TSNE_DIGITS),
            "features": context.keep(f"tsne-round{stage.round}-stage{stage.index}", by_model),
        }

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """A pass of each model over 200 examples. The embedding itself takes longer."""
        return min(test, FIGURE_EXAMPLES) * (min(clients, MODELS) + 2)


def tsne_embedding(features: torch.Tensor, seed: int) -> torch.Tensor:
    """The t-SNE embedding (n, 2) of features (n, D); deterministic for a seed. It is 0 for equal
    features, such as those of dead units.
    """
    from sklearn.manifold import TSNE

    if float((features - features[0]).abs().max()) < LEAST_SPREAD:
        return torch.zeros(len(features), 2)
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    with threadpool_limits(1):
        places = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(
            features.numpy()
        )
    return torch.from_numpy(places)


STEPS = 48
"""The number of grid points along each axis of the plane."""
PLANE_DIGITS = 3
MARGIN = 0.05
"""The margin of the plane around the examples, as a share of their extent."""
FLAT = 0.2
"""The smallest extent for the margin. The extent along an axis may be 0, for example for dead
units.
"""


@register("measure", "boundaries")
class Boundaries(Measure):
    """Features of the first querying client on their two principal axes, and the predicted class at
    each point of this plane.

    It is computed after each stage in which the client trains, for at most 200 test examples of its
    queried and local classes.
    Source: QKT, section 3.2, figure 2.
    Reading: the background is the head's prediction for the features that the inverse of the
    projection returns; each model has its own axes.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test", "features", "queries", "client_data"})

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """The client, its classes, the coordinates x, y and labels (n,) of examples, and the
        predicted classes (48, 48) of the plane.

        ``x_range``, ``y_range``: the ends of the plane. Row i, column j of ``plane`` is the j-th
        grid point along x and the i-th along y. ``accuracy``: (C,) on the whole test set, None for
        a class without test examples.
        """
        queries = queries_of(context.world)
        if not queries:
            return None
        client = min(queries)
        params = result.local_models.get(client)
        spec = context.world.model(client)
        if params is None or Need.FEATURES not in contract.capabilities(spec):
            return None
        query = queries[client]
        counts = context.sites.view(client, result.stage).counts
        local_classes = [c for c, n in enumerate(counts.tolist()) if n and c not in query]
        images = _images_of_classes(context.test, [*query, *local_classes])
        if len(images) < 2:
            return None

        features = CompleteModelPasses(spec, context.inputs).features(params, images).cpu()
        plane = principal_plane(features)
        network = contract.module(spec, "frozen").eval()
        with torch.no_grad():
            logits = contract.head(network, on_cpu(params), plane.points)
        return {
            "client": client,
            "query": list(query),
            "own": local_classes,
            "labels": images.labels.tolist(),
            "x": rounded_lists(plane.places[:, 0], PLANE_DIGITS),
            "y": rounded_lists(plane.places[:, 1], PLANE_DIGITS),
            "x_range": rounded_lists(plane.ends[0], PLANE_DIGITS),
            "y_range": rounded_lists(plane.ends[1], PLANE_DIGITS),
            "plane": logits.argmax(1).reshape(STEPS, STEPS).tolist(),
            "accuracy": none_for_nan(context.accuracy_by_class(params, context.test, client)),
        }

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """A pass over the test set for one client, and one over at most 200 examples."""
        return test + min(test, FIGURE_EXAMPLES)


def _images_of_classes(test: Examples, classes: Sequence[int]) -> Examples:
    """At most 200 test examples of some classes, at equal distances."""
    chosen = torch.isin(test.labels.cpu(), torch.tensor(classes))
    images = test.take(chosen.nonzero().flatten().to(test.labels.device))
    if len(images) <= FIGURE_EXAMPLES:
        return images
    return images.take(torch.arange(FIGURE_EXAMPLES) * len(images) // FIGURE_EXAMPLES)


@dataclass(frozen=True)
class Plane:
    """The plane of the two principal axes of features.

    ``places``: the coordinates (n, 2) of the features; ``ends``: the ends (2, 2) of the plane, by
    axis; ``points``: the features (48 * 48, D) of the grid points.
    """

    places: Tensor
    ends: Tensor
    points: Tensor


def principal_plane(features: Tensor) -> Plane:
    """The principal plane of features (n, D), with a margin around them."""
    from sklearn.decomposition import PCA

    with threadpool_limits(1):
        axes = PCA(2, svd_solver="full")
        places = torch.from_numpy(axes.fit_transform(features.double().numpy()))
        low = places.min(0).values
        high = places.max(0).values
        margin = MARGIN * (high - low).clamp(min=FLAT)
        ends = torch.stack([low - margin, high + margin], dim=1)  # (axis, end)
        x, y = (torch.linspace(float(a), float(b), STEPS, dtype=torch.float64) for a, b in ends)
        grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).reshape(-1, 2)
        points = torch.from_numpy(axes.inverse_transform(grid.numpy()))
    return Plane(places, ends, points.to(features.dtype))
