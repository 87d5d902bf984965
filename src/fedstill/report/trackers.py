"""Trackers: the scalars of runs' journals for other tools; TensorBoard's files, where its extra is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fedstill.errors import ConfigError
from fedstill.files import as_named
from fedstill.report.groups import group
from fedstill.report.runs import Run, find

ScalarAt = tuple[str, float, int]

PLACES = ("round", "stage", "client", "previous")
"""Numbers in a measure's event that say where it looked."""


class Tracker(Protocol):
    """Takes the scalars of one run."""

    def scalar(self, name: str, value: float, round: int) -> None:
        """A number of a round; 0 is before training."""

    def close(self) -> None:
        """No more will come; what came is written."""


class TensorBoard:
    """Writes event files for ``tensorboard --logdir``; raises ConfigError where the extra is not installed."""

    def __init__(self, folder: Path) -> None:
        try:
            module = importlib.import_module("tensorboard.summary")
        except ImportError as error:
            message = "TensorBoard is not installed; get it with: pip install 'fedstill[tensorboard]'"
            raise ConfigError(message) from error
        self._writer: Any = module.Writer(str(folder))

    def scalar(self, name: str, value: float, round: int) -> None:
        """A number of a round."""
        self._writer.add_scalar(name, value, round)

    def close(self) -> None:
        """Write what came."""
        self._writer.close()


def export_tensorboard(directories: Sequence[Path], out: Path) -> list[Path]:
    """Write the scalars of the runs in (or below) some directories as TensorBoard's, a folder a run; the folders.

    Raises ConfigError if there is no run, if ``out`` holds anything (events would be doubled) or cannot be written, or
    if TensorBoard is not installed.
    """
    return export(directories, out, TensorBoard)


def export(directories: Sequence[Path], out: Path, tracker: Callable[[Path], Tracker]) -> list[Path]:
    """Hand the scalars of each run to a tracker of its own, made for a folder under ``out``."""
    runs = find(directories)
    folders = [out / name for name in _names(runs)]
    try:
        if out.exists() and any(out.iterdir()):
            raise ConfigError(f"{out} is not empty; name a new directory, so that no event is there twice")
        for run, folder in zip(runs, folders, strict=True):
            taker = tracker(folder)
            for name, value, number in scalars(run):
                taker.scalar(name, value, number)
            taker.close()
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}") from as_named(error, out)
    return folders


def scalars(run: Run) -> Iterator[ScalarAt]:
    """Every number of a run's rounds as (name, value, round); names of classes under ``class_accuracy/``.

    What a measure saw stands under the measure's name, e.g. ``divergence/mean_l2``; lists are left out.
    """
    for event in ({**run.initial, "round": 0}, *run.rounds):
        number = int(event["round"])
        for name, value in _named(event, run.classes):
            yield name, value, number
    for name in dict.fromkeys(k for event in run.measures for k in _seen(event, event["measure"])):
        for number, value in run.curve(name).items():
            yield name, value, number


def _seen(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """The keys of a measure's numbers, as ``Run.curve`` takes them."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _seen(value, f"{prefix}/{key}")
        elif key not in PLACES and isinstance(value, (int, float)):
            yield f"{prefix}/{key}"


def _named(event: Mapping[str, Any], classes: Sequence[str]) -> Iterator[tuple[str, float]]:
    for key, value in event.items():
        if key == "class_accuracy":
            pairs = zip(classes, value, strict=True) if value else ()
            yield from ((f"class_accuracy/{c}", float(v)) for c, v in pairs if v is not None)
        elif key == "others" and isinstance(value, dict):
            for other, measured in value.items():
                yield from ((f"{other}/{name}", v) for name, v in _named(measured, classes))
        elif key not in ("event", "round") and isinstance(value, (int, float)):
            yield key, float(value)


def _names(runs: Sequence[Run]) -> list[str]:
    labels = {id(r): g.label for g in group(runs) for r in (*g.runs, *g.repeats)}
    names: list[str] = []
    for run in runs:
        label = "".join(c if c.isalnum() or c in "-_.=, " else "-" for c in labels[id(run)]).replace(", ", "_")
        name = f"{label}-seed{run.seed}"
        names.append(name if name not in names else f"{name}-{len(names)}")
    return names
