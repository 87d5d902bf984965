"""Passes over data without training: logits and features of frozen parameters, gradients,
class-wise counts.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedstill.core.keys import generator
from fedstill.core.records import Examples, ModelSpec, Tensors
from fedstill.core.trees import add, on_cpu
from fedstill.data.inputs import SHARD, Inputs, channels_last
from fedstill.engines.cores import side_by_side
from fedstill.engines.precision import Precision, lowered, without_cudnn
from fedstill.models import contract
from fedstill.models.ensemble import Joined
from fedstill.models.functional import body_layers, input_products

LONG = 0.002
"""Seconds of a shard; of shorter ones, threads side by side wait for the interpreter as long as
they compute.
"""

Predict = Callable[[Tensor], Tensor]
T = TypeVar("T")


def shards(values: Tensor, inputs: Inputs) -> Iterator[Tensor]:
    """Stored values as inputs, in fixed shards and in their order."""
    for start in range(0, values.shape[0], SHARD):
        yield _shard(values, start, inputs)


def _shard(values: Tensor, start: int, inputs: Inputs) -> Tensor:
    return channels_last(inputs.plain(values[start : start + SHARD]))


@dataclass(frozen=True)
class ModelPasses:
    """Passes of one architecture over examples, in evaluation mode."""

    model: ModelSpec
    inputs: Inputs
    precision: Precision = "fp32"

    def logits(self, params: Tensors, examples: Examples, model: ModelSpec | None = None) -> Tensor:
        """Logits (n, C) in the order of the examples, of this architecture or of another."""
        return self._each(contract.forward, params, examples, model)

    def features(
        self, params: Tensors, examples: Examples, model: ModelSpec | None = None
    ) -> Tensor:
        """Penultimate features (n, D) in the order of the examples, of this architecture or of
        another.
        """
        return self._each(contract.features, params, examples, model)

    def gradients(
        self, params: Tensors, examples: Examples, loss: Any, batch: int, seed: int | None = None
    ) -> Iterator[Tensors]:
        """For each batch of a fixed mixed order, the gradient of its mean
        ``loss(logits, labels) -> (B,)``.

        ``seed``: what images are augmented from, as in training; without one they are as they are.
        """
        m = contract.module(self.model, "frozen").eval()
        names = contract.trainable_names(self.model)
        order = torch.randperm(len(examples), generator=generator(0))
        varied = None if seed is None else generator(seed)
        device = examples.values.device
        there = {k: channels_last(v.detach().to(device)) for k, v in params.items()}
        for index in torch.split(order, batch):
            leaves = {k: v.clone().requires_grad_(k in names) for k, v in there.items()}
            values = examples.values[index]
            x = channels_last(
                self.inputs.trained_on(values, varied) if varied else self.inputs.plain(values)
            )
            with _backward_of(m, device):
                loss(contract.forward(m, leaves, x), examples.labels[index]).mean().backward()
            grads = {
                k: torch.zeros_like(v) if v.grad is None else v.grad
                for k, v in leaves.items()
                if k in names
            }
            yield on_cpu(grads)

    def input_products(self, params: Tensors, examples: Examples) -> Tensors:
        """The sums of a a^T (d, d) over the inputs a of each layer of the body, float64."""
        m = contract.module(self.model, "frozen").eval()
        there = {k: channels_last(v.to(examples.values.device)) for k, v in params.items()}
        sums = {name: torch.zeros(d, d, dtype=torch.float64) for name, d in body_layers(m).items()}
        for x in shards(examples.values, self.inputs):
            sums = add(sums, input_products(m, there, x))
        return sums

    def _each(
        self,
        run: Callable[..., Tensor],
        params: Tensors,
        examples: Examples,
        model: ModelSpec | None = None,
    ) -> Tensor:
        m = contract.module(model or self.model, "frozen").eval()
        params = {k: channels_last(v.to(examples.values.device)) for k, v in params.items()}
        run_at = lowered(run, self.precision, examples.values.device)
        with torch.no_grad():
            out = [run_at(m, params, x) for x in shards(examples.values, self.inputs)]
        if out:
            return torch.cat(out)
        spec = model or self.model
        return torch.zeros(0, contract.width(spec) if run is contract.features else spec.classes)


def _backward_of(m: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """cuDNN knows no backward pass of recurrent layers in a network that is only evaluated: torch's
    own does it.
    """
    if device.type != "cuda" or not any(isinstance(layer, nn.RNNBase) for layer in m.modules()):
        return nullcontext()
    return without_cudnn()


def by_shard(
    act: Callable[[Tensor], T], predict: Predict, data: Examples, inputs: Inputs, workers: int = 1
) -> list[T]:
    """``act`` on a predictor's logits of each fixed shard, in the order of the examples.

    workers: How many shards at once on the CPU, if torch has one thread, a shard takes long enough,
    and threads may share the predictor. The bits do not depend on it.
    """

    def one(start: int) -> T:
        return act(predict(_shard(data.values, start, inputs)))

    jobs = [partial(one, start) for start in range(0, len(data), SHARD)]
    if (
        workers < 2
        or torch.get_num_threads() > 1
        or data.values.device.type != "cpu"
        or not _is_shared(predict)
    ):
        return [job() for job in jobs]
    began = time.perf_counter()
    first = [job() for job in jobs[:1]]
    apart = time.perf_counter() - began > LONG
    return first + (side_by_side(jobs[1:], workers) if apart else [job() for job in jobs[1:]])


def right_by_example(predict: Predict, data: Examples, inputs: Inputs, workers: int = 1) -> Tensor:
    """Which examples are predicted right: (n,) bool, on the CPU; ``workers`` as in ``by_shard``."""
    said = by_shard(lambda logits: logits.argmax(1), predict, data, inputs, workers)
    return (torch.cat(said) == data.labels).cpu() if said else torch.zeros(0, dtype=torch.bool)


def correct_by_class(
    predict: Predict, data: Examples, inputs: Inputs, classes: int, workers: int = 1
) -> Tensor:
    """How many examples of each class are predicted right: (C,) int64; ``workers`` as in
    ``by_shard``.
    """
    said = by_shard(lambda logits: logits.argmax(1), predict, data, inputs, workers)
    return counted_right(said, data.labels, classes).cpu()


def counted_right(said: Sequence[Tensor], labels: Tensor, classes: int) -> Tensor:
    """How often the classes said (n,), in parts, are the labels (n,): by class (C,) int64, where
    these are.
    """
    counts = torch.zeros(classes, dtype=torch.int64, device=labels.device)
    return (
        counts.index_add_(0, labels, (torch.cat(list(said)) == labels).long()) if said else counts
    )


def _is_shared(predict: Predict) -> bool:
    """Whether threads may share a predictor: each runs a library's predictor in a module of its
    own.
    """
    inner = inspect.unwrap(predict)
    return all(
        isinstance(p, contract.Predictor)
        for p in (inner.each if isinstance(inner, Joined) else [inner])
    )
