"""A small run of any method of the package, with the network, data and queries that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstill.config.experiment import Experiment
from fedstill.core import registry
from fedstill.core.capabilities import Need

PUBLIC_EXAMPLES = 12


def fitting_run(method: str, **changes: Any) -> Experiment:
    """A small run of a method; ``changes`` replace its settings, those of the topology one by
    one.
    """
    needs = registry.lookup("method", method).build().requires()
    topology = {"clients": 4, **changes.get("topology", {})}
    settings: dict[str, Any] = {
        "method": method,
        "model": fitting_network(needs),
        "rounds": 2,
        "measure": (),
        "partition": "iid",
        "data": {"public": 0},
        "query": {},
    }
    if topology.get("kind") == "peer_to_peer":
        settings["rounds"] = 1
    if Need.PUBLIC_DATA in needs or topology.get("kind") == "public_logits":
        settings["data"] = {"public": PUBLIC_EXAMPLES}
    if Need.QUERIES in needs:
        settings["query"] = {"draw": "single", "fewer_than": 5}
    settings.update(changes)
    settings["topology"] = topology
    if Need.PAIR in needs and "clients" in changes:
        settings["clients"] = {"models": [pair_of_networks(depth=1), pair_of_networks(depth=2)]}
    return Experiment(**settings)


def fitting_network(needs: Need) -> Mapping[str, Any]:
    """A small network for a method with these needs."""
    if Need.PAIR in needs:
        return pair_of_networks(depth=1)
    if Need.SLIM in needs:
        return {"name": "resnet56"}
    if Need.ETF in needs:
        return {"name": "etf", "of": "mlp", "arguments": {"hidden": [8]}}
    return {"name": "mlp", "hidden": (8,)}


def pair_of_networks(depth: int) -> Mapping[str, Any]:
    """A pair of a client's network, with this number of hidden layers, and a shared network."""
    return {
        "name": "pair",
        "own": "mlp",
        "own_arguments": {"hidden": [8] * depth},
        "shared": "logistic",
    }


def package_methods() -> list[str]:
    """The names of the methods of the package; other packages may have registered more."""
    names = []
    for name in registry.names("method"):
        module = registry.lookup("method", name).target.__module__
        if module.startswith("fedstill."):
            names.append(name)
    return names
