"""A body that is a chain of layers, cut at its levels: what there is at each, and what follows
it.
"""

from __future__ import annotations

from torch import Tensor, nn

from fedstill.models.contract import head, run_part
from fedstill.models.layer_chain import levels
from fedstill.payload import Tensors


def at_levels(m: nn.Module, params: Tensors, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What there is at each level, by its name, and the features (B, D): one pass."""
    there, cuts = {}, set(levels(m))
    for name, _ in m.get_submodule("body").named_children():
        x = run_part(m, f"body.{name}", params, x)
        if name in cuts:
            there[name] = x
    return there, x


def above(m: nn.Module, params: Tensors, level: str, x: Tensor) -> Tensor:
    """Logits (B, C) of what there is at a level."""
    names = [name for name, _ in m.get_submodule("body").named_children()]
    for name in names[names.index(level) + 1 :]:
        x = run_part(m, f"body.{name}", params, x)
    return head(m, params, x)
