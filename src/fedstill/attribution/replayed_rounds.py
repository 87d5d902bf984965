"""What replayed rounds show: contributions of clients, and accuracies without some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from fedstill.core.errors import ConfigError
from fedstill.core.extensions import NoRecorder, StageResult
from fedstill.core.records import State
from fedstill.engines.client_measures import ClientMeasures
from fedstill.measures.base import Measure
from fedstill.measures.context import EvaluationContext
from fedstill.metrics.shapley import MOST_EXACT
from fedstill.running.evaluation import evaluated, evaluated_answers
from fedstill.running.observers import look
from fedstill.running.preparation import Prepared
from fedstill.running.replay import Announce, Replay, Session, StageChange

# ---- contributions -------------------------------------------------------------------------------

MEASURE = "contributions"


@dataclass
class _RoundMeasure(NoRecorder):
    """Shows the stages of one round to a measure, and keeps the events that it would have added to
    the journal.
    """

    measure: Measure
    round: int
    context: EvaluationContext
    session: Session
    events: list[dict[str, Any]] = field(default_factory=list)

    def stage(self, result: StageResult) -> None:
        """Look at a stage that is done (``core.extensions.Recorder``)."""
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
    """Raise ConfigError if a stage that makes the global model has more clients than all coalitions
    are asked of.
    """
    settings = replay.prepared.settings
    most = 0
    for stage in settings.schedule(round, replay.prepared.world):
        if not stage.sequential and stage.name not in settings.method.personal:
            most = max(most, len(stage.clients))
    if most > MOST_EXACT:
        raise ConfigError(
            f"--exact: round {round} has {most} clients, and all coalitions of at most "
            f"{MOST_EXACT} are asked; "
            "leave it out"
        )


def measured_later(
    replay: Replay, round: int, measure: Measure, announce: Announce
) -> list[dict[str, Any]]:
    """What a measure sees in a round, as events of the journal, after the rounds since the
    checkpoint have been replayed.

    Raises ConfigError for a run without a common test set.
    """
    prepared = replay.prepared
    measures = ClientMeasures({MEASURE: measure}, frozenset({round}))
    with replay.session(hooks=[measures]) as session:
        context = prepared.evaluation_context(None, session.engine.memory)
        if context is None:
            raise ConfigError(
                f"{replay.folder} has no common test set, and contributions are measured on one"
            )
        recorder = _RoundMeasure(measure, round, context, session)
        for _ in session.rounds(round, recorder=recorder, announce=announce):
            pass
    return recorder.events


# ---- other clients -------------------------------------------------------------------------------

ClassAccuracies = Sequence[float | None]
"""The global model's accuracy for each class (C,); None for a class without test examples."""


def class_accuracies(prepared: Prepared, state: State) -> ClassAccuracies:
    """The global model's class accuracies in a state."""
    predictors = evaluated_answers(prepared.settings.method, state, prepared.world)
    accuracies: ClassAccuracies = evaluated(predictors, prepared.sites, prepared.world.classes)[
        "class_accuracy"
    ]
    return accuracies


def check_global_model(replay: Replay, rows: Iterable[ClassAccuracies]) -> None:
    """Raise ConfigError if nothing is known: there is no global model, or no common test set."""
    if all(accuracy is None for accuracy in chain.from_iterable(rows)):
        raise ConfigError(f"{replay.folder} has no global model on a common test set to compare")


def accuracies_by_round(
    replay: Replay, first: int, last: int, change: StageChange, announce: Announce
) -> dict[int, ClassAccuracies]:
    """The global model's class accuracies after the rounds from ``first`` to ``last``, replayed
    with other clients.

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
