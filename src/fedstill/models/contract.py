"""The interface of models: building, initial weights, forward passes, and capabilities.

A model with two submodules ``body`` and ``head`` and ``forward(x) = head(body(x))`` has *features*
(the output of its body) and a *head* (its last layer). Any other ``nn.Module`` has logits only.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedstill.core.capabilities import Need
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.keys import restoring_global_state, seed_global
from fedstill.core.records import ModelSpec, Plan, Tensors, as_pairs
from fedstill.core.trees import only
from fedstill.models.functional import features as features
from fedstill.models.functional import forward as forward
from fedstill.models.functional import head as head
from fedstill.models.functional import run_part as run_part
from fedstill.models.functional import run_with as run_with

NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
"""Layers whose behaviour differs between training and evaluation because they gather statistics."""


@functools.cache
def thread_modules() -> threading.local:
    """The modules of each thread."""
    return threading.local()


def build(spec: ModelSpec) -> nn.Module:
    """A new module of a spec, on the CPU. Its initial weights are drawn from torch's global
    generator.

    Raises ConfigError if the model cannot be built for this input shape and class count.
    """
    from fedstill.models import building  # lazy, because modules are built rarely

    return building.build(spec)


def example(spec: ModelSpec, count: int) -> Tensor:
    """A batch of zeros (count, *input_shape): float32, or int64 (padding) for token ids."""
    kind = torch.int64 if spec.vocabulary else torch.float32
    return torch.zeros(count, *spec.input_shape, dtype=kind)


def module(spec: ModelSpec, role: str = "student") -> nn.Module:
    """The module of this thread for a spec and role. It runs other parameters; its weights are not
    used.
    """
    cache: dict[tuple[ModelSpec, str], nn.Module]
    cache = thread_modules().__dict__.setdefault("cache", {})
    if (spec, role) not in cache:
        with restoring_global_state(cuda=True):
            cache[spec, role] = build(spec)
    return cache[spec, role]


def initial(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Initial parameters and buffers of a spec, a pure function of the seed."""
    with restoring_global_state(cuda=True):
        seed_global(seed)  # all generators, since a user's network may be initialised on a GPU
        network = build(spec)
    return {k: v.detach().clone() for k, v in entries(spec, network).items()}


def entries(spec: ModelSpec, network: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module that are trained and sent."""
    state: dict[str, Tensor] = network.state_dict()
    return {name: value for name, value in state.items() if spec.sends(name)}


@functools.lru_cache(maxsize=1024)
def size(spec: ModelSpec) -> int:
    """The number of values that a client sends for a model of a spec, buffers included."""
    return sum(v.numel() for v in entries(spec, module(spec)).values())


@functools.lru_cache(maxsize=1024)
def width(spec: ModelSpec) -> int:
    """D, the number of features of a model: the outputs of its body, which are its head's inputs.

    Raises IncompatibleMethod if the body does not return (B, D), AttributeError if there is no
    body.
    """
    params = {k: v.detach() for k, v in entries(spec, module(spec, "frozen").eval()).items()}
    with torch.no_grad():
        z = features(module(spec, "frozen"), params, example(spec, 2))
    if z.dim() != 2:
        raise IncompatibleMethod(
            f"the body of {spec} returns {tuple(z.shape)} instead of features (B, D): end it with "
            "Flatten"
        )
    return z.shape[1]


def trainable_names(spec: ModelSpec) -> set[str]:
    """The names of the parameters that are trained. The other entries of a state are buffers or
    frozen parameters.
    """
    parameters = module(spec).named_parameters()
    return {name for name, value in parameters if value.requires_grad and spec.sends(name)}


def trainable_entries(spec: ModelSpec, params: Tensors) -> dict[str, Tensor]:
    """The entries of a model that are trained, in the order of their names."""
    return only(params, sorted(trainable_names(spec)))


def capabilities(spec: ModelSpec) -> Need:
    """The needs of a method that a network meets by its structure (``OF_NETWORKS``)."""
    from fedstill.models.layer_chain import levels
    from fedstill.models.resnet import slim_stage

    m = module(spec)
    offered = Need.NOTHING
    if _has_parts(m, "own", "shared"):
        offered |= Need.PAIR
    if not _has_parts(m, "body", "head"):
        return offered
    offered |= Need.FEATURES | Need.HEAD
    if getattr(m.head, "simplex", False) is True:
        offered |= Need.ETF
    if levels(m):
        offered |= Need.LEVELS
    if slim_stage(m):
        offered |= Need.SLIM
    return offered


def _has_parts(m: nn.Module, *names: str) -> bool:
    """Whether a module has submodules of these names."""
    return all(isinstance(getattr(m, name, None), nn.Module) for name in names)


def spec_for(
    name: str,
    input_shape: tuple[int, ...],
    classes: int,
    fields: Mapping[str, Any] | None = None,
    vocabulary: int = 0,
) -> ModelSpec:
    """The spec of a registered or imported model. Its fields are sorted, so that equal settings
    give equal specs.
    """
    return ModelSpec(name, input_shape, classes, as_pairs(fields or {}), vocabulary=vocabulary)


# Properties of a network that trial passes on one or two examples show.


@functools.lru_cache(maxsize=1024)
def draws_random_numbers(spec: ModelSpec, training: bool = True) -> bool:
    """Whether a forward pass draws from torch's global generator, as dropout and noise do.

    training: whether the network is in training mode. A network with dropout layers draws. For
    other networks, a trial pass on two examples of zeros decides; if it fails, the result is False.
    """
    m = module(spec, "frozen")
    if training and any(
        isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0 for layer in m.modules()
    ):
        return True
    try:
        return _draws_in_forward(m.train(training), example(spec, 2))
    except Exception:
        # If the network fails on real examples as well, the run reports the error.
        return False
    finally:
        m.eval()


@functools.lru_cache(maxsize=1024)
def needs_two_examples(spec: ModelSpec, norm: str = "batch") -> bool:
    """Whether a network in training mode takes batches of two examples but not of one, like batch
    normalisation of features.

    If so, a last batch of one example joins the previous batch (``Plan.leaves_one_over``). norm: as
    in a ``Plan``. The trial uses constant examples, so that a server and its sites get the same
    result.
    """
    return not _trains_on(spec, 1, norm) and _trains_on(spec, 2, norm)


def joins_last_example(spec: ModelSpec, plan: Plan, examples: int) -> bool:
    """Whether the last example of an epoch joins the previous batch, because the network cannot be
    trained on a single example.
    """
    return plan.leaves_one_over(examples) and needs_two_examples(spec, plan.norm)


def freeze_norms(m: nn.Module) -> None:
    """Put the normalisation layers of a network into evaluation mode (``norm = "frozen"`` in a
    plan).
    """
    for layer in m.modules():
        if isinstance(layer, NORMS):
            layer.eval()


def _trains_on(spec: ModelSpec, count: int, norm: str) -> bool:
    """Whether a network in training mode takes a batch of ``count`` examples. Its statistics do not
    change.
    """
    m = module(spec, "frozen").train()
    if norm == "frozen":
        freeze_norms(m)
    x = torch.ones_like(example(spec, count))  # not zeros, because token id 0 is padding
    try:
        with restoring_global_state(cuda=True), torch.no_grad():
            forward(m, {name: value.clone() for name, value in m.named_buffers()}, x)
    except Exception:  # a user's network may raise anything
        return False
    finally:
        m.eval()
    return True


def _draws_in_forward(m: nn.Module, x: Tensor) -> bool:
    """Whether a forward pass draws from torch's generator. Statistics do not change."""
    freeze_norms(m)
    with restoring_global_state(cuda=True), torch.no_grad():
        state = torch.get_rng_state()
        forward(m, {name: value.clone() for name, value in m.named_buffers()}, x)
        return not torch.equal(torch.get_rng_state(), state)
