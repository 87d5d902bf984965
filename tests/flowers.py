"""A mark for tests of the Flower engine, experiments on it, and grids of sites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.records import Examples
from fedstill.flower.engine import LoopbackGrid
from fedstill.flower.site import AnswerFunction, StageExecutor, client_app
from fedstill.flower.site_settings import Site
from fedstill.running.preparation import Prepared

needs_flower = pytest.mark.needs_flower
"""A test that is skipped where Flower is not installed (``conftest.py``)."""

MESSAGE_BYTES = 1 << 30
"""The largest message that the grids of the tests deliver."""


def over_flower(experiment: Experiment, **flower: Any) -> Experiment:
    """The experiment on the Flower engine, with little patience; clients may fail, as machines
    do.
    """
    clients = {**toys.TOLERANT, **experiment.clients}
    return replace(
        experiment, engine="flower", clients=clients, flower={"deadline": 30, "poll": 1, **flower}
    )


def at_sites(experiment: Experiment) -> Experiment:
    """The experiment over sites with data of their own. A simulation has no stage of tests, so
    there is none without metrics.
    """
    flower = {
        "deadline": 30,
        "poll": 1,
        "data": "sites",
        "federation": "/federation",
        "test_every": int(bool(experiment.metrics)),
    }
    return replace(experiment, engine="flower", flower=flower)


def site_grid(sites: Iterable[Site]) -> LoopbackGrid:
    """A grid with a node for each site, whose refusals contain their reasons."""
    return executor_grid({site.client: StageExecutor(site, shows_reasons=True) for site in sites})


def executor_grid(executors: Mapping[int, AnswerFunction]) -> LoopbackGrid:
    """A grid with a node for each client of ``executors``."""
    return LoopbackGrid(executor_app(executors), list(executors))


def executor_app(executors: Mapping[int, AnswerFunction]) -> Any:
    """The app of nodes that answer with the executors of their clients."""

    def executor_of(context: Any) -> tuple[int, AnswerFunction]:
        client = context.node_config["partition-id"]
        return client, executors[client]

    return client_app(executor_of, MESSAGE_BYTES)


def saved_data(folder: Path, train: Examples, test: Examples) -> str:
    """A folder with these images and labels."""
    folder.mkdir(parents=True)
    arrays = {}
    for split, examples in {"train": train, "test": test}.items():
        arrays[f"{split}_images"] = examples.values[:, 0].numpy()
        arrays[f"{split}_labels"] = examples.labels.clamp(min=0).numpy()
    np.savez(folder / "data.npz", **arrays)
    return str(folder)


def own_sites(simulated: Prepared, folder: Path, public: bool = True) -> list[Site]:
    """Every client of a simulation as a site with its part of the data in a folder of its own."""
    test = simulated.dataset.test
    public_folder = ""
    if public and simulated.sites.public is not None:
        public_folder = saved_data(folder / "public", simulated.sites.public, test)

    sites = []
    for client in range(simulated.world.clients):
        part = simulated.sites.train.take(simulated.sites.positions(client))
        data = saved_data(folder / f"own{client}", part, test)
        sites.append(Site(client, folder / f"memory{client}", data=data, public=public_folder))
    return sites
