"""The privacy budget that each client has spent, by training and by uploads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fedstill.core.checks import place
from fedstill.core.errors import BudgetSpent
from fedstill.core.extensions import Engine, Event, Fields, Observer, RoundResult, StageResult
from fedstill.core.label_counts import census_stage
from fedstill.core.method import ClientWork
from fedstill.core.records import NOTHING, SERVER, Payload, Reply, Stage, World
from fedstill.core.rounds import Schedule
from fedstill.privacy.noise import GROUP, Privacy, rows_of
from fedstill.privacy.private_training import rate_and_steps, training_epsilon
from fedstill.running.preparation import Prepared
from fedstill.running.standardisation import sums_work

# What private training has cost each client so far; counted in the journal, so that a resumed run
# goes on.


@dataclass
class TrainingBudget(Observer):
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
        return TrainingBudget(settings.table(Privacy), world, known, on_sites=settings.on_sites)

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

    def client_fields(self, event: Event, result: StageResult) -> Fields:
        """``private_steps``: the noised steps of a client, and ``private_rate``: the probability
        with which a step takes an example.
        """
        if not _is_asked(event, result.stage, self.unasked):
            return {}
        rate, steps = self.visit(result.stage, event["client"], event.get("examples"))
        return {"private_steps": steps, "private_rate": rate} if steps else {}

    def on_event(self, event: Event) -> None:
        """Count a client's steps, and remember how many examples a site has."""
        steps = event.get("private_steps", 0)
        if event["event"] != "client" or not steps:
            return
        taken = self.steps.setdefault(event["client"], Counter())
        taken[float(event["private_rate"])] += steps
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

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """``privacy``: each client's epsilon so far (None: unbounded), and at which delta."""
        each = [self.spent(client) for client in range(self.world.clients)]
        return {
            "privacy": {
                "epsilon": each,
                "delta": self.privacy.delta,
                "covers": "training, by example",
            }
        }


# What each client's uploads have cost it in privacy so far; counted in the journal, so that a
# resumed run goes on.


@dataclass
class Budget(Observer):
    """Counts each client's uploaded rows of logits, as the server sees them: what a client says of
    it has no part.

    ``sums``: rows that each client sends before round 1, of which mean and spread are
    made. ``rows``: by client. One that was refused counts, and so does one that failed or did not
    answer in time, because its logits may have been sent.
    """

    privacy: Privacy
    schedule: Schedule
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
            if prepared.scaler.origin == "summed"
            else 0
        )
        sent = Counter(
            dict.fromkeys(range(settings.clients), sums) if sums and not settings.on_sites else {}
        )
        return Budget(
            settings.table(Privacy),
            settings.schedule,
            prepared.world,
            sums,
            sent,
            settings.on_sites,
        )

    def client_fields(self, event: Event, result: StageResult) -> Fields:
        """``noised_rows``: the rows of noised logits that a client sent: at least those that it was
        asked for.
        """
        stage, client = result.stage, event["client"]
        is_off = not self.privacy.protects_logits or stage == census_stage(self.world)
        if is_off or client == SERVER or not _is_asked(event, stage, self.unasked):
            return {}
        arrived = rows_of(result.contents.get(client, NOTHING))
        rows = max(self.asked(stage, client), arrived)
        return {"noised_rows": rows} if rows else {}

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
        return rows_of(self.schedule.actor(stage).expected_reply(client, stage, self.world))

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

    def on_event(self, event: Event) -> None:
        """Count a client's rows."""
        if event["event"] == "client":
            self.rows[event["client"]] += event.get("noised_rows", 0)

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """``privacy``: each client's epsilon so far (None: unbounded), and at which delta; nothing
        if logits are not protected.
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


def _is_asked(event: Event, stage: Stage, unasked: Collection[int]) -> bool:
    """Whether a client was asked for something in a stage, and had something to do."""
    client = event["client"]
    return client in stage.clients and "idle" not in event and client not in unasked


@dataclass(frozen=True)
class WithinBudget:
    """An engine that asks nobody for more than the budget has left.

    A real site may say what it likes of its data, and so spend its own budget at once: it is left
    out, and the others go on. In a simulation the run ends with the first.
    """

    engine: Engine
    budget: Budget | TrainingBudget

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies; raises BudgetSpent before any client has begun."""
        over = {}
        for client in sorted(payloads):
            excess = self.budget.over(stage, client)
            if excess:
                over[client] = excess
        if over and (len(over) == len(payloads) or not self.budget.on_sites):
            raise BudgetSpent(
                f"{place(stage)}: {next(iter(over.values()))}; nothing of the stage was sent. A "
                "new run with "
                f"{self.budget.advice} stays below"
            )
        self.budget.unasked = frozenset(over)
        replies = self.engine.run(
            work, stage, {c: p for c, p in payloads.items() if c not in over}, seed
        )
        left_out = [
            Reply(c, NOTHING, 0, {}, stage.round, stage.index, failure=why)
            for c, why in over.items()
        ]
        return [*replies, *left_out]

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what clients remember."""
        self.engine.commit(stage, clients)
