"""What a client's training starts with and what it did, and one batch as an objective sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fedstill.model_spec import ModelSpec
from fedstill.payload import Tensors

Teacher = Tensors | tuple[ModelSpec, Tensors]

Ends = tuple[Tensor, Tensor]
"""What enters a stage of a model, and what leaves it."""


@dataclass(frozen=True)
class Carry:
    """What a client starts a stage with: parameters, frozen teachers by name, a running trace, and constants.

    ``only``: positions of the examples to train on, (n,) int64; all of the stage's view if it is left out. A step's
    ``index`` counts among them.
    """

    params: Tensors
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    trace: Tensors = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    only: Tensor | None = None

    def __getitem__(self, name: str) -> Any:
        return self.constants[name]


@dataclass(frozen=True)
class Ran:
    """What training did: optimiser steps, the learning rate it used, the trace at its end."""

    steps: int
    lr: float
    trace: Tensors


class Step(Protocol):
    """One batch under training, as an objective sees it; a forward pass is made when first asked for."""

    x: Tensor  # (B, channels, H, W) float
    y: Tensor  # (B,) int64
    index: Tensor  # (B,) int64, positions in the site's data
    mask: Tensor  # (B,) float, 1 for real examples and 0 for padding
    epoch: int
    params: Tensors  # the parameters in training, for penalties

    def logits(self) -> Tensor:
        """The student's logits (B, C)."""

    def features(self) -> Tensor:
        """The student's penultimate features (B, D)."""

    def head(self, features: Tensor) -> Tensor:
        """The student's logits (B, C) of given features (B, D)."""

    def part(self, name: str) -> Tensor:
        """What a submodule of the student gives for the batch: a network of a ``pair``."""

    def levels(self) -> Sequence[str]:
        """The levels of the network, where ``through`` can go over from the student to a teacher."""

    def through(self, teacher: str, level: str) -> Tensor:
        """A frozen teacher's logits (B, C) of what the student has at a level, with gradient to that.

        Ask for it before ``logits``: the student's pass is then made once.
        """

    def slim(self, share: float) -> tuple[Tensor, Ends, Ends]:
        """The student's logits (B, C), and what enters and leaves its slimmable stage: whole, and at a share of it."""

    def teacher(self, name: str) -> Tensor:
        """A teacher's logits (B, C), without gradient."""

    def teacher_features(self, name: str) -> Tensor:
        """A teacher's penultimate features (B, D), without gradient."""

    def mean(self, values: Tensor) -> Tensor:
        """The mean () of values (B,) over real examples."""

    def share(self, raw: Tensor) -> Tensor:
        """Raw weights (B,) >= 0 divided by their sum over real examples: (B,)."""
