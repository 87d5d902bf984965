"""A mark for tests of the Flower engine, and experiments on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.records import Examples
from fedstill.flower.site_settings import Site
from fedstill.running.preparation import Prepared

needs_flower = pytest.mark.needs_flower
"""A test that is skipped where Flower is not installed (``conftest.py``)."""


def over_flower(experiment: Experiment, **flower: Any) -> Experiment:
    """The experiment on the Flower engine, with little patience; clients may fail, as machines
    do.
    """
    clients = {**toys.TOLERANT, **experiment.clients}
    return replace(
        experiment, engine="flower", clients=clients, flower={"deadline": 30, "poll": 1, **flower}
    )


def saved_data(folder: Path, train: Examples, test: Examples) -> str:
    """A folder with these images and labels."""
    folder.mkdir(parents=True)
    named = {f"{s}_images": e.values[:, 0].numpy() for s, e in (("train", train), ("test", test))}
    labels = {
        f"{s}_labels": e.labels.clamp(min=0).numpy() for s, e in (("train", train), ("test", test))
    }
    np.savez(folder / "data.npz", **named, **labels)
    return str(folder)


def own_sites(simulated: Prepared, folder: Path, public: bool = True) -> list[Site]:
    """Every client of a simulation as a site with its part of the data in a folder of its own."""
    made, shared, test = [], "", simulated.dataset.test
    if public and simulated.sites.public is not None:
        shared = saved_data(folder / "public", simulated.sites.public, test)
    for client in range(simulated.world.clients):
        part = simulated.sites.train.take(simulated.sites.positions(client))
        own = saved_data(folder / f"own{client}", part, test)
        made.append(Site(client, folder / f"memory{client}", data=own, public=shared))
    return made
