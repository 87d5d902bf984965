"""Arithmetic on named tensors, and means of replies."""

from __future__ import annotations

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
    return Reply(
        client, Payload(params={"w": torch.tensor([value], dtype=torch.float64)}), examples
    )


def test_replies_are_averaged_by_size_in_the_order_of_ids() -> None:
    values = torch.rand(50, generator=torch.Generator().manual_seed(0)).tolist()
    replies = [reply(c, v, c + 1) for c, v in enumerate(values)]
    there, back = weighted_mean(replies), weighted_mean(replies[::-1])
    assert torch.equal(there["w"], back["w"]), "the order of arrival cannot matter"
    exact = sum(v * (c + 1) for c, v in enumerate(values)) / sum(range(1, 51))
    assert there["w"].item() == pytest.approx(exact, rel=1e-12)
    assert weighted_mean(replies[:2], weighting="uniform")["w"].item() == pytest.approx(
        sum(values[:2]) / 2, rel=1e-12
    )


def test_clients_without_examples_weigh_nothing_unless_none_has_any() -> None:
    assert weighted_mean([reply(0, 1.0, 0), reply(1, 5.0, 10)])["w"].item() == 5.0
    assert weighted_mean([reply(0, 1.0, 0), reply(1, 5.0, 0)])["w"].item() == 3.0
