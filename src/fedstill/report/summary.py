"""The table of a comparison: a line for each group of runs, a column for each number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill import manifest
from fedstill.metrics.classification import ACCURACY, METRICS, Metric
from fedstill.running.result import Refusals
from fedstill.running.runs import Group, Run, Spread

# The columns.


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
    larger_is_better: bool = True


def _metric_column(metric: Metric, prefix: str, title: str, description: str) -> Column:
    """A column for a metric that a run may record. ``prefix``: of its key."""
    return Column(
        key=f"{prefix}{metric.name}",
        title=title,
        unit=metric.unit,
        scale=metric.scale,
        digits=metric.digits,
        says=description,
        larger_is_better=metric.larger_is_better,
    )


def _last_metric(metric: Metric) -> Column:
    """The column of a metric after the last round."""
    formula = f"{metric.description[:1].lower()}{metric.description[1:]}"
    description = f"{formula}; of the server's model after the last round"
    return _metric_column(metric, "", metric.title, description)


def _best_metric(metric: Metric) -> Column:
    """The column of a metric in its best round."""
    description = f"the best {metric.title} of any round"
    return _metric_column(metric, "best_", f"{metric.title}, best", description)


def _own_test_metric(metric: Metric) -> Column:
    """The column of a metric on the clients' own test sets."""
    description = (
        f"{metric.title} of each client's answer on the client's own test set; mean over clients"
    )
    return _metric_column(metric, "own_test_", f"{metric.title}, own tests", description)


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
        "best_round_accuracy",
        "selected round",
        "%",
        100,
        2,
        "top-1 accuracy of the round that select_on has selected as the best one",
    ),
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
    *map(_last_metric, METRICS.values()),
    *map(_best_metric, METRICS.values()),
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
    *map(_own_test_metric, METRICS.values()),
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


# The order of a comparison's lines: as asked for, or best first where some methods leave each
# client its own model.


BY = ("own_test_accuracy", "personal_accuracy")
"""What such methods are ranked by: accuracy on the clients' own tests, or else on test examples in
their own mix.
"""


def best_first(compared: Sequence[Group]) -> tuple[list[Group], Column | None]:
    """The groups in the order of their lines, and the number by which they are ranked; None where
    they are as asked.

    They are ranked by the metric that all of their configs name in ``rank_by``. Groups of which
    nobody has that number come last. Equal ones stay in the order asked for.
    """
    column = _ranking_column(compared) or _own_models_column(compared)
    if column is None:
        return list(compared), None
    sign = 1 if column.larger_is_better else -1

    def score(group: Group) -> float:
        value = group.mean_spread(column.key)
        return sign * value.mean if value else float("-inf")

    return sorted(compared, key=score, reverse=True), column


def _ranking_column(compared: Sequence[Group]) -> Column | None:
    """The number of the metric ``rank_by``: on clients' own tests if some of their answers are
    models of their own; None for accuracy, and if the groups name several metrics.
    """
    names = {str(group.settings.get("rank_by", ACCURACY)) for group in compared}
    if len(names) != 1 or ACCURACY in names:
        return None
    (name,) = names
    keys = [name, f"own_test_{name}"]
    if any(group.own_models for group in compared):
        keys.reverse()
    return _first_measured(keys, compared)


def _own_models_column(compared: Sequence[Group]) -> Column | None:
    """The number by which methods are ranked that leave each client a model of its own; None if no
    method does.
    """
    if not any(group.own_models for group in compared):
        return None
    return _first_measured(BY, compared)


def _first_measured(keys: Sequence[str], compared: Sequence[Group]) -> Column | None:
    """The column of the first key that some group has."""
    by_key = {column.key: column for column in COLUMNS}
    for key in keys:
        if key in by_key and any(group.values(key) for group in compared):
            return by_key[key]
    return None


def said_of_order(column: Column | None) -> str:
    """How the lines are ordered, in a sentence; empty where they are as asked for."""
    if column is None:
        return ""
    if column.key not in BY:
        direction = "highest first" if column.larger_is_better else "lowest first"
        return f'Lines are ranked by "{column.title}", {direction}.'
    why = "Some of these methods give clients different models, so lines are ranked by"
    return f'{why} "{column.title}": {column.says}.'


# The table of a comparison: a line for each group of runs, a column for each number that was
# measured.


NONE = "–"


@dataclass(frozen=True)
class Row:
    """A line of the table: a group, its number of seeds, and each number over them; None where
    nothing was measured.

    ``columns``: those that any line may have.
    """

    label: str
    seeds: str
    note: str
    values: dict[str, Spread | None]
    columns: Sequence[Column] = COLUMNS

    def text(self, column: Column) -> str:
        """The cell of a column."""
        value = self.values[column.key]
        return NONE if value is None else value.text(column.scale, column.digits)


def rows(groups: Sequence[Group]) -> list[Row]:
    """The table: one line a group."""
    possible = [*COLUMNS, *own_columns(groups)]
    return [
        Row(
            label=group.label,
            seeds=group.counted,
            note=rounds_note(group),
            values={column.key: group.mean_spread(column.key) for column in possible},
            columns=possible,
        )
        for group in groups
    ]


def own_metrics(groups: Sequence[Group]) -> list[str]:
    """The metrics that measures of the user's own gave in some run."""
    runs = [run for group in groups for run in group.started]
    return list(dict.fromkeys(metric for run in runs for metric in run.own_metrics))


def own_columns(groups: Sequence[Group]) -> list[Column]:
    """A column for each number that measures of the user's own gave: the latest of each run."""
    columns = []
    for metric in own_metrics(groups):
        spreads = [group.mean_spread(metric) for group in groups]
        largest = max(abs(spread.mean) for spread in spreads if spread is not None)
        columns.append(
            Column(
                key=metric,
                title=metric,
                unit="latest",
                scale=1,
                digits=_three_digits_of(largest),
                says="the latest number of your measure",
            )
        )
    return columns


def _three_digits_of(value: float) -> int:
    """The decimals with which a number shows three digits that count, 6 at most."""
    if value == 0:
        return 0
    return min(6, max(0, 2 - math.floor(math.log10(value))))


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns that at least one line has; what clients have of a run only where some have
    models of their own.
    """
    possible = rows[0].columns if rows else COLUMNS
    there = [m for m in possible if any(r.values[m.key] is not None for r in rows)]
    own = any(r.values["personal_forgetting"] is not None for r in rows)
    first = [
        *(m for m in there if own and m.key.startswith("own_test_")),
        *(PERSONAL if own else ()),
    ]
    return [*first, *(m for m in there if m not in (*first, *PERSONAL))]


def rounds_note(group: Group) -> str:
    """Which runs of a group have fewer rounds than they were asked for, and why."""
    unfinished = [run for run in group.runs if not run.finished]
    stopped = [run for run in group.runs if run.finished and run.stop_reason]
    notes = []
    if unfinished:
        notes.append(f"{_share_of(group, unfinished)}unfinished, at {_reached(unfinished)}")
    if stopped:
        notes.append(f"{_share_of(group, stopped)}stopped early, in {_reached(stopped)}")
    return "; ".join(notes)


def _share_of(group: Group, runs: Sequence[Run]) -> str:
    return "" if len(group.runs) == 1 else f"{len(runs)} of {len(group.runs)} runs "


def _reached(runs: Sequence[Run]) -> str:
    """The rounds that runs have reached, of those that they were asked for."""
    reached = [run.rounds[-1]["round"] if run.rounds else 0 for run in runs]
    first, last = min(reached), max(reached)
    rounds = f"{first}" if first == last else f"{first}–{last}"
    return f"round {rounds} of {runs[0].asked}"


# What packages add below the table of a comparison.


def package_notes(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """The sentences of outer packages on runs, by what the runs are called."""
    notes = []
    for part in manifest.comparison_notes():
        note_on = part.load()
        notes.append(note_on(runs))
    return [note for note in notes if note]


# Refused replies, said beside the numbers: a table without them would look as usual


def refused(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """A sentence for each name of which a run has refusals: those of its first such run, and which
    other runs have some.
    """
    sentences = []
    for name, named_runs in runs.items():
        texts = {run.seed: refusals_of(run).sentence for run in named_runs}
        texts = {seed: text for seed, text in texts.items() if text}
        if texts:
            several = len(named_runs) > 1
            sentences.append(f"{name}{_refused_by_seed(texts, several)}")
    return sentences


def refusals_of(run: Run) -> Refusals:
    """What was refused in a run, finished or not."""
    return Refusals.of(run.clients, int(run.settings.get("topology.clients", 0)), len(run.rounds))


def _refused_by_seed(texts: Mapping[int, str], several: bool) -> str:
    """The refusals of the first seed, and the seeds that have some."""
    seed, text = next(iter(texts.items()))
    sentence = f": {text}"
    if several:
        sentence = f", seed {seed}: {text}"
    if len(texts) > 1:
        sentence += f"; seeds with refusals: {', '.join(map(str, texts))}"
    return sentence
