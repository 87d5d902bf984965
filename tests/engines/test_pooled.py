"""The pooled engine: what may go wrong when clients train side by side. Its bits are tested for
every method.
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
    return PooledEngine(ready.world, ready.sites, memory or Memory(), workers=count)


def sent(ready: Prepared, stage: Stage = STAGE) -> dict[int, Payload]:
    return {c: Payload(params=ready.world.initial(c)) for c in stage.clients}


@dataclass(frozen=True)
class Meeting(ClientWork):
    """Clients that wait for each other, notice how many threads torch gives them, and of whom one
    fails.
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
    replies = engine.run(Meeting(threading.Barrier(3)), STAGE, sent(ready), 7)
    engine.close()
    assert [r.client for r in replies] == list(STAGE.clients), "in the order of the schedule"
    (failed,) = (r for r in replies if r.failure)
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
        engine.run(ClientWork(), STAGE, sent(ready), 7)
    engine.close()


@dataclass(frozen=True)
class Named(ClientWork):
    """Clients that tell the thread they are in."""

    seen: list[str]

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        self.seen.append(threading.current_thread().name)
        return super().begin(payload, client_state, view, world)


@pytest.mark.parametrize("why", ["dropout", "one client", "small"])
def test_what_gains_nothing_or_draws_from_one_generator_stays_in_one_thread(
    ready: Prepared, why: str
) -> None:
    if why == "dropout":
        ready = prepare(resolve(toys.toy(model="simple_cnn")), toys.blobs_of(8))
    stage = Stage(1, 0, "train", (3,), sequential=True) if why == "one client" else STAGE
    work = Named([])
    engine = pooled(ready, 3)
    engine.light_flops = LIGHT_FLOPS if why == "small" else 0.0
    assert not any(r.failure for r in engine.run(work, stage, sent(ready, stage), 7))
    assert set(work.seen) == {threading.current_thread().name}


def test_initial_weights_are_the_same_while_other_threads_build_modules() -> None:
    spec = contract.spec_for("mlp", (1, 4, 4), 5, {"hidden": (8,)})
    want = contract.initial(spec, 3)
    stop = threading.Event()

    def build() -> None:
        while not stop.is_set():
            contract._modules.__dict__.clear()
            contract.module(spec)

    others = [threading.Thread(target=build) for _ in range(2)]
    for other in others:
        other.start()
    try:
        for _ in range(100):
            got = contract.initial(spec, 3)
            assert all(torch.equal(got[k], want[k]) for k in want)
    finally:
        stop.set()
        for other in others:
            other.join()


@pytest.mark.parametrize("said", ["0", "many", "-1", "1.5"])
def test_a_number_of_workers_that_is_none_is_refused(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSTILL_WORKERS", said)
    with pytest.raises(ConfigError, match="FEDSTILL_WORKERS"):
        workers()


@pytest.mark.parametrize(
    ("said", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_waiting_threads_fall_asleep_soon_unless_told_otherwise(
    said: dict[str, str], spins: str | None
) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import fedstill, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **said},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(spins)
