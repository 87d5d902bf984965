"""A contestant's processes: started together, watched for memory, bounded in time, and all ended
afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

EVERY = 0.5
"""Seconds between two looks at the memory."""
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux's prctl


@dataclass(frozen=True)
class Ran:
    """How a run went: when it began, the peak memory of all its processes in bytes, and why it
    failed, if it did.
    """

    began: float
    peak: int
    failure: str = ""


def adopt() -> None:
    """Have processes whose parent ended (Ray leaves some) stay among this process's descendants;
    Linux only.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def run(command: Sequence[str], settings: Mapping[str, str], folder: Path, seconds: float) -> Ran:
    """Run a command in a folder, with its output in files there; end whatever it leaves."""
    began, peak = time.time(), 0
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(
            command, env=settings, cwd=folder, stdout=out, stderr=err, start_new_session=True
        )
        try:
            while process.poll() is None and time.time() - began < seconds:
                peak = max(peak, sum(map(_memory, descendants())))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(EVERY)
            late = process.poll() is None
        finally:
            end(process)
    if late:
        return Ran(began, peak, f"not done within {seconds:.0f} s")
    return Ran(began, peak, _reason(folder / "stderr") if process.returncode else "")


def descendants() -> set[int]:
    """The ids of all processes below this one, where the system lists them in /proc."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(stat.parent.name)] = int(
                stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1]
            )
    found, below = {os.getpid()}, set[int]()
    while found:
        below |= (found := {pid for pid, parent in parents.items() if parent in found} - below)
    return below


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, its group, and all that they left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while left := descendants():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def _memory(pid: int) -> int:
    """Bytes of a process, a shared page counted in shares, so that the sum over processes is what
    they hold.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _reason(path: Path) -> str:
    """The first error that was named, or the last line."""
    lines = [
        line.strip()
        for line in path.read_text(errors="replace", encoding="utf-8").splitlines()
        if line.strip()
    ]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines[-1:] or ["it said nothing"])[0]
