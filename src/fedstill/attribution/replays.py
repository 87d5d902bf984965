"""Replays of rounds: contributions of clients, accuracies without some clients, a round repeated
with other samples of clients, and the contribution of each teacher to an exchange.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import torch
from torch import Tensor

from fedstill.attribution.class_changes import (
    MAX_NAMED,
    MEASURE,
    RULES,
    ClassChange,
    client_name,
    points,
)
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import NoRecorder, StageResult
from fedstill.core.keys import seed_for
from fedstill.core.records import SERVER, Stage, State
from fedstill.core.rounds import StageChange
from fedstill.engines.client_measures import ClientMeasures
from fedstill.engines.passes import correct_by_class
from fedstill.measures.base import EvaluationContext, Measure
from fedstill.methods.fit import FIT, fitted_models, queries_of, student_models
from fedstill.metrics.shapley import MOST_EXACT, exact, two_ends
from fedstill.models.predictors import predictor
from fedstill.report.summary import NONE
from fedstill.report.table_files import TextTable
from fedstill.running.evaluation import answering_models, evaluated
from fedstill.running.journal import Event
from fedstill.running.observers import look
from fedstill.running.preparation import Prepared
from fedstill.running.replay import Announce, Replay, Session
from fedstill.running.runs import Run

# ---- contributions -------------------------------------------------------------------------------


@dataclass
class _RoundMeasure(NoRecorder):
    """Takes a measure in the stages of one round, and collects its events for the journal."""

    measure: Measure
    round: int
    context: EvaluationContext
    session: Session
    events: list[Event] = field(default_factory=list)

    def stage(self, result: StageResult) -> None:
        """Take the measure after a stage (``core.extensions.Recorder``)."""
        stage = result.stage
        if stage.round != self.round:
            return
        context = replace(self.context, world=self.session.world_in(result.after))
        numbers = look(MEASURE, self.measure, result, context)
        if numbers is not None:
            self.events.append(
                {
                    "event": "measure",
                    "measure": MEASURE,
                    "round": stage.round,
                    "stage": stage.index,
                    "name": stage.name,
                    **numbers,
                    "seconds": 0.0,
                }
            )


def check_coalitions(replay: Replay, round: int) -> None:
    """Raise ConfigError if a stage that changes the global model has too many clients to evaluate
    all coalitions.
    """
    settings = replay.prepared.settings
    most = 0
    for stage in settings.schedule(round, replay.prepared.world):
        if not stage.sequential and stage.name not in settings.method.personal:
            most = max(most, len(stage.clients))
    if most > MOST_EXACT:
        raise ConfigError(
            f"--exact: round {round} has {most} clients, but all coalitions can only be computed "
            f"for up to {MOST_EXACT}; remove the option"
        )


def measure_round(replay: Replay, round: int, measure: Measure, announce: Announce) -> list[Event]:
    """The events of a measure in a round, after a replay of the rounds since the checkpoint.

    Raises ConfigError for a run without a common test set.
    """
    prepared = replay.prepared
    measures = ClientMeasures({MEASURE: measure}, frozenset({round}))
    with replay.session(hooks=[measures]) as session:
        context = prepared.evaluation_context(None, session.engine.memory)
        if context is None:
            raise ConfigError(
                f"{replay.folder} has no common test set, on which contributions are measured"
            )
        recorder = _RoundMeasure(measure, round, context, session)
        for _ in session.rounds(round, recorder=recorder, announce=announce):
            pass
    return recorder.events


# ---- without some clients ------------------------------------------------------------------------

ClassAccuracies = Sequence[float | None]
"""The global model's accuracy on each class (C,); None for a class without test examples."""


def class_accuracies(prepared: Prepared, state: State) -> ClassAccuracies:
    """The global model's class accuracies in a state."""
    predictors = answering_models(prepared.settings.method, state, prepared.world)
    numbers = evaluated(predictors, prepared.sites, prepared.world.classes)
    accuracies: ClassAccuracies = numbers["class_accuracy"]
    return accuracies


def check_global_model(replay: Replay, rows: Iterable[ClassAccuracies]) -> None:
    """Raise ConfigError if no accuracy is known, because there is no global model or no common test
    set.
    """
    if all(accuracy is None for accuracy in chain.from_iterable(rows)):
        raise ConfigError(f"{replay.folder} has no global model on a common test set to compare")


def accuracies_by_round(
    replay: Replay, first: int, last: int, change: StageChange, announce: Announce
) -> dict[int, ClassAccuracies]:
    """The global model's class accuracies after the rounds from ``first`` to ``last``, replayed
    with changed stages.

    Raises ConfigError for a method without a global model, or a run without a common test set.
    """
    accuracies: dict[int, ClassAccuracies] = {}
    with replay.session() as session:
        for state in session.rounds(last, change=change, announce=announce):
            number = state.round - 1
            if number >= first:
                accuracies[number] = class_accuracies(replay.prepared, state)
    check_global_model(replay, accuracies.values())
    return accuracies


# ---- other samples of clients --------------------------------------------------------------------

DRAWS_PER_SAMPLE = 20
"""The maximum number of draws for each new sample that differs from all previous ones."""


@dataclass(frozen=True)
class SampledRound:
    """A round with a sample of clients.

    ``class_counts``: the clients' examples of each class in the round, (C,). ``class_accuracy``:
    the global model's accuracies after the round, (C,); None for a class without test examples.
    """

    clients: tuple[int, ...]
    class_counts: tuple[int, ...]
    class_accuracy: tuple[float | None, ...]


def repeat_round(
    replay: Replay,
    round: int,
    count: int,
    announce: Announce,
    progress: Callable[[int], None] = lambda number: None,
) -> list[SampledRound]:
    """Repeat a round from the same state with ``count`` other samples of clients, to measure how
    much its result depends on the sample.

    The original round comes first. The topology draws distinct samples with other keys. A client
    trains in the same way in each round, because its random numbers do not depend on the sample.
    ``progress`` is called after each round with its number, from 0. Raises ConfigError if there
    are not enough samples, or if there is no global model or common test set.
    """
    samples = _samples(replay, round, count)
    counts = replay.prepared.sites.all_counts(round)
    rounds = []
    with replay.session() as session:
        session.go_to(round, announce)
        for number, stages in enumerate(samples):
            state = session.fork().run(stages)
            clients = _sampled_clients(stages)
            sampled_round = SampledRound(
                clients=clients,
                class_counts=tuple(counts[list(clients)].sum(0).tolist()),
                class_accuracy=tuple(class_accuracies(replay.prepared, state)),
            )
            rounds.append(sampled_round)
            progress(number)
    check_global_model(replay, [rounds[0].class_accuracy])
    return rounds


def _samples(replay: Replay, round: int, count: int) -> list[list[Stage]]:
    """The stages of a round with its original clients, and with ``count`` other samples. Raises
    ConfigError if there are not enough samples.
    """
    schedule = replay.prepared.settings.schedule
    world = replay.prepared.world
    original = list(schedule(round, world))
    distinct = {_all_clients(original): original}
    for number in range(DRAWS_PER_SAMPLE * count):
        seed = seed_for(world.seed, round, number, SERVER, "cohort")
        stages = list(schedule(round, replace(world, seed=seed)))
        distinct.setdefault(_all_clients(stages), stages)
        if len(distinct) > count:
            return list(distinct.values())

    reason = f"there are {len(distinct) - 1}"
    if len(distinct) == 1:
        reason = "all clients take part in it"
    raise ConfigError(f"round {round} has no {count} other samples of clients: {reason}")


def _all_clients(stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    return tuple(stage.clients for stage in stages)


def _sampled_clients(stages: Sequence[Stage]) -> tuple[int, ...]:
    """The clients of a chain in order, or the clients of a parallel round."""
    chained = tuple(stage.clients[0] for stage in stages if stage.sequential)
    if chained:
        return chained
    parallel_stages = [stage.clients for stage in stages if SERVER not in stage.clients]
    return min(parallel_stages, key=len)


def sample_table(change: ClassChange, rounds: Sequence[SampledRound]) -> TextTable:
    """A table of the clients in each sample, their examples of the class, and the accuracy after
    the round; the original round comes first.
    """
    lines = []
    for index, sampled_round in enumerate(rounds):
        clients = ", ".join(map(str, sampled_round.clients))
        if index == 0:
            clients += " (original)"
        accuracy = sampled_round.class_accuracy[change.label]
        cells = [NONE, NONE]
        if accuracy is not None:
            cells = [f"{100 * accuracy:.1f} %", points(accuracy - change.accuracy_before)]
        lines.append([clients, str(sampled_round.class_counts[change.label]), *cells])
    return TextTable(["clients", "of the class", "after", "change [points]"], lines)


def sample_sentence(run: Run, change: ClassChange, rounds: Sequence[SampledRound]) -> str:
    """A sentence on how much the change of a class depends on the sample of clients."""
    name = repr(run.classes[change.label])
    accuracies = [sampled_round.class_accuracy[change.label] for sampled_round in rounds]
    changes = [accuracy - change.accuracy_before for accuracy in accuracies if accuracy is not None]
    if len(changes) < len(accuracies):
        return f"Class {name} has no test examples."
    original, *sampled_changes = changes
    deviation = 0.0
    if len(sampled_changes) > 1:
        deviation = statistics.stdev(sampled_changes)
    lower = sum(value < original for value in sampled_changes)
    count = {0: "no other sample", 1: "one other sample"}.get(lower, f"{lower} other samples")
    mean = f"{points(statistics.fmean(sampled_changes))} ± {100 * deviation:.1f}"
    return (
        f"Class {name} in round {change.round}, from the same model: {points(original)} points "
        f"with the original clients; {mean} over {len(sampled_changes)} other samples, from "
        f"{points(min(sampled_changes))} to {points(max(sampled_changes))}. "
        f"With {count}, the class ends lower."
    )


MAX_EXACT = 4
"""The largest number of teachers for which all coalitions are replayed (16 exchanges). With m > 4
teachers, 2m + 2 exchanges yield the mean of two ends.
"""

# ---- replaying an exchange -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExchangeEffect:
    """The effect of an exchange on a client's model, as changes of class accuracy on the common
    test set. Tensors are (C,) float64.

    ``query``: the queried classes. ``examples``: the client's own examples by class.
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

    ``session``: a session at the beginning of the round. ``stages``: the stages of the round.
    """

    session: Session
    client: int
    stages: Sequence[Stage]

    @property
    def prepared(self) -> Prepared:
        """The run."""
        return self.session.replay.prepared

    def replay(self, state: State) -> _ExchangeRecorder:
        """Replay the rest of the round without queries of other clients."""
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
        """The class accuracies (C,) float64 of the model that the client uses; NaN for classes
        without test examples.
        """
        sites = self.prepared.sites
        test = sites.common_test
        assert test is not None  # checked by exchange_effect
        world = self.session.world_in(state)
        predictors = self.prepared.settings.method.predictors(state, world)
        predict = predictors.get(f"client {self.client}")
        if predict is None:
            params = student_models(state).get(self.client) or fitted_models(state)[self.client]
            predict = predictor(world.model(self.client), params)
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
            f"{replay.folder} has no exchange between clients, or no common test set to measure it"
        )

    # The models of the stage fit may be in the reply cache.
    with replay.session(reuse_replies=True) as session:
        session.go_to(round, announce)
        exchange = _Exchange(session, client, stages)
        announce(round, round)
        recorder = exchange.replay(session.state)
        teachers = recorder.teachers
        if not teachers:
            raise ConfigError(
                f"client {client} did not learn from peers in round {round}: it sent no query, or "
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
        examples=prepared.sites.label_counts(client, round),
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
    """A sentence on a client's gain by phase, and on its main teachers: on the queried classes, or
    on its own classes if the method exchanges knowledge without queries.
    """
    accuracy_before = _mean_gain(effect, effect.before)
    parts = {name: _mean_gain(effect, change) for name, change in effect.parts.items()}
    accuracy_after = accuracy_before + sum(parts.values())
    classes = ", ".join(repr(run.classes[label]) for label in effect.query)
    action = f"queried {classes}"
    if not effect.query:
        action = "learned from its peers without a query; accuracy on its own classes"
    changes = ", ".join(f"{name} {points(change)}" for name, change in parts.items())
    return (
        f"{_client_at_start(run, effect.client)} {action}: from "
        f"{100 * accuracy_before:.1f} % to {100 * accuracy_after:.1f} %: "
        f"{changes}; {_main_teachers(run, effect)}."
    )


def _client_at_start(run: Run, client: int) -> str:
    """A client at the start of a sentence. A name in the data is unchanged."""
    name = client_name(run, client)
    if client < len(run.client_names):
        return name
    return name.capitalize()


def _main_teachers(run: Run, effect: ExchangeEffect) -> str:
    gains = {client: _mean_gain(effect, change) for client, change in effect.teachers.items()}
    # Gains that are printed as 0.0 do not count.
    positive = [client for client, gain in gains.items() if round(1000 * gain) > 0]
    main = sorted(positive, key=lambda client: -gains[client])[:MAX_NAMED]
    if not main:
        return "no teacher contributed to it"
    names = ", ".join(f"{client_name(run, client)} {points(gains[client])}" for client in main)
    return f"of its teachers, {names} contributed most"


def exchange_note(effect: ExchangeEffect) -> str:
    """A note on the computation and limits of the teachers' contributions."""
    error = float(effect.gap.nan_to_num().max())
    return (
        f"In points of accuracy on the common test set, ± {100 * error:.1f}: {RULES[effect.rule]}, "
        "from replays of the exchange with some of its teachers. This is not the value of the "
        "teachers' data."
    )


def teacher_table(run: Run, effect: ExchangeEffect) -> TextTable:
    """A table of each teacher's contribution to the queried classes, if there are any, and to the
    client's other classes, weighted by its examples; the sum comes last.
    """
    total = torch.stack([*effect.teachers.values(), effect.alone]).sum(0)
    if not effect.query:
        gains = {client_name(run, client): change for client, change in effect.teachers.items()}
        gains |= {ALONE_ROW: effect.alone, "together": total}
        rows = [[name, points(_mean_gain(effect, change))] for name, change in gains.items()]
        return TextTable(["teacher", "own classes [points]"], rows)

    data_cells = {
        client: str(sum(run.label_counts[client][label] for label in effect.query))
        for client in effect.teachers
        if run.label_counts
    }
    lines = [
        [client_name(run, client), *_gain_cells(effect, change), data_cells.get(client, "")]
        for client, change in effect.teachers.items()
    ]
    lines.append([ALONE_ROW, *_gain_cells(effect, effect.alone), ""])
    lines.append(["together", *_gain_cells(effect, total), ""])
    head = [
        "teacher",
        "queried classes [points]",
        "own classes [points]",
        "examples of queried classes",
    ]
    return TextTable(head, lines)


def _gain_cells(effect: ExchangeEffect, change: Tensor) -> list[str]:
    of_query = _mean_over_classes(change, effect.query)
    return [points(of_query), points(_mean_over_own_classes(effect, change))]


def _mean_gain(effect: ExchangeEffect, values: Tensor) -> float:
    """The mean over the queried classes; without a query, over the client's own classes."""
    if effect.query:
        return _mean_over_classes(values, effect.query)
    return _mean_over_own_classes(effect, values)


def _mean_over_own_classes(effect: ExchangeEffect, values: Tensor) -> float:
    """The mean over the client's classes that it did not query, weighted by its examples."""
    examples = enumerate(effect.examples.tolist())
    own_classes = [label for label, count in examples if count and label not in effect.query]
    return _mean_over_classes(values, own_classes, effect.examples.double())


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
