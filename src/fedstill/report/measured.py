"""What measures wrote into journals, read with care: the last look of a measure, and the numbers of
all looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from fedstill.errors import CorruptFile
from fedstill.experiment.measures.base import seconds_at_clients
from fedstill.experiment.run_directory.journal import Event
from fedstill.report.groups import Group
from fedstill.report.runs import JOURNAL, Run


@dataclass(frozen=True)
class Look:
    """The last look of a measure in a group's first seed that has one."""

    group: Group
    run: Run
    event: Event

    @property
    def place(self) -> str:
        """Which seed and round it is from."""
        return f"seed {self.run.seed}, round {self.event['round']}"


def last_looks(groups: Sequence[Group], measure: str) -> list[Look]:
    """The last look of each group that has the measure."""
    out = []
    for group in groups:
        for run in group.started:
            events = [e for e in run.measures if e["measure"] == measure]
            if events:
                out.append(Look(group, run, events[-1]))
                break
    return out


def looks(group: Group, measure: str) -> Iterator[Look]:
    """Every look of a measure in all of a group's runs."""
    for run in group.started:
        for event in run.measures:
            if event["measure"] == measure:
                yield Look(group, run, event)


@contextmanager
def reading(look: Look) -> Iterator[Event]:
    """The event of a look; what is not as the measure writes it raises CorruptFile with the
    journal's name.
    """
    try:
        yield look.event
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        path, said = look.run.folder / JOURNAL, f"{type(error).__name__}: {error}"
        raise CorruptFile(
            f"{path}: round {look.event['round']} of {look.event['measure']} is damaged: {said}"
        ) from error


def seconds(group: Group) -> dict[str, float]:
    """Seconds a run by measure, mean over seeds; some are taken by clients."""
    total: dict[str, float] = {}
    for run in group.started:
        for event in run.measures:
            total[event["measure"]] = total.get(event["measure"], 0.0) + float(
                event.get("seconds") or 0.0
            )
        names = [PurePath(str(name)).name for name in run.settings.get("measure", ())]
        for name, took in seconds_at_clients(run.clients, names).items():
            total[name] = total.get(name, 0.0) + took
    return {k: v / len(group.started) for k, v in total.items()}


def matrix(value: Any, rows: int, columns: int) -> list[list[float]]:
    """Numbers in so many rows and columns; raises ValueError for anything else."""
    numbers = [[float(v) for v in row] for row in value]
    if len(numbers) != rows or any(len(row) != columns for row in numbers):
        raise ValueError(f"it must have {rows} × {columns} numbers")
    return numbers
