"""What a task of Flower's needs, imported once by the process that all tasks are forked from:
``flower_tasks.WARM``.

Modules only: nothing is computed, so no thread of torch's exists when a task is forked.
"""

from __future__ import annotations

import importlib
from contextlib import suppress

from fedstill.core import registry

KINDS = ("method", "model", "measure", "partition", "stream")
"""Of these a run names one or more, which are imported by name."""

OF_FLOWER = (
    "attr",
    "h11",
    "httpcore",
    "trio",
    "flwr.app",
    "flwr.common.config",
    "flwr.common.serde",
    "flwr.serverapp",
    "flwr.supercore.app_utils",
    "flwr.supercore.heartbeat",
    "flwr.supercore.interceptors",
    "flwr.supercore.task_identity",
    "flwr.superlink.grid",
    "flwr.supernode.runtime.run_clientapp",
)
"""Modules that a task would import by itself, of Flower's and of what speaks HTTP for it."""

for kind in KINDS:
    for name in registry.names(kind):
        registry.lookup(kind, name)
for module in ("fedstill.flower.apps", "fedstill.running.driver", *OF_FLOWER):
    with suppress(ImportError):  # a task imports it by itself, and says what is missing
        importlib.import_module(module)
