"""PFNM: matches the hidden units of separately trained networks, so that they can be averaged.

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
    "FittedModels",
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
"""The number of members above which a global unit does not become more attractive."""


@dataclass(frozen=True)
class FittedModels:
    """The J >= 1 models to match, the label counts (J, C) of the clients that trained them, and
    these clients' numbers of examples (J,).
    """

    models: Sequence[Tensors]
    counts: Tensor
    sizes: Sequence[float]

    @property
    def class_shares(self) -> Array:
        """Each network's share of each class, (J, C); equal shares for a class that no
        network has.
        """
        numbers = self.counts.double().numpy()
        total = numbers.sum(0)
        shares: Array = np.where(total > 0, numbers / np.maximum(total, 1), 1 / len(numbers))
        return shares


@dataclass(frozen=True)
class MatchingSettings:
    """The settings of PFNM: variances and ``gamma`` above 0, ``most`` >= 1, ``passes`` >= 0.

    ``variance``: sigma^2, the variance of a network's weights about the global weights;
    ``prior_variance``: sigma_0^2, the variance of the global weights about their prior mean;
    ``gamma``: the readiness to create a new global unit. ``most``: if a layer has this many global
    units, a network adds at most one. ``grow``: whether a network may add units.
    """

    variance: float = 1.0
    prior_variance: float = 1.0
    gamma: float = 1.0
    most: int = 700
    passes: int = 5
    grow: bool = True


@dataclass(frozen=True)
class Matched:
    """A matched layer: the global unit of each network's units (L_j,), and the vectors of the
    global units (L, D).
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
    """Match a layer: compute its global units, and assign each network's units to them.

    units: (L_j, D) of each of J networks; precisions: (D,) of each, >= 0; prior_mean: (D,). The
    algorithm starts with the network with the most units and adds the other networks. In every
    pass, each network is removed and matched again, in an order from ``draw``.

    Reading: in the code, a single network also adds at most ``most`` units, and loses the others;
    here it keeps them.
    """
    prior = np.full_like(prior_mean, 1 / setting.prior_variance)
    weighted = [u * p for u, p in zip(units, precisions, strict=True)]
    layer = _GlobalUnits(weighted, list(precisions), prior_mean * prior, prior)
    for j in sorted(range(len(units)), key=lambda j: -len(units[j])):
        layer.join(j, setting)
    for _ in range(setting.passes):
        for j in draw.permutation(len(units)):
            layer.leave(int(j))
            layer.join(int(j), setting)
    return Matched(layer.places, layer.sums / layer.weights)


@dataclass
class _GlobalUnits:
    """The global units of a layer while networks are added and removed: S and P, (L, D) each, and m
    (L,).
    """

    weighted: list[Array]
    """The product p v for each network's units."""
    precisions: list[Array]
    prior_sum: Array
    prior: Array

    def __post_init__(self) -> None:
        self.sums = np.zeros((0, len(self.prior)))
        self.weights = np.zeros((0, len(self.prior)))
        self.members = np.zeros(0, dtype=np.int64)
        self.places = [np.zeros(0, dtype=np.int64) for _ in self.weighted]

    def join(self, j: int, setting: MatchingSettings) -> None:
        """Assign each unit of a network to a global unit or to a new one, so that the sum of the
        scores is maximal.
        """
        from scipy.optimize import linear_sum_assignment

        units = self.weighted[j]
        precision = self.precisions[j]
        count = len(self.members)
        if count == 0:
            chosen = np.arange(len(units))
        else:
            scores = self.scores(units, precision, setting)
            _, chosen = linear_sum_assignment(scores, maximize=True)

        # New global units stand after the existing ones, without gaps.
        is_new = chosen >= count
        places = np.where(is_new, count + np.cumsum(is_new) - 1, chosen)
        self.places[j] = places
        self._append(int(is_new.sum()))
        self.sums[places] += units
        self.weights[places] += precision
        self.members[places] += 1

    def _append(self, count: int) -> None:
        """Append global units without members."""
        self.sums = np.vstack([self.sums, np.tile(self.prior_sum, (count, 1))])
        self.weights = np.vstack([self.weights, np.tile(self.prior, (count, 1))])
        self.members = np.append(self.members, np.zeros(count, dtype=np.int64))

    def leave(self, j: int) -> None:
        """Remove a network's units, and global units without members."""
        places = self.places[j]
        self.sums[places] -= self.weighted[j]
        self.weights[places] -= self.precisions[j]
        self.members[places] -= 1
        self.places[j] = places[:0]

        remains = self.members > 0
        new_place = np.cumsum(remains) - 1
        self.sums = self.sums[remains]
        self.weights = self.weights[remains]
        self.members = self.members[remains]
        self.places = [new_place[p] for p in self.places]

    def scores(self, units: Array, precision: Array, setting: MatchingSettings) -> Array:
        """The scores of each unit (L_j) with each global unit (L), and each possible new unit."""
        networks = len(self.weighted)
        popular = np.minimum(self.members, POPULAR)
        popularity = np.log(popular / (networks - popular))
        with_existing = _gain(units, precision, self.sums, self.weights) + popularity

        alone = _gain(units, precision, self.prior_sum[None], self.prior[None])  # (L_j, 1)
        k = np.arange(1, self.most_new(len(units), setting) + 1)
        with_new = alone - 2 * np.log(k) + 2 * np.log(setting.gamma / networks)
        return np.hstack([with_existing, with_new])

    def most_new(self, count: int, setting: MatchingSettings) -> int:
        """The number of a network's units that may become new global units."""
        least = max(count - len(self.members), 0)
        if not setting.grow:
            return least
        return max(least, min(count, max(setting.most - len(self.members), 1)))


def _gain(units: Array, precision: Array, sums: Array, weights: Array) -> Array:
    """sum_d (p v + S)^2 / (p + P) - S^2 / P for every unit and every global unit, (L_j, L)."""
    inverse = 1 / (precision + weights)
    squares = units**2 @ inverse.T + 2 * units @ (sums * inverse).T
    gain: Array = squares + (sums**2 * inverse - sums**2 / weights).sum(1)
    return gain


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
    """A layer: the weight (units, inputs, positions), whose inputs are units or channels of the
    previous layer, and the bias.
    """

    weight: Array
    bias: Array


def match_chains(
    spec: ModelSpec, fitted: FittedModels, setting: MatchingSettings, draw: np.random.Generator
) -> dict[str, Tensor]:
    """Combine several plain chains of layers with the same spec; the result may have wider hidden
    layers.
    """
    names = plain_chain(module(spec)) or []
    nets = [layers_of(names, params) for params in fitted.models]
    like = fitted.models[0]
    if any(like[f"{name}.weight"].dim() == 4 for name in names):
        matched = _from_below(nets, fitted.class_shares, setting, draw)
    else:
        matched = _from_above(nets, fitted.class_shares, setting, draw)

    params: dict[str, Tensor] = {}
    for name, layer in zip(names, matched, strict=True):
        params |= as_tensors(name, layer, like)
    return params


def widened(spec: ModelSpec, params: Tensors) -> ModelSpec:
    """The spec of a plain chain with the widths of its parameters; for other networks, the spec
    itself.
    """
    names = plain_chain(module(spec))
    if names is None:
        return spec
    return replace(spec, widths=tuple(len(params[f"{name}.bias"]) for name in names[:-1]))


def _from_above(
    nets: Sequence[list[Layer]], shares: Array, setting: MatchingSettings, draw: np.random.Generator
) -> list[Layer]:
    """Match fully connected networks. A unit's vector consists of its bias, its outgoing weights
    and, in the first layer, its incoming weights.

    The precision of a weight to a class is in proportion to the network's share of the class.
    """
    head = len(nets[0]) - 1
    if head == 0:
        return [mean_by_share([net[0] for net in nets], shares)]

    classes = shares.shape[1]
    weights: dict[int, Array] = {}
    biases = {head: _biases_of_classes([net[head].bias for net in nets], shares, setting)}
    # Where the units of the layer above stand among the global ones; classes are in one order.
    places: Sequence[Places] = [np.arange(classes) for _ in nets]
    width = classes
    for c in reversed(range(head)):
        units = [_unit_vectors(net, c, p, width) for net, p in zip(nets, places, strict=True)]
        incoming = units[0].shape[1] - width - 1
        outgoing_precisions = [np.ones(width) for _ in nets]
        if c + 1 == head:
            outgoing_precisions = list(shares)
        precisions = [
            np.concatenate([np.ones(incoming + 1), p]) / setting.variance
            for p in outgoing_precisions
        ]
        matched = match(units, precisions, _prior_mean(incoming, width), setting, draw)
        weights[c + 1] = matched.units[:, incoming + 1 :].T
        biases[c] = matched.units[:, incoming]
        if c == 0:
            weights[0] = matched.units[:, :incoming]
        places = matched.places
        width = len(matched.units)
    return [Layer(weights[c][..., None], biases[c]) for c in range(head + 1)]


def _unit_vectors(net: Sequence[Layer], c: int, places: Places, width: int) -> Array:
    """The units of layer c as vectors: incoming weights (only in the first layer), bias, and
    weights to the global units of the next layer.
    """
    bias = net[c].bias
    incoming = np.zeros((len(bias), 0))
    if c == 0:
        incoming = net[c].weight.reshape(len(bias), -1)
    outgoing = net[c + 1].weight[..., 0].T[..., None]
    return np.hstack([incoming, bias[:, None], inputs_onto(outgoing, places, width)[..., 0]])


def _biases_of_classes(biases: Sequence[Array], shares: Array, setting: MatchingSettings) -> Array:
    """The posterior mean of the head's biases (C,)."""
    weighted = sum(s * b / setting.variance for s, b in zip(shares, biases, strict=True))
    sums = BIAS_MEAN / setting.prior_variance + weighted
    means: Array = sums / (1 / setting.prior_variance + shares.sum(0) / setting.variance)
    return means


def _from_below(
    nets: Sequence[list[Layer]], shares: Array, setting: MatchingSettings, draw: np.random.Generator
) -> list[Layer]:
    """Match networks with convolutions. A unit's vector consists of its incoming weights and its
    bias; the head is the mean weighted by class shares.
    """
    width = nets[0][0].weight.shape[1]
    places: Sequence[Places] = [np.arange(width) for _ in nets]
    matched_layers = []
    for c in range(len(nets[0]) - 1):
        layers = [_on_global_inputs(net[c], p, width) for net, p in zip(nets, places, strict=True)]
        matched = match_inputs(layers, setting, draw)
        weight = matched.units[:, :-1].reshape(-1, *layers[0].weight.shape[1:])
        matched_layers.append(Layer(weight, bias=matched.units[:, -1]))
        places = matched.places
        width = len(matched.units)
    heads = [_on_global_inputs(net[-1], p, width) for net, p in zip(nets, places, strict=True)]
    return [*matched_layers, mean_by_share(heads, shares)]


def _on_global_inputs(layer: Layer, places: Places, width: int) -> Layer:
    """A layer whose inputs are the global units of the previous layer."""
    return Layer(inputs_onto(layer.weight, places, width), layer.bias)


def match_inputs(
    layers: Sequence[Layer], setting: MatchingSettings, draw: np.random.Generator
) -> Matched:
    """Match the units of a layer by their incoming weights and their bias, the last number of a
    vector.
    """
    units = [
        np.hstack([layer.weight.reshape(len(layer.bias), -1), layer.bias[:, None]])
        for layer in layers
    ]
    size = units[0].shape[1]
    precisions = [np.full(size, 1 / setting.variance) for _ in units]
    return match(units, precisions, _prior_mean(size - 1, 0), setting, draw)


def _prior_mean(incoming: int, outgoing: int) -> Array:
    return np.concatenate([np.zeros(incoming), [BIAS_MEAN], np.zeros(outgoing)])


def inputs_onto(weight: Array, places: Places, width: int) -> Array:
    """Weights (units, inputs, positions) whose inputs are moved to their positions among ``width``
    global units; 0 for the other units.
    """
    moved = np.zeros((weight.shape[0], width, weight.shape[2]))
    moved[:, places] = weight
    return moved


def mean_by_share(heads: Sequence[Layer], shares: Array) -> Layer:
    """The mean of several heads, each class weighted by the networks' shares of it (J, C)."""
    weight = sum(s[:, None, None] * h.weight for s, h in zip(shares, heads, strict=True))
    bias = sum(s * h.bias for s, h in zip(shares, heads, strict=True))
    return Layer(np.asarray(weight), np.asarray(bias))


def layers_of(names: Sequence[str], params: Tensors) -> list[Layer]:
    """The layers of a chain, from first to head."""
    layers: list[Layer] = []
    for name in names:
        weight = params[f"{name}.weight"].double().numpy()
        bias = params[f"{name}.bias"].double().numpy()
        inputs = weight.shape[1]
        if layers and weight.ndim == 2:
            # After a flattening, a linear layer has several inputs for each channel.
            inputs = len(layers[-1].bias)
        layers.append(Layer(weight.reshape(len(weight), inputs, -1), bias))
    return layers


def as_tensors(name: str, layer: Layer, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A layer as entries of a model, with the kernel size and the dtype of a layer of another
    model.
    """
    reference = like[f"{name}.weight"]
    shape: tuple[int, ...] = (len(layer.weight), -1)
    if reference.dim() == 4:
        shape = (*layer.weight.shape[:2], *reference.shape[2:])
    weight = torch.from_numpy(layer.weight.reshape(shape).copy())
    bias = torch.from_numpy(layer.bias.copy())
    return {
        f"{name}.weight": weight.to(reference.dtype),
        f"{name}.bias": bias.to(reference.dtype),
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
    spec: ModelSpec, fitted: FittedModels, setting: MatchingSettings, draw: np.random.Generator
) -> dict[str, Tensor]:
    """Combine several residual networks with the same spec: their channels are brought into the
    same order and averaged.
    """
    models: list[Tensors] = list(fitted.models)
    for part, next_part in pairwise(last_block(module(spec))):
        convolution = part.convolution
        norms = part.followers
        layers = [_channels(convolution, norms, params) for params in models]
        matched = match_inputs(layers, replace(setting, grow=False), draw)
        models = [
            _in_order(params, places, (convolution, *norms), next_part.convolution)
            for params, places in zip(models, matched.places, strict=True)
        ]

    sizes = list(fitted.sizes)
    if not sum(sizes) > 0:
        sizes = [1.0] * len(models)
    mean = trees.mean(models, sizes)
    heads = [layers_of(["head"], params)[0] for params in models]
    head = mean_by_share(heads, fitted.class_shares)
    return {**mean, **as_tensors("head", head, mean)}


def _channels(convolution: str, norms: Sequence[str], params: Tensors) -> Layer:
    """The channels of a convolution, with the shift of the subsequent normalisation as bias."""
    weight = params[f"{convolution}.weight"].double().numpy()
    shift = np.zeros(len(weight))
    for norm in norms:
        if f"{norm}.bias" in params:
            shift = params[f"{norm}.bias"].double().numpy()
            break
    return Layer(weight.reshape(*weight.shape[:2], -1), bias=shift)


def _in_order(
    params: Tensors, places: Places, layers: Sequence[str], following: str
) -> dict[str, Tensor]:
    """A model that computes the same function, with the channels after a convolution moved to their
    positions.

    layers: the convolution and the layers after it that act on its channels.
    """
    order = np.argsort(places)
    prefixes = tuple(f"{layer}." for layer in layers)
    moved = {
        name: value[order]
        for name, value in params.items()
        if name.startswith(prefixes) and value.dim()
    }
    inputs = params[f"{following}.weight"][:, order]
    return {**params, **moved, f"{following}.weight": inputs}


# Models by PFNM: exactly where they are plain chains of layers, approximately where they are
# residual networks.


KNOWN_CHAINS = defaultdict(lambda: "mlp", {2: "series_cnn", 3: "qkt_cnn"})
"""The library's plain chains, by the number of axes of an example."""


def matchable(spec: ModelSpec) -> Literal["exact", "approximate", ""]:
    """The way in which models of a spec can be matched; empty if they cannot be matched."""
    network = module(spec)
    if plain_chain(network) is not None:
        return "exact"
    if last_block(network) and isinstance(getattr(network, "head", None), nn.Linear):
        return "approximate"
    return ""


def unmatched(spec: ModelSpec) -> str:
    """The end of an error message: the layers of a spec that cannot be matched, and a model that
    can be matched.
    """
    layers = list(module(spec).modules())
    obstacles = []
    if any(isinstance(layer, (Attention, nn.MultiheadAttention)) for layer in layers):
        obstacles.append("attention")
    if any(isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) for layer in layers):
        obstacles.append("embeddings")

    reason = "is neither"
    if obstacles:
        reason = f"has {' and '.join(obstacles)}"
    advice = f"set model.name = {KNOWN_CHAINS[len(spec.input_shape)]!r}"
    if spec.vocabulary:
        advice = "choose another method"
    return f"{spec.label} {reason}; {advice}"


def match_models(
    spec: ModelSpec, fitted: FittedModels, setting: MatchingSettings, draw: np.random.Generator
) -> dict[str, Tensor]:
    """Combine several models with the same spec. The result may have wider hidden layers
    (``widened`` returns its spec).

    draw: returns the order of the networks in each pass. Raises IncompatibleMethod for a spec that
    cannot be matched.
    """
    match matchable(spec):
        case "exact":
            return match_chains(spec, fitted, setting, draw)
        case "approximate":
            return match_residual(spec, fitted, setting, draw)
    raise IncompatibleMethod(
        f"{spec.label} is neither a plain chain of layers nor a residual network"
    )
