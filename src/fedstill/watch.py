"""Who is told the result of each stage: of a good one, and of one that ends the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from fedstill.records import Payload, Reply, Stage, State
from fedstill.wire.screen import Refusal


class Watch(Protocol):
    """Who is told the result of each stage."""

    def stage(
        self,
        stage: Stage,
        replies: Sequence[Reply],
        refused: Sequence[Refusal],
        downs: Mapping[int, Payload],
        state: State,
    ) -> None:
        """A stage is done: its accepted replies, its refusals, what was sent down, and the state after it."""

    def failed(
        self, stage: Stage, replies: Sequence[Reply], refused: Sequence[Refusal], downs: Mapping[int, Payload]
    ) -> None:
        """A stage ends the run: the error that says why comes next, and the state is still the one before the stage."""


class Unwatched:
    """A watch that takes no notice."""

    def stage(self, *_: object) -> None:
        """Nothing."""

    def failed(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def told(
    watch: Watch, stage: Stage, replies: Sequence[Reply], refused: Sequence[Refusal], downs: Mapping[int, Payload]
) -> Iterator[None]:
    """Where a stage may end the run: the watch is told of its refusals first."""
    try:
        yield
    except Exception:
        watch.failed(stage, replies, refused, downs)
        raise
