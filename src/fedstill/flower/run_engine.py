"""The engine of a run on Flower, over a grid that is given or one inside this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedstill.config.settings import Settings
from fedstill.core.files import digest
from fedstill.core.records import Examples
from fedstill.data.dataset import Dataset
from fedstill.flower.client_app import Does, client_app
from fedstill.flower.engine import FlowerEngine, Truth
from fedstill.flower.facts import Facts
from fedstill.flower.fleet import Clock, Fleet, Patience
from fedstill.flower.loopback import LoopbackGrid
from fedstill.flower.messages import Request
from fedstill.flower.site import Clerk
from fedstill.flower.site_data import Ready
from fedstill.flower.site_settings import Site, code_in, files_in
from fedstill.running.checkpoint import StoredMemory
from fedstill.running.preparation import Prepared
from fedstill.version import VERSION

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid


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
