"""Measures that show where classes lie in the features of models: ``sphere`` as directions on a
circle, ``tsne`` as points on a plane, and ``boundaries`` with the lines between classes.
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
    EvaluationContext,
    Measure,
    Numbers,
    WholePasses,
    comparable,
    named_models,
    none_for_nan,
    rounded_lists,
)
from fedstill.methods.fit import queries_of
from fedstill.models import contract

# The number of local models whose spheres are measured.
SPHERES = 3

BINS = 72


@register("measure", "sphere")
class Sphere(Measure):
    """Directions of test features by class, for the received model, three local models and the new
    global model.

    Needs features of two numbers, as ``sphere_cnn`` has them. At the end of the run; counts in 72
    steps of 5 degrees.
    Source: FedNTD, appendix N, figure 18.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "features", "plane"}
    )
    only_last: ClassVar[bool] = True

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """(models, C, bins) counts of test examples; bin 0 begins at -180 degrees."""
        if not comparable(result, context):
            return None
        labels = context.test.labels.cpu()
        passes = context.passes()
        counts = {}
        for name, params in named_models(result, context, SPHERES):
            features = passes.features(params, context.test).cpu()
            counts[name] = directions(features, labels, context.world.classes)
        return {"models": list(counts), "counts": [v.tolist() for v in counts.values()]}

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """The test set at each model."""
        return test * (min(clients, SPHERES) + 2)


def directions(features: Tensor, labels: Tensor, classes: int, bins: int = BINS) -> Tensor:
    """How many features (n, 2) of each class point into each of ``bins`` equal parts of the circle:
    (C, bins) int64.

    >>> directions(torch.tensor([[0.0, -1.0], [0.1, 1.0]]), torch.tensor([0, 1]), 2, bins=4)
    tensor([[0, 1, 0, 0],
            [0, 0, 1, 0]])
    """
    angle = torch.atan2(features[:, 1].double(), features[:, 0].double())
    bin_ = ((angle + math.pi) / (2 * math.pi) * bins).floor().long().clamp(0, bins - 1)
    return torch.bincount(labels * bins + bin_, minlength=classes * bins).reshape(classes, bins)


IMAGES = 200
"""Test images that are shown at most."""
MODELS = 10
"""Local models that are shown at most."""
TSNE_DIGITS = 1
PERPLEXITY = 30.0


@register("measure", "tsne")
class JointTSNE(Measure):
    """One joint t-SNE of the features of 200 test examples under the received, the new and at most
    ten local models.

    At the end of the run; scikit-learn's, seeded, on one thread: its result depends on their
    number. The features are kept beside the journal, so that runs which started from one model can
    be embedded together.
    Source: FedNTD, appendix O, figures 19 to 21.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "features"}
    )
    only_last: ClassVar[bool] = True

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """Labels (n,) of the images, names of the models, and coordinates (models, n) of each image
        under each.
        """
        if not comparable(result, context):
            return None
        stage = result.stage
        images = context.some(IMAGES)
        passes = context.passes()
        models = dict(named_models(result, context, MODELS))
        by_model = {name: passes.features(p, images).cpu() for name, p in models.items()}
        features = torch.cat(list(by_model.values()))
        places = embedded(features, int(context.draw("tsne").initial_seed() % 2**32))
        x, y = places.reshape(len(models), len(images), 2).unbind(2)
        return {
            "models": list(models),
            "labels": images.labels.tolist(),
            "x": rounded_lists(x, TSNE_DIGITS),
            "y": rounded_lists(y, TSNE_DIGITS),
            "features": context.keep(f"tsne-round{stage.round}-stage{stage.index}", by_model),
        }

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """A few hundred at each model; the embedding itself takes longer than that."""
        return min(test, IMAGES) * (min(clients, MODELS) + 2)


def embedded(features: torch.Tensor, seed: int) -> torch.Tensor:
    """(n, D) features as (n, 2) places, near ones near each other; the same for equal seeds."""
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    with threadpool_limits(1):
        places = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(
            features.numpy()
        )
    return torch.from_numpy(places)


STEPS = 48
"""Places along each axis of the plane."""
PLANE_DIGITS = 3
MARGIN = 0.05
"""How far the plane reaches beyond the images, as a share of their extent."""
FLAT = 0.2
"""The least extent that counts there: along an axis all features may be alike, as where units have
died.
"""


@register("measure", "boundaries")
class Boundaries(Measure):
    """Features of the first client that queries, on two principal axes, and the predicted class at
    each point of this plane.

    After each stage in which it trained: images of the classes that it asked for or has, at most
    200 of the test set.
    Source: QKT, section 3.2, figure 2.
    Reading: the background is what the head says of the features that the inverse of the projection
    gives; each model has axes of its own.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test", "features", "queries", "client_data"})

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """The client, its classes, places x, y and labels (n,) of images, and the classes (48, 48)
        of the plane.

        ``x_range``, ``y_range``: the plane's ends; row i, column j of ``plane`` is the j-th place
        along x and the i-th along y. ``accuracy``: (C,) on the whole test set, None for a class
        without images.
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

        features = WholePasses(spec, context.inputs).features(params, images).cpu()
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
        """The test set once at one client, and a few hundred images more."""
        return test + min(test, IMAGES)


def _images_of_classes(test: Examples, classes: Sequence[int]) -> Examples:
    """The test images of some classes; of more than 200, as many at equal distances."""
    chosen = torch.isin(test.labels.cpu(), torch.tensor(classes))
    images = test.take(chosen.nonzero().flatten().to(test.labels.device))
    if len(images) <= IMAGES:
        return images
    return images.take(torch.arange(IMAGES) * len(images) // IMAGES)


@dataclass(frozen=True)
class Plane:
    """The plane of the two principal axes of features.

    ``places``: the places (n, 2) of the features; ``ends``: the plane's ends (axis, end), (2, 2);
    ``points``: the features (48 * 48, D) of the plane's grid.
    """

    places: Tensor
    ends: Tensor
    points: Tensor


def principal_plane(features: Tensor) -> Plane:
    """The plane of features (n, D), a little larger than their extent."""
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
