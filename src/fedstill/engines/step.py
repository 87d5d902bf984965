"""One batch as an objective sees it (records.Step), for one client and, under ``vmap``, for each
client of a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fedstill.core.records import Ends, ModelSpec, Tensors, TrainingStart
from fedstill.core.stream import OFF
from fedstill.engines.frozen_teachers import FrozenModel, frozen
from fedstill.engines.precision import Precision, lowered
from fedstill.models import contract
from fedstill.models.layer_chain import levels
from fedstill.models.layer_inputs import above, at_levels

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
        """A teacher of the carry."""
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
        self._networks, self._carry, self._rows, self._mask = networks, start, rows, mask
        self.params, self.x, self.y, self.index, self._epoch = params, x, y, index, epoch
        self.mask = torch.ones(len(y), device=y.device) if mask is None else mask
        self._logits: Tensor | None = None
        self._features: Tensor | None = None
        self._levels: dict[str, Tensor] = {}

    @property
    def epoch(self) -> int:
        """The epoch, from 0; a recording of the step then holds for it alone."""
        self._networks.asked.add("epoch")
        return self._epoch

    def logits(self, raw: bool = False) -> Tensor:
        if self._logits is None:
            self._logits = self._run(contract.forward)(self._networks.module, self.params, self.x)
        return self._logits if raw else self.on(self._logits)

    def features(self) -> Tensor:
        if self._features is None:
            self._features = self._run(contract.features)(
                self._networks.module, self.params, self.x
            )
            self._logits = self._run(contract.head)(
                self._networks.module, self.params, self._features
            )
        return self._features

    def head(self, features: Tensor) -> Tensor:
        return self._run(contract.head)(self._networks.module, self.params, features)

    def part(self, name: str) -> Tensor:
        return self.on(
            self._run(contract.run_part)(self._networks.module, name, self.params, self.x)
        )

    def levels(self) -> Sequence[str]:
        return levels(self._networks.module)

    def through(self, teacher: str, level: str) -> Tensor:
        if not self._levels:
            run = self._run(at_levels)
            self._levels, self._features = run(self._networks.module, self.params, self.x)
            self._logits = self.head(self._features)
        known = self._networks.frozen(self._carry, teacher)
        module = contract.module(known.spec, "frozen").eval()
        still = {k: v.detach() for k, v in known.params.items()}
        return self.on(self._run(above)(module, still, level, self._levels[level]))

    def slim(self, share: float) -> tuple[Tensor, Ends, Ends]:
        logits, whole, part = self._run(contract.slim)(
            self._networks.module, self.params, self.x, share
        )
        return self.on(logits), whole, part

    def teacher(self, name: str, raw: bool = False) -> Tensor:
        logits = self._networks.teacher(self._carry, name, "logits", self.x, self._rows)
        return logits if raw else self.on(logits)

    def teacher_features(self, name: str) -> Tensor:
        return self._networks.teacher(self._carry, name, "features", self.x, self._rows)

    def mean(self, values: Tensor) -> Tensor:
        return (
            values.mean() if self._mask is None else (values * self._mask).sum() / self._mask.sum()
        )

    def share(self, raw: Tensor) -> Tensor:
        real = raw if self._mask is None else raw * self._mask
        return real / real.sum()

    def on(self, logits: Tensor) -> Tensor:
        head = self._carry.head
        return logits if head is None else torch.where(head, logits, OFF)

    def _run(self, run: Callable[P, T]) -> Callable[P, T]:
        return lowered(run, self._networks.precision, self._networks.device)
