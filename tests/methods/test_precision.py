"""Precision: where it acts and where it must not, equal bits in the engines, and refusals by
name.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

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
from fedstill.core.trees import same_bits
from fedstill.engines import devices
from fedstill.engines.clients import TrainingSetup
from fedstill.engines.devices import tf32_if_chosen
from fedstill.engines.loop import train
from fedstill.running.journal import read_journal, without_times
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

pytestmark = pytest.mark.usefixtures("with_threads")

AUGMENTATIONS = pytest.mark.parametrize("augment", [(), ("flip",)], ids=["images", "augmented"])


@pytest.fixture(autouse=True)
def _has_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imitates bfloat16 where a processor has none: slowly, but it can be tested."""
    monkeypatch.setattr(devices, "has_bfloat16", lambda device: True)


def is_rounded(values: Tensor) -> bool:
    """Whether float32 numbers are all bfloat16 numbers."""
    return values.dtype == torch.float32 and torch.equal(values, values.bfloat16().float())


def assert_near(params: Tensors, expected: Tensors, start: Tensors) -> None:
    """A number of bfloat16 is right to a 256th: the way that models went from where they began is
    right to a tenth.
    """
    error = trees.norm(trees.sub(params, expected))
    assert error < trees.norm(trees.sub(params, start)) / 10


class Rounded(NamedTuple):
    """Which outputs of a step are numbers of bfloat16."""

    features: bool
    logits: bool
    teacher_logits: bool
    teacher_features: bool


@dataclass(frozen=True)
class Watched(ClientWork):
    """Training that records what its objective computes with."""

    steps: set[Rounded] = field(default_factory=set)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        outputs = [
            step.features(),
            step.logits(),
            step.teacher("t"),
            step.teacher_features("t"),
        ]
        self.steps.add(Rounded(*map(is_rounded, outputs)))
        assert all(v.dtype == torch.float32 for v in (*outputs, *step.params.values()))
        return super().terms(step, start)


@dataclass(frozen=True)
class WatchedTraining:
    """The training of one client, with a teacher."""

    start: Tensors
    params: Tensors
    steps: set[Rounded]


def train_watched(augment: tuple[str, ...], **precisions: str) -> WatchedTraining:
    """Train one client in some precision, of its model and its teacher."""
    ready = prepare(resolve(toys.toy()), toys.blobs())
    stage = Stage(1, 0, "train", (0,))
    params = ready.world.initial(0)
    setup = TrainingSetup(
        plan=Plan(epochs=2, lr=0.1),
        stage=stage,
        inputs=replace(ready.sites.inputs, steps=augment),
        seed=7,
        **precisions,  # type: ignore[arg-type]
    )
    work = Watched()
    start = TrainingStart(params, teachers={"t": params})
    result = train(work, start, ready.sites.view(0, stage), setup)
    return WatchedTraining(params, result.params, work.steps)


@AUGMENTATIONS
def test_bfloat16_is_in_forward_passes_alone(augment: tuple[str, ...]) -> None:
    """The weights that are kept are float32."""
    exact = train_watched(augment, precision="fp32", teacher_precision="fp32")
    rounded = train_watched(augment, precision="bf16", teacher_precision="bf16")

    assert exact.steps == {Rounded(False, False, False, False)}
    assert rounded.steps == {Rounded(True, True, True, True)}
    for value in rounded.params.values():
        assert value.dtype == torch.float32
        assert not is_rounded(value)
    assert_near(rounded.params, exact.params, rounded.start)


@AUGMENTATIONS
def test_teachers_alone_compute_in_bfloat16(augment: tuple[str, ...]) -> None:
    training = train_watched(augment, teacher_precision="bf16")

    expected = Rounded(features=False, logits=False, teacher_logits=True, teacher_features=True)
    assert training.steps == {expected}


def two_rounds(engine: str, **changes: object) -> Tensors:
    """The model of FedNTD after two rounds under an engine."""
    rounds = stacking.rounds(stacking.ready("fedntd", engine, **changes))
    assert rounds.replies
    assert not rounds.refused
    return rounds.state.params


def initial_model() -> Tensors:
    """The model before the two rounds."""
    return stacking.ready("fedntd", "serial").world.initial(0)


def test_the_teachers_of_all_engines_compute_in_bfloat16() -> None:
    """The pooled engine has the serial one's bits; a stack rounds elsewhere."""
    exact = two_rounds("serial")
    serial = two_rounds("serial", teacher_precision="bf16")
    pooled = two_rounds("pooled", teacher_precision="bf16")
    stacked = two_rounds("vectorised", teacher_precision="bf16")

    assert same_bits(pooled, serial)
    assert not same_bits(serial, exact)
    assert_near(serial, exact, initial_model())
    assert_near(stacked, serial, initial_model())


@pytest.mark.parametrize(
    "name", ["fedavg", "fedntd", "moon", pytest.param("fedalign", marks=pytest.mark.slow)]
)
def test_serial_and_pooled_have_the_same_bits_in_bfloat16(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are not those of float32."""
    monkeypatch.setenv("FEDSTILL_WORKERS", "3")

    def model_of(engine: str, precision: str) -> bytes:
        folder = tmp_path / f"{engine}-{precision}"
        experiment = stacking.experiment(name, engine, precision=precision, rounds=2)
        run(experiment, folder, data=stacking.few_blobs())
        return (folder / "model.safetensors").read_bytes()

    serial = model_of("serial", "bf16")
    assert model_of("pooled", "bf16") == serial
    assert model_of("pooled", "fp32") != serial
    serial_events = read_journal(tmp_path / "serial-bf16" / "journal.jsonl")
    pooled_events = read_journal(tmp_path / "pooled-bf16" / "journal.jsonl")
    assert without_times(pooled_events) == without_times(serial_events)


def test_a_stack_trains_in_bfloat16_too() -> None:
    """A layer of a stack is one batched product, rounded elsewhere than a client's own."""
    serial = two_rounds("serial", precision="bf16")
    stacked = two_rounds("vectorised", precision="bf16")

    assert_near(stacked, serial, initial_model())
    assert not same_bits(stacked, two_rounds("vectorised"))


def test_precisions_that_a_device_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'tf32'"):
        resolve(Experiment(precision="tf32"))
    monkeypatch.setattr(devices, "has_bfloat16", lambda device: False)
    for key in ("precision", "teacher_precision"):
        with pytest.raises(ConfigError, match=f"{key} .*bfloat16"):
            resolve(Experiment(**{key: "bf16"}))
    assert resolve(Experiment()).precision == "fp32"


@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16"])
def test_products_are_rounded_to_tf32_only_on_request(precision: str) -> None:
    """And nowhere else."""

    def are_rounded() -> list[bool]:
        return [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]

    with tf32_if_chosen(precision, torch.device("cuda")):
        assert are_rounded() == [precision == "tf32"] * 2
    assert are_rounded() == [False, False]


PROGRAM = """
import torch
from fedstill.engines.devices import tf32_if_chosen, make_deterministic
from fedstill.engines.passes import without_cudnn
{user}
switches = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
before = [switch.fp32_precision for switch in switches]
with tf32_if_chosen("fp32", torch.device("cpu")):
    assert [switch.fp32_precision for switch in switches] == before
make_deterministic("cuda")
for kind in ("tf32", "fp32"):
    with tf32_if_chosen(kind, torch.device("cuda")), without_cudnn():
        for switch in switches:
            assert (switch.fp32_precision == "tf32") == (kind == "tf32")
    assert torch.backends.cudnn.enabled
assert all(switch.fp32_precision != "tf32" for switch in switches)
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
def test_torchs_newer_switches_are_set_and_restored_too(user: str) -> None:
    """In a process of its own: torch refuses to read its older switches once the newer ones
    differ.
    """
    subprocess.run([sys.executable, "-c", PROGRAM.format(user=user)], check=True)
