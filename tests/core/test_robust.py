"""Robust means are formulas written out in NumPy, and a hostile client cannot move them far."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from double import NEAR
from fedstill.core.aggregation import ROBUST, weighted_mean
from fedstill.core.records import Payload, Reply, Tensors
from fedstill.core.robust_means import clipped_mean, krum, robust_mean, trimmed_mean


def trees_of(values: np.ndarray) -> list[dict[str, torch.Tensor]]:
    """Each row as a tree of two entries and a counter."""
    trees = []
    for number, row in enumerate(torch.tensor(values)):
        matrix = row[3:].reshape(2, 2)
        trees.append({"a": row[:3], "b": matrix, "n": torch.tensor(number)})
    return trees


def flat(tree: Tensors) -> np.ndarray:
    """The entries of a tree as a row, without its counter."""
    return np.concatenate([tree["a"].numpy().ravel(), tree["b"].numpy().ravel()])


@pytest.fixture(params=[4, 7])
def values(request: pytest.FixtureRequest) -> np.ndarray:
    """Random rows, each of which is a client's tree."""
    return np.random.default_rng(request.param).normal(size=(request.param, 7))


def test_the_trimmed_mean_leaves_out_the_ends_of_each_entry(values: np.ndarray) -> None:
    expected = np.sort(values, axis=0)[1:-1].mean(0)
    trimmed = trimmed_mean(trees_of(values), 1)
    np.testing.assert_allclose(flat(trimmed), expected, rtol=NEAR)
    assert trimmed["n"] == 0

    untrimmed = trimmed_mean(trees_of(values), 0)
    np.testing.assert_allclose(flat(untrimmed), values.mean(0), rtol=NEAR, atol=NEAR)


def test_the_median_is_that_of_each_entry(values: np.ndarray) -> None:
    medians = robust_mean(trees_of(values), "median", None, 0.1)
    np.testing.assert_allclose(flat(medians), np.median(values, axis=0), rtol=NEAR)


def test_norm_clipping_cuts_changes_to_the_median_norm(values: np.ndarray) -> None:
    start = np.random.default_rng(0).normal(size=7)
    changes = values - start
    norms = np.sqrt((changes**2).sum(1, keepdims=True))
    clipped_changes = changes * np.minimum(1, np.median(norms) / norms)
    expected = start + clipped_changes.mean(0)

    (start_tree,) = trees_of(start[None])
    clipped = clipped_mean(trees_of(values), start_tree)

    np.testing.assert_allclose(flat(clipped), expected, rtol=1e-9)
    of_zeros = clipped_mean(trees_of(np.zeros_like(values)), None)
    assert not flat(of_zeros).any()


def test_krum_takes_the_tree_nearest_to_its_neighbours(values: np.ndarray) -> None:
    n = len(values)
    # Of four trees none can be hostile, since each needs two neighbours.
    hostile = int(n > 4)
    scores = []
    for row in values:
        distances = np.sort(((values - row) ** 2).sum(1))
        # The smallest distance is that of the row to itself.
        neighbours = distances[1 : 1 + n - hostile - 2]
        scores.append(neighbours.sum())

    chosen = krum(trees_of(values), 1)

    assert chosen == int(np.argmin(scores))
    mean = robust_mean(trees_of(values), "krum", None, 1.5 / n)
    assert mean["n"] == chosen
    np.testing.assert_array_equal(flat(mean), values[chosen])


@pytest.mark.parametrize("weighting", sorted(ROBUST))
def test_no_client_alone_moves_it_beyond_the_others(weighting: str) -> None:
    """Any client of five may send any values and claim any number of examples; it moves the plain
    mean far away.
    """
    honest = np.random.default_rng(1).normal(size=(4, 7))
    (start,) = trees_of(np.zeros((1, 7)))
    for far, hostile_client in itertools.product((1e6, -1e6), range(5)):
        replies = []
        for client, tree in enumerate(trees_of(np.insert(honest, hostile_client, far, axis=0))):
            replies.append(Reply(client, Payload(params=tree), examples=10))
        replies[hostile_client] = replace(replies[hostile_client], examples=10**7)

        mean = weighted_mean(replies, weighting=weighting, start=start, suspected=0.25)

        assert np.abs(flat(mean)).max() < np.abs(honest).sum()
        assert np.abs(flat(weighted_mean(replies))).max() > 1e5


@pytest.mark.parametrize("weighting", sorted(ROBUST))
@pytest.mark.parametrize("count", [1, 2])
def test_of_one_or_two_it_is_something_between_them(weighting: str, count: int) -> None:
    values = np.random.default_rng(2).normal(size=(count, 7))
    trees = trees_of(values)
    mean = flat(robust_mean(trees, weighting, trees[0], 0.4))
    assert (mean <= values.max(0) + NEAR).all()
    assert (mean >= values.min(0) - NEAR).all()
