"""Runs that another program carries out: Flower's simulation, or a federation's server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError, DeployFailed
from fedstill.core.files import digest, in_shell
from fedstill.core.records import Examples, Payload
from fedstill.data.dataset import Dataset
from fedstill.engines.cores import cores
from fedstill.engines.serial import Version
from fedstill.flower.deployment.control import Control, NoAnswer, when_it_listens
from fedstill.flower.deployment.folder import load_federation
from fedstill.flower.engine import FlowerEngine, Truth
from fedstill.flower.facts import Facts
from fedstill.flower.fleet import Clock, Fleet, Patience
from fedstill.flower.loopback import LoopbackGrid
from fedstill.flower.messages import Request, require_flower
from fedstill.flower.site import Clerk, Desk, Does, client_app
from fedstill.flower.site_data import Ready
from fedstill.flower.site_settings import Site, code_in, files_in
from fedstill.running import journal as journals
from fedstill.running.checkpoint import StoredMemory
from fedstill.running.driver import Driven, RunEngine
from fedstill.running.preparation import Prepared
from fedstill.running.recording import Progress
from fedstill.running.result import Result
from fedstill.running.same_run import name_for_clients
from fedstill.version import VERSION

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid


CLIENTS_ON_CARD = 4
"""Clients that share a card; without a share Ray may hide the card from them."""

LOOK, ASK, START = 1.0, 60.0, 180.0
"""Seconds between looks at the journal, between questions to the server, and for it to start."""


class FlowerRuns:
    """Runs with ``engine = "flower"``: a ``running.driver.RemoteEngine``."""

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
        """What ``drive`` gives for a grid of ``settings.clients`` virtual nodes, which Ray spreads
        over a machine's cores or a cluster.

        ``folder``: the run's directory; clients keep what they remember in its ``sites``, which all
        machines must see. Raises ConfigError if Ray is not installed, DeployFailed if it does not
        start, and whatever ``drive`` raises.
        """
        require_flower()
        try:
            import ray  # noqa: F401
        except ImportError as error:
            remedy = "pip install 'fedstill[flower-simulation]'"
            raise ConfigError(f"flower.grid = 'ray' needs Ray: {remedy} ({error})") from error
        from flwr.serverapp import ServerApp
        from flwr.simulation import run_simulation

        given: list[Driven] = []
        raised: list[BaseException] = []
        app = ServerApp()

        @app.main()  # type: ignore[untyped-decorator]
        def main(grid: Any, context: Any) -> None:
            try:
                given.append(drive(grid))
            except BaseException as error:
                raised.append(error)

        share = 1 / min(cores(), CLIENTS_ON_CARD) if settings.device == "cuda" else 0.0
        one_core = {"client_resources": {"num_cpus": 1, "num_gpus": share}}
        clients = trial_app(settings, data, (folder / "sites").resolve())
        try:
            run_simulation(app, clients, num_supernodes=settings.clients, backend_config=one_core)
        except Exception as error:
            raise DeployFailed(
                f"Ray could not carry the run out: {' '.join(str(error).split())[:300]}"
            ) from error
        if raised:
            raise raised[0]
        if not given:
            raise DeployFailed("Ray ended before the run did; its log says why")
        return given[0]

    def connect(
        self, prepared: Prepared, folder: Path, identity: Callable[[], str], grid: Grid | None
    ) -> FlowerEngine:
        """The engine of a run over a grid, or over one inside this process."""
        return connect(prepared, folder, identity, grid)

    def informed(self, engine: RunEngine, prepared: Prepared) -> FlowerEngine:
        """The engine of a run whose data are prepared anew."""
        assert isinstance(engine, FlowerEngine)
        return informed(engine, prepared)

    def submit(self, settings: Settings, folder: Path, resume: bool, watch: Progress) -> Result:
        """Have a federation's server do a run in a directory of its own disk, and wait for its end.

        The directory must be seen from here too: this is the operator's command on the server's
        machine. Raises DeployFailed with the reason if the server does not take the run, or it
        fails there.
        """
        federation = load_federation(Path(settings.flower.federation))
        config = settings.toml
        if resume:
            config = ""  # the server reads the one in the directory
        values = {"config": config, "out": str(folder.resolve()), "resume": resume}
        control = Control.of(federation)
        run = when_it_listens(lambda: control.start(federation.app, values), START)
        watch.started(folder, 1 + len(_rounds(folder)))
        return _follow(control, run, settings.rounds, folder, watch)

    def client_memory(self, folder: Path, client: int, version: Version) -> Payload:
        """What a client remembers, if it worked in a simulation on this machine.

        Raises ConfigError if its memory is at its site, or no longer there.
        """
        desk = Desk(folder / "sites", name_for_clients(folder), client)
        if not desk.place.is_dir():
            raise ConfigError(
                f"the model of client {client} is at its site: this machine does not have it"
            )
        name, _ = version
        if not (desk.place / name).is_file():
            raise ConfigError(
                f"the model of client {client} is no longer at its site: the run began with a "
                "version whose sites kept those of the last stages only"
            )
        return desk.remembered(version)


def _follow(control: Control, run: int, rounds: int, folder: Path, watch: Progress) -> Result:
    shown, read, asked = 0, 0, time.monotonic()
    try:
        while not (folder / "summary.json").is_file():
            time.sleep(LOOK)
            if (long := _length(folder)) != read:
                read, events = long, _rounds(folder)
                for event in events[shown:]:
                    watch.round(event, rounds)
                shown = max(shown, len(events))
            if time.monotonic() - asked >= ASK:
                asked = time.monotonic()
                _raise_if_ended(control, run, folder)
            if watch.stop():
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        control.stop(run)
        raise
    return Result.of(folder)


def _length(folder: Path) -> int:
    """The bytes of the journal: one that is not longer has no new round, and may be too long to
    read every second.
    """
    path = folder / "journal.jsonl"
    return path.stat().st_size if path.is_file() else 0


def _rounds(folder: Path) -> list[Any]:
    path = folder / "journal.jsonl"
    return (
        [e for e in journals.read_journal(path) if e["event"] == "round"] if path.is_file() else []
    )


def _raise_if_ended(control: Control, run: int, folder: Path) -> None:
    try:
        how = control.ended(run)
    except NoAnswer:
        return  # the server may be starting again; it then says whether the run still exists
    if how is not None and not (folder / "summary.json").is_file():
        raise DeployFailed(
            f"the run ended on the server: {how}; go on with: fedstill resume {in_shell(folder)}"
        )


# The engine of a run, over a grid that is given or one inside this process


def connect(
    prepared: Prepared, folder: Path, identity: Callable[[], str], grid: Grid | None
) -> FlowerEngine:
    """The engine of a run whose clients are reached over Flower.

    ``folder``: the run's directory. ``identity``: gives the run's identity. ``grid``: a Flower grid
    whose nodes are the clients; without one they work in this process, over a loopback grid.
    """
    settings = prepared.settings
    here = prepared.engine(StoredMemory(folder / "memory"))
    if grid is None:
        grid = LoopbackGrid(
            trial_app(settings, prepared.dataset, folder / "sites"), range(settings.clients)
        )
    clock: Clock = grid if isinstance(grid, LoopbackGrid) else time
    config = settings.toml
    sha = digest(config.encode())

    def request(**rest: Any) -> Request:
        return Request(VERSION, config, sha, identity(), **rest)

    facts = Facts.known_by(prepared).plain() if settings.on_sites else {}
    taken = prepared.client_measures(site=True)
    return FlowerEngine(
        here, Fleet(grid, patience(settings), clock), request, facts, taken, truth_of(prepared)
    )


def informed(engine: FlowerEngine, prepared: Prepared) -> FlowerEngine:
    """The engine for a run whose facts are known only now; its messages go the same way."""
    here = replace(engine.here, world=prepared.world, sites=prepared.sites)
    return replace(
        engine, here=here, facts=Facts.known_by(prepared).plain(), truth=truth_of(prepared)
    )


def truth_of(prepared: Prepared) -> Callable[[int, int], Truth]:
    """What the server knows of each client's data in each round: all in a simulation, nothing of
    real sites.
    """
    sites, classes = prepared.sites, prepared.world.classes
    if prepared.settings.on_sites:
        return lambda client, round: Truth(tasks=prepared.world.stream.tasks)

    test = _counts_by_class(sites.common_test, classes)
    public = _counts_by_class(sites.public, classes)
    return lambda client, round: Truth(sites.counts(client, round).tolist(), test, public)


def _counts_by_class(examples: Examples | None, classes: int) -> list[int] | None:
    """How many examples each class has; None without examples, or without their labels."""
    if examples is None or len(examples) == 0 or bool((examples.labels < 0).any()):
        return None
    counts: list[int] = torch.bincount(examples.labels.cpu(), minlength=classes).tolist()
    return counts


def patience(settings: Settings) -> Patience:
    """How long to wait for clients, from ``[flower]``."""
    said = settings.flower
    return Patience(said.deadline, said.ttl, said.retries, said.poll, max_bytes=said.max_mb << 20)


def trial_app(settings: Settings, dataset: Dataset | None, folder: Path) -> ClientApp:
    """A ClientApp whose nodes are the clients of a simulation: each on its part of the data, its
    memory in a folder.

    They belong to the server's own user, so they import whatever code its configuration names, and
    read its files.
    """
    imports, files = tuple(code_in(settings.tree)), tuple(files_in(settings.tree))
    ready = dict[str, Ready]()

    def clerk_of(context: Any) -> tuple[int, Does]:
        client = int(context.node_config["partition-id"])
        return client, Clerk(Site(client, folder, imports=imports, files=files), dataset, ready)

    return client_app(clerk_of, settings.flower.max_mb << 20)
