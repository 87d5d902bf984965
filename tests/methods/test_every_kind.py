"""Every method on a table, on series and on texts: it runs under every engine, or one line with its
name refuses it.
"""

from __future__ import annotations

import warnings

import pytest
import stacking
import torch

import toys
from double import NEAR, in_double
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.errors import IncompatibleMethod
from fedstill.running.preparation import prepare
from kinds import NETWORKS, SHAPES, small_data

pytestmark = pytest.mark.usefixtures("with_threads")

METHODS = [n for n in registry.names("method") if not n.startswith("toy_")]
REFUSED = {("fedalign", kind): "slimmable" for kind in SHAPES}
REFUSED |= {("pfnm", "text"): "bag(hidden=(8,), width=6) has embeddings; choose another method"}
"""What cannot run on a kind, and what is said of it."""

ON_A_CHAIN_ONLY = {"fedseq", "cwc", "metafed"}
"""Nothing is side by side there."""


def two_rounds(name: str, kind: str, engine: str, network: object = None) -> stacking.Rounds:
    """In float64, with warnings as errors: torch warns where a stack would run client after
    client.
    """
    method = registry.lookup("method", name).build()
    plan: dict[str, object] = {**stacking.PLAN, "epochs": 1, "batch": 16}
    changes: dict[str, object] = {"model": network or NETWORKS[kind], "plan": plan}
    if Need.ETF in method.requires():
        own = NETWORKS[kind]
        changes["model"] = toys.on_simplex(
            str(own["name"]), **{k: v for k, v in own.items() if k != "name"}
        )
    if method.topology == "peer_to_peer":
        changes["plan"] = {**plan, "validation": 0.0, "patience": 0, "keep": "last"}
    if Need.PUBLIC_DATA in method.requires():
        changes["data"] = {"public": 16}
    if Need.PAIR in method.requires():
        own = {k: v for k, v in NETWORKS[kind].items() if k != "name"}
        two = {
            f"{who}{what}": v
            for who in ("own", "shared")
            for what, v in (("", NETWORKS[kind]["name"]), ("_arguments", own))
        }
        changes["model"] = {"name": "pair", **two}
    if name in ON_A_CHAIN_ONLY:
        changes["topology"] = {"clients": 6}
    if name == "pfnm":  # one of its eighteen settings, and few units to match
        one = {"gamma": (1.0,), "variance": (1.0,), "prior_variance": (1.0,), "passes": 0}
        changes |= {"method": {"name": name, **one}, "topology": {"clients": 3}}
    ready = in_double(
        prepare(resolve(stacking.experiment(name, engine, **changes)), small_data(kind, size=48))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return stacking.rounds(ready)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_runs_on_every_kind_or_is_refused(name: str, kind: str) -> None:
    if (name, kind) in REFUSED:
        with pytest.raises(IncompatibleMethod) as raised:
            two_rounds(name, kind, "serial")
        assert REFUSED[name, kind] in str(raised.value)
        assert "\n" not in str(raised.value)
        return
    # The pooled engine's threads do what the serial engine does: test_every_method.py compares
    # their bits. A table goes through the network that images go through: test_vectorised.py has
    # every method on those.
    alone = name in ON_A_CHAIN_ONLY or kind == "table"
    assert_engines_agree(name, kind, [] if alone else ["vectorised"])


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        ("table", {"name": "table_resnet", "width": 8, "blocks": 1}),
        ("table", {"name": "ft_transformer", "width": 8, "heads": 2, "blocks": 1}),
        ("text", {"name": "text_cnn", "width": 8}),
        ("text", {"name": "tiny_transformer", "width": 8, "heads": 2, "blocks": 1}),
        ("series", {"name": "sphere_mlp", "hidden": (8,)}),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else value,
)
def test_every_network_trains_under_every_engine(kind: str, network: dict[str, object]) -> None:
    """With teachers, whose logits are computed once."""
    assert_engines_agree("fedntd", kind, ["pooled", "vectorised"], network)


def assert_engines_agree(name: str, kind: str, engines: list[str], network: object = None) -> None:
    """The pooled engine to the bit, the vectorised one up to rounding."""
    state, replies, refused = two_rounds(name, kind, "serial", network)
    assert replies
    assert not refused
    expected = stacking.tensors(state)
    assert all(bool(v.isfinite().all()) for v in expected.values())
    for engine in engines:
        other, theirs, gone = two_rounds(name, kind, engine, network)
        assert not gone
        got = stacking.tensors(other)
        assert got.keys() == expected.keys()
        assert [(r.client, r.examples) for r in theirs] == [(r.client, r.examples) for r in replies]
        for key, value in expected.items():
            if engine == "pooled":
                assert torch.equal(got[key], value), key
            else:
                torch.testing.assert_close(
                    got[key], value, rtol=0, atol=NEAR, msg=lambda m, k=key: f"{k}: {m}"
                )
