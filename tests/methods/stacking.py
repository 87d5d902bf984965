"""Two rounds of any method under one engine, in float32 or float64, for tests that compare
engines.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import closing
from typing import Any, NamedTuple

import torch
from all_methods import built, needs, network_for
from torch import Tensor

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.capabilities import Need
from fedstill.core.records import Reply, State
from fedstill.core.screen import Refusal
from fedstill.data.dataset import Dataset
from fedstill.running.preparation import Prepared, prepare
from loops import Collecting, context_of, states_after

CLIENTS = 4
PLAN = {"epochs": 2, "batch": 8, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
SHORT_PLAN = {**PLAN, "epochs": 1, "batch": 16}
"""Half as many batches, of twice as many examples."""


class Rounds(NamedTuple):
    """What some rounds end with."""

    state: State
    replies: list[Reply]
    """Those of all rounds."""
    refused: list[Refusal]


def experiment(name: str, engine: str, **changes: Any) -> Experiment:
    """Four clients with different numbers of examples, so that batches are padded and some clients
    end before others.

    Nothing is measured: these tests compare states and replies.
    """
    values: dict[str, Any] = {
        "method": name,
        "plan": PLAN,
        "topology": {"clients": CLIENTS},
        "engine": engine,
        "clients": toys.TOLERANT,
        "measure": (),
        **network_for(name),
    }
    if needs(name, Need.SLIM):  # a network of convolutions, whose steps take long
        values["plan"] = SHORT_PLAN
    if needs(name, Need.PUBLIC_DATA):
        values["data"] = {"public": toys.PUBLIC}
    match built(name).topology:
        case "peer_to_peer":
            suited = toys.suited(name)
            values |= {key: suited[key] for key in ("rounds", "query") if key in suited}
            values["plan"] = {**PLAN, "lr": 0.01, "validation": 0.0, "patience": 0, "keep": "last"}
        case "sequential":
            values["topology"] = {"kind": "parallel", "clients": CLIENTS, "sampled": 3}
    values |= changes
    if name == "fedgen":  # Adam at the clients' rate would make rounding large
        values["plan"] = {**values["plan"], "generate": {"lr": 0.001}}
    return toys.toy(**values)


def rounds(ready: Prepared, count: int = 2) -> Rounds:
    """Run the first rounds of a run."""
    recorder = Collecting()
    with closing(ready.engine()) as engine:
        context = context_of(ready, engine, recorder)
        states = states_after(context, min(count, ready.settings.rounds))
    return Rounds(
        state=states[-1],
        replies=[reply for result in recorder.results for reply in result.accepted],
        refused=[refusal for result in recorder.results for refusal in result.refused],
    )


def tensors(state: State) -> dict[str, Tensor]:
    """Everything in a state, by name."""
    by_name = {f"params {name}": value for name, value in state.params.items()}
    for group, value in state.extra.items():
        if isinstance(value, Mapping):
            by_name |= {f"{group} {name}": entry for name, entry in value.items()}
        else:
            by_name[group] = torch.as_tensor(value)
    return by_name


@functools.cache
def few_blobs() -> Dataset:
    """Enough for several batches of a client, and different numbers of them."""
    return toys.blobs(size=20 * CLIENTS)


def ready(name: str, engine: str, **changes: Any) -> Prepared:
    """A prepared run."""
    return prepare(resolve(experiment(name, engine, **changes)), few_blobs())
