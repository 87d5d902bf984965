"""What would have been without a client: the rounds are replayed, and the client is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from fedstill.core.errors import ConfigError
from fedstill.core.records import State
from fedstill.running.evaluation import evaluated, evaluated_answers
from fedstill.running.preparation import Prepared
from fedstill.running.replay import Announce, Replay, StageChange

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
