"""The measure ``landscape``: the loss around the global model and around a local model.

The first half of the module has the mathematics: directions in weight space, and the loss along
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstill.core.extensions import StageResult
from fedstill.core.records import Examples, ModelSpec, Tensors
from fedstill.core.registry import register
from fedstill.engines.passes import shards
from fedstill.losses import cross_entropy
from fedstill.measures.base import EvaluationContext, Measure, Numbers, checked_complete
from fedstill.models import contract

LossOfWeights = Callable[[Tensors], Tensor]
"""A function from parameters to their mean loss () on fixed examples."""


def filter_normalised(
    params: Tensors, trained: Iterable[str], draw: torch.Generator
) -> dict[str, Tensor]:
    """A random direction whose filters (rows in linear layers) have the same norms as the model's
    filters.

    params: the entries of a model; trained: the names of the entries in the direction. Entries with
    fewer than two axes, such as biases, are 0.

    Source: Li et al., "Visualizing the Loss Landscape of Neural Nets" (2018), sec. 4.
    """
    out = {}
    for name in sorted(trained):
        value = params[name].detach().cpu()
        noise = torch.randn(value.shape, generator=draw, dtype=value.dtype)
        if value.dim() < 2:
            out[name] = torch.zeros_like(value)
            continue
        axes = tuple(range(1, value.dim()))
        norm = torch.linalg.vector_norm(value, dim=axes, keepdim=True)
        noise_norm = torch.linalg.vector_norm(noise, dim=axes, keepdim=True)
        out[name] = noise * norm / noise_norm.clamp(min=1e-12)
    return out


def gaussian(params: Tensors, trained: Iterable[str], draw: torch.Generator) -> dict[str, Tensor]:
    """Standard normal noise with the shapes of the trained entries."""
    return {
        k: torch.randn(params[k].shape, generator=draw, dtype=params[k].dtype)
        for k in sorted(trained)
    }


def moved(params: Tensors, steps: Sequence[tuple[float, Tensors]]) -> dict[str, Tensor]:
    """params + the sum of size * direction; entries without a direction do not change."""
    out = dict(params)
    for size, direction in steps:
        out |= {k: out[k] + size * v.to(out[k].device) for k, v in direction.items()}
    return out


def plane(
    loss: LossOfWeights, params: Tensors, a: Tensors, b: Tensors, axis: Sequence[float]
) -> list[list[float]]:
    """The loss at params + x a + y b: a row for each y of the axis, with a value for each x."""
    with torch.no_grad():
        return [[float(loss(moved(params, [(x, a), (y, b)]))) for x in axis] for y in axis]


def under_noise(
    loss: LossOfWeights, params: Tensors, noises: Sequence[Tensors], scales: Sequence[float]
) -> list[float]:
    """The mean loss over noise samples, for each scale of the noise: (scales,).

    Source: FedNTD, figure 14.
    """
    means = []
    with torch.no_grad():
        for scale in scales:
            losses = [float(loss(moved(params, [(scale, noise)]))) for noise in noises]
            means.append(sum(losses) / len(noises))
    return means


def curvature(
    loss: LossOfWeights,
    params: Tensors,
    trained: Iterable[str],
    draw: torch.Generator,
    *,
    top: int = 2,
    most: int = 30,
) -> list[tuple[float, dict[str, Tensor]]]:
    """The eigenvalues of the Hessian with the largest absolute values, and their unit eigenvectors,
    by power iteration.

    params: the point; trained: the names of the entries of the Hessian; top: the number of
    eigenvalues. Each takes at most ``most`` Hessian-vector products; the iteration stops when the
    eigenvalue changes by less than a thousandth. The order is that of the paper's tool (PyHessian),
    largest absolute value first.

    Source: Yao et al., "PyHessian" (2020); FedNTD, figure 14.
    """
    names = sorted(trained)
    leaves = {k: params[k].detach().clone().requires_grad_() for k in names}
    value = loss({**params, **leaves})
    grads = torch.autograd.grad(value, list(leaves.values()), create_graph=True, allow_unused=True)

    def product(vector: Sequence[Tensor]) -> list[Tensor]:
        return _hessian_product(grads, list(leaves.values()), vector)

    pairs: list[_Eigenpair] = []
    for _ in range(top):
        start = [
            torch.randn(v.shape, generator=draw, dtype=v.dtype).to(v.device)
            for v in leaves.values()
        ]
        pairs.append(_dominant_eigenpair(product, start, pairs, most))
    return [(pair.value, dict(zip(names, pair.vector, strict=True))) for pair in pairs]


@dataclass(frozen=True, eq=False)
class _Eigenpair:
    """An eigenvalue of the Hessian and its unit eigenvector."""

    value: float
    vector: list[Tensor]


def _hessian_product(
    grads: Sequence[Tensor | None], leaves: Sequence[Tensor], vector: Sequence[Tensor]
) -> list[Tensor]:
    """The product of the Hessian and a vector, from the gradients with respect to the leaves."""
    linked = [
        (g, v) for g, v in zip(grads, vector, strict=True) if g is not None and g.requires_grad
    ]
    if not linked:
        return [torch.zeros_like(v) for v in vector]
    outs, weights = zip(*linked, strict=True)
    products = torch.autograd.grad(outs, leaves, weights, retain_graph=True, materialize_grads=True)
    return list(products)


def _dominant_eigenpair(
    product: Callable[[Sequence[Tensor]], list[Tensor]],
    start: Sequence[Tensor],
    pairs: Sequence[_Eigenpair],
    most: int,
) -> _Eigenpair:
    """The eigenvalue with the largest absolute value besides those of known pairs, by at most
    ``most`` steps of power iteration.
    """
    vector = _unit(start, pairs)
    eigenvalue = 0.0
    for _ in range(most):
        image = product(vector)
        previous = eigenvalue
        eigenvalue = _dot(image, vector)
        vector = _unit(image, pairs) or vector
        if abs(eigenvalue - previous) <= 1e-3 * abs(eigenvalue):
            break
    return _Eigenpair(eigenvalue, vector)


def _unit(vector: Sequence[Tensor], pairs: Sequence[_Eigenpair]) -> list[Tensor]:
    """The component of a vector orthogonal to known eigenvectors, normalised; empty if it is 0."""
    remainder = [v.detach().clone() for v in vector]
    for pair in pairs:
        along = _dot(remainder, pair.vector)
        remainder = [v - along * e for v, e in zip(remainder, pair.vector, strict=True)]
    norm = _dot(remainder, remainder) ** 0.5
    if norm <= 1e-12:
        return []
    return [v / norm for v in remainder]


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


IMAGES = 200
"""The number of test examples for the loss."""

STEPS = 11
AXIS = tuple(round(-1 + 2 * i / (STEPS - 1), 3) for i in range(STEPS))
"""The coordinates along each direction of a plane."""

SCALES = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1)
"""The standard deviations of the noise."""

DRAWS = 3
"""The number of noise samples."""

PRODUCTS = 30
"""The maximum number of Hessian-vector products for an eigenvalue."""

DIGITS = 5


@register("measure", "landscape")
class Landscape(Measure):
    """Test loss in two planes and under noise on the weights, around the aggregated global model
    and one local model.

    It is computed at the end of the run on 200 test examples, in evaluation mode. "random": the
    plane of two random directions with filter normalisation, from -1 to 1. "hessian": the plane of
    the two unit eigenvectors with the largest curvature, from -1 to 1. "noise": Gaussian noise of
    increasing standard deviation on all weights, mean of three samples.
    Source: FedNTD, figure 14, after PyHessian; Li et al., "Visualizing the Loss Landscape of Neural
    Nets" (2018).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test", "global_model", "local_models"})
    only_last: ClassVar[bool] = True

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """For both models, the losses (11, 11) in each plane and (scales,) under noise."""
        locals_ = result.local_models
        if not locals_ or not result.after.params:
            return None
        client = min(locals_)
        models = {
            "aggregated": (result.after.model or context.spec, result.after.params),
            f"client {client}": (context.world.model(client), locals_[client]),
        }
        images = context.some(IMAGES)
        around = {
            name: _around(context, spec, images, checked_complete(spec, params))
            for name, (spec, params) in models.items()
        }
        return {"axis": list(AXIS), "scales": list(SCALES), "models": around}

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """Two planes, noise and Hessian-vector products (six each), for two models."""
        return 2 * min(test, IMAGES) * (2 * STEPS**2 + DRAWS * len(SCALES) + 2 * 6 * PRODUCTS)


def mean_loss(
    context: EvaluationContext, images: Examples, spec: ModelSpec | None = None
) -> Callable[[Tensors], Tensor]:
    """A function from a network's parameters to the mean cross-entropy () on images. It can be
    differentiated twice. The default network is the server's.
    """
    network = contract.module(spec or context.spec, "frozen").eval()
    parts = list(shards(images.values, context.inputs))
    device = images.values.device

    def loss(params: Tensors) -> Tensor:
        on_device = {k: v.to(device) for k, v in params.items()}
        logits = torch.cat([contract.forward(network, on_device, x) for x in parts])
        return cross_entropy(logits, images.labels).mean()

    return loss


def _around(
    context: EvaluationContext, spec: ModelSpec, images: Examples, params: Tensors
) -> dict[str, Any]:
    """The measure's numbers for one model."""
    loss = mean_loss(context, images, spec)
    names = contract.trainable_names(spec)
    draw = context.draw("landscape")
    a, b = (filter_normalised(params, names, draw) for _ in range(2))
    noises = [gaussian(params, names, draw) for _ in range(DRAWS)]
    params = {k: v.to(images.values.device) for k, v in params.items()}
    (first, x), (second, y) = curvature(loss, params, names, draw, top=2, most=PRODUCTS)
    return {
        "random": _digits(plane(loss, params, a, b, AXIS)),
        "hessian": _digits(plane(loss, params, x, y, AXIS)),
        "eigenvalues": [round(first, DIGITS), round(second, DIGITS)],
        "noise": _digits([under_noise(loss, params, noises, SCALES)])[0],
    }


def _digits(rows: list[list[float]]) -> list[list[float]]:
    return [[round(v, DIGITS) for v in row] for row in rows]
