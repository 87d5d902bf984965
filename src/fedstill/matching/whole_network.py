"""Whole networks by PFNM: layer after layer is matched, and several networks become one.

Source: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (2019),
section 3, and its code (fully connected networks, from the top down); Wang et al., "Federated
Learning with Matched Averaging" (2020), section 3, and its code (convolutions, from the bottom up).
Reading: a unit that a network lacks counts as weights of 0 in the layer above or below, as sure as
any, as in the code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedstill.matching.layer import Array, Matched, MatchingSettings, Places, match
from fedstill.models.contract import module
from fedstill.models.layer_chain import plain_chain
from fedstill.records import ModelSpec, Tensors

BIAS_MEAN = 0.1
"""The prior mean of a bias; that of a weight is 0."""


@dataclass(frozen=True)
class Layer:
    """A layer: weight (units, inputs, places), where an input is a unit of the layer before or a
    channel; bias.
    """

    weight: Array
    bias: Array


def match_chains(
    spec: ModelSpec,
    models: Sequence[Tensors],
    shares: Array,
    setting: MatchingSettings,
    draw: np.random.Generator,
) -> dict[str, Tensor]:
    """One plain chain of several of a spec; its hidden layers may be wider.

    models: J; shares: (J, C), what share of each class's examples each has seen.
    """
    names = plain_chain(module(spec)) or []
    nets = [layers_of(names, params) for params in models]
    convolved = any(models[0][f"{name}.weight"].dim() == 4 for name in names)
    matched = (_from_below if convolved else _from_above)(nets, shares, setting, draw)
    params: dict[str, Tensor] = {}
    for name, layer in zip(names, matched, strict=True):
        params |= as_tensors(name, layer, models[0])
    return params


def widened(spec: ModelSpec, params: Tensors) -> ModelSpec:
    """The spec of a plain chain with the widths that its parameters have; of another network, the
    spec itself.
    """
    names = plain_chain(module(spec))
    return (
        spec
        if names is None
        else replace(spec, widths=tuple(len(params[f"{n}.bias"]) for n in names[:-1]))
    )


def _from_above(
    nets: Sequence[list[Layer]], shares: Array, setting: MatchingSettings, draw: np.random.Generator
) -> list[Layer]:
    """Fully connected. A unit is its bias and what goes out of it, in the first layer also what
    comes in.

    What goes to a class is as sure as the network's share of that class.
    """
    head = len(nets[0]) - 1
    if head == 0:
        return [mean_by_share([net[0] for net in nets], shares)]
    weights: dict[int, Array] = {}
    biases = {head: _biases_of_classes([net[head].bias for net in nets], shares, setting)}
    places, width = [np.arange(shares.shape[1]) for _ in nets], shares.shape[1]
    for c in reversed(range(head)):
        units = [_unit(net, c, at, width) for net, at in zip(nets, places, strict=True)]
        into = units[0].shape[1] - width - 1
        sure = [s if c + 1 == head else np.ones(width) for s in shares]
        precisions = [np.concatenate([np.ones(into + 1), s]) / setting.variance for s in sure]
        matched = match(units, precisions, _prior_mean(into, width), setting, draw)
        weights[c + 1] = matched.units[:, into + 1 :].T
        biases[c] = matched.units[:, into]
        if c == 0:
            weights[0] = matched.units[:, :into]
        places, width = matched.places, len(matched.units)
    return [Layer(weights[c][..., None], biases[c]) for c in range(head + 1)]


def _unit(net: Sequence[Layer], c: int, places: Places, width: int) -> Array:
    """A layer's units as vectors: what comes in (of the first layer), bias, what goes to the global
    units above.
    """
    bias = net[c].bias
    into = net[c].weight.reshape(len(bias), -1) if c == 0 else np.zeros((len(bias), 0))
    return np.hstack(
        [
            into,
            bias[:, None],
            inputs_onto(net[c + 1].weight[..., 0].T[..., None], places, width)[..., 0],
        ]
    )


def _biases_of_classes(biases: Sequence[Array], shares: Array, setting: MatchingSettings) -> Array:
    sums = BIAS_MEAN / setting.prior_variance + sum(
        s * b / setting.variance for s, b in zip(shares, biases, strict=True)
    )
    out: Array = sums / (1 / setting.prior_variance + shares.sum(0) / setting.variance)
    return out


def _from_below(
    nets: Sequence[list[Layer]], shares: Array, setting: MatchingSettings, draw: np.random.Generator
) -> list[Layer]:
    """With convolutions. A unit is what comes into it and its bias; the head is the mean by class
    share.
    """
    width = nets[0][0].weight.shape[1]
    places: Sequence[Places] = [np.arange(width) for _ in nets]
    widened_layers = []
    for c in range(len(nets[0]) - 1):
        layers = [
            Layer(inputs_onto(n[c].weight, at, width), n[c].bias)
            for n, at in zip(nets, places, strict=True)
        ]
        matched = match_inputs(layers, setting, draw)
        widened_layers.append(
            Layer(
                matched.units[:, :-1].reshape(-1, *layers[0].weight.shape[1:]), matched.units[:, -1]
            )
        )
        places, width = matched.places, len(matched.units)
    heads = [
        Layer(inputs_onto(n[-1].weight, at, width), n[-1].bias)
        for n, at in zip(nets, places, strict=True)
    ]
    return [*widened_layers, mean_by_share(heads, shares)]


def match_inputs(
    layers: Sequence[Layer], setting: MatchingSettings, draw: np.random.Generator
) -> Matched:
    """Match the units of a layer by what comes into them and their bias, the last number of a
    vector.
    """
    units = [
        np.hstack([layer.weight.reshape(len(layer.bias), -1), layer.bias[:, None]])
        for layer in layers
    ]
    size = units[0].shape[1]
    precisions = [np.full(size, 1 / setting.variance) for _ in units]
    return match(units, precisions, _prior_mean(size - 1, 0), setting, draw)


def _prior_mean(before: int, after: int) -> Array:
    return np.concatenate([np.zeros(before), [BIAS_MEAN], np.zeros(after)])


def inputs_onto(weight: Array, places: Places, width: int) -> Array:
    """(units, inputs, places) with its inputs at their global units, of which there are ``width``;
    0 at the others.
    """
    out = np.zeros((weight.shape[0], width, weight.shape[2]))
    out[:, places] = weight
    return out


def mean_by_share(heads: Sequence[Layer], shares: Array) -> Layer:
    """The mean of several heads, each class weighted by the networks' shares of it (J, C)."""
    weight = sum(s[:, None, None] * h.weight for s, h in zip(shares, heads, strict=True))
    bias = sum(s * h.bias for s, h in zip(shares, heads, strict=True))
    return Layer(np.asarray(weight), np.asarray(bias))


def class_shares(counts: Tensor) -> Array:
    """(J, C) label counts as each network's share of each class; equal shares for a class that no
    network has.
    """
    numbers = counts.double().numpy()
    total = numbers.sum(0)
    out: Array = np.where(total > 0, numbers / np.maximum(total, 1), 1 / len(numbers))
    return out


def layers_of(names: Sequence[str], params: Tensors) -> list[Layer]:
    """The layers of a chain, from first to head."""
    layers: list[Layer] = []
    for name in names:
        weight = params[f"{name}.weight"].double().numpy()
        inputs = weight.shape[1] if weight.ndim == 4 or not layers else len(layers[-1].bias)
        layers.append(
            Layer(weight.reshape(len(weight), inputs, -1), params[f"{name}.bias"].double().numpy())
        )
    return layers


def as_tensors(name: str, layer: Layer, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A layer as entries of a model: shaped as those of another of its kind, of the same type."""
    old = like[f"{name}.weight"]
    kernel = (layer.weight.shape[1], *old.shape[2:]) if old.dim() == 4 else (-1,)
    weight = torch.from_numpy(layer.weight.reshape(len(layer.weight), *kernel).copy())
    return {
        f"{name}.weight": weight.to(old.dtype),
        f"{name}.bias": torch.from_numpy(layer.bias.copy()).to(old.dtype),
    }
