"""What a client learned from its peers, by phase of the exchange and by teacher.

The contribution of a teacher comes from replays of the exchange with some of the teachers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from fedstill.attribution.class_changes import MAX_NAMED, RULES, client_name, points
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import NoRecorder, StageResult
from fedstill.core.records import SERVER, Stage, State
from fedstill.engines.passes import correct_by_class
from fedstill.methods.fit import FIT, fitted_models, queries_of, student_models
from fedstill.metrics.shapley import exact, two_ends
from fedstill.models import contract
from fedstill.report.table_files import TextTable
from fedstill.running.preparation import Prepared
from fedstill.running.replay import Announce, Replay, Session
from fedstill.running.runs import Run

MAX_EXACT = 4
"""The largest number of teachers for which all coalitions are replayed (16 exchanges). With m
teachers more, 2m + 2 exchanges give the mean of two ends.
"""

# ---- replaying an exchange -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExchangeEffect:
    """The effect of an exchange on a client's model, as changes of class accuracy on the common
    test set. Tensors are (C,) float64.

    ``query``: the classes that the client asked for. ``examples``: its own examples by class.
    ``before``: the accuracy of its model from the stage ``fit``.
    ``parts``: the change by phase; their sum is the whole change.
    ``alone``: the change from the same phases without any teacher.
    ``teachers``: the contribution of each teacher; with ``alone`` they sum to the change, within
    ``gap``. ``rule``: a key of ``class_changes.RULES``.
    """

    client: int
    query: tuple[int, ...]
    examples: Tensor
    before: Tensor
    parts: Mapping[str, Tensor]
    alone: Tensor
    teachers: Mapping[int, Tensor]
    gap: Tensor
    rule: str


@dataclass
class _ExchangeRecorder(NoRecorder):
    """Collects the state after each stage of an exchange, and the client's teachers."""

    client: int
    states: dict[str, State] = field(default_factory=dict)
    teachers: list[int] = field(default_factory=list)

    def stage(self, result: StageResult) -> None:
        """Keep the state after a stage (``core.extensions.Recorder``)."""
        stage = result.stage
        self.states[stage.name] = result.after
        if stage.name != FIT and self.client in result.payloads and not self.teachers:
            self.teachers = sorted(map(int, self._teachers(result)))

    def _teachers(self, result: StageResult) -> Sequence[int]:
        """The teachers that the client reports, or else those whose models it received."""
        for reply in result.accepted:
            if reply.client == self.client:
                reported: Sequence[int] | None = reply.metrics.get("report", {}).get("teachers")
                if reported is not None:
                    return reported
        return list(result.payloads[self.client].many("peer"))


@dataclass(frozen=True)
class _Exchange:
    """One client's exchange, which can be replayed with some of its teachers.

    ``session``: at the beginning of the round. ``stages``: those of the round.
    """

    session: Session
    client: int
    stages: Sequence[Stage]

    @property
    def prepared(self) -> Prepared:
        """The run."""
        return self.session.replay.prepared

    def replay(self, state: State) -> _ExchangeRecorder:
        """Replay the rest of the round, in which no other client asks."""
        recorder = _ExchangeRecorder(self.client)
        stages = [self._with_client_alone(stage) for stage in self.stages]
        self.session.fork(state).in_company().run(stages, recorder)
        return recorder

    def accuracy_with(self, fit: State, teachers: Sequence[int]) -> Tensor:
        """The client's class accuracies (C,) after the exchange with these teachers only.

        ``fit``: the state after the stage ``fit``.
        """
        present = {self.client, *teachers}
        absent = [client for client in fitted_models(fit) if client not in present]
        models = [f"model.{client}" for client in absent]
        sizes = [f"size.{client}" for client in absent]
        recorder = self.replay(fit.without(*models, *sizes))
        return self.class_accuracy(list(recorder.states.values())[-1])

    def class_accuracy(self, state: State) -> Tensor:
        """Class accuracies (C,) float64 of the client's model, or of the model that answers for it;
        NaN without test examples.
        """
        sites = self.prepared.sites
        test = sites.common_test
        assert test is not None  # checked by exchange_effect
        world = self.session.world_in(state)
        predictors = self.prepared.settings.method.predictors(state, world)
        predict = predictors.get(f"client {self.client}")
        if predict is None:
            params = student_models(state).get(self.client) or fitted_models(state)[self.client]
            predict = contract.predictor(world.model(self.client), params)
        correct = correct_by_class(predict, test, sites.inputs, world.classes)
        totals = torch.bincount(test.labels.cpu(), minlength=world.classes)
        return correct.double().cpu() / totals

    def _with_client_alone(self, stage: Stage) -> Stage:
        if stage.name == FIT or SERVER in stage.clients:
            return stage
        return replace(stage, clients=(self.client,))


def exchange_effect(
    replay: Replay,
    client: int,
    round: int,
    announce: Announce,
    announce_exchanges: Callable[[int], None] = lambda count: None,
) -> ExchangeEffect:
    """The effect of a client's exchange with its peers in a round, by phase and by teacher.

    Teachers are the players of a game: the value of a coalition is the client's accuracy after the
    exchange with these teachers only. With at most ``MAX_EXACT`` teachers, all coalitions are
    replayed. ``announce_exchanges`` is called with the number of exchanges to replay. Raises
    ConfigError for a method without such an exchange, a client without a teacher, or a run without
    a common test set.
    """
    prepared = replay.prepared
    stages = list(prepared.settings.schedule(round, prepared.world))
    has_exchange = stages[0].name == FIT and len(stages) > 1
    if not has_exchange or prepared.sites.common_test is None:
        raise ConfigError(
            f"{replay.folder} has no exchange between clients that is measured on a common test set"
        )

    # The models of the stage fit may be in the cache of replies.
    with replay.session(reuse_replies=True) as session:
        session.go_to(round, announce)
        exchange = _Exchange(session, client, stages)
        announce(round, round)
        recorder = exchange.replay(session.state)
        teachers = recorder.teachers
        if not teachers:
            raise ConfigError(
                f"client {client} learned from no peer in round {round}: it asked for nothing, or "
                "no peer could teach it"
            )

        fit = recorder.states[FIT]
        players = len(teachers)

        def value(coalition: Sequence[int]) -> Tensor:
            return exchange.accuracy_with(fit, [teachers[player] for player in coalition])

        if players <= MAX_EXACT:
            rule = "exact"
            announce_exchanges(2**players)
            divided = exact(value, players)
        else:
            rule = "two ends"
            announce_exchanges(2 * players + 2)
            divided = two_ends(value, players)
        alone = exchange.accuracy_with(fit, [])
        accuracies = {
            name: exchange.class_accuracy(state) for name, state in recorder.states.items()
        }

    return ExchangeEffect(
        client=client,
        query=tuple(queries_of(session.world_in(fit)).get(client, ())),
        examples=prepared.sites.counts(client, round),
        before=accuracies[FIT],
        parts={
            phase: accuracies[phase] - accuracies[phase_before]
            for phase_before, phase in pairwise(accuracies)
        },
        alone=alone - accuracies[FIT],
        teachers=dict(zip(teachers, divided.values, strict=True)),
        gap=divided.gap,
        rule=rule,
    )


# ---- the effect in words -------------------------------------------------------------------------

ALONE_ROW = "no teacher: the same phases alone"


def exchange_sentence(run: Run, effect: ExchangeEffect) -> str:
    """What a client learned of the classes that it asked for, by phase, and its main teachers."""
    query = effect.query
    accuracy_before = _mean_over_classes(effect.before, query)
    parts = {name: _mean_over_classes(change, query) for name, change in effect.parts.items()}
    accuracy_after = accuracy_before + sum(parts.values())
    classes = ", ".join(repr(run.classes[label]) for label in query)
    changes = ", ".join(f"{name} {points(change)}" for name, change in parts.items())
    return (
        f"{client_name(run, effect.client).capitalize()} asked for {classes}: from "
        f"{100 * accuracy_before:.1f} % to {100 * accuracy_after:.1f} %: "
        f"{changes}; {_main_teachers(run, effect)}."
    )


def _main_teachers(run: Run, effect: ExchangeEffect) -> str:
    gains = {
        client: _mean_over_classes(change, effect.query)
        for client, change in effect.teachers.items()
    }
    # Gains that are printed as 0.0 do not count.
    positive = [client for client, gain in gains.items() if round(1000 * gain) > 0]
    main = sorted(positive, key=lambda client: -gains[client])[:MAX_NAMED]
    if not main:
        return "no teacher contributed to it"
    names = ", ".join(f"{client_name(run, client)} {points(gains[client])}" for client in main)
    return f"of its teachers, {names} contributed most"


def exchange_note(effect: ExchangeEffect) -> str:
    """How the contributions of teachers were computed, and what they do not show."""
    error = float(effect.gap.nan_to_num().max())
    return (
        f"In points of accuracy on the common test set, ± {100 * error:.1f}: {RULES[effect.rule]}, "
        "from replays of the exchange with some of its teachers. This is not the value of the "
        "teachers' data."
    )


def teacher_table(run: Run, effect: ExchangeEffect) -> TextTable:
    """The contribution of each teacher to the classes that were asked for, and to the client's
    other classes, weighted by its examples; the sum comes last.
    """
    data_cells = {
        client: str(sum(run.label_counts[client][label] for label in effect.query))
        for client in effect.teachers
        if run.label_counts
    }
    total = torch.stack([*effect.teachers.values(), effect.alone]).sum(0)
    lines = [
        [client_name(run, client), *_gain_cells(effect, change), data_cells.get(client, "")]
        for client, change in effect.teachers.items()
    ]
    lines.append([ALONE_ROW, *_gain_cells(effect, effect.alone), ""])
    lines.append(["together", *_gain_cells(effect, total), ""])
    head = ["teacher", "asked for [points]", "own classes [points]", "holds of what was asked"]
    return TextTable(head, lines)


def _gain_cells(effect: ExchangeEffect, change: Tensor) -> list[str]:
    examples = enumerate(effect.examples.tolist())
    own_classes = [label for label, count in examples if count and label not in effect.query]
    of_query = _mean_over_classes(change, effect.query)
    of_own_classes = _mean_over_classes(change, own_classes, effect.examples.double())
    return [points(of_query), points(of_own_classes)]


def _mean_over_classes(
    values: Tensor, labels: Sequence[int], weights: Tensor | None = None
) -> float:
    """The weighted mean over classes with test examples; 0 if there are none."""
    if weights is None:
        weights = torch.ones(len(values))
    tested = [label for label in labels if not math.isnan(values[label])]
    total = sum(float(weights[label]) for label in tested)
    if not total:
        return 0.0
    return sum(float(values[label] * weights[label]) for label in tested) / total
