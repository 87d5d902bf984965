"""Stages that any method may have, and the methods that act in them alone: fit, ridge, census."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstill.fitting import FIT, Fit
from fedstill.method import Method
from fedstill.records import Payload, Reply, Stage, State, World
from fedstill.ridge import RIDGE, SendSums, empty_sums, solved
from fedstill.topology import CENSUS
from fedstill.work import Census, ClientWork


@dataclass(frozen=True)
class OnlyFit(Method):
    """The stage ``fit`` for a method that has none: models trained alone are measured, and not folded."""

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
    """The stage ``ridge`` for a method that has none: the global model's last layer is solved from clients' sums."""

    stages: ClassVar[frozenset[str]] = frozenset({RIDGE})

    def work(self, stage: Stage) -> ClientWork:
        return SendSums()

    def expects(self, client: int, stage: Stage, world: World) -> Payload:
        return empty_sums(world.model(client), world.classes)

    def fold(self, state: State, replies: Sequence[Reply], stage: Stage, world: World) -> State:
        gram, cross = (torch.stack([r.up.tensor(g) for r in replies]).sum(0) for g in ("gram", "cross"))
        head = {k: v.to(state.params[k].dtype) for k, v in solved(gram, cross, ridge=1.0).items()}
        return state.next(params={**state.params, **head})


@dataclass(frozen=True)
class OnlyCensus(Method):
    """The stage ``census`` of a later task, for any method: each client's label counts take the place of its old ones.

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


ONLY_FIT = OnlyFit()
ANYWHERE: Mapping[str, Method] = {FIT: ONLY_FIT, RIDGE: OnlyRidge(), CENSUS: OnlyCensus()}
"""Stages that any method may have, and who acts in them where the method has none of that name."""


def acting(method: Method, stage: Stage) -> Method:
    """The method that acts in a stage: of ``ANYWHERE``, in a stage that the method does not know, else itself."""
    return method if stage.name in method.stages else ANYWHERE.get(stage.name, method)
