"""What a stage and a round came to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from fedstill.core.records import SERVER, Payload, Reply, Stage, State, Tensors, World
from fedstill.core.screen import Refusal

Predictors = Mapping[str, Callable[[Tensor], Tensor]]
"""What a server can evaluate: functions from inputs (B, ...) to logits (B, C), by name."""


def of_some_clients(name: str) -> bool:
    """Whether a predictor's name ends with a number: then it answers for a client or a group, not
    for all.

    >>> of_some_clients("cluster 0"), of_some_clients("client 3"), of_some_clients("global")
    (True, True, False)
    """
    return name.rpartition(" ")[2].isdecimal()


@dataclass(frozen=True)
class Requests:
    """What the server asks of the clients of a stage.

    ``payloads``: by client id, without the clients that have no work. ``world``: as the hooks of
    the run extend it for this stage.
    """

    stage: Stage
    payloads: Mapping[int, Payload]
    world: World


@dataclass(frozen=True)
class StageResult:
    """A stage that is over.

    ``payloads``: by client id, without the clients that had nothing to do. ``accepted``: replies
    that passed the screen, sorted by client id. ``refused``: all others, with reasons. ``before``,
    ``after``: the state; both are the same if the stage ended the run. ``ends_round``: whether it
    is the round's last stage.
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
        """What arrived from each client, accepted or refused; an accepted reply counts."""
        contents = {refusal.client: refusal.content for refusal in self.refused}
        for reply in self.accepted:
            contents[reply.client] = reply.content
        return contents

    @property
    def local_models(self) -> dict[int, Tensors]:
        """Each client's parameters after training, if replies hold any; without the server's."""
        return {
            reply.client: reply.content.params
            for reply in self.accepted
            if reply.client != SERVER and "params" in reply.content
        }


@dataclass(frozen=True)
class RoundResult:
    """A round that is over.

    ``client_events``: the journal's events of its clients, in order. ``accuracies``: the fields of
    the server's evaluation. ``predictors``: what was evaluated. ``client_predictors``: which of
    these answers for each client, by name; empty where one answers for all, or the server's for
    none.
    """

    number: int
    client_events: Sequence[Mapping[str, Any]]
    accuracies: Mapping[str, Any]
    predictors: Predictors = field(default_factory=dict)
    client_predictors: Mapping[int, str] = field(default_factory=dict)
