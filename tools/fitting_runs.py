"""A small run of any method of the package, with whatever it needs: a network, public data,
questions to peers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstill.config.experiment import Experiment
from fedstill.core import registry
from fedstill.core.capabilities import Need

NETWORK = {"name": "mlp", "hidden": (8,)}


def fitting_run(method: str, **changes: Any) -> Experiment:
    """A small run of a method, with what it needs."""
    built = registry.lookup("method", method).build()
    needs = built.requires()
    network: Mapping[str, Any] = NETWORK
    if Need.ETF in needs:
        network = {"name": "etf", "of": "mlp", "arguments": {"hidden": [8]}}
    if Need.SLIM in needs:
        network = {"name": "resnet56"}
    if Need.PAIR in needs:
        network = {
            "name": "pair",
            "own": "mlp",
            "own_arguments": {"hidden": [8]},
            "shared": "logistic",
        }
        if "clients" in changes:
            others = [{**network, "own_arguments": {"hidden": [8] * depth}} for depth in (1, 2)]
            changes["clients"] = {"models": others}
    public = Need.PUBLIC_DATA in needs or changes.get("topology", {}).get("kind") == "public_logits"
    values: dict[str, Any] = {
        "method": method,
        "model": network,
        "rounds": 1 if changes.get("topology", {}).get("kind") == "peer_to_peer" else 2,
        "measure": (),
        "partition": "iid",
        "data": {"public": 12 if public else 0},
        "topology": {"clients": 4},
        "query": {"draw": "single", "fewer_than": 5} if Need.QUERIES in needs else {},
    }
    merged = {**values, **changes}
    merged["topology"] = {**values["topology"], **changes.get("topology", {})}
    return Experiment(**merged)


def own_methods() -> list[str]:
    """The names of the methods of the package."""
    return [
        m
        for m in registry.names("method")
        if registry.lookup("method", m).target.__module__.startswith("fedstill.")
    ]
