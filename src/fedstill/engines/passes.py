"""Passes over data without training: logits and features of frozen parameters, gradients, class-wise counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstill.data.inputs import SHARD, Inputs, channels_last
from fedstill.engines.precision import Precision, lowered
from fedstill.keys import generator
from fedstill.models import contract
from fedstill.models.layer_inputs import body_layers, input_products
from fedstill.records import Examples, ModelSpec, Tensors
from fedstill.trees import add, on_cpu


def shards(values: Tensor, inputs: Inputs) -> Iterator[Tensor]:
    """Stored values as inputs, in fixed shards and in their order."""
    for start in range(0, values.shape[0], SHARD):
        yield channels_last(inputs.plain(values[start : start + SHARD]))


@dataclass(frozen=True)
class ModelPasses:
    """Passes of one architecture over examples, in evaluation mode."""

    model: ModelSpec
    inputs: Inputs
    precision: Precision = "fp32"

    def logits(self, params: Tensors, examples: Examples, model: ModelSpec | None = None) -> Tensor:
        """Logits (n, C) in the order of the examples, of this architecture or of another."""
        return self._each(contract.forward, params, examples, model)

    def features(self, params: Tensors, examples: Examples, model: ModelSpec | None = None) -> Tensor:
        """Penultimate features (n, D) in the order of the examples, of this architecture or of another."""
        return self._each(contract.features, params, examples, model)

    def gradients(
        self, params: Tensors, examples: Examples, loss: Any, batch: int, seed: int | None = None
    ) -> Iterator[Tensors]:
        """For each batch of a fixed mixed order, the gradient of its mean ``loss(logits, labels) -> (B,)``.

        ``seed``: what images are augmented from, as in training; without one they are as they are.
        """
        m = contract.module(self.model, "frozen").eval()
        names = contract.trainable_names(self.model)
        order = torch.randperm(len(examples), generator=generator(0))
        varied = None if seed is None else generator(seed)
        for index in torch.split(order, batch):
            on_device = {k: channels_last(v.detach().to(examples.values.device, copy=True)) for k, v in params.items()}
            leaves = {k: v.requires_grad_(k in names) for k, v in on_device.items()}
            values = examples.values[index]
            x = channels_last(self.inputs.trained_on(values, varied) if varied else self.inputs.plain(values))
            loss(contract.forward(m, leaves, x), examples.labels[index]).mean().backward()
            grads = {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in leaves.items() if k in names}
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
        self, run: Callable[..., Tensor], params: Tensors, examples: Examples, model: ModelSpec | None = None
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


def right_by_example(predict: Callable[[Tensor], Tensor], data: Examples, inputs: Inputs) -> Tensor:
    """Which examples are predicted right: (n,) bool, on the CPU."""
    said = [predict(x).argmax(1) for x in shards(data.values, inputs)]
    return (torch.cat(said) == data.labels).cpu() if said else torch.zeros(0, dtype=torch.bool)


def correct_by_class(predict: Callable[[Tensor], Tensor], data: Examples, inputs: Inputs, classes: int) -> Tensor:
    """How many examples of each class are predicted right: (C,) int64."""
    right = torch.zeros(classes, dtype=torch.int64, device=data.labels.device)
    start = 0
    for x in shards(data.values, inputs):
        y = data.labels[start : start + len(x)]
        right.index_add_(0, y, (predict(x).argmax(1) == y).long())
        start += len(x)
    return right.cpu()
