"""Precision: where it acts and where it must not, equal bits in the engines, and refusals by
name.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import stacking
import torch
from torch import Tensor

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core import trees
from fedstill.core.errors import ConfigError
from fedstill.core.method import ClientWork
from fedstill.core.records import Plan, Stage, Step, Tensors, TrainingStart
from fedstill.engines import devices
from fedstill.engines.clients import TrainingSetup
from fedstill.engines.devices import tf32_if_chosen
from fedstill.engines.loop import train
from fedstill.running.journal import read_journal, without_times
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

pytestmark = pytest.mark.usefixtures("with_threads")


@pytest.fixture(autouse=True)
def _has_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imitates bfloat16 where a processor has none: slowly, but it can be tested."""
    monkeypatch.setattr(devices, "has_bfloat16", lambda device: True)


def rounded(v: Tensor) -> bool:
    """Whether float32 numbers are all bfloat16 numbers."""
    return v.dtype == torch.float32 and torch.equal(v, v.bfloat16().float())


def assert_near(one: Tensors, other: Tensors, start: Tensors) -> None:
    """A number of bfloat16 is right to a 256th: the way that models went from where they began is
    to a tenth.
    """
    apart, way = (trees.norm(trees.sub(one, b)) for b in (other, start))
    assert apart < way / 10


@dataclass(frozen=True)
class Watched(ClientWork):
    """Training that notes what it was given."""

    seen: list[tuple[bool, ...]]

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        given = (step.features(), step.logits(), step.teacher("t"), step.teacher_features("t"))
        self.seen.append(tuple(rounded(v) for v in given))
        assert all(v.dtype == torch.float32 for v in (*given, *step.params.values()))
        return super().terms(step, start)


@pytest.mark.parametrize("augment", [(), ("flip",)])
def test_bfloat16_is_in_forward_passes_alone(augment: tuple[str, ...]) -> None:
    ready = prepare(resolve(toys.toy()), toys.blobs())
    stage = Stage(1, 0, "train", (0,))
    view, start = ready.sites.view(0, stage), ready.world.initial(0)
    inputs = replace(ready.sites.inputs, steps=augment)
    params = {}
    for kind in ("fp32", "bf16"):
        seen: list[tuple[bool, ...]] = []
        carry = TrainingStart(start, teachers={"t": start})
        plan = Plan(epochs=2, lr=0.1)
        setup = TrainingSetup(
            plan=plan,
            stage=stage,
            inputs=inputs,
            seed=7,
            precision=kind,  # type: ignore[arg-type]
            teacher_precision=kind,  # type: ignore[arg-type]
        )
        params[kind] = train(Watched(seen), carry, view, setup).params
        assert seen
        assert set(seen) == {(kind == "bf16",) * 4}
    for value in params["bf16"].values():
        assert value.dtype == torch.float32
        assert not rounded(value), "the weights that are kept are float32"
    assert_near(params["bf16"], params["fp32"], start)


@pytest.mark.parametrize("augment", [(), ("flip",)])
def test_teachers_alone_compute_in_bfloat16(augment: tuple[str, ...]) -> None:
    ready = prepare(resolve(toys.toy()), toys.blobs())
    stage = Stage(1, 0, "train", (0,))
    view, start = ready.sites.view(0, stage), ready.world.initial(0)
    seen: list[tuple[bool, ...]] = []
    setup = TrainingSetup(
        plan=Plan(epochs=2, lr=0.1),
        stage=stage,
        inputs=replace(ready.sites.inputs, steps=augment),
        seed=7,
        teacher_precision="bf16",
    )
    train(Watched(seen), TrainingStart(start, teachers={"t": start}), view, setup)
    assert set(seen) == {(False, False, True, True)}


def test_the_teachers_of_all_engines_compute_in_bfloat16() -> None:
    states = {
        (engine, precision): stacking.rounds(
            stacking.ready("fedntd", engine, teacher_precision=precision)
        )[0].params
        for engine in ("serial", "pooled", "vectorised")
        for precision in ("bf16", None)
    }
    serial, exact = states["serial", "bf16"], states["serial", None]
    assert all(torch.equal(serial[k], states["pooled", "bf16"][k]) for k in serial)
    assert any(not torch.equal(serial[k], exact[k]) for k in serial)
    start = stacking.ready("fedntd", "serial").world.initial(0)
    assert_near(serial, exact, start)
    assert_near(states["vectorised", "bf16"], serial, start)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedntd", "moon", pytest.param("fedalign", marks=pytest.mark.slow)]
)
def test_serial_and_pooled_have_the_same_bits_in_bfloat16(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {}
    monkeypatch.setenv("FEDSTILL_WORKERS", "3")
    for engine, kind in (("serial", "bf16"), ("pooled", "bf16"), ("pooled", "fp32")):
        folders[engine, kind] = tmp_path / f"{engine}-{kind}"
        experiment = stacking.experiment(name, engine, precision=kind, rounds=2)
        run(experiment, folders[engine, kind], data=stacking.few_blobs())
    model = {k: (f / "model.safetensors").read_bytes() for k, f in folders.items()}
    assert model["serial", "bf16"] == model["pooled", "bf16"] != model["pooled", "fp32"]
    serial, pooled = (
        without_times(read_journal(folders[e, "bf16"] / "journal.jsonl"))
        for e in ("serial", "pooled")
    )
    assert serial == pooled


def test_a_stack_trains_in_bfloat16_too() -> None:
    """A layer of a stack is one batched product, rounded elsewhere than a client's own."""
    ends = []
    for engine in ("serial", "vectorised"):
        ready = stacking.ready("fedntd", engine, precision="bf16")
        state, replies, refused = stacking.rounds(ready)
        assert replies
        assert not refused
        ends.append(state.params)
    assert_near(ends[1], ends[0], ready.world.initial(0))
    exact, _, _ = stacking.rounds(stacking.ready("fedntd", "vectorised"))
    assert any(not torch.equal(ends[1][k], exact.params[k]) for k in exact.params)


def test_what_a_device_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'tf32'"):
        resolve(Experiment(precision="tf32"))
    monkeypatch.setattr(devices, "has_bfloat16", lambda device: False)
    for key in ("precision", "teacher_precision"):
        with pytest.raises(ConfigError, match=f"{key} .*bfloat16"):
            resolve(Experiment(**{key: "bf16"}))
    assert resolve(Experiment()).precision == "fp32"


def test_products_are_rounded_where_that_was_asked_for() -> None:
    def rounded_ones() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    for kind in ("tf32", "fp32", "bf16"):
        with tf32_if_chosen(kind, torch.device("cuda")):
            assert rounded_ones() == (kind == "tf32",) * 2
        assert rounded_ones() == (False, False)


NEWER = """
import torch
from fedstill.engines.devices import tf32_if_chosen, make_deterministic
from fedstill.engines.passes import without_cudnn
{user}
said = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
before = [one.fp32_precision for one in said]
with tf32_if_chosen("fp32", torch.device("cpu")):
    assert [one.fp32_precision for one in said] == before
make_deterministic("cuda")
for kind in ("tf32", "fp32"):
    with tf32_if_chosen(kind, torch.device("cuda")), without_cudnn():
        assert all((one.fp32_precision == "tf32") == (kind == "tf32") for one in said)
    assert torch.backends.cudnn.enabled
assert all(one.fp32_precision != "tf32" for one in said)
"""


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="older switches")
@pytest.mark.parametrize(
    "user",
    [
        "torch.backends.cudnn.fp32_precision = 'tf32'",
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("torch.backends.fp32_precision = 'tf32'", marks=pytest.mark.slow),
    ],
)
def test_so_where_torchs_newer_switches_said_something_else(user: str) -> None:
    """In a process of its own: torch refuses to read its older switches once the newer ones
    differ.
    """
    subprocess.run([sys.executable, "-c", NEWER.format(user=user)], check=True)
