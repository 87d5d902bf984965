"""A run's engine: in this process, or an outer package's, whose clients or all of whose work are in
other processes; and what a run must ask of its clients before its first round can be prepared.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from fedstill import manifest
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import Engine, StageResult
from fedstill.core.files import write_whole
from fedstill.core.records import Payload
from fedstill.core.rounds import RunContext
from fedstill.data.dataset import Dataset
from fedstill.engines.serial import Memory, Version
from fedstill.running.checkpoint import StoredMemory
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.recording import OnRound, Progress
from fedstill.running.result import Result
from fedstill.running.same_run import name_for_clients
from fedstill.running.standardisation import run_sums, sums_work
from fedstill.running.trackers import Track

if TYPE_CHECKING:
    from flwr.serverapp import Grid


Driven = TypeVar("Driven")

Place = Literal["here", "ray", "federation"]
"""Where the server of a run is: in this process, in Flower's simulation, or at a federation."""


class RunEngine(Engine, Protocol):
    """An engine of a run, which keeps what clients remember, or at least the index of it."""

    @property
    def memory(self) -> Memory:
        """The clients' states."""

    def close(self) -> None:
        """End threads and connections."""


class RemoteEngine(Protocol):
    """What a run needs from a package whose engine reaches clients in other processes."""

    def require(self) -> None:
        """Raise ConfigError if something that the engine needs is not installed."""

    def simulate(
        self,
        settings: Settings,
        data: Dataset | None,
        folder: Path,
        drive: Callable[[Grid], Driven],
    ) -> Driven:
        """What ``drive`` returns, called inside a simulation with its grid of clients.

        ``folder``: the run's directory.
        """

    def connect(
        self, prepared: Prepared, folder: Path, identity: Callable[[], str], grid: Grid | None
    ) -> RunEngine:
        """The engine of a run whose clients are reached over a grid, or over one inside this
        process.

        ``identity``: gives the run's identity, which every message names.
        """

    def informed(self, engine: RunEngine, prepared: Prepared) -> RunEngine:
        """The engine of a run whose data are prepared anew; its messages go the same way."""

    def submit(self, settings: Settings, folder: Path, resume: bool, watch: Progress) -> Result:
        """Have a federation's server carry out a run in a directory, and wait for its end."""

    def client_memory(self, folder: Path, client: int, version: Version) -> Payload:
        """What a client of a run remembers; raises ConfigError if its memory is at its site."""


def remote_engine(settings: Settings) -> RemoteEngine | None:
    """The engine of an outer package that a run asks for; None for an engine of this process.

    Raises ConfigError if the package is not installed.
    """
    if settings.engine != "flower":
        return None
    engines = manifest.engines()
    if settings.engine not in engines:
        raise ConfigError(
            f"engine = {settings.engine!r} needs the package fedstill.{settings.engine}, which is "
            "not installed; choose another engine"
        )
    kind = engines[settings.engine].load()
    engine: RemoteEngine = kind()
    return engine


def place_of(settings: Settings) -> Place:
    """Where the server of a run is."""
    if settings.engine != "flower":
        return "here"
    if settings.flower.federation:
        return "federation"
    if settings.flower.grid == "ray":
        return "ray"
    return "here"


def check_calls(on_round: OnRound | None, track: Track = ()) -> None:
    """Raise ConfigError for what is called in this process, where a federation would have to call
    it.
    """
    for what, given in (("on_round is", on_round), ("trackers are", track)):
        if given:
            raise ConfigError(
                f"{what} called where the run is, and a federation's run is not in this process"
            )


NAME_BEFORE_START = "sums-name"
"""The file with the name by which sites know a run until its journal has a first line."""


def engine_of(
    prepared: Prepared, folder: Path, identity: Callable[[], str], grid: Grid | None
) -> RunEngine:
    """The engine that a run's settings name.

    folder: the run's directory. identity: gives the run's identity. grid: a Flower grid whose nodes
    are the clients; without one, clients over Flower work in this process.
    """
    remote = remote_engine(prepared.settings)
    if remote is None:
        return prepared.engine(StoredMemory(folder / "memory"))
    return remote.connect(prepared, folder, identity, grid)


def identity_of(folder: Path) -> str:
    """Which run a directory holds, for its clients: the same after a resume, another for every run.

    Until the journal begins, a run has a name of its own, so that clients which add noise to their
    sums do not add it twice.
    """
    if (folder / "journal.jsonl").stat().st_size > 0:
        return name_for_clients(folder)
    path = folder / NAME_BEFORE_START
    if not path.is_file():
        write_whole(path, secrets.token_hex(8).encode())
    return path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Collected:
    """A run that is prepared with what its clients have sent."""

    prepared: Prepared
    engine: RunEngine
    result: StageResult


def complete(prepared: Prepared, engine: RunEngine, context: RunContext) -> Collected | None:
    """Ask real sites for the sums of their data, if these scale the run's data, and prepare the run
    again with the mean and spread that they make; None if the run needs no sums.
    """
    settings = prepared.settings
    if not settings.on_sites or prepared.scaler.origin != "summed":
        return None
    remote = remote_engine(settings)
    assert remote is not None  # real sites are reached over a network
    if prepared.scaler.mean:
        # The run was stopped before its first checkpoint, and begins anew.
        prepared = prepare(settings, prepared.dataset)
        engine = remote.informed(engine, prepared)
        context = replace(context, world=prepared.world, engine=engine)
    sums = sums_work(settings, prepared.dataset.about, prepared.dataset.input_shape)
    moments, result = run_sums(sums, context)
    prepared = prepare(settings, prepared.dataset, sent=moments)
    return Collected(prepared, remote.informed(engine, prepared), result)
