"""The gradient of an objective, and where it is taken: at the parameters in training, or where a
method looks ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedstill.engines.lone import LoneClient
from fedstill.engines.stack import Stack
from fedstill.records import Tensors
from fedstill.work import ClientWork


def backward(terms: Mapping[str, Tensor], leaves: Tensors) -> bool:
    """Give leaves the gradient of the sum of all terms; one on which no term depends has none.

    False if no term depends on anything that is trained.
    """
    parts = [v if v.dtype == torch.float64 else v.float() for v in terms.values()]
    for leaf in leaves.values():
        leaf.grad = None
    if not parts:
        return False
    loss = (parts[0] if len(parts) == 1 else torch.stack(parts)).sum()
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.requires_grad


def gradients(leaves: Tensors) -> dict[str, Tensor]:
    """Copies of the leaves' gradients; zeros where one has none."""
    return {
        k: torch.zeros_like(v) if v.grad is None else v.grad.detach().clone()
        for k, v in leaves.items()
    }


def looked_ahead(
    work: ClientWork,
    clients: LoneClient | Stack,
    params: Tensors,
    leaves: Tensors,
    first: Callable[..., dict[str, Tensor]] | None,
    of: tuple[Any, ...],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All parameters at the point that ``lookahead`` gives, and those of them that are trained,
    which are new leaves.

    first: the objective of the first pass over a batch, ``of``; None: there is none, and the
    gradient is zero. After a first pass the other entries are copies: a batch's statistics are
    taken up once.
    """
    rest = {k: v for k, v in params.items() if k not in leaves}
    backward({} if first is None else clients.each(first, params, *of), leaves)
    if first is not None:
        rest = {k: v.clone() for k, v in rest.items()}
    here = {k: v.detach() for k, v in leaves.items()}
    point = clients.each(lambda carry, w, g: work.lookahead(w, g, carry), here, gradients(leaves))
    there = {k: point[k].detach().to(v.dtype).requires_grad_() for k, v in leaves.items()}
    return {**params, **rest, **there}, there
