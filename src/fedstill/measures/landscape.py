"""The measure ``landscape``: how the loss rises around the global model and around a local one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstill.core.records import Examples, ModelSpec, Tensors
from fedstill.core.registry import register
from fedstill.core.results import StageResult
from fedstill.engines.passes import shards
from fedstill.losses import cross_entropy
from fedstill.measures.base import Measure, Numbers
from fedstill.measures.context import EvaluationContext, whole
from fedstill.metrics import loss_surface
from fedstill.models import contract

IMAGES, STEPS, DRAWS, DIGITS = 200, 11, 3, 5
AXIS = tuple(round(-1 + 2 * i / (STEPS - 1), 3) for i in range(STEPS))
SCALES = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1)
PRODUCTS = 30


@register("measure", "landscape")
class Landscape(Measure):
    """Test loss in two planes and under noise, around the new global model and around one local
    model.

    At the end of the run, on 200 test examples, in evaluation mode. "random": two random
    directions, normalised filter by filter, from -1 to 1. "hessian": the two directions in which
    the loss is most curved, as vectors of norm 1, from -1 to 1. "noise": Gaussian, of growing
    standard deviation, on all weights, mean of three draws.
    Source: FedNTD, figure 14, after PyHessian; Li et al., "Visualizing the Loss Landscape of Neural
    Nets" (2018).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test", "global_model", "local_models"})
    only_last: ClassVar[bool] = True

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
        """For each of the two models: losses (11, 11) in each plane, and (scales,) under noise."""
        locals_ = seen.local_models
        if not locals_ or not seen.after.params:
            return None
        client = min(locals_)
        models = {
            "aggregated": (seen.after.model or context.spec, seen.after.params),
            f"client {client}": (context.world.model(client), locals_[client]),
        }
        images = context.some(IMAGES)
        around = {
            name: _around(context, spec, images, whole(spec, params))
            for name, (spec, params) in models.items()
        }
        return {"axis": list(AXIS), "scales": list(SCALES), "models": around}

    def examples(self, test: int, clients: int, own: int) -> int:
        """Two planes, noise and Hessian-vector products (six each), for two models."""
        return 2 * min(test, IMAGES) * (2 * STEPS**2 + DRAWS * len(SCALES) + 2 * 6 * PRODUCTS)


def mean_loss(
    context: EvaluationContext, images: Examples, spec: ModelSpec | None = None
) -> Callable[[Tensors], Tensor]:
    """parameters of a network, the server's if none is named -> mean cross-entropy () on images,
    derivable twice.
    """
    network = contract.module(spec or context.spec, "frozen").eval()
    parts = list(shards(images.values, context.inputs))
    device = images.values.device

    def loss(params: Tensors) -> Tensor:
        here = {k: v.to(device) for k, v in params.items()}
        logits = torch.cat([contract.forward(network, here, x) for x in parts])
        return cross_entropy(logits, images.labels).mean()

    return loss


def _around(
    context: EvaluationContext, spec: ModelSpec, images: Examples, params: Tensors
) -> dict[str, Any]:
    loss, names, draw = (
        mean_loss(context, images, spec),
        contract.trainable_names(spec),
        context.draw("landscape"),
    )
    a, b = (loss_surface.filter_normalised(params, names, draw) for _ in range(2))
    noises = [loss_surface.gaussian(params, names, draw) for _ in range(DRAWS)]
    params = {k: v.to(images.values.device) for k, v in params.items()}
    (first, x), (second, y) = loss_surface.curvature(
        loss, params, names, draw, top=2, most=PRODUCTS
    )
    return {
        "random": _digits(loss_surface.plane(loss, params, a, b, AXIS)),
        "hessian": _digits(loss_surface.plane(loss, params, x, y, AXIS)),
        "eigenvalues": [round(first, DIGITS), round(second, DIGITS)],
        "noise": _digits([loss_surface.under_noise(loss, params, noises, SCALES)])[0],
    }


def _digits(rows: list[list[float]]) -> list[list[float]]:
    return [[round(v, DIGITS) for v in row] for row in rows]
