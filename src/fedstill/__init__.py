"""fedstill: federated learning that does not forget.

The public names are here; each is imported when it is first used, so that ``import fedstill`` costs
nothing.
"""

from __future__ import annotations

import importlib
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
    from fedstill.data.examples import Dataset as Dataset
    from fedstill.data.sources.loader import load_dataset as load_dataset
    from fedstill.data.sources.tensors import from_clients as from_clients
    from fedstill.data.sources.tensors import from_tensors as from_tensors
    from fedstill.errors import FedstillError as FedstillError
    from fedstill.experiment.config.experiment import Experiment as Experiment
    from fedstill.experiment.config.experiment import load as load
    from fedstill.experiment.progress import Progress as Progress
    from fedstill.experiment.run_directory.result import Result as Result
    from fedstill.experiment.running.runner import resume as resume
    from fedstill.experiment.running.runner import run as run
    from fedstill.experiment.tracking.tracker import Tracker as Tracker
    from fedstill.experiment.trained.loading import load_model as load_model
    from fedstill.experiment.trained.trained_model import TrainedModel as TrainedModel
    from fedstill.method import Method as Method
    from fedstill.plan import Plan as Plan
    from fedstill.records import Carry as Carry
    from fedstill.records import Payload as Payload
    from fedstill.registry import register as register
    from fedstill.report.comparison import Comparison as Comparison
    from fedstill.report.side_by_side import compare as compare
    from fedstill.work import ClientWork as ClientWork

_HOMES = {
    "Carry": "fedstill.records",
    "ClientWork": "fedstill.work",
    "Comparison": "fedstill.report.comparison",
    "Dataset": "fedstill.data.examples",
    "Experiment": "fedstill.experiment.config.experiment",
    "FedstillError": "fedstill.errors",
    "Method": "fedstill.method",
    "Payload": "fedstill.records",
    "Plan": "fedstill.plan",
    "Progress": "fedstill.experiment.progress",
    "Result": "fedstill.experiment.run_directory.result",
    "Tracker": "fedstill.experiment.tracking.tracker",
    "TrainedModel": "fedstill.experiment.trained.trained_model",
    "compare": "fedstill.report.side_by_side",
    "from_clients": "fedstill.data.sources.tensors",
    "from_tensors": "fedstill.data.sources.tensors",
    "load": "fedstill.experiment.config.experiment",
    "load_dataset": "fedstill.data.sources.loader",
    "load_model": "fedstill.experiment.trained.loading",
    "register": "fedstill.registry",
    "resume": "fedstill.experiment.running.runner",
    "run": "fedstill.experiment.running.runner",
}

_MODULES = (
    *(
        "aggregate",
        "data",
        "engines",
        "errors",
        "experiment",
        "fields",
        "keys",
        "labels",
        "losses",
        "matching",
    ),
    *("method", "methods", "metrics", "models", "payload", "plan", "queries", "raised", "records"),
    *(
        "registry",
        "report",
        "robust",
        "secure",
        "stream",
        "teachers",
        "topology",
        "trees",
        "wire",
        "work",
    ),
)
"""Parts of the library that the reference is about."""

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"fedstill.{name}")
    raise AttributeError(f"module 'fedstill' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
