"""Runs in float64: what two ways of computing give is then the same to nine digits, whoever's
kernels summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedstill.core.records import SERVER
from fedstill.data.inputs import Inputs
from fedstill.engines.passes import ModelPasses
from fedstill.running.preparation import Prepared

NEAR = 1e-9
"""How far numbers of order 1 may lie apart that were computed in float64 in two ways."""


def widened(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters in float64; counters stay integers."""
    return {k: v.double() if v.is_floating_point() else v for k, v in params.items()}


class Wide(Inputs):
    """Inputs in float64; what augmentation draws and does stays as it is."""

    def plain(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8:  # inputs already: numbers, or token ids
            return images.double() if images.is_floating_point() else images
        shift, scale = (
            torch.tensor(v, dtype=torch.float64, device=images.device).view(-1, 1, 1)
            for v in (self.mean, self.std)
        )
        return (images.double() / 255 - shift) / scale

    def trained_on(self, images: Tensor, generator: torch.Generator) -> Tensor:
        x = super().trained_on(images, generator)
        return x.double() if x.is_floating_point() else x


def in_double(ready: Prepared) -> Prepared:
    """The same run with inputs and initial parameters in float64."""
    world, inputs = (
        ready.world,
        Wide(ready.sites.inputs.mean, ready.sites.inputs.std, ready.sites.inputs.steps),
    )
    for client in (SERVER, *range(world.clients)):
        world._initial[world.model(client)] = widened(world.initial(client))
    sites = replace(ready.sites, inputs=inputs, passes=lambda spec: ModelPasses(spec, inputs))
    return replace(ready, sites=sites)
