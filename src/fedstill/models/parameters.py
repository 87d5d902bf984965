"""Parameters that a method adds to a network, and parameters that stay frozen."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedstill.core.errors import ConfigError
from fedstill.core.payload import Tensors
from fedstill.core.records import ModelSpec, matches

# What a method adds to a network, zeros at first, so that the network gives what it gave and draws
# what it drew.
#
# ``own_head``: a second last layer, ``own``, beside the head and in no forward pass; a method reads
# its logits off the features. ``shift``: a vector ``body.shift`` that is added to the features.


ADDED: Mapping[str, str] = {"own_head": "own.", "shift": "body.shift"}
"""How the names of an addition's entries begin."""


def is_added(spec: ModelSpec, name: str) -> bool:
    """Whether an entry of a network is a method's addition."""
    return any(name.startswith(ADDED[addition]) for addition in spec.adds)


def with_additions(network: nn.Module, spec: ModelSpec) -> nn.Module:
    """The module with the additions of its spec. Raises ConfigError if it has no body and linear
    head.
    """
    body = getattr(network, "body", None)
    head = getattr(network, "head", None)
    if not isinstance(head, nn.Linear) or not isinstance(body, nn.Module):
        raise ConfigError(
            f"what the method adds to {spec.label} needs submodules body and head, a linear layer; "
            "choose another model"
        )
    if "own_head" in spec.adds:
        own_head = nn.Linear(
            head.in_features, head.out_features, head.bias is not None, dtype=head.weight.dtype
        )
        for value in own_head.parameters():
            nn.init.zeros_(value)
        network.own = own_head
    if "shift" in spec.adds:
        body.shift = nn.Parameter(torch.zeros(head.in_features, dtype=head.weight.dtype))
        body.register_forward_hook(_shifted)
    return network


def own_logits(params: Tensors, features: Tensor) -> Tensor:
    """Logits (B, C) of features (B, D) under the second last layer."""
    return nn.functional.linear(features, params["own.weight"], params.get("own.bias"))


def with_both_heads(params: Tensors) -> dict[str, Tensor]:
    """The network whose head gives the sum of both heads' logits: two linear layers on one input
    add up to one.
    """
    sums = {
        f"head.{k}": params[f"head.{k}"] + params[f"own.{k}"]
        for k in ("weight", "bias")
        if f"own.{k}" in params
    }
    return {**params, **sums}


def _shifted(body: nn.Module, _: Any, features: Tensor) -> Tensor:
    shift: Any = body.shift  # a tensor of whose parameters it is run with
    return features + shift  # type: ignore[no-any-return]


# Entries of a network that stay as a file has them: they are in its module, are not trained, and
# are never sent.


_held: dict[str, Tensors] = {}
"""Held entries by their SHA-256: all modules of this process share them."""


def hold(entries: Tensors) -> str:
    """Keep entries for the modules of this process; the SHA-256 by which a ``ModelSpec`` names
    them.
    """
    sha256 = sha256_of(entries)
    _held[sha256] = {name: value.detach() for name, value in entries.items()}
    return sha256


def sha256_of(entries: Tensors) -> str:
    """The SHA-256 of entries with their names, shapes and types."""
    sha256 = hashlib.sha256()
    for name, value in sorted(entries.items()):
        sha256.update(f"{name} {tuple(value.shape)} {value.dtype}\0".encode())
        sha256.update(value.detach().cpu().contiguous().numpy().tobytes())
    return sha256.hexdigest()


def held_entries(spec: ModelSpec) -> Tensors:
    """The entries that a network holds; raises ConfigError where this process lacks them."""
    if not spec.held:
        return {}
    if spec.held not in _held:
        raise ConfigError(
            f"the entries that {spec.label} holds are not here; name their file in start_from"
        )
    return _held[spec.held]


def put_in(network: nn.Module, spec: ModelSpec) -> nn.Module:
    """The module with its held entries, which need no gradient; raises ConfigError where this
    process lacks them.
    """
    if not spec.held:
        return network
    entries = held_entries(spec)
    fixed = {name: value for name, value in entries.items() if not matches(name, spec.trains)}
    network.load_state_dict(fixed, strict=False, assign=True)
    for name, value in network.named_parameters():
        value.requires_grad_(name not in fixed)
    return network
