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
from fedstill.core.records import ModelSpec, as_table_again
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
    head: str = "",
    output: str = "",
    mask: bool = False,
    vocabulary: int = 0,
) -> Network:
    """Any module by import path, its last layer replaced by one for the run's classes; the rest is
    the body.

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
    made = _made(of, as_table_again(arguments or {}), spec)
    if mask and not vocabulary:
        raise ConfigError(
            "model.mask = true is for texts: other examples have no padding; leave it out"
        )
    body = Wrapped(made, output, _mask_name(made) if mask else "")
    width = _without_head(made, head) if head else 0
    given = _features(body, contract.example(spec, 2), of)
    if width and width != given:
        raise ConfigError(
            f"model.head = {head!r} takes {width} features, and {short_name(of)} gives {given} "
            "without it"
        )
    return Network(body, given, classes)


class Wrapped(nn.Module):
    """A module whose output is features (B, D): as it is, a field of a record, or the mean over
    tokens.
    """

    def __init__(self, inner: nn.Module, output: str, mask: str) -> None:
        super().__init__()
        self.inner, self.output, self.mask = inner, output, mask

    def forward(self, x: Tensor) -> Tensor:
        """Features of inputs, numbers or token ids."""
        there = None if x.is_floating_point() else x != 0
        out = self.inner(
            x, **({self.mask: there.long()} if self.mask and there is not None else {})
        )
        if self.output == "mean":
            return masked_mean(_tokens(out), there)
        return _field(out, self.output) if self.output else out  # type: ignore[no-any-return]


def _made(of: str, arguments: Mapping[str, Any], spec: ModelSpec) -> nn.Module:
    fields = {key: _object(value) for key, value in arguments.items()}
    if ":" not in of and not of.endswith(".py"):
        raise ConfigError(
            f"model.of = {of!r} must be an import path, 'package.module:Name', or a file, "
            "'nets.py:Name'"
        )
    return building.construct(of, spec, fields)


def _object(value: Any) -> Any:
    """A value of a config; a table with ``of`` is what calling that gives."""
    if not isinstance(value, Mapping):
        return value
    own = {key: _object(one) for key, one in value.items()}
    if "of" not in own:
        return own
    target = lookup("model", str(own.pop("of"))).target
    try:
        return target(**own)
    except Exception as error:
        raise ConfigError(
            f"model.arguments: {value['of']} cannot be made: {on_one_line(error)}"
        ) from error


def _without_head(made: nn.Module, head: str) -> int:
    """Replace a linear layer by one that changes nothing; how many features it took."""
    linear = [name for name, layer in made.named_modules() if isinstance(layer, nn.Linear)]
    if head not in linear:
        raise ConfigError(
            f"model.head = {head!r} is no linear layer of the module; the last ones are "
            f"{linear[-3:]}"
        )
    width = int(made.get_submodule(head).in_features)  # type: ignore[arg-type]
    made.set_submodule(head, nn.Identity())
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
        named = [
            name
            for name in (out if isinstance(out, Mapping) else dir(out))
            if not str(name).startswith("_")
        ]
        raise ConfigError(
            f"{short_name(of)} gives a {type(out).__name__}: set model.output to one of {named[:6]}"
        )
    if out.dim() != 2:
        raise ConfigError(
            f"{short_name(of)} gives {tuple(out.shape)}, not features (B, D): set model.head or "
            "model.output = 'mean'"
        )
    return out.shape[1]


def _field(out: Any, name: str) -> Any:
    value = out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)
    if value is None:
        fields = list(out) if isinstance(out, Mapping) else type(out).__name__
        raise ConfigError(f"model.output = {name!r} is not what the module gives: {fields}")
    return value


def _tokens(out: Any) -> Tensor:
    """The features of all tokens (B, L, D) in what a module gives."""
    tokens = (
        out
        if isinstance(out, Tensor)
        else out[0]
        if isinstance(out, tuple)
        else _field(out, "last_hidden_state")
    )
    if not isinstance(tokens, Tensor) or tokens.dim() != 3:
        raise ConfigError("model.output = 'mean' needs features of tokens (B, L, D)")
    return tokens


def _mask_name(made: nn.Module) -> str:
    named = inspect.signature(made.forward).parameters
    name = next((name for name in MASKS if name in named), "")
    if not name:
        raise ConfigError(
            f"model.mask = true: {type(made).__name__} has no parameter {', '.join(MASKS[:-1])} or "
            "mask"
        )
    return name
