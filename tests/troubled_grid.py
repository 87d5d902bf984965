"""A grid of Flower nodes on which things go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.records import Payload
from fedstill.flower.engine import LoopbackGrid, Parcel, parsed, serialised
from fedstill.flower.messages import SiteReply, answer_content, header_and_payload
from fedstill.flower.remote_runs import trial_app
from flowers import MESSAGE_BYTES


@dataclass(frozen=True)
class StageRequest:
    """The stage that a client is requested to execute."""

    client: int
    round: int
    stage: int


@dataclass(frozen=True)
class Delivery:
    """A message that requests a stage, on its way to a client."""

    grid: FaultyGrid
    request: StageRequest
    attempt: int
    """1 for the first message that requests this stage, 2 for its repetition."""
    message: Parcel

    @property
    def client(self) -> int:
        return self.request.client

    @property
    def round(self) -> int:
        return self.request.round

    @property
    def payload(self) -> Payload:
        """The payload of the message."""
        return payload_of(self.message)

    def reply(self) -> Parcel:
        """Have the client's node execute the stage."""
        reply = self.grid.work(self.client, self.message)
        assert reply is not None
        return reply

    def replaced(self, reply: SiteReply) -> Parcel:
        """Another reply than that of the node."""
        return self.with_content(answer_content(reply))

    def with_content(self, content: Any) -> Parcel:
        """A reply with any content."""
        from flwr.app import Message

        return serialised(Message(content, reply_to=parsed(self.message)))

    def error(self, code: int, text: str = "gone") -> Parcel:
        """An error of Flower in place of the reply."""
        from flwr.app import Error, Message

        return serialised(Message(Error(code, text), reply_to=parsed(self.message)))


Fault = Callable[[Delivery], Parcel | None]
"""Returns the reply to a request; None if no reply arrives."""


class FaultyGrid(LoopbackGrid):
    """A loopback grid on which a test may do anything to the messages of a stage, and take nodes
    away.
    """

    def __init__(self, experiment: Experiment, sites: Path, fault: Fault | None = None) -> None:
        settings = resolve(experiment.with_values({"data.name": "blobs"}, "test"))
        super().__init__(trial_app(settings, toys.blobs(), sites), range(settings.clients))
        self.fault = fault
        self.away: set[int] = set()
        self.attempts: dict[StageRequest, int] = {}

    def get_node_ids(self) -> list[int]:
        return [node for node in super().get_node_ids() if self.client(node) not in self.away]

    def client(self, node: int) -> int:
        """The client of a node."""
        return int(self.nodes[node].node_config["partition-id"])

    def node(self, client: int) -> int:
        """The node of a client."""
        return next(node for node in self.nodes if self.client(node) == client)

    def deliver(self, node: int, data: Parcel) -> Parcel | None:
        message = parsed(data)
        if message.metadata.message_type != "train.stage" or self.fault is None:
            return super().deliver(node, data)

        round_index, stage = stage_of(message)
        request = StageRequest(self.client(node), round_index, stage)
        attempt = self.attempts.get(request, 0) + 1
        self.attempts[request] = attempt
        return self.fault(Delivery(self, request, attempt, data))

    def work(self, client: int, data: Parcel) -> Parcel | None:
        """The reply of a client's node to a message."""
        return super().deliver(self.node(client), data)


def payload_of(data: Parcel) -> Payload:
    """The payload of a message."""
    _, payload = header_and_payload(parsed(data).content, MESSAGE_BYTES)
    return payload


def stage_of(message: Any) -> tuple[int, int]:
    """(round, stage) that a message asks for."""
    stage = json.loads(message.content.config_records["header"]["json"])["stage"]
    return stage[0], stage[1]
