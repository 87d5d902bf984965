"""Runs in float64, in which two ways of computing a number agree to nine digits on every
processor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedstill.core.records import SERVER
from fedstill.data.inputs import Inputs
from fedstill.engines.passes import ModelPasses
from fedstill.running.preparation import Prepared

NEAR = 1e-9
"""The largest difference between numbers of order 1 that were computed in float64 in two ways."""


def as_double(tensor: Tensor) -> Tensor:
    """A tensor in float64; integers do not change."""
    if tensor.is_floating_point():
        return tensor.double()
    return tensor


def widened(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters in float64; counters stay integers."""
    return {name: as_double(value) for name, value in params.items()}


class Wide(Inputs):
    """Inputs in float64. Augmentation draws the same numbers as for other inputs."""

    def plain(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8:  # no pixels, but numbers or token ids
            return as_double(images)
        shift = self._by_channel(self.mean, images.device)
        scale = self._by_channel(self.std, images.device)
        return (images.double() / 255 - shift) / scale

    def trained_on(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return as_double(super().trained_on(images, generator))

    @staticmethod
    def _by_channel(values: Sequence[float], device: torch.device) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device).view(-1, 1, 1)


def in_double(ready: Prepared) -> Prepared:
    """The same run with inputs and initial parameters in float64."""
    world = ready.world
    for client in (SERVER, *range(world.clients)):
        world._initial[world.model(client)] = widened(world.initial(client))

    original = ready.sites.inputs
    inputs = Wide(original.mean, original.std, original.steps)
    sites = replace(ready.sites, inputs=inputs, passes=lambda spec: ModelPasses(spec, inputs))
    return replace(ready, sites=sites)
