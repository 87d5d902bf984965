"""Stages that any method may have, and the methods that act in them alone: fit, ridge, census,
task_test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstill.fitting import FIT, Fit
from fedstill.method import Method
from fedstill.records import (
    KEEP,
    NOTHING,
    SERVER,
    Carry,
    Payload,
    Ran,
    Reply,
    Stage,
    State,
    Tensors,
    View,
    World,
)
from fedstill.ridge import RIDGE, SendSums, empty_sums, solved
from fedstill.topology import CENSUS, TASK_TEST
from fedstill.work import Census, ClientWork


@dataclass(frozen=True)
class OnlyFit(Method):
    """The stage ``fit`` for a method that has none: models trained alone are measured, and not
    folded.
    """

    stages: ClassVar[frozenset[str]] = frozenset({FIT})
    reusable: ClassVar[frozenset[str]] = frozenset({FIT})

    def down(self, state: State, client: int, stage: Stage, world: World) -> Payload | None:
        return Payload(params=world.initial(client))

    def work(self, stage: Stage) -> ClientWork:
        return Fit()

    def fold(self, state: State, replies: Sequence[Reply], stage: Stage, world: World) -> State:
        return state


@dataclass(frozen=True)
class OnlyRidge(Method):
    """The stage ``ridge`` for a method that has none: the global model's last layer is solved from
    clients' sums.
    """

    stages: ClassVar[frozenset[str]] = frozenset({RIDGE})

    def work(self, stage: Stage) -> ClientWork:
        return SendSums()

    def expects(self, client: int, stage: Stage, world: World) -> Payload:
        return empty_sums(world.model(client), world.classes)

    def fold(self, state: State, replies: Sequence[Reply], stage: Stage, world: World) -> State:
        gram, cross = (
            torch.stack([r.up.tensor(g) for r in replies]).sum(0) for g in ("gram", "cross")
        )
        head = {k: v.to(state.params[k].dtype) for k, v in solved(gram, cross, ridge=1.0).items()}
        return state.next(params={**state.params, **head})


@dataclass(frozen=True)
class OnlyCensus(Method):
    """The stage ``census`` of a later task, for any method: each client's label counts take the
    place of its old ones.

    A client that is not there, or fails, has zeros, as it has no example that could count.
    """

    def down(self, state: State, client: int, stage: Stage, world: World) -> Payload | None:
        return Payload()

    def work(self, stage: Stage) -> ClientWork:
        return Census()

    def expects(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(labels=torch.zeros(world.classes, dtype=torch.int64))

    def fold(self, state: State, replies: Sequence[Reply], stage: Stage, world: World) -> State:
        labels = torch.zeros(world.clients, world.classes, dtype=torch.int64)
        for reply in replies:
            labels[reply.client] = reply.up.tensor("labels")
        return state.next(labels=labels)


class BeTested(ClientWork):
    """Test the model that was sent: nothing is trained, sent or remembered; the engine reports the
    accuracy.
    """

    def begin(self, down: Payload, memory: Payload, view: View, world: World) -> Carry:
        return Carry(params=down.params)

    def end(
        self, params: Tensors, carry: Carry, ran: Ran, view: View, world: World
    ) -> tuple[Payload, Payload]:
        return NOTHING, KEEP


@dataclass(frozen=True)
class OnlyTest(Method):
    """The stage ``task_test`` for any method with a global model: real sites test it on their own
    data, by task.

    A client with a network of its own is not asked.
    """

    stages: ClassVar[frozenset[str]] = frozenset({TASK_TEST})

    def down(self, state: State, client: int, stage: Stage, world: World) -> Payload | None:
        same = world.model(client) == (state.model or world.model(SERVER))
        return Payload(params=state.params) if state.params and same else None

    def work(self, stage: Stage) -> ClientWork:
        return BeTested()

    def expects(self, client: int, stage: Stage, world: World) -> Payload:
        return NOTHING

    def fold(self, state: State, replies: Sequence[Reply], stage: Stage, world: World) -> State:
        return state


ONLY_FIT = OnlyFit()
ANYWHERE: Mapping[str, Method] = {
    FIT: ONLY_FIT,
    RIDGE: OnlyRidge(),
    CENSUS: OnlyCensus(),
    TASK_TEST: OnlyTest(),
}
"""Stages that any method may have, and who acts in them where the method has none of that name."""


def acting(method: Method, stage: Stage) -> Method:
    """The method that acts in a stage: of ``ANYWHERE``, in a stage that the method does not know,
    else itself.
    """
    return method if stage.name in method.stages else ANYWHERE.get(stage.name, method)
