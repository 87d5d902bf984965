"""Passes over data without training: logits, features and gradients at fixed parameters, counts of
correct predictions, and the cost of passes.

Shards have a fixed size, so that the bits do not depend on the number of examples.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedstill.core.keys import generator
from fedstill.core.records import Examples, ModelSpec, Tensors
from fedstill.core.trees import on_cpu
from fedstill.data.inputs import Inputs
from fedstill.engines.hardware import Precision, at_precision, run_in_parallel
from fedstill.models import contract
from fedstill.models.functional import SHARD, channels_last
from fedstill.models.predictors import CombinedPredictor, Predictor

LONG_SHARD = 0.002
"""The duration in seconds from which shards run in threads. With shorter shards, threads would wait
for the interpreter as long as they compute.
"""

Predict = Callable[[Tensor], Tensor]
"""A function from inputs to logits."""

T = TypeVar("T")


def shards(values: Tensor, inputs: Inputs) -> Iterator[Tensor]:
    """Stored values as inputs, in shards of a fixed size and in order."""
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
        """The logits (n, C) in the order of the examples; model: another architecture."""
        return self._outputs(contract.forward, params, examples, model)

    def features(
        self, params: Tensors, examples: Examples, model: ModelSpec | None = None
    ) -> Tensor:
        """The penultimate features (n, D) in the order of the examples; model: another
        architecture.
        """
        return self._outputs(contract.features, params, examples, model)

    def gradients(
        self, params: Tensors, examples: Examples, loss: Any, batch: int, seed: int | None = None
    ) -> Iterator[Tensors]:
        """The gradient of the mean of ``loss(logits, labels) -> (B,)``, for each batch. Examples
        are shuffled, with the same order in every call.

        seed: if given, images are augmented as in training.
        """
        module = contract.module(self.model, "frozen").eval()
        trainable = contract.trainable_names(self.model)
        device = examples.values.device
        entries = {name: channels_last(v.detach().to(device)) for name, v in params.items()}
        pixel_draws = None
        if seed is not None:
            pixel_draws = generator(seed)

        order = torch.randperm(len(examples), generator=generator(0))
        for index in torch.split(order, batch):
            # New leaves for each batch, because gradients would accumulate in the old ones.
            leaves = {
                name: v.clone().requires_grad_(name in trainable) for name, v in entries.items()
            }
            x = self._inputs(examples.values[index], pixel_draws)
            with _backward_of(module, device):
                losses = loss(contract.forward(module, leaves, x), examples.labels[index])
                losses.mean().backward()
            trained = {name: leaf for name, leaf in leaves.items() if name in trainable}
            yield on_cpu({name: _gradient(leaf) for name, leaf in trained.items()})

    def _inputs(self, values: Tensor, pixel_draws: torch.Generator | None) -> Tensor:
        if pixel_draws is None:
            return channels_last(self.inputs.plain(values))
        return channels_last(self.inputs.trained_on(values, pixel_draws))

    def run(
        self,
        function: Callable[[nn.Module, Tensors, Tensor], T],
        params: Tensors,
        examples: Examples,
        model: ModelSpec | None = None,
    ) -> Iterator[T]:
        """``function(network, params, x)`` for each shard of the examples, in order."""
        network = contract.module(model or self.model, "frozen").eval()
        device = examples.values.device
        tensors = {name: channels_last(tensor.to(device)) for name, tensor in params.items()}
        for x in shards(examples.values, self.inputs):
            with torch.no_grad():
                output = function(network, tensors, x)
            yield output

    def _outputs(
        self,
        function: Callable[[nn.Module, Tensors, Tensor], Tensor],
        params: Tensors,
        examples: Examples,
        model: ModelSpec | None = None,
    ) -> Tensor:
        run_at_precision = at_precision(function, self.precision, examples.values.device)
        outputs = list(self.run(run_at_precision, params, examples, model))
        if outputs:
            return torch.cat(outputs)
        spec = model or self.model
        columns = spec.classes
        if function is contract.features:
            columns = contract.width(spec)
        return torch.zeros(0, columns)


def _gradient(leaf: Tensor) -> Tensor:
    """A leaf's gradient; zeros if the loss does not depend on the leaf."""
    if leaf.grad is None:
        return torch.zeros_like(leaf)
    return leaf.grad


def _backward_of(module: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """A context in which a network in evaluation mode supports backward passes. For recurrent
    layers, cuDNN only supports them in training mode, so torch's own kernels are used.
    """
    if device.type == "cuda" and any(isinstance(m, nn.RNNBase) for m in module.modules()):
        return without_cudnn()
    return nullcontext()


def by_shard(
    function: Callable[[Tensor], T],
    predict: Predict,
    examples: Examples,
    inputs: Inputs,
    workers: int = 1,
) -> list[T]:
    """The result of a function of a predictor's logits for each shard, in the order of the
    examples.

    workers: the number of shards that run in parallel on the CPU, if torch has one thread, a shard
    takes long enough, and threads may share the predictor. The bits do not depend on it.
    """

    def run(start: int) -> T:
        return function(predict(_shard(examples.values, start, inputs)))

    starts = range(0, len(examples), SHARD)
    if not starts or not _may_use_threads(predict, examples, workers):
        return [run(start) for start in starts]

    began = time.perf_counter()
    first_result = run(starts[0])
    is_long = time.perf_counter() - began > LONG_SHARD
    if not is_long:
        return [first_result, *(run(start) for start in starts[1:])]
    jobs = [partial(run, start) for start in starts[1:]]
    return [first_result, *run_in_parallel(jobs, workers)]


def _may_use_threads(predict: Predict, examples: Examples, workers: int) -> bool:
    if workers < 2 or torch.get_num_threads() > 1 or examples.values.device.type != "cpu":
        return False
    # The library's predictors use a separate module in each thread; other predictors may not.
    inner = inspect.unwrap(predict)
    predictors: Sequence[Any] = [inner]
    if isinstance(inner, CombinedPredictor):
        predictors = inner.predictors
    return all(isinstance(p, Predictor) for p in predictors)


def correct_by_example(
    predict: Predict, examples: Examples, inputs: Inputs, workers: int = 1
) -> Tensor:
    """Whether each prediction is correct, (n,) bool on the CPU; ``workers`` as in ``by_shard``."""
    predicted = by_shard(_most_likely, predict, examples, inputs, workers)
    if not predicted:
        return torch.zeros(0, dtype=torch.bool)
    return (torch.cat(predicted) == examples.labels).cpu()


def correct_by_class(
    predict: Predict, examples: Examples, inputs: Inputs, classes: int, workers: int = 1
) -> Tensor:
    """The number of correct predictions by class, (C,) int64 on the CPU; ``workers`` as in
    ``by_shard``.
    """
    predicted = by_shard(_most_likely, predict, examples, inputs, workers)
    return counted_right(predicted, examples.labels, classes).cpu()


@dataclass(frozen=True)
class Outputs:
    """The outputs of a predictor, on the CPU: logits (n, C) and predicted classes (n,)."""

    logits: Tensor
    predicted: Tensor

    def take(self, positions: Tensor) -> Outputs:
        """The outputs at these positions."""
        return Outputs(self.logits[positions], self.predicted[positions])


def outputs_by_example(
    predict: Predict, examples: Examples, inputs: Inputs, workers: int = 1
) -> Outputs:
    """The logits and predicted classes of one or more examples; ``workers`` as in ``by_shard``."""
    shards = by_shard(_logits_and_class, predict, examples, inputs, workers)
    logits = torch.cat([shard[0] for shard in shards])
    predicted = torch.cat([shard[1] for shard in shards])
    return Outputs(logits.detach().cpu(), predicted.cpu())


def _logits_and_class(logits: Tensor) -> tuple[Tensor, Tensor]:
    # Classes are predicted on the device, as in functions that do not return logits.
    return logits, logits.argmax(1)


def _most_likely(logits: Tensor) -> Tensor:
    return logits.argmax(1)


def counted_right(predicted: Sequence[Tensor], labels: Tensor, classes: int) -> Tensor:
    """The number of correct predictions by class, (C,) int64 on the device of the labels (n,).

    predicted: the predicted classes of all examples, in parts.
    """
    counts = torch.zeros(classes, dtype=torch.int64, device=labels.device)
    if not predicted:
        return counts
    is_right = torch.cat(list(predicted)) == labels
    return counts.index_add_(0, labels, is_right.long())


@contextmanager
def without_cudnn() -> Iterator[None]:
    """A context in which torch uses its own kernels instead of cuDNN's."""
    # torch.backends.cudnn.flags() would reset cuDNN's other settings.
    was_enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = was_enabled


# ---- the cost of a pass --------------------------------------------------------------------------

# Operations and activations are counted once for each architecture, in the forward pass of one
# example.


@lru_cache(maxsize=64)
def forward_flops(model: ModelSpec) -> float:
    """The floating-point operations of one example's forward pass. Like torch's counter, this only
    counts matrix products and convolutions.
    """
    counter = _ProductCounter()
    _forward_under(counter, model)
    return float(counter.count)


@lru_cache(maxsize=64)
def embedding_size(model: ModelSpec) -> int:
    """The number of entries of a network's embeddings. A pass reads only a few of them, but a step
    computes a gradient for all.
    """
    embeddings = [m for m in contract.module(model).modules() if isinstance(m, nn.Embedding)]
    return sum(embedding.weight.numel() for embedding in embeddings)


@lru_cache(maxsize=64)
def activations(model: ModelSpec) -> int:
    """The number of activations of a network in one example's forward pass, without views."""
    counter = _ActivationCounter()
    _forward_under(counter, model)
    return counter.count


def step_flops(model: ModelSpec, batch: float) -> float:
    """The floating-point operations of a training step. A backward pass counts as two forward
    passes. For embeddings, only the gradient and the update count.
    """
    return 3 * forward_flops(model) * batch + 2 * embedding_size(model)


def _forward_under(counter: _Counter, model: ModelSpec) -> None:
    """Run one example's forward pass under a counter."""
    # Tensors without values (the meta device) would take no memory. But with them, torch imports
    # its compiler to compute the shape of a ReLU's result, which takes a second.
    module = contract.module(model, "frozen").eval()
    entries = dict((*module.named_parameters(), *module.named_buffers()))
    x = contract.example(model, 1)
    with counter, torch.no_grad():
        contract.forward(module, entries, x)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums up a count over the operations of a pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because nothing is compiled under a counter. Otherwise torch would import its
        compiler, which takes about a second.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.count += self.counted(func, args, kwargs, result)
        return result

    def counted(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """The contribution of an operation."""
        raise NotImplementedError


class _ProductCounter(_Counter):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations of products, with the formulas of torch's counter."""

    def counted(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """The number of operations of a product; 0 for other operations."""
        formula = flop_registry.get(func.overloadpacket)
        if formula is None:
            return 0
        return int(formula(*args, **kwargs, out_val=result))


class _ActivationCounter(_Counter):  # type: ignore[no-untyped-call]
    """Counts the floating-point numbers that operations return, without views."""

    def counted(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """The number of floating-point numbers in the result of an operation; 0 for a view."""
        if any(returned.alias_info for returned in func._schema.returns):
            return 0
        values = result
        if not isinstance(result, (tuple, list)):
            values = (result,)
        return sum(
            value.numel()
            for value in values
            if isinstance(value, Tensor) and value.is_floating_point()
        )
