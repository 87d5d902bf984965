"""The pooled engine: faults that threads could cause. ``test_every_method.py`` compares its bits
with those of the serial engine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, TrainingStart, View, World
from fedstill.core.trees import same_bits
from fedstill.engines.hardware import workers
from fedstill.engines.pooled import LIGHT_FLOPS, PooledEngine
from fedstill.engines.serial import Memory
from fedstill.models import contract
from fedstill.running.checkpoint import StoredMemory
from fedstill.running.preparation import Prepared, prepare

pytestmark = pytest.mark.usefixtures("with_threads")

STAGE = Stage(1, 0, "train", (0, 1, 2, 3, 4, 5))


@pytest.fixture(scope="module")
def ready() -> Prepared:
    return prepare(resolve(toys.toy()), toys.blobs())


def pooled(ready: Prepared, count: int, memory: Memory | None = None) -> PooledEngine:
    """An engine with so many workers."""
    return PooledEngine(ready.world, ready.sites, memory or Memory(), workers=count)


def payloads(ready: Prepared, stage: Stage = STAGE) -> dict[int, Payload]:
    """Initial parameters for the clients of a stage."""
    return {client: Payload(params=ready.world.initial(client)) for client in stage.clients}


@dataclass(frozen=True)
class Meeting(ClientWork):
    """Clients that wait for each other. Client 2 fails, and so do all that have several torch
    threads.
    """

    barrier: threading.Barrier

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        self.barrier.wait(timeout=30)
        if view.client == 2:
            raise RuntimeError("the disk of this site is gone")
        if torch.get_num_threads() != 1:
            raise RuntimeError(f"{torch.get_num_threads()} torch threads")
        return super().begin(payload, client_state, view, world)


def test_clients_act_side_by_side_and_one_that_fails_is_a_reply(ready: Prepared) -> None:
    torch.set_num_threads(2)
    engine = pooled(ready, 3)
    replies = engine.run(Meeting(threading.Barrier(3)), STAGE, payloads(ready), 7)
    engine.close()

    clients = [reply.client for reply in replies]
    assert clients == list(STAGE.clients), "in the order of the schedule"
    (failed,) = (reply for reply in replies if reply.failure)
    assert failed.client == 2
    assert re.fullmatch(
        r"RuntimeError: the disk of this site is gone \(test_pooled.py, line \d+, in begin\)",
        failed.failure,
    )


def test_a_damaged_memory_ends_the_stage(ready: Prepared, tmp_path: Path) -> None:
    memory = StoredMemory(tmp_path)
    memory.index[1] = ("gone.safetensors", "0" * 64)
    engine = pooled(ready, 2, memory)
    with pytest.raises(CorruptFile, match="client 1"):
        engine.run(ClientWork(), STAGE, payloads(ready), 7)
    engine.close()


@dataclass(frozen=True)
class Named(ClientWork):
    """Clients that note the name of their thread."""

    threads: list[str]

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        self.threads.append(threading.current_thread().name)
        return super().begin(payload, client_state, view, world)


@pytest.mark.parametrize("reason", ["dropout", "one client", "small"])
def test_stages_that_gain_nothing_or_draw_from_one_generator_stay_in_one_thread(
    ready: Prepared, reason: str
) -> None:
    if reason == "dropout":
        ready = prepare(resolve(toys.toy(model="simple_cnn")), toys.blobs_of(8))
    stage = STAGE
    if reason == "one client":
        stage = Stage(1, 0, "train", (3,), sequential=True)
    engine = pooled(ready, 3)
    engine.light_flops = 0.0
    if reason == "small":
        engine.light_flops = LIGHT_FLOPS
    work = Named([])

    replies = engine.run(work, stage, payloads(ready, stage), 7)

    assert not any(reply.failure for reply in replies)
    assert set(work.threads) == {threading.current_thread().name}


def test_initial_weights_are_the_same_while_other_threads_build_modules() -> None:
    spec = contract.spec_for("mlp", (1, 4, 4), 5, {"hidden": (8,)})
    expected = contract.initial(spec, 3)
    stop = threading.Event()

    def build() -> None:
        while not stop.is_set():
            contract.thread_modules().__dict__.clear()
            contract.module(spec)

    builders = [threading.Thread(target=build) for _ in range(2)]
    for builder in builders:
        builder.start()
    try:
        for _ in range(100):
            assert same_bits(contract.initial(spec, 3), expected)
    finally:
        stop.set()
        for builder in builders:
            builder.join()


@pytest.mark.parametrize("count", ["0", "many", "-1", "1.5"])
def test_a_number_of_workers_that_is_none_is_refused(
    count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSTILL_WORKERS", count)
    with pytest.raises(ConfigError, match="FEDSTILL_WORKERS"):
        workers()


@pytest.mark.parametrize(
    ("variables", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_waiting_threads_fall_asleep_soon_unless_told_otherwise(
    variables: dict[str, str], spins: str | None
) -> None:
    environment = dict(os.environ)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        environment.pop(name, None)
    code = "import fedstill, os; print(os.environ.get('GOMP_SPINCOUNT'))"

    output = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert output.strip() == str(spins)
