"""The stages of a round, and the plans by which they train.

This module does not import torch, so that readers of runs start quickly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval, Len

from fedstill.core.errors import ConfigError
from fedstill.core.fields import (
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    PositiveShare,
    Share,
    check_ranges,
)

SERVER = -1
"""The client id of the server. Its data are the public set."""


@dataclass(frozen=True)
class Stage:
    """One step of a round: its name, the clients that act in it, and whether they use their private
    data or public data.
    """

    round: int
    index: int
    name: str
    clients: tuple[int, ...]
    view: Literal["private", "public"] = "private"
    sequential: bool = False  # part of a chain: one client acts, and a failed client is skipped


@dataclass(frozen=True)
class Plan:
    """How a stage trains: length, batches and optimiser. ``[plan.STAGE]`` sets the values of one
    stage. Most methods have other defaults, which ``fedstill list method NAME`` prints.

    With 0 epochs and 0 steps, nothing is trained. ``norm = "frozen"`` keeps normalisation layers in
    evaluation mode. ``patience`` and ``keep = "best"`` need ``validation``: the score
    (``ClientWork.validation_score``) is computed on the held-out examples.
    """

    epochs: CountOrZero = 5
    """The number of passes over the client's data."""
    steps: CountOrZero = 0
    """The number of batches in a stage. 0: as many as the epochs contain."""
    batch: Count = 50
    """The number of examples in a batch."""
    shuffle: bool = True
    """Whether examples are shuffled in every epoch."""
    optimiser: Literal["sgd", "adam"] = "sgd"
    """The optimiser."""
    lr: Positive = 0.01
    """The learning rate of the first round."""
    lr_decay: PositiveShare = 1.0
    """The factor by which the learning rate is multiplied after every round."""
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """The momentum of SGD."""
    weight_decay: NonNegative = 0.0
    """The weight of the L2 penalty on the parameters."""
    clip_norm: NonNegative = 0.0
    """The norm to which gradients are clipped. 0: no clipping."""
    norm: Literal["batch", "frozen"] = "batch"
    """Whether normalisation layers use the statistics of the batch, or keep the received
    statistics.
    """
    validation: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """The share of a client's data that is held out for validation."""
    patience: CountOrZero = 0
    """The number of epochs without improvement after which a client stops. 0: no early stopping."""
    keep: Literal["last", "best"] = "last"
    """Which model a client returns: that of the last epoch, or of the best epoch on held-out
    examples. The server, and clients with too few examples to hold one out, return the last.
    """
    lr_schedule: Literal["constant", "step", "cosine"] = "constant"
    """The schedule of the learning rate over rounds: lr_decay in every round, lr_decay in steps, or
    half a cosine.
    """
    lr_step: Count = 1
    """The number of rounds between two multiplications by lr_decay, with lr_schedule = "step"."""
    lr_end: Share = 0.0
    """The share of lr at which the cosine ends."""
    lr_warmup: CountOrZero = 0
    """The number of warm-up rounds, in which the learning rate rises in equal steps up to lr."""
    lr_rounds: CountOrZero = 0
    """The number of rounds of the cosine, including its warm-up. 0: all rounds of the run."""
    class_weights: (
        Literal["none", "balanced", "balanced_overall"]
        | Annotated[tuple[NonNegative, ...], Len(2, 1_000_000)]
    ) = "none"
    """The weights of classes in losses on labels: equal, balanced by the labels of each client or
    of all clients, or one weight per class.
    """

    def __post_init__(self) -> None:
        check_ranges(self)

    def batches_per_epoch(self, examples: int, joined: bool = False) -> int:
        """The number of batches in an epoch. joined: whether a single left-over example joins the
        previous batch.

        >>> Plan(batch=20).batches_per_epoch(41), Plan(batch=20).batches_per_epoch(41, joined=True)
        (3, 2)
        """
        return -(-examples // self.batch) - joined

    def leaves_one_over(self, examples: int) -> bool:
        """Whether training reaches the last batch of an epoch, and it has one example while the
        others have more.
        """
        ends_with_one = 1 < self.batch < examples and examples % self.batch == 1
        is_reached = self.steps == 0 or self.steps >= self.batches_per_epoch(examples)
        return ends_with_one and is_reached

    def lr_at(self, round: int) -> float:
        """The learning rate of a round; the first round is 1. A resumed run has the same rates.

        With W = ``lr_warmup``, T = ``lr_rounds`` and t = round - 1 - W, the rounds since the
        warm-up: lr (round / (W + 1)) while t < 0; then lr lr_decay^t ("constant"), lr
        lr_decay^floor(t / lr_step) ("step"), or lr (e + (1 - e) (1 + cos(pi t / (T - W))) / 2) with
        e = ``lr_end`` ("cosine", without ``lr_decay``).
        Source: Loshchilov & Hutter, "SGDR" (2017), equation 5, without restarts; Goyal et al.,
        "Accurate, Large Minibatch SGD" (2017), section 2.2, for the warm-up.
        Reading: t = 0 is the first round with lr itself, and the end of the cosine is the round
        after the last: no round trains with a rate of 0. Rounds beyond the last have its rate.
        Raises ConfigError for "cosine" without a round after the warm-up.
        """
        since = max(round, 1) - 1 - self.lr_warmup
        if since < 0:
            return float(self.lr * (max(round, 1) / (self.lr_warmup + 1)))
        if self.lr_schedule == "cosine":
            length = self.lr_rounds - self.lr_warmup
            if length < 1:
                raise ConfigError(
                    f"plan: lr_rounds = {self.lr_rounds} and lr_warmup = {self.lr_warmup} leave "
                    "the cosine no round"
                )
            share = (1 + math.cos(math.pi * min(since, length - 1) / length)) / 2
            return float(self.lr * (self.lr_end + (1 - self.lr_end) * share))
        decays = since
        if self.lr_schedule == "step":
            decays = since // self.lr_step
        return float(self.lr * self.lr_decay**decays)


NO_TRAINING = Plan(epochs=0)
"""The plan of a stage in which nothing is trained."""
