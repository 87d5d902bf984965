"""Networks made of other networks: ``etf`` makes the last layer of a network a fixed simplex,
``lifted`` inserts a wide random layer before its head, ``low_rank`` adds low-rank updates to its
linear layers (LoRA), ``wrapped`` adds a head to any module, and ``pair`` joins two networks.
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
    """The vertices of a simplex: C >= 2 unit vectors (D, C) float64 with mutual cosines -1/(C-1)
    and sum 0.

    They are the same in every call. D >= C.
    """
    q, r = torch.linalg.qr(torch.rand(width, classes, generator=generator(0), dtype=torch.float64))
    # Linear algebra libraries choose different signs. A positive diagonal of r makes q unique.
    corners = q * r.diagonal().sign()
    vertices: Tensor = (classes / (classes - 1)) ** 0.5 * (corners - corners.mean(1, keepdim=True))
    return vertices


class SimplexHead(nn.Module):
    """A head whose logits (B, C) are the cosines of features (B, D) and the classes' vertices,
    times a scale. Only the scale is trained.
    """

    simplex = True
    """``models.contract.capabilities`` recognises the head by this attribute."""

    def __init__(self, features: int, classes: int, scale: float) -> None:
        super().__init__()
        self.vertices = simplex(features, classes)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, h: Tensor) -> Tensor:
        """Logits (B, C), which do not depend on the norms of the features."""
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

    of: The name or import path of a network with a body and a head; the simplex replaces the head.
    arguments: The fields of that network.
    projection: The width of a linear layer before the simplex; 0 for none.
    scale: The initial factor of the cosines; it is trained. FedETF's ResNets start with 1.

    Raises ConfigError for a network without body and head, and for fewer features than classes.

    Source: Li et al., "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning
    with Synthetic and Fixed Classifier" (FedETF, 2023), section 3, and its code.
    Reading: the code draws a new simplex in every run; here all runs have the same simplex, which
    is not an entry of the model.
    Reading: in the code, the unused linear head stays in the model and its weights decay; here it
    is removed.
    """
    spec = ModelSpec(of, input_shape, classes, vocabulary=vocabulary)
    network = building.construct(of, spec, building.from_pairs(arguments or {}))
    body = getattr(network, "body", None)
    head = getattr(network, "head", None)
    if not isinstance(body, nn.Module) or not isinstance(head, nn.Module):
        raise ConfigError(f"model.of = {of!r} has no body and head; choose a network with both")
    with torch.no_grad():
        features = body.eval()(contract.example(spec, 2)).shape[1]
    width = projection or features
    if width < max(2, classes):
        raise ConfigError(
            f"model.of = {of!r} has {width} features before the simplex, too few for {classes} "
            f"classes; set model.projection to {max(2, classes)} or more"
        )
    if projection:
        network.body = nn.Sequential(body, nn.Linear(features, projection))
    network.head = SimplexHead(width, classes, scale)
    return network.train()


@functools.lru_cache(maxsize=16)
def random_directions(features: int, width: int) -> Tensor:
    """Random weights (D, M) with mean 0 and standard deviation 1, the same in every call."""
    return torch.randn(features, width, generator=generator(0))


class Lift(nn.Module):
    """ReLU of the product of features (B, D) and fixed random weights: (B, M)."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.directions = random_directions(features, width)

    def forward(self, h: Tensor) -> Tensor:
        """Non-negative features (B, M)."""
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

    of: The name or import path of a network with a body and a linear head; a new head replaces it.
    arguments: The fields of that network.
    width: The number of the head's inputs (M).

    Raises ConfigError for a network without body and head.

    Source: McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual
    Learning" (2023), section 4.
    Reading: the weights are the same in all runs. They are not entries of the model, so they are
    neither trained nor sent.
    """
    spec = ModelSpec(of, input_shape, classes, vocabulary=vocabulary)
    network = building.construct(of, spec, building.from_pairs(arguments or {}))
    body = getattr(network, "body", None)
    head = getattr(network, "head", None)
    if not isinstance(body, nn.Module) or not isinstance(head, nn.Linear):
        raise ConfigError(
            f"model.of = {of!r} has no body and linear head; choose a network with both"
        )
    network.body = nn.Sequential(body, Lift(head.in_features, width))
    network.head = nn.Linear(width, classes, head.bias is not None)
    return network


def lifted_spec(spec: ModelSpec, width: int) -> ModelSpec:
    """The network with a wide random layer before its head; unchanged for a width of 0."""
    if not width:
        return spec
    fields = {"of": spec.name, "arguments": building.from_pairs(spec.fields), "width": width}
    return ModelSpec(
        "lifted", spec.input_shape, spec.classes, as_pairs(fields), vocabulary=spec.vocabulary
    )


def lifted_body(params: Tensors, width: int) -> dict[str, Tensor]:
    """The entries of a network's body under their names in the lifted network; unchanged for a
    width of 0.
    """
    body = {name: value for name, value in params.items() if name.startswith("body.")}
    if not width:
        return body
    return {f"body.0.{name.removeprefix('body.')}": value for name, value in body.items()}


class LowRankLinear(nn.Linear):
    """A linear layer W x + (alpha / rank) B A x.

    It has the entries ``lora_a`` (rank, in) and ``lora_b`` (out, rank) in addition to those of the
    linear layer, which keep their names.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        """The output of the linear layer plus the low-rank update."""
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
    """A network with trainable low-rank updates of its linear layers (LoRA).

    of: The name or import path of a network.
    arguments: The fields of that network.
    rank: The rank of an update.
    alpha: The update is multiplied by alpha / rank.
    layers: The linear layers with an update: names, prefixes that end with a dot, or patterns with
    * and ?.

    With start_from, start_from_partial = true and train_only = ["head.", "*.lora_*"], the
    pretrained weights from the file are frozen, and only the updates and the head are trained and
    sent. Raises ConfigError if layers matches no linear layer.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2022), section 4.1. A
    is random and B is 0, so the initial outputs are those of the network without updates.
    Reading: the product of the means of B and A over clients is not the mean of the products B A.
    With ``train_only = ["head.", "*.lora_b"]``, all clients share the initial A, and the mean is
    exact.
    """
    spec = ModelSpec(of, input_shape, classes, vocabulary=vocabulary)
    fields: Mapping[str, Any] = building.from_pairs(arguments or {})
    network = building.construct(of, spec, fields)
    linear = {name: m for name, m in network.named_modules() if type(m) is nn.Linear}
    chosen = [
        layer
        for name, layer in linear.items()
        if matches(name, layers) or matches(f"{name}.", layers)
    ]
    if not chosen:
        raise ConfigError(
            f"model.layers = {list(layers)} matches none of the linear layers of {of}: "
            f"{', '.join(linear) or 'none'}"
        )
    for layer in chosen:
        a = torch.empty(rank, layer.in_features, dtype=layer.weight.dtype)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        layer.__class__ = LowRankLinear
        layer.lora_a = nn.Parameter(a)
        layer.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=a.dtype))
        layer.scale = alpha / rank  # type: ignore[assignment]
        # In evaluation, torch's transformer layer calls linear layers only if they have a hook.
        # Otherwise it reads their weights, without the update. This hook changes nothing.
        layer.register_forward_pre_hook(lambda layer, inputs: None)
    return network


MASKS = ("attention_mask", "padding_mask", "mask")
"""Names that a module's parameter for the attention mask may have."""


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
    """Any module by import path. A new linear layer for the run's classes replaces its last layer;
    the other layers are the body.

    fedstill calls the constructor ``of`` and downloads nothing, so the initial weights are new.

    of: The constructor of a module: an import path such as "torchvision.models:resnet18", or a file
    such as "nets.py:Net".
    arguments: The keyword arguments of the constructor. A table with a key ``of`` becomes the
    object that this constructor returns, for example a configuration.
    head: The name of the linear layer to replace, such as "fc" or "classifier.6". If empty, a new
    layer is added after the module.
    output: For a module that returns a record: the name of the field with the features, or "mean"
    for the mean over tokens.
    mask: Whether to pass the module an attention mask, which excludes padding.

    Raises ConfigError if the module cannot be built, has no such layer, or does not return features
    (B, D).
    """
    spec = ModelSpec("wrapped", input_shape, classes, vocabulary=vocabulary)
    network = _construct(of, building.from_pairs(arguments or {}), spec)
    mask_name = ""
    if mask:
        if not vocabulary:
            raise ConfigError(
                "model.mask = true needs texts, because other examples have no padding; remove it"
            )
        mask_name = _mask_name(network)
    body = Wrapped(network, output, mask_name)
    head_width = 0
    if head:
        head_width = _without_head(network, head)
    features = _features(body, contract.example(spec, 2), of)
    if head_width and head_width != features:
        raise ConfigError(
            f"model.head = {head!r} takes {head_width} features, but {short_name(of)} without it "
            f"returns {features}; name its last layer"
        )
    return Network(body, features, classes)


class Wrapped(nn.Module):
    """A module that returns features (B, D): the output of ``inner``, a field of it, or the mean
    over its tokens.
    """

    def __init__(self, inner: nn.Module, output: str, mask: str) -> None:
        super().__init__()
        self.inner = inner
        self.output = output
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        """The features (B, D) of numbers or token ids."""
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


class Pair(nn.Module):
    """A personal network ``own`` and a network ``shared``. The pair's output is that of
    ``shared``.
    """

    def __init__(self, own: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.own = own
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """The shared network's logits (B, C)."""
        return self.shared(x)  # type: ignore[no-any-return]


@register("model", "pair")
def pair(
    input_shape: InputShape,
    classes: int,
    own: str = "cnn",
    shared: str = "cnn",
    *,
    own_arguments: dict[str, Any] | None = None,
    shared_arguments: dict[str, Any] | None = None,
    vocabulary: int = 0,
) -> nn.Module:
    """Two networks in one: a personal network for each client, and a shared network, which is the
    server's model.

    own: The name or import path of the personal network; clients.models can give clients different
    pairs.
    shared: The name or import path of the shared network.
    own_arguments: The fields of the personal network.
    shared_arguments: The fields of the shared network.

    Source: Shen et al., "Federated Mutual Learning" (2020).
    """
    spec = ModelSpec("pair", input_shape, classes, vocabulary=vocabulary)
    own_network = building.construct(own, spec, building.from_pairs(own_arguments or {}))
    shared_network = building.construct(shared, spec, building.from_pairs(shared_arguments or {}))
    return Pair(own_network, shared_network)


def personal_network(spec: ModelSpec, params: Tensors) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The spec and the parameters of a pair's personal network."""
    fields = dict(spec.fields)
    table = building.from_pairs(fields.get("own_arguments") or {})
    personal_spec = ModelSpec(
        fields["own"], spec.input_shape, spec.classes, as_pairs(table), vocabulary=spec.vocabulary
    )
    personal_params = {k.removeprefix("own."): v for k, v in params.items() if k.startswith("own.")}
    return personal_spec, personal_params


def _construct(of: str, arguments: Mapping[str, Any], spec: ModelSpec) -> nn.Module:
    fields = {key: _object(value) for key, value in arguments.items()}
    if ":" not in of and not of.endswith(".py"):
        raise ConfigError(
            f"model.of = {of!r} must be an import path such as 'package.module:Name', or a file "
            "such as 'nets.py:Name'"
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
            f"model.arguments: {value['of']} cannot be built: {on_one_line(error)}"
        ) from error


def _without_head(network: nn.Module, head: str) -> int:
    """Replace a linear layer by the identity; returns its number of inputs."""
    linear = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    if head not in linear:
        raise ConfigError(
            f"model.head = {head!r} is not a linear layer of the module; its last linear layers "
            f"are {linear[-3:]}"
        )
    width = int(network.get_submodule(head).in_features)  # type: ignore[arg-type]
    network.set_submodule(head, nn.Identity())
    return width


def _features(body: Wrapped, x: Tensor, of: str) -> int:
    """The number of features that a body returns; raises ConfigError if it returns none."""
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
            f"{short_name(of)} returns a {type(out).__name__}: set model.output to one of "
            f"{public[:6]}"
        )
    if out.dim() != 2:
        raise ConfigError(
            f"{short_name(of)} returns {tuple(out.shape)} instead of features (B, D): set "
            "model.head or model.output = 'mean'"
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
        raise ConfigError(f"the module's output has no field model.output = {name!r}: {content}")
    return value


def _tokens(out: Any) -> Tensor:
    """The features of all tokens (B, L, D) in the output of a module."""
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
        f"model.mask = true: {type(network).__name__} has no parameter called "
        f"{', '.join(MASKS[:-1])} or {MASKS[-1]}"
    )
