"""Robust means against formulas written out in NumPy, and what a hostile tree can do to them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from double import NEAR
from fedstill.core.aggregation import ROBUST, weighted_mean
from fedstill.core.records import Payload, Reply
from fedstill.core.robust_means import clipped_mean, krum, robust_mean, trimmed_mean


def trees_of(values: np.ndarray) -> list[dict[str, torch.Tensor]]:
    """Each row as a tree of two entries and a counter."""
    return [
        {
            "a": torch.from_numpy(v[:3].copy()),
            "b": torch.from_numpy(v[3:].reshape(2, 2).copy()),
            "n": torch.tensor(i),
        }
        for i, v in enumerate(values)
    ]


def flat(tree) -> np.ndarray:
    return np.concatenate([tree["a"].numpy().ravel(), tree["b"].numpy().ravel()])


@pytest.fixture(params=[4, 7])
def values(request: pytest.FixtureRequest) -> np.ndarray:
    return np.random.default_rng(request.param).normal(size=(request.param, 7))


def test_the_trimmed_mean_leaves_out_the_ends_of_each_entry(values: np.ndarray) -> None:
    want = [np.mean(sorted(column)[1:-1]) for column in values.T]
    got = trimmed_mean(trees_of(values), 1)
    np.testing.assert_allclose(flat(got), want, rtol=NEAR)
    assert got["n"] == 0
    np.testing.assert_allclose(
        flat(trimmed_mean(trees_of(values), 0)), values.mean(0), rtol=NEAR, atol=NEAR
    )


def test_the_median_is_that_of_each_entry(values: np.ndarray) -> None:
    np.testing.assert_allclose(
        flat(robust_mean(trees_of(values), "median", None, 0.1)),
        np.median(values, axis=0),
        rtol=NEAR,
    )


def test_norm_clipping_cuts_changes_to_the_median_norm(values: np.ndarray) -> None:
    start = np.random.default_rng(0).normal(size=7)
    changes = values - start
    norms = np.sqrt((changes**2).sum(1))
    want = start + np.mean(
        [c * min(1, np.median(norms) / n) for c, n in zip(changes, norms, strict=True)], axis=0
    )
    np.testing.assert_allclose(
        flat(clipped_mean(trees_of(values), trees_of(start[None])[0])), want, rtol=1e-9
    )
    assert flat(clipped_mean(trees_of(np.zeros_like(values)), None)).any() == False  # noqa: E712


def test_krum_takes_the_tree_nearest_to_its_neighbours(values: np.ndarray) -> None:
    n, hostile = len(values), 1 if len(values) > 4 else 0
    scores = []
    for i in range(n):
        apart = sorted(((values[i] - values[j]) ** 2).sum() for j in range(n) if j != i)
        scores.append(sum(apart[: n - hostile - 2]))
    chosen = krum(trees_of(values), 1)
    assert chosen == int(np.argmin(scores))
    taken = robust_mean(trees_of(values), "krum", None, 1.5 / n)
    assert taken["n"] == chosen
    np.testing.assert_array_equal(flat(taken), values[chosen])


@pytest.mark.parametrize("how", sorted(ROBUST))
def test_no_client_alone_moves_it_beyond_the_others(how: str) -> None:
    """Any one of five, sent anywhere, whatever number of examples it claims; the plain mean goes
    there with it.
    """
    honest = np.random.default_rng(1).normal(size=(4, 7))
    for far, at in itertools.product((1e6, -1e6), range(5)):
        sent = trees_of(np.insert(honest, at, far, axis=0))
        replies = [
            Reply(i, Payload(params=t), 10**7 if i == at else 10) for i, t in enumerate(sent)
        ]
        start = trees_of(np.zeros((1, 7)))[0]
        got = weighted_mean(replies, weighting=how, start=start, suspected=0.25)
        assert np.abs(flat(got)).max() < np.abs(honest).sum()
        assert np.abs(flat(weighted_mean(replies))).max() > 1e5


@pytest.mark.parametrize("how", sorted(ROBUST))
@pytest.mark.parametrize("count", [1, 2])
def test_of_one_or_two_it_is_something_between_them(how: str, count: int) -> None:
    values = np.random.default_rng(2).normal(size=(count, 7))
    got = flat(robust_mean(trees_of(values), how, trees_of(values[:1])[0], 0.4))
    assert (got <= values.max(0) + NEAR).all()
    assert (got >= values.min(0) - NEAR).all()
