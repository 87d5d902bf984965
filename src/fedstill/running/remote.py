"""Runs whose clients, or all of whose work, are in other processes: an outer package's engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from fedstill import manifest
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import Engine
from fedstill.core.records import Payload
from fedstill.data.dataset import Dataset
from fedstill.engines.client_memory import Memory
from fedstill.running.preparation import Prepared
from fedstill.running.progress import OnRound, Progress
from fedstill.running.result import Result
from fedstill.running.trackers import Track

if TYPE_CHECKING:
    from flwr.serverapp import Grid

Driven = TypeVar("Driven")

Version = tuple[str, str]
"""A client's memory of a stage: the name of its file, and that file's SHA-256."""

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
