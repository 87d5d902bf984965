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

    ``examples``: how many examples each client trains on, by stage, in a simulation. ``reported``:
    how many examples a real site reported last in a stage of that name. A site that has reported
    nothing yet counts as if every step took all of its examples. A stage that failed or was refused
    counts, too: something may have been sent.
    """

    privacy: Privacy
    world: World
    examples: Mapping[tuple[str, int], int]
    steps: dict[int, Counter[float]] = field(default_factory=dict)
    reported: dict[tuple[str, int], int] = field(default_factory=dict)
    on_sites: bool = False
    # of the stage under way: clients that were asked nothing, as theirs is spent
    unasked: frozenset[int] = frozenset()
    advice: ClassVar[str] = "fewer rounds or epochs, more noise (gradient_noise) or smaller batches"

    @staticmethod
    def of(prepared: Prepared) -> TrainingBudget:
        """The budget of a run."""
        settings = prepared.settings
        examples: dict[tuple[str, int], int] = {}
        if not settings.on_sites:
            for stage in settings.plans:
                for client in range(settings.clients):
                    examples[stage, client] = prepared.sites.trains_on(client, stage)
        return TrainingBudget(
            privacy=settings.table(Privacy),
            world=prepared.world,
            examples=examples,
            on_sites=settings.on_sites,
        )

    def visit(self, stage: Stage, client: int, claimed: int | None) -> tuple[float, int]:
        """The probability with which a step takes an example, and the number of steps.

        claimed: how many examples the client says that it has; None if it says nothing.
        """
        plan = self.world.plans.get(stage.name)
        if plan is None or client == SERVER or stage.view != "private":
            return 0.0, 0
        key = (stage.name, client)
        if claimed is None:
            claimed = self.reported.get(key)
        examples = self.examples.get(key, claimed)
        if examples is None:
            examples = plan.batch
        return rate_and_steps(examples, plan)

    def client_fields(self, event: Event, result: StageResult) -> Fields:
        """``private_steps``: the noised steps of a client, and ``private_rate``: the probability
        with which a step takes an example.
        """
        if not _is_asked(event, result.stage, self.unasked):
            return {}
        rate, steps = self.visit(result.stage, event["client"], event.get("examples"))
        if not steps:
            return {}
        return {"private_steps": steps, "private_rate": rate}

    def on_event(self, event: Event) -> None:
        """Count a client's steps, and remember how many examples a site has."""
        steps = event.get("private_steps", 0)
        if event["event"] != "client" or not steps:
            return
        steps_by_rate = self.steps.setdefault(event["client"], Counter())
        steps_by_rate[float(event["private_rate"])] += steps
        if event.get("examples") and "refused" not in event:
            self.reported[event["name"], event["client"]] = event["examples"]

    def spent(self, client: int, rate: float = 0.0, further_steps: int = 0) -> float | None:
        """A client's epsilon so far, or after further steps; None where nothing bounds it."""
        steps = self.steps.get(client, Counter()) + Counter({rate: further_steps})
        return training_epsilon(self.privacy.sigma, steps, self.privacy.delta)

    def over(self, stage: Stage, client: int) -> str:
        """Why a stage would cost a client more than ``privacy.epsilon`` in all; empty if it would
        not.

        A real site of which nothing is known yet sees to it itself, and so does one whose data have
        changed.
        """
        most = self.privacy.epsilon
        if most is None or (not self.examples and (stage.name, client) not in self.reported):
            return ""
        rate, steps = self.visit(stage, client, None)
        total = self.spent(client, rate, steps)
        if total is not None and total <= most:
            return ""
        return (
            f"client {client} has spent epsilon {self.spent(client):.3g}, and {steps} more steps "
            f"make it {total:.3g}, over privacy.epsilon = {most:g}"
        )

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """``privacy``: each client's epsilon so far (None: unbounded), and at which delta."""
        return {
            "privacy": {
                "epsilon": [self.spent(client) for client in range(self.world.clients)],
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
        settings = prepared.settings
        data = prepared.dataset
        sums = 0
        if prepared.scaler.origin == "summed":
            sums = sums_work(settings, data.about, data.input_shape).rows
        rows: Counter[int] = Counter()
        if sums and not settings.on_sites:
            rows.update(dict.fromkeys(range(settings.clients), sums))
        return Budget(
            privacy=settings.table(Privacy),
            schedule=settings.schedule,
            world=prepared.world,
            sums=sums,
            rows=rows,
            on_sites=settings.on_sites,
        )

    def client_fields(self, event: Event, result: StageResult) -> Fields:
        """``noised_rows``: the rows of noised logits that a client sent: at least those that it was
        asked for.
        """
        stage = result.stage
        client = event["client"]
        is_off = not self.privacy.protects_logits or stage == census_stage(self.world)
        if is_off or client == SERVER or not _is_asked(event, stage, self.unasked):
            return {}
        arrived = rows_of(result.contents.get(client, NOTHING))
        rows = max(self.expected_rows(stage, client), arrived)
        if not rows:
            return {}
        return {"noised_rows": rows}

    def expected_rows(self, stage: Stage, client: int) -> int:
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
        rows = self.expected_rows(stage, client)
        sent_rows = self.rows[client]
        if not rows or self.privacy.allows(sent_rows + rows):
            return ""
        spent = self.privacy.spent(sent_rows)
        total = self.privacy.spent(sent_rows + rows)
        return (
            f"client {client} has spent epsilon {spent:.3g}, and its next {rows} rows make it "
            f"{total:.3g}, over privacy.epsilon = {self.privacy.epsilon:g}"
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
        epsilons = {rows: self.privacy.spent(rows) for rows in {0, *self.rows.values()}}
        covered = GROUP
        if self.sums:
            covered = f"{GROUP} and sums"
        return {
            "privacy": {
                "epsilon": [epsilons[self.rows[c]] for c in range(self.world.clients)],
                "delta": self.privacy.delta,
                "covers": covered,
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
        excluded = [_excluded(client, stage, reason) for client, reason in over.items()]
        return [*replies, *excluded]

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what clients remember."""
        self.engine.commit(stage, clients)


def _excluded(client: int, stage: Stage, reason: str) -> Reply:
    """The reply of a client that was sent nothing, for this reason."""
    return Reply(
        client=client,
        content=NOTHING,
        examples=0,
        round=stage.round,
        stage=stage.index,
        failure=reason,
    )
