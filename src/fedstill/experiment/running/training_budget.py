"""What private training has cost each client so far; counted in the journal, so that a resumed run
goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedstill.engines.private import rate_and_steps
from fedstill.experiment.preparing.prepared import Prepared
from fedstill.records import SERVER, Payload, Stage, World
from fedstill.wire.moments_accountant import training_epsilon
from fedstill.wire.privacy import Privacy


@dataclass
class TrainingBudget:
    """Counts each client's noised steps, by the probability with which they took an example.

    ``examples``: how many each client trains on, by stage, in a simulation. Of a real site it is
    what the site said last in a stage of that name (``said``); one that has said nothing yet counts
    as if every step took all of its examples. A stage that failed or was refused counts, too:
    something may have been sent.
    """

    privacy: Privacy
    world: World
    examples: Mapping[tuple[str, int], int]
    steps: dict[int, Counter[float]] = field(default_factory=dict)
    said: dict[tuple[str, int], int] = field(default_factory=dict)
    on_sites: bool = False
    # of the stage under way: clients that were asked nothing, as theirs is spent
    unasked: frozenset[int] = frozenset()
    advice: ClassVar[str] = "fewer rounds or epochs, more noise (gradient_noise) or smaller batches"

    @staticmethod
    def of(prepared: Prepared) -> TrainingBudget:
        """The budget of a run."""
        settings, world, sites = prepared.settings, prepared.world, prepared.sites
        clients = () if settings.on_sites else range(settings.clients)
        known = {(name, c): sites.trains_on(c, name) for name in settings.plans for c in clients}
        return TrainingBudget(settings.privacy, world, known, on_sites=settings.on_sites)

    def visit(self, stage: Stage, client: int, said: int | None) -> tuple[float, int]:
        """With which probability a step takes an example, and the steps, of a client that says it
        has so many.
        """
        plan = self.world.plans.get(stage.name)
        if plan is None or client == SERVER or stage.view != "private":
            return 0.0, 0
        own = stage.name, client
        n = self.examples.get(own, self.said.get(own) if said is None else said)
        return rate_and_steps(plan.batch if n is None else n, plan)

    def mark(
        self, stage: Stage, events: Sequence[dict[str, Any]], came: Mapping[int, Payload]
    ) -> None:
        """Note in the clients' events of a stage how many noised steps each took, and their
        probability.
        """
        for event in events:
            for name in ("private_steps", "private_rate"):
                event.pop(name, None)
            if (
                event["client"] in stage.clients
                and "idle" not in event
                and event["client"] not in self.unasked
            ):
                rate, steps = self.visit(stage, event["client"], event.get("examples"))
                event |= {"private_steps": steps, "private_rate": rate} if steps else {}
        self.count(events)

    def count(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Count what events say."""
        for event in events:
            if steps := event.get("private_steps", 0):
                self.steps.setdefault(event["client"], Counter())[float(event["private_rate"])] += (
                    steps
                )
                if event.get("examples") and "refused" not in event:
                    self.said[event["name"], event["client"]] = event["examples"]

    def spent(self, client: int, rate: float = 0.0, more: int = 0) -> float | None:
        """A client's epsilon so far, or after more steps; None where nothing bounds it."""
        steps = self.steps.get(client, Counter()) + Counter({rate: more})
        return training_epsilon(self.privacy.sigma, steps, self.privacy.delta)

    def over(self, stage: Stage, client: int) -> str:
        """Why a stage would cost a client more than ``privacy.epsilon`` in all; empty if it would
        not.

        A real site of which nothing is known yet sees to it itself, and so does one whose data have
        changed.
        """
        most = self.privacy.epsilon
        if most is None or (not self.examples and (stage.name, client) not in self.said):
            return ""
        rate, steps = self.visit(stage, client, None)
        after = self.spent(client, rate, steps)
        if after is not None and after <= most:
            return ""
        return (
            f"client {client} has spent epsilon {self.spent(client):.3g}, and {steps} more steps "
            f"make it {after:.3g}, "
            f"over privacy.epsilon = {most:g}"
        )

    def told(self) -> dict[str, Any]:
        """For the event of a round: each client's epsilon so far (None: unbounded) at which
        delta.
        """
        each = [self.spent(client) for client in range(self.world.clients)]
        return {
            "privacy": {
                "epsilon": each,
                "delta": self.privacy.delta,
                "covers": "training, by example",
            }
        }
