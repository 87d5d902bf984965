"""What a method may ask of a model: build it, start it, run it, and which capabilities it has.

A model with two submodules ``body`` and ``head`` and ``forward(x) = head(body(x))`` has *features*
(the output of its body) and a *head* (its last layer). Any other ``nn.Module`` has logits only. If
the body is an ``nn.Sequential`` with a child that has ``slim_width(channels, share)`` and takes
``(x, share)``, that stage can run *slim*: at a share of its width.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedstill import registry
from fedstill.errors import ConfigError, CorruptFile, FedstillError, IncompatibleMethod, on_one_line
from fedstill.files import short_name
from fedstill.keys import put_aside, seed_global
from fedstill.model_spec import as_pairs
from fedstill.models.additions import with_additions
from fedstill.models.handed import RULE, handed, refuse_other_inputs
from fedstill.models.held_entries import moving, put_in
from fedstill.models.layer_chain import levels, with_widths
from fedstill.models.run_with import run_with
from fedstill.origin import reason
from fedstill.records import Ends, ModelSpec, Tensors

NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
"""Layers whose behaviour differs between training and evaluation because they gather statistics."""

_modules = threading.local()


def build(spec: ModelSpec) -> nn.Module:
    """A new module of a spec, on the CPU; its initial weights come from torch's process-wide
    generator.

    Raises ConfigError if the model cannot be built for this input shape and class count.
    """
    refuse_other_inputs(registry.lookup("model", spec.name).target, spec)
    made = built(spec.name, spec, dict(spec.fields))
    made = with_widths(made, spec.widths) if spec.widths else made
    whole: nn.Module = put_in(with_additions(made, spec) if spec.adds else made, spec)
    return whole.cpu()


def built(name: str, spec: ModelSpec, fields: Mapping[str, Any]) -> nn.Module:
    """A module of a name, a file or an import path, with what a spec knows of the data and these
    fields.

    Raises ConfigError if it cannot be made, or is no module.
    """
    entry = registry.lookup("model", name)
    if isinstance(entry.target, nn.Module):
        todo = (
            "name its class, or a function that gives it; from Python, Experiment(model=NETWORK) "
            "takes one"
        )
        raise ConfigError(f"model {short_name(name)!r} is a network, not what makes one: {todo}")
    data = {k: v for k, v in handed(entry.target, spec).items() if k not in fields}
    try:
        made = entry.build(**data, **fields)
    except FedstillError:
        raise
    except Exception as error:
        rule = f"; {RULE}" if isinstance(error, TypeError) else ""
        raise ConfigError(
            f"model {name!r} cannot be made: {reason(error, entry.target)}{rule}"
        ) from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"model {name!r} made a {type(made).__name__}, not a torch.nn.Module")
    if any(is_lazy(v) for v in (*made.parameters(), *made.buffers())):
        raise ConfigError(
            f"model {name!r} has lazy layers, whose sizes only a first batch tells; write them"
        )
    return made


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


def capabilities(spec: ModelSpec) -> set[str]:
    """What a method may need of a model: "features" and "head" of a body-and-head model, "slim" of
    a slimmable one.

    "etf": its head is a fixed simplex; "levels": its body is a chain of layers; "pair": it is two
    networks, ``own`` and ``shared``.
    """
    m = module(spec)
    split = isinstance(getattr(m, "body", None), nn.Module) and isinstance(
        getattr(m, "head", None), nn.Module
    )
    known = {"features": split, "head": split, "slim": split and bool(_slimmable(m))}
    known["etf"] = split and getattr(m.head, "simplex", False) is True
    known["levels"] = split and bool(levels(m))
    known["pair"] = all(isinstance(getattr(m, name, None), nn.Module) for name in ("own", "shared"))
    return {name for name, there in known.items() if there}


def forward(m: nn.Module, params: Tensors, x: Tensor) -> Tensor:
    """Logits (B, C) of parameters run in a module of their architecture."""
    return run_with(m, params, x)  # type: ignore[no-any-return]


def features(m: nn.Module, params: Tensors, x: Tensor) -> Tensor:
    """Penultimate features (B, D); raises AttributeError for a model without body and head."""
    return run_part(m, "body", params, x)


def head(m: nn.Module, params: Tensors, z: Tensor) -> Tensor:
    """Logits (B, C) of features (B, D)."""
    return run_part(m, "head", params, z)


def slim(m: nn.Module, params: Tensors, x: Tensor, share: float) -> tuple[Tensor, Ends, Ends]:
    """One pass at full width and one of the slimmable stage at a share of it, on the first channels
    of its input.

    share: in (0, 1). Gives logits (B, C), and what enters and leaves the stage, (B, D, H, W) and
    (B, E, h, w), at full width and slim. The slim pass has no gradient to what came before. Raises
    IncompatibleMethod if none is slimmable.
    """
    stage = _slimmable(m)
    if not stage:
        raise IncompatibleMethod(f"{type(m).__name__} has no slimmable stage")
    before = after = x
    for name, _ in m.get_submodule("body").named_children():
        before, x = (x if name == stage else before), run_part(m, f"body.{name}", params, x)
        after = x if name == stage else after
    width: int = m.get_submodule(f"body.{stage}").slim_width(before.shape[1], share)  # type: ignore[operator]
    narrow = before[:, :width].detach()
    return (
        head(m, params, x),
        (before, after),
        (narrow, run_part(m, f"body.{stage}", params, narrow, share)),
    )


def _slimmable(m: nn.Module) -> str:
    body = getattr(m, "body", None)
    named = body.named_children() if isinstance(body, nn.Sequential) else []
    return next((name for name, part in named if hasattr(part, "slim_width")), "")


def run_part(m: nn.Module, name: str, params: Tensors, *x: Tensor | float) -> Tensor:
    """What a named submodule gives; raises AttributeError for a model without it."""
    part = m.get_submodule(name)
    prefix = name + "."
    own = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
    return run_with(part, own, *x)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Predictor:
    """Frozen parameters of an architecture: called with inputs (B, channels, H, W), it gives logits
    (B, C).
    """

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
