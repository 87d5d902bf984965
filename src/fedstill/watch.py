"""Who is told the result of each stage: of a good one, and of one that ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from fedstill.errors import ClientFailed
from fedstill.records import Payload, Reply, Stage, State
from fedstill.wire.screen import Refusal, Rules


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
        """A stage is done: its accepted replies, its refusals, what was sent down, and the state
        after it.
        """

    def failed(
        self,
        stage: Stage,
        replies: Sequence[Reply],
        refused: Sequence[Refusal],
        downs: Mapping[int, Payload],
    ) -> None:
        """A stage ends the run: the error that says why comes next, and the state is still the one
        before the stage.
        """


class Unwatched:
    """A watch that takes no notice."""

    def stage(self, *_: object) -> None:
        """Nothing."""

    def failed(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def told(
    watch: Watch,
    stage: Stage,
    replies: Sequence[Reply],
    refused: Sequence[Refusal],
    downs: Mapping[int, Payload],
) -> Iterator[None]:
    """Where a stage may end the run: the watch is told of its refusals first."""
    try:
        yield
    except Exception:
        watch.failed(stage, replies, refused, downs)
        raise


def place(stage: Stage) -> str:
    """Where in a run a stage is, in words."""
    return f"round {stage.round}, stage {stage.name!r}"


def replies_of(
    run: Callable[[], list[Reply]],
    stage: Stage,
    downs: Mapping[int, Payload],
    rules: Rules,
    watch: Watch,
) -> tuple[list[Reply], dict[int, Payload]]:
    """What an engine's ``run`` gives, and what was sent, both without the clients that had nothing
    to do.

    Raises ClientFailed for a client that failed, unless the rules tolerate that.
    An engine may raise it itself, at the first one. The watch is told before.
    """
    try:
        came = run()
        for reply in came if rules.failures == "stop" else ():
            if reply.failure:
                raise ClientFailed(place(stage), [reply.client], reply.failure)
    except ClientFailed as error:
        watch.failed(
            stage, (), [Refusal(c, f"failed: {error.why}", "failed") for c in error.clients], downs
        )
        raise
    idle = {reply.client for reply in came if reply.idle and not reply.failure}
    return [r for r in came if r.client not in idle], {
        c: down for c, down in downs.items() if c not in idle
    }
