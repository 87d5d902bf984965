"""Passes over examples in shards: the same bits in several threads, where threads pay off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fedstill.core.errors import MethodFailed
from fedstill.core.records import Examples
from fedstill.data.inputs import Inputs
from fedstill.engines import passes
from fedstill.engines.hardware import torch_threads
from fedstill.engines.passes import Predict, by_shard, correct_by_class, correct_by_example
from fedstill.models.contract import initial, spec_for
from fedstill.models.functional import SHARD
from fedstill.models.predictors import CombinedPredictor, MeanOfProbabilities, predictor
from fedstill.running.driver import as_hook

SPEC = spec_for("tiny_cnn", (1, 8, 8), 4)
INPUTS = Inputs()


def examples(count: int) -> Examples:
    """Random images of four classes."""
    draw = torch.Generator().manual_seed(3)
    images = torch.rand(count, 1, 8, 8, generator=draw)
    return Examples(images, torch.randint(4, (count,), generator=draw))


def network(seed: int) -> Any:
    """The predictor of a network without training."""
    return predictor(SPEC, initial(SPEC, seed))


def wrapped() -> Predict:
    """A predictor whose errors name the function that returned it."""
    return as_hook("a method", "predictors", "after round 1", network(0))


@pytest.fixture(autouse=True)
def short_shards_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small networks are run in threads, too."""
    monkeypatch.setattr(passes, "LONG_SHARD", 0.0)
    with torch_threads(1):
        yield


COMBINED = CombinedPredictor([network(0), network(1)], MeanOfProbabilities())


@pytest.mark.parametrize("predict", [network(0), COMBINED, wrapped()])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_shards_side_by_side_give_the_bits_of_one_after_another(
    predict: Predict, workers: int
) -> None:
    data = examples(7 * SHARD + 3)
    expected_logits = torch.cat([predict(shard) for shard in data.values.split(SHARD)])
    names: set[str] = set()

    def unchanged(logits: Tensor) -> Tensor:
        names.add(threading.current_thread().name)
        return logits

    logits = by_shard(unchanged, predict, data, INPUTS, workers)

    assert torch.equal(torch.cat(logits), expected_logits)
    assert any(name.startswith("shard") for name in names) == (workers > 1)
    is_correct = expected_logits.argmax(1) == data.labels
    assert torch.equal(correct_by_example(predict, data, INPUTS, workers), is_correct)
    by_class = data.labels[is_correct].bincount(minlength=4).tolist()
    assert correct_by_class(predict, data, INPUTS, 4, workers).tolist() == by_class


def test_a_function_of_somebodys_own_is_called_by_one_thread() -> None:
    names = []

    def predict(x: Tensor) -> Tensor:
        names.append(threading.current_thread().name)
        return x.flatten(1)[:, :4]

    by_shard(lambda logits: logits, predict, examples(5 * SHARD), INPUTS, workers=2)
    assert names == [threading.current_thread().name] * 5


@pytest.mark.parametrize("reason", ["more torch threads", "short shards"])
def test_shards_stay_in_one_thread(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "short shards":
        monkeypatch.setattr(passes, "LONG_SHARD", 1e9)
    thread_count = 1
    if reason == "more torch threads":
        thread_count = 2
    names: set[str] = set()

    def add_thread(logits: Tensor) -> None:
        names.add(threading.current_thread().name)

    with torch_threads(thread_count):
        by_shard(add_thread, network(0), examples(5 * SHARD), INPUTS, workers=2)

    assert names == {threading.current_thread().name}


def test_what_a_predictor_raises_names_its_part() -> None:
    data = Examples(torch.zeros(3 * SHARD, 2, 8, 8), torch.zeros(3 * SHARD, dtype=torch.int64))
    with pytest.raises(MethodFailed, match=r"round 1: str\.predictors"):
        correct_by_example(wrapped(), data, INPUTS, workers=2)


def test_no_examples() -> None:
    nothing = examples(0)
    assert correct_by_example(network(0), nothing, INPUTS, workers=2).shape == (0,)
    assert correct_by_class(network(0), nothing, INPUTS, 4, workers=2).tolist() == [0] * 4
