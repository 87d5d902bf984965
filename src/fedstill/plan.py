"""Plan: how a stage trains, and the learning rate of each round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from fedstill.errors import ConfigError
from fedstill.fields import (
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    PositiveShare,
    Share,
    check_ranges,
)


@dataclass(frozen=True)
class Plan:
    """How a stage trains: length, batches, optimiser; what a config's ``[plan.STAGE]`` overrides.

    0 epochs and 0 steps train nothing. ``norm`` "frozen" keeps normalisation layers in evaluation
    mode. The examples of ``validation`` are for ``score``; ``patience`` and ``keep = "best"`` need
    them.
    """

    epochs: CountOrZero = 5
    """Passes over the client's data."""
    steps: CountOrZero = 0
    """How many batches a visit has; 0: as many as the epochs need."""
    batch: Count = 50
    """Examples in a batch."""
    shuffle: bool = True
    """Whether the order of the examples is drawn again in every epoch."""
    optimiser: Literal["sgd", "adam"] = "sgd"
    """Which optimiser takes the steps."""
    lr: Positive = 0.01
    """Learning rate of the first round."""
    lr_decay: PositiveShare = 1.0
    """What the learning rate is multiplied by after every round."""
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Momentum of SGD."""
    weight_decay: NonNegative = 0.0
    """Weight of the L2 penalty on the parameters."""
    clip_norm: NonNegative = 0.0
    """The largest norm of a gradient; larger ones are scaled down; 0: none are."""
    norm: Literal["batch", "frozen"] = "batch"
    """Whether normalisation layers use the statistics of the batch, or stay as they were
    received.
    """
    validation: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """The share of the client's data that is held out to score models in training."""
    patience: CountOrZero = 0
    """Epochs without a better score after which training stops; 0: it never stops early."""
    keep: Literal["last", "best"] = "last"
    """Which model a visit ends with: that of the last epoch, or of the best score; the last, too,
    of a client with too few examples to hold one out, and of the server.
    """
    lr_schedule: Literal["constant", "step", "cosine"] = "constant"
    """How the learning rate changes from round to round: only by lr_decay, by it in steps, or as
    half a cosine.
    """
    lr_step: Count = 1
    """After how many rounds each lr_decay comes, with lr_schedule = "step"."""
    lr_end: Share = 0.0
    """The share of lr that the cosine comes down to when its rounds are over."""
    lr_warmup: CountOrZero = 0
    """Rounds in which the learning rate rises in equal steps, before the first one with lr
    itself.
    """
    lr_rounds: CountOrZero = 0
    """Rounds after which the cosine, its warm-up included, has come down; 0: those of the run."""

    def __post_init__(self) -> None:
        check_ranges(self)

    def batches_per_epoch(self, examples: int, joined: bool = False) -> int:
        """How many batches an epoch has; ``joined``: without a last one of a single example.

        >>> Plan(batch=20).batches_per_epoch(41), Plan(batch=20).batches_per_epoch(41, joined=True)
        (3, 2)
        """
        return -(-examples // self.batch) - joined

    def leaves_one_over(self, examples: int) -> bool:
        """Whether training comes to a last batch of a single example behind others in its epoch."""
        ends_with_one = 1 < self.batch < examples and examples % self.batch == 1
        is_reached = self.steps == 0 or self.steps >= self.batches_per_epoch(examples)
        return ends_with_one and is_reached

    def lr_at(self, round: int) -> float:
        """The learning rate of a round (1 is the first): nothing is remembered, so a resumed run
        has the same.

        With W = ``lr_warmup``, T = ``lr_rounds`` and t = round - 1 - W, the rounds since the
        warm-up: lr (round / (W + 1)) while t < 0; then lr lr_decay^t ("constant"), lr
        lr_decay^floor(t / lr_step) ("step"), or lr (e + (1 - e) (1 + cos(pi t / (T - W))) / 2) with
        e = ``lr_end`` ("cosine", without ``lr_decay``).
        Source: Loshchilov & Hutter, "SGDR" (2017), equation 5, without restarts; Goyal et al.,
        "Accurate, Large Minibatch SGD" (2017), section 2.2, for the warm-up.
        Reading: t = 0 is the first round with lr itself, and the end of the cosine is the round
        after the last: no round trains with a rate of 0. Rounds beyond the last have the last
        one's. Raises ConfigError for "cosine" without a round after the warm-up.
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
        times = since // self.lr_step if self.lr_schedule == "step" else since
        return float(self.lr * self.lr_decay**times)
