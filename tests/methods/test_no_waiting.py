"""No step of training waits for a number: on a CUDA device that would stop the queue of kernels at
every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import stacking
import torch
from all_methods import ON_A_CHAIN_ONLY, built
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import toys
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.records import Examples
from fedstill.data.inputs import Inputs
from fedstill.engines.loop import Training
from fedstill.engines.passes import correct_by_class
from fedstill.running.preparation import prepare

aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.bincount,
    aten.equal,
}
"""Operations whose result the host needs: its value, or how large it is."""

FROM_PYTHON = {aten.lift_fresh}
"""``torch.tensor`` of Python numbers: on a CUDA device a copy that is waited for."""

WRAPPED = {("moon", "vectorised"): {"aten.lift_fresh.default"}}
"""torch's own cosine similarity wraps its smallest length under vmap: a number on the host, that
stays there.
"""


class Watch(TorchDispatchMode):
    """Records operations that would wait for a CUDA device.

    on_host: tensors whose values are on the host, so that nobody waits for them.
    """

    def __init__(self, on_host: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.operations = 0
        self.on_host = {value.data_ptr() for value in on_host}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.operations += 1
        operation = func.overloadpacket
        if operation in WAITING | FROM_PYTHON and not self._is_on_host(args):
            self.waits.append(str(func))
        if operation is aten.index and _has_mask(args[1]):
            self.waits.append(f"{func} by a mask")
        return func(*args, **(kwargs or {}))

    def _is_on_host(self, args: tuple[Any, ...]) -> bool:
        if not args or not isinstance(args[0], Tensor):
            return False
        return args[0].data_ptr() in self.on_host


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Watch]]:
    """All steps of training, each under a watch."""
    watches: list[Watch] = []
    original: Callable[..., None] = Training.step

    def watched_step(training: Training, batch: Any) -> None:
        # Adam counts its steps on the host.
        watch = Watch(getattr(training.optimiser, "steps", []))
        watches.append(watch)
        with watch:
            original(training, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", watched_step)
        yield watches


def waits_of(watches: list[Watch]) -> set[str]:
    """All operations that would wait."""
    return {operation for watch in watches for operation in watch.waits}


NOT_RUN = ON_A_CHAIN_ONLY | {"toy_failing"}
"""Methods that run on a chain only, and one that fails."""

WITHOUT_STEPS = ("afl",)
"""Methods that train nothing."""


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
@pytest.mark.parametrize("name", [n for n in registry.names("method") if n not in NOT_RUN])
def test_no_step_waits_and_float32_stays_float32(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply of another type would be refused."""
    topology = built(name).topology
    changes: dict[str, object] = {}
    if topology == "sequential" and name.startswith("toy"):
        if engine == "vectorised":
            pytest.skip("a chain has nothing to stack")
        changes["topology"] = {"clients": 6, "sampled": 2}
    if topology != "peer_to_peer":  # one step is like another
        changes["plan"] = stacking.SHORT_PLAN
    ready = stacking.ready(name, engine, **changes)

    with watched(monkeypatch) as watches:
        rounds = stacking.rounds(ready)

    assert rounds.replies
    assert not rounds.refused or name.startswith("toy_")
    types = {value.dtype for value in rounds.state.params.values()}
    assert types <= {torch.float32, torch.int64}
    if name in WITHOUT_STEPS:
        assert not watches
        return
    assert watches
    operations = sum(watch.operations for watch in watches)
    assert operations > 10 * len(watches), "the watch sees operations"
    assert waits_of(watches) <= WRAPPED.get((name, engine), set())


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
@pytest.mark.parametrize("plan", [{"clip_norm": 0.5}, {"optimiser": "adam", "momentum": 0.0}])
def test_no_step_waits_for_images_clipping_or_adam(
    engine: str, plan: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = stacking.experiment(
        "fedntd",
        engine,
        data={"augment": ("crop", "flip", "rotation", "cutout")},
        model="digits_cnn",
        plan={**stacking.PLAN, "epochs": 1, **plan},
        topology={"clients": 3},
    )
    ready = prepare(resolve(experiment), toys.blobs_of(8))
    stacking.rounds(ready, 1)  # what is sent to the device once has been sent

    with watched(monkeypatch) as watches:
        stacking.rounds(ready, 1)

    assert watches
    assert waits_of(watches) == set()


def test_the_watch_records_operations_that_wait() -> None:
    with Watch() as watch:
        values = torch.tensor([1.0, 2.0])
        values[values > 1].sum().item()

    assert len(watch.waits) == 3


def test_evaluation_waits_once() -> None:
    """After all batches: not while it computes."""
    data = Examples(torch.rand(600, 3, 2, 2), torch.arange(600) % 3)

    with Watch() as watch:
        correct = correct_by_class(lambda x: x.mean((2, 3)), data, Inputs(), 3)

    assert watch.waits == []
    is_correct = data.values.mean((2, 3)).argmax(1) == data.labels
    assert correct.tolist() == [int(is_correct[data.labels == c].sum()) for c in range(3)]
