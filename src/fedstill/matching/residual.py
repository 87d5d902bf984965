"""Residual networks, approximately: the channels inside the last block are matched, everything else
is averaged.

Source: none. Alballa et al. (QKT), section 4.1, has PFNM among its baselines with ResNet-18 and
does not say how; PFNM itself knows no connections that skip layers: they tie the channels of a
whole stage to each other.
Reading: the channels between the convolutions of the last block do not affect other layers. They
are matched by what comes into them and the shift of the normalisation after them (its prior mean is
a bias's), without new ones, and brought into one order. Then all is averaged by size, running
statistics too, and the head by class share. Under GroupNorm a channel may come into another group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from torch import Tensor

from fedstill import trees
from fedstill.matching.layer import Array, MatchingSettings, Places
from fedstill.matching.whole_network import (
    Layer,
    as_tensors,
    layers_of,
    match_inputs,
    mean_by_share,
)
from fedstill.models.contract import module
from fedstill.models.layer_chain import last_block
from fedstill.records import ModelSpec, Tensors


def match_residual(
    spec: ModelSpec,
    models: Sequence[Tensors],
    shares: Array,
    sizes: Sequence[float],
    setting: MatchingSettings,
    draw: np.random.Generator,
) -> dict[str, Tensor]:
    """One residual network of several of a spec: their channels in one order, averaged.

    models: J; shares: (J, C), what share of each class's examples each has seen; sizes: (J,)
    numbers of examples.
    """
    ordered = list(models)
    for (convolution, norms), (following, _) in pairwise(last_block(module(spec)) or []):
        layers = [_channels(convolution, norms, params) for params in ordered]
        matched = match_inputs(layers, replace(setting, grow=False), draw)
        ordered = [
            _in_order(p, at, convolution, norms, following)
            for p, at in zip(ordered, matched.places, strict=True)
        ]
    mean = trees.mean(ordered, list(sizes) if sum(sizes) > 0 else [1.0] * len(ordered))
    head = mean_by_share([layers_of(["head"], params)[0] for params in ordered], shares)
    return {**mean, **as_tensors("head", head, mean)}


def _channels(convolution: str, norms: Sequence[str], params: Tensors) -> Layer:
    weight = params[f"{convolution}.weight"].double().numpy()
    shifts = [params[f"{n}.bias"].double().numpy() for n in norms if f"{n}.bias" in params]
    return Layer(
        weight.reshape(*weight.shape[:2], -1), shifts[0] if shifts else np.zeros(len(weight))
    )


def _in_order(
    params: Tensors, places: Places, convolution: str, norms: Sequence[str], following: str
) -> dict[str, Tensor]:
    """A model whose channels after a convolution stand at their places; what it computes is the
    same.
    """
    order = np.argsort(places)
    own = {
        k
        for n in (convolution, *norms)
        for k in params
        if k.startswith(f"{n}.") and params[k].dim()
    }
    moved = {k: params[k][order] for k in own}
    inputs = {f"{following}.weight": params[f"{following}.weight"][:, order]}
    return {**params, **moved, **inputs}
