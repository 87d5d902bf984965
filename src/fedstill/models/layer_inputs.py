"""What enters the layers of a network's body, and the body cut at its levels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from fedstill.core.payload import Tensors
from fedstill.models.contract import features, head, run_part
from fedstill.models.layer_chain import levels

# A body that is a chain of layers, cut at its levels: what there is at each, and what follows it.


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


# What enters the layers of a network's body: for each linear layer and convolution the sum of its
# inputs' products.
#
# A convolution is taken as a linear layer on patches: its weights (out, channels, k, k) as (out,
# channels k²), its inputs one patch for each place of its output.


def body_layers(m: nn.Module) -> dict[str, int]:
    """The weights of a body's linear layers and convolutions by name, and how many inputs d each
    has.

    Convolutions in groups, and those whose border is no frame of zeros, are left out.
    """
    return {f"{name}.weight": _inputs_of(part) for name, part in _layers(m).items()}


def beside_layers(m: nn.Module) -> list[str]:
    """The names of a body's other parameters of two or more dimensions, of embeddings for
    example.
    """
    layers = body_layers(m)
    named = ((name, value) for name, value in m.named_parameters() if name.startswith("body"))
    return [name for name, value in named if value.dim() > 1 and name not in layers]


def input_products(m: nn.Module, params: Tensors, x: Tensor) -> dict[str, Tensor]:
    """The sum of a a^T (d, d), float64 on the CPU, over all inputs a of each layer, in one pass of
    x (B, ...).
    """
    sums: dict[str, Tensor] = {}

    def noting(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            a = _columns(layer, given[0].detach()).double()
            sums[name] = sums.get(name, 0.0) + (a.T @ a).cpu()

        return note

    handles = [
        part.register_forward_pre_hook(noting(f"{name}.weight"))
        for name, part in _layers(m).items()
    ]
    try:
        with torch.no_grad():
            features(m, params, x)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _layers(m: nn.Module) -> dict[str, nn.Module]:
    return {
        name: part for name, part in m.named_modules() if name.startswith("body") and _plain(part)
    }


def _plain(part: nn.Module) -> bool:
    if isinstance(part, nn.Conv2d):
        return (
            part.groups == 1 and part.padding_mode == "zeros" and not isinstance(part.padding, str)
        )
    return isinstance(part, nn.Linear)


def _inputs_of(part: nn.Module) -> int:
    weight = part.weight
    assert isinstance(weight, Tensor)
    return weight[0].numel()


def _columns(layer: nn.Module, x: Tensor) -> Tensor:
    """Inputs (n, d) of a layer, one for each of its outputs' places."""
    if not isinstance(layer, nn.Conv2d):
        return x.reshape(-1, x.shape[-1])
    assert not isinstance(layer.padding, str)
    # (B, d, places)
    patches = unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return patches.transpose(1, 2).reshape(-1, patches.shape[1])
