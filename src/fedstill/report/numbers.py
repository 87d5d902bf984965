"""The numbers of a table: what is reported of each run, and its mean and spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill.metrics.accuracy import best_and_recent
from fedstill.report.runs import Run


@dataclass(frozen=True)
class Column:
    """A column of the table: a key, a title, its unit, what a value is multiplied by, and the
    digits shown.
    """

    key: str
    title: str
    unit: str
    scale: float
    digits: int
    says: str


PERSONAL = (
    Column(
        "personal_accuracy",
        "for the clients",
        "%",
        100,
        2,
        "accuracy of each client's answer, its own model or else the global one, on test examples "
        "in its proportions "
        "of classes; mean over clients",
    ),
    Column(
        "personal_forgetting",
        "forgetting at clients",
        "%",
        100,
        2,
        "how far the own classes of clients with own models are below their best earlier look",
    ),
)
"""What clients have of a run; first in the table of a method that leaves each client a model of its
own.
"""

COLUMNS = (
    Column(
        "accuracy",
        "accuracy, last",
        "%",
        100,
        2,
        "top-1 accuracy of the server's model after the last round",
    ),
    Column("best_accuracy", "best", "%", 100, 2, "the highest top-1 accuracy of any round"),
    Column(
        "mean_accuracy_last_10",
        "mean of last 10",
        "%",
        100,
        2,
        "top-1 accuracy, mean of the last ten rounds",
    ),
    Column(
        "forgetting",
        "forgetting F",
        "%",
        100,
        2,
        "mean drop of the classes below their best earlier round; below 0, they are above it",
    ),
    Column(
        "query_average_accuracy",
        "asked: average",
        "%",
        100,
        2,
        "mean over own classes, weighed by share, and classes asked for, weighed by 1",
    ),
    Column(
        "query_gain",
        "gain",
        "%",
        100,
        2,
        "accuracy gained on the classes asked for, compared with the client alone",
    ),
    Column(
        "query_forgetting",
        "loss",
        "%",
        100,
        2,
        "accuracy lost on the client's own classes, compared with the client alone",
    ),
    Column(
        "query_uniform_accuracy",
        "uniform",
        "%",
        100,
        2,
        "mean over own classes and classes asked for, weighed equally",
    ),
    Column(
        "query_average_accuracy_before",
        "alone",
        "%",
        100,
        2,
        "average accuracy of the client alone",
    ),
    *PERSONAL,
    Column(
        "own_test_accuracy",
        "own tests",
        "%",
        100,
        2,
        "accuracy of each client's answer on the client's own test set; mean over clients",
    ),
    Column(
        "own_test_worst",
        "own tests, worst",
        "%",
        100,
        2,
        "the same, of the client where it is lowest",
    ),
    Column(
        "in_local_accuracy",
        "in-local",
        "%",
        100,
        2,
        "local models, on classes in their client's proportions",
    ),
    Column(
        "out_local_accuracy",
        "out-local",
        "%",
        100,
        2,
        "local models, on classes that their client lacks or has little of",
    ),
    Column(
        "leakage/seen/loss/auc",
        "leakage: AUC",
        "%",
        100,
        2,
        "how well training examples are told from what clients sent, by the loss; 50: not at all",
    ),
    Column(
        "leakage/seen/loss/tpr_at_0.01",
        "found at 1 % false",
        "%",
        100,
        2,
        "training examples found where 1 % of other images are taken for such",
    ),
    Column(
        "epsilon",
        "epsilon",
        "largest",
        1,
        2,
        "what the client with the largest has spent in privacy",
    ),
    Column("seconds", "time", "s", 1, 1, "training and measuring, all rounds"),
    Column("bytes_up", "sent up", "MB", 1e-6, 2, "sent by clients, all rounds"),
    Column("bytes_down", "sent down", "MB", 1e-6, 2, "sent to clients, all rounds"),
)
"""The columns in their order; accuracies and forgetting are shares, shown in percent."""

BELOW_ZERO = (
    "forgetting below 0: in the last round the classes are on average better than in any earlier "
    "one"
)
"""What a table says that has such a number."""


OF_CURVES = ("personal_", "own_test_", "in_local", "out_local", "query_", "leakage/")
"""How the keys begin whose numbers are the last of their curve."""


@dataclass(frozen=True)
class Spread:
    """A mean over runs and their sample standard deviation, 0 for a single run."""

    mean: float
    std: float
    runs: int

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """Mean ± spread; the mean alone if there is one run.

        >>> spread([0.1, 0.3]).text(100), spread([0.5]).text()
        ('20.00 ± 14.14', '0.50')
        """
        mean = f"{scale * self.mean:.{digits}f}"
        return mean if self.runs == 1 else f"{mean} ± {scale * self.std:.{digits}f}"


def three_digits(value: float, *others: float) -> str:
    """A number of any size with three digits that count, and other ones with as many decimals:
    never an exponent.

    >>> (
    ...     three_digits(1693.2),
    ...     three_digits(12.34),
    ...     three_digits(0.034567),
    ...     three_digits(0),
    ...     three_digits(1693.2, 1103.7),
    ... )
    ('1,693', '12.3', '0.0346', '0', '1,693 ± 1,104')
    """
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return " ± ".join(f"{v:,.{decimals}f}" for v in (value, *others))


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and sample standard deviation; None of nothing."""
    if not values:
        return None
    return Spread(
        statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values)
    )


def reported(run: Run) -> dict[str, float | None]:
    """What is reported of one run, finished or not; None for what it did not measure, all of it
    without a round.
    """
    if not run.rounds:
        return dict.fromkeys((m.key for m in COLUMNS), None)
    accuracy = [v for r, v in run.curve("accuracy").items() if r > 0]
    last = {k: run.rounds[-1].get(k) for k in ("accuracy", "forgetting")}
    local = {m.key: _last(run, m.key) for m in COLUMNS if m.key.startswith(OF_CURVES)}
    sums = {
        k: sum(e.get(k) or 0 for e in run.rounds) for k in ("seconds", "bytes_up", "bytes_down")
    }
    return {
        **last,
        **best_and_recent(accuracy),
        **local,
        **sums,
        "epsilon": _most_spent(run.rounds[-1].get("privacy")),
    }


def _most_spent(privacy: object) -> float | None:
    """The largest epsilon of a round's clients; None where nothing was protected, or nothing bounds
    it.
    """
    each = privacy.get("epsilon") if isinstance(privacy, Mapping) else None
    return max(map(float, each)) if each and None not in each else None


OVER_TIME = (
    ("final_accuracy", "over tasks: accuracy at the end"),
    ("incremental_accuracy", "accuracy on the tasks so far, mean"),
    ("average_forgetting", "forgotten of earlier tasks"),
    ("backward_transfer", "backward transfer"),
    ("learned", "learned: best of each task"),
    ("kept", "kept of what was learned"),
)
"""What a run with tasks has in its summary, and what people read of it; all are shares, by task."""


def over_time(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a summary says of tasks, as rows; none of a run without."""
    return [
        (what, f"{100 * summary[key]:.2f} %")
        for key, what in OVER_TIME
        if summary.get(key) is not None
    ]


def _last(run: Run, key: str) -> float | None:
    curve = run.curve(key)
    return curve[max(curve)] if curve else None
