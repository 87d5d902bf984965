"""Runs in other programs: Flower's simulation, or a federation's server."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import torch

from fedstill.config.settings import Settings
from fedstill.core import registry
from fedstill.core.errors import ConfigError, DeployFailed
from fedstill.core.extensions import RoundHook
from fedstill.core.files import digest, in_shell
from fedstill.core.process_settings import set_environment
from fedstill.core.records import Examples, Group, Payload, Stage, Tensors
from fedstill.core.rounds import expected_reply
from fedstill.core.screen import MAX_STRING
from fedstill.data.dataset import Dataset
from fedstill.engines.devices import is_cuda
from fedstill.engines.hardware import cores
from fedstill.engines.serial import Version
from fedstill.flower import QUIET, say
from fedstill.flower.deployment.control import Control, NoAnswer, site_states, when_it_listens
from fedstill.flower.deployment.folder import Federation, load_federation
from fedstill.flower.engine import FlowerEngine, KnownCounts, LoopbackGrid
from fedstill.flower.facts import Facts
from fedstill.flower.fleet import Clock, Fleet, Patience
from fedstill.flower.messages import WHOAMI, Request, require_flower
from fedstill.flower.site import AnswerFunction, ClientFiles, StageExecutor, client_app
from fedstill.flower.site_data import SiteRun
from fedstill.flower.site_settings import Site, code_in, files_in
from fedstill.running import journal as journals
from fedstill.running.checkpoint import StoredMemory
from fedstill.running.driver import Driven, RunEngine
from fedstill.running.extensions import run_extensions
from fedstill.running.journal import JOURNAL
from fedstill.running.preparation import Prepared
from fedstill.running.recording import Progress
from fedstill.running.result import Result
from fedstill.running.same_run import name_for_clients
from fedstill.running.standardisation import sums_stage, sums_work
from fedstill.version import VERSION

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp


CLIENTS_PER_GPU = 4
"""The number of clients per GPU; without such a share, Ray may hide the GPU from them."""

JOURNAL_SECONDS = 1.0
"""The time between two readings of the journal, in seconds."""

STATUS_SECONDS = 15.0
"""The time between two requests to the server, in seconds."""

SILENCE_SECONDS = 60.0
"""The time without news of a run after which its waiting is explained, in seconds."""

START_SECONDS = 180.0
"""The time limit for the start of the server, in seconds."""


class FlowerRuns:
    """Runs with ``engine = "flower"`` (a ``running.driver.RemoteEngine``)."""

    def require(self) -> None:
        """Raise ConfigError if Flower is not installed."""
        require_flower()

    def simulate(
        self,
        settings: Settings,
        data: Dataset | None,
        folder: Path,
        drive: Callable[[Grid], Driven],
    ) -> Driven:
        """Call ``drive`` with a grid of ``settings.clients`` virtual nodes, and return its result.

        Ray distributes the nodes over a machine's cores or a cluster. ``folder``: the run's
        directory. Clients keep their states in its subfolder ``sites``, which must be accessible
        from all machines. Raises ConfigError if Ray is not installed, DeployFailed if it does not
        start, and the errors of ``drive``.
        """
        require_flower()
        try:
            start_ray()
        except ImportError as error:
            remedy = "pip install 'fedstill[flower-simulation]'"
            raise ConfigError(f"flower.grid = 'ray' needs Ray: {remedy} ({error})") from error
        import ray
        from flwr.simulation import run_simulation

        outcome: _Outcome[Driven] = _Outcome()
        server = _server_app(drive, settings.clients, outcome)
        data_in_worker = partial(_fetched, ray.put(data))
        sites = (folder / "sites").resolve()
        clients = _app_of_clients(settings, sites, data_in_worker, _prepared_in_worker)
        try:
            with _only_errors_of_flower():
                run_simulation(
                    server,
                    clients,
                    num_supernodes=settings.clients,
                    backend_config=_client_resources(settings),
                )
        except Exception as error:
            raise DeployFailed(
                f"Ray could not execute the run: {' '.join(str(error).split())[:300]}"
            ) from error
        if outcome.error is not None:
            raise outcome.error
        if outcome.driven is None:
            raise DeployFailed("Ray ended before the run; see its log")
        return outcome.driven

    def connect(
        self, prepared: Prepared, folder: Path, identity: Callable[[], str], grid: Grid | None
    ) -> FlowerEngine:
        """The engine of a run whose clients are reached over Flower.

        ``folder``: the run's directory. ``identity``: returns the run's identity. ``grid``: a
        Flower grid whose nodes are the clients; without a grid, the clients work in this process,
        over a loopback grid.
        """
        settings = prepared.settings
        if grid is None:
            app = trial_app(settings, prepared.dataset, folder / "sites")
            grid = LoopbackGrid(app, range(settings.clients))
        clock: Clock = time
        if isinstance(grid, LoopbackGrid):
            clock = grid
        config = settings.toml
        sha = digest(config.encode())

        limits = ReplyLimits(prepared)

        def request(**fields: Any) -> Request:
            return Request(
                version=VERSION,
                config=config,
                sha=sha,
                run=identity(),
                reply_limit=limits.of(fields["client"], fields["stage"]),
                **fields,
            )

        return FlowerEngine(
            server_engine=prepared.engine(StoredMemory(folder / "memory")),
            fleet=Fleet(grid, patience(settings), clock),
            request=request,
            facts=_facts(prepared),
            start=_start(prepared),
            measures=prepared.client_measures(site=True),
            known_counts=known_counts_of(prepared),
        )

    def informed(self, engine: RunEngine, prepared: Prepared) -> FlowerEngine:
        """The engine for a run whose facts have become known, with the same connection."""
        assert isinstance(engine, FlowerEngine)
        server_engine = replace(engine.server_engine, world=prepared.world, sites=prepared.sites)
        return replace(
            engine,
            server_engine=server_engine,
            facts=_facts(prepared),
            known_counts=known_counts_of(prepared),
        )

    def submit(self, settings: Settings, folder: Path, resume: bool, watch: Progress) -> Result:
        """Submit a run in a directory to a federation's server, and wait until it ends.

        The command must run on the server's machine, because it also reads the directory. Raises
        DeployFailed with the reason if the server rejects the run, or if the run fails.
        """
        federation = load_federation(Path(settings.flower.federation))
        config = settings.toml
        if resume:
            config = ""  # the server reads the file in the directory
        values = {"config": config, "out": str(folder.resolve()), "resume": resume}
        control = Control.of(federation)
        announcer = _RoundAnnouncer(folder, settings.rounds, watch, announced=len(_rounds(folder)))
        run = when_it_listens(
            lambda: control.start(federation.app, values), START_SECONDS, watch.stop
        )
        watch.started(folder, 1 + announcer.announced)
        return _follow(control, run, announcer, OfflineSites(federation, control))

    def client_memory(self, folder: Path, client: int, version: Version) -> Payload:
        """A version of a client's state, for clients of a simulation on this machine.

        Raises ConfigError if the state is at the client's site, or no longer exists.
        """
        files = ClientFiles(folder / "sites", name_for_clients(folder), client)
        if not files.place.is_dir():
            raise ConfigError(
                f"the model of client {client} is stored at its site, not on this machine"
            )
        name, _ = version
        if not (files.place / name).is_file():
            raise ConfigError(
                f"the model of client {client} no longer exists at its site: the run was started "
                "with a version that only kept the models of the last stages"
            )
        return files.client_state(version)


@dataclass
class _Outcome(Generic[Driven]):
    """The result or the error of a simulation's server; neither before its end."""

    driven: Driven | None = None
    error: BaseException | None = None


def _server_app(
    drive: Callable[[Grid], Driven], clients: int, outcome: _Outcome[Driven]
) -> ServerApp:
    """The app of a simulation's server, which stores the result or the error of ``drive``."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        try:
            wait_for_workers(grid, clients)
            outcome.driven = drive(grid)
        except BaseException as error:
            outcome.error = error

    return app


def _client_resources(settings: Settings) -> dict[str, dict[str, float]]:
    """Ray's settings for a client: one core and, on a GPU, a share of it."""
    gpu_share = 0.0
    if is_cuda(settings.device):
        gpu_share = 1 / min(cores(), CLIENTS_PER_GPU)
    return {"client_resources": {"num_cpus": 1, "num_gpus": gpu_share}}


@dataclass
class _RoundAnnouncer:
    """Announces the rounds in the journal of a run that another program executes.

    ``announced``: the number of rounds that need no announcement. ``length``: the size of the
    journal when it was last read, in bytes. ``grew_at``: the time at which its growth was last
    noticed. ``has_explained``: whether ``explain_waiting`` has printed its line.
    """

    folder: Path
    rounds: int
    watch: Progress
    announced: int
    length: int = 0
    grew_at: float = field(default_factory=time.monotonic)
    has_explained: bool = False

    def announce_new(self) -> None:
        """Announce the rounds that the journal has gained."""
        length = _length(self.folder)
        if length == self.length:
            return
        self.length = length
        self.grew_at = time.monotonic()
        events = _rounds(self.folder)
        for event in events[self.announced :]:
            self.watch.round(event, self.rounds)
        self.announced = max(self.announced, len(events))

    def explain_waiting(self) -> None:
        """Print once what the run may be waiting for, if a stage takes long.

        A site that works for a stopped run is online, but receives no other message until then.
        """
        seconds = time.monotonic() - self.grew_at
        if self.has_explained or seconds < SILENCE_SECONDS:
            return
        self.has_explained = True
        say(
            f"no stage has ended for {seconds:.0f} s: the run waits for sites that have not "
            "replied; a site first finishes its work for other runs, even for a stopped one"
        )


def _follow(
    control: Control, run: int, announcer: _RoundAnnouncer, offline: OfflineSites
) -> Result:
    """Announce a run's rounds and offline sites until it ends on the server; return its result."""
    folder = announcer.folder
    last_question = time.monotonic()
    try:
        while not journals.is_finished(folder):
            time.sleep(JOURNAL_SECONDS)
            announcer.announce_new()
            if time.monotonic() - last_question >= STATUS_SECONDS:
                last_question = time.monotonic()
                _raise_if_ended(control, run, folder)
                offline.announce()
                announcer.explain_waiting()
            if announcer.watch.stop():
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        control.stop(run)
        raise

    # The run may have written its last rounds after the last reading.
    announcer.announce_new()
    return Result.of(folder)


@dataclass
class OfflineSites:
    """Announces the sites of a federation that are not connected, whenever they change.

    ``control``: the access to its server. ``announced``: the names of the last announcement.
    """

    federation: Federation
    control: Control
    announced: Sequence[str] = ()

    def announce(self) -> None:
        """Print the sites that are not connected, unless the last announcement has named them."""
        try:
            sites = site_states(self.federation, self.control)
        except NoAnswer:
            # The server may be restarting.
            return
        names = [site.name for site in sites if not site.is_online]
        if names and names != self.announced:
            say(
                f"not connected: {', '.join(names)}; a round waits for them until its deadline: "
                "start `fedstill deploy client` there"
            )
        self.announced = names


def _length(folder: Path) -> int:
    """The size of the journal in bytes; the journal is only read again if it has grown."""
    path = folder / JOURNAL
    if not path.is_file():
        return 0
    return path.stat().st_size


def _rounds(folder: Path) -> list[Any]:
    path = folder / JOURNAL
    if not path.is_file():
        return []
    return [event for event in journals.read_journal(path) if event["event"] == "round"]


def _raise_if_ended(control: Control, run: int, folder: Path) -> None:
    try:
        end = control.ended(run)
    except NoAnswer:
        # The server may be restarting; it will report later whether the run still exists.
        return
    if end is not None and not journals.is_finished(folder):
        raise DeployFailed(
            f"the run ended on the server: {end}; continue with: fedstill resume {in_shell(folder)}"
        )


# The engine of a run, over a given grid or one inside this process


def _facts(prepared: Prepared) -> Mapping[str, Any]:
    """The facts in each request; empty for a trial that starts from random weights."""
    if prepared.settings.on_sites:
        return Facts.known_by(prepared).plain()
    if prepared.world.start is None:
        return {}
    return Facts.of_trial(prepared).plain()


def _start(prepared: Prepared) -> Tensors:
    """The model that the run starts from; empty for random weights."""
    if prepared.world.start is None:
        return {}
    return prepared.world.start.params


BYTES_OF_NUMBER = 8
"""The maximum size of a number in a reply, in bytes; numbers of secure sums have 64 bits."""

BYTES_AROUND_TENSOR = 1024
"""The allowance per tensor in bytes, for its name, shape and type, and for the encoding."""

BYTES_OF_SHARES = 1024
"""The size of a client's data about another client in a step of a secure sum, in bytes."""

REPLY_ALLOWANCE = 1 << 16
"""The allowance for a reply besides its expected content, in bytes."""


@dataclass(frozen=True)
class ReplyLimits:
    """The maximum size of each client's reply, computed from the form of a valid reply."""

    prepared: Prepared

    @cached_property
    def _hooks(self) -> Sequence[RoundHook]:
        return run_extensions(self.prepared).round_hooks

    def of(self, client: int, stage: Stage) -> int:
        """The maximum size of the arrays in a client's reply, in bytes; 0 if it is unknown."""
        prepared = self.prepared
        if stage == sums_stage(prepared.world, prepared.settings.schedule):
            about = prepared.dataset.about
            expected = sums_work(prepared.settings, about, prepared.dataset.input_shape).expected
        else:
            schedule = prepared.settings.schedule
            try:
                expected = expected_reply(client, stage, prepared.world, schedule, self._hooks)
            except Exception:
                # The screen calls the function again when the reply arrives, and reports the error.
                return 0
        content = sum(_most_bytes(group) for group in expected.values())
        return REPLY_ALLOWANCE + content + BYTES_OF_SHARES * len(stage.clients)


def _most_bytes(group: Group) -> int:
    """The maximum size of a group of a reply that has this form, in bytes."""
    if isinstance(group, torch.Tensor):
        return BYTES_AROUND_TENSOR + max(group.nbytes, BYTES_OF_NUMBER * group.numel())
    if isinstance(group, Mapping):
        return BYTES_AROUND_TENSOR + sum(_most_bytes(tensor) for tensor in group.values())
    if isinstance(group, str):
        return BYTES_AROUND_TENSOR + 4 * MAX_STRING
    return BYTES_AROUND_TENSOR


def known_counts_of(prepared: Prepared) -> Callable[[int, int], KnownCounts]:
    """The server's knowledge of each client's data in each round: everything in a simulation, and
    nothing for real sites.
    """
    sites = prepared.sites
    classes = prepared.world.classes
    if prepared.settings.on_sites:
        may_be_idle = prepared.settings.sites_have_tasks
        tasks = prepared.world.stream.tasks
        return lambda client, round: KnownCounts(tasks=tasks, may_be_idle=may_be_idle)

    test = _counts_by_class(sites.common_test, classes)
    public = _counts_by_class(sites.public, classes)

    def known_counts(client: int, round: int) -> KnownCounts:
        examples = sites.label_counts(client, round).tolist()
        train = examples
        if client in sites.flipped:
            train = examples[::-1]
        return KnownCounts(examples=examples, train=train, test=test, public=public)

    return known_counts


def _counts_by_class(examples: Examples | None, classes: int) -> list[int] | None:
    """The number of examples by class; None without examples or labels."""
    if examples is None or len(examples) == 0 or bool((examples.labels < 0).any()):
        return None
    counts: list[int] = torch.bincount(examples.labels.cpu(), minlength=classes).tolist()
    return counts


def patience(settings: Settings) -> Patience:
    """The time limits for clients, from ``[flower]``."""
    table = settings.flower
    return Patience(
        deadline=table.deadline,
        ttl=table.ttl,
        retries=table.retries,
        poll=table.poll,
        max_bytes=table.max_mb << 20,
    )


def trial_app(settings: Settings, dataset: Dataset | None, folder: Path) -> ClientApp:
    """A ClientApp whose nodes are the clients of a simulation in this process, each with its part
    of the data and its state in a folder.

    ``dataset``: the data set that was given in Python, if one was.
    """
    runs: dict[str, SiteRun] = {}
    return _app_of_clients(settings, folder, lambda: dataset, lambda: runs)


def _app_of_clients(
    settings: Settings,
    folder: Path,
    data: Callable[[], Dataset | None],
    runs: Callable[[], dict[str, SiteRun]],
) -> ClientApp:
    """The app of a simulation's clients.

    They belong to the server's own user, so they import any code in its configuration, and read its
    files. ``data`` returns the data set that was given in Python. ``runs`` returns the runs that
    this process has prepared, to which a client adds its own.
    """
    imports = tuple(code_in(settings.tree))
    files = tuple(files_in(settings.tree))

    def executor_of(context: Any) -> tuple[int, AnswerFunction]:
        client = int(context.node_config["partition-id"])
        site = Site(client, folder, imports=imports, files=files)
        return client, StageExecutor(site, data(), runs(), shows_reasons=True)

    return client_app(executor_of, settings.flower.max_mb << 20, shows_reasons=True)


# Ray's workers. Flower sends the app to a worker with every message, so the app finds by functions
# what the worker keeps.


def start_ray() -> None:
    """Start Ray, unless it runs."""
    import ray

    if ray.is_initialized():
        return
    # Without this variable, Ray warns that its default will become 0.
    variables = {**QUIET, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    set_environment(variables)
    # Workers do not inherit changes of ``sys.path``.
    paths = [*sys.path, os.environ.get("PYTHONPATH", "")]
    python_path = os.pathsep.join(filter(None, paths))
    ray.init(
        include_dashboard=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {**variables, "PYTHONPATH": python_path}},
    )


def wait_for_workers(grid: Any, clients: int) -> None:
    """Wait until every node has answered a message, so that the time of the first round does not
    contain the start of the workers. Nodes appear a moment after the server has started.
    """
    from flwr.app import ConfigRecord, Message, RecordDict

    end = time.monotonic() + START_SECONDS
    nodes = list(grid.get_node_ids())
    while len(nodes) < clients and time.monotonic() < end:
        time.sleep(0.05)
        nodes = list(grid.get_node_ids())
    grid.send_and_receive(
        [Message(RecordDict({"ask": ConfigRecord()}), node, WHOAMI) for node in nodes]
    )


@cache
def _prepared_in_worker() -> dict[str, SiteRun]:
    """The runs that this worker has prepared. The first call imports what a client needs."""
    for kind in registry.HOMES:
        registry.names(kind)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    return {}


@cache
def _fetched(reference: Any) -> Any:
    """An object from Ray's store, which a worker reads once."""
    import ray

    return ray.get(reference)


@contextmanager
def _only_errors_of_flower() -> Iterator[None]:
    """Hide Flower's warnings: it recommends its own command instead of ``run_simulation``."""
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
