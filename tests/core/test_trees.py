"""Arithmetic on named tensors, and means of replies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedstill.core import trees
from fedstill.core.aggregation import weighted_mean
from fedstill.core.records import Payload, Reply

A = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}
B = {"w": torch.tensor([3.0, -2.0]), "n": torch.tensor(9)}


def test_arithmetic_makes_new_tensors() -> None:
    assert trees.add(A, B)["w"].tolist() == [4.0, 0.0]
    assert trees.sub(A, B)["w"].tolist() == [-2.0, 4.0]
    assert trees.scale(A, 2.0)["w"].tolist() == [2.0, 4.0]
    copy = trees.clone(A)
    copy["w"].zero_()
    assert A["w"].tolist() == [1.0, 2.0]


def test_the_norm_leaves_integers_out_and_shows_what_is_not_finite() -> None:
    assert trees.norm({"w": torch.tensor([3.0, 4.0]), "n": torch.tensor(100)}) == 5.0
    assert trees.norm({"w": torch.tensor([float("inf")])}) == float("inf")
    assert trees.norm({}) == 0.0


def test_the_mean_keeps_the_first_integers_and_needs_weights() -> None:
    mean = trees.mean([A, B], [1, 3])
    assert mean["w"].tolist() == [2.5, -1.0]
    assert mean["n"].item() == 3
    with pytest.raises(ValueError, match="positive sum"):
        trees.mean([A, B], [0, 0])


def reply(client: int, value: float, examples: int) -> Reply:
    """A reply whose parameters are one number."""
    params = {"w": torch.tensor([value], dtype=torch.float64)}
    return Reply(client, Payload(params=params), examples)


def test_replies_are_averaged_by_size_in_the_order_of_ids() -> None:
    values = np.random.default_rng(0).random(50)
    sizes = np.arange(1, 51)
    replies = [reply(client, values[client], int(sizes[client])) for client in range(50)]

    mean = weighted_mean(replies)

    assert torch.equal(mean["w"], weighted_mean(replies[::-1])["w"]), "in any order of arrival"
    expected = (values * sizes).sum() / sizes.sum()
    assert mean["w"].item() == pytest.approx(expected, rel=1e-12)
    uniform = weighted_mean(replies[:2], weighting="uniform")
    assert uniform["w"].item() == pytest.approx(values[:2].mean(), rel=1e-12)


def test_clients_without_examples_weigh_nothing_unless_none_has_any() -> None:
    of_one = weighted_mean([reply(0, 1.0, 0), reply(1, 5.0, 10)])
    of_none = weighted_mean([reply(0, 1.0, 0), reply(1, 5.0, 0)])
    assert of_one["w"].item() == 5.0
    assert of_none["w"].item() == 3.0
