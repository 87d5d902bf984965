"""The schedule of a run: the stages of each round, and who acts in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from fedstill.core.extensions import StageActor, StageProvider
from fedstill.core.method import Method
from fedstill.core.records import Stage, World

if TYPE_CHECKING:
    from fedstill.core.topology import Topology


@dataclass(frozen=True)
class Schedule:
    """Stages and actors of a run.

    ``topology``: the stages of a round without those of the ``providers``, which add theirs in
    their order.
    """

    method: Method
    topology: Topology
    providers: tuple[StageProvider, ...] = ()

    def __call__(self, round: int, world: World) -> list[Stage]:
        """The stages of a round, numbered from 0. Round 0 comes before the first round and has only
        stages of providers.
        """
        stages: Sequence[Stage] = self.topology(round, world) if round > 0 else ()
        for provider in self.providers:
            stages = provider.schedule(stages, round, world)
        return [replace(stage, index=index) for index, stage in enumerate(stages)]

    def actor(self, stage: Stage) -> StageActor:
        """Who acts in a stage: the method, unless it has no stage of that name and a provider
        has.
        """
        if stage.name in self.method.stages:
            return self.method
        return self._actors.get(stage.name, self.method)

    @cached_property
    def _actors(self) -> Mapping[str, StageActor]:
        actors: dict[str, StageActor] = {}
        for provider in self.providers:
            actors.update(provider.actors())
        return actors
