"""What a client's training starts with and what it did, and one batch as an objective sees it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedstill.model_spec import ModelSpec
from fedstill.payload import Tensors

Teacher = Tensors | tuple[ModelSpec, Tensors]

Ends = tuple[Tensor, Tensor]
"""What enters a stage of a model, and what leaves it."""


@dataclass(frozen=True)
class Examples:
    """Inputs and labels (n,) int64. The type of the inputs says what they are.

    ``values``: pixels (n, channels, H, W) uint8; numbers (n, …) float, as the network takes them;
    or token ids (n, L) int64, of which 0 is padding. ``owners``: (n,) int64, whose each example is,
    where the data say so.
    """

    values: Tensor
    labels: Tensor
    owners: Tensor | None = None

    @property
    def images(self) -> Tensor:
        """The old name of ``values``; it goes with the next release."""
        warnings.warn("Examples.images is now Examples.values", DeprecationWarning, stacklevel=2)
        return self.values

    def __len__(self) -> int:
        return self.values.shape[0]

    def __repr__(self) -> str:
        return (
            f"<Examples: {len(self):,} of shape {tuple(self.values.shape[1:])}, "
            f"{self.values.dtype}>"
        )

    def __add__(self, further: Examples) -> Examples:
        """These examples and further ones behind them; whose each is, where both say so."""
        values, labels = (
            torch.cat([self.values, further.values]),
            torch.cat([self.labels, further.labels]),
        )
        whose = (
            None
            if self.owners is None or further.owners is None
            else torch.cat([self.owners, further.owners])
        )
        return Examples(values, labels, whose)

    def take(self, index: Tensor) -> Examples:
        """The examples at some positions, (n,) int64, on whatever device."""
        there = index.to(self.labels.device)
        owners = None if self.owners is None else self.owners.index_select(0, there)
        return Examples(
            self.values.index_select(0, there), self.labels.index_select(0, there), owners
        )

    def to(self, device: str) -> Examples:
        """The examples on a device."""
        owners = None if self.owners is None else self.owners.to(device)
        return Examples(self.values.to(device), self.labels.to(device), owners)


@dataclass(frozen=True)
class Carry:
    """What a client starts a stage with: parameters, frozen teachers by name, a running trace, and
    constants.

    ``only``: positions of the examples to train on, (n,) int64; all of the stage's view if it is
    left out. A step's ``index`` counts among them. ``model``: what is trained, if it is not the
    site's network. ``examples``: what it is trained on, if it is not what the site has, as they
    are, never augmented; so the server may train something small without public data. Of another
    network than the site's nothing is measured.
    ``more``: further examples to train on, behind the site's own (or ``only`` some of these):
    ``index`` counts on, and teachers' logits cover them. They count in no reply's number of
    examples.
    ``head``: which outputs take part in training, (C,) bool, set by the engine; None: all.
    """

    params: Tensors
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    trace: Tensors = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    only: Tensor | None = None
    model: ModelSpec | None = None
    examples: Examples | None = None
    more: Examples | None = None
    head: Tensor | None = None

    def __getitem__(self, name: str) -> Any:
        return self.constants[name]


@dataclass(frozen=True)
class Ran:
    """What training did: optimiser steps, the learning rate it used, the trace at its end."""

    steps: int
    lr: float
    trace: Tensors


class Step(Protocol):
    """One batch under training, as an objective sees it; a forward pass is made when first asked
    for.
    """

    x: Tensor  # (B, channels, H, W) float
    y: Tensor  # (B,) int64
    index: Tensor  # (B,) int64, positions in the site's data
    mask: Tensor  # (B,) float, 1 for real examples and 0 for padding
    params: Tensors  # the parameters in training, for penalties

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""

    def logits(self, raw: bool = False) -> Tensor:
        """The student's logits (B, C); -1e4 for outputs that take no part in training, unless
        ``raw``.
        """

    def features(self) -> Tensor:
        """The student's penultimate features (B, D)."""

    def head(self, features: Tensor) -> Tensor:
        """The student's logits (B, C) of given features (B, D)."""

    def part(self, name: str) -> Tensor:
        """The logits (B, C) of a network of a ``pair``; as ``logits`` for outputs that take no
        part.
        """

    def levels(self) -> Sequence[str]:
        """The levels of the network, where ``through`` can go over from the student to a
        teacher.
        """

    def through(self, teacher: str, level: str) -> Tensor:
        """A frozen teacher's logits (B, C) of what the student has at a level, with gradient to
        that.

        They are -1e4 for outputs that take no part in training, as those of ``logits``.
        Ask for it before ``logits``: the student's pass is then made once.
        """

    def slim(self, share: float) -> tuple[Tensor, Ends, Ends]:
        """The student's logits (B, C), and what enters and leaves its slimmable stage: whole, and
        at a share of it.
        """

    def teacher(self, name: str, raw: bool = False) -> Tensor:
        """A teacher's logits (B, C), without gradient; as ``logits`` for outputs that take no
        part.
        """

    def teacher_features(self, name: str) -> Tensor:
        """A teacher's penultimate features (B, D), without gradient."""

    def on(self, logits: Tensor) -> Tensor:
        """Logits (B, C) that a method made itself: -1e4 for outputs that take no part, the others
        as they are.
        """

    def mean(self, values: Tensor) -> Tensor:
        """The mean () of values (B,) over real examples."""

    def share(self, raw: Tensor) -> Tensor:
        """Raw weights (B,) >= 0 divided by their sum over real examples: (B,)."""
