"""Fine-tuning: further rounds without the forgotten data. It is the baseline, with no guarantee.

Source: a baseline of Golatkar, Achille and Soatto, "Eternal Sunshine of the Spotless Net: Selective
Forgetting in Deep Networks" (2020), section 5: it relies on catastrophic forgetting.
Reading: in a federation, the remaining clients continue with the run's method and plan. The
learning rate goes on falling. The number of rounds is an option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstill.core.fields import Count
from fedstill.running.preparation import Prepared
from fedstill.unlearning.request import UnlearningRequest
from fedstill.unlearning.strategy import (
    NewRounds,
    OriginalRun,
    StartPoint,
    Strategy,
    check_continues,
    continued,
)


@dataclass(frozen=True)
class FineTuning(Strategy):
    """Train on without the forgotten data."""

    whole_clients_only: ClassVar[bool] = False

    repair_rounds: Count = 5
    """The number of further rounds."""

    def check(self, original: OriginalRun, request: UnlearningRequest) -> None:
        """Raise IncompatibleMethod for a run that cannot go on."""
        check_continues(original, "fine_tuning")

    def rounds(self, original: OriginalRun, request: UnlearningRequest) -> NewRounds:
        """The rounds after the last one."""
        last = original.last_round
        return NewRounds(first=last + 1, last=last + self.repair_rounds)

    def start(
        self, original: OriginalRun, request: UnlearningRequest, prepared: Prepared
    ) -> StartPoint:
        """The end of the original run."""
        return continued(original, prepared)
