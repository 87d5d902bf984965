"""Two rounds of any method under one engine, in float32 or float64, for tests that compare
engines.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import plain
import torch
from torch import Tensor

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.records import Reply, State
from fedstill.core.screen import Refusal
from fedstill.data.dataset import Dataset
from fedstill.running.preparation import Prepared, prepare
from loops import Collecting, context_of, states_after

Rounds = tuple[State, list[Reply], list[Refusal]]
"""The state after some rounds, and all replies and refusals on the way."""

CLIENTS = 4
PLAN = {"epochs": 2, "batch": 8, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}


def experiment(name: str, engine: str, **changes: Any) -> Experiment:
    """Four clients of unlike sizes, so that batches are padded and some clients end before
    others.

    Nothing is measured: these tests compare states and replies.
    """
    needs = registry.lookup("method", name).build().requires()
    values: dict[str, Any] = {
        "plan": PLAN,
        "topology": {"clients": CLIENTS},
        "engine": engine,
        "clients": toys.TOLERANT,
        "measure": (),
    }
    if Need.SLIM in needs:  # a network of convolutions, whose steps take long
        values |= {"model": plain.toy_slim.__name__, "plan": {**PLAN, "epochs": 1, "batch": 16}}
    values |= {"model": toys.on_simplex()} if Need.ETF in needs else {}
    values |= {"model": toys.two_networks()} if Need.PAIR in needs else {}
    values |= {"data": {"public": toys.PUBLIC if Need.PUBLIC_DATA in needs else 0}}
    topology = registry.lookup("method", name).build().topology
    if topology == "peer_to_peer":
        values |= {k: v for k, v in toys.suited(name).items() if k in ("rounds", "query")}
        values["plan"] = {**PLAN, "lr": 0.01, "validation": 0.0, "patience": 0, "keep": "last"}
    if topology == "sequential":
        values["topology"] = {"kind": "parallel", "clients": CLIENTS, "sampled": 3}
    values |= changes
    if name == "fedgen":  # Adam at the clients' rate would make rounding large
        values["plan"] = {**values["plan"], "generate": {"lr": 0.001}}
    return toys.toy(**{"method": name, **values})


def rounds(ready: Prepared, count: int = 2) -> Rounds:
    """The state after some rounds, and all replies and refusals on the way."""
    recorder = Collecting()
    with closing(ready.engine()) as engine:
        rounds = min(count, ready.settings.rounds)
        state = states_after(context_of(ready, engine, recorder), rounds)[-1]
    replies = [reply for result in recorder.results for reply in result.accepted]
    refused = [refusal for result in recorder.results for refusal in result.refused]
    return state, replies, refused


def tensors(state: State) -> dict[str, Tensor]:
    """Everything in a state, by name."""
    found = {f"params {k}": v for k, v in state.params.items()}
    for group, value in state.extra.items():
        if isinstance(value, Mapping):
            found |= {f"{group} {k}": v for k, v in value.items()}
        else:
            found[group] = torch.as_tensor(value)
    return found


@functools.cache
def few_blobs() -> Dataset:
    """Enough for several batches a client, and unlike numbers of them."""
    return toys.blobs(size=20 * CLIENTS)


def ready(name: str, engine: str, **changes: Any) -> Prepared:
    """A prepared run."""
    return prepare(resolve(experiment(name, engine, **changes)), few_blobs())
