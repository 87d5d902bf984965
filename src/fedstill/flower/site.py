"""A site: how one client's machine does a stage that a server asks for, and what it refuses.

What a capability protects there is in its guards (``core.extensions.SiteGuard``).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from filelock import FileLock

from fedstill.config.experiment import from_tree
from fedstill.config.resolve import settle
from fedstill.config.settings import Settings
from fedstill.config.stages import takes_census
from fedstill.core.census import CENSUS, Census, census_stage
from fedstill.core.errors import FedstillError, Refused, cut_reason, on_one_line
from fedstill.core.extensions import SiteGuard
from fedstill.core.files import digest, make_folder
from fedstill.core.method import ClientWork
from fedstill.core.process_settings import process_settings
from fedstill.core.records import Reply
from fedstill.data.dataset import Dataset
from fedstill.engines.client_memory import Memory, Version
from fedstill.flower.facts import Facts
from fedstill.flower.messages import Request, SiteReply
from fedstill.flower.site_data import Ready, on_own_data, on_own_tasks
from fedstill.flower.site_settings import Site, code_in, files_in
from fedstill.flower.site_storage import Desk
from fedstill.running.extensions import site_guards
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.standardisation import sums_stage, sums_work
from fedstill.version import VERSION


@dataclass
class Clerk:
    """Does stages for a site: checks a request, prepares the run, and works if the guards admit it.

    ``dataset``: data in memory, for a trial in the server's own process. ``ready``: runs that were
    prepared for earlier requests.
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
        """The answer to a request that this site accepts; raises Refused for others."""
        if request.client != self.site.client:
            raise Refused(f"this site is client {self.site.client}, not client {request.client}")
        ready = self._ready(request)

        desk = Desk(self.site.memory, request.run, request.client)
        make_folder(desk.place)
        with FileLock(desk.place / ".lock"):
            if ready.tasks is not None:
                ready.tasks.note(desk.place)
            prepared = ready.works(request.stage.name)
            if prepared is None:
                stage = request.stage
                return SiteReply(request.client, stage.round, stage.index, idle=True)
            visit = Visit(
                prepared=prepared,
                desk=desk,
                work=requested_work(prepared, request),
                guards=site_guards(prepared, desk.place),
            )
            return visit.answer(request)

    def _ready(self, request: Request) -> Ready:
        """The run of a request. It is prepared now unless it was for an earlier request, with the
        data of the same task.
        """
        self._check(request)
        facts_digest = digest(repr(sorted(request.facts.items())).encode())
        key = f"{request.sha} {facts_digest}"
        round = request.stage.round

        ready = self.ready.get(key)
        if ready is None:
            ready = self._prepare(self._settings(request), Facts.of(request.facts), round)
        elif not ready.serves(round, request.client):
            ready = self._prepare(ready.settings, Facts.of(request.facts), round)
        self.ready[key] = ready
        return ready

    def _check(self, request: Request) -> None:
        """Raises Refused for another version, or a configuration that the site has not accepted."""
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
                "that to accept in site.toml"
            )

    def _settings(self, request: Request) -> Settings:
        """The settings of a request; raises Refused for code, files and measures that the site does
        not allow.
        """
        try:
            tree = tomllib.loads(request.config)
        except (ValueError, RecursionError) as error:
            raise Refused(f"the configuration is not TOML: {error}") from error
        # Resolving the settings imports the code that they name, so this comes first.
        self._check_code(tree)
        settings = settle(from_tree(tree, {}, None))

        if not settings.on_sites and self.dataset is None:
            self._check_files(tree)
        if settings.toml != request.config:
            raise Refused(
                "the configuration resolves to other values at this site: install the same versions"
            )
        for name in (*settings.measure, *settings.metrics):
            if name in self.site.refuse:
                raise Refused(f"this site takes part in no run with the measure {name!r}")
        return settings

    def _check_code(self, tree: Mapping[str, Any]) -> None:
        """Raises Refused for a configuration that names code which the site does not list."""
        for name in code_in(tree):
            if name not in self.site.imports:
                raise Refused(
                    f"the configuration names code, {name!r}, that this site does not list under "
                    "imports"
                )

    def _check_files(self, tree: Mapping[str, Any]) -> None:
        """Raises Refused for a configuration that reads files which the site does not list."""
        for name in files_in(tree):
            if name not in self.site.files:
                raise Refused(
                    f"the configuration has this site read {name!r}, which its site.toml does not "
                    "list under files: a trial is on data sets by their names; or set "
                    "flower.data = 'sites'"
                )

    def _prepare(self, settings: Settings, facts: Facts, round: int) -> Ready:
        """A run on the site's own data, or in a trial on its part of the run's data."""
        site = self.site
        if not settings.on_sites:
            if site.data:
                raise Refused("this site trains on its own data only: set flower.data = 'sites'")
            return Ready(settings, prepare(settings, self.dataset))
        if not site.data:
            raise Refused("this site has no data of its own: set data in its site.toml")
        if settings.sites_have_tasks:
            return on_own_tasks(settings, facts, site, round)
        if site.tasks:
            raise Refused(
                "this site has a folder for each task, and this run has no tasks: set stream.kind "
                "= 'sites'"
            )
        return on_own_data(settings, facts, site)


@dataclass
class Visit:
    """What a site does for one request: the guards' checks, the work, and the answer.

    ``memory``: the version of the memory that the work has left; None for nothing.
    """

    prepared: Prepared
    desk: Desk
    work: ClientWork
    guards: Sequence[SiteGuard]
    memory: Version | None = None

    def answer(self, request: Request) -> SiteReply:
        """The answer, as the guards let it leave."""
        reply = self._guarded(request, self.guards)
        return SiteReply.from_reply(reply, self.memory)

    def _guarded(self, request: Request, guards: Sequence[SiteGuard]) -> Reply:
        """The reply to a request inside some guards, of which the first is the outermost."""
        if not guards:
            return self._reply(request)
        outermost, *inner = guards
        return outermost.answer(
            request, lambda payload: self._guarded(request.with_payload(payload), inner)
        )

    def _reply(self, request: Request) -> Reply:
        """The reply that was kept for the same request, or that of new work."""
        answer = self.desk.kept(request)
        if answer is None:
            answer = self._new_answer(request)
        self.memory = answer.memory

        reply = answer.reply()
        for guard in self.guards:
            guard.leaving(request, reply)
        return reply

    def _new_answer(self, request: Request) -> SiteReply:
        """The answer of new work, kept for when the same is asked again; one that failed is not."""
        for guard in self.guards:
            guard.admit(request, self.work)

        client = request.client
        memory = Memory({client: self.desk.remembered(request.memory)})
        engine = self.prepared.engine(memory, site=True)
        seed = self.prepared.settings.seed
        (reply,) = engine.run(self.work, request.stage, {client: request.payload}, seed)
        answer = SiteReply.from_reply(reply, memory=None)
        if reply.failure:
            return answer

        for guard in self.guards:
            guard.check(request, self.work, reply)
        return self.desk.keep(request, answer, memory.held(client))


def requested_work(prepared: Prepared, request: Request) -> ClientWork:
    """The work that a request names. Raises Refused for a stage that is not in the run's schedule,
    and for sums and counts that the run does not need.
    """
    stage = request.stage
    settings = prepared.settings
    world = prepared.world
    if request.client not in stage.clients:
        raise Refused(f"client {request.client} does not act in stage {stage.name!r}")
    if stage.name == CENSUS and not takes_census(settings.method, settings.plans):
        raise Refused(
            f"neither method {settings.named.method.label} nor class_weights need label counts, so "
            "they stay here"
        )
    if stage == census_stage(world):
        return Census()
    if stage == sums_stage(world):
        if not prepared.scaler.awaits_sums:
            raise Refused("the run is not standardised by sums that sites send, so they stay here")
        about = prepared.sites.inputs.about
        return sums_work(settings, about, prepared.dataset.input_shape)
    if prepared.scaler.awaits_sums:
        raise Refused("the request has no mean and spread, which the sites' sums would give")
    is_in_run = 1 <= stage.round <= settings.rounds
    if not is_in_run or stage not in settings.schedule(stage.round, world):
        raise Refused(f"stage {stage.name!r} is not in the schedule of round {stage.round}")
    return settings.schedule.actor(stage).work(stage)
