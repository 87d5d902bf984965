"""Arithmetic on trees: named tensors, {name: tensor}.

Functions compute entry by entry, return new tensors, and change nothing in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedstill.core.payload import Tensors


def add(a: Tensors, b: Tensors) -> dict[str, Tensor]:
    """a + b."""
    return {k: a[k] + b[k] for k in a}


def sub(a: Tensors, b: Tensors) -> dict[str, Tensor]:
    """a - b."""
    return {k: a[k] - b[k] for k in a}


def scale(a: Tensors, factor: float) -> dict[str, Tensor]:
    """factor * a."""
    return {k: a[k] * factor for k in a}


def zeros_like(a: Tensors) -> dict[str, Tensor]:
    """Zeros of the same shapes and types."""
    return {k: torch.zeros_like(v) for k, v in a.items()}


def floats(a: Tensors) -> dict[str, Tensor]:
    """The entries of real numbers, without counters and other integers."""
    return {k: v for k, v in a.items() if v.is_floating_point()}


def dtype_of(a: Tensors) -> torch.dtype:
    """The type of the real entries; float32 if there are none."""
    return next((v.dtype for v in a.values() if v.is_floating_point()), torch.float32)


def only(a: Tensors, names: Iterable[str]) -> dict[str, Tensor]:
    """The entries of these names."""
    return {k: a[k] for k in names}


def clone(a: Tensors) -> dict[str, Tensor]:
    """Copies that share no memory, each contiguous and without gradient."""
    return {k: v.detach().clone(memory_format=torch.contiguous_format) for k, v in a.items()}


def on_cpu(a: Tensors) -> dict[str, Tensor]:
    """The same entries on the CPU. Entries that are there already are not copied."""
    return {k: v.cpu() for k, v in a.items()}


def norm(a: Tensors) -> float:
    """The Euclidean norm over all real entries, computed in float32 or more.

    It is NaN or infinite if a number is, and infinite if the square of a number overflows.

    >>> norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    5.0
    """
    real = [v.detach() if v.element_size() > 2 else v.detach().float() for v in floats(a).values()]
    if not real:
        return 0.0
    norms = torch.stack(torch._foreach_norm(real))
    return float(torch.linalg.vector_norm(norms, dtype=torch.float64))


def mean(trees: Sequence[Tensors], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean of trees, summed in their order. Integer entries are the first tree's.

    Raises ValueError unless there is one weight for each tree, and their sum is positive.
    """
    total = sum(weights)
    if len(weights) != len(trees) or not total > 0:
        raise ValueError(
            f"{len(trees)} trees need as many weights with a positive sum, not {list(weights)}"
        )
    names = list(floats(trees[0]))
    shares = [weight / total for weight in weights]
    entries = {k: v.clone() for k, v in trees[0].items() if k not in names}
    if names:
        sums = torch._foreach_mul([trees[0][k] for k in names], shares[0])
        for tree, share in zip(trees[1:], shares[1:], strict=True):
            torch._foreach_add_(sums, torch._foreach_mul([tree[k] for k in names], share))
        entries |= zip(names, sums, strict=True)
    return {k: entries[k] for k in trees[0]}


def same_bits(a: Tensors, b: Tensors) -> bool:
    """Whether two trees have the same names and equal entries."""
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


def stack(trees: Sequence[Tensors]) -> dict[str, Tensor]:
    """K trees of equal shapes as one, with a leading axis of length K."""
    return {k: torch.stack([t[k] for t in trees]) for k in trees[0]}
