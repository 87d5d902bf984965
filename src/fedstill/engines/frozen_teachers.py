"""Frozen teachers of one client. A teacher never runs twice on the same input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fedstill.core.records import ModelSpec, Teacher, Tensors
from fedstill.engines.cores import side_by_side
from fedstill.engines.precision import Precision, lowered
from fedstill.models import contract
from fedstill.models.functional import SHARD, channels_last

Outputs = dict[str, Tensor]
"""The outputs of one pass: "logits" (n, C), and "features" (n, D) if they were wanted."""


@dataclass(frozen=True)
class FrozenModel:
    """A network whose parameters do not change."""

    spec: ModelSpec
    params: Tensors


def frozen(teacher: Teacher, student: ModelSpec) -> FrozenModel:
    """A teacher as a model: a network with its parameters, or parameters for the student's
    network.
    """
    if isinstance(teacher, tuple):
        return FrozenModel(*teacher)
    return FrozenModel(student, teacher)


def frozen_teachers(teachers: Mapping[str, Teacher], student: ModelSpec) -> dict[str, FrozenModel]:
    """The teachers of a ``TrainingStart`` as models."""
    return {name: frozen(teacher, student) for name, teacher in teachers.items()}


def build_modules(teachers: Mapping[str, Teacher], student: ModelSpec) -> None:
    """Build the modules that teachers run in, before anything runs under ``vmap``: initial weights
    cannot be drawn there.
    """
    for model in frozen_teachers(teachers, student).values():
        contract.module(model.spec, "frozen")


@dataclass
class Teachers:
    """The teachers of one client in one stage, by name.

    A method asks all its teachers the same, so the outputs of all of them are computed as soon as
    one is needed.
    """

    models: Mapping[str, FrozenModel]
    fixed_inputs: Tensor | None
    """The client's inputs, if they are the same in every epoch and training takes all of them."""
    workers: int = 1
    """How many passes run at a time on the CPU, with one torch thread each. The bits do not depend
    on it.
    """
    precision: Precision = "fp32"
    _outputs: dict[str, Outputs] = field(default_factory=dict, init=False)
    """The outputs for the fixed inputs, or for the latest batch, by teacher."""
    _latest_batch: Tensor | None = field(default=None, init=False)
    _channels_last: dict[str, FrozenModel] = field(default_factory=dict, init=False)

    def table(self, name: str, kind: str) -> Tensor | None:
        """Logits (n, C) or features (n, D) for all fixed inputs; None if inputs vary."""
        if self.fixed_inputs is None:
            return None
        if kind not in self._outputs.get(name, {}):
            # Shards of a fixed size, so that the bits do not depend on what is asked for.
            self._compute(kind, torch.split(self.fixed_inputs, SHARD))
        return self._outputs[name][kind]

    def on_batch(self, name: str, kind: str, x: Tensor) -> Tensor:
        """Logits (B, C) or features (B, D) for one batch of inputs."""
        if self._latest_batch is not x:
            self._latest_batch = x
            self._outputs = {}
        if kind not in self._outputs.get(name, {}):
            self._compute(kind, (x,))
        return self._outputs[name][kind]

    def _compute(self, kind: str, shards: Sequence[Tensor]) -> None:
        """Run every teacher on every shard."""
        passes = [
            partial(_run, self._model(name), x, kind, self.precision)
            for name in self.models
            for x in shards
        ]
        if all(x.device.type == "cpu" for x in shards):
            results = side_by_side(passes, self.workers)
        else:
            results = [run() for run in passes]

        for i, name in enumerate(self.models):
            outputs = results[i * len(shards) : (i + 1) * len(shards)]
            self._outputs[name] = {
                kind: torch.cat([output[kind] for output in outputs]) for kind in outputs[0]
            }

    def _model(self, name: str) -> FrozenModel:
        """A teacher whose parameters have the order in memory that convolutions want. They are
        reordered once, not in every pass.
        """
        if name not in self._channels_last:
            model = self.models[name]
            params = {entry: channels_last(value) for entry, value in model.params.items()}
            self._channels_last[name] = FrozenModel(model.spec, params)
        return self._channels_last[name]


def _run(model: FrozenModel, x: Tensor, kind: str, precision: Precision) -> Outputs:
    """One pass of one teacher, in this thread's module. Where features are wanted, it computes
    logits from them, too.
    """
    module = contract.module(model.spec, "frozen").eval()
    x = channels_last(x)
    with torch.no_grad():
        if kind == "logits":
            forward = lowered(contract.forward, precision, x.device)
            return {"logits": forward(module, model.params, x)}
        features = lowered(contract.features, precision, x.device)(module, model.params, x)
        logits = lowered(contract.head, precision, x.device)(module, model.params, features)
        return {"features": features, "logits": logits}
