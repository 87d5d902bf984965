"""Every method on the topologies of others: it runs and resumes to the same bits, or is refused by
name before.

On its own topology ``test_every_method.py`` stops and resumes it after every stage.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from plain import toy_slim

import toys
from fedstill.config.experiment import Experiment
from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.errors import IncompatibleMethod
from fedstill.running.runner import resume, run
from run_bits import assert_same_bits, bits, stopped

METHODS = [n for n in registry.names("method") if not n.startswith("toy_")]
TOPOLOGIES = ["parallel", "sequential", "public_logits", "peer_to_peer"]

OTHERS = [
    (name, topology)
    for name in METHODS
    for topology in TOPOLOGIES
    if topology != registry.lookup("method", name).build().topology
]

ON_A_CHAIN_ONLY = {"fedseq", "cwc", "metafed"}
ON_ITS_OWN_ONLY = {
    n
    for n in METHODS
    if registry.lookup("method", n).build().topology in ("peer_to_peer", "public_logits")
}
SIDE_BY_SIDE_ONLY = {
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
}
SIDE_BY_SIDE_ONLY |= {"fd", "fedproto", "fedtgp", "ccvr", "fedgen"}
REFUSED = {
    "parallel": ON_A_CHAIN_ONLY | ON_ITS_OWN_ONLY,
    "sequential": SIDE_BY_SIDE_ONLY | ON_ITS_OWN_ONLY,
}
"""The table of the documents: which methods do not run side by side, and which not on a chain."""


def experiment(method: object, topology: str) -> Experiment:
    name = method["name"] if isinstance(method, dict) else method
    needs = registry.lookup("method", str(name)).build().requires()
    slim = (
        {"model": toy_slim.__name__, "plan": {"epochs": 1, "batch": 20}}
        if Need.SLIM in needs
        else {}
    )
    slim |= {"model": toys.on_simplex()} if Need.ETF in needs else {}
    slim |= {"model": toys.two_networks()} if Need.PAIR in needs else {}
    size = {} if topology == "peer_to_peer" else {"sampled": 3}
    public = (
        {"data": {"public": toys.PUBLIC}}
        if Need.PUBLIC_DATA in needs or topology == "public_logits"
        else {}
    )
    asked = {"query": {"draw": "single", "fewer_than": 5}} if Need.QUERIES in needs else {}
    changes = {
        "rounds": 1 if topology == "peer_to_peer" else 2,
        "measure": (),
        "topology": {"kind": topology, "clients": 5, **size},
        "plan": {"epochs": 1, "batch": 20, "lr": 0.02},
    }
    return toys.toy(method, **{**changes, **slim, **public, **asked})


@pytest.mark.parametrize(("name", "topology"), OTHERS)
def test_it_runs_and_resumes_to_the_same_bits_or_is_refused_by_name(
    name: str, topology: str, tmp_path: Path
) -> None:
    toy = experiment(name, topology)
    try:
        run(toy, tmp_path / "whole", data=toys.blobs())
    except IncompatibleMethod as refusal:
        text = str(refusal)
        assert name in text
        assert topology in text
        assert "\n" not in text
        assert not (tmp_path / "whole").exists(), "refused before anything is written"
        assert name in REFUSED.get(topology, METHODS), text
        return
    assert name not in REFUSED.get(topology, ())
    parts = stopped(toy, tmp_path / "parts", stages=3 if topology == "sequential" else 1)
    resume(parts, data=toys.blobs())
    assert_same_bits(bits(parts), bits(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("method", "topology", "words"),
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
def test_a_refusal_says_why(method: object, topology: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleMethod, match=words):
        run(experiment(method, topology), tmp_path / "run", data=toys.blobs())


def test_cwcs_gradient_of_the_loss_alone_cannot_be_told_under_clipping() -> None:
    toy = toys.toy({"name": "cwc", "lseg": True}, plan={"clip_norm": 1.0})
    with pytest.raises(IncompatibleMethod, match=r"plan\.clip_norm = 0"):
        run(toy, None, data=toys.blobs())
