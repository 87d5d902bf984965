"""PFNM: matches the hidden units of networks trained apart, so that they can be averaged.

Plain chains of layers are matched exactly, the channels inside residual blocks approximately.

"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedstill.core import trees
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.records import ModelSpec, Tensors
from fedstill.models.contract import module
from fedstill.models.layer_chain import last_block, plain_chain
from fedstill.models.network import Attention

__all__ = [
    "Matched",
    "MatchingSettings",
    "match",
    "match_models",
    "matchable",
    "unmatched",
    "widened",
]


# One layer of PFNM: which units of several networks are the same, and what they are together.
#
# Source: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (2019),
# section 3 and its code. Symbols: J = the networks; v = the vector of a unit, p its precision, both
# (D,); S, P = what is known of a global unit: the sum of its members' p v and the prior's, the sum
# of their p and the prior's; m = how many members it has.


Array = np.ndarray[Any, np.dtype[np.float64]]
Places = np.ndarray[Any, np.dtype[np.int64]]

POPULAR = 10
"""More members than these do not make a global unit more attractive."""


@dataclass(frozen=True)
class MatchingSettings:
    """What PFNM assumes: variances above 0, ``gamma`` above 0, ``most`` >= 1, ``passes`` >= 0.

    ``variance``: sigma^2, of a network's weights about the global ones; ``prior_variance``:
    sigma_0^2, of the global ones about their prior mean; ``gamma``: how readily a unit becomes a
    new global one. ``most``: where a layer has so many global units, a network adds no more than
    one. ``grow``: whether it may add any.
    """

    variance: float = 1.0
    prior_variance: float = 1.0
    gamma: float = 1.0
    most: int = 700
    passes: int = 5
    grow: bool = True


@dataclass(frozen=True)
class Matched:
    """A matched layer: for each network its units' global ones (L_j,), and the global units'
    vectors (L, D).
    """

    places: list[Places]
    units: Array


def match(
    units: Sequence[Array],
    precisions: Sequence[Array],
    prior_mean: Array,
    setting: MatchingSettings,
    draw: np.random.Generator,
) -> Matched:
    """The global units of a layer, and which unit of each network is a member of which.

    units: (L_j, D) of each of J networks; precisions: (D,) of each, >= 0; prior_mean: (D,). The
    network with most units begins, each of the others joins, and in every pass each is taken out
    and matched again, in an order from ``draw``.

    Reading: in the code a network alone adds no more than ``most`` units either, and loses the
    others; here it keeps them.
    """
    prior = np.full_like(prior_mean, 1 / setting.prior_variance)
    weighted = [u * p for u, p in zip(units, precisions, strict=True)]
    known = _Known(weighted, list(precisions), prior_mean * prior, prior)
    for j in sorted(range(len(units)), key=lambda j: -len(units[j])):
        known.join(j, setting)
    for _ in range(setting.passes):
        for j in draw.permutation(len(units)):
            known.leave(int(j))
            known.join(int(j), setting)
    return Matched(known.places, known.sums / known.weights)


@dataclass
class _Known:
    """What is known of the global units while networks join and leave: S, P (L, D) each, and m
    (L,).
    """

    weighted: list[Array]  # p v of each network's units
    precisions: list[Array]
    prior_sum: Array
    prior: Array

    def __post_init__(self) -> None:
        self.sums = np.zeros((0, len(self.prior)))
        self.weights = np.zeros((0, len(self.prior)))
        self.members = np.zeros(0, dtype=np.int64)
        self.places = [np.zeros(0, dtype=np.int64) for _ in self.weighted]

    def join(self, j: int, setting: MatchingSettings) -> None:
        """Match a network's units with the global ones, or make them new ones, so that the scores'
        sum is greatest.
        """
        from scipy.optimize import linear_sum_assignment

        own, precision, old = self.weighted[j], self.precisions[j], len(self.members)
        if old == 0:
            chosen = np.arange(len(own))
        else:
            _, chosen = linear_sum_assignment(self.scores(own, precision, setting), maximize=True)
        fresh = chosen >= old
        self.places[j] = np.where(fresh, old + np.cumsum(fresh) - 1, chosen)
        grown = (int(fresh.sum()), 1)
        self.sums = np.vstack([self.sums, np.tile(self.prior_sum, grown)])
        self.weights = np.vstack([self.weights, np.tile(self.prior, grown)])
        self.members = np.append(self.members, np.zeros(grown[0], dtype=np.int64))
        self.sums[self.places[j]] += own
        self.weights[self.places[j]] += precision
        self.members[self.places[j]] += 1

    def leave(self, j: int) -> None:
        """Take a network's units out; a global unit without members is removed."""
        mine = self.places[j]
        self.sums[mine] -= self.weighted[j]
        self.weights[mine] -= self.precisions[j]
        self.members[mine] -= 1
        stays = self.members > 0
        moved = np.cumsum(stays) - 1
        self.sums, self.weights, self.members = (
            self.sums[stays],
            self.weights[stays],
            self.members[stays],
        )
        self.places = [moved[p] if k != j else p[:0] for k, p in enumerate(self.places)]

    def scores(self, own: Array, precision: Array, setting: MatchingSettings) -> Array:
        """The score of each unit (L_j) with each global one (L), and with each place of a new
        one.
        """
        popular = np.minimum(self.members, POPULAR)
        with_old = _gain(own, precision, self.sums, self.weights) + np.log(
            popular / (len(self.weighted) - popular)
        )
        alone = _gain(own, precision, self.prior_sum[None], self.prior[None])  # (L_j, 1)
        k = np.arange(1, self.places_for_new(len(own), setting) + 1)
        return np.hstack(
            [with_old, alone - 2 * np.log(k) + 2 * np.log(setting.gamma / len(self.weighted))]
        )

    def places_for_new(self, count: int, setting: MatchingSettings) -> int:
        """How many of a network's units may become new global ones."""
        least = max(count - len(self.members), 0)
        return (
            max(least, min(count, max(setting.most - len(self.members), 1)))
            if setting.grow
            else least
        )


def _gain(own: Array, precision: Array, sums: Array, weights: Array) -> Array:
    """sum_d (p v + S)^2 / (p + P) - S^2 / P for every unit and every global one, (L_j, L)."""
    inverse = 1 / (precision + weights)
    squares = own**2 @ inverse.T + 2 * own @ (sums * inverse).T
    out: Array = squares + (sums**2 * inverse - sums**2 / weights).sum(1)
    return out


# Whole networks by PFNM: layer after layer is matched, and several networks become one.
#
# Source: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (2019),
# section 3, and its code (fully connected networks, from the top down); Wang et al., "Federated
# Learning with Matched Averaging" (2020), section 3, and its code (convolutions, from the bottom
# up).
# Reading: a unit that a network lacks counts as weights of 0 in the layer above or below, as sure
# as any, as in the code.


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


# Residual networks, approximately: the channels inside the last block are matched, everything else
# is averaged.
#
# Source: none. Alballa et al. (QKT), section 4.1, has PFNM among its baselines with ResNet-18 and
# does not say how; PFNM itself knows no connections that skip layers: they tie the channels of a
# whole stage to each other.
# Reading: the channels between the convolutions of the last block do not affect other layers. They
# are matched by what comes into them and the shift of the normalisation after them (its prior mean
# is a bias's), without new ones, and brought into one order. Then all is averaged by size, running
# statistics too, and the head by class share. Under GroupNorm a channel may come into another
# group.


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


# Models by PFNM: exactly where they are plain chains of layers, approximately where they are
# residual networks.


KNOWN_CHAINS = defaultdict(lambda: "mlp", {2: "series_cnn", 3: "qkt_cnn"})
"""Plain chains of ours, by the axes of an example."""


def matchable(spec: ModelSpec) -> Literal["exact", "approximate", ""]:
    """How models of a spec can be matched; empty if they cannot."""
    m = module(spec)
    if plain_chain(m) is not None:
        return "exact"
    return (
        "approximate" if last_block(m) and isinstance(getattr(m, "head", None), nn.Linear) else ""
    )


def unmatched(spec: ModelSpec) -> str:
    """What models of a spec have that cannot be matched, for people, and a model that can: for one
    line of refusal.
    """
    layers = list(module(spec).modules())
    others = [
        "attention"
        * any(isinstance(layer, (Attention, nn.MultiheadAttention)) for layer in layers),
        "embeddings" * any(isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) for layer in layers),
    ]
    why = " and ".join(filter(None, others))
    other = (
        "choose another method"
        if spec.vocabulary
        else f"set model.name = {KNOWN_CHAINS[len(spec.input_shape)]!r}"
    )
    return f"{spec.label} {f'has {why}' if why else 'is neither'}; {other}"


def match_models(
    spec: ModelSpec,
    models: Sequence[Tensors],
    counts: Tensor,
    sizes: Sequence[float],
    setting: MatchingSettings,
    draw: np.random.Generator,
) -> dict[str, Tensor]:
    """One model of several of a spec; its hidden layers may be wider (``widened`` gives its spec).

    models: J of them, J >= 1; counts: (J, C) label counts of those who trained them; sizes: (J,)
    their numbers of examples; draw: gives the order of the clients in each pass. Raises
    IncompatibleMethod for a spec that cannot be matched.
    """
    shares = class_shares(counts)
    match matchable(spec):
        case "exact":
            return match_chains(spec, models, shares, setting, draw)
        case "approximate":
            return match_residual(spec, models, shares, sizes, setting, draw)
    raise IncompatibleMethod(
        f"{spec.label} is neither a plain chain of layers nor a residual network"
    )
