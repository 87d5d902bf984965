"""A site: it executes the stages that a server requests on one client's machine, refuses
unacceptable requests, and stores the client's files.

Outer packages protect sites with guards (``core.extensions.SiteGuard``).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock

from fedstill.config.experiment import from_tree
from fedstill.config.resolve import resolve
from fedstill.config.settings import Settings
from fedstill.config.stages import takes_census
from fedstill.core.codec import MAX_LOCAL_ENTRIES, decode, encoded_parts
from fedstill.core.errors import (
    BadPayload,
    ClientFailed,
    CorruptFile,
    FedstillError,
    Refused,
    Topic,
    cut_reason,
)
from fedstill.core.extensions import SiteGuard, SiteNotebook
from fedstill.core.files import (
    digest,
    make_folder,
    neutral,
    parse_toml,
    read_file,
    remove,
    sweep,
    write_secret,
)
from fedstill.core.label_counts import CENSUS, Census
from fedstill.core.method import ClientWork
from fedstill.core.process_settings import process_settings
from fedstill.core.records import NOTHING, Payload, Reply, Stage, Tensors
from fedstill.data.dataset import Dataset
from fedstill.engines.serial import Memory, Version
from fedstill.flower.facts import Facts, accepted_text
from fedstill.flower.messages import (
    RAISED,
    STAGE,
    START,
    WHOAMI,
    Request,
    SiteReply,
    answer_content,
    error_text,
    header_and_payload,
    public_reason,
    require_flower,
    topic_of,
)
from fedstill.flower.site_data import (
    SiteRun,
    data_digests,
    prepare_own_data,
    prepare_own_tasks,
)
from fedstill.flower.site_settings import Site, code_in, files_in
from fedstill.models.building import sha256_of
from fedstill.running.extensions import site_guards
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.standardisation import sums_stage, sums_work
from fedstill.version import VERSION

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp


log = logging.getLogger("fedstill.site")


@dataclass
class StageExecutor:
    """Executes stages for a site: it checks a request, prepares the run, and does the work if the
    guards permit it.

    ``dataset``: data in memory, for a trial in the server's own process. ``runs``: runs that were
    prepared for earlier requests. ``shows_reasons``: whether the server receives the reasons of
    failures, as in a simulation, where the server has all data anyway.
    """

    site: Site
    dataset: Dataset | None = None
    runs: dict[str, SiteRun] = field(default_factory=dict)
    shows_reasons: bool = False

    def __call__(self, request: Request) -> SiteReply:
        """The answer to a request. An error becomes an answer with the reason in one line."""
        try:
            with process_settings():
                answer = self._answer(request)
        except ClientFailed as error:
            return self._failed(request, error.reason, "work", error.__cause__)
        except Exception as error:
            return self._failed(request, error_text(error), topic_of(error), error)
        if answer.failure:
            return self._failed(request, answer.failure, "work")
        return answer

    def _failed(
        self, request: Request, details: str, topic: Topic, error: BaseException | None = None
    ) -> SiteReply:
        """The answer to a failed request. Details remain in the site's log, with the traceback of
        an error that is not one of fedstill.
        """
        stage = request.stage
        reason = cut_reason(details)
        if not self.shows_reasons:
            log.warning("round %d, stage %s: %s", stage.round, cut_reason(stage.name), reason)
            if error is not None and not isinstance(error, FedstillError):
                log.warning("%s", neutral("".join(format_exception(error)), "terminal"))
            reason = public_reason(topic)
        if self.site.data and topic in DATA_TOPICS:
            self._refusals.add(request, topic)
        return SiteReply(request.client, stage.round, stage.index, failure=reason)

    @property
    def _refusals(self) -> Refusals:
        return Refusals(self.site.memory)

    def _answer(self, request: Request) -> SiteReply:
        """The answer to an acceptable request; raises Refused for other requests."""
        if request.client != self.site.client:
            raise Refused(f"this site is client {self.site.client}, not client {request.client}")
        self._check(request)
        if self.site.data:
            self._refusals.check(request)
        run = self._run_of(request)

        files = self._files(request)
        make_folder(files.place)
        with FileLock(files.place / ".lock"):
            files.check_facts_unchanged(request.facts)
            if run.prepared is not None:
                files.store_start(request)
            if run.tasks is not None:
                run.tasks.check_unchanged(files.place)
            prepared = run.prepared_for(request.stage.name)
            if prepared is None:
                stage = request.stage
                return SiteReply(request.client, stage.round, stage.index, idle=True)
            processing = RequestProcessing(
                prepared=prepared,
                files=files,
                work=requested_work(prepared, request),
                guards=site_guards(prepared, self._notebook(files)),
            )
            return processing.answer(request)

    def _files(self, request: Request) -> ClientFiles:
        """The client's files for the run of a request."""
        is_secret = bool(self.site.data)
        return ClientFiles(self.site.memory, request.run, request.client, is_secret)

    def _notebook(self, files: ClientFiles) -> SiteNotebook:
        """The storage of the guards' notes about a run."""
        return SiteNotebook(
            folder=files.place,
            memory=self.site.memory,
            run=files.run,
            repeat_sums=self.site.repeat_sums,
            data_digests=lambda: data_digests(self.site),
        )

    def _run_of(self, request: Request) -> SiteRun:
        """The run of a request. It is prepared unless an earlier request has already prepared it
        with the data of the same task.
        """
        key = run_identifier(request)

        run = self.runs.get(key)
        if run is None:
            run = self._prepare(self._settings(request), request)
        elif not run.has_data_of(request.stage.round, request.client):
            run = self._prepare(run.settings, request)
        self.runs[key] = run
        return run

    def _check(self, request: Request) -> None:
        """Raise Refused for another version, or for a config that the site has not accepted."""
        if request.version != VERSION:
            raise Refused(
                f"the server runs fedstill {request.version[:40]}, this site {VERSION}: install "
                "the same",
                "version",
            )
        if digest(request.config.encode()) != request.sha:
            raise Refused("the configuration is not the one that its SHA-256 names")
        if self.site.accept is not None:
            _check_accepted(self.site, request)

    def _settings(self, request: Request) -> Settings:
        """The settings of a request; raises Refused for code, files and measures that the site does
        not permit.
        """
        try:
            tree = parse_toml(request.config.encode())
        except ValueError as error:
            raise Refused(f"the configuration is not TOML: {error}") from error
        # This comes first, because resolving the settings imports the code in them.
        self._check_code(tree)
        settings = resolve(from_tree(tree, {}, None))

        if not settings.on_sites and self.dataset is None:
            self._check_files(tree)
        if settings.toml != request.config:
            raise Refused(
                "the configuration resolves to other values at this site: install the same "
                "versions",
                "config",
            )
        for name in (*settings.measure, *settings.metrics):
            if name in self.site.refuse:
                raise Refused(
                    f"this site takes part in no run with the measure {name!r}", "measure"
                )
        return settings

    def _check_code(self, tree: Mapping[str, Any]) -> None:
        """Raise Refused for a configuration with code that the site does not list."""
        for name in code_in(tree):
            if name not in self.site.imports:
                raise Refused(
                    f"the configuration names code, {name!r}, that this site does not list under "
                    "imports",
                    "imports",
                )

    def _check_files(self, tree: Mapping[str, Any]) -> None:
        """Raise Refused for a configuration that reads files which the site does not list."""
        for name in files_in(tree):
            if name not in self.site.files:
                raise Refused(
                    f"the configuration has this site read {name!r}, which its site.toml does not "
                    "list under files: a trial is on data sets by their names; or set "
                    "flower.data = 'sites'",
                    "files",
                )

    def _prepare(self, settings: Settings, request: Request) -> SiteRun:
        """Prepare a run on the site's own data or, in a trial, on its part of the run's data."""
        site = self.site
        facts = Facts.of(request.facts)
        facts.check_start(settings)
        start: Tensors = {}
        if facts.start:
            start = self._files(request).start_model(request)
        if not settings.on_sites:
            if site.data:
                raise Refused(
                    "this site trains on its own data only: set flower.data = 'sites'", "data"
                )
            return SiteRun(settings, prepare(settings, self.dataset, start=start))
        if not site.data:
            raise Refused("this site has no data of its own: set data in its site.toml", "data")
        facts.check_config(settings)
        if settings.sites_have_tasks:
            return prepare_own_tasks(settings, facts, site, request.stage.round, start)
        if site.tasks:
            raise Refused(
                "this site has a folder for each task, and this run has no tasks: set stream.kind "
                "= 'sites'",
                "tasks",
            )
        return prepare_own_data(settings, facts, site, start)


OFFERED = "offered"
"""The folder in a site's memory with configs that were requested but are not accepted."""

MOST_OFFERED = 20
"""The maximum number of such files. A new one replaces the oldest."""


def _check_accepted(site: Site, request: Request) -> None:
    """Raise Refused for a config and facts that the site has not accepted.

    They are written to a file for the site's operator, who can accept the SHA-256 of this file.
    """
    text = accepted_text(request.config, request.facts)
    sha = digest(text.encode())
    if site.accept is None or sha in site.accept:
        return
    _write_offered(site, f"{sha}.toml", text)
    raise Refused(
        f"this site has not accepted {sha}: read the file of this name in {OFFERED} in its memory "
        "folder, and add the name to accept in site.toml",
        "accept",
    )


def _write_offered(site: Site, name: str, text: str) -> None:
    """Write a config that is not accepted to a file. If there are too many files, delete the oldest
    ones, except those of configs that the site has accepted.
    """
    folder = site.memory / OFFERED
    make_folder(folder)
    unlimited = {f"{sha}.toml" for sha in site.accept or ()} | {name}
    others = [path for path in folder.glob("*.toml") if path.name not in unlimited]
    others.sort(key=lambda path: path.stat().st_mtime)
    surplus = len(others) + 1 - MOST_OFFERED
    for path in others[: max(0, surplus)]:
        remove(path)
    write_secret(folder / name, text.encode())


@dataclass
class RequestProcessing:
    """The processing of one request: the guards' checks, the work and the answer.

    ``memory``: the version of the client state after the work; None if there is no state.
    """

    prepared: Prepared
    files: ClientFiles
    work: ClientWork
    guards: Sequence[SiteGuard]
    memory: Version | None = None

    def answer(self, request: Request) -> SiteReply:
        """The answer, after the guards' processing."""
        reply = self._guarded(request, self.guards)
        return SiteReply.from_reply(reply, self.memory)

    def _guarded(self, request: Request, guards: Sequence[SiteGuard]) -> Reply:
        """The reply to a request within some guards; the first guard is the outermost."""
        if not guards:
            return self._reply(request)
        outermost, *inner = guards
        return outermost.answer(
            request, lambda payload: self._guarded(request.with_payload(payload), inner)
        )

    def _reply(self, request: Request) -> Reply:
        """The stored reply to the same request, or a new reply."""
        answer = self.files.stored_answer(request)
        if answer is None:
            answer = self._new_answer(request)
        self.memory = answer.memory

        reply = answer.reply()
        for guard in self.guards:
            guard.leaving(request, reply)
        return reply

    def _new_answer(self, request: Request) -> SiteReply:
        """Do the work and return the answer, which is stored for repeated requests.

        Raises ClientFailed if the work fails.
        """
        for guard in self.guards:
            guard.admit(request, self.work)

        client = request.client
        memory = Memory({client: self.files.client_state(request.memory)})
        # The error of a failure has the traceback for the site's log.
        engine = replace(self.prepared.engine(memory, site=True), stops_on_failure=True)
        seed = self.prepared.settings.seed
        for guard in self.guards:
            seed = guard.work_seed(seed)
        (reply,) = engine.run(self.work, request.stage, {client: request.payload}, seed)
        answer = SiteReply.from_reply(reply, memory=None)

        for guard in self.guards:
            guard.check(request, self.work, reply)
        return self.files.store_answer(request, answer, memory.held(client))


def requested_work(prepared: Prepared, request: Request) -> ClientWork:
    """The requested work. Raises Refused for a stage that is not in the run's schedule, and for
    sums and counts that the run does not need.
    """
    stage = request.stage
    settings = prepared.settings
    world = prepared.world
    if request.client not in stage.clients:
        raise Refused(f"client {request.client} does not act in stage {stage.name!r}", "stage")
    if stage.name == CENSUS and not takes_census(settings.method, settings.plans):
        raise Refused(
            f"neither method {settings.named.method.label} nor class_weights need label counts, "
            "so this site does not send them",
            "stage",
        )
    if stage.name == CENSUS and stage in settings.schedule(0, world):
        return Census()
    if stage == sums_stage(world, settings.schedule):
        if not prepared.scaler.awaits_sums:
            raise Refused(
                "the run is not standardised with the sums of sites, so this site does not send "
                "them",
                "stage",
            )
        about = prepared.sites.inputs.about
        return sums_work(settings, about, prepared.dataset.input_shape)
    if prepared.scaler.awaits_sums:
        raise Refused(
            "the request has no mean and standard deviation from the sites' sums", "stage"
        )
    is_in_run = 1 <= stage.round <= settings.rounds
    if not is_in_run or stage not in settings.schedule(stage.round, world):
        raise Refused(
            f"stage {stage.name!r} is not in the schedule of round {stage.round}", "stage"
        )
    return settings.schedule.actor(stage).work(stage)


# Refusals that depend on a site's data. Each of them reveals something about the data, at least
# that they do not match. Therefore, a site only answers a limited number of different requests.


DATA_TOPICS: frozenset[Topic] = frozenset(
    {
        "classes",
        "columns",
        "config",
        "data",
        "public",
        "range",
        "shape",
        "state",
        "tasks",
        "tokenizer",
        "work",
    }
)
"""The topics of refusals and failures that may depend on a site's data."""

WORK_TOPICS: frozenset[Topic] = frozenset({"range", "state", "work"})
"""The topics that depend on the whole request, rather than only on the config and the facts."""

REFUSED = "refused.json"
"""The file in a site's memory folder with the refusals."""

MOST_REFUSALS = 10
"""The maximum number of different requests that a site refuses in one run, or for one config."""

MOST_REFUSALS_A_DAY = 50

DAY = 86_400.0

DAYS_KEPT = 30


def run_identifier(request: Request) -> str:
    """Identifies a run's config and data: the config and the facts in a request."""
    facts_digest = digest(repr(sorted(request.facts.items())).encode())
    return f"{request.sha} {facts_digest}"


def _work_question(request: Request) -> str:
    """Identifies the work of a request, in whichever run the server asks for it."""
    return replace(request, run="run", memory=None).digest()


class RefusalNote(NamedTuple):
    """A refusal: its time, the run and the config of the request, and the request itself.

    ``run`` and ``sha`` are empty if the work of the request failed.
    """

    time: float
    run: str
    sha: str
    question: str


@dataclass(frozen=True)
class Refusals:
    """The refusals of a site that depend on its data, in a file of its memory folder.

    Identical requests count once, because the same answer reveals nothing new.
    """

    folder: Path

    def check(self, request: Request) -> None:
        """Raise Refused for a new request if the site has refused too many others."""
        notes = self._notes()
        questions = {note.question for note in notes}
        yesterday = time.time() - DAY
        recent = [note for note in notes if note.time > yesterday]
        if _work_question(request) not in questions:
            # The work of a known config may fail in a new way with every request.
            failed_work = [note for note in recent if not note.sha]
            _check_number("in a day", failed_work, MOST_REFUSALS_A_DAY)
        if run_identifier(request) in questions:
            return
        _check_number("of this run", [n for n in notes if n.run == request.run], MOST_REFUSALS)
        _check_number("of this config", [n for n in notes if n.sha == request.sha], MOST_REFUSALS)
        _check_number("in a day", recent, MOST_REFUSALS_A_DAY)

    def add(self, request: Request, topic: Topic) -> None:
        """Store a refusal, before its reason is sent to the server."""
        note = RefusalNote(time.time(), request.run, request.sha, run_identifier(request))
        if topic in WORK_TOPICS:
            # Work may occasionally fail in a long run, so only the number per day counts.
            note = RefusalNote(note.time, run="", sha="", question=_work_question(request))
        make_folder(self.folder)
        with FileLock(self.folder / ".refused.lock"):
            oldest = note.time - DAYS_KEPT * DAY
            notes = [earlier for earlier in self._notes() if earlier.time > oldest]
            is_noted = any(earlier._replace(time=note.time) == note for earlier in notes)
            if not is_noted:
                write_secret(self.folder / REFUSED, json.dumps([*notes, note]).encode())

    def _notes(self) -> list[RefusalNote]:
        path = self.folder / REFUSED
        if not path.is_file():
            return []
        return [RefusalNote(*note) for note in json.loads(path.read_text(encoding="utf-8"))]


def _check_number(source: str, notes: Sequence[RefusalNote], most: int) -> None:
    """Raise Refused if the notes contain too many different requests."""
    questions = {note.question for note in notes}
    if len(questions) >= most:
        raise Refused(
            f"this site has refused {len(questions)} different requests {source}; to continue, "
            f"delete {REFUSED} in its memory folder",
            "limit",
        )


# The files of a client at its site


_GROUP = "up "
"""The prefix of the groups of a reply in the reply's file."""

START_MODEL = "start.model"
"""The file with the model that a run starts from."""

FACTS = "facts.json"
"""The file with the digests of a run's facts about data."""

STATE_KEY = "state-key"
"""The file with the key of the digests of a real site's states."""

KEPT = 2
"""The number of stages whose states and replies are kept, in addition to the valid state."""


@dataclass(frozen=True)
class ClientFiles:
    """The files of one client in one run: ``FOLDER/RUN/clientN/``.

    For each executed stage, there is the client state ``clientN-roundR-stageS.safetensors`` (if
    any), and the reply, which is only written after the state is on disk. A repeated request is
    answered from the stored reply, and an interrupted stage is repeated from the valid state.
    Guards store their notes in the same folder (``core.extensions.SiteGuard``).

    ``is_secret``: whether the server only receives keyed digests of client states. With a plain
    SHA-256, it could verify guesses about a state, and thereby about the data.
    """

    folder: Path
    run: str
    client: int
    is_secret: bool = False

    @property
    def place(self) -> Path:
        """The folder of this client's files for this run."""
        return self.folder / self.run / f"client{self.client}"

    def check_facts_unchanged(self, facts: Mapping[str, Any]) -> None:
        """Raise Refused if a run's facts have changed since their first use, when they are stored.

        The mean and standard deviation from the sites' sums are stored separately, because they
        arrive later.
        """
        if not facts:
            return
        path = self.place / FACTS
        noted: dict[str, str] = {}
        if path.is_file():
            noted = json.loads(path.read_text(encoding="utf-8"))
        current = {"facts": digest(accepted_text("", facts).encode())}
        if facts.get("mean"):
            current["moments"] = digest(json.dumps([facts["mean"], facts.get("std")]).encode())
        if any(noted.get(name, sha) != sha for name, sha in current.items()):
            raise Refused(
                "the facts about data have changed since the start of this run", "request"
            )
        if not current.keys() <= noted.keys():
            write_secret(path, json.dumps({**noted, **current}).encode())

    def start_model(self, request: Request) -> Tensors:
        """The model that the run starts from: the model in the request, or the stored one.

        Raises Refused if the model differs from the one in the facts. If there is no model, the
        server sends it again.
        """
        if request.start:
            _check_start(request.start, request)
            return request.start
        try:
            stored = decode(read_file(self.place / START_MODEL), entries=MAX_LOCAL_ENTRIES)
        except (OSError, BadPayload) as error:
            raise Refused(
                f"the model that the run starts from is not at this site: {error}", "start"
            ) from error
        model: Tensors = stored.get(START, {})
        _check_start(model, request)
        return model

    def store_start(self, request: Request) -> None:
        """Store the model that the run starts from, if the request contains it."""
        if request.start:
            _check_start(request.start, request)
            parts = encoded_parts(Payload({START: request.start}))
            write_secret(self.place / START_MODEL, parts)

    def client_state(self, version: Version | None) -> Payload:
        """A version of the client state; raises CorruptFile if its file is missing or damaged."""
        if version is None:
            return NOTHING
        path = self.place / version[0]
        try:
            data = read_file(path)
            if self._identifier(data) != version[1]:
                raise BadPayload("its SHA-256 does not match")
            return decode(data, entries=MAX_LOCAL_ENTRIES)
        except (OSError, BadPayload) as error:
            raise CorruptFile(
                f"the client state {version[0]} cannot be used at this site: {error}"
            ) from error

    def _identifier(self, *parts: bytes | memoryview) -> str:
        """The identifier of a client's encoded state for the server."""
        if not self.is_secret:
            return digest(*parts)
        path = self.place / STATE_KEY
        if not path.is_file():
            make_folder(self.place)
            write_secret(path, secrets.token_bytes(32))
        code = hmac.new(read_file(path), digestmod=hashlib.sha256)
        for part in parts:
            code.update(part)
        return code.hexdigest()

    def stored_answer(self, request: Request) -> SiteReply | None:
        """The stored answer to the same request; None if it is missing or damaged."""
        path = self.place / _reply_name(request.stage)
        try:
            stored = decode(read_file(path), entries=MAX_LOCAL_ENTRIES)
            note = json.loads(str(stored["note"]))
            if note["request"] != request.digest():
                return None
            groups = {
                name.removeprefix(_GROUP): group
                for name, group in stored.items()
                if name.startswith(_GROUP)
            }
            answer = SiteReply.of(str(note["answer"]), Payload(groups))
            self.client_state(answer.memory)
        except (OSError, FedstillError, ValueError, KeyError, TypeError):
            return None
        return answer

    def store_answer(self, request: Request, answer: SiteReply, client_state: Payload) -> SiteReply:
        """Write the client state and then the reply, and delete old files.

        Returns the answer with the version of the state.
        """
        make_folder(self.place)
        sweep(self.place)
        if client_state:
            parts = encoded_parts(client_state)
            name = _state_name(self.client, request.stage)
            write_secret(self.place / name, parts)
            answer = replace(answer, memory=(name, self._identifier(*parts)))
        note = json.dumps({"request": request.digest(), "answer": answer.header()})
        groups = {_GROUP + name: group for name, group in answer.content.items()}
        stored = Payload({"note": note, **groups})
        write_secret(self.place / _reply_name(request.stage), encoded_parts(stored))
        self._delete_old(request)
        return answer

    def _delete_old(self, request: Request) -> None:
        """Delete the files of old stages, except states to which the request refers."""
        replies = sorted(self.place.glob("*.reply"))
        latest = {path.stem for path in replies[-KEPT:]}
        # A server that resumed from an earlier checkpoint requests an older stage.
        latest.add(_stage_name(request.stage))

        named = set(request.named)
        if request.memory is not None:
            current, _ = request.memory
            named.add(current)
        for path in (*replies, *self.place.glob("*.safetensors")):
            if _stage_of(path) not in latest and path.name not in named:
                remove(path)


def _check_start(model: Tensors, request: Request) -> None:
    """Raise Refused if the SHA-256 of a model differs from the one in the request's facts."""
    if sha256_of(model) != request.facts.get("start"):
        raise Refused(
            "the SHA-256 of the model that the run starts from differs from the facts",
            "start",
        )


def prune_states(folder: Path, days: int) -> None:
    """Delete the states and replies of runs without requests for some days; 0: never.

    The notes of guards are kept: they record the site's answers with noise or in secure sums.
    """
    if not days or not folder.is_dir():
        return
    oldest = time.time() - days * DAY
    for place in folder.glob("*/client*"):
        files = [*place.glob("*.reply"), *place.glob("client*.safetensors")]
        files += place.glob(START_MODEL)
        if files and max(path.stat().st_mtime for path in files) < oldest:
            for path in files:
                remove(path)


def _stage_name(stage: Stage) -> str:
    return f"{stage.round:07d}-{stage.index:07d}"


def _reply_name(stage: Stage) -> str:
    return f"{_stage_name(stage)}.reply"


def _state_name(client: int, stage: Stage) -> str:
    return f"client{client}-round{stage.round}-stage{stage.index}.safetensors"


def _stage_of(path: Path) -> str:
    """The stage of a file, in the form of the reply's name."""
    if path.suffix == ".reply":
        return path.stem
    _, round, stage = path.stem.split("-")
    return f"{int(round.removeprefix('round')):07d}-{int(stage.removeprefix('stage')):07d}"


# The Flower app of a node


MAX_REQUEST_ENTRIES = 1 << 20
"""The maximum number of groups and tensors in a request, which may contain the models of all peers.
"""

AnswerFunction = Callable[[Request], SiteReply]
"""Executes a stage for one client; refusals and failures are answers, too."""


def client_app(
    executor_of: Callable[[Context], tuple[int, AnswerFunction]],
    max_bytes: int,
    *,
    shows_reasons: bool = False,
) -> ClientApp:
    """The app of a node; ``executor_of`` returns the number of the node's client and its executor.

    ``shows_reasons``: whether an error reply contains the text of the error, as in a simulation.
    """
    require_flower()
    from flwr.app import ConfigRecord, Error, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def answered(message: Message, answer: Callable[[], RecordDict]) -> Message:
        try:
            return Message(answer(), reply_to=message)
        except Exception as error:
            reason = error_text(error)
            if not shows_reasons:
                log.warning("%s", reason)
                reason = public_reason(topic_of(error))
            return Message(Error(RAISED, reason), reply_to=message)

    @app.train(STAGE.partition(".")[2])  # type: ignore[untyped-decorator]
    def stage(message: Message, context: Context) -> Message:
        def answer() -> RecordDict:
            _, executor = executor_of(context)
            parts = header_and_payload(message.content, max_bytes, MAX_REQUEST_ENTRIES)
            request = Request.of(*parts)
            return answer_content(executor(request))

        return answered(message, answer)

    @app.query(WHOAMI.partition(".")[2])  # type: ignore[untyped-decorator]
    def whoami(message: Message, context: Context) -> Message:
        def answer() -> RecordDict:
            client, _ = executor_of(context)
            return RecordDict({"whoami": ConfigRecord({"client": client})})

        return answered(message, answer)

    return app
