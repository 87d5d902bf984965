"""What each client's uploads have cost it in privacy so far; counted in the journal, so that a resumed run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedstill.method import Method
from fedstill.records import SERVER, Stage, World
from fedstill.wire.privacy import GROUP, Privacy


@dataclass
class Budget:
    """Counts the uploads of logits. A refused one counts too, because it may have been sent."""

    privacy: Privacy
    method: Method
    world: World
    uploads: Counter[int] = field(default_factory=Counter)
    rows: int = 0

    def mark(self, stage: Stage, events: Sequence[dict[str, Any]]) -> None:
        """Note in the clients' events of a stage how many rows of noised logits each sent, if it did."""
        for event in events if self.privacy.on and stage.round > 0 else ():  # round 0 is the census
            client = event["client"]
            if client == SERVER or client not in stage.clients or "idle" in event:
                continue
            logits = self.method.expects(client, stage, self.world).get(GROUP)
            if isinstance(logits, Tensor):
                event["noised_rows"] = logits.shape[0]
        self.count(events)

    def count(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Count what events say."""
        for event in events:
            if "noised_rows" in event:
                self.uploads[event["client"]] += 1
                self.rows = event["noised_rows"]

    def told(self) -> dict[str, Any]:
        """For the event of a round: each client's epsilon so far (None: unbounded) at which delta; empty if off."""
        if not self.privacy.on:
            return {}
        each = [self.privacy.epsilon(self.rows, self.uploads[c]) for c in range(self.world.clients)]
        return {"privacy": {"epsilon": each, "delta": self.privacy.delta, "covers": GROUP}}
