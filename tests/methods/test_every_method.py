"""What holds for every registered method: it runs, learns, and resumes to the same bits after any
of its stages.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import plain
import pytest

import toys
from fedstill.config.experiment import Experiment
from fedstill.core import descriptions, registry
from fedstill.core.capabilities import Need
from fedstill.core.errors import Interrupted
from fedstill.data.dataset import Dataset
from fedstill.running.journal import read_journal, without_times
from fedstill.running.runner import resume, run
from flowers import needs_flower
from run_bits import StopAfter, assert_same_bits, bits, stopped

METHODS = [n for n in registry.names("method") if not n.startswith("toy_")]
SLOW_LEARNERS = ("fedbabu", "glfc_local", "hiper_baseline", "hiper_temperature")
"""Methods that know too little after two rounds, and get a third one."""


def experiment(name: str) -> Experiment:
    method = registry.lookup("method", name).build()
    needs = method.requires()
    # among peers there is one round to learn in
    epochs = 4 if method.topology == "peer_to_peer" else 2
    model: dict[str, object] = {"plan": {"epochs": epochs, "batch": 20, "lr": 0.2}}
    if Need.SLIM in needs:
        model = {"model": plain.toy_slim.__name__, "plan": {"epochs": 1, "batch": 20}}
    if name == "feddf":  # its server trains with the same plan
        model = {"plan": {"epochs": 2, "batch": 10, "lr": 0.1}}
    if name == "cwc":  # its penalty is steep: importance grows as the way gets shorter
        model = {"plan": {"epochs": 4, "batch": 10, "lr": 0.03}}
    if method.topology == "public_logits":
        model = {
            "clients": {"models": ("mlp", "logistic")},
            "plan": {
                "epochs": 2,
                "batch": 20,
                "lr": 0.2,
                "optimiser": "sgd",
                "teach_server": {"epochs": 16},
            },
        }
    return toys.toy(name, **{**toys.suited(name), "topology": {"clients": 4}, **model})


def data() -> Dataset:
    """Fifty examples for each of four clients."""
    return toys.blobs(size=200)


def shorter(name: str) -> Experiment:
    """Two rounds instead of three, where a method learns enough in them."""
    whole = experiment(name)
    if whole.rounds < 3 or name in SLOW_LEARNERS:
        return whole
    return replace(whole, rounds=2)


@pytest.fixture(scope="module", params=METHODS)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A method's name, and its run by three workers."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSTILL_WORKERS", "3")
        # with threads, however small the networks
        patch.setattr("fedstill.engines.pooled.LIGHT_FLOPS", 0.0)
        run(replace(shorter(request.param), engine="pooled"), folder, data=data())
    return request.param, folder


def test_it_learns_and_refuses_nothing(whole: tuple[str, Path]) -> None:
    events = read_journal(whole[1] / "journal.jsonl")
    assert not [e for e in events if e["event"] == "client" and "refused" in e]
    last = [e for e in events if e["event"] == "round"][-1]
    answers = ("query_average_accuracy", "accuracy", "personal_accuracy")
    assert next(last[k] for k in answers if last.get(k) is not None) > 0.4, "chance is 0.2"


def test_by_the_serial_engine_and_resumed_after_any_stage_it_has_the_same_bits(
    whole: tuple[str, Path], tmp_path: Path
) -> None:
    """Stopped after every single stage, and resumed from what the resumed run before had
    written.
    """
    name, folder = whole
    serial = replace(shorter(name), engine="serial")
    other, stops = stopped(serial, tmp_path / "run", 1, data()), 1
    while True:
        try:
            resume(other, data(), watch=StopAfter(1))
            break
        except Interrupted:
            stops += 1
    assert stops == len(
        {
            (e["round"], e["stage"])
            for e in read_journal(folder / "journal.jsonl")
            if e["event"] == "client"
        }
    )
    ours, theirs = bits(other), bits(folder)
    assert ours.pop("config.toml") != theirs.pop("config.toml"), "they name the engine"
    assert_same_bits(ours, theirs)


@needs_flower
def test_over_flower_and_resumed_it_has_the_same_bits(
    whole: tuple[str, Path], tmp_path: Path
) -> None:
    """Every message is serialised; the second half runs on new nodes, which find what they remember
    on their disks.
    """
    name, folder = whole
    stages = len(
        {
            (e["round"], e["stage"])
            for e in read_journal(folder / "journal.jsonl")
            if e["event"] == "client"
        }
    )
    over = replace(shorter(name), engine="flower")
    half = stopped(over, tmp_path / "run", max(1, stages // 2), data())
    resume(half, data=data())
    assert (tmp_path / "run/model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()
    ours, theirs = (
        without_times(read_journal(f / "journal.jsonl")) for f in (tmp_path / "run", folder)
    )
    assert ours == theirs


def test_its_summary_and_fields_are_documented(whole: tuple[str, Path]) -> None:
    entry = registry.lookup("method", whole[0])
    assert descriptions.summary(entry).endswith(".")
    module = __import__(entry.target.__module__, fromlist=["__doc__"])
    assert "Source:" in module.__doc__
