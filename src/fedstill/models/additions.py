"""What a method adds to a network, zeros at first, so that the network gives what it gave and draws
what it drew.

``own_head``: a second last layer, ``own``, beside the head and in no forward pass; a method reads
its logits off the features. ``shift``: a vector ``body.shift`` that is added to the features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedstill.errors import ConfigError
from fedstill.model_spec import ModelSpec
from fedstill.payload import Tensors

ADDED: Mapping[str, str] = {"own_head": "own.", "shift": "body.shift"}
"""How the names of an addition's entries begin."""


def is_added(spec: ModelSpec, name: str) -> bool:
    """Whether an entry of a network is a method's addition."""
    return any(name.startswith(ADDED[what]) for what in spec.adds)


def with_additions(made: nn.Module, spec: ModelSpec) -> nn.Module:
    """The module with what its spec adds; raises ConfigError where there is no linear head to add
    it to.
    """
    body, head = getattr(made, "body", None), getattr(made, "head", None)
    if not isinstance(head, nn.Linear) or not isinstance(body, nn.Module):
        raise ConfigError(
            f"what the method adds to {spec.label} needs submodules body and head, a linear layer; "
            "choose another model"
        )
    if "own_head" in spec.adds:
        made.own = nn.Linear(
            head.in_features, head.out_features, head.bias is not None, dtype=head.weight.dtype
        )
        for value in made.own.parameters():
            nn.init.zeros_(value)
    if "shift" in spec.adds:
        body.shift = nn.Parameter(torch.zeros(head.in_features, dtype=head.weight.dtype))
        body.register_forward_hook(_shifted)
    return made


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
