"""Rows on runs that are killed at any moment or whose checkpoints are damaged, and then resumed."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.config.resolve import resolve
from fedstill.core.errors import FedstillError, on_one_line
from fedstill.core.files import digest
from fedstill.running.journal import read_journal, without_times
from fedstill.running.runner import resume, run
from scorecard.trials import STEADY, Trials, problem_unless, scratch, small_run

PATIENCE = 120.0
"""Seconds in which a run must write the beginning of its journal."""

OTHER_BITS = "the resumed run has other bits"


@dataclass(frozen=True)
class Evidence:
    """The results of a run that depend on its bits: the final model's SHA-256, and the journal
    without times.
    """

    model_sha256: str
    events: list[Any]


def evidence_of(folder: Path) -> Evidence:
    """The evidence of a finished run."""
    events = [event for event in read_journal(folder / "journal.jsonl") if not is_resume(event)]
    model = (folder / "model.safetensors").read_bytes()
    return Evidence(digest(model), without_times(events))


def is_resume(event: Mapping[str, Any]) -> bool:
    """Whether an event records a resume with other versions."""
    return bool(event["event"] == "resumed")


@dataclass(frozen=True)
class Uninterrupted:
    """A run that was not killed: its config file, its evidence, and its duration in seconds."""

    config: Path
    evidence: Evidence
    seconds: float


def _uninterrupted(method: str, place: Path) -> Uninterrupted:
    """Carry out a run of a method to its end."""
    config = place / f"{method}.toml"
    config.write_text(resolve(small_run(method, rounds=6)).toml, encoding="utf-8")
    start = time.perf_counter()
    run(small_run(method, rounds=6), place / method)
    seconds = time.perf_counter() - start
    return Uninterrupted(config, evidence_of(place / method), seconds)


def kills(trials: int) -> Trials:
    """Each trial: a run in a process of its own is killed at a random moment, and resumed here."""
    problems = dict[str, str]()
    draw = random.Random(0)
    runs: dict[str, Uninterrupted] = {}
    with scratch() as place:
        for trial in range(trials):
            method = STEADY[trial % len(STEADY)]
            if method not in runs:
                runs[method] = _uninterrupted(method, place)
            moment = draw.uniform(0, runs[method].seconds)
            problem = _kill_and_resume(runs[method], place / f"killed{trial}", moment)
            problems[f"{method}, kill {trial + 1}"] = problem
    return Trials.of(problems)


def _kill_and_resume(uninterrupted: Uninterrupted, folder: Path, moment: float) -> str:
    """The problem of a run that is killed some seconds after its journal begins, and resumed."""
    options = ["--out", str(folder), "--quiet"]
    command = [sys.executable, "-m", "fedstill", "run", str(uninterrupted.config), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = folder / "journal.jsonl"
    deadline = time.monotonic() + PATIENCE
    while not journal.exists() and process.poll() is None:
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    has_journal = journal.exists()
    time.sleep(moment)
    process.kill()
    process.wait()

    if not has_journal:
        return f"it had no journal {PATIENCE:.0f} s after its start"
    try:
        resume(folder)
    except FedstillError as error:
        return on_one_line(error)
    return problem_unless(evidence_of(folder) == uninterrupted.evidence, OTHER_BITS)


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: len(content) // 2]


def _emptied(content: bytes, draw: random.Random) -> bytes:
    return b""


def _turned(content: bytes, draw: random.Random) -> bytes:
    out = bytearray(content)
    out[draw.randrange(len(out))] ^= 1 << draw.randrange(8)
    return bytes(out)


DAMAGES: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": _cut,
    "emptied": _emptied,
    "turned": _turned,
}
"""Damages of a file: it loses its second half or all of its content, or a bit is flipped."""


def damage(trials: int) -> Trials:
    """Each trial: a file of a checkpoint is damaged, and the run is resumed."""
    problems = dict[str, str]()
    draw = random.Random(1)
    with scratch() as place:
        run(small_run("scaffold", rounds=3), place / "whole")
        evidence = evidence_of(place / "whole")
        for trial in range(trials):
            folder = place / "damaged"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(place / "whole", folder)
            (folder / "summary.json").unlink()
            (folder / "model.safetensors").unlink()
            file = draw.choice(_files_of_checkpoints(folder))
            name = draw.choice(sorted(DAMAGES))
            file.write_bytes(DAMAGES[name](file.read_bytes(), draw))
            problem = _problem_of_resuming(folder, evidence)
            problems[f"{trial + 1}: {file.relative_to(folder)} {name}"] = problem
    return Trials.of(problems)


def _files_of_checkpoints(folder: Path) -> list[Path]:
    """The files of a run's checkpoints and of its clients' memory that are not empty."""
    paths = [*(folder / "checkpoints").rglob("*"), *(folder / "memory").rglob("*")]
    return sorted(path for path in paths if path.is_file() and path.stat().st_size)


def _problem_of_resuming(folder: Path, evidence: Evidence) -> str:
    """The problem if a resume neither raises an error of fedstill nor leads to the same bits."""
    try:
        resume(folder)
    except FedstillError:
        return ""
    except Exception as error:
        return f"not a named error: {on_one_line(error)}"
    return problem_unless(evidence_of(folder) == evidence, OTHER_BITS)
