"""The methods of the package, and a small experiment that each of them learns in."""

from __future__ import annotations

from plain import toy_slim

import toys
from fedstill.config.experiment import Experiment
from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.method import Method
from fedstill.data.dataset import Dataset

METHODS = [name for name in registry.names("method") if not name.startswith("toy_")]
"""The names of all methods, without those of tests."""

ON_A_CHAIN_ONLY = {"fedseq", "cwc", "metafed"}
"""Methods that do not run in parallel rounds."""

SHORT_PLAN_OF_SLIM = {"epochs": 1, "batch": 20}
"""For a network of convolutions, whose steps take long."""


def built(name: str) -> Method:
    """A method with the defaults of all fields."""
    return registry.lookup("method", name).build()


def needs(name: str, need: Need) -> bool:
    """Whether a method needs this of a run."""
    return need in built(name).requires()


def network_for(name: str) -> dict[str, object]:
    """The key ``model`` of an experiment whose method needs a network of its kind; else nothing."""
    if needs(name, Need.SLIM):
        return {"model": toy_slim.__name__}
    if needs(name, Need.ETF):
        return {"model": toys.on_simplex()}
    if needs(name, Need.PAIR):
        return {"model": toys.two_networks()}
    return {}


def four_clients_of(name: str) -> Experiment:
    """An experiment of three rounds, or of one among peers, in which a method learns."""
    method = built(name)
    plan: dict[str, object] = {"epochs": 2, "batch": 20, "lr": 0.2}
    changes: dict[str, object] = {}
    if method.topology == "peer_to_peer":  # there is one round to learn in
        plan |= {"epochs": 4}
    if needs(name, Need.SLIM):
        plan = SHORT_PLAN_OF_SLIM
        changes = network_for(name)
    if name == "feddf":  # its server trains with the same plan
        plan = {"epochs": 2, "batch": 10, "lr": 0.1}
    if name == "cwc":  # its penalty is steep: importance grows as the way gets shorter
        plan = {"epochs": 4, "batch": 10, "lr": 0.03}
    if method.topology == "public_logits":
        plan |= {"optimiser": "sgd", "teach_server": {"epochs": 16}}
        changes = {"clients": {"models": ("mlp", "logistic")}}
    topology = {"clients": 4}
    return toys.toy(name, **{**toys.suited(name), "topology": topology, "plan": plan, **changes})


def data_of_four() -> Dataset:
    """Fifty examples for each of four clients."""
    return toys.blobs(size=200)
