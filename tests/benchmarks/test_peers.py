"""What peers are given is what fedstill trains on, and what a contestant starts is ended."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.fedstill_loop import FedstillLoop
from benchmarks.peers import environments, processes, tasks
from benchmarks.peers.__main__ import MAX_DISTANCE
from benchmarks.peers.common import Task
from benchmarks.peers.entry import accuracy, distance
from benchmarks.plain import PlainLoop
from benchmarks.workloads import WORKLOADS

from double import NEAR, in_double
from fedstill.config.resolve import resolve
from fedstill.core.records import SERVER
from fedstill.models import contract
from fedstill.models.predictors import predictor
from fedstill.running.preparation import prepare

LEAVES = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("began", flush=True)
raise ValueError("no good")
"""
RUNS = """
import sys
from pathlib import Path
from benchmarks.peers import processes
processes.adopt()
ran = processes.run([sys.executable, "-c", sys.argv[1]], {}, Path(sys.argv[2]), 2)
print(ran.failure, len(processes.descendants()), ran.peak > 0, sep=";")
"""


@pytest.fixture
def small():
    workload = replace(tasks.resized("W4", 3, 2), clients=6)
    return workload, workload.dataset()


def test_a_task_is_the_same_after_it_was_written(tmp_path, small):
    workload, dataset = small
    task = tasks.task_of(prepare(resolve(workload.experiment("fedavg")), dataset), 2)
    task.save(tmp_path)
    again = Task.load(tmp_path)
    assert again.about == task.about
    for part in ("examples", "initial", "orders"):
        before, after = getattr(task, part), getattr(again, part)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("name", ["W1", "W4", "W4-MLP"])
def test_the_plain_network_is_the_workloads(name):
    workload = replace(tasks.resized(name), clients=2, sampled=2, images=20)
    ready = in_double(prepare(resolve(workload.experiment("fedavg")), workload.dataset()))
    task = tasks.task_of(ready, 1)
    x = task.examples["images"][:4]
    spec = ready.world.model(SERVER)
    ours = contract.forward(contract.module(spec), dict(task.initial), x)
    torch.testing.assert_close(task.network().double()(x), ours, rtol=0, atol=NEAR)


def test_the_plain_loop_ends_with_our_model_and_another_order_does_not(small):
    workload, dataset = small
    ready = in_double(prepare(resolve(workload.experiment("fedavg")), dataset))
    task = tasks.task_of(ready, 2)
    other = replace(task, orders={k: v.flip(1) for k, v in task.orders.items()})
    ours, plain, reversed_order = (
        FedstillLoop(ready),
        *(PlainLoop(t, task.network().double()) for t in (task, other)),
    )
    for _ in range(2):
        for loop in (ours, plain, reversed_order):
            loop.run_round()
    assert distance(task, plain.parameters(), ours.parameters()) < NEAR
    assert distance(task, reversed_order.parameters(), ours.parameters()) > MAX_DISTANCE


def test_accuracy_is_the_share_of_test_images_that_are_right(small):
    workload, dataset = small
    ready = prepare(resolve(workload.experiment("fedavg")), dataset)
    task = tasks.task_of(ready, 1)
    predict = predictor(ready.world.model(SERVER), task.initial)
    right = [predict(x).argmax(1) for x in task.examples["test_images"].split(250)]
    assert accuracy(task, task.initial) == float(
        (torch.cat(right) == task.examples["test_labels"]).double().mean()
    )


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="processes are found in Linux's /proc"
)
@pytest.mark.parametrize(
    ("does", "failure"),
    [(LEAVES, "ValueError: no good"), ("import time; time.sleep(600)", "not done within 2 s")],
)
def test_nothing_that_a_contestant_started_goes_on(tmp_path, does, failure):
    root = str(Path(tasks.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", RUNS, does, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
    )
    why, left, measured = done.stdout.strip().split(";")
    assert (why, left) == (failure, "0"), done.stderr
    assert measured == "True" or does == LEAVES, (
        "one that ends at once may have ended before its memory is looked at"
    )


def test_the_reason_of_a_failure_is_the_first_error_named(tmp_path):
    (tmp_path / "said").write_text(
        "Traceback:\n  x\nImportError: no such thing\nlauncher.ChildFailedError:\n=====\n"
    )
    assert processes.reason(tmp_path / "said") == "ImportError: no such thing"


def test_a_python_that_is_not_here_is_said_so():
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
    ready = in_double(prepare(resolve(workload.experiment("fedseq")), workload.dataset()))
    task = tasks.task_of(ready, 2)
    ours, plain = FedstillLoop(ready), PlainLoop(task, task.network().double())
    for _ in range(2):
        ours.run_round()
        plain.run_round()
    assert distance(task, plain.parameters(), ours.parameters()) < NEAR
