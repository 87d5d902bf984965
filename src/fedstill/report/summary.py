"""The table of a comparison: one line per group of runs, one column per number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill import manifest
from fedstill.metrics.classification import ACCURACY, METRICS, Metric
from fedstill.running.result import Refusals
from fedstill.running.runs import UNSET, Group, Run, Spread, differing, value_text

# ---- columns -------------------------------------------------------------------------------------


NONE = "–"
"""The cell of a number that was not measured."""


def share_text(value: Spread | None) -> str:
    """A share in percent, with one decimal."""
    if value is None:
        return NONE
    return value.text(100, 1)


@dataclass(frozen=True)
class Column:
    """A column of the table.

    key: as in a run's summary. scale: the factor for its values. digits: the decimals.
    """

    key: str
    title: str
    unit: str
    scale: float
    digits: int
    description: str
    larger_is_better: bool = True

    def text(self, value: Spread | None, digits: int | None = None) -> str:
        """The text of a cell. ``digits``: the decimals; by default, those of the column."""
        if value is None:
            return NONE
        if digits is None:
            digits = self.digits
        return value.text(self.scale, digits)


def _metric_column(metric: Metric, prefix: str, title: str, description: str) -> Column:
    """A column for a metric that a run may record. ``prefix``: the prefix of its key."""
    return Column(
        key=f"{prefix}{metric.name}",
        title=title,
        unit=metric.unit,
        scale=metric.scale,
        digits=metric.digits,
        description=description,
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


def _share(key: str, title: str, description: str) -> Column:
    """A column for a share, shown in percent."""
    return Column(key=key, title=title, unit="%", scale=100, digits=2, description=description)


PERSONAL = (
    _share(
        "personal_accuracy",
        "for the clients",
        "accuracy of each client's model, or else the server's, on test examples with the classes "
        "in the client's proportions; mean over clients",
    ),
    _share(
        "personal_forgetting",
        "forgetting at clients",
        "mean drop of clients' models from their best earlier accuracy on the client's classes",
    ),
)
"""The columns on personal models. They come first for methods with such models."""

COLUMNS = (
    _share(
        "accuracy",
        "accuracy, last",
        "accuracy of the server's model on the test set after the last round",
    ),
    _share("best_accuracy", "best", "the highest accuracy of any round"),
    _share(
        "best_round_accuracy",
        "selected round",
        "accuracy in the round that select_on selected as the best",
    ),
    _share("mean_accuracy_last_10", "mean of last 10", "mean accuracy of the last ten rounds"),
    _share(
        "forgetting",
        "forgetting F",
        "mean drop of the classes from their best earlier round; negative: better than in any "
        "earlier round",
    ),
    *map(_last_metric, METRICS.values()),
    *map(_best_metric, METRICS.values()),
    _share(
        "query_average_accuracy",
        "query average",
        "mean over the client's classes, weighted by their shares, and the queried classes, "
        "weighted by 1",
    ),
    _share(
        "query_gain",
        "gain",
        "accuracy gained on the queried classes, compared with the client alone",
    ),
    _share(
        "query_forgetting",
        "loss",
        "change of accuracy on the client's own classes, compared with the client alone; negative: "
        "forgotten",
    ),
    _share(
        "query_uniform_accuracy",
        "uniform",
        "mean over the client's classes and the queried classes, equally weighted",
    ),
    _share("query_average_accuracy_before", "alone", "average accuracy of the client alone"),
    *PERSONAL,
    _share(
        "own_test_accuracy",
        "own tests",
        "accuracy of each client's model, or else the server's, on the client's own test set; mean "
        "over clients",
    ),
    _share(
        "own_test_worst", "own tests, worst", "the same for the client with the lowest accuracy"
    ),
    _share(
        "own_test_weighted",
        "own tests, weighted",
        "accuracy on the test examples of all sites together: each site counts by its number of "
        "examples",
    ),
    *map(_own_test_metric, METRICS.values()),
    _share(
        "in_local_accuracy", "in-local", "local models on classes in their client's proportions"
    ),
    _share(
        "out_local_accuracy",
        "out-local",
        "local models on classes of which their client has few examples or none",
    ),
    _share(
        "leakage/seen/loss/auc",
        "leakage: AUC",
        "how well an attack by the loss finds training examples from what clients sent; 50: "
        "random guessing",
    ),
    _share(
        "leakage/seen/loss/tpr_at_0.01",
        "TPR at 1 % FPR",
        "training examples that the attack finds at a false positive rate of 1 %",
    ),
    Column(
        key="epsilon",
        title="epsilon",
        unit="largest",
        scale=1,
        digits=2,
        description="the largest privacy loss of any client",
    ),
    Column(
        key="seconds",
        title="time",
        unit="s",
        scale=1,
        digits=1,
        description="training and measuring, all rounds",
    ),
    Column(
        key="bytes_up",
        title="uploaded",
        unit="MB",
        scale=1e-06,
        digits=2,
        description="sent by clients, all rounds",
    ),
    Column(
        key="bytes_down",
        title="downloaded",
        unit="MB",
        scale=1e-06,
        digits=2,
        description="sent to clients, all rounds",
    ),
)
"""The columns in order. Accuracies and forgetting are shares, shown in percent."""

BELOW_ZERO = (
    "negative forgetting: in the last round, the classes are on average better than in any earlier "
    "round"
)
"""The note below a table with negative forgetting."""


def decimals_of(value: float) -> int:
    """The decimals that show three significant digits of a number.

    >>> [decimals_of(value) for value in (1693.2, 12.34, 0.034567, 0)]
    [0, 1, 4, 0]
    """
    if value == 0:
        return 0
    return max(0, 2 - math.floor(math.log10(abs(value))))


OVER_TIME = (
    ("final_accuracy", "final accuracy over tasks"),
    ("incremental_accuracy", "accuracy on the tasks so far, mean"),
    ("average_forgetting", "forgetting of earlier tasks"),
    ("backward_transfer", "backward transfer"),
    ("learned", "learned accuracy (best per task)"),
    ("kept", "share of learned accuracy retained"),
)
"""Keys in the summary of a run with tasks, and their titles. All are shares by task."""


def over_time(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Titles and numbers on tasks in a summary; empty for a run without tasks."""
    return [
        (title, f"{100 * summary[key]:.2f} %")
        for key, title in OVER_TIME
        if summary.get(key) is not None
    ]


# ---- order of lines ------------------------------------------------------------------------------


OWN_MODELS = ("own_test_accuracy", "personal_accuracy")
"""The keys that rank methods with personal models: accuracy on the clients' own test sets, or else
on test examples in each client's class proportions.
"""


def ranking_column(compared: Sequence[Group]) -> Column | None:
    """The column that ranks the groups; None without a ranking.

    Its metric is ``rank_by``, if all configs have the same.
    """
    return _rank_by_column(compared) or _own_models_column(compared)


def ranked(compared: Sequence[Group]) -> list[Group]:
    """The groups in the order of their lines, the best first.

    Groups without a number in the ``ranking_column`` come last. Ties keep their order.
    """
    column = ranking_column(compared)
    if column is None:
        return list(compared)
    sign = 1
    if not column.larger_is_better:
        sign = -1

    def score(group: Group) -> float:
        value = group.mean_spread(column.key)
        if value is None:
            return float("-inf")
        return sign * value.mean

    return sorted(compared, key=score, reverse=True)


def _rank_by_column(compared: Sequence[Group]) -> Column | None:
    """The column of the metric ``rank_by``, on clients' own test sets if clients have personal
    models.

    None for accuracy, and if the groups have different values of ``rank_by``.
    """
    names = {str(group.settings.get("rank_by", ACCURACY)) for group in compared}
    if len(names) != 1 or ACCURACY in names:
        return None
    (name,) = names
    keys = [name, f"own_test_{name}"]
    if any(group.has_personal_models for group in compared):
        keys.reverse()
    return _first_measured(keys, compared)


def _own_models_column(compared: Sequence[Group]) -> Column | None:
    """The column that ranks methods with a model for each client; None without such a method."""
    if not any(group.has_personal_models for group in compared):
        return None
    return _first_measured(OWN_MODELS, compared)


def _first_measured(keys: Sequence[str], compared: Sequence[Group]) -> Column | None:
    """The column of the first key that some group has."""
    by_key = {column.key: column for column in COLUMNS}
    for key in keys:
        if key in by_key and is_measured(by_key[key], compared):
            return by_key[key]
    return None


def order_note(column: Column | None) -> str:
    """A sentence about the order of the lines; empty without a ranking."""
    if column is None:
        return ""
    if column.key in OWN_MODELS:
        reason = "Some of these methods have personal models, so lines are ranked by"
        return f'{reason} "{column.title}": {column.description}.'
    direction = "highest first"
    if not column.larger_is_better:
        direction = "lowest first"
    return f'Lines are ranked by "{column.title}", {direction}.'


# ---- the columns of a comparison -----------------------------------------------------------------


def measured_columns(groups: Sequence[Group]) -> list[Column]:
    """The columns with a number of at least one group.

    If clients have personal models, the columns on clients come first. Otherwise the columns
    ``PERSONAL`` are left out.
    """
    possible = [*COLUMNS, *own_columns(groups)]
    measured = [column for column in possible if is_measured(column, groups)]
    if not any(group.values("personal_forgetting") for group in groups):
        return [column for column in measured if column not in PERSONAL]
    own_tests = [column for column in measured if column.key.startswith("own_test_")]
    first = [*own_tests, *PERSONAL]
    return [*first, *(column for column in measured if column not in first)]


def is_measured(column: Column, groups: Sequence[Group]) -> bool:
    """Whether any group has a number in a column."""
    return any(group.values(column.key) for group in groups)


def own_metrics(groups: Sequence[Group]) -> list[str]:
    """The metrics of user-defined measures in any run."""
    runs = [run for group in groups for run in group.started]
    return list(dict.fromkeys(metric for run in runs for metric in run.numbers.user_metrics))


def own_columns(groups: Sequence[Group]) -> list[Column]:
    """A column for each metric of user-defined measures, with the latest number of each run."""
    columns = []
    for metric in own_metrics(groups):
        spreads = [group.mean_spread(metric) for group in groups]
        columns.append(
            own_column(metric, [spread.mean for spread in spreads if spread is not None])
        )
    return columns


MAX_DECIMALS = 6
"""The largest number of decimals of a user-defined measure."""


def own_column(metric: str, numbers: Sequence[float]) -> Column:
    """The column of a metric of a user-defined measure, with three digits of the largest number."""
    return Column(
        key=metric,
        title=metric,
        unit="latest",
        scale=1,
        digits=min(MAX_DECIMALS, decimals_of(max(map(abs, numbers)))),
        description="the latest number of your measure",
    )


# ---- incomplete runs -----------------------------------------------------------------------------


def rounds_note(group: Group) -> str:
    """Which runs of a group have fewer rounds than configured, and why."""
    unfinished = [run for run in group.runs if not run.finished]
    stopped = [run for run in group.runs if run.finished and run.stop_reason]
    notes = []
    if unfinished:
        notes.append(f"{_share_of(group, unfinished)}unfinished, at {_reached(unfinished)}")
    if stopped:
        notes.append(f"{_share_of(group, stopped)}stopped early, in {_reached(stopped)}")
    return "; ".join(notes)


def _share_of(group: Group, runs: Sequence[Run]) -> str:
    """The number of these runs and of all runs of a group as text; empty for a single run."""
    if len(group.runs) == 1:
        return ""
    return f"{len(runs)} of {len(group.runs)} runs "


def _reached(runs: Sequence[Run]) -> str:
    """The rounds that runs have reached, and the number of rounds in their configs."""
    reached = sorted({run.numbers.last_round for run in runs})
    rounds = f"{reached[0]}"
    if len(reached) > 1:
        rounds = f"{reached[0]}–{reached[-1]}"
    return f"round {rounds} of {runs[0].planned_rounds}"


# ---- notes below the table -----------------------------------------------------------------------


def package_notes(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """The notes of outer packages. runs: the runs by the name of their group."""
    notes = []
    for part in manifest.comparison_notes():
        note_on = part.load()
        notes.append(note_on(runs))
    return [note for note in notes if note]


def refusal_sentences(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """A sentence for each group with refused replies, because these change its numbers.

    runs: the runs by the name of their group.
    """
    sentences = []
    for name, group_runs in runs.items():
        texts = {run.seed: refusals_of(run).sentence for run in group_runs}
        texts = {seed: text for seed, text in texts.items() if text}
        if texts:
            has_many_runs = len(group_runs) > 1
            sentences.append(f"{name}{_refused_by_seed(texts, has_many_runs)}")
    return sentences


def refusals_of(run: Run) -> Refusals:
    """The refused replies of a run, finished or not."""
    return Refusals.of(run.numbers, int(run.settings.get("topology.clients", 0)))


def _refused_by_seed(texts: Mapping[int, str], has_many_runs: bool) -> str:
    """The refusals of the first seed, and all seeds with refusals."""
    seed, text = next(iter(texts.items()))
    sentence = f": {text}"
    if has_many_runs:
        sentence = f", seed {seed}: {text}"
    if len(texts) > 1:
        sentence += f"; seeds with refusals: {', '.join(map(str, texts))}"
    return sentence


# ---- the settings of groups ----------------------------------------------------------------------


SCHEDULE = {"topology.kind": "topology", "rounds": "rounds"}
"""Settings with defaults that depend on the method, and their titles."""


def differing_schedule(compared: Sequence[Group]) -> dict[str, str]:
    """The settings of ``SCHEDULE`` in which groups differ, with their titles."""
    keys = differing([group.settings for group in compared])
    return {key: title for key, title in SCHEDULE.items() if key in keys}


def schedule_cells(group: Group, schedule: Iterable[str]) -> list[str]:
    """A group's values of some settings, as texts for a table."""
    return [value_text(group.settings.get(key, UNSET)) for key in schedule]


def split_text(settings: Mapping[str, Any]) -> str:
    """Describe how the data were split: the partition and its parameters, or the sites' data."""
    if settings.get("engine") == "flower" and settings.get("flower.data") == "sites":
        return "local data of the sites"
    parts = [value_text(settings.get("partition.kind", UNSET))]
    for name in ("alpha", "shards", "classes_per_client"):
        key = f"partition.{name}"
        if key in settings:
            parts.append(f"{name} {value_text(settings[key])}")
    return " ".join(parts)
