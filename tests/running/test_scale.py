"""Memory: a client costs no memory but its part of the split, and a long run needs no more than a
short one.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor

import toys
from fedstill.config.experiment import Experiment
from fedstill.running.journal import read_journal
from fedstill.running.recording import Quiet
from fedstill.running.runner import run

SAMPLED = 100


def many(clients: int, **changes: Any) -> Experiment:
    """Clients with two images each, of whom 100 act in a round, and remember a model."""
    values = {
        "rounds": 2,
        "measure": (),
        "partition": "iid",
        "topology": {"clients": clients, "sampled": SAMPLED},
        "plan": {"epochs": 1, "batch": 10, "lr": 0.05},
    }
    return toys.toy("moon", **{**values, **changes})


def live_bytes() -> int:
    """The bytes of all dense tensors, each storage once. Fake tensors of an export have none."""
    storages = {}
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would make some objects warn
        is_tensor = issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor)
        if is_tensor and not thing.is_sparse:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class ValueByRound(Quiet):
    """Calls a function after each round and stores its values."""

    def __init__(self, look: Callable[[], int]) -> None:
        self.look = look
        self.values: list[int] = []

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        self.values.append(self.look())


@pytest.mark.parametrize("engine", ["pooled", "vectorised"])
def test_ten_thousand_clients_hold_no_more_than_their_data(engine: str, tmp_path: Path) -> None:
    """Neither a model for each client, nor one for each of the 100 clients that act."""
    data = toys.blobs(size=20_000)
    hidden_layer = 16 * 8 + 8
    head = 8 * 5 + 5
    model_bytes = 4 * (hidden_layer + head)
    gc.collect()
    bytes_at_start = live_bytes()
    watch = ValueByRound(live_bytes)
    run(many(10_000, engine=engine), tmp_path / "run", data=data, watch=watch)

    position_bytes = 8 * 20_000
    assert max(watch.values) - bytes_at_start < position_bytes + 20 * model_bytes + 10_000
    events = read_journal(tmp_path / "run/journal.jsonl")
    active_clients = {event["client"] for event in events if event["event"] == "client"}
    assert SAMPLED < len(active_clients) <= 2 * SAMPLED
    assert 0 < len(list((tmp_path / "run/memory").iterdir())) <= 2 * SAMPLED


def traced_peak(clients: int, folder: Path) -> int:
    """The most bytes that Python objects and NumPy arrays had in a run in which two clients of many
    act.
    """
    data = toys.blobs(size=2 * clients)
    experiment = many(clients, rounds=1, topology={"clients": clients, "sampled": 2})
    tracemalloc.start()
    try:
        run(experiment, folder, data=data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_object_is_created_for_a_client_before_it_acts(tmp_path: Path) -> None:
    """A further client costs its two positions and labels in a few arrays, and its end; an object
    would add 64 bytes.
    """
    traced_peak(100, tmp_path / "first")  # creates what is created once in a process
    peak_of_10_000 = traced_peak(10_000, tmp_path / "10000")
    peak_of_30_000 = traced_peak(30_000, tmp_path / "30000")
    assert (peak_of_30_000 - peak_of_10_000) / 20_000 < 180

    journal_of_10_000 = (tmp_path / "10000/journal.jsonl").stat().st_size
    journal_of_30_000 = (tmp_path / "30000/journal.jsonl").stat().st_size
    assert journal_of_30_000 < journal_of_10_000 + 1000


def _peak(clients: int, pipe: Any) -> None:
    """Send the largest resident set of a run."""
    import resource

    torch.set_num_threads(1)
    experiment = many(clients, model={"name": "mlp", "hidden": (512,)})
    with tempfile.TemporaryDirectory() as folder:
        run(experiment, Path(folder) / "run", data=toys.blobs(size=20_000))
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


@pytest.mark.slow
def test_the_resident_set_does_not_grow_with_clients() -> None:
    (peak_of_200,) = _numbers_of_process(_peak, 200)
    (peak_of_10_000,) = _numbers_of_process(_peak, 10_000)
    assert peak_of_10_000 - peak_of_200 < 40e6, "10,000 models of 46 kB would be 460 MB"


def _resident() -> int:
    """The bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _long(engine: str, pipe: Any) -> None:
    """Send the resident set after each of a thousand rounds."""
    torch.set_num_threads(1)
    watch = ValueByRound(_resident)
    experiment = many(20, engine=engine, rounds=1000, topology={"clients": 20, "sampled": 4})
    with tempfile.TemporaryDirectory() as folder:
        run(experiment, Path(folder) / "run", data=toys.blobs(), watch=watch)
    for resident in watch.values:
        pipe.send(resident)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("engine", ["pooled", "vectorised"])
def test_a_thousand_rounds_leak_nothing(engine: str) -> None:
    resident = _numbers_of_process(_long, engine)
    assert len(resident) == 1000
    after_100_rounds = resident[99]
    after_1000_rounds = resident[999]
    assert after_1000_rounds < 1.01 * after_100_rounds


def _numbers_of_process(target: Callable[..., None], *arguments: Any) -> list[int]:
    """The numbers that a function sends from a new process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    numbers = []
    try:
        while True:
            numbers.append(ours.recv())
    except EOFError:
        process.join()
    assert process.exitcode == 0
    return numbers
