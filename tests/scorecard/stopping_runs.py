"""Rows on runs that are stopped and damaged: killed at any moment, resumed; checkpoints with bits
turned.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fedstill.config.resolve import resolve
from fedstill.core.errors import FedstillError, on_one_line
from fedstill.core.files import digest
from fedstill.running.journal import read_journal, without_times
from fedstill.running.runner import resume, run
from scorecard.trials import STEADY, Trials, scratch, small_run

PATIENCE = 120.0
"""Seconds after which a run that was started counts as hung."""


def kills(trials: int) -> Trials:
    """Each trial: a run in a process of its own, killed at a moment drawn, resumed here,
    compared.
    """
    draw, problems = random.Random(0), dict[str, str]()
    with scratch() as place:
        wanted: dict[str, tuple[Any, float]] = {}
        for trial in range(trials):
            method = STEADY[trial % len(STEADY)]
            if method not in wanted:
                began = time.perf_counter()
                run(small_run(method, rounds=6), place / method)
                wanted[method] = evidence_of(place / method), time.perf_counter() - began
            want, seconds = wanted[method]
            folder, config = place / f"killed{trial}", place / f"{method}.toml"
            config.write_text(resolve(small_run(method, rounds=6)).toml, encoding="utf-8")
            problems[f"{method}, kill {trial + 1}"] = _killed(
                config, folder, draw.uniform(0, seconds), want
            )
    return Trials.of(problems)


def _killed(config: Path, folder: Path, after: float, want: object) -> str:
    """What is wrong with a run that was killed so many seconds after its journal began, and
    resumed.
    """
    words = [sys.executable, "-m", "fedstill", "run", str(config), "--out", str(folder), "--quiet"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + PATIENCE
    while (
        not (folder / "journal.jsonl").exists()
        and process.poll() is None
        and time.monotonic() < until
    ):
        time.sleep(0.005)
    began = (folder / "journal.jsonl").exists()
    time.sleep(after)
    process.kill()
    process.wait()
    if not began:
        return f"it had no journal {PATIENCE:.0f} s after its start"
    try:
        resume(folder)
    except FedstillError as error:
        return on_one_line(error)
    return "" if evidence_of(folder) == want else "the resumed run has other bits"


def damage(trials: int) -> Trials:
    """Each trial: a file of a checkpoint is cut short, emptied, or gets a bit turned; then the run
    is resumed.
    """
    draw, problems = random.Random(1), dict[str, str]()
    with scratch() as place:
        run(small_run("scaffold", rounds=3), place / "whole")
        want = evidence_of(place / "whole")
        for trial in range(trials):
            folder = place / "damaged"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(place / "whole", folder)
            for name in ("summary.json", "model.safetensors"):
                (folder / name).unlink()
            files = sorted(
                p for d in ("checkpoints", "memory") for p in (folder / d).rglob("*") if p.is_file()
            )
            file = draw.choice([p for p in files if p.stat().st_size])
            how = draw.choice(("cut", "emptied", "turned"))
            data = bytearray(file.read_bytes())
            if how == "turned":
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            file.write_bytes(
                bytes(data)
                if how == "turned"
                else data[: 0 if how == "emptied" else len(data) // 2]
            )
            problems[f"{trial + 1}: {file.relative_to(folder)} {how}"] = _resumed(folder, want)
    return Trials.of(problems)


def _resumed(folder: Path, want: object) -> str:
    """What is wrong where a damaged run is resumed: nothing if it says so by name, or gives the
    same bits.
    """
    try:
        resume(folder)
    except FedstillError:
        return ""
    except Exception as error:
        return f"not a named error: {on_one_line(error)}"
    return "" if evidence_of(folder) == want else "the resumed run has other bits"


def evidence_of(folder: Path) -> tuple[str, list[Any]]:
    """What two runs with the same bits have alike: the final model's SHA-256, and the journal
    without times.
    """
    events = [
        without_times(e) for e in read_journal(folder / "journal.jsonl") if e["event"] != "resumed"
    ]
    return digest((folder / "model.safetensors").read_bytes()), events
