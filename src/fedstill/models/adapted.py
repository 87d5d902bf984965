"""Networks made from another network: ``etf`` with a fixed simplex as its last layer, ``lifted``
with a wide random layer under its head, ``low_rank`` with low-rank changes beside its linear layers
(LoRA), and ``wrapped``, which makes a body and a head of any module.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedstill.core.errors import ConfigError, FedstillError, on_one_line
from fedstill.core.fields import Count, CountOrZero, Positive
from fedstill.core.keys import generator
from fedstill.core.payload import Tensors
from fedstill.core.records import ModelSpec, as_pairs, matches
from fedstill.core.registry import lookup, register, short_name
from fedstill.models import building, contract
from fedstill.models.network import InputShape, Network, masked_mean


@functools.lru_cache(maxsize=64)
def simplex(width: int, classes: int) -> Tensor:
    """C >= 2 unit vectors (D, C) float64 with mutual cosines -1/(C-1), which sum to 0: always the
    same; D >= C.
    """
    q, r = torch.linalg.qr(torch.rand(width, classes, generator=generator(0), dtype=torch.float64))
    # one of the factorisations of a matrix, whoever's routine it is
    corners = q * r.diagonal().sign()
    vertices: Tensor = (classes / (classes - 1)) ** 0.5 * (corners - corners.mean(1, keepdim=True))
    return vertices


class SimplexHead(nn.Module):
    """Logits (B, C) of features (B, D): scale times the cosine to each class's vertex; only the
    scale is trained.
    """

    simplex = True
    """By this ``models.contract.capabilities`` knows it."""

    def __init__(self, features: int, classes: int, scale: float) -> None:
        super().__init__()
        self.vertices = simplex(features, classes)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, h: Tensor) -> Tensor:
        """Logits that do not change where features are doubled."""
        return self.scale * (normalize(h, dim=1) @ self.vertices.to(h.device, h.dtype))


@register("model", "etf")
def etf(
    input_shape: InputShape,
    classes: int,
    of: str,
    arguments: dict[str, Any] | None = None,
    *,
    projection: CountOrZero = 0,
    scale: Positive = 10.0,
    vocabulary: int = 0,
) -> nn.Module:
    """A network with a fixed simplex as its last layer (FedETF).

    of: The network's name, or an import path; it has a body and a head, which is replaced.
    arguments: Its fields.
    projection: The width of a linear layer under the simplex; 0 for none.
    scale: What the cosines are multiplied by at first; it is trained. FedETF's ResNets begin
    with 1.

    Raises ConfigError for a network without body and head, and for fewer features than classes.

    Source: Li et al., "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning
    with Synthetic and Fixed Classifier" (FedETF, 2023), section 3, and its code.
    Reading: the code draws the simplex anew in every run; here it is the same in all, and no entry
    of the model.
    Reading: its old linear head stays in the model, unused and decayed; here there is none.
    """
    spec = ModelSpec(of, input_shape, classes, vocabulary=vocabulary)
    network = building.construct(of, spec, building.from_pairs(arguments or {}))
    body = getattr(network, "body", None)
    head = getattr(network, "head", None)
    if not isinstance(body, nn.Module) or not isinstance(head, nn.Module):
        raise ConfigError(f"model.of = {of!r} has no body and head; choose a network that has")
    with torch.no_grad():
        features = body.eval()(contract.example(spec, 2)).shape[1]
    width = projection or features
    if width < max(2, classes):
        raise ConfigError(
            f"model.of = {of!r} has {width} features under the simplex, and {classes} classes need "
            "as many; "
            f"set model.projection to {max(2, classes)} or more"
        )
    if projection:
        network.body = nn.Sequential(body, nn.Linear(features, projection))
    network.head = SimplexHead(width, classes, scale)
    return network.train()


@functools.lru_cache(maxsize=16)
def random_directions(features: int, width: int) -> Tensor:
    """Fixed random weights (D, M), of mean 0 and spread 1: always the same."""
    return torch.randn(features, width, generator=generator(0))


class Lift(nn.Module):
    """ReLU of features (B, D) times fixed random weights: (B, M)."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.directions = random_directions(features, width)

    def forward(self, h: Tensor) -> Tensor:
        """Features of the wider space, none below 0."""
        return torch.relu(h @ self.directions.to(h.device, h.dtype))


@register("model", "lifted")
def lifted(
    input_shape: InputShape,
    classes: int,
    of: str,
    arguments: dict[str, Any] | None = None,
    *,
    width: Count = 1250,
    vocabulary: int = 0,
) -> nn.Module:
    """A network with a wide layer of fixed random weights and a ReLU before its head.

    of: The network's name, or an import path; it has a body and a linear head, which is replaced.
    arguments: Its fields.
    width: How many numbers the head sees (M).

    Raises ConfigError for a network without body and head.

    Source: McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual
    Learning" (2023), section 4.
    Reading: the weights are the same in all runs, and no entry of the model: they are neither
    trained nor sent.
    """
    spec = ModelSpec(of, input_shape, classes, vocabulary=vocabulary)
    network = building.construct(of, spec, building.from_pairs(arguments or {}))
    body = getattr(network, "body", None)
    head = getattr(network, "head", None)
    if not isinstance(body, nn.Module) or not isinstance(head, nn.Linear):
        raise ConfigError(
            f"model.of = {of!r} has no body and linear head; choose a network that has"
        )
    network.body = nn.Sequential(body, Lift(head.in_features, width))
    network.head = nn.Linear(width, classes, head.bias is not None)
    return network


def lifted_spec(spec: ModelSpec, width: int) -> ModelSpec:
    """The same network with a wide random layer under its head; as it is for a width of 0."""
    if not width:
        return spec
    fields = {"of": spec.name, "arguments": building.from_pairs(spec.fields), "width": width}
    return ModelSpec(
        "lifted", spec.input_shape, spec.classes, as_pairs(fields), vocabulary=spec.vocabulary
    )


def lifted_body(params: Tensors, width: int) -> dict[str, Tensor]:
    """The entries of a network's body as they are named in the lifted one; as they are for a width
    of 0.
    """
    body = {name: value for name, value in params.items() if name.startswith("body.")}
    if not width:
        return body
    return {f"body.0.{name.removeprefix('body.')}": value for name, value in body.items()}


class LowRankLinear(nn.Linear):
    """A linear layer W x + (alpha / rank) B A x with entries ``lora_a`` (rank, in) and ``lora_b``
    (out, rank) beside its own, whose names stay.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, and that of the low-rank change."""
        return super().forward(x) + self.scale * ((x @ self.lora_a.T) @ self.lora_b.T)


@register("model", "low_rank")
def low_rank(
    input_shape: InputShape,
    classes: int,
    of: str,
    arguments: dict[str, Any] | None = None,
    *,
    rank: Count = 4,
    alpha: Positive = 8.0,
    layers: tuple[str, ...] = ("body.",),
    vocabulary: int = 0,
) -> nn.Module:
    """A network with trainable low-rank changes of its linear layers (LoRA).

    of: The network's name, or an import path.
    arguments: Its fields.
    rank: The rank of a change.
    alpha: What the change is multiplied by, times 1 / rank.
    layers: Which linear layers have one: names, beginnings with a point, or patterns with * and ?.

    With start_from, start_from_partial = true and train_only = ["head.", "*.lora_*"], the network's
    own weights stay as the file has them, and only the changes and the head are trained and sent.
    Raises ConfigError if no layer is named.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2022), section 4.1: A
    is drawn, B is 0, so that the network starts as it is.
    Reading: the mean over clients of B and of A is not that of B A. With ``train_only = ["head.",
    "*.lora_b"]`` A stays as it was drawn, the same for all, and the mean is exact.
    """
    spec = ModelSpec(of, input_shape, classes, vocabulary=vocabulary)
    fields: Mapping[str, Any] = building.from_pairs(arguments or {})
    network = building.construct(of, spec, fields)
    linear = {name: m for name, m in network.named_modules() if type(m) is nn.Linear}
    chosen = [layer for name, layer in linear.items() if matches(f"{name}.", layers)]
    if not chosen:
        raise ConfigError(
            f"model.layers = {list(layers)} names none of {of}'s linear layers: "
            f"{', '.join(linear) or 'none'}"
        )
    for layer in chosen:
        a = torch.empty(rank, layer.in_features, dtype=layer.weight.dtype)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        layer.__class__ = LowRankLinear
        layer.lora_a = nn.Parameter(a)
        layer.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=a.dtype))
        layer.scale = alpha / rank  # type: ignore[assignment]
    return network


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
