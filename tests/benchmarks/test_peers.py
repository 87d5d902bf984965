"""Comparisons with other libraries: they get the task that fedstill trains on, and no process of a
competitor survives its run.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from benchmarks.fedstill_loop import FedstillLoop
from benchmarks.peers import environments, processes, tasks
from benchmarks.peers.__main__ import MAX_DISTANCE
from benchmarks.peers.common import Task
from benchmarks.peers.entry import accuracy, distance
from benchmarks.plain import PlainLoop
from benchmarks.workloads import WORKLOADS, Workload

from double import NEAR, in_double
from fedstill.config.resolve import resolve
from fedstill.core.records import SERVER
from fedstill.models import contract
from fedstill.models.predictors import predictor
from fedstill.running import preparation

LEAVES_A_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("began", flush=True)
raise ValueError("no good")
"""
RUN_OF_PROGRAM = """
import sys
from pathlib import Path
from benchmarks.peers import processes
processes.adopt()
ran = processes.run([sys.executable, "-c", sys.argv[1]], {}, Path(sys.argv[2]), 2)
print(ran.failure, len(processes.descendants()), ran.peak > 0, sep=";")
"""


@dataclass(frozen=True)
class PreparedTask:
    """A prepared run, and its task of a number of rounds."""

    run: preparation.Prepared
    task: Task


def prepared(workload: Workload, rounds: int, method: str = "fedavg") -> PreparedTask:
    """A workload in float64."""
    experiment = workload.experiment(method)
    run = in_double(preparation.prepare(resolve(experiment), workload.dataset()))
    return PreparedTask(run, tasks.task_of(run, rounds))


SMALL = replace(tasks.resized("W4", 3, 2), clients=6)


def test_a_task_is_the_same_after_it_was_written(tmp_path):
    run = preparation.prepare(resolve(SMALL.experiment("fedavg")), SMALL.dataset())
    task = tasks.task_of(run, 2)
    task.save(tmp_path)

    loaded = Task.load(tmp_path)
    assert loaded.about == task.about
    for part in ("examples", "initial", "orders"):
        tensors = getattr(task, part)
        loaded_tensors = getattr(loaded, part)
        assert loaded_tensors.keys() == tensors.keys()
        assert all(torch.equal(loaded_tensors[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("name", ["W1", "W4", "W4-MLP"])
def test_the_plain_network_is_the_workloads(name):
    workload = replace(tasks.resized(name), clients=2, sampled=2, images=20)
    small = prepared(workload, 1)
    images = small.task.examples["images"][:4]

    network = contract.module(small.run.world.model(SERVER))
    expected = contract.forward(network, dict(small.task.initial), images)
    logits = small.task.network().double()(images)
    torch.testing.assert_close(logits, expected, rtol=0, atol=NEAR)


def plain_loop(task):
    """The plain implementation of a task, in float64."""
    return PlainLoop(task, task.network().double())


def test_the_plain_loop_ends_with_our_model_and_another_order_does_not():
    small = prepared(SMALL, 2)
    task = small.task
    reversed_orders = {key: order.flip(1) for key, order in task.orders.items()}
    ours = FedstillLoop(small.run)
    plain = plain_loop(task)
    reversed_plain = plain_loop(replace(task, orders=reversed_orders))

    for _ in range(2):
        ours.run_round()
        plain.run_round()
        reversed_plain.run_round()

    assert distance(task, plain.parameters(), ours.parameters()) < NEAR
    assert distance(task, reversed_plain.parameters(), ours.parameters()) > MAX_DISTANCE


def test_accuracy_is_the_share_of_correct_predictions_on_test_images():
    run = preparation.prepare(resolve(SMALL.experiment("fedavg")), SMALL.dataset())
    task = tasks.task_of(run, 1)
    predict = predictor(run.world.model(SERVER), task.initial)

    batches = task.examples["test_images"].split(250)
    predictions = torch.cat([predict(images).argmax(1) for images in batches])
    is_correct = predictions == task.examples["test_labels"]
    assert accuracy(task, task.initial) == float(is_correct.double().mean())


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="processes are found in Linux's /proc"
)
@pytest.mark.parametrize(
    ("program", "failure"),
    [
        (LEAVES_A_CHILD, "ValueError: no good"),
        ("import time; time.sleep(600)", "not done within 2 s"),
    ],
    ids=["leaves a child", "too slow"],
)
def test_no_process_of_a_competitor_survives_its_run(tmp_path, program, failure):
    root = str(Path(tasks.__file__).parents[2])
    search_path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    completed = subprocess.run(
        [sys.executable, "-c", RUN_OF_PROGRAM, program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": search_path},
    )

    printed_failure, descendants, has_peak = completed.stdout.strip().split(";")
    assert printed_failure == failure, completed.stderr
    assert descendants == "0", completed.stderr
    if program != LEAVES_A_CHILD:  # this one may end before its memory is measured
        assert has_peak == "True"


def test_the_reason_of_a_failure_is_the_first_named_error(tmp_path):
    output = tmp_path / "output"
    output.write_text(
        "Traceback:\n  x\nImportError: no such thing\nlauncher.ChildFailedError:\n=====\n"
    )
    assert processes.reason(output) == "ImportError: no such thing"


def test_a_missing_version_of_python_is_named():
    with pytest.raises(environments.NotInstalled, match=r"needs Python 9\.9"):
        environments.interpreter("9.9")


def test_the_plain_chain_ends_with_our_model():
    workload = replace(
        WORKLOADS["W2"],
        clients=4,
        sampled=3,
        images=20,
        shape=(1, 8, 8),
        model={"name": "digits_cnn"},
    )
    small = prepared(workload, 2, method="fedseq")
    ours = FedstillLoop(small.run)
    plain = plain_loop(small.task)

    for _ in range(2):
        ours.run_round()
        plain.run_round()

    assert distance(small.task, plain.parameters(), ours.parameters()) < NEAR
