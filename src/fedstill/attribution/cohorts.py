"""Measures how much a round depends on which clients were sampled, by repeating it with different
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedstill.attribution.replayed_rounds import check_global_model, class_accuracies
from fedstill.core.errors import ConfigError
from fedstill.core.keys import seed_for
from fedstill.core.records import SERVER, Stage
from fedstill.running.replay import Announce, Replay

TRIES = 20
"""How many draws are made for each other cohort, at most, before too few are said to be there."""


@dataclass(frozen=True)
class Cohort:
    """A round's clients, what they have of each class in it (C,), and the global model's class
    accuracies (C,).

    An accuracy is None where the class has no test examples.
    """

    clients: tuple[int, ...]
    has: tuple[int, ...]
    after: tuple[float | None, ...]


def repeated_round(
    replay: Replay,
    round: int,
    count: int,
    announce: Announce,
    progress: Callable[[int], None] = lambda number: None,
) -> list[Cohort]:
    """The cohort of a round as it was, then ``count`` others, each from the state before the round.

    They are drawn as the topology draws, by other keys, so all are different; clients that are in
    several train in each as they did, for their draws are keyed by themselves. ``progress`` is
    called after each with its number, from 0. Raises ConfigError where no other clients can be
    drawn, or there is no global model on a common test set.
    """
    samples = _samples(replay, round, count)
    counts = replay.prepared.sites.all_counts(round)
    cohorts = []
    with replay.session() as session:
        session.go_to(round, announce)
        for number, stages in enumerate(samples):
            state = session.fork().run(stages)
            clients = _clients(stages)
            examples = counts[list(clients)].sum(0).tolist()
            accuracies = class_accuracies(replay.prepared, state)
            cohorts.append(Cohort(clients, tuple(examples), tuple(accuracies)))
            progress(number)
    check_global_model(replay, [cohorts[0].after])
    return cohorts


def _samples(replay: Replay, round: int, count: int) -> list[list[Stage]]:
    """The round's stages as they were, and ``count`` times with other clients. Raises ConfigError
    if there are none.
    """
    schedule = replay.prepared.settings.schedule
    world = replay.prepared.world
    original = list(schedule(round, world))
    distinct = {_everybody(original): original}
    for number in range(TRIES * count):
        seed = seed_for(world.seed, round, number, SERVER, "cohort")
        stages = list(schedule(round, replace(world, seed=seed)))
        distinct.setdefault(_everybody(stages), stages)
        if len(distinct) > count:
            return list(distinct.values())

    reason = f"there are {len(distinct) - 1}"
    if len(distinct) == 1:
        reason = "every client acts in it"
    raise ConfigError(
        f"round {round} cannot be gone through with {count} other draws of clients: {reason}"
    )


def _everybody(stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    return tuple(stage.clients for stage in stages)


def _clients(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Who was drawn: the links of a chain in their order, or the clients side by side."""
    links = tuple(stage.clients[0] for stage in stages if stage.sequential)
    return links or min((stage.clients for stage in stages if SERVER not in stage.clients), key=len)
