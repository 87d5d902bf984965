"""A run on a federation's server: submitted to it, and followed from here until it ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import tomli_w

from fedstill.deploy import programs
from fedstill.deploy.folder import Federation, load_federation
from fedstill.errors import DeployFailed
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.progress import Progress
from fedstill.experiment.run_directory import journal as journals
from fedstill.experiment.run_directory.result import Result
from fedstill.files import digest, remove

LOOK, ASK, START = 1.0, 60.0, 180.0
"""Seconds between looks at the journal, between questions to the server, and for it to start."""


def elsewhere(settings: Settings) -> str:
    """Where a run is done: "federation" (its server), "ray", or empty for this process."""
    if settings.engine != "flower":
        return ""
    return "federation" if settings.flower.federation else settings.flower.grid.replace("loopback", "")


def submit(settings: Settings, folder: Path, resume: bool, watch: Progress) -> Result:
    """Have a federation's server do a run in a directory of its own disk, and wait for its end.

    The directory must be seen from here too: this is the operator's command on the server's machine. Raises
    DeployFailed with the reason if the server does not take the run, or it fails there.
    """
    federation = load_federation(Path(settings.flower.federation))
    config = settings.toml
    values = {"config": "" if resume else config, "out": str(folder.resolve()), "resume": resume}
    path = federation.server / f"submit-{digest(str(folder.resolve()).encode())[:12]}.toml"
    path.write_text(tomli_w.dumps(values))
    try:
        answer = _when_it_listens(federation, "run", str(federation.app), programs.LINK, "--run-config", str(path))
    finally:
        remove(path)
    return _follow(federation, str(answer["run-id"]), settings.rounds, folder, watch)


def _when_it_listens(federation: Federation, *arguments: str) -> Any:
    """What a command answers; it is repeated for a while if the server does not answer (yet)."""
    until = time.monotonic() + START
    while True:
        try:
            return programs.flwr(federation, *arguments)
        except DeployFailed as error:
            if "unavailable" not in str(error) or time.monotonic() >= until:
                raise
            time.sleep(LOOK)


def _follow(federation: Federation, run: str, rounds: int, folder: Path, watch: Progress) -> Result:
    shown, asked = 0, time.monotonic()
    try:
        while not (folder / "summary.json").is_file():
            time.sleep(LOOK)
            events = _rounds(folder)
            for event in events[shown:]:
                watch.round(event, rounds)
            shown = max(shown, len(events))
            if time.monotonic() - asked >= ASK:
                asked = time.monotonic()
                _raise_if_ended(federation, run, folder)
            if watch.stop():
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        programs.flwr(federation, "stop", run, programs.LINK)
        raise
    return Result.of(folder)


def _rounds(folder: Path) -> list[Any]:
    path = folder / "journal.jsonl"
    return [e for e in journals.read_journal(path) if e["event"] == "round"] if path.is_file() else []


def _raise_if_ended(federation: Federation, run: str, folder: Path) -> None:
    try:
        answer = programs.flwr(federation, "list", programs.LINK, "--run-id", run)
    except DeployFailed:
        return  # the server may be starting again; it then says whether the run still exists
    one: dict[str, Any] = next((r for r in answer.get("runs", ()) if str(r.get("run-id")) == run), {})
    status = str(one.get("status", ""))
    if status.startswith("finished") and not (folder / "summary.json").is_file():
        details = " ".join(str(one.get("status-details") or one.get("details") or status).split())
        raise DeployFailed(f"the run ended on the server: {details}; go on with: fedstill resume {folder}")
