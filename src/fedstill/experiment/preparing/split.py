"""Which client has which examples: the partition that a config names, applied and checked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.data.examples import stratified
from fedstill.data.partition import cached
from fedstill.errors import ConfigError, InfeasiblePartition, on_one_line
from fedstill.experiment.config.settings import Settings
from fedstill.records import Examples


def split(settings: Settings, labels: np.ndarray[Any, np.dtype[np.int64]]) -> list[Tensor]:
    """Positions of each client's examples; raises InfeasiblePartition if a client would have none."""
    partition = settings.named.partition
    entry, fields = partition.entry, dict(partition.values)
    own = fields.pop("seed", None)
    if "seed" in inspect.signature(entry.target).parameters:
        fields["seed"] = settings.seed if own is None else own
    try:
        apply = entry.target if partition.name in settings.lives else functools.partial(cached, entry.target)
        parts = [np.asarray(part) for part in apply(labels=labels, clients=settings.clients, **fields)]
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"partition {entry.name} failed: {on_one_line(error)}") from error
    if len(parts) != settings.clients:
        raise ConfigError(f"partition {entry.name} gave {len(parts)} parts for {settings.clients} clients")
    for client, part in enumerate(parts):
        if len(part) == 0:
            raise InfeasiblePartition(f"partition {entry.name}: client {client} gets no examples; use fewer clients")
        if part.ndim != 1 or part.dtype.kind not in "iu" or part.min() < 0 or part.max() >= len(labels):
            raise ConfigError(f"partition {entry.name}: client {client} must get positions from 0 to {len(labels) - 1}")
    if np.bincount(np.concatenate(parts)).max() > 1:
        raise ConfigError(f"partition {entry.name} gives an example to two clients; each example goes to one at most")
    return [torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in parts]


def label_counts(labels: Tensor, parts: Sequence[Tensor], classes: int) -> Tensor:
    """Label counts (clients, C) of a split."""
    if not parts:
        return torch.zeros(0, classes, dtype=torch.int64)
    return torch.stack([torch.bincount(labels[part], minlength=classes) for part in parts])


def some_of(examples: Examples, size: int, key: str) -> Examples:
    """``size`` of the examples, stratified, or all for 0; raises ConfigError naming ``data.KEY`` for more than all."""
    if size == 0:
        return examples
    if size > len(examples.labels):
        raise ConfigError(f"data.{key} = {size} is more than the {len(examples.labels)} examples there are")
    return examples.take(stratified(examples.labels, size, seed=0))
