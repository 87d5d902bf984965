"""Clients that share torch's global generators, side by side or in a stack: whether anything has
drawn from them.
"""

from __future__ import annotations

import functools
import logging

from fedstill.keys import global_state, has_moved

log = logging.getLogger("fedstill.engine")


class Drew(Exception):
    """A client has drawn from a generator that it shares with others: the bits would depend on
    which came first.
    """


class Unmoved:
    """Generators that are to stay where they stand now."""

    def __init__(self) -> None:
        self._since = global_state()

    def check(self) -> None:
        """Raises Drew if they have moved."""
        if has_moved(self._since):
            raise Drew


def drew_under_vmap(error: Exception) -> bool:
    """Whether an error is torch's, of an objective that draws random numbers for a stack of
    clients.
    """
    return isinstance(error, RuntimeError) and "random operation" in str(error)


@functools.cache
def say_drawn(work: str) -> None:
    """Once a process: clients of one method are alike."""
    log.warning(
        "%s draws random numbers from torch's global generator, which clients side by side or in a "
        "stack would share: "
        "its clients are trained one after another; set engine = 'serial' to save the first try",
        work,
    )
