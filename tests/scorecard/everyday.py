"""Rows on everyday use: long runs do not leak, the examples in docstrings run, and a method is one
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fedstill
from fedstill.config.experiment import Experiment
from fedstill.core.errors import FedstillError, Interrupted, cut_reason, on_one_line
from fedstill.report.page import write_page
from fedstill.running.recording import Quiet
from fedstill.running.runner import resume, run
from scorecard.stopping_runs import evidence_of
from scorecard.trials import Trials, problem_unless, scratch, small_run

BLOCK = 100
"""Rounds between two measurements of a long run. Later measurements are compared with the first."""
BLOCKS = 9
"""The number of later measurements; a run then has a thousand rounds."""
GROWTH = 0.01
"""The share by which memory may grow."""

LASTING: Mapping[str, Mapping[str, Any]] = {
    "parallel": {"method": "scaffold"},
    "a chain": {"method": "fedseq"},
    "public logits": {
        "method": "hiper_fedkd",
        "data": {"train_size": 300, "test_size": 60, "public": 40},
    },
    "parallel, side by side": {"method": "moon", "engine": "vectorised"},
}
"""Runs of many rounds; peer to peer, a run is one round."""


def lasting(trials: int) -> Trials:
    """Each trial: a hundred more rounds of a run in a process of its own need no more memory and
    open files.
    """
    problems = dict[str, str]()
    for name, changes in LASTING.items():
        blocks = min(BLOCKS, trials - len(problems))
        if not blocks:
            break
        growth = _growth({**changes, "rounds": (1 + blocks) * BLOCK}, blocks)
        for block, problem in enumerate(growth, 2):
            problems[f"{name}, after {block * BLOCK} rounds"] = problem
    return Trials.of(problems)


class _ResourceUse(Quiet):
    """Records the memory and the number of open files of this process after each round."""

    def __init__(self) -> None:
        self.by_round: list[tuple[int, int]] = []

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Record them (``running.progress.Progress``)."""
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE")
        files = len(list(Path("/proc/self/fd").iterdir()))
        self.by_round.append((memory, files))


def _growth(changes: dict[str, Any], blocks: int) -> list[str]:
    """The problem of each block of rounds of a run."""
    if not Path("/proc/self/statm").exists():
        return ["cannot be measured here: there is no /proc"] * blocks
    program = "from scorecard.everyday import long_run; long_run()"
    command = [sys.executable, "-c", program, json.dumps(changes)]
    # The process finds the modules of this one, whether PYTHONPATH or pytest set sys.path.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if process.returncode:
        return [cut_reason(process.stderr[-300:])] * blocks

    first, *later = json.loads(process.stdout.splitlines()[-1])
    return [_increase(first, measurement) for measurement in later]


def _increase(first: Sequence[int], later: Sequence[int]) -> str:
    """The problem if a process has more memory or open files than at first."""
    first_memory, first_files = first
    memory, files = later
    if memory > (1 + GROWTH) * first_memory:
        return f"{memory:,} bytes, and {first_memory:,} after {BLOCK} rounds"
    return problem_unless(
        files <= first_files, f"{files} open files, and {first_files} after {BLOCK} rounds"
    )


def long_run() -> None:
    """Carry out the run that the command line describes as JSON, and print its memory and open
    files after every hundred rounds.
    """
    watch = _ResourceUse()
    with scratch() as place:
        run(small_run(**json.loads(sys.argv[1])), place / "run", watch=watch)
    print(json.dumps(watch.by_round[BLOCK - 1 :: BLOCK]))


def examples(trials: int) -> Trials:
    """Each trial: a module with examples in its docstrings, whose output must be as documented."""
    problems = dict[str, str]()
    for module_info in pkgutil.walk_packages(fedstill.__path__, "fedstill."):
        if len(problems) == trials:
            break
        if module_info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(module_info.name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("fedstill"):
                problems[module_info.name] = on_one_line(error)
            continue  # it needs an extra that is not installed
        tests = doctest.DocTestFinder().find(module, module_info.name)
        tests_with_examples = [test for test in tests if test.examples]
        if tests_with_examples:
            problems[module_info.name] = _failed_examples(tests_with_examples)
    return Trials.of(problems)


def _failed_examples(tests: Sequence[doctest.DocTest]) -> str:
    """The output of doctest for the examples that fail; empty if none fails."""
    output: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    failures = 0
    for test in tests:
        failures += runner.run(test, out=output.append).failed
    if not failures:
        return ""
    return " ".join("".join(output).split())[:300]


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
    """FedAvg with distillation from the global model."""

    beta: NonNegative = 1.0

    def work(self, stage):
        return Distillation(self)


@dataclass(frozen=True)
class Distillation(ClientWork):
    method: Mine

    def begin(self, payload, client_state, view, world):
        return TrainingStart(payload.params, teachers={"global": payload.params})

    def terms(self, step, start):
        loss = kd(step.logits(), step.teacher("global"), 1.0)
        return {"ce": cross_entropy(step.logits(), step.y), "kd": self.method.beta * loss}

    def end(self, params, start, result, view, world):
        return Payload(params=params), Payload()
'''


def one_file(trials: int) -> Trials:
    """Each trial: a method in one file runs by its path, also with stacked clients, is stopped and
    resumed, and is in the report.
    """
    problems = dict[str, str]()
    for trial in range(trials):
        with scratch() as place:
            (place / "mine.py").write_text(METHOD, encoding="utf-8")
            problems[f"seed {trial}"] = _problem_of_method(place, trial)
    return Trials.of(problems)


class _StopsAfterOne(Quiet):
    """Stops a run after its first stage."""

    def stop(self) -> bool:
        """Stop at once (``running.progress.Progress``)."""
        return True


def _problem_of_method(place: Path, seed: int) -> str:
    """The first problem of the method in ``mine.py``; empty if there is none."""
    for name, use in USES_OF_METHOD.items():
        try:
            problem = use(place, seed)
        except FedstillError as error:
            problem = on_one_line(error)
        if problem:
            return f"{name}: {problem}"
    return ""


def _run_of_method(place: Path, seed: int, engine: str) -> Experiment:
    return small_run(str(place / "mine.py"), engine=engine, seed=seed)


def _one_by_one(place: Path, seed: int) -> str:
    result = run(_run_of_method(place, seed, "serial"), place / "serial")
    return problem_unless(result.accuracy is not None, "it has no accuracy")


def _side_by_side(place: Path, seed: int) -> str:
    run(_run_of_method(place, seed, "vectorised"), place / "vectorised")
    return ""


def _stopped_and_resumed(place: Path, seed: int) -> str:
    try:
        run(_run_of_method(place, seed, "serial"), place / "stopped", watch=_StopsAfterOne())
    except Interrupted:
        resume(place / "stopped")
    is_same = evidence_of(place / "stopped") == evidence_of(place / "serial")
    return problem_unless(is_same, "other bits")


def _in_the_report(place: Path, seed: int) -> str:
    page = write_page([place / "serial", place / "vectorised"], place / "report.html")
    text = page.read_text(encoding="utf-8")
    return problem_unless("mine.py" in text, "the report does not name it")


USES_OF_METHOD: Mapping[str, Callable[[Path, int], str]] = {
    "one by one": _one_by_one,
    "side by side": _side_by_side,
    "stopped and resumed": _stopped_and_resumed,
    "the report": _in_the_report,
}
"""Uses of the method in ``mine.py`` with a seed, in order; each returns its problem."""
