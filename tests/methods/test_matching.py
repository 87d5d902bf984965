"""PFNM's matching: its scores and its greedy passes against loops, and what it must leave as it
is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.core.records import ModelSpec
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
from fedstill.models.predictors import predictor

FREE = MatchingSettings(variance=1.0, prior_variance=1e9, gamma=1e-6)
"""A prior that says nothing, and no wish for new units: what is the same is found, and is left as
it is.
"""
LEFT = 1e-7
"""The prior still pulls a unit by about a billionth in each layer, thrice that where a client holds
a third of a class, and numbers are up to 10.
"""

MLP = ModelSpec("mlp", (1, 4, 4), 5, (("hidden", (7, 6)), ("projection", 0)))
CNN = ModelSpec("digits_cnn", (1, 8, 8), 5)
FREED = pytest.mark.parametrize("spec", [MLP, CNN], ids=str)
EVEN = torch.full((3, 5), 10)


def draw() -> np.random.Generator:
    return np.random.default_rng(0)


def some(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """A model of a spec in float64, with biases that are not near zero."""
    params = {
        k: v.double() if v.is_floating_point() else v
        for k, v in contract.initial(spec, seed).items()
    }
    rng = torch.Generator().manual_seed(seed)
    return {
        k: torch.randn(v.shape, generator=rng).double() if k.endswith("bias") else v
        for k, v in params.items()
    }


def hidden(spec: ModelSpec) -> list[tuple[str, str]]:
    names = [k.removesuffix(".weight") for k in contract.initial(spec, 0) if k.endswith(".weight")]
    return list(itertools.pairwise(names))


def permuted(spec: ModelSpec, params: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The same function with the hidden units of a plain chain in another order."""
    out, rng = dict(params), torch.Generator().manual_seed(seed)
    for name, after in hidden(spec):
        bias, weight = out[f"{name}.bias"], out[f"{after}.weight"]
        order = torch.randperm(len(bias), generator=rng)
        out[f"{name}.weight"], out[f"{name}.bias"] = out[f"{name}.weight"][order], bias[order]
        grouped = weight.reshape(len(weight), len(bias), -1)[:, order]
        out[f"{after}.weight"] = grouped.reshape(weight.shape)
    return out


def outputs(spec: ModelSpec, params: dict[str, Tensor]) -> Tensor:
    x = torch.randn(6, *spec.input_shape, generator=torch.Generator().manual_seed(9)).double()
    return predictor(widened(spec, params), params)(x)


def together(
    spec: ModelSpec,
    models: Sequence[dict[str, Tensor]],
    setting: MatchingSettings,
    counts: Tensor | None = None,
):
    counts = torch.full((len(models), spec.classes), 10) if counts is None else counts
    fitted = FittedModels(models, counts, [1.0] * len(models))
    return match_models(spec, fitted, setting, draw())


def plain(
    units: list[np.ndarray], precisions: list[np.ndarray], mean: np.ndarray, s: MatchingSettings
) -> np.ndarray:
    """The global units, by loops over members; the best assignment is found by trying all."""
    n, dims = len(units), range(len(mean))
    at: dict[int, list[int]] = {}

    def known(g: int) -> tuple[list[float], list[float]]:
        members = [(j, row) for j in at for row, place in enumerate(at[j]) if place == g]
        weight = [1 / s.prior_variance + sum(precisions[j][d] for j, _ in members) for d in dims]
        total = [
            mean[d] / s.prior_variance + sum(precisions[j][d] * units[j][r, d] for j, r in members)
            for d in dims
        ]
        return total, weight

    def score(j: int, row: int, total: Sequence[float], weight: Sequence[float]) -> float:
        p, v = precisions[j], units[j][row]
        return sum(
            (p[d] * v[d] + total[d]) ** 2 / (p[d] + weight[d]) - total[d] ** 2 / weight[d]
            for d in dims
        )

    def join(j: int) -> None:
        there = sorted({g for places in at.values() for g in places})
        if not there:
            at[j] = list(range(len(units[j])))
            return
        fresh = [max(there) + 1 + k for k in range(min(len(units[j]), max(s.most - len(there), 1)))]
        worth: dict[tuple[int, int], float] = {}
        for row in range(len(units[j])):
            for g in there:
                m = min(sum(p.count(g) for p in at.values()), 10)
                worth[row, g] = score(j, row, *known(g)) + math.log(m / (n - m))
            alone = score(
                j, row, [m / s.prior_variance for m in mean], [1 / s.prior_variance for _ in dims]
            )
            for k, g in enumerate(fresh, 1):
                worth[row, g] = alone - 2 * math.log(k) + 2 * math.log(s.gamma / n)
        ways = itertools.permutations([*there, *fresh], len(units[j]))
        at[j] = list(max(ways, key=lambda way: sum(worth[row, g] for row, g in enumerate(way))))

    for j in sorted(range(n), key=lambda j: -len(units[j])):
        join(j)
    rng = draw()
    for _ in range(s.passes):
        for j in rng.permutation(n):
            del at[int(j)]
            join(int(j))
    return np.array(
        [np.divide(*known(g)) for g in sorted({g for places in at.values() for g in places})]
    )


@pytest.mark.parametrize("gamma", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("variance", [0.1, 1.0])
@pytest.mark.parametrize("passes", [0, 2])
def test_it_matches_as_loops_do(gamma: float, variance: float, passes: int) -> None:
    rng = np.random.default_rng(3)
    units = [rng.normal(size=(n, 4)) for n in (2, 3, 2)]
    precisions = [rng.uniform(0, 1, 4) / variance for _ in units]
    mean, setting = (
        np.array([0.0, 0.0, 0.1, 0.0]),
        MatchingSettings(variance, 2.0, gamma, passes=passes),
    )
    found = match(units, precisions, mean, setting, draw()).units
    expected = plain(units, precisions, mean, setting)
    assert len(found) == len(expected)
    np.testing.assert_allclose(
        found[np.lexsort(found.T)], expected[np.lexsort(expected.T)], rtol=1e-9, atol=1e-12
    )


def test_the_settings_of_the_loops_differ_in_what_they_find() -> None:
    rng = np.random.default_rng(3)
    units = [rng.normal(size=(3, 4)) for _ in range(4)]
    sizes = {
        g: len(match(units, [np.ones(4)] * 4, np.zeros(4), MatchingSettings(gamma=g), draw()).units)
        for g in (1e-9, 1e6)
    }
    assert sizes == {1e-9: 3, 1e6: 12}


def test_no_layer_grows_beyond_what_is_allowed() -> None:
    rng = np.random.default_rng(3)
    units = [rng.normal(size=(3, 4)) for _ in range(6)]
    found = match(units, [np.ones(4)] * 6, np.zeros(4), MatchingSettings(gamma=1e6, most=8), draw())
    assert len(found.units) <= 8 + 6, "full, it takes one more from a network"
    assert (
        len(match(units, [np.ones(4)] * 6, np.zeros(4), MatchingSettings(gamma=1e6), draw()).units)
        == 18
    )
    still = match(
        units, [np.ones(4)] * 6, np.zeros(4), MatchingSettings(gamma=1e6, grow=False), draw()
    )
    assert len(still.units) == 3
    assert all(sorted(places) == [0, 1, 2] for places in still.places)


def test_equal_units_shrink_towards_the_prior_by_its_share() -> None:
    v = np.array([[1.0, -2.0], [3.0, 0.5]])
    found = match(
        [v, v[::-1], v],
        [np.full(2, 2.0)] * 3,
        np.array([0.0, 0.1]),
        MatchingSettings(0.5, 4.0, 1e-6),
        draw(),
    )
    expected = (3 * 2 * v + np.array([0.0, 0.1]) / 4) / (3 * 2 + 1 / 4)
    np.testing.assert_allclose(found.units[np.argsort(found.units[:, 0])], expected)


@FREED
def test_permuted_copies_of_one_network_are_that_network(spec: ModelSpec) -> None:
    one = some(spec, 1)
    found = together(spec, [one, permuted(spec, one, 2), permuted(spec, one, 3)], FREE, EVEN)
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in one.items()}
    torch.testing.assert_close(outputs(spec, found), outputs(spec, one), rtol=LEFT, atol=LEFT)


@FREED
def test_one_client_keeps_its_own_network(spec: ModelSpec) -> None:
    one = some(spec, 1)
    found = together(spec, [one], FREE)
    for key, value in one.items():
        torch.testing.assert_close(found[key], value, rtol=LEFT, atol=LEFT)


@FREED
@pytest.mark.parametrize(
    "setting", [MatchingSettings(), MatchingSettings(0.1, 10.0, 50.0, passes=2)], ids=str
)
def test_the_order_of_a_clients_units_does_not_matter(
    spec: ModelSpec, setting: MatchingSettings
) -> None:
    models = [some(spec, seed) for seed in (1, 2, 3)]
    counts = torch.tensor([[9, 1, 0, 3, 5], [0, 4, 0, 1, 1], [2, 2, 0, 7, 0]])
    matched = outputs(spec, together(spec, models, setting, counts))
    for client, model in enumerate(models):
        reordered = [*models]
        reordered[client] = permuted(spec, model, 7)
        found = together(spec, reordered, setting, counts)
        torch.testing.assert_close(matched, outputs(spec, found))


@FREED
def test_a_wide_network_is_one_that_can_be_built_and_run(spec: ModelSpec) -> None:
    models = [some(spec, seed) for seed in (1, 2, 3)]
    found = together(spec, models, MatchingSettings(gamma=1e6))
    wide = widened(spec, found)
    assert sum(wide.widths) > sum(widened(spec, models[0]).widths)
    assert {k: v.shape for k, v in contract.initial(wide, 0).items()} == {
        k: v.shape for k, v in found.items()
    }
    assert bool(outputs(spec, found).isfinite().all())


def test_without_hidden_layers_the_head_is_the_mean_by_class_share() -> None:
    spec = ModelSpec("logistic", (1, 2, 2), 3)
    models = [some(spec, seed) for seed in (1, 2)]
    found = together(spec, models, MatchingSettings(), torch.tensor([[3, 0, 0], [1, 5, 0]]))
    for key in ("head.weight", "head.bias"):
        a, b = (m[key] for m in models)
        torch.testing.assert_close(
            found[key], torch.stack([0.75 * a[0] + 0.25 * b[0], b[1], (a[2] + b[2]) / 2])
        )


@pytest.mark.parametrize("name", ["resnet10", "resnet56"])
def test_a_residual_networks_last_block_is_matched_and_the_rest_averaged(name: str) -> None:
    spec = ModelSpec(name, (3, 9, 9), 5, (("norm", "batch"),))
    one, block = some(spec, 1), "body.stage4.0.path" if name == "resnet10" else "body.stage3.5.path"
    order = torch.randperm(len(one[f"{block}.1.bias"]), generator=torch.Generator().manual_seed(1))
    moved = {
        k: one[k][order]
        for k in one
        if k.startswith((f"{block}.0.", f"{block}.1.")) and one[k].dim()
    }
    twin = {**one, **moved, f"{block}.3.weight": one[f"{block}.3.weight"][:, order]}
    torch.testing.assert_close(outputs(spec, twin), outputs(spec, one))
    assert not torch.equal(twin[f"{block}.0.weight"], one[f"{block}.0.weight"])
    torch.testing.assert_close(
        outputs(spec, together(spec, [one, twin], replace(FREE, passes=1))), outputs(spec, one)
    )
    other = some(spec, 2)
    fitted = FittedModels([one, other], torch.ones(2, 5), [3.0, 1.0])
    found = match_models(spec, fitted, MatchingSettings(passes=1), draw())
    stem = "body.stem.1.running_mean"
    torch.testing.assert_close(found[stem], 0.75 * one[stem] + 0.25 * other[stem])
    torch.testing.assert_close(
        found["head.weight"], (one["head.weight"] + other["head.weight"]) / 2
    )
    assert found["body.stem.1.num_batches_tracked"].dtype == torch.int64


def test_what_can_be_matched_and_what_cannot() -> None:
    kinds = {
        n: matchable(ModelSpec(n, (3, 32, 32), 5))
        for n in ("qkt_cnn", "mlp", "alexnet", "resnet18", "sphere_cnn")
    }
    assert kinds == {
        "qkt_cnn": "exact",
        "mlp": "exact",
        "alexnet": "exact",
        "resnet18": "approximate",
        "sphere_cnn": "",
    }
    spec = ModelSpec("sphere_cnn", (3, 32, 32), 5)
    with pytest.raises(IncompatibleMethod, match="sphere_cnn is neither"):
        together(spec, [contract.initial(spec, 0)], MatchingSettings())
    with pytest.raises(ConfigError, match="3 hidden layers"):
        with_widths(contract.build(MLP), (1, 2, 3))
