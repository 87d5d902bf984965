"""Methods that do something at a task's end: every stage is resumed from, and every engine
agrees.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stacking
import torch

import toys
from double import in_double
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import Interrupted
from fedstill.data.dataset import Dataset
from fedstill.running.journal import read_journal, without_times
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from flowers import needs_flower
from run_bits import StopAfter, assert_same_bits, bits, stopped

pytestmark = pytest.mark.usefixtures("with_threads")

METHODS: dict[str, dict[str, Any]] = {
    "replay": {"name": "replay", "size": 8, "beta": 0.5, "nearest_mean": True},
    "der++": {"name": "replay", "size": 8, "beta": 0.5, "alpha": 0.5, "balance": "class"},
    "fedewc": {"name": "fedewc", "weight": 0.5, "samples": 20},
    "analytic": {"name": "analytic", "width": 20},
    "analytic by groups": {"name": "analytic", "width": 20, "groups": 3},
    "prototypes": {"name": "replay", "size": 0, "answers": "nearest_mean"},
    "fot": {"name": "fot", "keeps": 0.8, "grows": 0.05},
    "glfc": {"name": "glfc_local", "size": 8},
    "herding": {"name": "replay", "size": 8, "choose": "herding"},
}
"""Each with what it does beside its training."""

STREAM = {"kind": "classes", "tasks": 3, "head": "task", "join": 0.6, "lag": 1}


def experiment(which: str, **changes: Any) -> Experiment:
    values: dict[str, Any] = {
        "rounds": 6,
        "partition": {"kind": "iid"},
        "stream": STREAM,
        "plan": {"epochs": 1, "batch": 10, "lr": 0.05},
        "topology": {"clients": 6, "sampled": 4},
        "clients": toys.TOLERANT,
        "engine": "serial",
    }
    return toys.toy(METHODS[which], **{**values, **changes})


def data() -> Dataset:
    """Several batches of ten for most clients."""
    return toys.blobs(size=150)


@pytest.fixture(scope="module", params=METHODS)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(experiment(request.param), folder, data())
    return request.param, folder


def test_it_goes_through_its_tasks_and_refuses_nothing(whole: tuple[str, Path]) -> None:
    events = read_journal(whole[1] / "journal.jsonl")
    assert [e["task"] for e in events if e["event"] == "task"] == [0, 1, 2, 3]
    assert not [e for e in events if "refused" in e and e["event"] == "client"]


def test_it_is_resumed_after_every_stage(whole: tuple[str, Path], tmp_path: Path) -> None:
    which, folder = whole
    other = stopped(experiment(which), tmp_path / "run", 1, data())
    while True:
        try:
            resume(other, data(), watch=StopAfter(1))
            break
        except Interrupted:
            pass
    assert_same_bits(bits(other), bits(folder))


@pytest.mark.parametrize("engine", ["pooled", pytest.param("flower", marks=needs_flower)])
def test_other_engines_give_the_same_bits(
    whole: tuple[str, Path], engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    which, folder = whole
    monkeypatch.setenv("FEDSTILL_WORKERS", "2")
    run(replace(experiment(which), engine=engine), tmp_path / "run", data())
    assert (tmp_path / "run/model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()
    ours, theirs = (
        without_times(read_journal(f / "journal.jsonl")) for f in (tmp_path / "run", folder)
    )
    assert ours == theirs


@pytest.mark.parametrize("which", METHODS)
def test_a_stack_of_clients_gives_the_same_up_to_rounding(which: str) -> None:
    runs = [prepare(resolve(experiment(which, engine=e)), data()) for e in ("serial", "vectorised")]
    alone, together = (stacking.tensors(stacking.rounds(in_double(r), 6)[0]) for r in runs)
    assert list(alone) == list(together)
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=0, atol=1e-7)
