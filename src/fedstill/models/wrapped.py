"""Any module of a package or a file as a network with a body and a head: its last layer is
replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedstill.core.errors import ConfigError, FedstillError, on_one_line
from fedstill.core.records import ModelSpec
from fedstill.core.registry import lookup, register, short_name
from fedstill.models import building, contract
from fedstill.models.network import InputShape, Network, masked_mean

MASKS = ("attention_mask", "padding_mask", "mask")
"""What a module's parameter may be called that says which tokens are there."""


@register("model", "wrapped")
def wrapped(
    input_shape: InputShape,
    classes: int,
    of: str,
    arguments: dict[str, Any] | None = None,
    *,
    head: str = "",
    output: str = "",
    mask: bool = False,
    vocabulary: int = 0,
) -> Network:
    """Any module by import path, with its last layer replaced by one for the run's classes; the
    remainder is the body.

    Its weights are new: it is built as ``of`` says, and nothing is downloaded.

    of: A module's constructor: an import path, "torchvision.models:resnet18", or a file,
    "nets.py:Net".
    arguments: What it is called with. A table with a key ``of`` becomes the object that this names,
    a config say.
    head: The name of the linear layer that is replaced, "fc" or "classifier.6"; empty: one is put
    behind the module.
    output: Of a module that returns a record: its field with the features; "mean": the mean over
    its tokens.
    mask: Pass on which token ids are no padding.

    Raises ConfigError for a module that cannot be built so, has no such layer, or gives no features
    (B, D).
    """
    spec = ModelSpec("wrapped", input_shape, classes, vocabulary=vocabulary)
    network = _construct(of, building.from_pairs(arguments or {}), spec)
    mask_name = ""
    if mask:
        if not vocabulary:
            raise ConfigError(
                "model.mask = true is for texts: other examples have no padding; leave it out"
            )
        mask_name = _mask_name(network)
    body = Wrapped(network, output, mask_name)
    head_width = 0
    if head:
        head_width = _without_head(network, head)
    features = _features(body, contract.example(spec, 2), of)
    if head_width and head_width != features:
        raise ConfigError(
            f"model.head = {head!r} takes {head_width} features, and {short_name(of)} gives "
            f"{features} without it"
        )
    return Network(body, features, classes)


class Wrapped(nn.Module):
    """A module whose output is features (B, D): as it is, a field of a record, or the mean over
    tokens.
    """

    def __init__(self, inner: nn.Module, output: str, mask: str) -> None:
        super().__init__()
        self.inner = inner
        self.output = output
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        """Features of inputs, numbers or token ids."""
        mask = None
        arguments = {}
        if not x.is_floating_point():
            mask = x != 0
            if self.mask:
                arguments[self.mask] = mask.long()
        out = self.inner(x, **arguments)
        if self.output == "mean":
            return masked_mean(_tokens(out), mask)
        if self.output:
            return _field(out, self.output)  # type: ignore[no-any-return]
        return out  # type: ignore[no-any-return]


def _construct(of: str, arguments: Mapping[str, Any], spec: ModelSpec) -> nn.Module:
    fields = {key: _object(value) for key, value in arguments.items()}
    if ":" not in of and not of.endswith(".py"):
        raise ConfigError(
            f"model.of = {of!r} must be an import path, 'package.module:Name', or a file, "
            "'nets.py:Name'"
        )
    return building.construct(of, spec, fields)


def _object(value: Any) -> Any:
    """A value of a config; a table with ``of`` is the object that calling ``of`` returns."""
    if not isinstance(value, Mapping):
        return value
    arguments = {key: _object(item) for key, item in value.items()}
    if "of" not in arguments:
        return arguments
    target = lookup("model", str(arguments.pop("of"))).target
    try:
        return target(**arguments)
    except Exception as error:
        raise ConfigError(
            f"model.arguments: {value['of']} cannot be made: {on_one_line(error)}"
        ) from error


def _without_head(network: nn.Module, head: str) -> int:
    """Replace a linear layer by the identity; returns its number of inputs."""
    linear = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    if head not in linear:
        raise ConfigError(
            f"model.head = {head!r} is no linear layer of the module; the last ones are "
            f"{linear[-3:]}"
        )
    width = int(network.get_submodule(head).in_features)  # type: ignore[arg-type]
    network.set_submodule(head, nn.Identity())
    return width


def _features(body: Wrapped, x: Tensor, of: str) -> int:
    """How many features a body gives."""
    try:
        with torch.no_grad():
            out = body.eval()(x)
    except FedstillError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{short_name(of)} cannot take examples of shape {tuple(x.shape[1:])}: "
            f"{on_one_line(error)}"
        ) from error
    finally:
        body.train()
    if not isinstance(out, Tensor):
        fields = dir(out)
        if isinstance(out, Mapping):
            fields = list(out)
        public = [name for name in fields if not str(name).startswith("_")]
        raise ConfigError(
            f"{short_name(of)} gives a {type(out).__name__}: set model.output to one of "
            f"{public[:6]}"
        )
    if out.dim() != 2:
        raise ConfigError(
            f"{short_name(of)} gives {tuple(out.shape)}, not features (B, D): set model.head or "
            "model.output = 'mean'"
        )
    return out.shape[1]


def _field(out: Any, name: str) -> Any:
    if isinstance(out, Mapping):
        value = out.get(name)
        content = str(list(out))
    else:
        value = getattr(out, name, None)
        content = type(out).__name__
    if value is None:
        raise ConfigError(f"model.output = {name!r} is not in the module's output: {content}")
    return value


def _tokens(out: Any) -> Tensor:
    """The features of all tokens (B, L, D) in what a module gives."""
    if isinstance(out, Tensor):
        tokens: Any = out
    elif isinstance(out, tuple):
        tokens = out[0]
    else:
        tokens = _field(out, "last_hidden_state")
    if not isinstance(tokens, Tensor) or tokens.dim() != 3:
        raise ConfigError("model.output = 'mean' needs features of tokens (B, L, D)")
    return tokens


def _mask_name(network: nn.Module) -> str:
    parameters = inspect.signature(network.forward).parameters
    for name in MASKS:
        if name in parameters:
            return name
    raise ConfigError(
        f"model.mask = true: {type(network).__name__} has no parameter {', '.join(MASKS[:-1])} or "
        "mask"
    )
