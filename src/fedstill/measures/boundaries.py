"""The measure ``boundaries``: where a client that asked draws the lines between classes, after each
of its stages.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.records import Tensors
from fedstill.core.registry import register
from fedstill.core.results import StageResult
from fedstill.engines.passes import correct_by_class
from fedstill.measures.base import Measure, Numbers, rounded_lists
from fedstill.measures.context import EvaluationContext, WholePasses
from fedstill.methods.fit import queries_of
from fedstill.metrics import class_accuracy
from fedstill.models import contract

IMAGES, STEPS, DIGITS = 200, 48, 3
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
            **{name: rounded_lists(places[:, i], DIGITS) for i, name in enumerate(("x", "y"))},
            **{
                f"{name}_range": rounded_lists(ends[i], DIGITS) for i, name in enumerate(("x", "y"))
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
