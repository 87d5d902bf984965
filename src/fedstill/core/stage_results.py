"""A stage as the loop passes it on: the requests to its clients, its result, and the recorder that
writes it down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from fedstill.core.records import SERVER, Payload, Reply, Stage, State, Tensors, World
from fedstill.core.screen import Refusal


@dataclass(frozen=True)
class Requests:
    """The server's requests to the clients of a stage.

    ``payloads``: by client id, without clients that have no work. ``world``: with the extensions
    of the run's hooks.
    """

    stage: Stage
    payloads: Mapping[int, Payload]
    world: World


@dataclass(frozen=True)
class StageResult:
    """A finished stage.

    ``payloads``: by client id, without clients that had nothing to do. ``accepted``: the replies
    that passed the screen, sorted by client id. ``refused``: all other replies, with reasons.
    ``before``, ``after``: the state before and after the stage; the same if the stage ended the
    run. ``ends_round``: whether it is the last stage of its round.
    """

    stage: Stage
    payloads: Mapping[int, Payload]
    accepted: Sequence[Reply]
    refused: Sequence[Refusal]
    before: State
    after: State
    ends_round: bool = True

    @cached_property
    def contents(self) -> Mapping[int, Payload]:
        """The content from each client; of several replies, that of the accepted one."""
        contents = {refusal.client: refusal.content for refusal in self.refused}
        for reply in self.accepted:
            contents[reply.client] = reply.content
        return contents

    @property
    def local_models(self) -> dict[int, Tensors]:
        """The parameters in accepted replies by client, without the server's."""
        return {
            reply.client: reply.content.params
            for reply in self.accepted
            if reply.client != SERVER and "params" in reply.content
        }


class Recorder(Protocol):
    """The run's transaction: it writes the journal and the checkpoint of a stage."""

    def stage(self, result: StageResult) -> None:
        """Record a finished stage."""

    def failed(self, result: StageResult, error: Exception) -> None:
        """Record the refusals of a stage that ends the run; the error is raised afterwards."""


class NoRecorder:
    """A recorder that writes nothing."""

    def stage(self, result: StageResult) -> None:
        """Nothing."""

    def failed(self, result: StageResult, error: Exception) -> None:
        """Nothing."""
