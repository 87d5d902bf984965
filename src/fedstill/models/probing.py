"""What a pass of two examples tells of a network before it is trained."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from fedstill import registry
from fedstill.keys import put_aside
from fedstill.models import contract
from fedstill.records import ModelSpec, Plan


@functools.lru_cache(maxsize=1024)
def draws_random_numbers(spec: ModelSpec, training: bool = True) -> bool:
    """Whether a forward pass draws from torch's global generator: dropout, noise; ``training``: in
    training mode.

    A layer of dropout is seen; whatever else draws, a pass of two examples without content tells. A
    network that can take none of these is said not to draw.
    """
    m = contract.module(spec, "frozen")
    if training and any(
        isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0 for layer in m.modules()
    ):
        return True
    try:
        return _moves(m.train(training), contract.example(spec, 2))
    except (
        Exception
    ):  # the run's own examples, which it will be given, tell whether it can take any
        return False
    finally:
        m.eval()


@functools.lru_cache(maxsize=1024)
def needs_two_examples(spec: ModelSpec, norm: str = "batch") -> bool:
    """Whether a network in training mode takes two examples, and fails on one: batch normalisation
    of features does.

    ``norm``: as in a ``Plan``. A left-over example then joins the batch before it
    (``Plan.leaves_one_over``). Examples without content tell, so that a server and its sites come
    to the same answer.
    """
    return not _trains_on(spec, 1, norm) and _trains_on(spec, 2, norm)


def joins_last_example(spec: ModelSpec, plan: Plan, examples: int) -> bool:
    """Whether the last example of an epoch joins the batch before it, for a network cannot be
    trained on it alone.
    """
    return plan.leaves_one_over(examples) and needs_two_examples(spec, plan.norm)


def freeze_norms(m: nn.Module) -> None:
    """Put the normalisation layers of a network into evaluation mode, as ``norm = "frozen"`` of a
    plan has it.
    """
    for layer in m.modules():
        if isinstance(layer, contract.NORMS):
            layer.eval()


def is_of_library(spec: ModelSpec) -> bool:
    """Whether a network is one that the library has, and not a user's, nor made of one."""
    names = (spec.name, *(str(v) for k, v in spec.fields if k in ("of", "own", "shared")))
    return all(
        str(registry.lookup("model", name).target.__module__).startswith("fedstill.models.")
        for name in names
    )


@functools.lru_cache(maxsize=64)
def built_size(spec: ModelSpec) -> int:
    """How many parameters a network of the library has, told by shapes alone: no memory is taken
    for them.
    """
    with put_aside(), torch.device("meta"):
        return sum(
            value.numel()
            for value in contract.built(spec.name, spec, dict(spec.fields)).parameters()
        )


def _trains_on(spec: ModelSpec, count: int, norm: str) -> bool:
    """Whether a network in training mode takes so many examples at once; the module keeps its
    statistics.
    """
    m = contract.module(spec, "frozen").train()
    if norm == "frozen":
        freeze_norms(m)
    entries = {
        name: value.detach().clone() for name, value in (*m.named_parameters(), *m.named_buffers())
    }
    x = torch.ones_like(contract.example(spec, count))  # of token ids, zeros would be padding alone
    try:
        with put_aside(card=True), torch.no_grad():
            contract.forward(m, entries, x)
    except Exception:  # whatever a network raises, it would raise in training
        return False
    finally:
        m.eval()
    return True


def _moves(m: nn.Module, x: Tensor) -> bool:
    """Whether a pass moves the generator; statistics of the module stay as they are."""
    freeze_norms(m)
    with put_aside(card=True), torch.no_grad():
        before = torch.get_rng_state()
        contract.forward(m, {name: value.clone() for name, value in m.named_buffers()}, x)
        return not torch.equal(torch.get_rng_state(), before)
