"""A run neither depends on the settings of the process that calls it nor changes them: it has the
same bits with any settings, and restores them at its end.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import fedstill
import toys
from fedstill.core.errors import Interrupted
from fedstill.core.method import ClientWork
from fedstill.core.process_settings import (
    at_the_end,
    process_settings,
    set_environment,
)
from fedstill.core.records import Payload, Reply, Stage, State, Step, TrainingStart, World
from fedstill.data.dataset import Dataset
from fedstill.engines.devices import make_deterministic
from fedstill.engines.hardware import run_in_parallel
from fedstill.methods.fedavg import FedAvg
from fedstill.running.recording import Quiet
from run_bits import assert_same_bits, bits

pytestmark = pytest.mark.usefixtures("with_threads")

Runs = dict[str, dict[str, Any]]
"""The bits of some runs, by name."""

EXPERIMENT = toys.toy("fedntd", model={"name": "tiny_cnn"}, rounds=2, measure=("local",))
CHAIN = toys.toy("fedseq", rounds=2, topology={"kind": "sequential", "clients": 6, "sampled": 3})


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")  # whose tensors hold nothing: any use of them fails
    yield


@contextmanager
def device_block() -> Iterator[None]:
    with torch.device("meta"):
        yield


@contextmanager
def three_threads() -> Iterator[None]:
    torch.set_num_threads(3)
    yield


@contextmanager
def rounded_products() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield


@contextmanager
def without_onednn() -> Iterator[None]:
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    yield


@contextmanager
def small_numbers_flushed() -> Iterator[None]:
    torch.set_flush_denormal(True)
    yield


@contextmanager
def numpy_raises() -> Iterator[None]:
    with np.errstate(all="raise"):
        yield


@contextmanager
def warnings_raise() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def lower_precision() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "default dtype": default_dtype,
    "default device": default_device,
    "a device's block": device_block,
    "three threads": three_threads,
    "rounded products": rounded_products,
    "without oneDNN": without_onednn,
    "small numbers flushed": small_numbers_flushed,
    "NumPy raises": numpy_raises,
    "warnings raise": warnings_raise,
    "autocast": lower_precision,
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
}


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    torch.set_flush_denormal(False)


def settings() -> dict[str, Any]:
    """The settings of this process that a run must not change."""
    small = torch.tensor(1e-40, dtype=torch.float32, device="cpu")
    products = {}
    if hasattr(torch.backends, "fp32_precision"):
        products = {
            name: getattr(torch.backends.mkldnn, name).fp32_precision
            for name in ("matmul", "conv", "rnn")
        }
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "products": [torch.get_float32_matmul_precision(), products],
        "onednn": torch.backends.mkldnn.enabled,
        "deterministic": torch.get_deterministic_debug_mode(),
        "small numbers": bool((small * 1).item()),
        "numpy errors": np.geterr(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "gradients": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "threads alive": {thread.name for thread in threading.enumerate()},
        "torch draws": torch.default_generator.get_state().tolist(),
        "numpy draws": str(np.random.get_state()),
        "python draws": random.getstate(),
    }


@contextmanager
def unchanged() -> Iterator[None]:
    """The settings of this process are the same after the block."""
    settings_at_start = settings()
    yield
    settings_at_end = settings()
    changed = {key for key in settings_at_start if settings_at_end[key] != settings_at_start[key]}
    assert changed == set()


@pytest.fixture(scope="module")
def data() -> Dataset:
    return toys.blobs()


@pytest.fixture(scope="module")
def plain(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs' bits in a process that has set nothing."""
    folder = tmp_path_factory.mktemp("plain")
    fedstill.run(EXPERIMENT, folder / "parallel", data)
    fedstill.run(CHAIN, folder / "chain", data)
    return {name: bits(folder / name) for name in ("parallel", "chain")}


class StopsInRound2(Quiet):
    """Stops a chain between two of its links."""

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        self.asked = (round, index) == (2, 1)

    def stop(self) -> bool:
        return self.asked


def run_both(folder: Path, data: Dataset) -> Runs:
    """The bits of a run, and of one that is stopped and resumed."""
    fedstill.run(EXPERIMENT, folder / "parallel", data)
    with pytest.raises(Interrupted):
        fedstill.run(CHAIN, folder / "chain", data, watch=StopsInRound2())
    fedstill.resume(folder / "chain", data)
    return {name: bits(folder / name) for name in ("parallel", "chain")}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_runs_have_the_same_bits_and_leave_the_process_as_it_was(
    name: str, plain: Runs, data: Dataset, tmp_path: Path
) -> None:
    with SURROUNDINGS[name](), unchanged():
        got = run_both(tmp_path, data)
    for run, want in plain.items():
        assert_same_bits(got[run], want)


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_data_and_models_are_the_same_in_every_surrounding(
    name: str, data: Dataset, tmp_path: Path
) -> None:
    fedstill.run(EXPERIMENT, tmp_path / "run", data)
    values = np.arange(60.0).reshape(20, 3)
    labels = np.arange(20) % 2
    images = np.zeros((5, 1, toys.SIDE, toys.SIDE), dtype=np.uint8)

    def computed() -> list[torch.Tensor]:
        rows = fedstill.from_tensors("rows", (values, labels), (values, labels))
        clients = fedstill.from_clients("owned", [(values, labels)] * 2, (values, labels))
        model = fedstill.load_model(tmp_path / "run")
        with torch.autocast("cpu", enabled=False):
            answers = model(images)
        examples = [rows.train, rows.test, clients.train, fedstill.load_dataset("digits").test]
        tensors = [tensor for e in examples for tensor in (e.values, e.labels)]
        return [*tensors, answers.detach(), model.noise(3)]

    want = computed()
    with SURROUNDINGS[name](), unchanged():
        got = computed()

    assert [tensor.device for tensor in got] == [tensor.device for tensor in want]
    assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in want]

    if name not in ("rounded products", "without oneDNN"):
        # The model is the caller's network, and answers with the caller's arithmetic.
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_in_an_event_loop_and_in_threads_at_the_same_time(
    plain: Runs, data: Dataset, tmp_path: Path
) -> None:
    async def both() -> list[Runs]:
        first = asyncio.to_thread(run_both, tmp_path / "first", data)
        second = asyncio.to_thread(run_both, tmp_path / "second", data)
        return [run_both(tmp_path / "here", data), *await asyncio.gather(first, second)]

    torch.set_default_dtype(torch.float64)
    for got in asyncio.run(both()):
        for run, want in plain.items():
            assert_same_bits(got[run], want)
    assert torch.get_default_dtype() == torch.float64


def test_a_run_that_fails_leaves_the_process_as_it_was(data: Dataset, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    diverges = replace(EXPERIMENT, plan={"epochs": 2, "batch": 20, "lr": 1e12})
    with unchanged(), pytest.raises(fedstill.FedstillError):
        fedstill.run(diverges, tmp_path / "run", data)


class NotesThreads(FedAvg):
    """Averages, and notes with how many torch threads each of its parts computes."""

    noted: ClassVar[set[tuple[str, int]]] = set()

    def note(self, part: str) -> None:
        self.noted.add((part, torch.get_num_threads()))

    def begin_round(self, state: State, stages: Sequence[Stage], world: World) -> State:
        self.note("begin_round")
        return super().begin_round(state, stages, world)

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        self.note("payload")
        return super().payload_for_client(state, client, stage, world)

    def work(self, stage: Stage) -> ClientWork:
        note = self.note

        class Notes(ClientWork):
            def terms(self, step: Step, start: TrainingStart) -> Mapping[str, torch.Tensor]:
                note("terms")
                return super().terms(step, start)

        return Notes()

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        self.note("aggregate")
        return super().aggregate(state, replies, stage, world)

    def predictors(self, state: State, world: World) -> Mapping[str, Any]:
        self.note("predictors")
        return super().predictors(state, world)


SERVER_PARTS = {"begin_round", "payload", "aggregate", "predictors"}


@pytest.mark.parametrize("engine", ["serial", "pooled"])
def test_clients_beside_others_have_the_first_number_of_threads_and_the_server_the_second(
    engine: str, data: Dataset, tmp_path: Path
) -> None:
    NotesThreads.noted.clear()
    fedstill.run(toys.toy(NotesThreads, threads=(2, 3), engine=engine), tmp_path / "run", data)
    assert NotesThreads.noted == {("terms", 2), *((part, 3) for part in SERVER_PARTS)}


def test_a_run_that_is_resumed_within_a_round_has_its_own_number_of_threads(
    data: Dataset, tmp_path: Path
) -> None:
    links = {"kind": "sequential", "clients": 6, "sampled": 3}
    chain = toys.toy(NotesThreads, rounds=2, threads=(2, 3), topology=links)
    with pytest.raises(Interrupted):
        fedstill.run(chain, tmp_path / "run", data, watch=StopsInRound2())

    NotesThreads.noted.clear()
    fedstill.resume(tmp_path / "run", data)
    assert NotesThreads.noted == {(part, 3) for part in {"terms", *SERVER_PARTS} - {"begin_round"}}


def test_blocks_nest_and_the_outermost_one_restores_the_settings() -> None:
    undone: list[str] = []
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    with process_settings():
        at_the_end(lambda: undone.append("first"))
        with process_settings():
            at_the_end(lambda: undone.append("second"))
            assert (torch.get_default_dtype(), torch.get_num_threads()) == (torch.float32, 1)
        assert (torch.get_default_dtype(), undone) == (torch.float32, [])

    assert (torch.get_default_dtype(), torch.get_num_threads()) == (torch.float64, 3)
    assert undone == ["second", "first"]


@pytest.fixture
def _nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The state of a new process; ``conftest.py`` freezes the objects of each worker."""
    monkeypatch.setattr("fedstill.core.process_settings._process._caller_freezes", False)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("_nothing_frozen")
def test_the_collector_does_not_search_earlier_objects_within_a_block() -> None:
    for _ in range(2):
        with process_settings():
            assert gc.get_freeze_count() > 0
            with process_settings():
                pass
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("_nothing_frozen")
def test_objects_that_the_caller_has_frozen_stay_frozen() -> None:
    gc.freeze()
    for _ in range(2):
        with process_settings():
            pass
        assert gc.get_freeze_count() > 0


def test_variables_are_put_back_and_those_of_the_caller_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FEDSTILL_TEST_SET", "mine")
    monkeypatch.delenv("FEDSTILL_TEST_UNSET", raising=False)
    with process_settings():
        set_environment({"FEDSTILL_TEST_SET": "fedstill's", "FEDSTILL_TEST_UNSET": "fedstill's"})
        set_environment({"FEDSTILL_TEST_SET": "again"})
        monkeypatch.setenv("FEDSTILL_TEST_CALLER", "set meanwhile")

    assert os.environ["FEDSTILL_TEST_SET"] == "mine"
    assert "FEDSTILL_TEST_UNSET" not in os.environ
    assert os.environ["FEDSTILL_TEST_CALLER"] == "set meanwhile"


def test_threads_that_test_shards_end_with_the_block() -> None:
    def name() -> str:
        return threading.current_thread().name

    with process_settings():
        used = set(run_in_parallel([name] * 4, 2))
        assert used <= {thread.name for thread in threading.enumerate()}

    assert not used & {thread.name for thread in threading.enumerate()}

    used = set(run_in_parallel([name] * 4, 2))
    assert not used & {thread.name for thread in threading.enumerate()}


def test_settings_of_a_run_on_a_card_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    def switches() -> list[Any]:
        backends = torch.backends
        return [
            backends.cudnn.deterministic,
            backends.cudnn.benchmark,
            backends.cudnn.allow_tf32,
            backends.cuda.matmul.allow_tf32,
            torch.get_deterministic_debug_mode(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        ]

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.use_deterministic_algorithms(False)
    switches_at_start = switches()
    with process_settings():
        make_deterministic("cuda")
        assert switches() != switches_at_start

    assert switches() == switches_at_start


def test_runs_in_two_threads_have_the_bits_of_runs_after_each_other(tmp_path: Path) -> None:
    """Clients with dropout draw from torch's global generator, which all threads share."""

    class Dropping(nn.Sequential):
        def __init__(self, classes: int) -> None:
            super().__init__(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, classes))

    def model_of(name: str) -> object:
        experiment = toys.toy(model=Dropping, rounds=3)
        result = fedstill.run(experiment, tmp_path / name, toys.blobs())
        return result.summary["model_sha256"]

    expected = model_of("alone")
    with ThreadPoolExecutor(3) as threads:
        assert set(threads.map(model_of, ("first", "second", "third"))) == {expected}
