"""Replays of rounds: contributions of clients, accuracies without some clients, and a round
repeated with other samples of clients.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from fedstill.attribution.class_changes import ClassChange, points
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import NoRecorder, StageResult
from fedstill.core.keys import seed_for
from fedstill.core.records import SERVER, Stage, State
from fedstill.engines.client_measures import ClientMeasures
from fedstill.measures.base import Measure
from fedstill.measures.context import EvaluationContext
from fedstill.metrics.shapley import MOST_EXACT
from fedstill.report.table_files import TextTable
from fedstill.running.evaluation import answering_models, evaluated
from fedstill.running.journal import Look
from fedstill.running.observers import look
from fedstill.running.preparation import Prepared
from fedstill.running.replay import Announce, Replay, Session, StageChange
from fedstill.running.runs import Run

# ---- contributions -------------------------------------------------------------------------------

MEASURE = "contributions"


@dataclass
class _RoundMeasure(NoRecorder):
    """Takes a measure in the stages of one round, and collects the events that it would have added
    to the journal.
    """

    measure: Measure
    round: int
    context: EvaluationContext
    session: Session
    events: list[Look] = field(default_factory=list)

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
    """Raise ConfigError if a stage that changes the global model has too many clients to replay all
    of their coalitions.
    """
    settings = replay.prepared.settings
    most = 0
    for stage in settings.schedule(round, replay.prepared.world):
        if not stage.sequential and stage.name not in settings.method.personal:
            most = max(most, len(stage.clients))
    if most > MOST_EXACT:
        raise ConfigError(
            f"--exact: round {round} has {most} clients, and all coalitions can be computed for at "
            f"most {MOST_EXACT}; leave it out"
        )


def measure_round(replay: Replay, round: int, measure: Measure, announce: Announce) -> list[Look]:
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
"""How many samples are drawn, at most, for each one that differs from all before."""


@dataclass(frozen=True)
class SampledRound:
    """A round with a sample of clients.

    ``class_counts``: the clients' examples of each class in the round, (C,). ``class_accuracy``: of
    the global model after it, (C,); None for a class without test examples.
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
    """Repeat a round from the same state with ``count`` other samples of clients; this measures how
    much its result depends on the sample.

    The original round comes first. The topology draws the samples with other keys, and all differ.
    A client trains in each round in the same way, because its draws do not depend on the sample.
    ``progress`` is called after each round with its number, from 0. Raises ConfigError if there
    are not enough samples, or no global model on a common test set.
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
    """The original stages of a round, and ``count`` times with other clients. Raises ConfigError if
    there are not enough.
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
        reason = "every client acts in it"
    raise ConfigError(f"round {round} has no {count} other samples of clients: {reason}")


def _all_clients(stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    return tuple(stage.clients for stage in stages)


def _sampled_clients(stages: Sequence[Stage]) -> tuple[int, ...]:
    """The clients of a chain in their order, or the clients that act side by side."""
    chained = tuple(stage.clients[0] for stage in stages if stage.sequential)
    if chained:
        return chained
    side_by_side = [stage.clients for stage in stages if SERVER not in stage.clients]
    return min(side_by_side, key=len)


def sample_table(change: ClassChange, rounds: Sequence[SampledRound]) -> TextTable:
    """For each sample its clients, their examples of the class, and the accuracy after the round;
    the original round comes first.
    """
    lines = []
    for index, sampled_round in enumerate(rounds):
        clients = ", ".join(map(str, sampled_round.clients))
        if index == 0:
            clients += " (original)"
        accuracy = sampled_round.class_accuracy[change.label]
        cells = ["–", "–"]
        if accuracy is not None:
            cells = [f"{100 * accuracy:.1f} %", points(accuracy - change.accuracy_before)]
        lines.append([clients, str(sampled_round.class_counts[change.label]), *cells])
    return TextTable(["clients", "of the class", "after", "change [points]"], lines)


def sample_sentence(run: Run, change: ClassChange, rounds: Sequence[SampledRound]) -> str:
    """How much the change of a class depends on the sample of clients, in a sentence."""
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
        f"With {count} the class ends lower."
    )
