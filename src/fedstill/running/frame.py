"""Runs as pandas frames: all numbers of many runs in one long frame, which is
``fedstill.load_runs``, and the rounds and clients of one run in two wide ones.

The long frame is built column by column from the arrays of ``running.numbers``. Runs are read one
after another and only the chosen numbers are kept, so that hundreds of runs fit in memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import UnknownName
from fedstill.core.files import named_path
from fedstill.metrics.accuracy import Values
from fedstill.running.journal import Event, without_garbage_collection
from fedstill.running.numbers import BY_CLASS, OF_USER_MEASURES, Numbers, is_chosen
from fedstill.running.runs import Run, RunFolder, label_runs, read_run, run_folders

if TYPE_CHECKING:
    import pandas

SUMMARY = "summary"
"""Metrics below this name describe a whole run."""

INDEX_TYPES = {
    "stage": np.int32,
    "round": np.int32,
    "epoch": np.int16,
    "task": np.int16,
    "client": np.int32,
    "point": np.int32,
}
"""The axes that have numbers in the frame, and their types."""


def load_runs(
    paths: Path | str | Sequence[Path | str], metrics: Collection[str] | str | None = None
) -> pandas.DataFrame:
    """Load the numbers of runs as one long table, with a row for each number.

    ``paths``: directories of runs or comparisons, or packs of them (``NAME.runs.tar.xz``). The runs
    may be unfinished. ``metrics``: the metrics to load; all by default. The name ``loss`` also
    stands for all names below it, such as ``loss/ce``.

    The columns are ``run`` (its path), ``group`` (a label of the settings in which runs differ),
    ``seed``, ``stage``, ``round`` (0: before training), ``epoch``, ``task`` (from 1), ``client``
    (-1: the server), ``class``, ``point``, ``metric`` and ``value``. A number about the whole
    federation has no client, one about the whole round no stage, and one about the whole run
    (``summary/accuracy``) no round. Only curves and surfaces have points, from 0. Values that were
    not measured have no row. Accuracies and forgetting are shares in [0, 1], times are in seconds.
    The page "Use the model" lists the metrics.

    Raises ConfigError for a path without runs, CorruptFile for a damaged run, UnknownName for a
    metric that none of the runs has.
    """
    if isinstance(paths, str) or not isinstance(paths, Iterable):
        paths = [paths]
    if isinstance(metrics, str):
        metrics = [metrics]
    elif metrics is not None:
        metrics = list(metrics)  # a generator can be read only once
    folders = run_folders([named_path(path) for path in paths])
    with without_garbage_collection():
        runs = [_loaded(read_run(folder.path, folder.display_path), metrics) for folder in folders]
    for metric in metrics or ():
        if not any(is_chosen(c.metric, [metric]) for run in runs for c in run.numbers):
            _check_metric(metric, folders)
    return _frame(runs)


# ---- runs, one after another ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A run without its events: the numbers of the chosen metrics, and their labels."""

    name: str
    seed: int
    settings: Mapping[str, Any]
    start: Event
    classes: Sequence[str]
    numbers: Sequence[Numbers]


def _loaded(run: Run, metrics: Collection[str] | None) -> LoadedRun:
    return LoadedRun(
        name=str(run.display_path),
        seed=run.seed,
        settings=run.settings,
        start=run.start,
        classes=run.classes,
        numbers=[*run.numbers.columns(metrics), *_summary(run, metrics)],
    )


def _summary(run: Run, metrics: Collection[str] | None = None) -> list[Numbers]:
    """The numbers about the whole run."""
    if metrics is not None and not any(metric.startswith(SUMMARY) for metric in metrics):
        return []
    numbers = {f"{SUMMARY}/{name}": value for name, value in run.numbers.summary.items()}
    return [
        Numbers(name, np.array([value]), {})
        for name, value in numbers.items()
        if is_chosen(name, metrics)
    ]


def _check_metric(name: str, folders: Sequence[RunFolder]) -> None:
    """Raise UnknownName for a metric that no run has, unless no run has finished a round."""
    metrics: dict[str, None] = {}
    for folder in folders:
        run = read_run(folder.path, folder.display_path)
        metrics.update((c.metric, None) for c in (*run.numbers.columns(), *_summary(run)))
    if metrics and not any(is_chosen(metric, [name]) for metric in metrics):
        raise UnknownName("metric", name, metrics, place="load_runs")


# ---- the columns of all runs ---------------------------------------------------------------------


def _frame(runs: Sequence[LoadedRun]) -> pandas.DataFrame:
    import pandas

    labels = {run.name: members.label for members in label_runs(runs) for run in members.runs}
    blocks = _Blocks([_Block(run, column) for run in runs for column in run.numbers])
    columns = {
        "run": blocks.category([block.run.name for block in blocks.blocks]),
        "group": blocks.category([labels[block.run.name] for block in blocks.blocks]),
        "seed": blocks.repeated([block.run.seed for block in blocks.blocks], np.int64),
        "stage": blocks.indices("stage"),
        "round": blocks.indices("round"),
        "epoch": blocks.indices("epoch"),
        "task": blocks.indices("task"),
        "client": blocks.indices("client"),
        "class": blocks.classes(),
        "point": blocks.indices("point"),
        "metric": blocks.category([block.numbers.metric for block in blocks.blocks]),
        "value": blocks.values(),
    }
    return pandas.DataFrame(columns, copy=False)


@dataclass(frozen=True)
class _Block:
    """Consecutive rows of the frame: the numbers of one metric of one run."""

    run: LoadedRun
    numbers: Numbers


class _Blocks:
    """Makes the columns of the frame from its blocks of rows."""

    def __init__(self, blocks: Sequence[_Block]) -> None:
        self.blocks = blocks
        self._lengths = np.array([len(block.numbers.values) for block in blocks], np.int64)
        self._ends = np.cumsum(self._lengths)
        self._rows = int(self._lengths.sum())

    def values(self) -> Values:
        """The numbers, (rows,)."""
        values = np.empty(self._rows)
        for rows, block in self._slices():
            values[rows] = block.numbers.values
        return values

    def repeated(self, values: Sequence[int], kind: Any) -> NDArray[Any]:
        """A column (rows,) whose values are the same in all rows of a block: one value a block."""
        return np.repeat(np.array(values, kind), self._lengths)

    def category(self, names: Sequence[str]) -> pandas.Categorical:
        """A column of texts that are the same in all rows of a block."""
        import pandas

        codes_by_name = {name: code for code, name in enumerate(dict.fromkeys(names))}
        codes = self.repeated([codes_by_name[name] for name in names], _code_type(codes_by_name))
        return pandas.Categorical.from_codes(codes, list(codes_by_name))

    def indices(self, axis: str) -> pandas.arrays.IntegerArray:
        """The indices of the numbers on an axis; missing for numbers without this axis."""
        import pandas

        indices = np.zeros(self._rows, INDEX_TYPES[axis])
        missing = np.ones(self._rows, np.bool_)
        for rows, block in self._slices():
            if axis in block.numbers.coordinates:
                indices[rows] = block.numbers.coordinates[axis]
                missing[rows] = False
        return pandas.arrays.IntegerArray(indices, missing)

    def classes(self) -> pandas.Categorical:
        """The names of the classes that the numbers are about."""
        import pandas

        names = dict.fromkeys(name for block in self.blocks for name in block.run.classes)
        codes_by_name = {name: code for code, name in enumerate(names)}
        codes = np.full(self._rows, -1, _code_type(codes_by_name))
        for rows, block in self._slices():
            if "class" in block.numbers.coordinates:
                run_codes = np.array([codes_by_name[name] for name in block.run.classes])
                codes[rows] = run_codes[block.numbers.coordinates["class"]]
        return pandas.Categorical.from_codes(codes, list(codes_by_name))

    def _slices(self) -> Iterator[tuple[slice, _Block]]:
        for start, length, block in zip(
            self._ends - self._lengths, self._lengths, self.blocks, strict=True
        ):
            yield slice(start, start + length), block


def _code_type(names: Collection[str]) -> Any:
    """The smallest type of a category's codes."""
    return np.min_scalar_type(-len(names) - 1)


# ---- events as a wide table ----------------------------------------------------------------------


IDS = ("query", "teachers")
"""Fields that list classes or clients, and have one cell of text, such as ``7, 9``."""

NOT_CELLS = frozenset({"event", OF_USER_MEASURES})
"""Fields of an event that have no column."""

CLASS_FIELDS = BY_CLASS | {"correct_by_epoch"}
"""Fields whose columns end with the names of the classes."""


def data_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Rows as a data frame. A cell is missing if its row does not have the column."""
    import pandas

    columns = list(dict.fromkeys(k for row in rows for k in row))
    return pandas.DataFrame([dict(row) for row in rows], columns=columns)


def frame_of_events(events: Sequence[Event], classes: Sequence[str]) -> pandas.DataFrame:
    """Events of one kind as a table: a row for each event, a column for each number.

    Nested names are joined by dots. classes: the names of the classes, for the columns of numbers
    by class.
    """
    fields = [{k: v for k, v in event.items() if k not in NOT_CELLS} for event in events]
    return data_frame([dict(_flat("", event, classes)) for event in fields])


def frame_of_clients(events: Sequence[Event], classes: Sequence[str]) -> pandas.DataFrame:
    """Events of clients as a table. ``refused`` is empty for an accepted reply; ``idle`` marks a
    client without work.
    """
    complete_events = [
        {**e, "refused": e.get("refused", ""), "idle": e.get("idle", False)} for e in events
    ]
    return frame_of_events(complete_events, classes)


def _flat(name: str, value: Any, classes: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The cells of a value, as pairs of a column and a number, text or bool. None becomes NaN.

    >>> dict(_flat("", {"loss": {"ce": 0.5}, "label_counts": [1, 2]}, ["cat", "dog"]))
    {'loss.ce': 0.5, 'label_counts.cat': 1, 'label_counts.dog': 2}
    """
    if isinstance(value, Mapping):
        prefix = ""
        if name:
            prefix = f"{name}."
        for key, inner in value.items():
            yield from _flat(f"{prefix}{key}", inner, classes)
    elif isinstance(value, (list, tuple)) and name.rpartition(".")[2] in IDS:
        yield name, ", ".join(map(str, value))
    elif isinstance(value, (list, tuple)):
        for key, inner in zip(_keys(name, value, classes), value, strict=True):
            yield from _flat(f"{name}.{key}", inner, classes)
    elif value is None:
        yield name, math.nan
    else:
        yield name, value


def _keys(name: str, values: Sequence[Any], classes: Sequence[str]) -> Sequence[Any]:
    """The names of a list's entries: their clients, their classes, or else their positions."""
    if values and all(isinstance(v, Mapping) and "client" in v for v in values):
        return [v["client"] for v in values]
    is_nested = any(isinstance(v, (Mapping, list, tuple)) for v in values)
    is_by_class = len(values) == len(classes) and not CLASS_FIELDS.isdisjoint(name.split("."))
    if is_by_class and not is_nested:
        return classes
    return range(len(values))
