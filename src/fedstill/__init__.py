"""fedstill: federated learning that does not forget.

The public names are here; each is imported when it is first used, so that ``import fedstill`` costs
nothing.
"""

from __future__ import annotations

import importlib
import itertools
import os
from typing import TYPE_CHECKING, Any

from fedstill.version import VERSION

__version__ = VERSION

# torch's threads (GNU OpenMP) stay awake for milliseconds while they wait for each other. If other
# programs run, this is very slow, so they fall asleep sooner. torch reads this when it is imported;
# benchmarks/waiting.py measures it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from fedstill.config.experiment import Experiment as Experiment
    from fedstill.config.experiment import load as load
    from fedstill.core.capabilities import Addition as Addition
    from fedstill.core.capabilities import Need as Need
    from fedstill.core.capabilities import Permit as Permit
    from fedstill.core.errors import FedstillError as FedstillError
    from fedstill.core.method import ClientWork as ClientWork
    from fedstill.core.method import Method as Method
    from fedstill.core.records import Payload as Payload
    from fedstill.core.records import Plan as Plan
    from fedstill.core.records import State as State
    from fedstill.core.records import TrainingStart as TrainingStart
    from fedstill.core.registry import register as register
    from fedstill.data.dataset import Dataset as Dataset
    from fedstill.data.sources.in_memory import from_python as from_python
    from fedstill.data.sources.load import load_dataset as load_dataset
    from fedstill.data.sources.tensors import from_clients as from_clients
    from fedstill.data.sources.tensors import from_tensors as from_tensors
    from fedstill.export.loading import load_model as load_model
    from fedstill.export.trained_model import TrainedModel as TrainedModel
    from fedstill.report.comparison import Comparison as Comparison
    from fedstill.report.comparison import compare as compare
    from fedstill.running.frame import load_runs as load_runs
    from fedstill.running.recording import Progress as Progress
    from fedstill.running.result import Result as Result
    from fedstill.running.runner import resume as resume
    from fedstill.running.runner import run as run
    from fedstill.running.trackers import Tracker as Tracker

_NAMES = {
    "fedstill.config.experiment": ("Experiment", "load"),
    "fedstill.core.capabilities": ("Addition", "Need", "Permit"),
    "fedstill.core.errors": ("FedstillError",),
    "fedstill.core.method": ("ClientWork", "Method"),
    "fedstill.core.records": ("Payload", "Plan", "State", "TrainingStart"),
    "fedstill.core.registry": ("register",),
    "fedstill.data.dataset": ("Dataset",),
    "fedstill.data.sources.in_memory": ("from_python",),
    "fedstill.data.sources.load": ("load_dataset",),
    "fedstill.data.sources.tensors": ("from_clients", "from_tensors"),
    "fedstill.export.loading": ("load_model",),
    "fedstill.export.trained_model": ("TrainedModel",),
    "fedstill.report.comparison": ("Comparison", "compare"),
    "fedstill.running.frame": ("load_runs",),
    "fedstill.running.recording": ("Progress",),
    "fedstill.running.result": ("Result",),
    "fedstill.running.runner": ("resume", "run"),
    "fedstill.running.trackers": ("Tracker",),
}
"""The public names of each module. A module is imported when one of its names is first used."""

_MODULES = (
    "attribution",
    "benchmark",
    "cli",
    "config",
    "continual",
    "core",
    "data",
    "engines",
    "export",
    "flower",
    "losses",
    "measures",
    "methods",
    "metrics",
    "models",
    "privacy",
    "querying",
    "report",
    "running",
)
"""Parts of the library that the reference is about."""

__all__ = ["__version__", *sorted(itertools.chain.from_iterable(_NAMES.values()))]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    if name in _MODULES:
        return importlib.import_module(f"fedstill.{name}")
    raise AttributeError(f"module 'fedstill' has no attribute {name!r}")


def __dir__() -> list[str]:
    # Here, since importing the manifest takes longer than importing this module.
    from fedstill.manifest import PACKAGES

    missing = [package.module for package in PACKAGES if not package.installed]
    modules = [name for name in _MODULES if f"fedstill.{name}" not in missing]
    homes = [home for home in _NAMES if home.rpartition(".")[0] not in missing]
    names = itertools.chain.from_iterable(_NAMES[home] for home in homes)
    return sorted({"__version__", *names, *modules})
