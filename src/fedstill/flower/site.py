"""A site: how one client's machine does a stage, what it refuses, and its budget."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, field

from filelock import FileLock

from fedstill.config.experiment import from_tree
from fedstill.config.resolve import settle
from fedstill.config.settings import Settings
from fedstill.core.capabilities import Need
from fedstill.core.census import CENSUS, Census, census_stage
from fedstill.core.errors import FedstillError, Refused, cut_reason, on_one_line
from fedstill.core.files import digest, make_folder
from fedstill.core.process_settings import process_settings
from fedstill.core.records import Stage
from fedstill.core.work import ClientWork
from fedstill.data.dataset import Dataset
from fedstill.engines.client_memory import Memory
from fedstill.flower.facts import Facts
from fedstill.flower.messages import Request, SiteReply
from fedstill.flower.secure_sums import SiteSums
from fedstill.flower.site_data import Ready, on_own_data, on_own_tasks
from fedstill.flower.site_settings import Site, code_in, files_in
from fedstill.flower.site_storage import Desk
from fedstill.privacy.masking import Masking
from fedstill.privacy.noise import Privacy, rows_of
from fedstill.privacy.private_training import rate_and_steps, training_epsilon
from fedstill.running.data_sums import SumUp, sums_of_run, sums_stage
from fedstill.running.preparation import Prepared, prepare
from fedstill.version import VERSION

# What a site itself counts of its private training, whatever the server says.


def private_visit(
    ready: Prepared, request: Request, examples: int | None = None
) -> tuple[float, int]:
    """With which probability a noised step takes an example in a stage, and how many steps it has.

    examples: on how many a kept answer was trained; the site may have more by now.
    """
    plan = ready.settings.plans.get(request.stage.name)
    if plan is None or request.stage.view != "private":
        return 0.0, 0
    own = (
        ready.sites.trains_on(request.client, request.stage.name) if examples is None else examples
    )
    return rate_and_steps(own, plan)


def demand_budget(ready: Prepared, request: Request, desk: Desk) -> None:
    """Raise Refused where private training costs the site more than its run allows, by its own
    notes.

    Each step counts with the probability that it had: data that grow make later steps cheaper, not
    earlier ones.
    """
    privacy, (rate, steps) = ready.settings.table(Privacy), private_visit(ready, request)
    if privacy.epsilon is None or not steps:
        return
    taken = desk.noised_steps(steps) + Counter({rate: steps})
    after = training_epsilon(privacy.sigma, taken, privacy.delta)
    if after is None or after > privacy.epsilon:
        raise Refused(
            f"{steps} more steps would cost this site more than privacy.epsilon allows it"
        )


# A site: how one client's machine does a stage that a server asks for, and what it refuses to do.


@dataclass
class Clerk:
    """Does stages for a site: checks the request, looks the method up by name, runs the one
    training loop.

    ``dataset``: data in memory, for a trial in the server's own process. ``ready``: what was
    prepared before.
    """

    site: Site
    dataset: Dataset | None = None
    ready: dict[str, Ready] = field(default_factory=dict)

    def __call__(self, request: Request) -> SiteReply:
        """The answer; an error is an answer too, with the reason in one line."""
        try:
            with process_settings():
                return self._answer(request)
        except FedstillError as error:
            reason = str(error)
        except Exception as error:
            reason = on_one_line(error)
        stage = request.stage
        return SiteReply(request.client, stage.round, stage.index, failure=cut_reason(reason))

    def _answer(self, request: Request) -> SiteReply:
        if request.client != self.site.client:
            raise Refused(f"this site is client {self.site.client}, not client {request.client}")
        ready = self._ready(request)
        desk = Desk(self.site.memory, request.run, request.client)
        make_folder(desk.place)
        with FileLock(desk.place / ".lock"):
            if ready.tasks is not None:
                ready.tasks.note(desk.place)
            if (prepared := ready.works(request.stage.name)) is None:
                return SiteReply(
                    request.client, request.stage.round, request.stage.index, idle=True
                )
            if masking := self._summed(prepared, request):
                return SiteSums(masking, request, desk).answer(
                    lambda plain: self._once(prepared, plain, desk)
                )
            return self._once(prepared, request, desk)

    def _summed(self, ready: Prepared, request: Request) -> Masking | None:
        """How the models of a stage are summed; None where its answer leaves the site as it is."""
        self._named_work(ready, request)  # the stage is the run's, and its clients
        counts = request.stage.name == CENSUS or request.stage == sums_stage(ready.world)
        return None if counts else Masking.of(ready.settings.table(Privacy), ready.settings.method)

    def _once(self, ready: Prepared, request: Request, desk: Desk) -> SiteReply:
        """The kept answer of a request, or the work done; with noise, one of each stage."""
        kept = desk.kept(request)
        if kept is None and desk.noised_before(request.stage):
            raise Refused(
                f"this site has answered round {request.stage.round}, stage {request.stage.name!r} "
                "with noise, and "
                "answers no other request for it: two answers would show more than one"
            )
        answer = kept or self._work(ready, request, desk)
        privacy = ready.settings.table(Privacy)
        trained = private_visit(ready, request, answer.examples) if privacy.trains else None
        rate, sent = trained or (None, rows_of(answer.content) * privacy.protects_logits)
        if ready.settings.on_sites and sent and not answer.failure:
            desk.note_noise(request.stage, sent, rate)
        return answer

    def _work(self, ready: Prepared, request: Request, desk: Desk) -> SiteReply:
        stage, client, settings = request.stage, request.client, ready.settings
        privacy = settings.table(Privacy)
        work = self._named_work(ready, request)
        if privacy.protects_logits and not isinstance(work, SumUp):
            most = rows_of(
                settings.schedule.actor(stage).expected_reply(client, stage, ready.world)
            )
        else:
            most = work.rows if isinstance(work, SumUp) else 0
        if most and not privacy.allows(_sums_before(ready, stage) + desk.noised_rows(most) + most):
            raise Refused(
                f"{most} more rows of logits would cost this site more than privacy.epsilon allows "
                "it"
            )
        if privacy.trains:
            demand_budget(ready, request, desk)
        memory = Memory.of({client: desk.remembered(request.memory)})
        engine = ready.engine(memory, site=True)
        (reply,) = engine.run(work, stage, {client: request.payload}, settings.seed)
        if reply.failure:
            return SiteReply(client, stage.round, stage.index, failure=reply.failure)
        if privacy.protects_logits and rows_of(reply.content) > most:
            raise Refused(
                f"the request asks for {rows_of(reply.content)} rows of logits, where the run has "
                f"{most}"
            )
        answer = SiteReply(
            client, stage.round, stage.index, reply.content, reply.examples, reply.metrics
        )
        return desk.keep(request, answer, memory.held(client))

    def _named_work(self, ready: Prepared, request: Request) -> ClientWork:
        stage, settings = request.stage, ready.settings
        method = settings.method
        if request.client not in stage.clients:
            raise Refused(f"client {request.client} does not act in stage {stage.name!r}")
        if stage.name == CENSUS and Need.LABEL_COUNTS not in method.requires():
            raise Refused(
                f"method {settings.named.method.label} needs no label counts, so they stay here"
            )
        if stage == census_stage(ready.world):
            return Census()
        if stage == sums_stage(ready.world):
            if not ready.scaler.awaits_sums:
                raise Refused(
                    "the run is not standardised by sums that sites send, so they stay here"
                )
            return sums_of_run(settings, ready.sites.inputs.about, ready.dataset.input_shape)
        if ready.scaler.awaits_sums:
            raise Refused("the request has no mean and spread, which the sites' sums would give")
        within = 1 <= stage.round <= settings.rounds
        if not within or stage not in settings.schedule(stage.round, ready.world):
            raise Refused(f"stage {stage.name!r} is not in the schedule of round {stage.round}")
        return settings.schedule.actor(stage).work(stage)

    def _ready(self, request: Request) -> Ready:
        key = f"{request.sha} {digest(repr(sorted(request.facts.items())).encode())}"
        self._check(request)
        there, round = self.ready.get(key), request.stage.round
        if there is None or not there.serves(round, request.client):
            settings = self._settings(request) if there is None else there.settings
            there = self.ready[key] = self._prepare(settings, Facts.of(request.facts), round)
        return there

    def _check(self, request: Request) -> None:
        if request.version != VERSION:
            raise Refused(
                f"the server runs fedstill {request.version[:40]}, this site {VERSION}: install "
                "the same"
            )
        if digest(request.config.encode()) != request.sha:
            raise Refused("the configuration is not the one that its SHA-256 names")
        if self.site.accept is not None and request.sha not in self.site.accept:
            raise Refused(
                f"this site has not accepted the configuration {request.sha}: its operator adds "
                "that to accept in "
                "site.toml"
            )

    def _settings(self, request: Request) -> Settings:
        try:
            tree = tomllib.loads(request.config)
        except (ValueError, RecursionError) as error:
            raise Refused(f"the configuration is not TOML: {error}") from error
        for name in code_in(tree):
            if name not in self.site.imports:
                raise Refused(
                    f"the configuration names code, {name!r}, that this site does not list under "
                    "imports"
                )
        settings = settle(from_tree(tree, {}, None))
        in_memory = settings.on_sites or self.dataset is not None
        for name in () if in_memory else files_in(tree):
            if name not in self.site.files:
                raise Refused(
                    f"the configuration has this site read {name!r}, which its site.toml does not "
                    "list under files: a "
                    "trial is on data sets by their names; or set flower.data = 'sites'"
                )
        if settings.toml != request.config:
            raise Refused(
                "the configuration resolves to other values at this site: install the same versions"
            )
        for measure in settings.measure:
            if measure in self.site.refuse:
                raise Refused(f"this site takes part in no run with the measure {measure!r}")
        return settings

    def _prepare(self, settings: Settings, facts: Facts, round: int) -> Ready:
        site = self.site
        if not settings.on_sites:
            if site.data:
                raise Refused("this site trains on its own data only: set flower.data = 'sites'")
            return Ready(settings, prepare(settings, self.dataset))
        if not site.data:
            raise Refused("this site has no data of its own: set data in its site.toml")
        if settings.on_tasks:
            return on_own_tasks(settings, facts, site, round)
        if site.tasks:
            raise Refused(
                "this site has a folder for each task, and this run has no tasks: set stream.kind "
                "= 'sites'"
            )
        return on_own_data(settings, facts, site)


def _sums_before(ready: Prepared, stage: Stage) -> int:
    """The rows with noise of the sums by which the run is standardised; they went out under a name
    of their own.
    """
    if (
        not ready.settings.table(Privacy).protects_logits
        or ready.scaler.origin != "summed"
        or stage == sums_stage(ready.world)
    ):
        return 0
    return sums_of_run(ready.settings, ready.sites.inputs.about, ready.dataset.input_shape).rows
