"""Builds networks from their specs: looks up the constructor, passes it the arguments that follow
from the data, and inserts additions of a method and held entries.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedstill.core import registry
from fedstill.core.errors import ConfigError, FedstillError
from fedstill.core.keys import restoring_global_state
from fedstill.core.payload import Tensors
from fedstill.core.records import ModelSpec, matches
from fedstill.core.registry import short_name
from fedstill.models.network import ImageShape, RowShape, SeriesShape

# Parameters that a method adds to a network. They are 0 at first, so that the initial outputs of
# the network, and its random draws, do not change.
#
# ``own_head``: a second head ``own``, which the forward pass does not use; the method computes its
# logits from the features. ``shift``: a vector ``body.shift`` that is added to the features.


ADDED: Mapping[str, str] = {"own_head": "own.", "shift": "body.shift"}
"""The prefix of an addition's entries."""


def is_added(spec: ModelSpec, name: str) -> bool:
    """Whether an entry of a network is a method's addition."""
    return any(name.startswith(ADDED[addition]) for addition in spec.adds)


def with_additions(network: nn.Module, spec: ModelSpec) -> nn.Module:
    """Add the additions of a spec to a network. Raises ConfigError if the network has no body and
    linear head.
    """
    body = getattr(network, "body", None)
    head = getattr(network, "head", None)
    if not isinstance(head, nn.Linear) or not isinstance(body, nn.Module):
        raise ConfigError(
            f"the method adds parameters to {spec.label}, which must have submodules body and head "
            "(a linear layer); choose another model"
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


def personal_logits(params: Tensors, features: Tensor) -> Tensor:
    """Logits (B, C) of the second head from features (B, D)."""
    return nn.functional.linear(features, params["own.weight"], params.get("own.bias"))


def with_both_heads(params: Tensors) -> dict[str, Tensor]:
    """The parameters of a network whose head is the sum of both heads, so that its logits are the
    sum of theirs.
    """
    sums = {
        f"head.{k}": params[f"head.{k}"] + params[f"own.{k}"]
        for k in ("weight", "bias")
        if f"own.{k}" in params
    }
    return {**params, **sums}


def _shifted(body: nn.Module, _: Any, features: Tensor) -> Tensor:
    shift: Any = body.shift  # the tensor of the parameters with which the body is run
    return features + shift  # type: ignore[no-any-return]


# Held entries of a network: frozen parameters from a file. They are part of its module, and are
# neither trained nor sent.


_held: dict[str, Tensors] = {}
"""Held entries by their SHA-256. All modules of this process share them."""


def hold(entries: Tensors) -> str:
    """Store held entries for the modules of this process, and return their SHA-256, which a
    ``ModelSpec`` contains.
    """
    sha256 = sha256_of(entries)
    _held[sha256] = {name: value.detach() for name, value in entries.items()}
    return sha256


def sha256_of(entries: Tensors) -> str:
    """The SHA-256 of entries, including their names, shapes and types."""
    sha256 = hashlib.sha256()
    for name, value in sorted(entries.items()):
        sha256.update(f"{name} {tuple(value.shape)} {value.dtype}\0".encode())
        sha256.update(value.detach().cpu().contiguous().numpy().tobytes())
    return sha256.hexdigest()


def held_entries(spec: ModelSpec) -> Tensors:
    """The held entries of a network; raises ConfigError if this process does not have them."""
    if not spec.held:
        return {}
    if spec.held not in _held:
        raise ConfigError(
            f"the frozen weights of {spec.label} are not loaded; name their file in start_from"
        )
    return _held[spec.held]


def insert_held_entries(network: nn.Module, spec: ModelSpec) -> nn.Module:
    """Load the held entries of a spec into its module, where they need no gradient.

    Raises ConfigError if this process does not have them.
    """
    if not spec.held:
        return network
    entries = held_entries(spec)
    fixed = {name: value for name, value in entries.items() if not matches(name, spec.trains)}
    network.load_state_dict(fixed, strict=False, assign=True)
    for name, value in network.named_parameters():
        value.requires_grad_(name not in fixed)
    return network


def build(spec: ModelSpec) -> nn.Module:
    """A new module of a spec, on the CPU. Its initial weights are drawn from torch's global
    generator.

    Raises ConfigError if the model cannot be built for this input shape and class count.
    """
    _check_inputs(registry.lookup("model", spec.name).target, spec)
    network = construct(spec.name, spec, dict(spec.fields))
    if spec.widths:
        from fedstill.models.layer_chain import with_widths  # lazy, because few networks need it

        network = with_widths(network, spec.widths)
    if spec.adds:
        network = with_additions(network, spec)
    network = insert_held_entries(network, spec)
    return network.cpu()


def construct(name: str, spec: ModelSpec, fields: Mapping[str, Any]) -> nn.Module:
    """A module of a registered name, a file or an import path, built from its fields and from the
    data's properties in a spec.

    Raises ConfigError if the constructor fails, or does not return a module.
    """
    entry = registry.lookup("model", name)
    if isinstance(entry.target, nn.Module):
        raise ConfigError(
            f"model {short_name(name)!r} is a network, not a constructor: name its class, or a "
            "function that returns it; in Python, you can pass a network: Experiment(model=NETWORK)"
        )
    data = _constructor_arguments(entry.target, spec)
    try:
        network = entry.build(**{**data, **fields})
    except FedstillError:
        raise
    except Exception as error:
        from fedstill.core.user_code import reason  # lazy, because only errors need it

        advice = ""
        if isinstance(error, TypeError):
            advice = f"; {_CONSTRUCTOR_HELP}"
        raise ConfigError(
            f"model {name!r} cannot be built: {reason(error, entry.target)}{advice}"
        ) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"model {name!r} returned a {type(network).__name__} instead of a torch.nn.Module"
        )
    if any(is_lazy(value) for value in (*network.parameters(), *network.buffers())):
        raise ConfigError(
            f"model {name!r} has lazy layers, whose sizes are unknown before the first batch; use "
            "layers with fixed sizes"
        )
    return network


def is_of_library(spec: ModelSpec) -> bool:
    """Whether a network consists of fedstill's networks only, without a user's code."""
    names = (spec.name, *(str(v) for k, v in spec.fields if k in ("of", "own", "shared")))
    return all(
        str(registry.lookup("model", name).target.__module__).startswith("fedstill.models.")
        for name in names
    )


@functools.lru_cache(maxsize=64)
def built_size(spec: ModelSpec) -> int:
    """The number of parameters of a network of fedstill. No memory is allocated for them."""
    with restoring_global_state(), torch.device("meta"):
        network = construct(spec.name, spec, dict(spec.fields))
        return sum(value.numel() for value in network.parameters())


_CONSTRUCTOR_HELP = (
    "fedstill passes a model's constructor the arguments input_shape, in_channels (images and "
    "series), vocabulary (texts), classes and num_classes, if it has parameters of these names, or "
    "num_classes if it has **kwargs; its other parameters are fields of [model]"
)
"""Explains how a user's model gets the number of classes and channels."""


@dataclass(frozen=True)
class _InputKind:
    """A kind of examples: its name in messages, and the number of axes of one example."""

    name: str
    axes: int


_INPUT_KINDS: Mapping[Any, _InputKind] = {
    ImageShape: _InputKind("images", axes=3),
    SeriesShape: _InputKind("series", axes=2),
    RowShape: _InputKind("rows of numbers", axes=1),
}
"""The annotations of ``input_shape`` that restrict a network to one kind of examples."""

_SUITABLE_MODELS = {1: "mlp", 2: "series_cnn", 3: "cnn"}
"""A suitable model by the number of an example's axes."""


def _constructor_arguments(target: Callable[..., Any], spec: ModelSpec) -> dict[str, Any]:
    """The arguments of a model's constructor that follow from the data, by the names of its
    parameters.
    """
    values = {
        "input_shape": spec.input_shape,
        "vocabulary": spec.vocabulary,
        "classes": spec.classes,
        "num_classes": spec.classes,
    }
    if len(spec.input_shape) > 1:
        values["in_channels"] = spec.input_shape[0]
    parameters = inspect.signature(target).parameters
    arguments = {name: value for name, value in values.items() if name in parameters}
    if _takes_any(parameters) and not {"classes", "num_classes"} & set(parameters):
        arguments["num_classes"] = spec.classes
    return arguments


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a function takes keyword arguments of any name."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _check_inputs(target: Callable[..., Any], spec: ModelSpec) -> None:
    """Raise ConfigError if the examples are of a kind that the network does not take."""
    accepted = _other_kind(target, spec)
    if accepted:
        raise ConfigError(
            f"model {short_name(spec.name)!r} takes {accepted}, but the examples are "
            f"{_described(spec)}; set model.name = {_suitable_model(spec)!r}"
        )


def _other_kind(target: Callable[..., Any], spec: ModelSpec) -> str:
    """The kind of examples that a network takes; empty if it takes those of a spec."""
    parameters = inspect.signature(target).parameters
    if spec.vocabulary:
        takes_tokens = "vocabulary" in parameters or _takes_any(parameters)
        if takes_tokens:
            return ""
        return "numbers"
    if "vocabulary" in parameters and parameters["vocabulary"].default is inspect.Parameter.empty:
        return "the token ids of texts"
    kind = _INPUT_KINDS.get(_hints(target).get("input_shape"))
    if kind is None or kind.axes == len(spec.input_shape):
        return ""
    return kind.name


def _described(spec: ModelSpec) -> str:
    """The kind and shape of a spec's examples for messages."""
    if spec.vocabulary:
        return "texts, as token ids"
    names = {kind.axes: kind.name for kind in _INPUT_KINDS.values()}
    name = names.get(len(spec.input_shape), "numbers")
    return f"{name} of shape ({', '.join(map(str, spec.input_shape))})"


def _suitable_model(spec: ModelSpec) -> str:
    """A model of fedstill that takes the examples of a spec."""
    if spec.vocabulary:
        return "bag"
    return _SUITABLE_MODELS.get(len(spec.input_shape), "mlp")


def _hints(target: Callable[..., Any]) -> Mapping[str, Any]:
    """The annotations of a constructor; none if they cannot be read."""
    function = target
    if inspect.isclass(target):
        function = target.__init__
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # names that only exist for type checkers
        return {}


def from_pairs(value: Any) -> Any:
    """The inverse of ``as_pairs``: pairs of a text and a value become a table.

    >>> from_pairs((('a', (('c', 3),)), ('b', (1, 2))))
    {'a': {'c': 3}, 'b': (1, 2)}
    """
    if isinstance(value, Mapping):
        return {k: from_pairs(v) for k, v in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    if value and all(_is_pair(v) for v in value):
        return {k: from_pairs(v) for k, v in value}
    return tuple(from_pairs(v) for v in value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[0], str)
