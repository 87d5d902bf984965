"""Choosing teachers: greedy by label coverage, and probing models with noise."""

from __future__ import annotations

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

METRICS: list[label_counts.Metric] = ["l1", "l2", "kl", "js"]


def greedy(shares: np.ndarray, k: int, metric: str, normalise: bool) -> list[int]:
    """Algorithm 1 of SFedKD, as the paper prints it or with the chosen shares normalised."""
    c = shares.shape[1]

    def kl(a: np.ndarray, b: np.ndarray) -> float:
        return float(sum(x * np.log(x / y) for x, y in zip(a, b, strict=True) if x > 0))

    def far(a: np.ndarray) -> float:
        u = np.full(c, 1 / c)
        a = a / a.sum() if normalise else a
        m = (a + u) / 2
        values = {
            "l1": lambda: np.abs(a - u).sum(),
            "l2": lambda: np.sqrt(((a - u) ** 2).sum()),
            "kl": lambda: kl(a, u),
            "js": lambda: (kl(a, m) + kl(u, m)) / 2,
        }
        return float(values[metric]())

    chosen: list[int] = []
    for _ in range(k):
        left = [i for i in range(len(shares)) if i not in chosen]
        chosen.append(min(left, key=lambda i: far(shares[[*chosen, i]].sum(0))))
    return chosen


def draw(seed: int, clients: int = 10, classes: int = 10) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet([0.3] * classes, size=clients)


@pytest.mark.parametrize("metric", METRICS)
def test_complementary_is_the_greedy_algorithm(metric: label_counts.Metric) -> None:
    for seed in range(10):
        assert sfedkd.complementary(draw(seed), 5, metric) == greedy(
            draw(seed), 5, metric, normalise=True
        )


# papers.md 13.7
@pytest.mark.parametrize("metric", ["kl", "l2"])
def test_for_kl_and_l2_normalising_changes_nothing(metric: label_counts.Metric) -> None:
    for seed in range(10):
        assert sfedkd.complementary(draw(seed), 5, metric) == greedy(
            draw(seed), 5, metric, normalise=False
        )


@pytest.mark.parametrize("metric", METRICS)
@settings(max_examples=20, deadline=None)
@given(order=st.lists(st.integers(0, 3), min_size=4, max_size=12))
def test_one_class_clients_cover_all_classes_before_any_twice(
    metric: label_counts.Metric, order: list[int]
) -> None:
    there = len(set(order))
    picks = sfedkd.complementary(np.eye(4)[order], there, metric)
    assert len({order[i] for i in picks}) == there
    assert picks == sorted(picks)  # all are equally good: ties go to the lower position
    assert all(order.index(order[i]) == i for i in picks)


@pytest.mark.parametrize("metric", METRICS)
def test_ties_go_to_the_lower_position_even_when_sums_round_differently(
    metric: label_counts.Metric,
) -> None:
    row = np.array([0.1, 0.2, 0.3, 0.4, 0.0])
    for seed in range(20):
        rng = np.random.default_rng(seed)
        shuffled = np.stack([rng.permutation(row) for _ in range(6)])
        assert sfedkd.complementary(shuffled, 1, metric) == [0]


def optimum(shares: np.ndarray, k: int, metric: label_counts.Metric) -> tuple[float, list[float]]:
    """The least distance to uniform that any k candidates reach, and that of every choice, by
    trying all.
    """
    every = [list(c) for c in combinations(range(len(shares)), k)]
    uniform = np.full(shares.shape[1], 1 / shares.shape[1])
    far = [
        float(label_counts.distance(shares[c].mean(0), uniform, metric, smoothing=0.0))
        for c in every
    ]
    return min(far), far


# The greedy algorithm is an approximation: never better than the optimum, often equal, far better
# than chance.
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_greedy_against_the_exact_optimum(metric: label_counts.Metric, k: int) -> None:
    ours, best, chance = [], [], []
    for seed in range(15):
        shares = draw(seed, clients=8, classes=5)
        chosen = shares[sfedkd.complementary(shares, k, metric)].mean(0)
        ours.append(float(label_counts.distance(chosen, np.full(5, 0.2), metric, smoothing=0.0)))
        least, far = optimum(shares, k, metric)
        best.append(least)
        chance.append(float(np.mean(far)))
    assert all(o >= b - 1e-9 for o, b in zip(ours, best, strict=True))
    if k == 1:
        assert ours == pytest.approx(best), "of one teacher greedy is exact"
    assert np.mean(ours) - np.mean(best) < 0.35 * (np.mean(chance) - np.mean(best))


def test_greedy_is_not_always_optimal() -> None:
    """The most uniform client comes first, though two others together are uniform."""
    shares = np.array([[0.4, 0.4, 0.1, 0.1], [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]])
    assert sfedkd.complementary(shares, 2) == [0, 2]
    assert optimum(shares, 2, "kl")[0] == pytest.approx(0)


@pytest.mark.parametrize("metric", METRICS)
def test_where_one_class_clients_cover_everything_greedy_is_optimal(
    metric: label_counts.Metric,
) -> None:
    shares = np.eye(4)[[0, 0, 1, 2, 2, 3]]
    chosen = shares[sfedkd.complementary(shares, 4, metric)].mean(0)
    assert float(
        label_counts.distance(chosen, np.full(4, 0.25), metric, smoothing=0.0)
    ) == pytest.approx(0)
    assert optimum(shares, 4, metric)[0] == pytest.approx(0)


def test_the_number_asked_for_and_what_is_refused() -> None:
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]])
    assert sfedkd.complementary(p, 0) == []
    assert sfedkd.complementary(p, 1) == [0]
    assert sorted(sfedkd.complementary(p, 10)) == [0, 1, 2]
    assert sfedkd.complementary(torch.zeros(0, 2), 3) == []
    assert all(type(i) is int for i in sfedkd.complementary(p, 3))
    with pytest.raises(ConfigError, match="k = -1"):
        sfedkd.complementary(p, -1)
    for bad in ([[0.0, 0.0]], [[float("nan"), 1.0]], [[-1.0, 2.0]], [0.5, 0.5]):
        with pytest.raises(DataError, match="label shares"):
            sfedkd.complementary(bad, 1)


class Probe(nn.Module):
    """A linear model that remembers what it saw, with parts in different modes."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(12, 3).double()
        self.drop = nn.Dropout(0.9)
        self.frozen = nn.BatchNorm1d(3).double().eval()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        out: Tensor = self.frozen(self.line(self.drop(x.flatten(1))))
        return out


def test_noise_probe_is_the_mean_softmax_on_keyed_noise() -> None:
    model = Probe()
    before = torch.get_rng_state()
    found = fit.noise_probe(model, (3, 2, 2), samples=50, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    (x,) = model.seen
    assert x.shape == (50, 3, 2, 2)
    assert abs(float(x.mean())) < 0.2
    assert float(x.std()) == pytest.approx(1, abs=0.1)
    with torch.no_grad():
        expected = torch.softmax(model.frozen(model.line(x.flatten(1))), -1).mean(0)
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad
    assert float(found.sum()) == pytest.approx(1)
    assert torch.equal(found, fit.noise_probe(model, (3, 2, 2), samples=50, seed=4))
    assert not torch.equal(found, fit.noise_probe(model, (3, 2, 2), samples=50, seed=5))


def test_noise_probe_leaves_every_part_in_its_mode() -> None:
    model = Probe()
    modes = [m.training for m in model.modules()]
    mean = model.frozen.running_mean
    assert mean is not None
    fit.noise_probe(model, (12,))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(mean, torch.zeros(3).double())
    with pytest.raises(RuntimeError):
        fit.noise_probe(model, (5,))
    assert [m.training for m in model.modules()] == modes


def test_noise_probe_finds_what_a_model_was_made_for() -> None:
    def always(x: Tensor) -> Tensor:
        return torch.tensor([0.0, 9.0, 0.0]).expand(len(x), 3)

    assert int(fit.noise_probe(always, (1, 4, 4)).argmax()) == 1
