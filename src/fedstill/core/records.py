"""The frozen records that the parts of the library pass to each other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import (
    TYPE_CHECKING,
    Annotated,
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
from annotated_types import Interval, Len
from torch import Tensor, nn

from fedstill.core.errors import BadPayload, ConfigError
from fedstill.core.fields import (
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    PositiveShare,
    Share,
    check_ranges,
)
from fedstill.core.payload import KEEP, NOTHING, Group, Keep, Payload, Tensors, many
from fedstill.core.registry import short_name

if TYPE_CHECKING:
    from fedstill.core.stream import Stream

__all__ = [
    "KEEP",
    "NOTHING",
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


# A network by name, as records and messages name it.


@dataclass(frozen=True)
class ModelSpec:
    """A network by name: what it is built from, so that equal specs are equal architectures.

    ``input_shape``: of one example: (channels, height, width) of an image, (D,) of a vector or a
    row of a table, (channels, L) of a series, (L,) of a text's token ids. ``vocabulary``: how many
    token ids there are, 0 where inputs are numbers. ``classes``: C; ``fields``: its options, sorted
    by name. ``widths``: the numbers of units of its hidden layers, where they are not the network's
    own. ``trains``, ``held``: which entries are trained, and the SHA-256 of all others, which stay
    as they are (``models.parameters``); empty: all are trained. ``adds``: what the method of a
    run adds to it (``models.parameters``); initial weights do not depend on that.
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
        """The whole spec. The seed of the initial weights is derived from this text."""
        return self._with_options(self.name)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, of types that JSON has."""
        return asdict(self)

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> ModelSpec:
        """The spec that ``to_dict`` gave, also if JSON has made lists of tuples.

        Raises TypeError or ValueError for anything else.
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
        """The same as people read it, without the folder of a file, and without tables."""
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
            options = [(key, text if len(text) <= longest else "…") for key, text in options]
        return f"{name}({', '.join(f'{key}={text}' for key, text in options)})"


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether an entry is named: by its whole name, by a beginning with a point, or with * and ?.

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


def as_pairs(value: Any) -> Any:
    """A value of a config in a form that can be hashed: tables as sorted pairs, lists as tuples.

    >>> as_pairs({"b": [1, 2], "a": {"c": 3}})
    (('a', (('c', 3),)), ('b', (1, 2)))
    """
    if isinstance(value, Mapping):
        return tuple(sorted((str(k), as_pairs(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(as_pairs(v) for v in value)
    return value


# Plan: how a stage trains, and the learning rate of each round.


@dataclass(frozen=True)
class Plan:
    """How a stage trains: length, batches and optimiser. ``[plan.STAGE]`` sets the values of one
    stage.

    0 epochs and 0 steps train nothing. ``norm`` "frozen" keeps normalisation layers in evaluation
    mode. ``patience`` and ``keep = "best"`` need the examples of ``validation``, on which
    ``ClientWork.validation_score`` is computed.
    """

    epochs: CountOrZero = 5
    """The number of passes over the client's data."""
    steps: CountOrZero = 0
    """The number of batches in a stage. 0: as many as the epochs contain."""
    batch: Count = 50
    """The number of examples in a batch."""
    shuffle: bool = True
    """Whether examples are shuffled in every epoch."""
    optimiser: Literal["sgd", "adam"] = "sgd"
    """The optimiser."""
    lr: Positive = 0.01
    """The learning rate of the first round."""
    lr_decay: PositiveShare = 1.0
    """The factor by which the learning rate is multiplied after every round."""
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """The momentum of SGD."""
    weight_decay: NonNegative = 0.0
    """The weight of the L2 penalty on the parameters."""
    clip_norm: NonNegative = 0.0
    """The norm to which gradients are clipped. 0: no clipping."""
    norm: Literal["batch", "frozen"] = "batch"
    """Whether normalisation layers use the statistics of the batch, or keep the received
    statistics.
    """
    validation: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """The share of a client's data that is held out for validation."""
    patience: CountOrZero = 0
    """The number of epochs without improvement after which a client stops. 0: no early stopping."""
    keep: Literal["last", "best"] = "last"
    """Which model a client returns: that of the last epoch, or of the best epoch on held-out
    examples. The server, and clients with too few examples to hold one out, return the last.
    """
    lr_schedule: Literal["constant", "step", "cosine"] = "constant"
    """The schedule of the learning rate over rounds: lr_decay in every round, lr_decay in steps, or
    half a cosine.
    """
    lr_step: Count = 1
    """The number of rounds between two multiplications by lr_decay, with lr_schedule = "step"."""
    lr_end: Share = 0.0
    """The share of lr at which the cosine ends."""
    lr_warmup: CountOrZero = 0
    """The number of warm-up rounds, in which the learning rate rises in equal steps up to lr."""
    lr_rounds: CountOrZero = 0
    """The number of rounds of the cosine, including its warm-up. 0: all rounds of the run."""
    class_weights: (
        Literal["none", "balanced", "balanced_overall"]
        | Annotated[tuple[NonNegative, ...], Len(2, 1_000_000)]
    ) = "none"
    """The weights of classes in losses on labels: equal, balanced by the labels of each client or
    of all clients, or one weight per class.
    """

    def __post_init__(self) -> None:
        check_ranges(self)

    def batches_per_epoch(self, examples: int, joined: bool = False) -> int:
        """How many batches an epoch has; ``joined``: without a last one of a single example.

        >>> Plan(batch=20).batches_per_epoch(41), Plan(batch=20).batches_per_epoch(41, joined=True)
        (3, 2)
        """
        return -(-examples // self.batch) - joined

    def leaves_one_over(self, examples: int) -> bool:
        """Whether training reaches an epoch's last batch and it holds a single example, after other
        batches.
        """
        ends_with_one = 1 < self.batch < examples and examples % self.batch == 1
        is_reached = self.steps == 0 or self.steps >= self.batches_per_epoch(examples)
        return ends_with_one and is_reached

    def lr_at(self, round: int) -> float:
        """The learning rate of a round (1 is the first): nothing is remembered, so a resumed run
        has the same.

        With W = ``lr_warmup``, T = ``lr_rounds`` and t = round - 1 - W, the rounds since the
        warm-up: lr (round / (W + 1)) while t < 0; then lr lr_decay^t ("constant"), lr
        lr_decay^floor(t / lr_step) ("step"), or lr (e + (1 - e) (1 + cos(pi t / (T - W))) / 2) with
        e = ``lr_end`` ("cosine", without ``lr_decay``).
        Source: Loshchilov & Hutter, "SGDR" (2017), equation 5, without restarts; Goyal et al.,
        "Accurate, Large Minibatch SGD" (2017), section 2.2, for the warm-up.
        Reading: t = 0 is the first round with lr itself, and the end of the cosine is the round
        after the last: no round trains with a rate of 0. Rounds beyond the last have the last
        one's. Raises ConfigError for "cosine" without a round after the warm-up.
        """
        since = max(round, 1) - 1 - self.lr_warmup
        if since < 0:
            return float(self.lr * (max(round, 1) / (self.lr_warmup + 1)))
        if self.lr_schedule == "cosine":
            length = self.lr_rounds - self.lr_warmup
            if length < 1:
                raise ConfigError(
                    f"plan: lr_rounds = {self.lr_rounds} and lr_warmup = {self.lr_warmup} leave "
                    "the cosine no round"
                )
            share = (1 + math.cos(math.pi * min(since, length - 1) / length)) / 2
            return float(self.lr * (self.lr_end + (1 - self.lr_end) * share))
        times = since // self.lr_step if self.lr_schedule == "step" else since
        return float(self.lr * self.lr_decay**times)


# What a client's training starts with and what it did, and one batch as an objective sees it.


P = ParamSpec("P")
T = TypeVar("T")

Teacher = Tensors | tuple[ModelSpec, Tensors]

OFF = -1e4
"""The logit of an output that takes no part: finite, as 0 times infinity has no value."""

RULED_OUT = 100 * OFF
"""The logit of a class that must not be predicted: below that of every output that is off."""


@dataclass(frozen=True)
class Examples:
    """Inputs and labels (n,) int64. The type of the inputs says what they are.

    ``values``: pixels (n, channels, H, W) uint8; numbers (n, …) float, as the network takes them;
    or token ids (n, L) int64, of which 0 is padding. ``owners``: (n,) int64, whose each example is,
    where the data say so.
    """

    values: Tensor
    labels: Tensor
    owners: Tensor | None = None

    @property
    def images(self) -> Tensor:
        """The old name of ``values``; it goes with the next release."""
        warnings.warn("Examples.images is now Examples.values", DeprecationWarning, stacklevel=2)
        return self.values

    def __len__(self) -> int:
        return self.values.shape[0]

    def __repr__(self) -> str:
        return (
            f"<Examples: {len(self):,} of shape {tuple(self.values.shape[1:])}, "
            f"{self.values.dtype}>"
        )

    def __add__(self, further: Examples) -> Examples:
        """These examples and further ones behind them, on the device of these; the owners, where
        both have them.
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
        """The examples at some positions, (n,) int64, on whatever device."""
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
    """What a client starts a stage with: parameters, frozen teachers by name, a running trace, and
    constants.

    ``model``: what is trained, if it is not the site's network. Of another network than the site's
    nothing is measured. ``examples``: what it is trained on, if it is not what the site has. With a
    ``model`` they are taken as they are, never augmented; so the server may train something small
    without public data. Replies count the site's own examples, whatever is trained on.
    ``only``: positions of the examples to train on, (n,) int64; all if it is left out. A step's
    ``index`` counts among them, and teachers' logits cover them.
    ``head``: which outputs take part in training, (C,) bool, set by the engine; None: all.
    ``class_weights``: the weight of each class in losses of labels, (C,), set by the engine; None:
    all alike.
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
    """What training did: optimiser steps, the learning rate it used, the trace at its end."""

    steps: int
    lr: float
    trace: Tensors


class Step(Protocol):
    """One batch in training, as an objective sees it. A forward pass runs when a result is first
    requested.
    """

    x: Tensor  # (B, *shape of an input): images (B, channels, H, W), vectors (B, D), series, tokens
    index: Tensor  # (B,) int64, positions in the site's data
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
        """The student's logits (B, C) of given features (B, D)."""

    def run(
        self,
        function: Callable[Concatenate[nn.Module, Tensors, Tensor, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """``function(network, params, x, *args)`` of the network and the parameters in training and
        the batch's inputs, in the run's precision.

        Functions that take a network apart are next to it in ``fedstill.models``. Each call is a
        pass of its own, while ``logits`` and ``features`` share one.
        """

    def run_teacher(
        self,
        name: str,
        function: Callable[Concatenate[nn.Module, Tensors, Tensor, P], T],
        x: Tensor,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """``function(network, params, x, *args)`` of a frozen teacher and any ``x``, in the run's
        precision, with gradient to ``x``.
        """

    def teacher(self, name: str, raw: bool = False) -> Tensor:
        """A teacher's logits (B, C), without gradient; as ``logits`` for outputs that take no
        part.
        """

    def teacher_features(self, name: str) -> Tensor:
        """A teacher's penultimate features (B, D), without gradient."""

    def on(self, logits: Tensor) -> Tensor:
        """Logits (B, C) that a method made itself: -1e4 for outputs that take no part, the others
        as they are.
        """

    def weighted(self, losses: Tensor) -> Tensor:
        """Losses (B,) of the labels ``y``, each times the weight of its class; as they are if the
        plan has no ``class_weights``.

        An objective that reads labels must call it: otherwise ``class_weights`` are refused.
        """

    def mean(self, values: Tensor) -> Tensor:
        """The mean () of values (B,) over real examples."""


# Stages, replies and states; and what clients and the server may see.


SERVER = -1
"""The client id of the server, whose data are the public set."""


@dataclass(frozen=True)
class Stage:
    """One step of a round: its name, the clients that act in it, and whether on their private or on
    public data.
    """

    round: int
    index: int
    name: str
    clients: tuple[int, ...]
    view: Literal["private", "public"] = "private"
    sequential: bool = False  # a link of a chain: one client acts, and a failure is skipped


@dataclass(frozen=True)
class Reply:
    """What a client sends back: a payload, its number of examples, its metrics; or the reason why
    it failed.

    ``idle``: a real site that has no data in the round's task, and has nothing to do.
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
    """The server's whole state between two stages: the round, the stage to do next, global
    parameters, named extras.

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
        """The state with other parameters or extras, by name or as ``groups``; everything else is
        kept.
        """
        if params is None:
            params = self.params
        return replace(self, params=params, extra=Payload({**self.extra, **groups}, **extra))

    def without(self, *groups: str) -> State:
        """The state without some extras.

        A prefix ``name.`` drops all groups that ``many`` made under that name.
        """
        prefixes = tuple(group for group in groups if group.endswith("."))
        kept = {
            name: group
            for name, group in self.extra.items()
            if name not in groups and not name.startswith(prefixes)
        }
        return replace(self, extra=Payload(kept))


class World(Protocol):
    """What every side may know before anything is sent; never data."""

    @property
    def clients(self) -> int: ...
    @property
    def classes(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def public(self) -> int:
        """How many public examples there are."""

    @property
    def seed(self) -> int: ...
    @property
    def plans(self) -> Mapping[str, Plan]: ...
    @property
    def stream(self) -> Stream:
        """Which tasks there are, and who is in which when."""

    def model(self, client: int) -> ModelSpec:
        """The architecture of a client, or of the server."""

    def initial(self, client: int) -> Tensors:
        """Initial parameters of a client's architecture; equal architectures start equal."""

    def predictor(
        self, params: Tensors, model: ModelSpec | None = None
    ) -> Callable[[Tensor], Tensor]:
        """A function from inputs (B, ...) to the logits (B, C) of these parameters; of the server's
        architecture, or of another.
        """

    def get(self, kind: type[T]) -> T | None:
        """The record of a kind that a capability has added; None without such a record."""

    def extend(self, *records: object) -> World:
        """The same world with further records, in place of those of the same kinds."""


class Passes(Protocol):
    """The passes over a site's data that ``begin`` and ``end`` may ask the engine for."""

    def logits(self, params: Tensors, examples: Examples, model: ModelSpec | None = None) -> Tensor:
        """Logits (n, C) in evaluation mode, in the order of the examples; of the site's network, or
        of another.
        """

    def features(
        self, params: Tensors, examples: Examples, model: ModelSpec | None = None
    ) -> Tensor:
        """Features (n, D), what the body gives, in evaluation mode; of the site's network, or of
        another.
        """

    def gradients(
        self, params: Tensors, examples: Examples, loss: Any, batch: int, seed: int | None = None
    ) -> Iterator[Tensors]:
        """For each batch, the gradient of its mean ``loss(logits, labels) -> (B,)`` by trained
        entry.
        """

    def run(
        self,
        function: Callable[[nn.Module, Tensors, Tensor], T],
        params: Tensors,
        examples: Examples,
        model: ModelSpec | None = None,
    ) -> Iterator[T]:
        """``function(network, params, x)`` for each shard of the examples, in their order, without
        gradient; of the site's network, or of another.

        The network is in evaluation mode, and in float32 whatever precision training has.
        """


@dataclass(frozen=True)
class View:
    """What one site sees in one stage: its model and data, its label counts, the public set, its
    own held-out data.
    """

    client: int
    model: ModelSpec
    data: Examples
    counts: Tensor  # (C,) int64
    public: Examples | None
    validation: Examples | None
    test: Examples | None
    passes: Passes
    query: tuple[int, ...] = ()  # the classes that this client asks for
    # of a real site with tasks: its own test set of each
    tests: Mapping[int, Examples] = field(default_factory=dict)
    # (C,) bool, the outputs that take part in the stage's training; None: all
    head: Tensor | None = None
    # (C,) int64, the label counts of all clients, where the plan's class weights need them
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
        """Logits (n, C) of these parameters on the site's own or on the public data, in their
        order.

        ``only``: positions, (n,) int64; all if it is left out. ``model``: their network, if it is
        not the site's.
        """
        return self.passes.logits(params, self._of(of, only), model).cpu()

    def features(
        self,
        params: Tensors,
        of: Literal["data", "public"] = "data",
        only: Tensor | None = None,
        model: ModelSpec | None = None,
    ) -> Tensor:
        """Features (n, D) of these parameters, in evaluation mode; D is ``models.contract.width``
        of their network.

        ``of``, ``only``, ``model``: as for ``logits``. Raises IncompatibleMethod for a network
        without body and head.
        """
        return self.passes.features(params, self._of(of, only), model).cpu()

    def gradients(
        self,
        params: Tensors,
        loss: Any,
        batch: int,
        of: Literal["data", "public"] = "data",
        seed: int | None = None,
    ) -> Iterator[Tensors]:
        """For each batch, the gradient of its mean ``loss(logits, labels) -> (B,)``, in evaluation
        mode.

        The order is fixed and mixes the classes; stop when there are enough. ``seed``: augment as
        in training, from it.
        """
        return self.passes.gradients(params, self._of(of), loss, batch, seed)

    def _of(self, of: str, only: Tensor | None = None) -> Examples:
        examples = self.data
        if of != "data":
            if self.public is None:
                raise BadPayload(
                    f"client {self.client} has no public data; set [data] public, or choose a "
                    "method without"
                )
            examples = self.public
        if only is not None:
            examples = examples.take(only)
        return examples
