"""Rules that divide a change: Shapley's axioms, on games whose answers are known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations

import pytest
import torch
from torch import Tensor

from fedstill.metrics import shapley as rules

RULES = {"exact": rules.exact, "two_ends": rules.two_ends}

Worth = dict[tuple[int, ...], Tensor]
"""The value of each coalition, by class."""


def random_game(seed: int, players: int) -> Worth:
    """Random values of all coalitions for two classes."""
    generator = torch.Generator().manual_seed(seed)
    worth = {}
    for size in range(players + 1):
        for coalition in combinations(range(players), size):
            worth[coalition] = torch.randn(2, generator=generator, dtype=torch.float64)
    return worth


def assert_equal(values: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """The values agree in float64."""
    torch.testing.assert_close(values, expected, rtol=0, atol=tolerance)


def test_exact_is_the_mean_over_all_orders() -> None:
    worth = random_game(1, 4)
    total = torch.zeros(4, 2, dtype=torch.float64)
    for order in permutations(range(4)):
        for position, player in enumerate(order):
            without_player = tuple(sorted(order[:position]))
            with_player = tuple(sorted(order[: position + 1]))
            total[player] += worth[with_player] - worth[without_player]

    table = rules.exact(worth.__getitem__, 4)

    assert_equal(table.values, total / 24)
    assert table.gap.max() < 1e-12, "the values add up to the whole change"


@pytest.mark.parametrize("rule", RULES)
def test_an_additive_game_gives_each_player_its_own_term(rule: str) -> None:
    """Nothing for a player without effect, and equal values for equal players."""
    terms = torch.tensor([[0.3, -1.0], [0.0, 0.0], [-0.2, 0.4], [-0.2, 0.4]], dtype=torch.float64)

    table = RULES[rule](lambda coalition: terms[list(coalition)].sum(0) + 5.0, 4)

    assert_equal(table.values, terms)
    assert table.gap.max() < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_values_of_two_games_add_up(rule: str) -> None:
    first = random_game(2, 3)
    second = random_game(3, 3)
    both_games = {coalition: first[coalition] + second[coalition] for coalition in first}

    first_values = RULES[rule](first.__getitem__, 3).values
    second_values = RULES[rule](second.__getitem__, 3).values
    values = RULES[rule](both_games.__getitem__, 3).values

    assert_equal(values, first_values + second_values)


def test_more_players_than_coalitions_can_be_evaluated_are_refused() -> None:
    with pytest.raises(ValueError, match="11 players"):
        rules.exact(lambda coalition: torch.zeros(1), 11)


class Curve:
    """The values of two classes along the path from no change to all changes.

    At the part ``position`` of the path, w is this part of the sum of changes. The value of class 0
    is w squared, that of class 1 a step of a given steepness at 0.3.
    """

    def __init__(self, changes: Tensor, steepness: float) -> None:
        self.changes = changes
        self.steepness = steepness
        self.slope_calls = 0

    def all_values(self, position: Tensor) -> Tensor:
        w = position * self.changes.sum()
        return torch.stack([w**2, torch.sigmoid(self.steepness * (w - 0.3))])

    def values(self, position: float, classes: Sequence[int]) -> Tensor:
        return self.all_values(torch.tensor(position, dtype=torch.float64))[list(classes)]

    def slopes(self, position: float, classes: Sequence[int]) -> Tensor:
        """The derivative by the position, of which each player has the share of its change."""
        self.slope_calls += 1
        variable = torch.tensor(position, dtype=torch.float64)
        derivatives = torch.func.jacrev(self.all_values)(variable)
        shares = self.changes / self.changes.sum()
        return shares[:, None] * derivatives[list(classes)]


def test_the_path_is_exact_for_a_polynomial_and_is_divided_where_a_value_jumps() -> None:
    """The path of w squared gives player k its change times the sum of all changes, 0.6."""
    changes = torch.tensor([0.5, 0.2, 0.0, -0.1], dtype=torch.float64)
    polynomial = Curve(changes, 1.0)
    step = Curve(changes, 80.0)

    table = rules.along_path(polynomial, 4, [0])
    table_of_step = rules.along_path(step, 4, [0, 1])

    assert polynomial.slope_calls == 3
    assert_equal(table.values[:, 0], 0.6 * changes)
    assert table.gap.max() < 1e-12
    assert step.slope_calls > 3
    assert table_of_step.gap.max() < 0.03
    assert table_of_step.values[2].abs().max() == 0, "a player without change"


def test_local_training_and_averaging_are_the_whole_change() -> None:
    generator = torch.Generator().manual_seed(5)
    before_round = torch.rand(3, generator=generator).double()
    after_round = torch.rand(3, generator=generator).double()
    local = torch.rand(4, 3, generator=generator).double()
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)

    parts = rules.by_local_training_and_averaging(before_round, local, after_round, weights)

    assert_equal(parts.training + parts.averaging, after_round - before_round, 1e-15)
    assert_equal(parts.training, weights @ (local - before_round), 1e-15)


def test_soft_accuracy_becomes_accuracy_at_a_low_temperature() -> None:
    """At temperature 1, a difference of 1 between two logits is the sigmoid of 1."""
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.5]])
    labels = torch.tensor([0, 0, 1])

    cold = rules.soft_accuracy(logits, labels, 1e-3)
    warm = rules.soft_accuracy(logits, labels, 1.0)

    assert torch.allclose(cold, torch.tensor([1.0, 0.0, 0.0]))
    assert warm[0].item() == pytest.approx(0.7310585786)
