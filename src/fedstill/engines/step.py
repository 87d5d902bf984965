"""The batch that an objective receives (``core.records.Step``), of one client or, under ``vmap``,
of each client in a stack; and a client's frozen teachers, which never run twice on the same input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fedstill.core.records import OFF, ModelSpec, Teacher, Tensors, TrainingStart
from fedstill.engines.hardware import Precision, at_precision, run_in_parallel
from fedstill.models import contract
from fedstill.models.functional import SHARD, channels_last

P = ParamSpec("P")
T = TypeVar("T")


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


TeacherTable = Callable[[str, str], Tensor | None]
"""A function from a teacher's name and "logits" or "features" to its outputs for all examples, or
to None if the teacher has to run on each batch.
"""

TeacherOnBatch = Callable[[str, str, Tensor], Tensor]
"""A function from a teacher's name, "logits" or "features", and inputs to the teacher's outputs."""


class StepInputs(NamedTuple):
    """The tensors of a batch for an objective. In a stack, ``vmap`` splits them by client."""

    x: Tensor
    y: Tensor
    positions: Tensor
    """Positions in a client's examples."""
    rows: Tensor
    """Positions in the examples of all stacked clients, for which teachers have tables."""
    mask: Tensor | None
    """1 for real examples, 0 for padding; None if nothing is padded."""
    epoch: int | Tensor


@dataclass
class Networks:
    """The networks of a step: the student's module and teachers, whose outputs may be cached."""

    model: ModelSpec
    module: nn.Module
    teacher_table: TeacherTable
    precision: Precision
    teacher_precision: Precision
    device: torch.device
    teacher_on_batch: TeacherOnBatch | None = None
    """Runs a teacher on a batch. It is None under ``vmap``, where each client may have a different
    teacher, which then runs within the step.
    """
    epoch_was_read: bool = False
    """Whether an objective has read the number of the epoch. A recording of such a step is only
    valid for one epoch.
    """

    def teacher(self, start: TrainingStart, name: str, kind: str, inputs: StepInputs) -> Tensor:
        """The logits or features of a frozen teacher for a batch."""
        table = self.teacher_table(name, kind)
        if table is not None:
            return table[inputs.rows]
        if self.teacher_on_batch is not None:
            return self.teacher_on_batch(name, kind, inputs.x)
        teacher = self.frozen(start, name)
        module = contract.module(teacher.spec, "frozen").eval()
        run = contract.forward if kind == "logits" else contract.features
        with torch.no_grad():
            return self.teacher_at_precision(run)(module, teacher.params, inputs.x)

    def frozen(self, start: TrainingStart, name: str) -> FrozenModel:
        """A teacher of the ``TrainingStart`` as a model."""
        return frozen(start.teachers[name], self.model)

    def at_precision(self, function: Callable[P, T]) -> Callable[P, T]:
        """A pass of the student at its precision."""
        return at_precision(function, self.precision, self.device)

    def teacher_at_precision(self, function: Callable[P, T]) -> Callable[P, T]:
        """A pass of a teacher at the teachers' precision."""
        return at_precision(function, self.teacher_precision, self.device)


class BatchStep:
    """A training batch (a ``core.records.Step``). A forward pass runs once, when its result is
    needed.
    """

    def __init__(
        self, networks: Networks, start: TrainingStart, params: Tensors, inputs: StepInputs
    ) -> None:
        self.params = params
        self.x = inputs.x
        self.index = inputs.positions
        mask = inputs.mask
        if mask is None:
            mask = torch.ones(len(inputs.y), device=inputs.y.device)
        self.mask = mask
        self._networks = networks
        self._start = start
        self._inputs = inputs
        self._logits: Tensor | None = None
        self._features: Tensor | None = None
        self._labels_were_read = False
        self._labels_were_weighted = False

    @property
    def y(self) -> Tensor:
        self._labels_were_read = True
        return self._inputs.y

    @property
    def ignores_class_weights(self) -> bool:
        """Whether an objective has read labels without using the existing class weights."""
        has_weights = self._start.class_weights is not None
        return has_weights and self._labels_were_read and not self._labels_were_weighted

    @property
    def epoch(self) -> int:
        self._networks.epoch_was_read = True
        # In a stack it is a tensor; under vmap, each client can use its entry like a number.
        return self._inputs.epoch  # type: ignore[return-value]

    def logits(self, raw: bool = False) -> Tensor:
        if self._logits is None:
            self._logits = self.run(contract.forward)
        if raw:
            return self._logits
        return self.on(self._logits)

    def features(self) -> Tensor:
        if self._features is None:
            self._features = self.run(contract.features)
            # Computed from the features, so that an objective that needs both runs the body once.
            self._logits = self.head(self._features)
        return self._features

    def head(self, features: Tensor) -> Tensor:
        networks = self._networks
        return networks.at_precision(contract.head)(networks.module, self.params, features)

    def run(
        self,
        function: Callable[Concatenate[nn.Module, Tensors, Tensor, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        networks = self._networks
        run = networks.at_precision(function)
        return run(networks.module, self.params, self.x, *args, **kwargs)

    def run_teacher(
        self,
        name: str,
        function: Callable[Concatenate[nn.Module, Tensors, Tensor, P], T],
        x: Tensor,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        teacher = self._networks.frozen(self._start, name)
        network = contract.module(teacher.spec, "frozen").eval()
        params = {k: v.detach() for k, v in teacher.params.items()}
        run = self._networks.teacher_at_precision(function)
        return run(network, params, x, *args, **kwargs)

    def teacher(self, name: str, raw: bool = False) -> Tensor:
        logits = self._networks.teacher(self._start, name, "logits", self._inputs)
        if raw:
            return logits
        return self.on(logits)

    def teacher_features(self, name: str) -> Tensor:
        return self._networks.teacher(self._start, name, "features", self._inputs)

    def weighted(self, losses: Tensor) -> Tensor:
        self._labels_were_weighted = True
        weights = self._start.class_weights
        if weights is None:
            return losses
        return losses * weights.to(losses.dtype)[self._inputs.y]

    def mean(self, values: Tensor) -> Tensor:
        mask = self._inputs.mask
        if mask is None:
            return values.mean()
        return (values * mask).sum() / mask.sum()

    def on(self, logits: Tensor) -> Tensor:
        head = self._start.head
        if head is None:
            return logits
        return torch.where(head, logits, OFF)


# ---- frozen teachers -----------------------------------------------------------------------------


TeacherOutputs = dict[str, Tensor]
"""The outputs of a pass: "logits" (n, C), and "features" (n, D) if requested."""


def frozen_teachers(teachers: Mapping[str, Teacher], student: ModelSpec) -> dict[str, FrozenModel]:
    """The teachers of a ``TrainingStart`` as models."""
    return {name: frozen(teacher, student) for name, teacher in teachers.items()}


def build_modules(teachers: Mapping[str, Teacher], student: ModelSpec) -> None:
    """Build the modules of teachers before anything runs under ``vmap``, where initial weights
    cannot be drawn.
    """
    for model in frozen_teachers(teachers, student).values():
        contract.module(model.spec, "frozen")


@dataclass
class Teachers:
    """The teachers of one client in one stage, by name.

    Methods use all their teachers in the same way, so the outputs of all teachers are computed as
    soon as one of them is needed.
    """

    models: Mapping[str, FrozenModel]
    fixed_inputs: Tensor | None
    """The client's inputs, if they are the same in every epoch and training uses all of them."""
    workers: int = 1
    """The number of passes that run in parallel on the CPU, with one torch thread each. The bits do
    not depend on it.
    """
    precision: Precision = "fp32"
    _outputs: dict[str, TeacherOutputs] = field(default_factory=dict, init=False)
    """The outputs for the fixed inputs, or for the latest batch, by teacher."""
    _latest_batch: Tensor | None = field(default=None, init=False)
    _channels_last: dict[str, FrozenModel] = field(default_factory=dict, init=False)

    def table(self, name: str, kind: str) -> Tensor | None:
        """Logits (n, C) or features (n, D) for all fixed inputs; None if inputs vary."""
        if self.fixed_inputs is None:
            return None
        if kind not in self._outputs.get(name, {}):
            # Shards have a fixed size, so that the bits do not depend on the requested outputs.
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
        """Run all teachers on all shards."""
        passes = [
            partial(_run, self._model(name), x, kind, self.precision)
            for name in self.models
            for x in shards
        ]
        if all(x.device.type == "cpu" for x in shards):
            results = run_in_parallel(passes, self.workers)
        else:
            results = [run() for run in passes]

        for i, name in enumerate(self.models):
            outputs = results[i * len(shards) : (i + 1) * len(shards)]
            self._outputs[name] = {
                kind: torch.cat([output[kind] for output in outputs]) for kind in outputs[0]
            }

    def _model(self, name: str) -> FrozenModel:
        """A teacher whose parameters have the best memory order for convolutions. They are
        reordered once instead of in every pass.
        """
        if name not in self._channels_last:
            model = self.models[name]
            params = {entry: channels_last(value) for entry, value in model.params.items()}
            self._channels_last[name] = FrozenModel(model.spec, params)
        return self._channels_last[name]


def _run(model: FrozenModel, x: Tensor, kind: str, precision: Precision) -> TeacherOutputs:
    """One pass of a teacher in this thread's module. If features are requested, the logits are
    computed from them.
    """
    module = contract.module(model.spec, "frozen").eval()
    x = channels_last(x)
    with torch.no_grad():
        if kind == "logits":
            forward = at_precision(contract.forward, precision, x.device)
            return {"logits": forward(module, model.params, x)}
        features = at_precision(contract.features, precision, x.device)(module, model.params, x)
        logits = at_precision(contract.head, precision, x.device)(module, model.params, features)
        return {"features": features, "logits": logits}
