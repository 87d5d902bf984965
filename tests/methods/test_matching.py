"""PFNM's matching: its scores and its greedy passes against loops, and what it must leave as it
is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from double import widened as in_float64
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.core.records import ModelSpec
from fedstill.core.registry import register
from fedstill.methods.matching import (
    FittedModels,
    MatchingSettings,
    match,
    match_models,
    matchable,
    widened,
)
from fedstill.models import contract
from fedstill.models.layer_chain import with_widths
from fedstill.models.network import Network
from fedstill.models.predictors import predictor

WITHOUT_PRIOR = MatchingSettings(variance=1.0, prior_variance=1e9, gamma=1e-6)
"""A prior that says nothing, and no wish for new units: what is the same is merged, and is left as
it is.
"""

PULL = 1e-7
"""The prior still pulls a unit by about a billionth in each layer, thrice that where a client holds
a third of a class, and numbers are up to 10.
"""

MLP = ModelSpec("mlp", (1, 4, 4), 5, (("hidden", (7, 6)), ("projection", 0)))
CNN = ModelSpec("digits_cnn", (1, 8, 8), 5)
CHAINS = pytest.mark.parametrize("spec", [MLP, CNN], ids=str)

Params = dict[str, Tensor]


def order_draw() -> np.random.Generator:
    """Draws the order of clients in each pass."""
    return np.random.default_rng(0)


# The matching of one layer.


@dataclass(frozen=True)
class Layer:
    """The units of each client, and how precise each of their numbers is."""

    units: list[np.ndarray]
    precisions: list[np.ndarray]
    prior_mean: np.ndarray


class Loops:
    """PFNM by loops over units and numbers; the best assignment is merged by trying all."""

    def __init__(self, layer: Layer, settings: MatchingSettings) -> None:
        self.layer = layer
        self.settings = settings
        self.clients = len(layer.units)
        self.dimensions = range(len(layer.prior_mean))
        self.places: dict[int, list[int]] = {}
        """The global unit of each unit of a client."""

    def run(self) -> np.ndarray:
        """The global units after all passes."""
        for client in sorted(range(self.clients), key=lambda c: -len(self.layer.units[c])):
            self.join(client)
        draw = order_draw()
        for _ in range(self.settings.passes):
            for client in draw.permutation(self.clients).tolist():
                del self.places[client]
                self.join(client)
        return np.array([self.posterior_mean(place) for place in self.used_places()])

    def used_places(self) -> list[int]:
        """The global units that have members."""
        return sorted({place for places in self.places.values() for place in places})

    def members(self, place: int) -> list[tuple[int, int]]:
        """The clients and rows whose global unit this is."""
        members = []
        for client, places in self.places.items():
            rows = [row for row, row_place in enumerate(places) if row_place == place]
            members += [(client, row) for row in rows]
        return members

    def weight(self, place: int, d: int) -> float:
        """The precision of a number of a global unit."""
        precisions = [self.layer.precisions[client][d] for client, _ in self.members(place)]
        return 1 / self.settings.prior_variance + sum(precisions)

    def total(self, place: int, d: int) -> float:
        """The precision of a number of a global unit times its mean."""
        total = self.layer.prior_mean[d] / self.settings.prior_variance
        for client, row in self.members(place):
            total += self.layer.precisions[client][d] * self.layer.units[client][row, d]
        return total

    def posterior_mean(self, place: int) -> list[float]:
        """A global unit."""
        return [self.total(place, d) / self.weight(place, d) for d in self.dimensions]

    def score(self, client: int, row: int, place: int) -> float:
        """How well a unit fits a global unit; one without members is the prior."""
        score = 0.0
        for d in self.dimensions:
            precision = self.layer.precisions[client][d]
            total = self.total(place, d)
            weight = self.weight(place, d)
            joined = precision * self.layer.units[client][row, d] + total
            score += joined**2 / (precision + weight) - total**2 / weight
        return score

    def join(self, client: int) -> None:
        """Assign the units of a client to global units, old or new, at most one to each."""
        rows = range(len(self.layer.units[client]))
        used = self.used_places()
        if not used:
            self.places[client] = list(rows)
            return
        room = max(self.settings.most - len(used), 1)
        new = [max(used) + 1 + number for number in range(min(len(rows), room))]
        scores = {}
        for row in rows:
            for place in used:
                size = min(len(self.members(place)), 10)
                popularity = math.log(size / (self.clients - size))
                scores[row, place] = self.score(client, row, place) + popularity
            for number, place in enumerate(new, 1):
                novelty = 2 * math.log(self.settings.gamma / self.clients) - 2 * math.log(number)
                scores[row, place] = self.score(client, row, place) + novelty

        def total_score(assignment: Sequence[int]) -> float:
            return sum(scores[row, place] for row, place in enumerate(assignment))

        assignments = itertools.permutations([*used, *new], len(rows))
        self.places[client] = list(max(assignments, key=total_score))


def in_order(units: np.ndarray) -> np.ndarray:
    """Units in an order that does not depend on how they were merged."""
    return units[np.lexsort(units.T)]


@pytest.mark.parametrize("gamma", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("variance", [0.1, 1.0])
@pytest.mark.parametrize("passes", [0, 2])
def test_it_matches_as_loops_do(gamma: float, variance: float, passes: int) -> None:
    draw = np.random.default_rng(3)
    units = [draw.normal(size=(count, 4)) for count in (2, 3, 2)]
    precisions = [draw.uniform(0, 1, 4) / variance for _ in units]
    prior_mean = np.array([0.0, 0.0, 0.1, 0.0])
    settings = MatchingSettings(variance, 2.0, gamma, passes=passes)

    merged = match(units, precisions, prior_mean, settings, order_draw()).units

    expected = Loops(Layer(units, precisions, prior_mean), settings).run()
    assert len(merged) == len(expected)
    np.testing.assert_allclose(in_order(merged), in_order(expected), rtol=1e-9, atol=1e-12)


def match_equal_precisions(clients: int, **settings: Any) -> Any:
    """The matching of clients of three units, whose numbers are all as precise."""
    draw = np.random.default_rng(3)
    units = [draw.normal(size=(3, 4)) for _ in range(clients)]
    precisions = [np.ones(4)] * clients
    return match(units, precisions, np.zeros(4), MatchingSettings(**settings), order_draw())


def test_a_larger_gamma_finds_more_units() -> None:
    """From as few units as a client has to all units of all clients."""
    assert len(match_equal_precisions(4, gamma=1e-9).units) == 3
    assert len(match_equal_precisions(4, gamma=1e6).units) == 12


def test_no_layer_grows_beyond_what_is_allowed() -> None:
    """A full layer takes one more unit from each network."""
    assert len(match_equal_precisions(6, gamma=1e6).units) == 18
    assert len(match_equal_precisions(6, gamma=1e6, most=8).units) <= 8 + 6

    without_growth = match_equal_precisions(6, gamma=1e6, grow=False)
    assert len(without_growth.units) == 3
    assert all(sorted(places) == [0, 1, 2] for places in without_growth.places)


def test_equal_units_shrink_towards_the_prior_by_its_share() -> None:
    units = np.array([[1.0, -2.0], [3.0, 0.5]])
    prior_mean = np.array([0.0, 0.1])
    precisions = [np.full(2, 2.0)] * 3
    settings = MatchingSettings(0.5, 4.0, 1e-6)

    merged = match([units, units[::-1], units], precisions, prior_mean, settings, order_draw())

    expected = (3 * 2 * units + prior_mean / 4) / (3 * 2 + 1 / 4)
    np.testing.assert_allclose(merged.units[np.argsort(merged.units[:, 0])], expected)


# The matching of networks.


def drawn_model(spec: ModelSpec, seed: int) -> Params:
    """A model of a spec in float64, with biases that are not near zero."""
    params = in_float64(contract.initial(spec, seed))
    draw = torch.Generator().manual_seed(seed)
    for name, value in params.items():
        if name.endswith("bias"):
            params[name] = torch.randn(value.shape, generator=draw).double()
    return params


def permuted(spec: ModelSpec, params: Params, seed: int) -> Params:
    """The same function with the hidden units of a plain chain in another order."""
    result = dict(params)
    draw = torch.Generator().manual_seed(seed)
    layers = [name.removesuffix(".weight") for name in params if name.endswith(".weight")]
    for layer, next_layer in itertools.pairwise(layers):
        order = torch.randperm(len(result[f"{layer}.bias"]), generator=draw)
        result[f"{layer}.weight"] = result[f"{layer}.weight"][order]
        result[f"{layer}.bias"] = result[f"{layer}.bias"][order]
        next_weight = result[f"{next_layer}.weight"]
        by_unit = next_weight.reshape(len(next_weight), len(order), -1)
        result[f"{next_layer}.weight"] = by_unit[:, order].reshape(next_weight.shape)
    return result


def outputs(spec: ModelSpec, params: Params) -> Tensor:
    """The answers of a model, which may be wider than its spec, to six inputs."""
    draw = torch.Generator().manual_seed(9)
    x = torch.randn(6, *spec.input_shape, generator=draw).double()
    return predictor(widened(spec, params), params)(x)


def matched(
    spec: ModelSpec,
    models: Sequence[Params],
    settings: MatchingSettings,
    counts: Tensor | None = None,
    weights: Sequence[float] | None = None,
) -> Params:
    """The model that the clients' models become; with ten examples of each class at each client,
    and equal weights, unless stated otherwise.
    """
    if counts is None:
        counts = torch.full((len(models), spec.classes), 10)
    fitted = FittedModels(models, counts, weights or [1.0] * len(models))
    return match_models(spec, fitted, settings, order_draw())


def shapes_of(params: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """The shape of each entry."""
    return {name: value.shape for name, value in params.items()}


@CHAINS
def test_permuted_copies_of_one_network_are_that_network(spec: ModelSpec) -> None:
    model = drawn_model(spec, 1)
    copies = [model, permuted(spec, model, 2), permuted(spec, model, 3)]

    merged = matched(spec, copies, WITHOUT_PRIOR)

    assert shapes_of(merged) == shapes_of(model)
    torch.testing.assert_close(outputs(spec, merged), outputs(spec, model), rtol=PULL, atol=PULL)


@CHAINS
def test_one_client_keeps_its_own_network(spec: ModelSpec) -> None:
    model = drawn_model(spec, 1)

    merged = matched(spec, [model], WITHOUT_PRIOR)

    for name, value in model.items():
        torch.testing.assert_close(merged[name], value, rtol=PULL, atol=PULL)


@CHAINS
@pytest.mark.parametrize(
    "settings", [MatchingSettings(), MatchingSettings(0.1, 10.0, 50.0, passes=2)], ids=str
)
def test_the_order_of_a_clients_units_does_not_matter(
    spec: ModelSpec, settings: MatchingSettings
) -> None:
    models = [drawn_model(spec, seed) for seed in (1, 2, 3)]
    counts = torch.tensor([[9, 1, 0, 3, 5], [0, 4, 0, 1, 1], [2, 2, 0, 7, 0]])
    expected = outputs(spec, matched(spec, models, settings, counts))

    for client, model in enumerate(models):
        reordered = list(models)
        reordered[client] = permuted(spec, model, 7)
        merged = matched(spec, reordered, settings, counts)
        torch.testing.assert_close(outputs(spec, merged), expected)


@CHAINS
def test_a_wide_network_is_one_that_can_be_built_and_run(spec: ModelSpec) -> None:
    models = [drawn_model(spec, seed) for seed in (1, 2, 3)]

    merged = matched(spec, models, MatchingSettings(gamma=1e6))

    wide_spec = widened(spec, merged)
    assert sum(wide_spec.widths) > sum(widened(spec, models[0]).widths)
    assert shapes_of(merged) == shapes_of(contract.initial(wide_spec, 0))
    assert bool(outputs(spec, merged).isfinite().all())


@pytest.mark.parametrize("entry", ["head.weight", "head.bias"])
def test_without_hidden_layers_the_head_is_the_mean_by_class_share(entry: str) -> None:
    """Of a class that no client has, it is the plain mean."""
    spec = ModelSpec("logistic", (1, 2, 2), 3)
    models = [drawn_model(spec, seed) for seed in (1, 2)]
    counts = torch.tensor([[3, 0, 0], [1, 5, 0]])

    merged = matched(spec, models, MatchingSettings(), counts)

    a = models[0][entry]
    b = models[1][entry]
    expected = torch.stack([0.75 * a[0] + 0.25 * b[0], b[1], (a[2] + b[2]) / 2])
    torch.testing.assert_close(merged[entry], expected)


def with_permuted_block(params: Params, block: str) -> Params:
    """The same function with the units inside a residual block in another order."""
    draw = torch.Generator().manual_seed(1)
    order = torch.randperm(len(params[f"{block}.1.bias"]), generator=draw)
    result = dict(params)
    for name, value in params.items():
        is_inside = name.startswith((f"{block}.0.", f"{block}.1."))
        if is_inside and value.dim():
            result[name] = value[order]
    result[f"{block}.3.weight"] = params[f"{block}.3.weight"][:, order]
    return result


@pytest.mark.parametrize(
    ("name", "block"),
    [("resnet10", "body.stage4.0.path"), ("resnet56", "body.stage3.5.path")],
    ids=["resnet10", "resnet56"],
)
def test_a_residual_networks_last_block_is_matched_and_the_rest_averaged(
    name: str, block: str
) -> None:
    """Bodies by the clients' weights, heads by their examples."""
    spec = ModelSpec(name, (3, 9, 9), 5, (("norm", "batch"),))
    model = drawn_model(spec, 1)
    twin = with_permuted_block(model, block)
    expected = outputs(spec, model)
    torch.testing.assert_close(outputs(spec, twin), expected)
    assert not torch.equal(twin[f"{block}.0.weight"], model[f"{block}.0.weight"])

    of_twins = matched(spec, [model, twin], replace(WITHOUT_PRIOR, passes=1))

    torch.testing.assert_close(outputs(spec, of_twins), expected)

    other_model = drawn_model(spec, 2)
    merged = matched(
        spec,
        [model, other_model],
        MatchingSettings(passes=1),
        counts=torch.ones(2, 5),
        weights=[3.0, 1.0],
    )

    stem = "body.stem.1.running_mean"
    torch.testing.assert_close(merged[stem], 0.75 * model[stem] + 0.25 * other_model[stem])
    head = "head.weight"
    torch.testing.assert_close(merged[head], (model[head] + other_model[head]) / 2)
    assert merged["body.stem.1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qkt_cnn", "exact"),
        ("mlp", "exact"),
        ("alexnet", "exact"),
        ("resnet18", "approximate"),
        ("sphere_cnn", ""),
    ],
)
def test_what_can_be_matched(name: str, kind: str) -> None:
    assert matchable(ModelSpec(name, (3, 32, 32), 5)) == kind


def test_low_rank_updates_cannot_be_matched() -> None:
    assert not matchable(contract.spec_for("low_rank", (4,), 5, {"of": "mlp"}))


@register("model", "toy_round_cnn")
def round_cnn(input_shape: tuple[int, int, int], classes: int) -> Network:
    """A network whose convolution goes on at the opposite edge of an image."""
    convolution = nn.Conv2d(input_shape[0], 3, 3, padding=1, padding_mode="circular")
    return Network(nn.Sequential(convolution, nn.ReLU(), nn.Flatten()), 3 * 16, classes)


def test_wider_convolutions_have_the_padding_of_the_old_ones() -> None:
    spec = contract.spec_for("toy_round_cnn", (1, 4, 4), 5)
    model = drawn_model(spec, 1)
    x = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(9)).double()

    merged = matched(spec, [model], WITHOUT_PRIOR)

    expected = predictor(spec, model)(x)
    torch.testing.assert_close(outputs(spec, merged), expected, rtol=PULL, atol=PULL)


def test_what_cannot_be_matched_is_refused() -> None:
    spec = ModelSpec("sphere_cnn", (3, 32, 32), 5)
    with pytest.raises(IncompatibleMethod, match="sphere_cnn is neither"):
        matched(spec, [contract.initial(spec, 0)], MatchingSettings())
    with pytest.raises(ConfigError, match="3 hidden layers"):
        with_widths(contract.build(MLP), (1, 2, 3))
