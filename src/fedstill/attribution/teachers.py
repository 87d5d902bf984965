"""What a client learned from its peers: by phase, and by teacher, its exchange gone through again
with some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from fedstill.attribution.replay import OnAgain, TakenUp, as_in_company, gone_to
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import NoRecorder
from fedstill.core.records import SERVER, Stage, State
from fedstill.core.results import StageResult
from fedstill.core.rounds import run_round
from fedstill.engines.passes import correct_by_class
from fedstill.engines.serial import SerialEngine
from fedstill.methods.fit import FIT, queries_of
from fedstill.methods.local_only import answered, fitted
from fedstill.metrics.shapley import exact, two_ends
from fedstill.models import contract
from fedstill.running.context import run_context, world_in

FEW = 4
"""Teachers up to which all coalitions are asked (16 exchanges); more are asked at two ends (2m +
2).
"""


@dataclass(frozen=True)
class Taught:
    """What an exchange did to a client's model, in class accuracy on the common test set; each
    tensor is (C,) float64.

    ``before``: its model from the stage ``fit``. ``parts``: the change by phase; they sum to the
    whole change.
    ``alone``: what the same phases do without any teacher. ``teachers``: each teacher's
    contribution; with ``alone`` they sum to the change, within ``gap``. ``own``: the client's
    examples by class. ``rule``: how it was divided, as in ``attribution/report.py``.
    """

    client: int
    query: tuple[int, ...]
    own: Tensor
    before: Tensor
    parts: Mapping[str, Tensor]
    alone: Tensor
    teachers: Mapping[int, Tensor]
    gap: Tensor
    rule: str


@dataclass
class _Exchange(NoRecorder):
    """The states after each stage of an exchange, and who taught the client."""

    client: int
    after: dict[str, State] = field(default_factory=dict)
    teachers: list[int] = field(default_factory=list)

    def stage(self, result: StageResult) -> None:
        """Keep the state after a stage (``core.extensions.Recorder``)."""
        stage = result.stage
        payloads = result.payloads
        self.after[stage.name] = result.after
        if stage.name != FIT and self.client in payloads:
            said = [
                r.metrics.get("report", {}).get("teachers")
                for r in result.accepted
                if r.client == self.client
            ]
            used = (
                said[0]
                if said and said[0] is not None
                else list(payloads[self.client].many("peer"))
            )
            self.teachers = self.teachers or sorted(map(int, used))


@dataclass(frozen=True)
class _Lesson:
    """One client's exchange, which can be gone through again with some of its teachers."""

    kept: TakenUp
    client: int
    engine: SerialEngine
    stages: Sequence[Stage]

    def through(self, state: State) -> _Exchange:
        """The rest of a round's stages, in which nobody asks but the client."""
        seen = _Exchange(self.client)
        own = [
            s if s.name == FIT or SERVER in s.clients else replace(s, clients=(self.client,))
            for s in self.stages
        ]
        engine = replace(as_in_company(self.engine), memory=self.engine.memory.in_process())
        run_round(state, own, run_context(self.kept.prepared, engine, seen))
        return seen

    def with_some(self, fit: State, teachers: Sequence[int]) -> Tensor:
        """What the client knows (C,) after the exchange, given the state after the stage ``fit``,
        with these alone.
        """
        there = {self.client, *teachers}
        others = (
            f"{kind}.{c}" for c in fitted(fit) if c not in there for kind in ("model", "size")
        )
        return _known(
            self.kept, self.client, list(self.through(fit.without(*others)).after.values())[-1]
        )


def taught_by_peers(
    kept: TakenUp,
    client: int,
    round: int,
    again: OnAgain,
    exchanges: Callable[[int], None] = lambda count: None,
) -> Taught:
    """A client's exchange with its peers in a round, by phase and by teacher.

    The phases sum to the change. Teachers are the players of a game: what some of them are worth is
    what the client knows after the exchange with these alone; all coalitions are asked of at most
    ``FEW``, two ends of more. ``exchanges`` is told how often the client's exchange will be gone
    through. Raises ConfigError for a method without such an exchange, a client that had no teacher,
    or no common test set.
    """
    stages = list(kept.prepared.settings.schedule(round, kept.prepared.world))
    if stages[0].name != FIT or len(stages) == 1 or kept.prepared.sites.common_test is None:
        raise ConfigError(
            f"{kept.folder} has no exchange between clients that is measured on a common test set"
        )
    memory = kept.memory()
    with kept.computing(), closing(kept.prepared.engine(memory, measured=False)) as engine:
        lesson = _Lesson(kept, client, engine, stages)
        state = gone_to(kept, engine, round, again)
        again(round, round)
        whole = lesson.through(state)
        fit, players = whole.after[FIT], len(whole.teachers)
        if not players:
            raise ConfigError(
                f"client {client} learned from nobody in round {round}: it asked for nothing, or "
                "in vain"
            )
        few = players <= FEW
        exchanges(2**players if few else 2 * players + 2)
        divided = (exact if few else two_ends)(
            lambda some: lesson.with_some(fit, [whole.teachers[i] for i in some]), players
        )
        nobody = lesson.with_some(fit, [])
        known = {name: _known(kept, client, after) for name, after in whole.after.items()}
    return Taught(
        client,
        tuple(queries_of(world_in(kept.prepared, fit)).get(client, ())),
        kept.prepared.sites.counts(client, round),
        known[FIT],
        {name: known[name] - known[was] for was, name in pairwise(known)},
        nobody - known[FIT],
        dict(zip(whole.teachers, divided.values, strict=True)),
        divided.gap,
        "exact" if few else "two ends",
    )


def _known(kept: TakenUp, client: int, state: State) -> Tensor:
    """Class accuracies (C,) float64 of a client's model, or of what it answers with; NaN without
    test examples.
    """
    test, world = kept.prepared.sites.common_test, world_in(kept.prepared, state)
    assert test is not None
    predict = kept.prepared.settings.method.predictors(state, world).get(f"client {client}")
    if predict is None:
        params = answered(state).get(client) or fitted(state)[client]
        predict = contract.predictor(world.model(client), params)
    right = correct_by_class(predict, test, kept.prepared.sites.inputs, world.classes)
    return right.double().cpu() / torch.bincount(test.labels.cpu(), minlength=world.classes)
