"""Every method on a table, on series and on texts: it runs under every engine, or one line with its
name refuses it.
"""

from __future__ import annotations

import warnings

import pytest
import stacking
import torch
from all_methods import METHODS, ON_A_CHAIN_ONLY, built, needs

import toys
from double import NEAR, in_double
from fedstill.config.resolve import resolve
from fedstill.core.capabilities import Need
from fedstill.core.errors import IncompatibleMethod
from fedstill.running.preparation import prepare
from kinds import NETWORKS, SHAPES, small_data

pytestmark = pytest.mark.usefixtures("with_threads")

REFUSED = {("fedalign", kind): "slimmable" for kind in SHAPES}
REFUSED |= {("pfnm", "text"): "bag(hidden=(8,), width=6) has embeddings; choose another method"}
"""What cannot run on a kind, and what is said of it."""

ONE_SETTING_OF_PFNM = {
    "name": "pfnm",
    "gamma": (1.0,),
    "variance": (1.0,),
    "prior_variance": (1.0,),
    "passes": 0,
}


def network_of_kind(name: str, kind: str) -> dict[str, object]:
    """The network of a method for data of a kind."""
    network = str(NETWORKS[kind]["name"])
    arguments = {key: value for key, value in NETWORKS[kind].items() if key != "name"}
    if needs(name, Need.ETF):
        return toys.on_simplex(network, **arguments)
    if needs(name, Need.PAIR):
        return {
            "name": "pair",
            "own": network,
            "own_arguments": arguments,
            "shared": network,
            "shared_arguments": arguments,
        }
    return NETWORKS[kind]


def two_rounds(
    name: str, kind: str, engine: str, network: dict[str, object] | None = None
) -> stacking.Rounds:
    """In float64, with warnings as errors: torch warns where a stack would run client after
    client.
    """
    plan: dict[str, object] = dict(stacking.SHORT_PLAN)
    if built(name).topology == "peer_to_peer":
        plan |= {"validation": 0.0, "patience": 0, "keep": "last"}
    changes: dict[str, object] = {
        "model": network or network_of_kind(name, kind),
        "plan": plan,
    }
    if needs(name, Need.PUBLIC_DATA):
        changes["data"] = {"public": 16}
    if name in ON_A_CHAIN_ONLY:
        changes["topology"] = {"clients": 6}
    if name == "pfnm":  # one of its eighteen settings, and few units to match
        changes |= {"method": ONE_SETTING_OF_PFNM, "topology": {"clients": 3}}
    experiment = stacking.experiment(name, engine, **changes)
    ready = in_double(prepare(resolve(experiment), small_data(kind, size=48)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return stacking.rounds(ready)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_runs_on_every_kind_or_is_refused(name: str, kind: str) -> None:
    if (name, kind) in REFUSED:
        with pytest.raises(IncompatibleMethod) as caught:
            two_rounds(name, kind, "serial")
        assert REFUSED[name, kind] in str(caught.value)
        assert "\n" not in str(caught.value)
        return

    # The pooled engine's threads do what the serial engine does: test_every_method.py compares
    # their bits. A table goes through the network that images go through: test_vectorised.py has
    # every method on those. On a chain there is nothing to stack.
    engines = ["vectorised"]
    if name in ON_A_CHAIN_ONLY or kind == "table":
        engines = []
    assert_engines_agree(name, kind, engines)


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        ("table", {"name": "table_resnet", "width": 8, "blocks": 1}),
        ("table", {"name": "ft_transformer", "width": 8, "heads": 2, "blocks": 1}),
        ("text", {"name": "text_cnn", "width": 8}),
        ("text", {"name": "tiny_transformer", "width": 8, "heads": 2, "blocks": 1}),
        ("series", {"name": "sphere_mlp", "hidden": (8,)}),
    ],
    ids=["table_resnet", "ft_transformer", "text_cnn", "tiny_transformer", "sphere_mlp"],
)
def test_every_network_trains_under_every_engine(kind: str, network: dict[str, object]) -> None:
    """With teachers, whose logits are computed once."""
    assert_engines_agree("fedntd", kind, ["pooled", "vectorised"], network)


def assert_engines_agree(
    name: str, kind: str, engines: list[str], network: dict[str, object] | None = None
) -> None:
    """The pooled engine agrees with the serial one to the bit, the vectorised one up to
    rounding.
    """
    serial = two_rounds(name, kind, "serial", network)
    assert serial.replies
    assert not serial.refused
    expected = stacking.tensors(serial.state)
    assert all(bool(value.isfinite().all()) for value in expected.values())

    for engine in engines:
        rounds = two_rounds(name, kind, engine, network)
        assert not rounds.refused
        sizes = [(reply.client, reply.examples) for reply in rounds.replies]
        assert sizes == [(reply.client, reply.examples) for reply in serial.replies]
        ours = stacking.tensors(rounds.state)
        assert ours.keys() == expected.keys()
        tolerance = NEAR
        if engine == "pooled":
            tolerance = 0
        for key, value in expected.items():
            torch.testing.assert_close(
                ours[key], value, rtol=0, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}"
            )
