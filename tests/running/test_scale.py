"""Size: many clients cost no memory but their part of the split, and a long run holds no more than
a short one.
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
    """The bytes of all tensors that are alive, each storage once; those that an export traced with
    have none.
    """
    storages = {}
    for thing in gc.get_objects():
        kind = type(thing)  # an isinstance would wake objects that warn
        if (
            issubclass(kind, torch.Tensor)
            and not issubclass(kind, FakeTensor)
            and not thing.is_sparse
        ):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Looking(Quiet):
    """Calls something after each round."""

    def __init__(self, look: Callable[[], int]) -> None:
        self.look = look
        self.seen: list[int] = []

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        self.seen.append(self.look())


@pytest.mark.parametrize("engine", ["pooled", "vectorised"])
def test_ten_thousand_clients_hold_no_more_than_their_data(engine: str, tmp_path: Path) -> None:
    data = toys.blobs(size=20_000)
    model = 4 * (16 * 8 + 8 + 8 * 5 + 5)
    gc.collect()
    before, watch = live_bytes(), Looking(live_bytes)
    run(many(10_000, engine=engine), tmp_path / "run", data=data, watch=watch)
    positions = 8 * 20_000
    grown = max(watch.seen) - before
    assert grown < positions + 20 * model + 10_000, (
        "not one model for each of the 100 that act, let alone all"
    )
    acted = {
        e["client"] for e in read_journal(tmp_path / "run/journal.jsonl") if e["event"] == "client"
    }
    assert SAMPLED < len(acted) <= 2 * SAMPLED
    assert 0 < len(list((tmp_path / "run/memory").iterdir())) <= 2 * SAMPLED


def traced(clients: int, folder: Path) -> int:
    """The most bytes that Python objects and NumPy arrays had in a run in which two clients of many
    act.
    """
    data = toys.blobs(size=2 * clients)
    tracemalloc.start()
    try:
        run(many(clients, rounds=1, topology={"clients": clients, "sampled": 2}), folder, data=data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_nothing_is_made_for_a_client_before_it_acts(tmp_path: Path) -> None:
    """Each client more costs its two positions and labels in a few arrays, and its end; an object
    would be 64 bytes.
    """
    traced(100, tmp_path / "first")  # what is made once
    few, lots = (traced(clients, tmp_path / str(clients)) for clients in (10_000, 30_000))
    assert (lots - few) / 20_000 < 180
    journals = [
        (tmp_path / f"{clients}/journal.jsonl").stat().st_size for clients in (10_000, 30_000)
    ]
    assert journals[1] < journals[0] + 1000


def _peak(clients: int, pipe: Any) -> None:
    import resource

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run(
            many(clients, model={"name": "mlp", "hidden": (512,)}),
            Path(folder) / "run",
            data=toys.blobs(size=20_000),
        )
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


@pytest.mark.slow
def test_the_resident_set_does_not_grow_with_clients() -> None:
    peaks = [_elsewhere(_peak, clients)[-1] for clients in (200, 10_000)]
    assert peaks[1] - peaks[0] < 40e6, "10,000 models of 46 kB would be 460 MB"


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _long(engine: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    watch = Looking(_resident)
    with tempfile.TemporaryDirectory() as folder:
        small = {"clients": 20, "sampled": 4}
        run(
            many(20, engine=engine, rounds=1000, topology=small),
            Path(folder) / "run",
            data=toys.blobs(),
            watch=watch,
        )
    for seen in watch.seen:
        pipe.send(seen)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("engine", ["pooled", "vectorised"])
def test_a_thousand_rounds_leak_nothing(engine: str) -> None:
    resident = _elsewhere(_long, engine)
    assert len(resident) == 1000
    assert resident[-1] < 1.01 * resident[99], (
        f"{resident[99]:,} bytes after 100 rounds, {resident[-1]:,} after 1,000"
    )


def _elsewhere(target: Callable[..., None], *given: Any) -> list[int]:
    """What a fresh process sends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*given, theirs))
    process.start()
    theirs.close()
    found = []
    try:
        while True:
            found.append(ours.recv())
    except EOFError:
        process.join()
    assert process.exitcode == 0
    return found
