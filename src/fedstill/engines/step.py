"""One batch as an objective sees it (records.Step), for one client and, under ``vmap``, for each
client of a stack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fedstill.core.records import OFF, ModelSpec, Tensors, TrainingStart
from fedstill.engines.frozen_teachers import FrozenModel, frozen
from fedstill.engines.precision import Precision, lowered
from fedstill.models import contract

P = ParamSpec("P")
T = TypeVar("T")

TeacherTable = Callable[[str, str], Tensor | None]
"""From a teacher's name and "logits" or "features" to its outputs for all examples; to None if it
has to run on each batch.
"""

TeacherOnBatch = Callable[[str, str, Tensor], Tensor]
"""From a teacher's name, "logits" or "features", and inputs to its outputs."""


class StepInputs(NamedTuple):
    """The tensors of a batch that an objective sees. ``vmap`` splits them by client in a stack."""

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
    """The networks of a step: the student's module, and teachers, whose outputs may be known."""

    model: ModelSpec
    module: nn.Module
    teacher_table: TeacherTable
    precision: Precision
    device: torch.device
    teacher_on_batch: TeacherOnBatch | None = None
    """None under ``vmap``, where each client may have another teacher: it then runs here."""
    epoch_was_read: bool = False
    """Whether an objective has read the epoch's number. A recording of such a step holds for one
    epoch only.
    """

    def teacher(self, start: TrainingStart, name: str, kind: str, inputs: StepInputs) -> Tensor:
        """Logits or features of a frozen teacher for a batch."""
        table = self.teacher_table(name, kind)
        if table is not None:
            return table[inputs.rows]
        if self.teacher_on_batch is not None:
            return self.teacher_on_batch(name, kind, inputs.x)
        teacher = self.frozen(start, name)
        module = contract.module(teacher.spec, "frozen").eval()
        run = contract.forward if kind == "logits" else contract.features
        with torch.no_grad():
            return lowered(run, self.precision, self.device)(module, teacher.params, inputs.x)

    def frozen(self, start: TrainingStart, name: str) -> FrozenModel:
        """A teacher of what training starts from."""
        return frozen(start.teachers[name], self.model)


class BatchStep:
    """A batch under training, as ``core.records.Step`` describes it. A forward pass runs when its
    result is first needed, and once.
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
        """Whether there are class weights, and an objective has read labels without them."""
        has_weights = self._start.class_weights is not None
        return has_weights and self._labels_were_read and not self._labels_were_weighted

    @property
    def epoch(self) -> int:
        self._networks.epoch_was_read = True
        # In a stack it is a tensor, which vmap lets each client use like a number.
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
            # From the features, so that an objective that needs both runs the body once.
            self._logits = self.head(self._features)
        return self._features

    def head(self, features: Tensor) -> Tensor:
        return self._lowered(contract.head)(self._networks.module, self.params, features)

    def run(
        self,
        function: Callable[Concatenate[nn.Module, Tensors, Tensor, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        network = self._networks.module
        return self._lowered(function)(network, self.params, self.x, *args, **kwargs)

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
        return self._lowered(function)(network, params, x, *args, **kwargs)

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

    def _lowered(self, function: Callable[P, T]) -> Callable[P, T]:
        return lowered(function, self._networks.precision, self._networks.device)
