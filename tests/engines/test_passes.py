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


def some(count: int) -> Examples:
    draw = torch.Generator().manual_seed(3)
    return Examples(
        torch.rand(count, 1, 8, 8, generator=draw), torch.randint(4, (count,), generator=draw)
    )


def one(seed: int) -> Any:
    return predictor(SPEC, initial(SPEC, seed))


def wrapped() -> Predict:
    return as_hook("a method", "predictors", "after round 1", one(0))


@pytest.fixture(autouse=True)
def short_shards_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(passes, "LONG_SHARD", 0.0)
    with torch_threads(1):
        yield


@pytest.mark.parametrize(
    "predict", [one(0), CombinedPredictor([one(0), one(1)], MeanOfProbabilities()), wrapped()]
)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_shards_side_by_side_give_the_bits_of_one_after_another(
    predict: Predict, workers: int
) -> None:
    data = some(7 * SHARD + 3)
    before = [predict(data.values[i : i + SHARD]) for i in range(0, len(data), SHARD)]
    names: set[str] = set()

    def kept(logits: Tensor) -> Tensor:
        names.add(threading.current_thread().name)
        return logits

    logits = by_shard(kept, predict, data, INPUTS, workers)
    assert torch.equal(torch.cat(logits), torch.cat(before))
    assert any(name.startswith("shard") for name in names) == (workers > 1)
    right = torch.cat(before).argmax(1) == data.labels
    assert torch.equal(correct_by_example(predict, data, INPUTS, workers), right)
    by_class = [int(right[data.labels == c].sum()) for c in range(4)]
    assert correct_by_class(predict, data, INPUTS, 4, workers).tolist() == by_class


def test_a_function_of_somebodys_own_is_called_by_one_thread() -> None:
    names = []

    def predict(x: Tensor) -> Tensor:
        names.append(threading.current_thread().name)
        return x.flatten(1)[:, :4]

    by_shard(lambda z: z, predict, some(5 * SHARD), INPUTS, workers=2)
    assert names == [threading.current_thread().name] * 5


@pytest.mark.parametrize("why", ["more torch threads", "short shards"])
def test_shards_stay_in_one_thread(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "short shards":
        monkeypatch.setattr(passes, "LONG_SHARD", 1e9)
    names: set[str] = set()
    with torch_threads(2 if why == "more torch threads" else 1):
        by_shard(
            lambda _: names.add(threading.current_thread().name),
            one(0),
            some(5 * SHARD),
            INPUTS,
            workers=2,
        )
    assert names == {threading.current_thread().name}


def test_what_a_predictor_raises_names_its_part() -> None:
    data = Examples(torch.zeros(3 * SHARD, 2, 8, 8), torch.zeros(3 * SHARD, dtype=torch.int64))
    with pytest.raises(MethodFailed, match=r"round 1: str\.predictors"):
        correct_by_example(wrapped(), data, INPUTS, workers=2)


def test_no_examples() -> None:
    assert correct_by_example(one(0), some(0), INPUTS, workers=2).shape == (0,)
    assert correct_by_class(one(0), some(0), INPUTS, 4, workers=2).tolist() == [0] * 4
