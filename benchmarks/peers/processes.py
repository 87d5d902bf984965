"""The processes of a contestant: started together, with their memory recorded and their time
limited, and ended completely.
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

MEMORY_INTERVAL = 0.5
"""Seconds between two measurements of the memory."""

SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of Linux's prctl."""

TIMED_OUT = "not done within"
"""The beginning of the failure of a run that exceeded its time limit."""


@dataclass(frozen=True)
class Outcome:
    """When a run began, the peak memory of all its processes in bytes, and why it failed; empty if
    it did not fail.
    """

    began: float
    peak: int
    failure: str = ""


def adopt() -> None:
    """Keep processes whose parent has ended (Ray leaves some) among the descendants of this
    process. Linux only.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def run(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, seconds: float
) -> Outcome:
    """Run a command in a folder, which also gets its output, and end all processes that it leaves.

    ``seconds``: the time limit.
    """
    began = time.time()
    peak = 0
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.time() - began < seconds:
                memory = sum(_memory(pid) for pid in descendants())
                peak = max(peak, memory)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(MEMORY_INTERVAL)
            is_late = process.poll() is None
        finally:
            end(process)
    failure = ""
    if is_late:
        failure = f"{TIMED_OUT} {seconds:.0f} s"
    elif process.returncode:
        failure = reason(folder / "stderr")
    return Outcome(began, peak, failure)


def descendants() -> set[int]:
    """The ids of all processes below this one, on systems that list them in /proc."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # A process may end in the meantime.
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = _parent(stat)
    below: set[int] = set()
    generation = {os.getpid()}
    while generation:
        children = {pid for pid, parent in parents.items() if parent in generation}
        generation = children - below
        below |= generation
    return below


def _parent(stat: Path) -> int:
    """The id of a process's parent: the second field after the program's name in parentheses."""
    fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[1])


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, its group, and all processes that they have left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while remaining := descendants():
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in remaining:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def _memory(pid: int) -> int:
    """The proportional set size of a process in bytes.

    A page that processes share counts as a part in each of them, so sums are correct.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return 0
    sizes = [int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")]
    return 1024 * sum(sizes)


def reason(path: Path) -> str:
    """The first line of an output that names an error; the last line if there is none."""
    text = path.read_text(errors="replace", encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if re.match(r"[\w.]*(Error|Exception)\b", line):
            return line
    if lines:
        return lines[-1]
    return "it ended without a message"
