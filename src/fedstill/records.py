"""The frozen records that the parts of the library pass to each other; they hold data and do
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from torch import Tensor

from fedstill.errors import BadPayload
from fedstill.model_spec import ModelSpec
from fedstill.payload import KEEP, NOTHING, Group, Payload, Tensors, many
from fedstill.plan import Plan
from fedstill.queries import Asking
from fedstill.stream import Stream
from fedstill.training import Carry, Ends, Examples, Ran, Step, Teacher

__all__ = [
    "KEEP",
    "NOTHING",
    "SERVER",
    "Carry",
    "Ends",
    "Examples",
    "Group",
    "ModelSpec",
    "Passes",
    "Payload",
    "Plan",
    "Ran",
    "Reply",
    "Stage",
    "State",
    "Step",
    "Teacher",
    "Tensors",
    "View",
    "World",
    "many",
]

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
    hop: bool = False  # a link of a chain: one client acts, and a failure is skipped


@dataclass(frozen=True)
class Reply:
    """What a client sends back: a payload, its number of examples, its metrics; or the reason why
    it failed.

    ``idle``: a real site that has no data in the round's task, and has nothing to do.
    """

    client: int
    up: Payload
    examples: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    round: int = 0
    stage: int = 0
    failure: str = ""
    idle: bool = False


@dataclass(frozen=True)
class State:
    """The server's whole state between two stages: the round, the stage to do next, global
    parameters, named extras.

    ``model``: the architecture of ``params``, where a fold has changed it.
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
        extras = Payload({**self.extra, **groups}, **extra)
        return replace(self, params=self.params if params is None else params, extra=extras)

    def without(self, *groups: str) -> State:
        """The state without some extras (a prefix ``name.`` drops all groups that ``many`` made
        under a name).
        """
        drop = {
            g for g in self.extra for d in groups if g == d or (d.endswith(".") and g.startswith(d))
        }
        return replace(self, extra=Payload({g: v for g, v in self.extra.items() if g not in drop}))


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
    def queries(self) -> Mapping[int, tuple[int, ...]]:
        """The classes that each client asks for; a client that asks for none is left out."""

    @property
    def stream(self) -> Stream:
        """Which tasks there are, and who is in which when."""

    @property
    def asking(self) -> Asking | None:
        """The rule by which clients raise their queries in the run; None: ``queries`` are known
        before.
        """

    def with_queries(self, queries: Mapping[int, tuple[int, ...]]) -> World:
        """The same world with other queries."""

    def model(self, client: int) -> ModelSpec:
        """The architecture of a client, or of the server."""

    def initial(self, client: int) -> Tensors:
        """Initial parameters of a client's architecture; equal architectures start equal."""


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

    def input_products(self, params: Tensors, examples: Examples) -> Tensors:
        """For each linear layer and convolution of the body the sum of a a^T over its inputs a: (d,
        d) float64.
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
        examples = self._of(of)
        return self.passes.logits(
            params, examples if only is None else examples.take(only), model
        ).cpu()

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
        examples = self._of(of)
        return self.passes.features(
            params, examples if only is None else examples.take(only), model
        ).cpu()

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

    def input_products(self, params: Tensors) -> Tensors:
        """What enters the body's layers on the site's own data, in evaluation mode, as sums of a
        a^T (d, d), float64.

        By the name of the layer's weights; of a convolution the patches. Zeros without examples.
        """
        return self.passes.input_products(params, self.data)

    def _of(self, of: str) -> Examples:
        if of == "data":
            return self.data
        if self.public is None:
            raise BadPayload(
                f"client {self.client} has no public data; set [data] public, or choose a method "
                "without"
            )
        return self.public
