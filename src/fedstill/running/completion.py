"""A run's engine, and what a run must ask of its clients before its first round can be prepared."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.core.files import write_whole
from fedstill.core.results import StageResult
from fedstill.core.rounds import RunContext
from fedstill.engines.client_memory import Memory
from fedstill.running.data_sums import run_sums, sums_of_run
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.remote import RunEngine, remote_engine
from fedstill.running.same_run import name_for_clients

if TYPE_CHECKING:
    from flwr.serverapp import Grid

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
        return prepared.engine(Memory(folder / "memory"))
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
    sums = sums_of_run(settings, prepared.dataset.about, prepared.dataset.input_shape)
    moments, result = run_sums(sums, context)
    prepared = prepare(settings, prepared.dataset, sent=moments)
    return Collected(prepared, remote.informed(engine, prepared), result)
