"""How long a program waits before it asks again: hardly while there is work, longer and longer
while there is none.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fedstill.flower.messages import require_flower

SOONEST = 0.05
"""Seconds between two questions while there is work."""

BACKOFF = "initial_backoff"
"""What Flower calls the seconds until a part of a message is asked for again."""

SHARE = 0.02
"""Of the time since there was work last, that is waited before the next question."""


@dataclass
class Pace:
    """How long to wait for the next question, in seconds: never longer than asked for.

    A federation at work is asked twenty times a second, one that has been idle for two minutes
    every three seconds.
    """

    clock: Callable[[], float] = time.monotonic
    busy: float = field(default=float("-inf"))

    def worked(self) -> None:
        """There was work just now."""
        self.busy = self.clock()

    def wait(self, most: float) -> float:
        """Seconds until the next question, at most ``most``."""
        return min(most, max(SOONEST, SHARE * (self.clock() - self.busy)))


def fetch_soon() -> bool:
    """Let Flower ask again for a part of a message after ``SOONEST`` seconds, not after one;
    whether it could be done.

    A message is announced before its parts are there. Who comes between waits a second, on the way
    down and on the way up, though the parts come within milliseconds. The wait is an argument of
    Flower's own functions, of which the default changes here; it doubles with each attempt, as
    before.
    """
    require_flower()
    try:
        from flwr.supercore.inflatable import inflatable_utils as flower
    except ImportError:
        return False
    changed = False
    for _, function in inspect.getmembers(flower, inspect.isfunction):
        by_name = getattr(function, "__kwdefaults__", None)
        if by_name and BACKOFF in by_name:
            function.__kwdefaults__ = {**by_name, BACKOFF: SOONEST}
            changed = True
    return changed
