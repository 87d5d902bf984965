"""How a stage trains, as a record: the settings of a paper, or of a config's ``[plan.STAGE]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from fedstill.fields import Count, CountOrZero, NonNegative, Positive, PositiveShare, check_ranges


@dataclass(frozen=True)
class Plan:
    """How a stage trains: length, batches, optimiser; what a config's ``[plan.STAGE]`` overrides.

    0 epochs and 0 steps train nothing. ``norm`` "frozen" keeps normalisation layers in evaluation mode. The examples
    of ``validation`` are for ``score``; ``patience`` and ``keep = "best"`` need them.
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
    """Whether normalisation layers use the statistics of the batch, or stay as they were received."""
    validation: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """The share of the client's data that is held out to score models in training."""
    patience: CountOrZero = 0
    """Epochs without a better score after which training stops; 0: it never stops early."""
    keep: Literal["last", "best"] = "last"
    """Which model a visit ends with: that of the last epoch, or of the best score."""

    def __post_init__(self) -> None:
        check_ranges(self)

    def lr_at(self, round: int) -> float:
        """The learning rate of a round (1 is the first)."""
        return float(self.lr * self.lr_decay ** max(round - 1, 0))
