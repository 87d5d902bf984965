"""How a run reports its progress, and how it is asked to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

OnRound = Callable[[dict[str, Any]], object]
"""Called in Python after each round, with the fields of the journal's event."""


class Progress(Protocol):
    """Is told of every stage and every round that is done, and may ask the run to stop."""

    def started(self, folder: Path, round: int) -> None:
        """The run starts in its directory, or goes on there with a round."""

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """A stage is done."""

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """A round is done and measured."""

    def stop(self) -> bool:
        """Whether to end after this stage."""


class Quiet:
    """Shows nothing and never stops a run."""

    def started(self, folder: Path, round: int) -> None:
        """Nothing."""

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """Nothing."""

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Nothing."""

    def stop(self) -> bool:
        """Never."""
        return False
