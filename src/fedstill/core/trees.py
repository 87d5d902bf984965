"""Arithmetic on named tensors, {name: tensor}: entry by entry, new tensors out, nothing changed in
place.
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
    """The entries that hold real numbers; counters and other integers are left out."""
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
    """The same entries in the CPU's memory; those that are there already are not copied."""
    return {k: v.cpu() for k, v in a.items()}


def norm(a: Tensors) -> float:
    """The Euclidean norm over all real entries, each entry's at least in float32; NaN or infinite
    if an entry is.

    It is infinite, too, where an entry's squares are beyond its type.

    >>> norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    5.0
    """
    real = [v.detach() if v.element_size() > 2 else v.detach().float() for v in floats(a).values()]
    if not real:
        return 0.0
    return float(
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(real)), dtype=torch.float64)
    )


def mean(trees: Sequence[Tensors], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean, summed in the order given; an integer entry is the first tree's.

    Raises ValueError if the weights are not as many as the trees or sum to 0.
    """
    total = sum(weights)
    if len(weights) != len(trees) or not total > 0:
        raise ValueError(
            f"{len(trees)} trees need as many weights with a positive sum, not {list(weights)}"
        )
    names = list(floats(trees[0]))
    shares = [weight / total for weight in weights]
    out = {k: v.clone() for k, v in trees[0].items() if k not in names}
    if names:
        sums = torch._foreach_mul([trees[0][k] for k in names], shares[0])
        for tree, share in zip(trees[1:], shares[1:], strict=True):
            torch._foreach_add_(sums, torch._foreach_mul([tree[k] for k in names], share))
        out |= zip(names, sums, strict=True)
    return {k: out[k] for k in trees[0]}


def same_bits(a: Tensors, b: Tensors) -> bool:
    """Whether two trees have the same names and equal entries."""
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


def stack(trees: Sequence[Tensors]) -> dict[str, Tensor]:
    """K trees of equal shapes as one, with a leading axis of length K."""
    return {k: torch.stack([t[k] for t in trees]) for k in trees[0]}
