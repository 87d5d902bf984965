"""Runs that are done already, for TensorBoard: the same numbers that a tracker is told while a run
goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedstill.core.errors import ConfigError
from fedstill.core.files import as_named
from fedstill.report.groups import group
from fedstill.report.runs import JOURNAL, Run, find
from fedstill.running.journal import VERSIONS, read_journal
from fedstill.running.trackers import AboutRun, TensorBoard, Tracker
from fedstill.running.tracking import RoundNumbers


def export_tensorboard(directories: Sequence[Path], out: Path) -> list[Path]:
    """Write the numbers of the runs in (or below) some directories as TensorBoard's, a folder a
    run; the folders.

    Raises ConfigError if there is no run, if ``out`` holds anything (events would be doubled) or
    cannot be written, or if TensorBoard is not installed.
    """
    return export(directories, out, TensorBoard)


def export(
    directories: Sequence[Path], out: Path, tracker: Callable[[Path], Tracker]
) -> list[Path]:
    """Tell each run to a tracker of its own, made for a folder under ``out``.

    Raises ConfigError for a folder that is not empty, or cannot be written.
    """
    runs = find(directories)
    labels = _labels(runs)
    folders = [out / name for name in labels]
    try:
        if out.exists() and any(out.iterdir()):
            raise ConfigError(
                f"{out} is not empty; name a new directory, so that no event is there twice"
            )
        for run, folder in zip(runs, folders, strict=True):
            _tell(run, folder.name, tracker(folder))
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}") from as_named(error, out)
    return folders


def _tell(run: Run, name: str, tracker: Tracker) -> None:
    said = {key: ", ".join(run.versions(key)) for key in VERSIONS}
    versions = {key: versions for key, versions in said.items() if versions}
    tracker.ready()
    tracker.begin(AboutRun(run.folder, name, name, run.seed, run.settings, versions), {}, -1)
    gathered = RoundNumbers()
    for event in read_journal(run.folder / JOURNAL):
        if done := gathered.take(event):
            tracker.log(*done)
    tracker.end("finished" if run.finished else "stopped", {})


def _labels(runs: Sequence[Run]) -> list[str]:
    labels = {id(r): g.label for g in group(runs) for r in (*g.runs, *g.repeats)}
    names: list[str] = []
    for run in runs:
        label = "".join(
            c if c.isalnum() or c in "-_.=, " else "-" for c in labels[id(run)]
        ).replace(", ", "_")
        name = f"{label}-seed{run.seed}"
        names.append(name if name not in names else f"{name}-{len(names)}")
    return names
