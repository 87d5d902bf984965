"""Measures that show where classes lie in the features of models: ``sphere`` as directions on a
circle, ``tsne`` as points on a plane, and ``boundaries`` with the lines between classes.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.extensions import StageResult
from fedstill.core.records import Tensors
from fedstill.core.registry import register
from fedstill.engines.passes import correct_by_class
from fedstill.measures.base import Measure, Numbers, rounded_lists
from fedstill.measures.context import EvaluationContext, WholePasses, comparable, named_models
from fedstill.methods.fit import queries_of
from fedstill.metrics import class_accuracy
from fedstill.models import contract

# The number of local models whose spheres are measured.
SPHERES = 3

BINS = 72


@register("measure", "sphere")
class Sphere(Measure):
    """Directions of test examples' features by class, for the received, three local and the new
    global model.

    Needs features of two numbers, as ``sphere_cnn`` has them. At the end of the run; counts in 72
    steps of 5 degrees.
    Source: FedNTD, appendix N, figure 18.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "features", "plane"}
    )
    only_last: ClassVar[bool] = True

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
        """(models, C, bins) counts of test examples; bin 0 begins at -180 degrees."""
        if not comparable(seen, context):
            return None
        labels, passes = context.test.labels.cpu(), context.passes()
        counts = {
            name: directions(passes.features(p, context.test).cpu(), labels, context.world.classes)
            for name, p in named_models(seen, context, SPHERES)
        }
        return {"models": list(counts), "counts": [v.tolist() for v in counts.values()]}

    def examples(self, test: int, clients: int, own: int) -> int:
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
    """One joint t-SNE of 200 test examples' features under the received, at most ten local, and the
    new global model.

    At the end of the run; scikit-learn's, seeded, on one thread: its result depends on their
    number. The features are kept beside the journal, so that runs which started from one model can
    be embedded together.
    Source: FedNTD, appendix O, figures 19 to 21.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "features"}
    )
    only_last: ClassVar[bool] = True

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
        """Labels (n,) of the images, names of the models, and coordinates (models, n) of each image
        under each.
        """
        if not comparable(seen, context):
            return None
        images, passes = context.some(IMAGES), context.passes()
        models = dict(named_models(seen, context, MODELS))
        each = {name: passes.features(p, images).cpu() for name, p in models.items()}
        features = torch.cat(list(each.values()))
        places = embedded(features, int(context.draw("tsne").initial_seed() % 2**32))
        x, y = places.reshape(len(models), len(images), 2).unbind(2)
        return {
            "models": list(models),
            "labels": images.labels.tolist(),
            "x": rounded_lists(x, TSNE_DIGITS),
            "y": rounded_lists(y, TSNE_DIGITS),
            "features": context.keep(f"tsne-round{seen.stage.round}-stage{seen.stage.index}", each),
        }

    def examples(self, test: int, clients: int, own: int) -> int:
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
    """Features of the first client that asked on their two principal axes, and which class each
    place has there.

    After each stage in which it trained: images of the classes that it asked for or has, at most
    200 of the test set.
    Source: QKT, section 3.2, figure 2.
    Reading: the background is what the head says of the features that the inverse of the projection
    gives; each model has axes of its own.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test", "features", "queries", "client_data"})

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
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
        params, spec = seen.local_models.get(client), context.world.model(client)
        if params is None or Need.FEATURES not in contract.capabilities(spec):
            return None
        query = queries[client]
        counts = context.sites.view(client, seen.stage).counts
        own = [c for c, n in enumerate(counts.tolist()) if n and c not in query]
        wanted = torch.isin(context.test.labels.cpu(), torch.tensor([*query, *own]))
        images = context.test.take(wanted.nonzero().flatten().to(context.test.labels.device))
        images = (
            images
            if len(images) <= IMAGES
            else images.take(torch.arange(IMAGES) * len(images) // IMAGES)
        )
        if len(images) < 2:
            return None
        features = WholePasses(spec, context.inputs).features(params, images).cpu()
        places, ends, plane = _plane(features)
        with torch.no_grad():
            classes = contract.head(
                contract.module(spec, "frozen").eval(), _cpu(params), plane
            ).argmax(1)
        totals = torch.bincount(context.test.labels.cpu(), minlength=context.world.classes)
        right = correct_by_class(
            context.predictor(params, client), context.test, context.inputs, context.world.classes
        )
        each = class_accuracy(right, totals).tolist()
        return {
            "client": client,
            "query": list(query),
            "own": own,
            "labels": images.labels.tolist(),
            **{
                name: rounded_lists(places[:, i], PLANE_DIGITS) for i, name in enumerate(("x", "y"))
            },
            **{
                f"{name}_range": rounded_lists(ends[i], PLANE_DIGITS)
                for i, name in enumerate(("x", "y"))
            },
            "plane": classes.reshape(STEPS, STEPS).tolist(),
            "accuracy": [None if a != a else a for a in each],
        }

    def examples(self, test: int, clients: int, own: int) -> int:
        """The test set once at one client, and a few hundred images more."""
        return test + min(test, IMAGES)


def _cpu(params: Tensors) -> dict[str, Tensor]:
    return {k: v.cpu() for k, v in params.items()}


def _plane(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Places (n, 2) of features (n, D), ends (2, 2) of the plane, and the features (48 * 48, D) of
    its points.
    """
    from sklearn.decomposition import PCA

    with threadpool_limits(1):
        axes = PCA(2, svd_solver="full")
        places = torch.from_numpy(axes.fit_transform(features.double().numpy()))
        low, high = places.min(0).values, places.max(0).values
        context = MARGIN * (high - low).clamp(min=FLAT)
        ends = torch.stack([low - context, high + context], dim=1)  # (axis, end)
        x, y = (torch.linspace(float(a), float(b), STEPS, dtype=torch.float64) for a, b in ends)
        points = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).reshape(-1, 2)
        back = torch.from_numpy(axes.inverse_transform(points.numpy()))
    return places, ends, back.to(features.dtype)
