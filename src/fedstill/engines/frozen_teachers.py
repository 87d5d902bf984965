"""Frozen teachers of one client: run once where inputs stay the same, else once a batch; never
twice on one input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fedstill.core.records import ModelSpec, Teacher, Tensors
from fedstill.data.inputs import SHARD, channels_last
from fedstill.engines.cores import side_by_side
from fedstill.engines.precision import Precision, lowered
from fedstill.models import contract

Outputs = dict[str, Tensor]
"""What one pass gave: "logits" (n, C), and "features" (n, D) where they were asked for."""


@dataclass(frozen=True)
class FrozenModel:
    """A teacher as the engines see it: its architecture and its parameters."""

    spec: ModelSpec
    params: Tensors


def frozen_teachers(named: Mapping[str, Teacher], own: ModelSpec) -> dict[str, FrozenModel]:
    """The teachers of a ``TrainingStart``, in the one form that engines know; parameters alone are
    of ``own`` architecture.
    """
    return {name: frozen(teacher, own) for name, teacher in named.items()}


def frozen(model: Teacher, own: ModelSpec) -> FrozenModel:
    """Parameters of ``own`` architecture, or a network with its parameters, in that form."""
    return FrozenModel(*model) if isinstance(model, tuple) else FrozenModel(own, model)


@dataclass
class Teachers:
    """The teachers of one client in one stage, each by its name.

    ``still``: the client's inputs if they are the same in every epoch and each will be seen, else
    None. ``workers``: how many teachers and shards at a time on the CPU, one torch thread each; the
    bits do not depend on it. Outputs of all teachers are made when one is first asked for.
    """

    named: Mapping[str, FrozenModel]
    still: Tensor | None
    workers: int = 1
    precision: Precision = "fp32"
    _known: dict[str, Outputs] = field(default_factory=dict)
    _batch: Tensor | None = None
    _laid_out: dict[str, FrozenModel] = field(default_factory=dict)

    def table(self, name: str, kind: str) -> Tensor | None:
        """Logits (n, C) or features (n, D) for all still inputs, passed in fixed shards; None if
        there are none.
        """
        if self.still is None:
            return None
        if kind not in self._known.get(name, {}):
            self._compute(kind, torch.split(self.still, SHARD))
        return self._known[name][kind]

    def now(self, name: str, kind: str, x: Tensor) -> Tensor:
        """Logits (B, C) or features (B, D) for one batch of inputs."""
        if self._batch is not x:
            self._batch, self._known = x, {}
        if kind not in self._known.get(name, {}):
            self._compute(kind, (x,))
        return self._known[name][kind]

    def _compute(self, kind: str, parts: tuple[Tensor, ...]) -> None:
        """Outputs of every teacher: a method asks all of them the same."""
        jobs = [
            partial(_outputs, self._model(name), x, kind, self.precision)
            for name in self.named
            for x in parts
        ]
        on_cpu = all(x.device.type == "cpu" for x in parts)
        passes = side_by_side(jobs, self.workers) if on_cpu else [job() for job in jobs]
        for i, name in enumerate(self.named):
            own = passes[i * len(parts) : (i + 1) * len(parts)]
            self._known[name] = {k: torch.cat([p[k] for p in own]) for k in own[0]}

    def _model(self, name: str) -> FrozenModel:
        """A teacher, its parameters in the order of memory that convolutions want: changed once,
        not for every pass.
        """
        if name not in self._laid_out:
            teacher = self.named[name]
            self._laid_out[name] = FrozenModel(
                teacher.spec, {k: channels_last(v) for k, v in teacher.params.items()}
            )
        return self._laid_out[name]


def _outputs(teacher: FrozenModel, x: Tensor, kind: str, precision: Precision) -> Outputs:
    """One pass of one teacher, in this thread's module; logits come along where features are asked
    for.
    """
    m, params, x = contract.module(teacher.spec, "frozen").eval(), teacher.params, channels_last(x)
    with torch.no_grad():
        if kind == "logits":
            return {"logits": lowered(contract.forward, precision, x.device)(m, params, x)}
        z = lowered(contract.features, precision, x.device)(m, params, x)
        return {"features": z, "logits": lowered(contract.head, precision, x.device)(m, params, z)}
