"""A mark for tests of the Flower engine, and experiments on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import toys
from fedstill.config.experiment import Experiment

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
