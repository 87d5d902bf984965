"""What privacy adds to a run: secure sums, private training, noise on logits and on sums, and
budgets.

The code of secure sums is imported only by runs that use them. Budgets are counted from the events
of the journal, so a resumed run continues to count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.core.checks import place
from fedstill.core.errors import BudgetSpent, ConfigError
from fedstill.core.extensions import (
    ClientHook,
    Engine,
    Event,
    Fields,
    Middleware,
    Observer,
    RoundResult,
    StageResult,
)
from fedstill.core.files import counted
from fedstill.core.label_counts import CENSUS
from fedstill.core.method import ClientWork
from fedstill.core.records import NOTHING, SERVER, Payload, Reply, Stage, World
from fedstill.core.rounds import Schedule
from fedstill.data.dataset import DatasetInfo
from fedstill.privacy.noise import GROUP, SUMS_GROUP, NoisedLogits, Privacy, rows_of
from fedstill.privacy.private_training import (
    Private,
    PrivateTraining,
    rate_and_steps,
    training_epsilon,
)
from fedstill.running.extensions import Extensions
from fedstill.running.preparation import Prepared
from fedstill.running.standardisation import ROUNDING, Moments, SumsWork, sums_work


def secure_sums(prepared: Prepared, folder: Path | None) -> Extensions:
    """Secure sums, if the config asks for them. ``folder``: the run's directory."""
    settings = prepared.settings
    if not settings.package_table(Privacy).secure_sum:
        return Extensions()
    from fedstill.privacy.secure_engine import MaskedBytes, with_masking

    return Extensions(
        middleware=(lambda engine: with_masking(engine, settings, folder),),
        observers=(MaskedBytes(),),
    )


def budgets(prepared: Prepared, folder: Path | None) -> Extensions:
    """The count of what clients spend of their budget; with ``privacy.epsilon``, also the engine
    that enforces it.
    """
    privacy = prepared.settings.package_table(Privacy)
    if not (privacy.trains or privacy.protects_logits):
        return Extensions()

    budget: Budget | TrainingBudget = Budget.of(prepared)
    if privacy.trains:
        budget = TrainingBudget.of(prepared)
    middleware: list[Middleware] = []
    if privacy.epsilon is not None:
        middleware.append(lambda engine: WithinBudget(engine, budget))
    return Extensions(middleware=tuple(middleware), observers=(budget,))


def client_extensions(
    settings: Settings, world: World, is_real_site: bool
) -> tuple[ClientHook, ...]:
    """The client hooks of private training and of noise on logits. At real sites, the noise comes
    from the operating system and cannot be reproduced.
    """
    privacy = settings.package_table(Privacy)
    hooks: list[ClientHook] = []
    if privacy.gradient_clip is not None:
        rule = Private(privacy.gradient_clip, privacy.sigma, is_real_site)
        hooks.append(PrivateTraining(rule))
    if privacy.protects_logits:
        hooks.append(NoisedLogits(privacy, is_real_site))
    return tuple(hooks)


# ---- sums with noise -----------------------------------------------------------------------------
#
# Means of clipped values and of their squares, protected in the same way as rows of logits
# (``privacy.noise``).
#
# The values of a column are clipped to its limits (``data.limits``) and scaled to [-1, 1]. For each
# column, a client sends the row (m, 2 q - 1) / sqrt(2), multiplied by ``privacy.clip``, where m is
# the mean of the scaled values and q the mean of their squares. For any data, the norm of the row
# is at most ``privacy.clip``. So K columns cost as much as K rows of logits with the same noise.
# Columns of 0 and 1 are not standardised, and clients send nothing about them. The number of a
# client's examples, which weights its row, has no noise, as in a weighted mean of models.


FAR = 40.0
"""The largest plausible noise, in standard deviations. A normal number exceeds it with a
probability of 10^-349, so the server refuses such a reply.
"""
LEAST_SPREAD = 0.1
"""The smallest standard deviation of a column that is taken from noised sums, as a share of half
the width of its limits.
"""


@dataclass(frozen=True)
class NoisedSums(SumsWork):
    """Clients send means of clipped values and of their squares, with noise.

    ``places``: the columns that are standardised. ``low``, ``high``: their limits. ``clip``: the
    largest norm of a row. ``noise``: the standard deviation of the noise on each number, in units
    of ``clip``.
    """

    places: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    clip: float = 1.0
    noise: float = 0.0

    @property
    def rows(self) -> int:
        return len(self.places)

    @property
    def expected(self) -> Payload:
        return Payload({SUMS_GROUP: torch.zeros(self.rows, 2, dtype=torch.float64)})

    def sent(self, values: Tensor) -> Payload:
        by_column = values.double().transpose(0, 1).flatten(1)[list(self.places)]
        centre, half = self._scale
        scaled = ((by_column - centre[:, None]) / half[:, None]).clamp(-1, 1)
        # A column without values has the moments of a uniform distribution over its limits.
        means = scaled.nanmean(1).nan_to_num(0.0)
        squares = (scaled * scaled).nanmean(1).nan_to_num(1 / 3)
        rows = torch.stack([means, 2 * squares - 1], 1) / math.sqrt(2)
        return Payload({SUMS_GROUP: self.clip * rows})

    def simulated(self, values: Tensor, seed: int) -> Payload:
        return Privacy(clip=self.clip, noise=self.noise).protect(self.sent(values), seed)

    def moments(self, replies: Sequence[Reply]) -> Moments:
        weights = torch.tensor([float(reply.examples) for reply in replies], dtype=torch.float64)
        rows = torch.stack([reply.content.tensor(SUMS_GROUP) for reply in replies])
        rows = rows * math.sqrt(2) / self.clip
        weighted = (rows * weights[:, None, None]).sum(0) / weights.sum().clamp(min=1)
        # A row contains m and 2 q - 1.
        mean, shifted_squares = weighted.unbind(1)
        mean = mean.clamp(-1, 1)
        squares = ((shifted_squares + 1) / 2).clamp(0, 1)
        spread = (squares - mean * mean).clamp(min=LEAST_SPREAD**2).sqrt()

        centre, half = self._scale
        means = torch.zeros(self.shape[0], dtype=torch.float64)
        stds = torch.ones(self.shape[0], dtype=torch.float64)
        places = list(self.places)
        means[places] = centre + half * mean
        stds[places] = half * spread
        return Moments(tuple(means.tolist()), tuple(stds.tolist()))

    def refuses(self, reply: Reply) -> str:
        """Why a reply cannot consist of clipped rows with noise: a number is too large. Empty
        otherwise; the form of the reply is checked elsewhere.
        """
        rows = reply.content.get(SUMS_GROUP)
        if not isinstance(rows, Tensor) or rows.dtype != torch.float64:
            return ""
        bound = self.clip * (1 + FAR * self.noise) * (1 + ROUNDING)
        if bool((rows.abs() > bound).any()):
            largest = float(rows.abs().max())
            return f"its sums contain {largest:.3g}, but with noise they are at most {bound:.3g}"
        return ""

    @property
    def _scale(self) -> tuple[Tensor, Tensor]:
        """The centre and half the width of each column's limits, (K,) float64."""
        low = torch.tensor(self.low, dtype=torch.float64)
        high = torch.tensor(self.high, dtype=torch.float64)
        return (low + high) / 2, (high - low) / 2


def noised_sums(
    settings: Settings, about: DatasetInfo, shape: tuple[int, ...]
) -> NoisedSums | None:
    """The noised sums that clients send, if ``[privacy]`` protects uploads; otherwise None.

    Raises ConfigError for a column without limits, whose sums would be unbounded.
    """
    privacy: Privacy = settings.package_table(Privacy)
    if not privacy.protects_logits:
        return None
    limits = settings.data.limits or {}
    names = about.features or tuple(f"channel {i}" for i in range(shape[0]))
    places = [i for i in range(shape[0]) if i not in about.binary_features]
    lacking = [names[i] for i in places if names[i] not in limits]
    if lacking:
        raise ConfigError(
            "data.standardise = 'summed' with [privacy] needs limits for each column, and "
            f"{lacking[0]!r} has none: "
            f'set data.limits = {{ "{lacking[0]}" = [LOW, HIGH], ... }}, or set data.mean and '
            "data.std"
        )
    return NoisedSums(
        shape,
        about.binary_features,
        places=tuple(places),
        low=tuple(float(limits[names[i]][0]) for i in places),
        high=tuple(float(limits[names[i]][1]) for i in places),
        clip=privacy.clip,
        noise=privacy.noise,
    )


# ---- budget: training ----------------------------------------------------------------------------


@dataclass
class TrainingBudget(Observer):
    """Counts each client's noised steps, by the probability with which a step takes an example.

    ``examples``: in a simulation, the number of examples that each client trains on, by stage name
    and client. ``steps``: the steps so far, by client and probability. ``reported``: the number of
    examples that a real site reported last, by stage name and client. ``uncounted``: by client, how
    often a stage of a name was asked of a site that has not reported yet; these visits are counted
    when it reports, and until then its epsilon is unknown. Failed and refused replies also count,
    because the client may have sent something. ``unasked``: the clients that were left out of the
    current stage, because their budget is spent.
    """

    privacy: Privacy
    world: World
    examples: Mapping[tuple[str, int], int]
    steps: dict[int, Counter[float]] = field(default_factory=dict)
    reported: dict[tuple[str, int], int] = field(default_factory=dict)
    uncounted: dict[int, Counter[str]] = field(default_factory=dict)
    on_sites: bool = False
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
                    examples[stage, client] = prepared.sites.training_size(client, stage)
        return TrainingBudget(
            privacy=settings.package_table(Privacy),
            world=prepared.world,
            examples=examples,
            on_sites=settings.on_sites,
        )

    def visit(self, stage: Stage, client: int, claimed: int | None) -> tuple[float, int | None]:
        """The probability with which a step takes an example, and the number of steps; None if it
        is unknown.

        claimed: the number of examples that the client reports; None if it reports none.
        """
        plan = self.world.plans.get(stage.name)
        if plan is None or client == SERVER or stage.view != "private":
            return 0.0, 0
        key = (stage.name, client)
        if claimed is None:
            claimed = self.reported.get(key)
        examples = self.examples.get(key, claimed)
        if examples is not None:
            return rate_and_steps(examples, plan)
        # The worst case: every step takes all examples.
        return 1.0, plan.steps or None

    def client_fields(self, event: Event, result: StageResult) -> Fields:
        """``private_steps``: the noised steps of a client; None if they are unknown.
        ``private_rate``: the probability with which a step takes an example.
        """
        if not _is_asked(event, result.stage, self.unasked):
            return {}
        rate, steps = self.visit(result.stage, event["client"], event.get("examples"))
        if steps == 0:
            return {}
        return {"private_steps": steps, "private_rate": rate}

    def on_event(self, event: Event) -> None:
        """Count a client's steps, and remember how many examples a site has."""
        if event["event"] != "client" or "private_steps" not in event:
            return
        client = event["client"]
        name = event["name"]
        if event["private_steps"] is None:
            self.uncounted.setdefault(client, Counter())[name] += 1
            return
        visits = 1
        if event.get("examples") and "refused" not in event:
            self.reported[name, client] = event["examples"]
            visits += self.uncounted.get(client, Counter()).pop(name, 0)
        steps_by_rate = self.steps.setdefault(client, Counter())
        steps_by_rate[float(event["private_rate"])] += visits * event["private_steps"]

    def spent(self, client: int, rate: float = 0.0, further_steps: int = 0) -> float | None:
        """A client's epsilon so far, or after further steps; None if it is unbounded or unknown."""
        if self.uncounted.get(client):
            return None
        steps = self.steps.get(client, Counter()) + Counter({rate: further_steps})
        return training_epsilon(self.privacy.sigma, steps, self.privacy.delta)

    def over(self, stage: Stage, client: int) -> str:
        """Why a stage would raise a client's epsilon above ``privacy.epsilon``; empty if it does
        not.

        A real site that has not reported its number of examples yet, or whose data have changed,
        checks its budget itself.
        """
        limit = self.privacy.epsilon
        rate, steps = self.visit(stage, client, None)
        is_reported = bool(self.examples) or (stage.name, client) in self.reported
        if limit is None or steps is None or not is_reported or self.uncounted.get(client):
            return ""
        total = self.spent(client, rate, steps)
        if total is not None and total <= limit:
            return ""
        return (
            f"client {client} has spent epsilon {self.spent(client):.3g}, and "
            f"{counted(steps, 'more step')} would make it {total:.3g}, above privacy.epsilon = "
            f"{limit:g}"
        )

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """``privacy``: each client's epsilon so far (None: unbounded or unknown), and at which
        delta.
        """
        return {
            "privacy": {
                "epsilon": [self.spent(client) for client in range(self.world.clients)],
                "delta": self.privacy.delta,
                "covers": "training, by example",
            }
        }


# ---- budget: uploads -----------------------------------------------------------------------------


@dataclass
class Budget(Observer):
    """Counts the rows of logits that each client uploads, as the server sees them.

    A client cannot lower its count by what it reports. ``sums``: the rows that each client sends
    before round 1, for the mean and the deviation of each column. ``rows``: the rows so far, by
    client. Refused, failed and late replies also count, because their logits may have been sent.
    ``unasked``: the clients that were left out of the current stage, because their budget is spent.
    """

    privacy: Privacy
    schedule: Schedule
    world: World
    sums: int = 0
    rows: Counter[int] = field(default_factory=Counter)
    on_sites: bool = False
    unasked: frozenset[int] = frozenset()
    advice: ClassVar[str] = "fewer rounds, more noise or fewer public examples (method.subset)"

    @staticmethod
    def of(prepared: Prepared) -> Budget:
        """The budget of a run. In a simulation, clients have already sent their sums."""
        settings = prepared.settings
        data = prepared.dataset
        sums = 0
        if prepared.scaler.origin == "summed":
            sums = sums_work(settings, data.about, data.input_shape).rows
        rows: Counter[int] = Counter()
        if sums and not settings.on_sites:
            rows.update(dict.fromkeys(range(settings.clients), sums))
        return Budget(
            privacy=settings.package_table(Privacy),
            schedule=settings.schedule,
            world=prepared.world,
            sums=sums,
            rows=rows,
            on_sites=settings.on_sites,
        )

    def client_fields(self, event: Event, result: StageResult) -> Fields:
        """``noised_rows``: the rows of noised logits that a client sent, and at least the number
        that it was asked for.
        """
        stage = result.stage
        client = event["client"]
        is_off = not self.privacy.protects_logits or stage.name == CENSUS
        if is_off or client == SERVER or not _is_asked(event, stage, self.unasked):
            return {}
        arrived = rows_of(result.contents.get(client, NOTHING))
        rows = max(self.expected_rows(stage, client), arrived)
        if not rows:
            return {}
        return {"noised_rows": rows}

    def expected_rows(self, stage: Stage, client: int) -> int:
        """The number of noised rows that a client is asked for in a stage."""
        if not self.privacy.protects_logits or client == SERVER or stage.name == CENSUS:
            return 0
        if stage.round == 0:  # before round 1, beside the census
            return self.sums
        return rows_of(self.schedule.actor(stage).expected_reply(client, stage, self.world))

    def over(self, stage: Stage, client: int) -> str:
        """Why a stage would raise a client's epsilon above ``privacy.epsilon``; empty if it does
        not.
        """
        rows = self.expected_rows(stage, client)
        sent_rows = self.rows[client]
        if not rows or self.privacy.allows(sent_rows + rows):
            return ""
        spent = self.privacy.spent(sent_rows)
        total = self.privacy.spent(sent_rows + rows)
        return (
            f"client {client} has spent epsilon {spent:.3g}, and {counted(rows, 'more row')} would "
            f"make it {total:.3g}, above privacy.epsilon = {self.privacy.epsilon:g}"
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
    """Whether a client took part in a stage: it was asked, and was not idle."""
    client = event["client"]
    return client in stage.clients and "idle" not in event and client not in unasked


@dataclass(frozen=True)
class WithinBudget:
    """An engine that leaves out clients whose budget does not cover a stage.

    A real site can spend its budget early, for example by reporting too many examples. It is left
    out, and the others continue. In a simulation, the run ends when the first client has spent its
    budget.
    """

    engine: Engine
    budget: Budget | TrainingBudget

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies. Raises BudgetSpent before any client starts."""
        reasons = {}
        for client in sorted(payloads):
            reason = self.budget.over(stage, client)
            if reason:
                reasons[client] = reason
        if reasons and (len(reasons) == len(payloads) or not self.budget.on_sites):
            raise BudgetSpent(
                f"{place(stage)}: {next(iter(reasons.values()))}. Nothing of this stage was sent; "
                f"start a new run with {self.budget.advice}"
            )
        self.budget.unasked = frozenset(reasons)
        affordable = {client: p for client, p in payloads.items() if client not in reasons}
        replies = self.engine.run(work, stage, affordable, seed)
        excluded = [_excluded(client, stage, reason) for client, reason in reasons.items()]
        return [*replies, *excluded]

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep the states of clients."""
        self.engine.commit(stage, clients)


def _excluded(client: int, stage: Stage, reason: str) -> Reply:
    """The reply of a client that was left out."""
    return Reply(
        client=client,
        content=NOTHING,
        examples=0,
        round=stage.round,
        stage=stage.index,
        failure=reason,
    )
