"""How a site guards its privacy: it counts its own noise, whatever the server says.

A site adds noise to one answer of each stage, and notes what the answer costs before it leaves. It
refuses work that would cost more than the epsilon of the config that it accepted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fedstill.core.errors import Refused
from fedstill.core.extensions import SiteGuard, SiteRequest
from fedstill.core.files import write_secret
from fedstill.core.method import ClientWork
from fedstill.core.records import Plan, Reply, Stage
from fedstill.privacy.noise import Privacy, rows_of
from fedstill.privacy.private_training import rate_and_steps, training_epsilon
from fedstill.running.preparation import Prepared
from fedstill.running.standardisation import SumsWork, sums_stage, sums_work

NOISED = "noised"
"""The file in a client's folder that names the stages which were answered with noise."""


def site_guards(prepared: Prepared, folder: Path) -> tuple[SiteGuard, ...]:
    """The guards of a site's privacy, for the config that it accepted.

    ``folder``: the client's folder of the run, where the guards keep their notes.
    """
    privacy = prepared.settings.table(Privacy)
    notes = NoiseNotes(folder)
    # A stage that has noise stays answered, even if the server now sends a config without noise.
    guards: list[SiteGuard] = [OneNoisedAnswer(notes)]
    if privacy.protects_logits:
        guards.append(UploadGuard(prepared, notes))
    if privacy.trains:
        guards.append(TrainingGuard(prepared, notes))
    return tuple(guards)


@dataclass(frozen=True)
class NoiseNotes:
    """The stages that a client has answered with noise; they stay noted when the replies are gone.

    The file has a line for each: ``stage:rows`` of logits, ``stage:steps:rate`` of training.
    """

    folder: Path

    def lines(self) -> list[str]:
        """The lines of the file."""
        path = self.folder / NOISED
        if not path.exists():
            return []
        return path.read_text(encoding="utf-8").split()

    def has(self, stage: Stage) -> bool:
        """Whether a stage was answered with noise."""
        return any(line.partition(":")[0] == _name(stage) for line in self.lines())

    def rows(self, unknown: int) -> int:
        """How many rows with noise the client has sent.

        ``unknown``: the rows of a stage that is noted without their number.
        """
        total = 0
        for line in self.lines():
            _, _, rows = line.partition(":")
            total += int(rows or unknown)
        return total

    def steps(self, unknown: int) -> Counter[float]:
        """How many noised steps the client has trained, by the probability with which a step took
        an example.

        ``unknown``: the steps of a stage that is noted without their number. A stage that is noted
        without its probability counts as if each step had taken all examples.
        """
        steps: Counter[float] = Counter()
        for line in self.lines():
            _, _, cost = line.partition(":")
            count, _, rate = cost.partition(":")
            steps[float(rate or 1)] += int(count or unknown)
        return steps

    def add_rows(self, stage: Stage, rows: int) -> None:
        """Note, before it leaves, that the answer of a stage has rows with noise."""
        self._add(stage, str(rows))

    def add_steps(self, stage: Stage, steps: int, rate: float) -> None:
        """Note, before it leaves, that the answer of a stage is of noised steps.

        ``rate``: the probability with which each step took an example.
        """
        self._add(stage, f"{steps}:{rate!r}")

    def _add(self, stage: Stage, cost: str) -> None:
        if self.has(stage):
            return
        lines = [*self.lines(), f"{_name(stage)}:{cost}"]
        text = "".join(f"{line}\n" for line in lines)
        write_secret(self.folder / NOISED, text.encode())


def _name(stage: Stage) -> str:
    return f"{stage.round:07d}-{stage.index:07d}"


@dataclass(frozen=True)
class OneNoisedAnswer(SiteGuard):
    """Answers a stage with noise once. The kept answer may leave again, another one may not."""

    notes: NoiseNotes

    def admit(self, request: SiteRequest, work: ClientWork) -> None:
        stage = request.stage
        if self.notes.has(stage):
            raise Refused(
                f"this site has answered round {stage.round}, stage {stage.name!r} with noise, and "
                "answers no other request for it: two answers would show more than one"
            )


@dataclass(frozen=True)
class UploadGuard(SiteGuard):
    """Counts the rows of logits and sums that leave a site with noise."""

    prepared: Prepared
    notes: NoiseNotes

    def admit(self, request: SiteRequest, work: ClientWork) -> None:
        """Refuses rows that would cost more than the run allows, by the site's notes."""
        rows = self._expected_rows(request, work)
        if not rows:
            return
        total = self._rows_of_sums(request.stage) + self.notes.rows(unknown=rows) + rows
        if not self._privacy.allows(total):
            raise Refused(
                f"{rows} more rows of logits would cost this site more than privacy.epsilon allows "
                "it"
            )

    def check(self, request: SiteRequest, work: ClientWork, reply: Reply) -> None:
        """Refuses more rows than the run has: they were not counted."""
        expected = self._expected_rows(request, work)
        rows = rows_of(reply.content)
        if rows > expected:
            raise Refused(
                f"the request asks for {rows} rows of logits, where the run has {expected}"
            )

    def leaving(self, request: SiteRequest, reply: Reply) -> None:
        rows = rows_of(reply.content)
        if self.prepared.settings.on_sites and rows and not reply.failure:
            self.notes.add_rows(request.stage, rows)

    @property
    def _privacy(self) -> Privacy:
        return self.prepared.settings.table(Privacy)

    def _expected_rows(self, request: SiteRequest, work: ClientWork) -> int:
        """The rows with noise that the run has for a stage."""
        if isinstance(work, SumsWork):
            return work.rows
        actor = self.prepared.settings.schedule.actor(request.stage)
        return rows_of(actor.expected_reply(request.client, request.stage, self.prepared.world))

    def _rows_of_sums(self, stage: Stage) -> int:
        """The rows with noise of the sums by which the run is standardised.

        They left the site under another run's name, so its notes of this run do not have them.
        """
        prepared = self.prepared
        if prepared.scaler.origin != "summed" or stage == sums_stage(prepared.world):
            return 0
        about = prepared.sites.inputs.about
        return sums_work(prepared.settings, about, prepared.dataset.input_shape).rows


@dataclass(frozen=True)
class TrainingGuard(SiteGuard):
    """Counts the noised steps of a site's private training.

    Each step counts with the probability that it had of taking an example: data that grow make
    later steps cheaper, not earlier ones.
    """

    prepared: Prepared
    notes: NoiseNotes

    def admit(self, request: SiteRequest, work: ClientWork) -> None:
        """Refuses training that would cost more than the run allows, by the site's notes."""
        privacy = self.prepared.settings.table(Privacy)
        plan = self._plan(request.stage)
        if privacy.epsilon is None or plan is None:
            return
        examples = self.prepared.sites.trains_on(request.client, request.stage.name)
        rate, steps = rate_and_steps(examples, plan)
        if not steps:
            return
        total = self.notes.steps(unknown=steps) + Counter({rate: steps})
        epsilon = training_epsilon(privacy.sigma, total, privacy.delta)
        if epsilon is None or epsilon > privacy.epsilon:
            raise Refused(
                f"{steps} more steps would cost this site more than privacy.epsilon allows it"
            )

    def leaving(self, request: SiteRequest, reply: Reply) -> None:
        plan = self._plan(request.stage)
        if plan is None or reply.failure or not self.prepared.settings.on_sites:
            return
        # A kept reply was trained on as many examples as it says; the site may have more by now.
        rate, steps = rate_and_steps(reply.examples, plan)
        if steps:
            self.notes.add_steps(request.stage, steps, rate)

    def _plan(self, stage: Stage) -> Plan | None:
        """The plan of a stage of private training; None for other stages."""
        if stage.view != "private":
            return None
        return self.prepared.settings.plans.get(stage.name)
