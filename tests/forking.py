"""A process that has only imported things, and forks a child for every run, so that a kill costs a
run and no imports.

pytest's own process cannot be forked for this: torch has run there, and a child would inherit locks
of thread pools whose threads it does not have. Run as a program it reads one JSON task a line and
answers with one line:

folder: run there, or go on where a run was begun. setting: a name in SETTINGS. after: kill -9 after
so many seconds.
fault: [kind, nth, when], kill -9 before or after the nth call of that kind; "torn": an fsync whose
file is cut in half.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
import traceback
from pathlib import Path
from threading import Lock
from typing import Any

import torch

import toys
from fedstill.core import registry
from fedstill.core.label_counts import Census
from fedstill.running import runner
from fedstill.running.recording import Quiet

SETTINGS = {
    "parallel": toys.toy(
        model="toy_batchnorm", plan={"epochs": 2, "batch": 10, "lr": 0.1, "clip_norm": 1.0}
    ),
    "sequential": toys.toy("toy_chain", rounds=2),
    "public_logits": toys.toy(
        "toy_logits",
        rounds=2,
        data={"public": toys.PUBLIC},
        clients={"models": ["mlp", "logistic", "toy_batchnorm", "qkt_cnn"]},
    ),
    "peer_to_peer": toys.toy("toy_peers", rounds=1, topology={"clients": 6}),
    "kept_updates": toys.toy("scaffold", rounds=2, keep_updates=True),
    "stopped_early": toys.stopping_early("scaffold"),
}
if toys.has("querying"):
    SETTINGS["asked_again"] = toys.asking_again()
KINDS = ("fsync", "replace", "unlink", "stage", "census")


class Helper:
    """The forking process, as a test sees it."""

    def __init__(self) -> None:
        program = Path(__file__)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(program.parent), *sys.path])}
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
        )

    def go(
        self, setting: str, folder: Path, after: float | None = None, fault: Any = None
    ) -> dict[str, Any]:
        """One child: its exit status (-9: killed), seconds, calls of each kind, and error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        task = {"setting": setting, "folder": str(folder), "after": after, "fault": fault}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert answer["status"] in (0, -signal.SIGKILL), answer["error"]
        return answer

    def close(self) -> None:
        """End the process: it stops at the end of its input."""
        self._process.communicate()


class Faults(Quiet):
    """Counts calls by kind, and kills this process at one of them."""

    def __init__(self, fault: Any) -> None:
        self.fault = fault
        self.counts = dict.fromkeys(KINDS, 0)
        self.counting = Lock()  # fsyncs come from threads
        for name in ("fsync", "replace", "unlink"):
            setattr(os, name, self.around(name, getattr(os, name)))
        Census.end = self.around("census", Census.end)  # type: ignore[method-assign]

    def around(self, kind: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            moment = self.due(kind)
            if moment == "torn" and stat.S_ISREG(os.fstat(args[0]).st_mode):
                os.truncate(args[0], os.fstat(args[0]).st_size // 2)
            if moment in ("before", "torn"):
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if moment == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    def due(self, kind: str) -> str:
        """Count a call, and return when to kill the process at it; empty for not at all."""
        with self.counting:
            nth = self.counts[kind]
            self.counts[kind] += 1
        if self.fault is None:
            return ""
        fault_kind, fault_nth, moment = self.fault
        if (kind, nth) != (fault_kind, fault_nth):
            return ""
        return str(moment)

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        if self.due("stage"):
            os.kill(os.getpid(), signal.SIGKILL)


def child(task: dict[str, Any], report: Path) -> None:
    """Begin or continue a run, write a report of it, and end this process."""
    folder = Path(task["folder"])
    faults = Faults(task["fault"])
    try:
        if (folder / "config.toml").is_file():
            runner.resume(folder, toys.blobs(), watch=faults)
        else:
            runner.run(SETTINGS[task["setting"]], folder, toys.blobs(), watch=faults)
        report.write_text(json.dumps({"counts": faults.counts, "error": ""}))
        os._exit(0)
    except BaseException:
        report.write_text(json.dumps({"counts": faults.counts, "error": traceback.format_exc()}))
        os._exit(1)


def serve(task: dict[str, Any]) -> dict[str, Any]:
    """Carry out a task in a child, and return its answer."""
    report = Path(task["folder"] + ".report")
    report.unlink(missing_ok=True)
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        child(task, report)
    if task["after"] is not None:
        time.sleep(max(0.0, began + task["after"] - time.perf_counter()))
        # a child that has ended already is a zombie until it is waited for
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    outcome = {"counts": {}, "error": ""}
    if status != -signal.SIGKILL:
        outcome = json.loads(report.read_text())
    return {"status": status, "seconds": time.perf_counter() - began, **outcome}


def main() -> None:
    for kind in registry.HOMES:
        registry.names(kind)
    torch.use_deterministic_algorithms(True)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
