"""What a tracker is told of a run, and by which calls: one protocol for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

HowEnded = Literal["finished", "stopped", "failed"]
"""How a run ended: stopped runs, and failed ones, may go on later."""


@dataclass(frozen=True)
class AboutRun:
    """What a run is: its directory, its name, the name it shares with its other seeds, its settings
    by dotted key.

    ``versions``: of fedstill, torch, NumPy and Python.
    """

    folder: Path
    name: str
    shared_name: str
    seed: int
    settings: Mapping[str, Any]
    versions: Mapping[str, str]


class Tracker(Protocol):
    """Takes what a run says. Whatever it raises is one warning: the run goes on without it."""

    def ready(self) -> None:
        """Called before anything is trained; raises ConfigError if the tracker cannot work here."""

    def begin(self, run: AboutRun, memo: dict[str, str], last: int) -> int:
        """The run begins, or goes on; the last round that the tracker has, or -1: it is sent none
        of these again.

        ``memo``: empty at first. What the tracker puts there is kept in the run's directory, and is
        there when the run goes on. ``last``: the last round that it took before, -1 if none.
        """

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """The numbers of a round that is done; round 0 is before training."""

    def end(self, how: HowEnded, summary: Mapping[str, float | str]) -> None:
        """The run ended; ``summary`` is empty unless it is finished."""


Track = str | Tracker | Sequence[str | Tracker]
"""Which trackers: names (``"mlflow"``, or several with commas), trackers of your own, or a list of
both.
"""
