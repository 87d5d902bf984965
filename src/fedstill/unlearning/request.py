"""What a model must forget: the request, and the config table ``[unlearning]`` of the new run.

A run with this table is the run without the forgotten data: the same clients with the same ids, the
same samples of clients, and the same draws, except that the forgotten clients never act. A round
whose sample contains one of them has one client less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.config.tables import PackageTable
from fedstill.config.validation import schema_of_record, validated, wrong_value
from fedstill.core.errors import UnknownName
from fedstill.core.fields import Count, CountOrZero
from fedstill.core.files import counted
from fedstill.core.records import Examples, Plan
from fedstill.core.rounds import Schedule
from fedstill.data.client_split import ClientSplit
from fedstill.manifest import Part

TABLE = "unlearning"
"""The name of the config table."""

# ---- the request ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnlearningRequest:
    """What a model must forget.

    ``clients``: ids. ``classes``: class ids. ``examples``: positions in the run's training set.
    """

    clients: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()
    examples: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.clients or self.classes or self.examples)

    def covers(self, request: UnlearningRequest) -> bool:
        """Whether a model that has forgotten this has also forgotten what ``request`` names."""
        clients = set(request.clients) <= set(self.clients)
        classes = set(request.classes) <= set(self.classes)
        examples = set(request.examples) <= set(self.examples)
        return clients and classes and examples

    @property
    def text(self) -> str:
        """The request in words, for messages and tables."""
        parts = []
        if self.clients:
            parts.append(f"client {', '.join(map(str, self.clients))}")
        if self.classes:
            parts.append(f"class {', '.join(map(str, self.classes))}")
        if self.examples:
            parts.append(counted(len(self.examples), "example"))
        return " and ".join(parts)

    def affected(self, split: ClientSplit, labels: NDArray[np.int64]) -> frozenset[int]:
        """The clients that the request names, and those that hold a forgotten example.

        labels: (n,), of the training set.
        """
        holders = split.owners[self.forgets(split, labels)]
        return frozenset(self.clients) | frozenset(holders.tolist())

    def forgets(self, split: ClientSplit, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of ``split.positions`` (n,) is to be forgotten.

        labels: of the training set.
        """
        positions = split.positions
        by_client = np.isin(split.owners, self.clients)
        by_class = np.isin(labels[positions], self.classes)
        by_position = np.isin(positions, self.examples)
        result: NDArray[np.bool_] = by_client | by_class | by_position
        return result

    def remaining(self, split: ClientSplit, labels: NDArray[np.int64]) -> ClientSplit:
        """The split without the forgotten examples."""
        stays = ~self.forgets(split, labels)
        return ClientSplit.of_owners(split.positions[stays], split.owners[stays], len(split))

    def with_emptied_clients(
        self, split: ClientSplit, labels: NDArray[np.int64]
    ) -> UnlearningRequest:
        """The request that also names the clients that it leaves without examples, because they
        cannot train. It is unchanged if no example remains.
        """
        sizes = self.remaining(split, labels).sizes
        emptied = np.flatnonzero(sizes == 0).tolist()
        if len(emptied) == len(split):
            return self
        return replace(self, clients=tuple(sorted({*self.clients, *emptied})))


# ---- strategies by name --------------------------------------------------------------------------

STRATEGIES = {
    part.name: part
    for part in (
        Part(
            "retraining",
            "Train again without the forgotten data; exact.",
            "fedstill.unlearning.retraining:Retraining",
        ),
        Part(
            "fine_tuning",
            "Train on without the forgotten data; the baseline.",
            "fedstill.unlearning.retraining:FineTuning",
        ),
        Part(
            "federaser",
            "Repeat the kept updates of the other clients, in new directions.",
            "fedstill.unlearning.federaser:FedEraser",
        ),
        Part(
            "gradient_ascent",
            "The client raises its own loss near the model of the others, who then repair it.",
            "fedstill.unlearning.gradient_ascent:GradientAscent",
        ),
        Part(
            "subtraction",
            "Subtract the client's updates, then distil from the old model on public data.",
            "fedstill.unlearning.subtraction:Subtraction",
        ),
        Part(
            "sifu",
            "Go back to a round that the client had hardly influenced, add noise, and train on "
            "without it; with a bound.",
            "fedstill.unlearning.sifu:Sifu",
        ),
    )
}
"""All strategies by name; a module is imported when its strategy is used."""


class RunChange(Protocol):
    """What a strategy changes in the rounds of a run (``strategy.Strategy``)."""

    is_exact: ClassVar[bool]
    """Whether the run starts at its own beginning, without the state of another run."""
    stage_plans: ClassVar[Mapping[str, Plan]]
    """The default plans of its stages."""
    farewell_stage: ClassVar[str]
    """The stage of the first new round in which a forgotten client acts a last time, if any."""

    def changed_schedule(
        self, schedule: Schedule, request: UnlearningRequest, first_round: int
    ) -> Schedule:
        """The schedule of the new run."""

    def changed_split(
        self, split: ClientSplit, labels: NDArray[np.int64], request: UnlearningRequest
    ) -> ClientSplit:
        """The examples of each client in the new run."""


def strategy_named(name: str, options: Mapping[str, Any]) -> Any:
    """A strategy with its options. Raises UnknownName, or WrongConfig for a wrong option."""
    if name not in STRATEGIES:
        raise UnknownName("strategy", name, STRATEGIES)
    kind = STRATEGIES[name].load()
    values = validated(schema_of_record(kind), options, f"{TABLE}.options")
    return kind(**values)


# ---- the config table ----------------------------------------------------------------------------


class UnlearningTable(PackageTable):
    """``[unlearning]``: what a run forgets, and how."""

    # ``fedstill unlearn`` writes the table; its keys have the names of keys that users write.
    is_suggested: ClassVar[bool] = False

    clients: tuple[CountOrZero, ...] = Field(
        default=(),
        description="The ids of the clients that are forgotten. They never act, and nothing is "
        "computed from their data.",
    )
    classes: tuple[CountOrZero, ...] = Field(
        default=(),
        description="The ids of the classes that are forgotten: no client trains on their "
        "examples.",
    )
    examples: tuple[CountOrZero, ...] = Field(
        default=(),
        description="The positions, in the training set, of the examples that are forgotten.",
    )
    strategy: str = Field(
        default="retraining",
        description="How the model forgets. All strategies but retraining need the state of "
        "another run: fedstill unlearn prepares it.",
    )
    first_round: Count = Field(
        default=1, description="The first round of the run without the forgotten data."
    )
    options: Mapping[str, Any] = Field(
        default_factory=dict, description="The options of the strategy."
    )

    @property
    def request(self) -> UnlearningRequest:
        """What the run forgets."""
        return UnlearningRequest(
            clients=tuple(self.clients),
            classes=tuple(self.classes),
            examples=tuple(self.examples),
        )

    @property
    def is_optional(self) -> bool:
        """Whether the run forgets nothing: its config then lacks this table."""
        return not self.request

    @property
    def rule(self) -> RunChange:
        """The strategy, with its options; raises UnknownName or WrongConfig."""
        rule: RunChange = strategy_named(self.strategy, self.options)
        return rule

    @property
    def stage_plans(self) -> Mapping[str, Plan]:
        """The default plans of the strategy's stages."""
        if not self.request:
            return {}
        return self.rule.stage_plans

    def check_new_run(self) -> None:
        """Raise WrongConfig for a strategy that needs the state of another run. Without it, SIFU
        would add no noise, and the other strategies would forget nothing.
        """
        if self.request and not self.rule.is_exact:
            raise wrong_value(
                f"{TABLE}.strategy",
                f"= {self.strategy!r} continues from another run",
                "use fedstill unlearn, or strategy = 'retraining'",
            )

    def changed_schedule(self, schedule: Schedule) -> Schedule:
        """The schedule without the forgotten clients, and with the strategy's stages."""
        if not self.request:
            return schedule
        return self.rule.changed_schedule(schedule, self.request, self.first_round)

    @property
    def removes_examples(self) -> bool:
        """Whether the run forgets anything."""
        return bool(self.request)

    def changed_split(self, split: ClientSplit, labels: Tensor) -> ClientSplit:
        """The split without the forgotten examples, as far as the strategy does without them.

        Raises WrongConfig if no example remains.
        """
        if not self.request:
            return split
        changed = self.rule.changed_split(split, labels.numpy(), self.request)
        if not len(changed.positions):
            raise wrong_value(TABLE, "names all training examples, and one must remain")
        return changed

    def changed_public(self, public: Examples) -> Examples:
        """The public set without the forgotten classes, if the run starts at its own beginning.

        Raises WrongConfig if no example remains.
        """
        if not self.classes or not self.rule.is_exact:
            return public
        is_forgotten = torch.isin(public.labels.cpu(), torch.tensor(self.classes))
        if bool(is_forgotten.all()):
            raise wrong_value(TABLE, "names the classes of all public examples; one must remain")
        return public.take((~is_forgotten).nonzero().flatten())


def check_config(settings: Settings) -> None:
    """Raise WrongConfig for a request that a run cannot fulfil (``OuterPackage.config_checks``)."""
    table = settings.package_table(UnlearningTable)
    request = table.request
    if not request:
        return
    unknown = [client for client in request.clients if client >= settings.clients]
    if unknown:
        raise wrong_value(
            f"{TABLE}.clients", f"names {unknown[0]}; clients are 0 to {settings.clients - 1}"
        )
    if len(set(request.clients)) == settings.clients:
        raise wrong_value(f"{TABLE}.clients", "names all clients, and one must remain")
    names_examples = request.classes or request.examples
    if names_examples and settings.on_sites:
        raise wrong_value(
            TABLE,
            "names examples, and sites keep theirs: they remove them themselves",
            "name clients only",
        )
