"""What a method may ask of a model: build it, start it, run it, and what it can do."""

from __future__ import annotations

import functools
import inspect
import threading
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.errors import (
    ConfigError,
    CorruptFile,
    FedstillError,
    IncompatibleMethod,
    on_one_line,
)
from fedstill.core.keys import put_aside, seed_global
from fedstill.core.records import ModelSpec, Plan, Tensors, as_pairs
from fedstill.core.registry import short_name
from fedstill.core.trees import only
from fedstill.models.functional import features, forward, head, run_part, run_with
from fedstill.models.network import ImageShape, RowShape, SeriesShape
from fedstill.models.parameters import moving, put_in, with_additions

__all__ = [
    "NORMS",
    "Predictor",
    "build",
    "built_size",
    "capabilities",
    "construct",
    "draws_random_numbers",
    "entries",
    "example",
    "features",
    "forward",
    "freeze_norms",
    "head",
    "initial",
    "is_of_library",
    "joins_last_example",
    "module",
    "needs_two_examples",
    "predictor",
    "run_part",
    "run_with",
    "size",
    "spec_for",
    "trainable_entries",
    "trainable_names",
    "width",
]

# What a network's constructor takes of the data.


_CONSTRUCTOR_HELP = (
    "a model's parameters named input_shape, in_channels (of images and series), vocabulary (of "
    "texts), classes or "
    "num_classes are given what the data have; one with **kwargs gets num_classes; the others are "
    "fields of [model]"
)
"""How a user's model gets the number of classes and channels."""


@dataclass(frozen=True)
class _InputKind:
    """A kind of examples: how people call them, and how many axes one of them has."""

    name: str
    axes: int


_INPUT_KINDS: Mapping[Any, _InputKind] = {
    ImageShape: _InputKind("images", axes=3),
    SeriesShape: _InputKind("series", axes=2),
    RowShape: _InputKind("rows of numbers", axes=1),
}
"""The annotations of ``input_shape`` by which a network takes one kind of numbers only."""

_SUITABLE_MODELS = {1: "mlp", 2: "series_cnn", 3: "cnn"}
"""A model for examples of so many axes."""


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
    """Raise ConfigError for a network of images, of numbers or of token ids if the examples are of
    another kind.
    """
    accepted = _other_kind(target, spec)
    if accepted:
        raise ConfigError(
            f"model {short_name(spec.name)!r} takes {accepted}, and these examples are "
            f"{_described(spec)}; set model.name = {_suitable_model(spec)!r}"
        )


def _other_kind(target: Callable[..., Any], spec: ModelSpec) -> str:
    """The kind of examples that a network takes, if it does not take those of a spec."""
    parameters = inspect.signature(target).parameters
    if spec.vocabulary:
        takes_tokens = "vocabulary" in parameters or _takes_any(parameters)
        return "" if takes_tokens else "numbers"
    if "vocabulary" in parameters and parameters["vocabulary"].default is inspect.Parameter.empty:
        return "the token ids of texts"
    kind = _INPUT_KINDS.get(_hints(target).get("input_shape"))
    if kind is None or kind.axes == len(spec.input_shape):
        return ""
    return kind.name


def _described(spec: ModelSpec) -> str:
    """The kind and shape of a spec's examples, as people read them."""
    if spec.vocabulary:
        return "texts, as token ids"
    names = {kind.axes: kind.name for kind in _INPUT_KINDS.values()}
    name = names.get(len(spec.input_shape), "numbers")
    return f"{name} of shape ({', '.join(map(str, spec.input_shape))})"


def _suitable_model(spec: ModelSpec) -> str:
    """A model of the library for the examples of a spec."""
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
    except (NameError, TypeError, AttributeError):  # names that are there for type checkers only
        return {}


# What a method may ask of a model: to build it, to start it, to run it, and its capabilities.
#
# A model with two submodules ``body`` and ``head`` and ``forward(x) = head(body(x))`` has
# *features* (the output of its body) and a *head* (its last layer). Any other ``nn.Module`` has
# logits only.


NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
"""Layers whose behaviour differs between training and evaluation because they gather statistics."""

_modules = threading.local()


def build(spec: ModelSpec) -> nn.Module:
    """A new module of a spec, on the CPU; its initial weights come from torch's process-wide
    generator.

    Raises ConfigError if the model cannot be built for this input shape and class count.
    """
    _check_inputs(registry.lookup("model", spec.name).target, spec)
    network = construct(spec.name, spec, dict(spec.fields))
    if spec.widths:
        from fedstill.models.layer_chain import with_widths  # few networks have other widths

        network = with_widths(network, spec.widths)
    if spec.adds:
        network = with_additions(network, spec)
    whole: nn.Module = put_in(network, spec)
    return whole.cpu()


def construct(name: str, spec: ModelSpec, fields: Mapping[str, Any]) -> nn.Module:
    """A module of a registered name, a file or an import path, from its fields and from what a spec
    knows of the data.

    Raises ConfigError if the constructor fails, or does not return a module.
    """
    entry = registry.lookup("model", name)
    if isinstance(entry.target, nn.Module):
        raise ConfigError(
            f"model {short_name(name)!r} is a network, not what makes one: name its class, or a "
            "function that gives it; from Python, Experiment(model=NETWORK) takes one"
        )
    data = _constructor_arguments(entry.target, spec)
    try:
        network = entry.build(**{**data, **fields})
    except FedstillError:
        raise
    except Exception as error:
        from fedstill.core.user_code import reason  # for errors alone

        advice = ""
        if isinstance(error, TypeError):
            advice = f"; {_CONSTRUCTOR_HELP}"
        raise ConfigError(
            f"model {name!r} cannot be made: {reason(error, entry.target)}{advice}"
        ) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"model {name!r} made a {type(network).__name__}, not a torch.nn.Module")
    if any(is_lazy(value) for value in (*network.parameters(), *network.buffers())):
        raise ConfigError(
            f"model {name!r} has lazy layers, whose sizes only a first batch tells; write them"
        )
    return network


def example(spec: ModelSpec, count: int, device: str = "cpu") -> Tensor:
    """Inputs without content, (count, *input_shape): zeros, or padding where a network takes token
    ids (int64).
    """
    kind = torch.int64 if spec.vocabulary else torch.float32
    return torch.zeros(count, *spec.input_shape, dtype=kind, device=device)


def module(spec: ModelSpec, role: str = "student") -> nn.Module:
    """This thread's module of a spec and role: a module to run parameters in; its own weights are
    not used.
    """
    cache: dict[tuple[ModelSpec, str], nn.Module] = _modules.__dict__.setdefault("cache", {})
    if (spec, role) not in cache:
        with put_aside(card=True):
            cache[spec, role] = build(spec)
    return cache[spec, role]


def initial(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Initial parameters and buffers of a spec, a pure function of the seed."""
    with put_aside(card=True):
        seed_global(seed)  # a network of a user's own may be made on a card
        made = build(spec)
    return {k: v.detach().clone() for k, v in entries(spec, made).items()}


def entries(spec: ModelSpec, made: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module that are trained and sent."""
    own: dict[str, Tensor] = made.state_dict()
    return {name: own[name] for name in moving(spec, own)}


@functools.lru_cache(maxsize=1024)
def size(spec: ModelSpec) -> int:
    """How many numbers of a model of a spec are trained and sent, buffers included."""
    return sum(v.numel() for v in entries(spec, module(spec)).values())


@functools.lru_cache(maxsize=1024)
def width(spec: ModelSpec) -> int:
    """D: how many features a model's body gives, which are its head's inputs.

    Raises IncompatibleMethod for a model whose body does not give (B, D), AttributeError for one
    without body.
    """
    params = {k: v.detach() for k, v in entries(spec, module(spec, "frozen").eval()).items()}
    with torch.no_grad():
        z = features(module(spec, "frozen"), params, example(spec, 2))
    if z.dim() != 2:
        raise IncompatibleMethod(
            f"the body of {spec} gives {tuple(z.shape)}, not features (B, D): end it with Flatten"
        )
    return z.shape[1]


def trainable_names(spec: ModelSpec) -> set[str]:
    """The names of parameters that are trained; the other entries of a state are buffers, or left
    without gradient.
    """
    return set(
        moving(
            spec, (name for name, value in module(spec).named_parameters() if value.requires_grad)
        )
    )


def trainable_entries(spec: ModelSpec, params: Tensors) -> dict[str, Tensor]:
    """The entries of a model that are trained, in the order of their names."""
    return only(params, sorted(trainable_names(spec)))


def capabilities(spec: ModelSpec) -> Need:
    """The needs of a method that a network meets by its structure (``OF_NETWORKS``)."""
    from fedstill.models.layer_chain import levels
    from fedstill.models.resnet import slim_stage

    m = module(spec)
    offered = Need.NOTHING
    if _has_parts(m, "own", "shared"):
        offered |= Need.PAIR
    if not _has_parts(m, "body", "head"):
        return offered
    offered |= Need.FEATURES | Need.HEAD
    if getattr(m.head, "simplex", False) is True:
        offered |= Need.ETF
    if levels(m):
        offered |= Need.LEVELS
    if slim_stage(m):
        offered |= Need.SLIM
    return offered


def _has_parts(m: nn.Module, *names: str) -> bool:
    """Whether a module has submodules of these names."""
    return all(isinstance(getattr(m, name, None), nn.Module) for name in names)


@dataclass(frozen=True, eq=False)
class Predictor:
    """A model with frozen parameters. Called with inputs (B, ...), it returns logits (B, C)."""

    spec: ModelSpec
    params: Tensors
    _here: dict[torch.device, Tensors] = field(default_factory=dict, repr=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Logits in evaluation mode, without gradients."""
        if x.device not in self._here:
            self._here[x.device] = {k: v.to(x.device) for k, v in self.params.items()}
        m = module(self.spec, "frozen").eval()
        with torch.inference_mode():
            return forward(m, self._here[x.device], x)

    def as_module(self) -> nn.Module:
        """A module of its own that holds a copy of the parameters, in evaluation mode.

        Raises CorruptFile where they are not those of the architecture.
        """
        with put_aside(card=True):
            made = build(self.spec)
        try:
            made.load_state_dict(
                {**made.state_dict(), **self.params} if self.spec.held else dict(self.params)
            )
        except RuntimeError as error:
            raise CorruptFile(
                f"the weights are not those of a {self.spec}: {on_one_line(error)}"
            ) from error
        return made.eval()


def predictor(spec: ModelSpec, params: Tensors) -> Predictor:
    """x -> logits of frozen parameters in evaluation mode."""
    return Predictor(spec, params)


def spec_for(
    name: str,
    input_shape: tuple[int, ...],
    classes: int,
    fields: Mapping[str, Any] | None = None,
    vocabulary: int = 0,
) -> ModelSpec:
    """The spec of a registered or imported model; fields are sorted, so that equal settings are
    equal specs.
    """
    return ModelSpec(name, input_shape, classes, as_pairs(fields or {}), vocabulary=vocabulary)


# What a pass of two examples tells of a network before it is trained.


@functools.lru_cache(maxsize=1024)
def draws_random_numbers(spec: ModelSpec, training: bool = True) -> bool:
    """Whether a forward pass draws from torch's global generator, as dropout and noise do.

    training: whether the network is in training mode. Dropout layers are recognised. For other
    layers, a trial pass on two examples without content decides. A network that fails on these is
    taken not to draw.
    """
    m = module(spec, "frozen")
    if training and any(
        isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0 for layer in m.modules()
    ):
        return True
    try:
        return _draws_in_forward(m.train(training), example(spec, 2))
    except Exception:
        # The examples of the run will show whether the network can take any.
        return False
    finally:
        m.eval()


@functools.lru_cache(maxsize=1024)
def needs_two_examples(spec: ModelSpec, norm: str = "batch") -> bool:
    """Whether a network in training mode takes two examples and fails on one, as batch
    normalisation of features does.

    norm: as in a ``Plan``. A left-over example then joins the batch before it
    (``Plan.leaves_one_over``). The trial has examples without content, so that a server and its
    sites get the same answer.
    """
    return not _trains_on(spec, 1, norm) and _trains_on(spec, 2, norm)


def joins_last_example(spec: ModelSpec, plan: Plan, examples: int) -> bool:
    """Whether the last example of an epoch joins the batch before it, because the network cannot be
    trained on one example alone.
    """
    return plan.leaves_one_over(examples) and needs_two_examples(spec, plan.norm)


def freeze_norms(m: nn.Module) -> None:
    """Put the normalisation layers of a network into evaluation mode, as ``norm = "frozen"`` of a
    plan has it.
    """
    for layer in m.modules():
        if isinstance(layer, NORMS):
            layer.eval()


def is_of_library(spec: ModelSpec) -> bool:
    """Whether a network is one that the library has, and not a user's, nor made of one."""
    names = (spec.name, *(str(v) for k, v in spec.fields if k in ("of", "own", "shared")))
    return all(
        str(registry.lookup("model", name).target.__module__).startswith("fedstill.models.")
        for name in names
    )


@functools.lru_cache(maxsize=64)
def built_size(spec: ModelSpec) -> int:
    """How many parameters a network of the library has, told by shapes alone: no memory is taken
    for them.
    """
    with put_aside(), torch.device("meta"):
        return sum(
            value.numel() for value in construct(spec.name, spec, dict(spec.fields)).parameters()
        )


def _trains_on(spec: ModelSpec, count: int, norm: str) -> bool:
    """Whether a network in training mode takes so many examples at once; the module keeps its
    statistics.
    """
    m = module(spec, "frozen").train()
    if norm == "frozen":
        freeze_norms(m)
    entries = {
        name: value.detach().clone() for name, value in (*m.named_parameters(), *m.named_buffers())
    }
    x = torch.ones_like(example(spec, count))  # of token ids, zeros would be padding alone
    try:
        with put_aside(card=True), torch.no_grad():
            forward(m, entries, x)
    except Exception:  # whatever a network raises, it would raise in training
        return False
    finally:
        m.eval()
    return True


def _draws_in_forward(m: nn.Module, x: Tensor) -> bool:
    """Whether a pass draws from the generator. The module's statistics are not changed."""
    freeze_norms(m)
    with put_aside(card=True), torch.no_grad():
        before = torch.get_rng_state()
        forward(m, {name: value.clone() for name, value in m.named_buffers()}, x)
        return not torch.equal(torch.get_rng_state(), before)
