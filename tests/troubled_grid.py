"""A grid of Flower nodes on which things go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.flower.engine import LoopbackGrid, Parcel, parsed
from fedstill.flower.remote_runs import trial_app

Trouble = Callable[["TroubledGrid", int, int, int, Parcel], Parcel | None]
"""(grid, client, round, how often it was asked for that stage before, message) to reply; None: no
reply.
"""


class TroubledGrid(LoopbackGrid):
    """A loopback grid on which a test may do anything to the messages of a stage, and take nodes
    away.
    """

    def __init__(self, experiment: Experiment, sites: Path, trouble: Trouble | None = None) -> None:
        settings = resolve(experiment.with_values({"data.name": "blobs"}, "test"))
        super().__init__(trial_app(settings, toys.blobs(), sites), range(settings.clients))
        self.trouble, self.away, self.worked = trouble, set[int](), list[tuple[int, int]]()
        self._met: dict[tuple[int, int, int], int] = {}

    def get_node_ids(self) -> list[int]:
        return [n for n in super().get_node_ids() if self.client(n) not in self.away]

    def client(self, node: int) -> int:
        return int(self.nodes[node].node_config["partition-id"])

    def deliver(self, node: int, data: Parcel) -> Parcel | None:
        message = parsed(data)
        if message.metadata.message_type != "train.stage" or self.trouble is None:
            return super().deliver(node, data)
        client, (round, stage) = self.client(node), stage_of(message)
        key = (client, round, stage)
        before = self._met.get(key, 0)
        self._met[key] = before + 1
        return self.trouble(self, client, round, before, data)

    def work(self, client: int, data: Parcel) -> Parcel | None:
        """What the client's node makes of a message."""
        node = next(n for n in self.nodes if self.client(n) == client)
        return super().deliver(node, data)


def stage_of(message: Any) -> tuple[int, int]:
    """(round, stage) that a message asks for."""
    stage = json.loads(message.content.config_records["header"]["json"])["stage"]
    return stage[0], stage[1]
