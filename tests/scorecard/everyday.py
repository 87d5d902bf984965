"""Rows on everyday use: long runs do not leak, every example in the code runs, and a method is one
file.
"""

from __future__ import annotations

import doctest
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fedstill
from fedstill.core.errors import FedstillError, Interrupted, cut_reason, on_one_line
from fedstill.report.page import write_page
from fedstill.running.recording import Quiet
from fedstill.running.runner import resume, run
from scorecard.stopping_runs import evidence_of
from scorecard.trials import Trials, scratch, small_run

BLOCK = 100
"""Rounds between two looks at a long run; the first look is what the others are compared with."""
BLOCKS = 9
"""How many follow in a whole run, which has a thousand rounds then."""
GROWTH = 0.01

LASTING: Mapping[str, Mapping[str, Any]] = {
    "parallel": {"method": "scaffold"},
    "a chain": {"method": "fedseq"},
    "public logits": {
        "method": "hiper_fedkd",
        "data": {"train_size": 300, "test_size": 60, "public": 40},
    },
    "parallel, side by side": {"method": "moon", "engine": "vectorised"},
}
"""Runs of many rounds; where peers ask each other, a run is one round."""


def lasting(trials: int) -> Trials:
    """Each trial: a hundred rounds more of a run in a process of its own; memory and open files
    stay as they were.
    """
    problems = dict[str, str]()
    for name, changes in LASTING.items():
        if blocks := min(BLOCKS, trials - len(problems)):
            told = _grown({**changes, "rounds": (1 + blocks) * BLOCK}, blocks)
            problems |= {
                f"{name}, after {(2 + n) * BLOCK} rounds": why for n, why in enumerate(told)
            }
    return Trials.of(problems)


class _Watching(Quiet):
    """Notes the process's memory and its open files after each round."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Note them (``running.progress.Progress``)."""
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        self.seen.append(
            (pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path("/proc/self/fd").iterdir())))
        )


def _grown(changes: dict[str, Any], blocks: int) -> list[str]:
    if not Path("/proc/self/statm").exists():
        return ["cannot be measured here: there is no /proc"] * blocks
    words = [
        sys.executable,
        "-c",
        "from scorecard.everyday import long_run; long_run()",
        json.dumps(changes),
    ]
    # The process imports what this one does, wherever sys.path was set: by PYTHONPATH or by pytest.
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, env=surroundings, capture_output=True, text=True, check=False)
    if done.returncode:
        return [cut_reason(done.stderr[-300:])] * blocks
    (memory, files), *later = json.loads(done.stdout.splitlines()[-1])
    return [_more(memory, files, *now) for now in later]


def _more(memory: int, files: int, now: int, opened: int) -> str:
    if now > (1 + GROWTH) * memory:
        return f"{now:,} bytes, and {memory:,} after {BLOCK} rounds"
    return "" if opened <= files else f"{opened} open files, and {files} after {BLOCK} rounds"


def long_run() -> None:
    """Run what the command line says, and print memory and open files after every hundred
    rounds.
    """
    watch = _Watching()
    with scratch() as place:
        run(small_run(**json.loads(sys.argv[1])), place / "run", watch=watch)
    print(json.dumps(watch.seen[BLOCK - 1 :: BLOCK]))


def examples(trials: int) -> Trials:
    """Each trial: a module with examples in its docstrings; they print what they say."""
    names = [
        m.name
        for m in pkgutil.walk_packages(fedstill.__path__, "fedstill.")
        if not m.name.endswith("__main__")
    ]
    problems, finder = dict[str, str](), doctest.DocTestFinder()
    for name in names:
        if len(problems) == trials:
            break
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("fedstill"):
                problems[name] = on_one_line(error)
            continue  # it is of an extra that is not installed
        tests = [test for test in finder.find(module, name) if test.examples]
        if tests:
            said: list[str] = []
            runner = doctest.DocTestRunner(verbose=False)
            failed = sum(runner.run(test, out=said.append).failed for test in tests)
            problems[name] = " ".join("".join(said).split())[:300] if failed else ""
    return Trials.of(problems)


METHOD = '''
from dataclasses import dataclass

from fedstill.core.fields import NonNegative
from fedstill.losses import cross_entropy, kd
from fedstill.methods.fedavg import FedAvg
from fedstill.core.registry import method
from fedstill.core.records import TrainingStart, Payload
from fedstill.core.method import ClientWork


@method("scorecard_mine")
@dataclass(frozen=True)
class Mine(FedAvg):
    """FedAvg that holds on to what the global model says of every example."""

    beta: NonNegative = 1.0

    def work(self, stage):
        return HoldsOn(self)


@dataclass(frozen=True)
class HoldsOn(ClientWork):
    method: Mine

    def begin(self, payload, client_state, view, world):
        return TrainingStart(payload.params, teachers={"global": payload.params})

    def terms(self, step, start):
        apart = kd(step.logits(), step.teacher("global"), 1.0)
        return {"ce": cross_entropy(step.logits(), step.y), "held": self.method.beta * apart}

    def end(self, params, start, result, view, world):
        return Payload(params=params), Payload()
'''


def one_file(trials: int) -> Trials:
    """Each trial: a method that is one file runs by its path, side by side too, stops, goes on, and
    is reported.
    """
    problems = dict[str, str]()
    for trial in range(trials):
        with scratch() as place:
            steps = _steps(place, trial)
            problems[f"seed {trial}"] = next(
                (f"{what}: {why}" for what, act in steps.items() if (why := _tried(act))), ""
            )
    return Trials.of(problems)


class _StopsAfterOne(Quiet):
    """Stops a run after its first stage."""

    def stop(self) -> bool:
        """At once (``running.progress.Progress``)."""
        return True


def _steps(place: Path, seed: int) -> dict[str, Callable[[], str]]:
    (place / "mine.py").write_text(METHOD, encoding="utf-8")

    def asked(engine: str) -> Any:
        return small_run(str(place / "mine.py"), engine=engine, seed=seed)

    def one_by_one() -> str:
        return (
            ""
            if run(asked("serial"), place / "serial").accuracy is not None
            else "it has no accuracy"
        )

    def together() -> str:
        run(asked("vectorised"), place / "vectorised")
        return ""

    def stopped() -> str:
        try:
            run(asked("serial"), place / "stopped", watch=_StopsAfterOne())
        except Interrupted:
            resume(place / "stopped")
        return (
            "" if evidence_of(place / "stopped") == evidence_of(place / "serial") else "other bits"
        )

    def shown() -> str:
        page = write_page([place / "serial", place / "vectorised"], place / "report.html")
        return (
            "" if "mine.py" in page.read_text(encoding="utf-8") else "the report does not name it"
        )

    return {
        "one by one": one_by_one,
        "side by side": together,
        "stopped and resumed": stopped,
        "the report": shown,
    }


def _tried(act: Callable[[], str]) -> str:
    try:
        return act()
    except FedstillError as error:
        return on_one_line(error)
