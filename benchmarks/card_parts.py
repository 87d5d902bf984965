"""The parts of ``benchmarks.card``. Each of them runs in a process of its own:
``python -m benchmarks.card_parts NAME JSON`` prints its result as one line of JSON.

A process that receives SIGINT reports the rounds and tests that it has completed.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from xml.etree import ElementTree

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.fedstill_loop import FedstillLoop
from benchmarks.peers.tasks import task_of
from benchmarks.plain import PlainLoop
from benchmarks.workloads import PAPER, WORKLOADS, Workload, write_tensors
from fedstill import Experiment, resume, run
from fedstill.config.resolve import resolve
from fedstill.core.errors import Interrupted
from fedstill.core.files import digest
from fedstill.core.records import SERVER
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors
from fedstill.models import contract
from fedstill.running.journal import read_journal, without_times
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.recording import Quiet

PLAIN = "plain PyTorch"
"""The method that is the plain PyTorch loop, not fedstill."""

TRANSFORMER = "transformer"
"""The workload on texts, which is defined here."""

DIGEST_AFTER = 3
"""The round after which the models of two rows are compared."""

RESUMED_ROUNDS = 3


# Workloads. The first process that needs their data writes them, the others read them.


def workload_of(name: str, *, quick: bool) -> Workload:
    """A workload; with ``quick``, a smaller one with ten clients, two of which train one epoch."""
    workload = WORKLOADS[name]
    if not quick:
        return workload
    plan = {**workload.plan, "epochs": 1, "batch": 10}
    return replace(workload, name=f"{name}-quick", clients=10, sampled=2, images=60, plan=plan)


def data_of(workload: Workload, folder: Path) -> Dataset:
    """The images of a workload, from a file in ``folder``."""
    tensors = load_file(write_tensors(workload, folder))
    train = (tensors["train_images"], tensors["train_labels"])
    test = (tensors["test_images"], tensors["test_labels"])
    return from_tensors(workload.name, train, test)


def transformer_data(texts: int) -> Dataset:
    """Random token ids (N, 64); half of a text's tokens depend on its class."""
    draw = torch.Generator().manual_seed(0)

    def labelled(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % 10
        ids = torch.randint(1, 1000, (count, 64), generator=draw)
        ids[:, ::2] = 1 + (ids[:, ::2] % 50) + 50 * labels[:, None]
        return ids, labels

    return from_tensors(TRANSFORMER, labelled(texts), labelled(1000), vocabulary=1000)


def transformer_experiment(method: str, *, quick: bool, **changes: Any) -> Experiment:
    """FedAvg on texts with a small transformer: ten clients, one epoch in batches of 32."""
    sampled = 10
    if quick:
        sampled = 2
    return Experiment(
        rounds=1000,
        seed=1,
        measure=(),
        method=method,
        model={"name": "tiny_transformer"},
        partition={"kind": "iid"},
        topology={"clients": 10, "sampled": sampled},
        plan={**PAPER, "epochs": 1, "batch": 32},
        **changes,
    )


# Rounds.


class Contestant(Protocol):
    """The program that is timed: fedstill, or the plain loop."""

    def run_round(self) -> None:
        """Train one round."""

    def parameters(self) -> dict[str, Tensor]:
        """The global model."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training that is timed.

    ``quick``: whether the workload is smaller. ``data``: the folder with the images of workloads.
    """

    workload: str
    method: str
    device: str
    precision: str = "fp32"
    engine: str = "auto"
    rounds: int = 200
    quick: bool = False
    data: str = ""

    def prepared(self) -> Prepared:
        """The prepared run. The plain loop takes its data on the CPU."""
        method = self.method
        device = self.device
        if method == PLAIN:
            method = "fedavg"
            device = "cpu"
        changes = {"device": device, "precision": self.precision, "engine": self.engine}
        if self.workload == TRANSFORMER:
            texts = 5000
            if self.quick:
                texts = 200
            experiment = transformer_experiment(method, quick=self.quick, **changes)
            experiment = experiment.with_values({"data.name": TRANSFORMER}, "Python")
            return prepare(resolve(experiment), transformer_data(texts))
        workload = workload_of(self.workload, quick=self.quick)
        dataset = data_of(workload, Path(self.data))
        return prepare(resolve(workload.experiment(method, **changes)), dataset)

    def contestant(self, prepared: Prepared) -> Contestant:
        """The program that trains."""
        if self.method != PLAIN:
            return FedstillLoop(prepared)
        network = contract.build(prepared.world.model(SERVER)).to(self.device)
        return PlainLoop(task_of(prepared, self.rounds), network)


def rounds(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of rounds without evaluation and checkpoints, until all are done or SIGINT comes.

    If some are missing, ``seconds_of_all_rounds`` adds the median for each of them.
    """
    training = Training(**fields)
    began = time.perf_counter()
    prepared = training.prepared()
    contestant = training.contestant(prepared)
    start_up = time.perf_counter() - began

    seconds: list[float] = []
    model_digest = ""
    with suppress(KeyboardInterrupt), _engine_notes() as notes:
        while len(seconds) < training.rounds:
            seconds.append(_seconds_of_round(contestant, training.device))
            if len(seconds) == min(DIGEST_AFTER, training.rounds):
                model_digest = _digest(contestant.parameters())
    if not seconds:
        raise SystemExit("the time was over before the first round ended")

    median = statistics.median(seconds[1:] or seconds)
    missing = training.rounds - len(seconds)
    return {
        "rounds": len(seconds),
        "rounds_planned": training.rounds,
        "start_up": start_up,
        "first_round": seconds[0],
        "median_round": median,
        "slowest_round": max(seconds[1:] or seconds),
        "seconds": sum(seconds),
        "seconds_of_all_rounds": sum(seconds) + missing * median,
        "engine": prepared.settings.engine,
        "digest_after": min(DIGEST_AFTER, training.rounds),
        "model_sha256": model_digest,
        "notes": sorted(notes),
        "memory": _peak_memory(training.device),
    }


@contextmanager
def _engine_notes() -> Iterator[set[str]]:
    """The messages of the engine during the block, e.g. the reason why a step is not recorded."""
    messages: set[str] = set()
    handler = logging.Handler()

    def note(record: logging.LogRecord) -> None:
        messages.add(record.getMessage())

    handler.emit = note  # type: ignore[method-assign]
    log = logging.getLogger("fedstill.engine")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _seconds_of_round(contestant: Contestant, device: str) -> float:
    began = time.perf_counter()
    contestant.run_round()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _digest(parameters: Mapping[str, Tensor]) -> str:
    """The SHA-256 of a model's bits."""
    values = [parameters[name].detach().cpu().contiguous() for name in sorted(parameters)]
    return digest(*(value.flatten().view(torch.uint8).numpy().tobytes() for value in values))


def _peak_memory(device: str) -> int | None:
    """The most bytes of a GPU's memory that torch has used; None for the CPU."""
    if torch.device(device).type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device)


# Resumes.


class StopAfter(Quiet):
    """Stops a run after a number of stages."""

    def __init__(self, stages: int) -> None:
        self.remaining = stages

    def stop(self) -> bool:
        """Whether that stage has ended."""
        self.remaining -= 1
        return self.remaining == 0


def resumes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Check that runs that were stopped after a stage end with the bits of uninterrupted runs.

    Raises SystemExit with the names of the runs that do not.
    """
    same = {}
    for name, method in fields["runs"]:
        workload = workload_of(name, quick=fields["quick"])
        dataset = data_of(workload, Path(fields["data"]))
        changes = {"device": fields["device"], "rounds": RESUMED_ROUNDS, "reuse": False}
        experiment = workload.experiment(method, **changes)
        same[f"{name}, {method}"] = resumes_to_same_bits(experiment, dataset)
    different = [run for run, is_same in same.items() if not is_same]
    if different:
        raise SystemExit(f"other bits after a resume: {'; '.join(different)}")
    return {"same_bits": same}


def resumes_to_same_bits(experiment: Experiment, dataset: Dataset) -> bool:
    """Whether a run that is stopped after its second stage ends with the same model and journal."""
    with tempfile.TemporaryDirectory(prefix="card-") as name:
        uninterrupted = Path(name) / "uninterrupted"
        stopped = Path(name) / "stopped"
        run(experiment, uninterrupted, dataset, watch=Quiet())
        try:
            run(experiment, stopped, dataset, watch=StopAfter(2))
        except Interrupted:
            resume(stopped, dataset, watch=Quiet())
        else:
            raise SystemExit("a run ended before it was stopped")
        return _bits(uninterrupted) == _bits(stopped)


def _bits(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """The digest of a run's final model, and its rounds and clients without times."""
    events = read_journal(folder / "journal.jsonl")
    trained = [without_times(event) for event in events if event["event"] in ("round", "client")]
    return digest((folder / "model.safetensors").read_bytes()), trained


# The test suite.


def suite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Run tests with pytest: the numbers of tests by outcome, and the names of those that failed.

    The environment chooses their device.
    """
    import pytest

    # Other plugins that are installed may break the tests.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    processes: list[str] = []
    if fields["processes"] > 1 and find_spec("xdist"):
        processes = ["-p", "xdist", "-n", str(fields["processes"])]
    with tempfile.TemporaryDirectory(prefix="card-") as name:
        report = Path(name) / "tests.xml"
        options = ["-p", "no:cacheprovider", "-rf", "--tb=short", f"--junitxml={report}"]
        code = pytest.main([*options, *processes, *fields["paths"]])
        outcomes = outcomes_of(report)
    return {"exit_code": int(code), **outcomes}


def outcomes_of(report: Path) -> dict[str, Any]:
    """The outcomes in a report of pytest in JUnit's format."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcome = "passed"
        if case.find("skipped") is not None:
            outcome = "skipped"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
            failures.append(f"{case.get('classname')}::{case.get('name')}")
        counts[outcome] += 1
    return {**counts, "failures": failures}


PARTS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "rounds": rounds,
    "resumes": resumes,
    "suite": suite,
}


def main(arguments: Sequence[str]) -> int:
    """Run one part; 1 if tests failed."""
    name, fields = arguments
    result = PARTS[name](json.loads(fields))
    print(json.dumps(result), flush=True)
    return int(result.get("exit_code", 0) != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
