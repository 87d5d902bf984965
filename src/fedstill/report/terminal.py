"""Tables, progress and the drawn split in a terminal."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

SHADES = " ░▒▓█"


def console() -> Console:
    """Where people look: the standard output."""
    return Console(highlight=False)


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{100 * value:.2f} %"


def with_spread(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """Mean ± standard deviation (sample) over seeds; the value alone if there is one.

    >>> with_spread([0.1, 0.3], 100), with_spread([0.5])
    ('20.00 ± 14.14', '0.50')
    """
    mean = scale * sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    spread = (sum((scale * v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A plain table; the first column is left-aligned, the others right."""
    out = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        out.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        out.add_row(*row)
    return out


def split(counts: Sequence[Sequence[int]], classes: Sequence[str], most: int = 40) -> Text:
    """The split drawn: a row for each client, a column for each class, darker where the client has more."""
    top = max((max(row) for row in counts), default=0) or 1
    wide = max(len(str(len(counts) - 1)), 6)
    text = Text(f"{'client':>{wide}}  classes 0–{len(classes) - 1}: {', '.join(classes[:12])}")
    text.append(" …\n" if len(classes) > 12 else "\n")
    for client, row in enumerate(counts[:most]):
        cells = "".join(2 * SHADES[min(4, -(-4 * n // top))] for n in row)
        text.append(f"{client:>{wide}}  {cells}  {sum(row):,} examples, {sum(n > 0 for n in row)} classes\n")
    if len(counts) > most:
        text.append(f"{'…':>{wide}}  and {len(counts) - most} more clients\n")
    return text


class Bar:
    """A progress bar for one run: round, accuracy, time left. The first Ctrl-C ends after the stage, the second at once."""

    def __init__(self, rounds: int, label: str, *, quiet: bool = False) -> None:
        self._bar = progress(quiet)
        self._task = self._bar.add_task(label, total=rounds, accuracy="")
        self._rounds, self._asked = rounds, False

    def __enter__(self) -> Bar:
        self._old = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """Move by the share of the round that is done."""
        if round > 0 and stages:
            self._bar.update(self._task, completed=round - 1 + (index + 1) / (stages + 1))

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Show a finished round."""
        said = f"accuracy {percent(event['accuracy'])}  forgetting {event['forgetting']:.3f}"
        self._bar.update(self._task, completed=event["round"], accuracy=said)

    def stop(self) -> bool:
        """Whether somebody pressed Ctrl-C."""
        return self._asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._bar.update(self._task, accuracy="ending after this stage (once more: at once)")


def progress(quiet: bool = False) -> Progress:
    """A bar with rounds done, time passed and time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False),
        disable=quiet,
    )
