"""What each client's uploads have cost it in privacy so far; counted in the journal, so that a
resumed run goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedstill.anywhere import acting
from fedstill.census import census_stage
from fedstill.errors import BudgetSpent
from fedstill.experiment.preparing.noised_sums import sums_work
from fedstill.experiment.preparing.prepared import Prepared
from fedstill.experiment.running.training_budget import TrainingBudget
from fedstill.method import Method
from fedstill.records import NOTHING, SERVER, Payload, Reply, Stage, World
from fedstill.rounds import Engine
from fedstill.watch import place
from fedstill.wire.privacy import GROUP, Privacy, rows_of
from fedstill.work import ClientWork


@dataclass
class Budget:
    """Counts each client's uploaded rows of logits, as the server sees them: what a client says of
    it has no part.

    ``sums``: rows that each client sends before round 1, of which mean and spread are
    made. ``rows``: by client. One that was refused counts, and so does one that failed or did not
    answer in time, because its logits may have been sent.
    """

    privacy: Privacy
    method: Method
    world: World
    sums: int = 0
    rows: Counter[int] = field(default_factory=Counter)
    on_sites: bool = False
    # of the stage under way: clients that were asked nothing, as theirs is spent
    unasked: frozenset[int] = frozenset()
    advice: ClassVar[str] = "fewer rounds, more noise or fewer public examples (method.subset)"

    @staticmethod
    def of(prepared: Prepared) -> Budget:
        """The budget of a run; a simulation's clients have sent their sums when it begins."""
        settings, data = prepared.settings, prepared.dataset
        sums = (
            sums_work(settings, data.about, data.input_shape).rows
            if prepared.by.origin == "summed"
            else 0
        )
        sent = Counter(
            dict.fromkeys(range(settings.clients), sums) if sums and not settings.on_sites else {}
        )
        return Budget(
            settings.privacy, settings.method, prepared.world, sums, sent, settings.on_sites
        )

    def mark(
        self, stage: Stage, events: Sequence[dict[str, Any]], came: Mapping[int, Payload]
    ) -> None:
        """Note in the clients' events of a stage how many rows of noised logits each
        sent; ``came``: what arrived.
        """
        for event in events:
            event.pop("noised_rows", None)
            client = event["client"]
            if not self.privacy.protects_logits or stage == census_stage(self.world):
                continue
            if (
                client == SERVER
                or client not in stage.clients
                or "idle" in event
                or client in self.unasked
            ):
                continue
            if rows := max(self.asked(stage, client), rows_of(came.get(client, Payload()))):
                event["noised_rows"] = rows
        self.count(events)

    def asked(self, stage: Stage, client: int) -> int:
        """How many rows with noise a client is asked for in a stage."""
        if (
            not self.privacy.protects_logits
            or client == SERVER
            or stage == census_stage(self.world)
        ):
            return 0
        if stage.round == 0:  # before round 1, beside the census
            return self.sums
        return rows_of(acting(self.method, stage).expects(client, stage, self.world))

    def over(self, stage: Stage, client: int) -> str:
        """Why a stage would cost a client more than ``privacy.epsilon`` in all; empty if it would
        not.
        """
        rows = self.asked(stage, client)
        if not rows or self.privacy.allows(self.rows[client] + rows):
            return ""
        spent, after = (
            self.privacy.spent(n) for n in (self.rows[client], self.rows[client] + rows)
        )
        return (
            f"client {client} has spent epsilon {spent:.3g}, and its next {rows} rows make it "
            f"{after:.3g}, over "
            f"privacy.epsilon = {self.privacy.epsilon:g}"
        )

    def count(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Count what events say."""
        for event in events:
            self.rows[event["client"]] += event.get("noised_rows", 0)

    def told(self) -> dict[str, Any]:
        """For the event of a round: each client's epsilon so far (None: unbounded) at which delta;
        empty if off.
        """
        if not self.privacy.protects_logits:
            return {}
        spent = {rows: self.privacy.spent(rows) for rows in {0, *self.rows.values()}}
        each = [spent[self.rows[c]] for c in range(self.world.clients)]
        return {
            "privacy": {
                "epsilon": each,
                "delta": self.privacy.delta,
                "covers": f"{GROUP} and sums" if self.sums else GROUP,
            }
        }


@dataclass(frozen=True)
class WithinBudget:
    """An engine that asks nobody for more than the budget has left.

    A real site may say what it likes of its data, and so spend its own budget at once: it is left
    out, and the others go on. In a simulation the run ends with the first.
    """

    engine: Engine
    budget: Budget | TrainingBudget

    def run(
        self, work: ClientWork, stage: Stage, downs: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies; raises BudgetSpent before any client has begun."""
        over = {client: why for client in sorted(downs) if (why := self.budget.over(stage, client))}
        if over and (len(over) == len(downs) or not self.budget.on_sites):
            raise BudgetSpent(
                f"{place(stage)}: {next(iter(over.values()))}; nothing of the stage was sent. A "
                "new run with "
                f"{self.budget.advice} stays below"
            )
        self.budget.unasked = frozenset(over)
        replies = self.engine.run(
            work, stage, {c: down for c, down in downs.items() if c not in over}, seed
        )
        left_out = [
            Reply(c, NOTHING, 0, {}, stage.round, stage.index, failure=why)
            for c, why in over.items()
        ]
        return [*replies, *left_out]

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what clients remember."""
        self.engine.commit(stage, clients)
