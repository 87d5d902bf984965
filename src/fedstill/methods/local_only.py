"""Local only: every client trains a model of its own and exchanges nothing; what all one-shot
methods start from.

Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments"
(QKT), appendix A.2.
State: no global parameters; model.N = what client N fitted alone; size.N = its number of examples.
Memory: nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstill.core.capabilities import Need
from fedstill.core.method import Method
from fedstill.core.records import Payload, Plan, Reply, Stage, State, Tensors, World, many
from fedstill.core.registry import method
from fedstill.core.work import ClientWork
from fedstill.methods.fit import FIT, FITTING, Fit


@method("local_only")
@dataclass(frozen=True)
class LocalOnly(Method):
    """Each client trains alone; nothing is exchanged."""

    topology: ClassVar[str] = "peer_to_peer"
    schedule: ClassVar[Mapping[str, Any]] = {"transfer": False, "refine": False}
    stages: ClassVar[frozenset[str]] = frozenset({FIT})
    needs: ClassVar[Need] = Need.NOTHING
    plans: ClassVar[Mapping[str, Plan]] = {FIT: FITTING}
    personal: ClassVar[frozenset[str]] = frozenset({FIT})
    reusable: ClassVar[frozenset[str]] = frozenset({FIT})

    def initial_state(self, world: World) -> State:
        return State(params={})  # there is no global model

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        """In a later round a client goes on from the model that it ended with."""
        before = state.extra.many("student").get(client) or fitted(state).get(client)
        return Payload(params=before or world.initial(client))

    def work(self, stage: Stage) -> ClientWork:
        return Fit()

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        sizes = {f"size.{r.client}": r.examples for r in replies}
        models = many("model", {r.client: r.content.params for r in replies})
        answered = state.without(*(f"student.{r.client}" for r in replies))  # of the round before
        return answered.next(groups={**models, **sizes})


def with_students(state: State, replies: Sequence[Reply]) -> State:
    """The state with what clients ended with, in groups ``student``."""
    students = many("student", {r.client: r.content.params for r in replies})
    return state.next(groups=students)


def answered(state: State) -> dict[int, Tensors]:
    """What clients ended with, by client, as ``with_students`` put it there."""
    return state.extra.many("student")


def fitted(state: State) -> dict[int, Tensors]:
    """The models that clients trained alone, by client."""
    return state.extra.many("model")
