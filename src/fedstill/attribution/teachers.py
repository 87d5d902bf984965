"""What a client learned from its peers: by phase, and by teacher, its exchange replayed with some
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.core.extensions import NoRecorder, StageResult
from fedstill.core.records import SERVER, Stage, State
from fedstill.engines.passes import correct_by_class
from fedstill.methods.fit import FIT, fitted_models, queries_of, student_models
from fedstill.metrics.shapley import exact, two_ends
from fedstill.models import contract
from fedstill.running.preparation import Prepared
from fedstill.running.replay import Announce, Replay, Session

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
        self.after[stage.name] = result.after
        if stage.name != FIT and self.client in result.payloads and not self.teachers:
            self.teachers = sorted(map(int, self._teachers(result)))

    def _teachers(self, result: StageResult) -> Sequence[int]:
        """Those that the client reports, or else those whose models it was sent."""
        for reply in result.accepted:
            if reply.client == self.client:
                reported: Sequence[int] | None = reply.metrics.get("report", {}).get("teachers")
                if reported is not None:
                    return reported
        return list(result.payloads[self.client].many("peer"))


@dataclass(frozen=True)
class _Lesson:
    """One client's exchange, which can be replayed with some of its teachers.

    ``session``: before the round of the exchange. ``stages``: those of the round.
    """

    session: Session
    client: int
    stages: Sequence[Stage]

    @property
    def prepared(self) -> Prepared:
        """The run."""
        return self.session.replay.prepared

    def replayed(self, state: State) -> _Exchange:
        """The rest of the round, in which nobody asks but the client."""
        exchange = _Exchange(self.client)
        stages = [self._of_client(stage) for stage in self.stages]
        self.session.fork(state).in_company().run(stages, exchange)
        return exchange

    def taught_by(self, fit: State, teachers: Sequence[int]) -> Tensor:
        """What the client knows (C,) after the exchange with these teachers alone, given the state
        after the stage ``fit``.
        """
        present = {self.client, *teachers}
        absent = [client for client in fitted_models(fit) if client not in present]
        models = [f"model.{client}" for client in absent]
        sizes = [f"size.{client}" for client in absent]
        exchange = self.replayed(fit.without(*models, *sizes))
        return self.known(list(exchange.after.values())[-1])

    def known(self, state: State) -> Tensor:
        """Class accuracies (C,) float64 of the client's model, or of what it answers with; NaN
        without test examples.
        """
        sites = self.prepared.sites
        test = sites.common_test
        assert test is not None  # taught_by_peers has checked
        world = self.session.world_in(state)
        predictors = self.prepared.settings.method.predictors(state, world)
        predict = predictors.get(f"client {self.client}")
        if predict is None:
            params = student_models(state).get(self.client) or fitted_models(state)[self.client]
            predict = contract.predictor(world.model(self.client), params)
        right = correct_by_class(predict, test, sites.inputs, world.classes)
        totals = torch.bincount(test.labels.cpu(), minlength=world.classes)
        return right.double().cpu() / totals

    def _of_client(self, stage: Stage) -> Stage:
        """A stage of the exchange for the client alone."""
        if stage.name == FIT or SERVER in stage.clients:
            return stage
        return replace(stage, clients=(self.client,))


def taught_by_peers(
    replay: Replay,
    client: int,
    round: int,
    announce: Announce,
    exchanges: Callable[[int], None] = lambda count: None,
) -> Taught:
    """A client's exchange with its peers in a round, by phase and by teacher.

    The phases sum to the change. Teachers are the players of a game: what some of them are worth is
    what the client knows after the exchange with these alone; all coalitions are asked of at most
    ``FEW``, two ends of more. ``exchanges`` is told how often the client's exchange will be
    replayed. Raises ConfigError for a method without such an exchange, a client that had no
    teacher, or no common test set.
    """
    prepared = replay.prepared
    stages = list(prepared.settings.schedule(round, prepared.world))
    has_exchange = stages[0].name == FIT and len(stages) > 1
    if not has_exchange or prepared.sites.common_test is None:
        raise ConfigError(
            f"{replay.folder} has no exchange between clients that is measured on a common test set"
        )

    # The stage fit may take the models that the run's clients trained from the cache of replies.
    with replay.session(reuse_replies=True) as session:
        session.go_to(round, announce)
        lesson = _Lesson(session, client, stages)
        announce(round, round)
        exchange = lesson.replayed(session.state)
        teachers = exchange.teachers
        if not teachers:
            raise ConfigError(
                f"client {client} learned from nobody in round {round}: it asked for nothing, or "
                "in vain"
            )

        fit = exchange.after[FIT]
        players = len(teachers)

        def worth(coalition: Sequence[int]) -> Tensor:
            return lesson.taught_by(fit, [teachers[player] for player in coalition])

        if players <= FEW:
            rule = "exact"
            exchanges(2**players)
            divided = exact(worth, players)
        else:
            rule = "two ends"
            exchanges(2 * players + 2)
            divided = two_ends(worth, players)
        alone = lesson.taught_by(fit, [])
        known = {name: lesson.known(state) for name, state in exchange.after.items()}

    parts = {}
    for phase_before, phase in pairwise(known):
        parts[phase] = known[phase] - known[phase_before]
    return Taught(
        client=client,
        query=tuple(queries_of(session.world_in(fit)).get(client, ())),
        own=prepared.sites.counts(client, round),
        before=known[FIT],
        parts=parts,
        alone=alone - known[FIT],
        teachers=dict(zip(teachers, divided.values, strict=True)),
        gap=divided.gap,
        rule=rule,
    )
