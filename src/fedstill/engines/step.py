"""One batch as an objective sees it (records.Step), for one client and, under ``vmap``, for each
client of a stack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fedstill.core.records import ModelSpec, Tensors, TrainingStart
from fedstill.core.stream import OFF
from fedstill.engines.frozen_teachers import FrozenModel, frozen
from fedstill.engines.precision import Precision, lowered
from fedstill.models import contract

P = ParamSpec("P")
T = TypeVar("T")

Table = Callable[[str, str], Tensor | None]
"""(teacher, "logits" or "features") to its outputs for all examples, or None where it must be run
on each batch.
"""

Now = Callable[[str, str, Tensor], Tensor]
"""(teacher, "logits" or "features", inputs) to its outputs for one batch."""


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


@dataclass(frozen=True)
class Networks:
    """What a step runs: the student's module, and teachers, whose outputs may be known already.

    ``now``: runs teachers on a batch; None under ``vmap``, where they are run here, for each client
    of the stack.
    ``asked``: what objectives have asked of a step beside its tensors: its epoch.
    """

    spec: ModelSpec
    module: nn.Module
    table: Table
    precision: Precision
    device: torch.device
    now: Now | None = None
    asked: set[str] = field(default_factory=set)

    def teacher(
        self, start: TrainingStart, name: str, what: str, x: Tensor, rows: Tensor
    ) -> Tensor:
        """Logits or features of a frozen teacher for one batch."""
        teacher = self.frozen(start, name)
        known = self.table(name, what)
        if known is not None:
            return known[rows]
        if self.now is not None:
            return self.now(name, what, x)
        module = contract.module(teacher.spec, "frozen").eval()
        run = contract.forward if what == "logits" else contract.features
        with torch.no_grad():
            return lowered(run, self.precision, self.device)(module, teacher.params, x)

    def frozen(self, start: TrainingStart, name: str) -> FrozenModel:
        """A teacher of what training starts from."""
        return frozen(start.teachers[name], self.spec)


class Seen:
    """A batch under training: forward passes are made once, when first asked for."""

    def __init__(
        self,
        networks: Networks,
        start: TrainingStart,
        params: Tensors,
        x: Tensor,
        y: Tensor,
        index: Tensor,
        rows: Tensor,
        mask: Tensor | None,
        epoch: int,
    ) -> None:
        self.params = params
        self.x = x
        self.y = y
        self.index = index
        self.mask = torch.ones(len(y), device=y.device) if mask is None else mask
        self._networks = networks
        self._start = start
        self._rows = rows
        self._mask = mask
        self._epoch = epoch
        self._logits: Tensor | None = None
        self._features: Tensor | None = None

    @property
    def epoch(self) -> int:
        """The epoch, from 0; a recording of the step then holds for it alone."""
        self._networks.asked.add("epoch")
        return self._epoch

    def logits(self, raw: bool = False) -> Tensor:
        if self._logits is None:
            self._logits = self.run(contract.forward)
        return self._logits if raw else self.on(self._logits)

    def features(self) -> Tensor:
        if self._features is None:
            self._features = self.run(contract.features)
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
        logits = self._networks.teacher(self._start, name, "logits", self.x, self._rows)
        return logits if raw else self.on(logits)

    def teacher_features(self, name: str) -> Tensor:
        return self._networks.teacher(self._start, name, "features", self.x, self._rows)

    def mean(self, values: Tensor) -> Tensor:
        return (
            values.mean() if self._mask is None else (values * self._mask).sum() / self._mask.sum()
        )

    def share(self, raw: Tensor) -> Tensor:
        real = raw if self._mask is None else raw * self._mask
        return real / real.sum()

    def on(self, logits: Tensor) -> Tensor:
        head = self._start.head
        return logits if head is None else torch.where(head, logits, OFF)

    def _lowered(self, function: Callable[P, T]) -> Callable[P, T]:
        return lowered(function, self._networks.precision, self._networks.device)
