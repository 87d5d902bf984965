"""Choosing teachers: greedy by label coverage, and probing models with noise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedstill.core import label_counts
from fedstill.core.errors import ConfigError, DataError
from fedstill.methods import fit, sfedkd

METRICS = pytest.mark.parametrize("metric", ["l1", "l2", "kl", "js"])


def label_shares(seed: int, clients: int = 10, classes: int = 10) -> np.ndarray:
    """Skewed label shares of clients."""
    return np.random.default_rng(seed).dirichlet([0.3] * classes, size=clients)


# The greedy choice.


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """The Kullback–Leibler divergence."""
    terms = [a * np.log(a / b) for a, b in zip(p, q, strict=True) if a > 0]
    return float(sum(terms))


def distance_to_uniform(shares: np.ndarray, metric: str) -> float:
    """How far a sum or mean of label shares is from uniform."""
    uniform = np.full(len(shares), 1 / len(shares))
    match metric:
        case "l1":
            return float(np.abs(shares - uniform).sum())
        case "l2":
            return float(np.sqrt(((shares - uniform) ** 2).sum()))
        case "kl":
            return kl(shares, uniform)
    middle = (shares + uniform) / 2
    return (kl(shares, middle) + kl(uniform, middle)) / 2


def greedy_choice(shares: np.ndarray, k: int, metric: str, normalise: bool) -> list[int]:
    """Algorithm 1 of SFedKD, as the paper prints it or with the chosen shares normalised."""
    chosen: list[int] = []
    for _ in range(k):
        distances = {}
        for client in range(len(shares)):
            if client not in chosen:
                total = shares[[*chosen, client]].sum(0)
                if normalise:
                    total = total / total.sum()
                distances[client] = distance_to_uniform(total, metric)
        chosen.append(min(distances, key=distances.__getitem__))
    return chosen


@METRICS
def test_complementary_is_the_greedy_algorithm(metric: label_counts.Metric) -> None:
    for seed in range(10):
        shares = label_shares(seed)
        expected = greedy_choice(shares, 5, metric, normalise=True)
        assert sfedkd.complementary(shares, 5, metric) == expected


@pytest.mark.parametrize("metric", ["kl", "l2"])
def test_for_kl_and_l2_normalising_changes_nothing(metric: label_counts.Metric) -> None:
    """papers.md 13.7."""
    for seed in range(10):
        shares = label_shares(seed)
        expected = greedy_choice(shares, 5, metric, normalise=False)
        assert sfedkd.complementary(shares, 5, metric) == expected


@METRICS
@settings(max_examples=20, deadline=None)
@given(classes_of_clients=st.lists(st.integers(0, 3), min_size=4, max_size=12))
def test_one_class_clients_cover_all_classes_before_any_twice(
    metric: label_counts.Metric, classes_of_clients: list[int]
) -> None:
    """All are equally good: ties go to the lower position."""
    classes = set(classes_of_clients)

    chosen = sfedkd.complementary(np.eye(4)[classes_of_clients], len(classes), metric)

    first_of_each_class = sorted(classes_of_clients.index(c) for c in classes)
    assert chosen == first_of_each_class


@METRICS
def test_ties_go_to_the_lower_position_even_when_sums_round_differently(
    metric: label_counts.Metric,
) -> None:
    shares = np.array([0.1, 0.2, 0.3, 0.4, 0.0])
    for seed in range(20):
        draw = np.random.default_rng(seed)
        permuted = np.stack([draw.permutation(shares) for _ in range(6)])
        assert sfedkd.complementary(permuted, 1, metric) == [0]


# The greedy choice against all choices.


def distance_of_choice(shares: np.ndarray, chosen: Sequence[int], metric: str) -> float:
    """How far the mean shares of some clients are from uniform, by the library."""
    classes = shares.shape[1]
    mean = shares[list(chosen)].mean(0)
    uniform = np.full(classes, 1 / classes)
    return float(label_counts.distance(mean, uniform, metric, smoothing=0.0))  # type: ignore[arg-type]


def distances_of_all_choices(shares: np.ndarray, k: int, metric: str) -> list[float]:
    """Those of all choices of k clients."""
    choices = combinations(range(len(shares)), k)
    return [distance_of_choice(shares, chosen, metric) for chosen in choices]


@METRICS
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_greedy_against_the_exact_optimum(metric: label_counts.Metric, k: int) -> None:
    """The greedy algorithm is an approximation: never better than the optimum, often equal, far
    better than chance. Of one teacher it is exact.
    """
    greedy = []
    optimum = []
    chance = []
    for seed in range(15):
        shares = label_shares(seed, clients=8, classes=5)
        chosen = sfedkd.complementary(shares, k, metric)
        greedy.append(distance_of_choice(shares, chosen, metric))
        distances = distances_of_all_choices(shares, k, metric)
        optimum.append(min(distances))
        chance.append(float(np.mean(distances)))

    assert (np.array(greedy) >= np.array(optimum) - 1e-9).all()
    if k == 1:
        assert greedy == pytest.approx(optimum)
    excess = np.mean(greedy) - np.mean(optimum)
    assert excess < 0.35 * (np.mean(chance) - np.mean(optimum))


def test_greedy_is_not_always_optimal() -> None:
    """The most uniform client comes first, though two others together are uniform."""
    shares = np.array([[0.4, 0.4, 0.1, 0.1], [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]])

    assert sfedkd.complementary(shares, 2) == [0, 2]
    assert min(distances_of_all_choices(shares, 2, "kl")) == pytest.approx(0)


@METRICS
def test_where_one_class_clients_cover_everything_greedy_is_optimal(
    metric: label_counts.Metric,
) -> None:
    shares = np.eye(4)[[0, 0, 1, 2, 2, 3]]

    chosen = sfedkd.complementary(shares, 4, metric)

    assert distance_of_choice(shares, chosen, metric) == pytest.approx(0)
    assert min(distances_of_all_choices(shares, 4, metric)) == pytest.approx(0)


def test_as_many_are_chosen_as_asked_for_or_as_there_are() -> None:
    shares = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]])

    assert sfedkd.complementary(shares, 0) == []
    assert sfedkd.complementary(shares, 1) == [0]
    assert sorted(sfedkd.complementary(shares, 10)) == [0, 1, 2]
    assert sfedkd.complementary(torch.zeros(0, 2), 3) == []
    assert all(type(client) is int for client in sfedkd.complementary(shares, 3))


def test_a_negative_number_and_what_are_no_shares_are_refused() -> None:
    with pytest.raises(ConfigError, match="k = -1"):
        sfedkd.complementary([[0.5, 0.5]], -1)
    for shares in ([[0.0, 0.0]], [[float("nan"), 1.0]], [[-1.0, 2.0]], [0.5, 0.5]):
        with pytest.raises(DataError, match="label shares"):
            sfedkd.complementary(shares, 1)


# Probing with noise.


class Probed(nn.Module):
    """A linear model that records its inputs, with parts in different modes."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(12, 3).double()
        self.drop = nn.Dropout(0.9)
        self.frozen = nn.BatchNorm1d(3).double().eval()
        self.inputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return self.frozen(self.line(self.drop(x.flatten(1))))

    def modes(self) -> list[bool]:
        """Whether each part is in training mode."""
        return [module.training for module in self.modules()]


def test_noise_probe_is_the_mean_softmax_on_keyed_noise() -> None:
    """Without dropout, and without a draw from torch's global generator."""
    model = Probed()
    generator_state = torch.get_rng_state()

    shares = fit.noise_probe(model, (3, 2, 2), samples=50, seed=4)

    assert torch.equal(torch.get_rng_state(), generator_state)
    (x,) = model.inputs
    assert x.shape == (50, 3, 2, 2)
    assert abs(float(x.mean())) < 0.2
    assert float(x.std()) == pytest.approx(1, abs=0.1)
    with torch.no_grad():
        expected = torch.softmax(model.frozen(model.line(x.flatten(1))), -1).mean(0)
    torch.testing.assert_close(shares, expected)
    assert not shares.requires_grad
    assert float(shares.sum()) == pytest.approx(1)
    assert torch.equal(shares, fit.noise_probe(model, (3, 2, 2), samples=50, seed=4))
    assert not torch.equal(shares, fit.noise_probe(model, (3, 2, 2), samples=50, seed=5))


def test_noise_probe_leaves_every_part_in_its_mode() -> None:
    """Also where the model fails."""
    model = Probed()
    modes = model.modes()
    running_mean = model.frozen.running_mean
    assert running_mean is not None

    fit.noise_probe(model, (12,))

    assert model.modes() == modes
    assert torch.equal(running_mean, torch.zeros(3).double())
    with pytest.raises(RuntimeError):
        fit.noise_probe(model, (5,))
    assert model.modes() == modes


def test_noise_probe_finds_the_class_that_a_model_always_answers() -> None:
    def always_class_1(x: Tensor) -> Tensor:
        return torch.tensor([0.0, 9.0, 0.0]).expand(len(x), 3)

    assert int(fit.noise_probe(always_class_1, (1, 4, 4)).argmax()) == 1
