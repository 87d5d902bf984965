"""Rules that divide a change: Shapley's axioms, on games whose answers are known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
import torch
from torch import Tensor

from fedstill.metrics import shapley as rules

RULES = {
    "exact": rules.exact,
    "two_ends": rules.two_ends,
}


def game(seed: int, players: int, classes: int = 2) -> dict[tuple[int, ...], Tensor]:
    draw = torch.Generator().manual_seed(seed)
    every = [tuple(p for p in range(players) if code >> p & 1) for code in range(2**players)]
    return {s: torch.randn(classes, generator=draw, dtype=torch.float64) for s in every}


def test_exact_is_the_mean_over_all_orders() -> None:
    worth = game(1, 4)
    by_hand = torch.zeros(4, 2, dtype=torch.float64)
    for order in permutations(range(4)):
        for at, k in enumerate(order):
            by_hand[k] += worth[tuple(sorted(order[: at + 1]))] - worth[tuple(sorted(order[:at]))]
    table = rules.exact(worth.__getitem__, 4)
    assert torch.allclose(table.values, by_hand / 24, atol=1e-12)
    assert table.gap.max() < 1e-12, "complete"


@pytest.mark.parametrize("rule", RULES)
def test_an_additive_game_gives_each_player_its_own_term(rule: str) -> None:
    terms = torch.tensor([[0.3, -1.0], [0.0, 0.0], [-0.2, 0.4], [-0.2, 0.4]], dtype=torch.float64)
    table = RULES[rule](lambda s: terms[list(s)].sum(0) + 5.0, 4)
    assert torch.allclose(table.values, terms, atol=1e-12), (
        "nothing for a null player, equal shares for equal ones"
    )
    assert table.gap.max() < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_values_of_two_games_add_up(rule: str) -> None:
    one, two = game(2, 3), game(3, 3)
    both = {s: one[s] + two[s] for s in one}
    sum_ = RULES[rule](one.__getitem__, 3).values + RULES[rule](two.__getitem__, 3).values
    assert torch.allclose(sum_, RULES[rule](both.__getitem__, 3).values, atol=1e-12)


def test_more_players_than_can_be_asked_are_refused() -> None:
    with pytest.raises(ValueError, match="11 players"):
        rules.exact(lambda s: torch.zeros(1), 11)


class Curve:
    """u_c(w) = f_c(sum of w) along w = s D, with f a square and a steep step."""

    def __init__(self, changes: Tensor, steep: float) -> None:
        self.changes, self.steep, self.asked = changes.double(), steep, 0

    def _all(self, s: Tensor) -> Tensor:
        w = s * self.changes.sum()
        return torch.stack([w**2, torch.sigmoid(self.steep * (w - 0.3))])

    def values(self, s: float, classes: Sequence[int]) -> Tensor:
        return self._all(torch.tensor(s, dtype=torch.float64))[list(classes)]

    def slopes(self, s: float, classes: Sequence[int]) -> Tensor:
        self.asked += 1
        place = torch.tensor(s, dtype=torch.float64, requires_grad=True)
        slope = torch.stack(
            [torch.autograd.grad(v, place, retain_graph=True)[0] for v in self._all(place)]
        )
        return (self.changes / self.changes.sum())[:, None] * slope[list(classes)]


def test_the_path_is_exact_for_a_polynomial_and_halves_pieces_where_a_value_jumps() -> None:
    changes = torch.tensor([0.5, 0.2, 0.0, -0.1])
    calm = Curve(changes, 1.0)
    table = rules.along_path(calm, 4, [0])
    assert calm.asked == 3
    assert torch.allclose(table.values[:, 0], changes.double() * 0.6, atol=1e-12), (
        "u = w²: D_k times the sum of all D"
    )
    assert table.gap.max() < 1e-12
    steep = Curve(changes, 80.0)
    table = rules.along_path(steep, 4, [0, 1])
    assert steep.asked > 3
    assert table.gap.max() < 0.03
    assert table.values[2].abs().max() == 0, "a null player"


def test_local_training_and_averaging_are_the_whole_change() -> None:
    draw = torch.Generator().manual_seed(5)
    before, after, local = (torch.rand(*s, generator=draw).double() for s in ((3,), (3,), (4, 3)))
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    parts = rules.by_local_training_and_averaging(before, local, after, weights)
    assert torch.allclose(parts.training + parts.averaging, after - before, atol=1e-15)
    by_hand = sum(w * (row - before) for w, row in zip(weights, local, strict=True))
    assert torch.allclose(parts.training, by_hand, atol=1e-15)


def test_soft_accuracy_becomes_accuracy_where_it_is_cold() -> None:
    logits, labels = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.5]]), torch.tensor([0, 0, 1])
    assert torch.allclose(rules.soft_accuracy(logits, labels, 1e-3), torch.tensor([1.0, 0.0, 0.0]))
    assert rules.soft_accuracy(logits, labels, 1.0)[0].item() == pytest.approx(0.7310585786)
