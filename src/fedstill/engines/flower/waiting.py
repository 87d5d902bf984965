"""How long a program waits before it asks again: hardly while there is work, longer and longer while there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

SOONEST = 0.05
"""Seconds between two questions while there is work."""

SHARE = 0.02
"""Of the time since there was work last, that is waited before the next question."""


@dataclass
class Pace:
    """How long to wait for the next question, in seconds: never longer than asked for.

    A federation at work is asked twenty times a second, one that has been idle for two minutes every three seconds.
    """

    clock: Callable[[], float] = time.monotonic
    busy: float = field(default=float("-inf"))

    def worked(self) -> None:
        """There was work just now."""
        self.busy = self.clock()

    def wait(self, most: float) -> float:
        """Seconds until the next question, at most ``most``."""
        return min(most, max(SOONEST, SHARE * (self.clock() - self.busy)))
