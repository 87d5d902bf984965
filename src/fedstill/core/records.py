"""The frozen records that all parts of the library share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor, nn

from fedstill.core.errors import BadPayload
from fedstill.core.payload import KEEP, NOTHING, Group, Keep, Payload, Tensors, many
from fedstill.core.registry import short_name
from fedstill.core.stages import NO_TRAINING, SERVER, Plan, Stage

if TYPE_CHECKING:
    from fedstill.core.stream import Stream

__all__ = [
    "KEEP",
    "NOTHING",
    "NO_TRAINING",
    "OFF",
    "RULED_OUT",
    "SERVER",
    "Examples",
    "Group",
    "Keep",
    "ModelSpec",
    "Passes",
    "Payload",
    "Plan",
    "Reply",
    "Stage",
    "State",
    "Step",
    "Teacher",
    "Tensors",
    "TrainingResult",
    "TrainingStart",
    "View",
    "World",
    "many",
]


# ---- networks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSpec:
    """The specification of a network. Equal specifications are equal architectures.

    ``input_shape``: of one example: (channels, height, width) for an image, (D,) for a vector or a
    row of a table, (channels, L) for a series, (L,) for the token ids of a text. ``classes``: C.
    ``fields``: the network's options, sorted by name. ``widths``: the numbers of units of its
    hidden layers, if they are not the default. ``vocabulary``: the number of token ids; 0 if inputs
    are numbers. ``trains``, ``held``: the trained entries, and the SHA-256 of all others, which do
    not change; empty if all entries are trained. ``adds``: what the method adds to the network;
    initial weights do not depend on it. ``models.building`` explains the last three.
    """

    name: str
    input_shape: tuple[int, ...]
    classes: int
    fields: tuple[tuple[str, Any], ...] = ()
    widths: tuple[int, ...] = ()
    vocabulary: int = 0
    trains: tuple[str, ...] = ()
    held: str = ""
    adds: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The specification with all options. The seed of the initial weights depends on the text
        (``running.world``).
        """
        return self._with_options(self.name)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, of types that JSON supports."""
        return asdict(self)

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> ModelSpec:
        """The specification of which ``to_dict`` made a table; lists may replace tuples.

        Raises TypeError or ValueError for an invalid table.
        """
        spec = cls(**{name: as_pairs(value) for name, value in dict(entries).items()})
        for name, hint in get_type_hints(cls).items():
            value = getattr(spec, name)
            if not isinstance(value, get_origin(hint) or hint):
                raise TypeError(f"{name} is a {type(value).__name__}")
        dict(spec.fields)  # ValueError unless they are pairs
        return spec

    @property
    def label(self) -> str:
        """The specification for human readers: files without their folder, and long options cut."""
        return self._with_options(short_name(self.name), longest=60)

    def sends(self, name: str) -> bool:
        """Whether an entry of the network is trained and sent: all are, unless the network holds
        some.
        """
        return not self.held or matches(name, self.trains)

    def _with_options(self, name: str, longest: int | None = None) -> str:
        options = [(key, str(value)) for key, value in self.fields]
        if self.widths:
            options.append(("widths", str(self.widths)))
        if not options:
            return name
        if longest is not None:
            options = [(key, _at_most(longest, text)) for key, text in options]
        return f"{name}({', '.join(f'{key}={text}' for key, text in options)})"


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches a pattern: the name, a prefix that ends with a dot, or * and ?.

    >>> (
    ...     matches("head.weight", ["head."]),
    ...     matches("body.1.lora_a", ["*.lora_?"]),
    ...     matches("body.1.bias", ["head."]),
    ... )
    (True, True, False)
    """
    return any(_matches_pattern(name, pattern) for pattern in patterns)


def _matches_pattern(name: str, pattern: str) -> bool:
    if pattern.endswith("."):
        return name.startswith(pattern)
    return fnmatchcase(name, pattern)


def _at_most(longest: int, text: str) -> str:
    if len(text) > longest:
        return "…"
    return text


def as_pairs(value: Any) -> Any:
    """A value of a config in a hashable form: tables as sorted pairs, lists as tuples.

    >>> as_pairs({"b": [1, 2], "a": {"c": 3}})
    (('a', (('c', 3),)), ('b', (1, 2)))
    """
    if isinstance(value, Mapping):
        return tuple(sorted((str(k), as_pairs(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(as_pairs(v) for v in value)
    return value


# ---- training ------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")

Teacher = Tensors | tuple[ModelSpec, Tensors]
"""Parameters of the client's network, or another network with its parameters."""

OFF = -1e4
"""The logit of an output that takes no part in training. It is finite: 0 times infinity is NaN."""

RULED_OUT = 100 * OFF
"""The logit of a class that must not be predicted: below the logits of outputs that are off."""


@dataclass(frozen=True)
class Examples:
    """Inputs and labels (n,) int64.

    ``values``: pixels (n, channels, H, W) uint8; numbers (n, …) float, as the network takes them;
    or token ids (n, L) int64, where 0 is padding. ``owners``: the owner of each example, (n,)
    int64, if the data have owners.
    """

    values: Tensor
    labels: Tensor
    owners: Tensor | None = None

    def __len__(self) -> int:
        return self.values.shape[0]

    def __repr__(self) -> str:
        return (
            f"<Examples: {len(self):,} of shape {tuple(self.values.shape[1:])}, "
            f"{self.values.dtype}>"
        )

    def __add__(self, further: Examples) -> Examples:
        """These examples followed by further ones, on the device of these; with owners if both have
        owners.
        """
        further = further.to(str(self.labels.device))
        owners = None
        if self.owners is not None and further.owners is not None:
            owners = torch.cat([self.owners, further.owners])
        return Examples(
            torch.cat([self.values, further.values]),
            torch.cat([self.labels, further.labels]),
            owners,
        )

    def take(self, index: Tensor) -> Examples:
        """The examples at some positions, (n,) int64, on any device."""
        index = index.to(self.labels.device)
        owners = None
        if self.owners is not None:
            owners = self.owners.index_select(0, index)
        return Examples(
            self.values.index_select(0, index), self.labels.index_select(0, index), owners
        )

    def to(self, device: str) -> Examples:
        """The examples on a device."""
        owners = None
        if self.owners is not None:
            owners = self.owners.to(device)
        return Examples(self.values.to(device), self.labels.to(device), owners)


@dataclass(frozen=True)
class TrainingStart:
    """The start of a client's training: parameters, frozen teachers by name, a running trace, and
    constants for the objective.

    ``only``: positions of the examples to train on, (n,) int64; by default, all. A step's ``index``
    refers to these examples, and teachers' logits cover them. ``model``: the network to train, if
    it is not the site's; nothing is measured on such a network. ``examples``: the examples to train
    on, if they are not the site's. Together with ``model`` they are never augmented; so the server
    can train something small without public data. A reply always counts the site's own examples.

    ``head``: which outputs take part in training, (C,) bool; None: all. The engine sets it for
    clients, if there are tasks. ``class_weights``, which the engine sets: the weight of each class
    in losses of labels, (C,); None: all classes weigh the same.
    """

    params: Tensors
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    trace: Tensors = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    only: Tensor | None = None
    model: ModelSpec | None = None
    examples: Examples | None = None
    head: Tensor | None = None
    class_weights: Tensor | None = None

    def __getitem__(self, name: str) -> Any:
        return self.constants[name]


@dataclass(frozen=True)
class TrainingResult:
    """The result of training: the optimiser steps, the learning rate, and the final trace."""

    steps: int
    lr: float
    trace: Tensors


class Step(Protocol):
    """One batch in training, as an objective sees it. Forward passes run when their results are
    first requested.
    """

    x: Tensor  # (B, *shape of an input): images (B, channels, H, W), vectors (B, D), series, tokens
    index: Tensor  # (B,) int64, positions in the training examples (``TrainingStart.only``)
    mask: Tensor  # (B,) float, 1 for real examples and 0 for padding
    params: Tensors  # the parameters in training, for penalties

    @property
    def y(self) -> Tensor:
        """The labels (B,) int64."""

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""

    def logits(self, raw: bool = False) -> Tensor:
        """The student's logits (B, C); -1e4 for outputs that take no part in training, unless
        ``raw``.
        """

    def features(self) -> Tensor:
        """The student's penultimate features (B, D)."""

    def head(self, features: Tensor) -> Tensor:
        """The student's logits (B, C) for features (B, D)."""

    def run(
        self,
        function: Callable[Concatenate[nn.Module, Tensors, Tensor, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call ``function(network, params, x, *args)`` with the network in training, its parameters
        and the batch's inputs, in the run's precision.

        Functions that use parts of a network are next to it in ``fedstill.models``. Each call is a
        separate pass, while ``logits`` and ``features`` share one.
        """

    def run_teacher(
        self,
        name: str,
        function: Callable[Concatenate[nn.Module, Tensors, Tensor, P], T],
        x: Tensor,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call ``function(network, params, x, *args)`` with a frozen teacher and any ``x``, in the
        run's precision. The gradient flows to ``x``.
        """

    def teacher(self, name: str, raw: bool = False) -> Tensor:
        """A teacher's logits (B, C), without gradient; -1e4 for outputs that take no part in
        training, unless ``raw``.
        """

    def teacher_features(self, name: str) -> Tensor:
        """A teacher's penultimate features (B, D), without gradient."""

    def on(self, logits: Tensor) -> Tensor:
        """Logits (B, C) of the method's own, with -1e4 for outputs that take no part in
        training.
        """

    def weighted(self, losses: Tensor) -> Tensor:
        """Losses (B,) of the labels ``y``, each multiplied by the weight of its class; unchanged if
        the plan has no ``class_weights``.

        An objective that reads labels must call it, otherwise ``class_weights`` are rejected.
        """

    def mean(self, values: Tensor) -> Tensor:
        """The mean () of values (B,) over real examples."""


# ---- replies and states --------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """A client's reply: a payload, its number of examples and its metrics; or the reason of its
    failure.

    ``idle``: whether a real site has no data in the round's task, and so nothing to do.
    """

    client: int
    content: Payload
    examples: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    round: int = 0
    stage: int = 0
    failure: str = ""
    idle: bool = False


LABELS = "labels"
"""The group of a client's label counts (C,), and of all clients' in the server's state
(clients, C).
"""


@dataclass(frozen=True)
class State:
    """The complete state of the server between two stages: the round, the index of the next stage,
    the global parameters, and named extras.

    ``model``: the architecture of ``params``, if ``aggregate`` has changed it.
    """

    params: Tensors
    extra: Payload = NOTHING
    round: int = 1
    stage: int = 0
    model: ModelSpec | None = None

    def next(
        self, params: Tensors | None = None, groups: Mapping[str, Group] = NOTHING, **extra: Group
    ) -> State:
        """The state with new parameters or extras, which are keywords or ``groups``; everything
        else stays.
        """
        if params is None:
            params = self.params
        return replace(self, params=params, extra=Payload({**self.extra, **groups}, **extra))

    def without(self, *groups: str) -> State:
        """The state without some extras.

        A prefix ``name.`` drops all groups that ``many`` made under that name.
        """
        prefixes = tuple(group for group in groups if group.endswith("."))
        remaining = {
            name: group
            for name, group in self.extra.items()
            if name not in groups and not name.startswith(prefixes)
        }
        return replace(self, extra=Payload(remaining))


# ---- what the server and the clients see ---------------------------------------------------------


class World(Protocol):
    """What the server and all clients know before a run. It has no data."""

    @property
    def clients(self) -> int: ...
    @property
    def classes(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def public(self) -> int:
        """The number of public examples."""

    @property
    def seed(self) -> int: ...
    @property
    def plans(self) -> Mapping[str, Plan]: ...
    @property
    def stream(self) -> Stream:
        """The run's tasks, and the task of each client in each round."""

    def model(self, client: int) -> ModelSpec:
        """The architecture of a client, or of the server."""

    def initial(self, client: int) -> Tensors:
        """Initial parameters of a client's architecture; the same for equal architectures."""

    def predictor(
        self, params: Tensors, model: ModelSpec | None = None
    ) -> Callable[[Tensor], Tensor]:
        """A function from inputs (B, ...) to the logits (B, C) of a model; by default, of the
        server's architecture.
        """

    def get(self, kind: type[T]) -> T | None:
        """The record of a class that a capability has added; None if there is none."""

    def extend(self, *records: object) -> World:
        """The world with further records, which replace those of the same classes."""


class Passes(Protocol):
    """Passes over data that ``ClientWork.begin`` and ``ClientWork.end`` can use.

    model: the network of the parameters; by default, the site's.
    """

    def logits(self, params: Tensors, examples: Examples, model: ModelSpec | None = None) -> Tensor:
        """Logits (n, C) in evaluation mode, in the order of the examples."""

    def features(
        self, params: Tensors, examples: Examples, model: ModelSpec | None = None
    ) -> Tensor:
        """Features (n, D), the output of the body, in evaluation mode."""

    def gradients(
        self, params: Tensors, examples: Examples, loss: Any, batch: int, seed: int | None = None
    ) -> Iterator[Tensors]:
        """The gradient of each batch's mean ``loss(logits, labels) -> (B,)``, by trained entry."""

    def run(
        self,
        function: Callable[[nn.Module, Tensors, Tensor], T],
        params: Tensors,
        examples: Examples,
        model: ModelSpec | None = None,
    ) -> Iterator[T]:
        """Call ``function(network, params, x)`` for each shard of the examples, in their order and
        without gradients.

        The network is in evaluation mode and computes in float32, whatever precision training has.
        """


@dataclass(frozen=True)
class View:
    """What a site sees in a stage: its model, its data and their label counts, the public set, and
    held-out data.
    """

    client: int
    model: ModelSpec
    data: Examples
    counts: Tensor  # (C,) int64
    public: Examples | None
    validation: Examples | None
    test: Examples | None
    passes: Passes
    query: tuple[int, ...] = ()  # the classes that this client asks its peers for
    # The test sets of a real site, by task.
    tests: Mapping[int, Examples] = field(default_factory=dict)
    # (C,) bool, the outputs that take part in the stage's training; None: all.
    head: Tensor | None = None
    # (C,) int64, the label counts of all clients, if the plan's class weights need them.
    label_totals: Tensor | None = None

    @property
    def proportions(self) -> Tensor:
        """Label proportions (C,) float64, summing to 1; zeros for a site without examples."""
        total = self.counts.sum().clamp(min=1)
        return self.counts.double() / total

    def logits(
        self,
        params: Tensors,
        of: Literal["data", "public"] = "data",
        only: Tensor | None = None,
        model: ModelSpec | None = None,
    ) -> Tensor:
        """Logits (n, C) on the site's data or on the public data, in their order.

        ``only``: positions of examples, (n,) int64; by default, all. ``model``: the network of the
        parameters; by default, the site's.
        """
        return self.passes.logits(params, self._examples(of, only), model).cpu()

    def features(
        self,
        params: Tensors,
        of: Literal["data", "public"] = "data",
        only: Tensor | None = None,
        model: ModelSpec | None = None,
    ) -> Tensor:
        """Features (n, D) in evaluation mode; D is ``models.contract.width`` of the network.

        ``of``, ``only``, ``model``: as for ``logits``. Raises IncompatibleMethod for a network
        without body and head.
        """
        return self.passes.features(params, self._examples(of, only), model).cpu()

    def gradients(
        self,
        params: Tensors,
        loss: Any,
        batch: int,
        of: Literal["data", "public"] = "data",
        seed: int | None = None,
    ) -> Iterator[Tensors]:
        """The gradient of each batch's mean ``loss(logits, labels) -> (B,)``, in evaluation mode.

        The order of the examples is fixed and mixes the classes; stop iterating when you have
        enough. ``seed``: augment the examples as in training, with this seed; None: do not augment.
        """
        return self.passes.gradients(params, self._examples(of), loss, batch, seed)

    def _examples(self, source: str, only: Tensor | None = None) -> Examples:
        examples = self.data
        if source != "data":
            if self.public is None:
                raise BadPayload(
                    f"client {self.client} has no public data; set [data] public, or choose a "
                    "method without"
                )
            examples = self.public
        if only is not None:
            examples = examples.take(only)
        return examples
