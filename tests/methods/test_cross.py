"""Every method on the topologies of others: it runs and resumes to the same bits, or is refused by
name before.

On its own topology ``test_every_method.py`` stops and resumes it after every stage.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from all_methods import (
    METHODS,
    ON_A_CHAIN_ONLY,
    SHORT_PLAN_OF_SLIM,
    built,
    needs,
    network_for,
)

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.capabilities import Need
from fedstill.core.errors import IncompatibleMethod
from fedstill.running.runner import resume, run
from run_bits import assert_same_bits, bits, stopped

TOPOLOGIES = ("parallel", "sequential", "public_logits", "peer_to_peer")

ON_OTHER_TOPOLOGIES = [
    pytest.param(name, topology, id=f"{name}-{topology}")
    for topology in TOPOLOGIES
    for name in METHODS
    if topology != built(name).topology
]

ON_THEIR_TOPOLOGY_ONLY = {
    name for name in METHODS if built(name).topology in ("peer_to_peer", "public_logits")
}
IN_PARALLEL_ONLY = {
    "feddf",
    "fedbe",
    "fedavgm",
    "feddyn",
    "fednova",
    "feddc",
    "fedgkd_vote",
    "fedrep",
    "ditto",
    "feddbe",
    "fd",
    "fedproto",
    "fedtgp",
    "ccvr",
    "fedgen",
}
REFUSED = {
    "parallel": ON_A_CHAIN_ONLY | ON_THEIR_TOPOLOGY_ONLY,
    "sequential": IN_PARALLEL_ONLY | ON_THEIR_TOPOLOGY_ONLY,
    "public_logits": set(METHODS),
    "peer_to_peer": set(METHODS),
}
"""The table of the documents: which methods do not run in parallel rounds, and which not on a
chain. On the other two, only methods that were made for them run.
"""


def experiment(method: object, topology: str) -> Experiment:
    """Five clients, and what the method and the topology need."""
    name = str(method)
    if isinstance(method, dict):
        name = method["name"]
    values = {
        "rounds": 2,
        "measure": (),
        "topology": {"kind": topology, "clients": 5, "sampled": 3},
        "plan": {"epochs": 1, "batch": 20, "lr": 0.02},
        **network_for(name),
    }
    if topology == "peer_to_peer":
        values["rounds"] = 1
        values["topology"] = {"kind": topology, "clients": 5}
    if needs(name, Need.SLIM):
        values["plan"] = SHORT_PLAN_OF_SLIM
    if needs(name, Need.PUBLIC_DATA) or topology == "public_logits":
        values["data"] = {"public": toys.PUBLIC}
    if needs(name, Need.QUERIES):
        values["query"] = {"draw": "single", "fewer_than": 5}
    return toys.toy(method, **values)


@pytest.mark.parametrize(("name", "topology"), ON_OTHER_TOPOLOGIES)
def test_it_runs_and_resumes_to_the_same_bits_or_is_refused_by_name(
    name: str, topology: str, tmp_path: Path
) -> None:
    toy = experiment(name, topology)
    uninterrupted = tmp_path / "uninterrupted"
    if name in REFUSED[topology]:
        with pytest.raises(IncompatibleMethod) as caught:
            run(toy, uninterrupted, data=toys.blobs())
        message = str(caught.value)
        assert name in message
        assert topology in message
        assert "\n" not in message
        assert not uninterrupted.exists(), "refused before anything is written"
        return

    run(toy, uninterrupted, data=toys.blobs())
    stages = {"sequential": 3}.get(topology, 1)
    resumed = stopped(toy, tmp_path / "resumed", stages)
    resume(resumed, data=toys.blobs())

    assert_same_bits(bits(resumed), bits(uninterrupted))


@pytest.mark.parametrize(
    ("method", "topology", "reason"),
    [
        ("fednova", "sequential", "method fednova on topology sequential: .*method fedseq"),
        ("fedavgm", "sequential", "plan.momentum .* topology.kind"),
        ("feddyn", "sequential", "choose method fedprox"),
        ("feddc", "sequential", "mean drift .* topology.kind"),
        ("fedrep", "sequential", "topology.before = 'head'"),
        ("ditto", "sequential", "topology.before = 'personal'"),
        ("fedgen", "sequential", "topology.server = 'generate'"),
        ("ccvr", "sequential", "set topology.kind = 'parallel'"),
        ("fedproto", "sequential", "topology.kind"),
        ("feddbe", "sequential", "topology.first = 'means'"),
        ("fedgkd_vote", "sequential", "topology.server = 'weigh'"),
        ("feddf", "sequential", "set topology.kind = 'parallel'"),
        ("fedbe", "sequential", "set topology.kind = 'parallel'"),
        ({"name": "fedcurv", "scope": "last_round"}, "sequential", "method.scope = 'all_seen'"),
        ("metafed", "parallel", "topology.kind"),
        ("fedseq", "parallel", "method fedavg.* topology.kind"),
        ("cwc", "parallel", "topology.kind"),
        ("fedavg", "peer_to_peer", "stage 'refine' of topology peer_to_peer"),
    ],
)
def test_a_refusal_says_why(method: object, topology: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleMethod, match=reason):
        run(experiment(method, topology), tmp_path / "run", data=toys.blobs())


def test_cwc_refuses_lseg_together_with_clipped_gradients() -> None:
    toy = toys.toy({"name": "cwc", "lseg": True}, plan={"clip_norm": 1.0})
    with pytest.raises(IncompatibleMethod, match=r"plan\.clip_norm = 0"):
        run(toy, None, data=toys.blobs())
