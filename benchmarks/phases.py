"""The effect of each phase of QKT, and of the number of teachers, from the journals of finished
runs: ``python -m benchmarks.phases FOLDER ...``.

Each folder contains runs that differ only in their seed, e.g. a row of ``results/``. The first
table contains means over the clients with a query: the gain on the queried classes, the loss on the
client's own classes (both relative to its model before phase 1), and the training objective in the
last epoch. "no teacher" is the number of clients without one. The effect of the second phase is
paired by seed: the mean over the clients of a seed, with the 95 % interval over seeds. If a part of
the head was frozen (``method.frozen``), the last table contains the frozen share of its rows, and
the gain by the frozen share of the queried row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.options import option_parser
from fedstill.methods.fit import FIT
from fedstill.metrics import class_accuracy, query_accuracy_gain, query_forgetting
from fedstill.metrics.ranks import paired_difference
from fedstill.report import terminal
from fedstill.running.runs import Run, find

PHASES = ("transfer", "refine")

NONE = "–"


@dataclass(frozen=True)
class Effect:
    """The gain, the loss and the training objective of a client after a phase."""

    gain: float
    loss: float
    objective: float


@dataclass(frozen=True)
class FrozenShares:
    """The frozen share of the head's rows: of the queried classes, of the client's other classes,
    and of the remaining ones.
    """

    queried: Sequence[float]
    local: Sequence[float]
    remaining: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client with a query.

    ``effects``: by phase. ``teachers``: their number in the last phase. ``frozen``: None if no
    part of the head was frozen.
    """

    seed: int
    effects: Mapping[str, Effect]
    teachers: int
    frozen: FrozenShares | None

    @property
    def final(self) -> Effect:
        """The effect after the last phase."""
        return list(self.effects.values())[-1]


@dataclass(frozen=True)
class Range:
    """Numbers from ``least`` up to but not including ``end``, with a name."""

    name: str
    least: float
    end: float

    def contains(self, number: float) -> bool:
        """Whether a number is in the range."""
        return self.least <= number < self.end


NUMBERS_OF_TEACHERS = (
    Range("one", 1, 2),
    Range("two", 2, 3),
    Range("three", 3, 4),
    Range("four or more", 4, 100),
)

FROZEN_SHARES = (
    Range("under 25", 0.0, 0.25),
    Range("25 to 75", 0.25, 0.75),
    Range("75 and more", 0.75, 1.01),
)


# Reading journals.


def clients_of(run: Run) -> Iterator[Client]:
    """The clients of a run that had a query."""
    if not run.rounds:
        return
    events = {
        (event["name"], event["client"]): event
        for event in run.clients
        if "correct_by_class" in event
    }
    for answer in run.rounds[-1].get("answers") or ():
        client = answer["client"]
        query = answer["query"]
        counts = run.label_counts[client]
        local = _accuracies(run, events[FIT, client])
        phase_events = {
            phase: events[phase, client] for phase in PHASES if (phase, client) in events
        }
        effects = {}
        for phase, event in phase_events.items():
            accuracies = _accuracies(run, event)
            effects[phase] = Effect(
                gain=query_accuracy_gain(local, accuracies, query),
                loss=query_forgetting(local, accuracies, counts),
                objective=sum(event["loss"].values()),
            )
        last_event = list(phase_events.values())[-1]
        yield Client(
            seed=run.seed,
            effects=effects,
            teachers=len(last_event.get("teachers", ())),
            frozen=_frozen_shares(phase_events.values(), query, counts),
        )


def _accuracies(run: Run, event: Mapping[str, Any]) -> Any:
    """The class accuracies of a client's model after a stage."""
    return class_accuracy(event["correct_by_class"], run.start["test_counts"])


def _frozen_shares(
    events: Iterable[Mapping[str, Any]], query: Sequence[int], counts: Sequence[int]
) -> FrozenShares | None:
    """The frozen shares in the last phase that froze rows."""
    shares = None
    for event in events:
        shares = event.get("frozen_rows") or shares
    if not shares:
        return None
    classes = range(len(counts))
    local = [c for c in classes if counts[c] and c not in query]
    remaining = [c for c in classes if c not in query and c not in local]
    return FrozenShares(
        queried=[shares[c] for c in query],
        local=[shares[c] for c in local],
        remaining=[shares[c] for c in remaining],
    )


# Rows of the tables.


def percent(values: Sequence[float]) -> str:
    """A mean in percent."""
    if not values:
        return NONE
    return f"{100 * fmean(values):.1f}"


def by_phase(clients: Sequence[Client]) -> list[str]:
    """Gain, loss and objective after each phase, and the number of clients, of all and of those
    without a teacher.
    """
    cells = []
    for phase in PHASES:
        effects = [client.effects[phase] for client in clients if phase in client.effects]
        objective = NONE
        if effects:
            objective = f"{fmean(effect.objective for effect in effects):.2f}"
        gains = [effect.gain for effect in effects]
        losses = [effect.loss for effect in effects]
        cells += [percent(gains), percent(losses), objective]
    without_teacher = sum(client.teachers == 0 for client in clients)
    return [*cells, str(len(clients)), str(without_teacher)]


def by_teachers(clients: Sequence[Client]) -> list[str]:
    """For each number of teachers: the number of clients, and their final gain and loss."""
    cells = []
    for teachers in NUMBERS_OF_TEACHERS:
        finals = [client.final for client in clients if teachers.contains(client.teachers)]
        gain = percent([effect.gain for effect in finals])
        loss = percent([effect.loss for effect in finals])
        cells.append(f"{len(finals)}: {gain} / {loss}")
    return cells


def added(clients: Sequence[Client]) -> list[str]:
    """The changes of gain and loss by phase 2, in points, with the interval over seeds; the number
    of seeds.
    """
    complete = [client for client in clients if client.effects.keys() >= set(PHASES)]
    seeds = sorted({client.seed for client in complete})
    cells = []
    for quantity in ("gain", "loss"):
        means: dict[str, dict[int, float]] = {phase: {} for phase in PHASES}
        for phase in PHASES:
            for seed in seeds:
                means[phase][seed] = fmean(
                    getattr(client.effects[phase], quantity)
                    for client in clients
                    if client.seed == seed and phase in client.effects
                )
        cells += _difference(means["refine"], means["transfer"])
    return [*cells, str(len(seeds))]


def _difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[str]:
    """The mean difference over seeds and its interval, in points."""
    difference = paired_difference(ours, theirs)
    if difference is None:
        return [NONE, NONE]
    interval = NONE
    if difference.pairs > 1:
        interval = f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"
    return [f"{100 * difference.mean:+.1f}", interval]


def by_frozen_share(clients: Sequence[Client]) -> list[str]:
    """The frozen share of the rows, and, by the frozen share of the queried row: the number of
    clients, and their gain after each phase. The latter are without clients that had no teacher.
    """
    shares = [client.frozen for client in clients if client.frozen]
    cells = [
        percent(list(chain.from_iterable(share.queried for share in shares))),
        percent(list(chain.from_iterable(share.local for share in shares))),
        percent(list(chain.from_iterable(share.remaining for share in shares))),
    ]
    taught = [client for client in clients if client.frozen and client.teachers]
    for frozen in FROZEN_SHARES:
        group = [
            client
            for client in taught
            if client.frozen and frozen.contains(fmean(client.frozen.queried))
        ]
        gains = NONE
        if group:
            means = [percent([client.effects[phase].gain for client in group]) for phase in PHASES]
            gains = " to ".join(means)
        cells.append(f"{len(group)}: {gains}")
    return cells


def print_table(
    head: Sequence[str],
    groups: Mapping[str, Sequence[Client]],
    cells: Callable[[Sequence[Client]], list[str]],
) -> None:
    """Print a row for each folder."""
    rows = [[name, *cells(clients)] for name, clients in groups.items()]
    terminal.console().print(terminal.PlainTable(["", *head], rows))


def main() -> None:
    """Print all tables."""
    parser = option_parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="folders of runs")
    options = parser.parse_args()
    groups: dict[str, list[Client]] = {}
    for folder in options.folders:
        name = str(folder).removeprefix("results/")
        groups[name] = list(chain.from_iterable(clients_of(run) for run in find([folder])))

    screen = terminal.console()
    head = ["gain 1", "loss 1", "objective 1", "gain 2", "loss 2", "objective 2"]
    print_table([*head, "clients", "no teacher"], groups, by_phase)
    screen.print("\nclients: gain / loss [%], by the number of teachers")
    print_table([teachers.name for teachers in NUMBERS_OF_TEACHERS], groups, by_teachers)
    screen.print("\nthe effect of phase 2, in points, paired by seed")
    print_table(["gain", "95 % interval", "loss", "95 % interval", "seeds"], groups, added)

    frozen = {}
    for name, clients in groups.items():
        frozen_clients = [client for client in clients if client.frozen]
        if frozen_clients:
            frozen[name] = frozen_clients
    if frozen:
        screen.print(
            "\nfrozen entries [%] by row of the head; clients: gain 1 to gain 2 [%], by the frozen "
            "share [%] of the queried row"
        )
        head = ["queried", "local", "remaining", *(share.name for share in FROZEN_SHARES)]
        print_table(head, frozen, by_frozen_share)


if __name__ == "__main__":
    main()
