"""Flower's client, which asks its server often while there is work:
``python -m fedstill.flower.deployment.supernode``.

The options are Flower's own. Flower's client sleeps three seconds whenever there is no message for
it, and half a second between looks for an answer: a chain of ten clients would spend half of its
time asleep. Here these sleeps are as long as ``waiting.Pace`` says. Nothing else of Flower's is
changed.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from fedstill.core.errors import ConfigError, FedstillError
from fedstill.flower.deployment.processes import end_with_parent
from fedstill.flower.fleet import Pace, fetch_soon
from fedstill.flower.messages import require_flower

IDLE = 3.0
"""What Flower sleeps where there is no message; a shorter sleep is one for an answer."""


class Awake(SimpleNamespace):
    """The module ``time`` for Flower's client, with other sleeps."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(
            **{name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
        )
        self.pace = pace
        self.sleep = self._sleep

    def _sleep(self, seconds: float) -> None:
        """Sleep as long as it makes sense: what sleeps for an answer has a message, and so there is
        work.
        """
        if seconds < IDLE:
            self.pace.worked()
        time.sleep(self.pace.wait(seconds))


def awake() -> Any:
    """Flower's function for its client, which sleeps less; raises ConfigError if it sleeps
    otherwise than is known.
    """
    require_flower()
    try:
        client = import_module("flwr.supernode.start_client_internal")
        start = import_module("flwr.supernode.cli.flower_supernode").flower_supernode
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this version of Flower starts its client otherwise than fedstill knows: {error}"
        ) from error
    if getattr(client, "time", None) is time and fetch_soon():
        client.time = Awake(Pace())  # type: ignore[attr-defined]
    else:  # it sleeps otherwise by now: all works, and a hop is as slow as Flower makes it
        print(
            "fedstill: this version of Flower sleeps as it likes between messages",
            file=sys.stderr,
            flush=True,
        )
    return start


def be_client() -> int:
    """Be a client until a signal ends it; the exit status."""
    try:
        start = awake()
    except FedstillError as error:
        print(f"fedstill: {error}", file=sys.stderr)
        return 1
    start()
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(be_client())
