"""A run on a federation's server: submitted to it, and followed from here until it ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fedstill.deploy.control import Control, NoAnswer, when_it_listens
from fedstill.deploy.folder import load_federation
from fedstill.errors import ConfigError, DeployFailed
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.progress import OnRound, Progress
from fedstill.experiment.run_directory import journal as journals
from fedstill.experiment.run_directory.result import Result
from fedstill.experiment.tracking.tracker import Track
from fedstill.files import in_shell

LOOK, ASK, START = 1.0, 60.0, 180.0
"""Seconds between looks at the journal, between questions to the server, and for it to start."""


def elsewhere(settings: Settings) -> str:
    """Where a run is done: "federation" (its server), "ray", or empty for this process."""
    if settings.engine != "flower":
        return ""
    return (
        "federation" if settings.flower.federation else settings.flower.grid.replace("loopback", "")
    )


def refuse_calls(on_round: OnRound | None, track: Track = ()) -> None:
    """Raise ConfigError for what is called in this process, where a run elsewhere would have to
    call it.
    """
    for what, given in (("on_round is", on_round), ("trackers are", track)):
        if given:
            raise ConfigError(
                f"{what} called where the run is, and a federation's run is not in this process"
            )


def submit(settings: Settings, folder: Path, resume: bool, watch: Progress) -> Result:
    """Have a federation's server do a run in a directory of its own disk, and wait for its end.

    The directory must be seen from here too: this is the operator's command on the server's
    machine. Raises DeployFailed with the reason if the server does not take the run, or it fails
    there.
    """
    federation = load_federation(Path(settings.flower.federation))
    config = settings.toml
    values = {"config": "" if resume else config, "out": str(folder.resolve()), "resume": resume}
    control = Control.of(federation)
    run = when_it_listens(lambda: control.start(federation.app, values), START)
    watch.started(folder, 1 + len(_rounds(folder)))
    return _follow(control, run, settings.rounds, folder, watch)


def _follow(control: Control, run: int, rounds: int, folder: Path, watch: Progress) -> Result:
    shown, read, asked = 0, 0, time.monotonic()
    try:
        while not (folder / "summary.json").is_file():
            time.sleep(LOOK)
            if (long := _length(folder)) != read:
                read, events = long, _rounds(folder)
                for event in events[shown:]:
                    watch.round(event, rounds)
                shown = max(shown, len(events))
            if time.monotonic() - asked >= ASK:
                asked = time.monotonic()
                _raise_if_ended(control, run, folder)
            if watch.stop():
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        control.stop(run)
        raise
    return Result.of(folder)


def _length(folder: Path) -> int:
    """The bytes of the journal: one that is not longer has no new round, and may be too long to
    read every second.
    """
    path = folder / "journal.jsonl"
    return path.stat().st_size if path.is_file() else 0


def _rounds(folder: Path) -> list[Any]:
    path = folder / "journal.jsonl"
    return (
        [e for e in journals.read_journal(path) if e["event"] == "round"] if path.is_file() else []
    )


def _raise_if_ended(control: Control, run: int, folder: Path) -> None:
    try:
        how = control.ended(run)
    except NoAnswer:
        return  # the server may be starting again; it then says whether the run still exists
    if how is not None and not (folder / "summary.json").is_file():
        raise DeployFailed(
            f"the run ended on the server: {how}; go on with: fedstill resume {in_shell(folder)}"
        )
