"""The loss around a model: directions in which to look, and the loss along them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fedstill.core.records import Tensors

LossOfWeights = Callable[[Tensors], Tensor]
"""The mean loss () of parameters on some fixed examples."""


def filter_normalised(
    params: Tensors, trained: Iterable[str], draw: torch.Generator
) -> dict[str, Tensor]:
    """A random direction of which each filter (each row, in a linear layer) has the norm of the
    model's own.

    params: a model's entries; trained: the names of those that move. Entries of one axis, such as
    biases, stay.

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
        own, its = (torch.linalg.vector_norm(v, dim=axes, keepdim=True) for v in (value, noise))
        out[name] = noise * own / its.clamp(min=1e-12)
    return out


def gaussian(params: Tensors, trained: Iterable[str], draw: torch.Generator) -> dict[str, Tensor]:
    """Standard normal noise in the shape of the entries that move."""
    return {
        k: torch.randn(params[k].shape, generator=draw, dtype=params[k].dtype)
        for k in sorted(trained)
    }


def moved(params: Tensors, steps: Sequence[tuple[float, Tensors]]) -> dict[str, Tensor]:
    """params + sum of size * direction; entries that no direction has stay as they are."""
    out = dict(params)
    for size, direction in steps:
        out |= {k: out[k] + size * v.to(out[k].device) for k, v in direction.items()}
    return out


def plane(
    loss: LossOfWeights, params: Tensors, a: Tensors, b: Tensors, axis: Sequence[float]
) -> list[list[float]]:
    """The loss at params + x a + y b: one row for each y of the axis, one value for each x."""
    with torch.no_grad():
        return [[float(loss(moved(params, [(x, a), (y, b)]))) for x in axis] for y in axis]


def under_noise(
    loss: LossOfWeights, params: Tensors, noises: Sequence[Tensors], scales: Sequence[float]
) -> list[float]:
    """The loss under noise of each scale, mean over the draws: (scales,).

    Source: FedNTD, figure 14.
    """
    with torch.no_grad():
        return [
            sum(float(loss(moved(params, [(s, n)]))) for n in noises) / len(noises) for s in scales
        ]


def curvature(
    loss: LossOfWeights,
    params: Tensors,
    trained: Iterable[str],
    draw: torch.Generator,
    top: int = 2,
    most: int = 30,
) -> list[tuple[float, dict[str, Tensor]]]:
    """The Hessian's eigenvalues of largest size, with their eigenvectors of norm 1, by power
    iteration.

    params: where; trained: the names of the entries to derive by. ``most`` Hessian-vector products
    each, fewer once the eigenvalue moves by less than a thousandth. Largest first in size, as the
    paper's tool (PyHessian) finds them.

    Source: Yao et al., "PyHessian" (2020); FedNTD, figure 14.
    """
    names = sorted(trained)
    leaves = {k: params[k].detach().clone().requires_grad_() for k in names}
    value = loss({**params, **leaves})
    grads = torch.autograd.grad(value, list(leaves.values()), create_graph=True, allow_unused=True)

    def product(vector: Sequence[Tensor]) -> list[Tensor]:
        linked = [
            (g, v) for g, v in zip(grads, vector, strict=True) if g is not None and g.requires_grad
        ]
        if not linked:
            return [torch.zeros_like(v) for v in vector]
        outs, weights = zip(*linked, strict=True)
        products = torch.autograd.grad(
            outs, list(leaves.values()), weights, retain_graph=True, materialize_grads=True
        )
        return list(products)

    pairs: list[tuple[float, list[Tensor]]] = []
    for _ in range(top):
        start = [
            torch.randn(v.shape, generator=draw, dtype=v.dtype).to(v.device)
            for v in leaves.values()
        ]
        vector, size = _unit(start, pairs), 0.0
        for _ in range(most):
            pushed = product(vector)
            last, size = size, _dot(pushed, vector)
            vector = _unit(pushed, pairs) or vector
            if abs(size - last) <= 1e-3 * abs(size):
                break
        pairs.append((size, vector))
    return [(size, dict(zip(names, vector, strict=True))) for size, vector in pairs]


def _unit(
    vector: Sequence[Tensor], others: Sequence[tuple[float, Sequence[Tensor]]]
) -> list[Tensor]:
    """The vector without its parts along the others, at norm 1; empty if nothing is left of it."""
    out = [v.detach().clone() for v in vector]
    for _, other in others:
        along = _dot(out, other)
        out = [v - along * o for v, o in zip(out, other, strict=True)]
    norm = _dot(out, out) ** 0.5
    return [v / norm for v in out] if norm > 1e-12 else []


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))
