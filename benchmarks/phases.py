"""What each phase of QKT changed, and what the number of teachers did, from the journals of
finished runs.

``python -m benchmarks.phases FOLDER ...``: folders of runs that differ in their seed, e.g. a row of
``results/``. The mean over clients that asked: accuracy gained on the classes asked for, accuracy
lost on the client's own (both against its model before phase 1), and the training objective in the
last epoch. "No peer": how many clients had no teacher. What the second phase adds is paired
by seed: the mean over a seed's clients, with the 95 % interval over seeds. Where part of the head
was frozen (``method.frozen``): how much of its rows, and the gain by how much of the row asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedstill.methods.fit import FIT
from fedstill.metrics import class_accuracy, query_accuracy_gain, query_forgetting
from fedstill.metrics.ranks import paired_difference
from fedstill.report import terminal
from fedstill.running.runs import Run, find

PHASES = ("transfer", "refine")


def clients(run: Run) -> Iterator[dict[str, Any]]:
    """For each client that asked: how many taught it, and after each phase gain, loss and
    objective.
    """
    events = {(e["name"], e["client"]): e for e in run.clients if "correct_by_class" in e}
    for answer in run.rounds[-1].get("answers") or ():
        c, counts = answer["client"], run.label_counts[answer["client"]]
        before = class_accuracy(events[FIT, c]["correct_by_class"], run.start["test_counts"])
        told: dict[str, Any] = {"seed": run.seed}
        for phase in (p for p in PHASES if (p, c) in events):
            event = events[phase, c]
            after = class_accuracy(event["correct_by_class"], run.start["test_counts"])
            gain = query_accuracy_gain(before, after, answer["query"])
            told[phase] = gain, query_forgetting(before, after, counts), sum(event["loss"].values())
            told["teachers"] = len(event.get("teachers", ()))
            if rows := event.get("frozen_rows"):
                told["frozen"] = [
                    [rows[c] for c in classes] for classes in kinds(answer["query"], counts)
                ]
        yield told


def kinds(query: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """The classes asked for, the client's other classes, and the rest."""
    own = [c for c, n in enumerate(counts) if n and c not in query]
    return [list(query), own, [c for c in range(len(counts)) if c not in {*query, *own}]]


def percent(values: Sequence[float]) -> str:
    """A mean in percent."""
    return f"{100 * fmean(values):.1f}" if values else "–"


def by_phase(asked: Sequence[dict[str, Any]]) -> list[str]:
    """A line: gain, loss and objective after each phase, how many clients asked, and how many had
    no teacher.
    """
    cells: list[str] = []
    for phase in PHASES:
        gain, loss, objective = ([a[phase][i] for a in asked if phase in a] for i in range(3))
        cells += [percent(gain), percent(loss), f"{fmean(objective):.2f}" if objective else "–"]
    return [*cells, str(len(asked)), str(sum(a["teachers"] == 0 for a in asked))]


def by_teachers(asked: Sequence[dict[str, Any]]) -> list[str]:
    """A line: clients, gain and loss at their end, for one, two, three, four and more teachers."""
    cells = []
    for least, most in ((1, 1), (2, 2), (3, 3), (4, 99)):
        own = [
            a["refine" if "refine" in a else "transfer"]
            for a in asked
            if least <= a["teachers"] <= most
        ]
        cells.append(f"{len(own)}: {percent([o[0] for o in own])} / {percent([o[1] for o in own])}")
    return cells


def added(asked: Sequence[dict[str, Any]]) -> list[str]:
    """A line: what phase 2 adds to gain and to loss, in points, with the interval over seeds; how
    many seeds.
    """
    cells, seeds = [], sorted({a["seed"] for a in asked if set(PHASES) <= a.keys()})
    for i in range(2):
        first, second = (
            {s: fmean(a[p][i] for a in asked if a["seed"] == s and p in a) for s in seeds}
            for p in PHASES
        )
        apart = paired_difference(second, first)
        if apart is None:
            cells += ["–", "–"]
            continue
        interval = f"{100 * apart.low:+.1f} to {100 * apart.high:+.1f}" if apart.pairs > 1 else "–"
        cells += [f"{100 * apart.mean:+.1f}", interval]
    return [*cells, str(len(seeds))]


def frozen_rows(asked: Sequence[dict[str, Any]]) -> list[str]:
    """A line: which part of the rows was frozen, and clients by how much of the row was that they
    asked for: how many, and their gain after phase 1 and after phase 2. Without those that had no
    teacher.
    """
    shares = [percent([share for a in asked for share in a["frozen"][i]]) for i in range(3)]
    cells = []
    for least, most in ((0.0, 0.25), (0.25, 0.75), (0.75, 1.01)):
        own = [a for a in asked if least <= fmean(a["frozen"][0]) < most and a["teachers"]]
        gains = " to ".join(percent([a[phase][0] for a in own]) for phase in PHASES) if own else "–"
        cells.append(f"{len(own)}: {gains}")
    return [*shares, *cells]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    given = {
        str(f): [a for run in find([f]) if run.rounds for a in clients(run)]
        for f in parser.parse_args().folders
    }
    head = (
        "",
        *(f"{what} {n}" for n in (1, 2) for what in ("gain", "loss", "objective")),
        "asked",
        "no peer",
    )
    screen = terminal.console()
    screen.print(
        terminal.PlainTable(
            head, [[name.removeprefix("results/"), *by_phase(a)] for name, a in given.items()]
        )
    )
    screen.print("\nclients: gain / loss [%], by the number of teachers")
    lines = [[name.removeprefix("results/"), *by_teachers(a)] for name, a in given.items()]
    screen.print(terminal.PlainTable(("", "one", "two", "three", "four or more"), lines))
    screen.print("\nwhat phase 2 adds, in points, paired by seed")
    lines = [[name.removeprefix("results/"), *added(asked)] for name, asked in given.items()]
    screen.print(
        terminal.PlainTable(("", "gain", "95 % interval", "loss", "95 % interval", "seeds"), lines)
    )
    parts = {name: [a for a in asked if "frozen" in a] for name, asked in given.items()}
    if any(parts.values()):
        screen.print(
            "\nentries frozen [%] by row of the head; clients: gain 1 to gain 2 [%], by how much "
            "of the row asked for"
        )
        lines = [
            [name.removeprefix("results/"), *frozen_rows(part)]
            for name, part in parts.items()
            if part
        ]
        screen.print(
            terminal.PlainTable(
                ("", "asked for", "own", "others", "under 25", "25 to 75", "75 and more"), lines
            )
        )
