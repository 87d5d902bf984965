"""No step of training waits for a number: on a CUDA device that would stop the queue of kernels at
every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import stacking
import torch
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
    """Notes operations that would wait for a CUDA device; numbers in ``known`` are the host's
    own.
    """

    def __init__(self, known: list[Tensor] | None = None) -> None:
        super().__init__()
        self.found: list[str] = []
        self.count = 0
        self.known = {v.data_ptr() for v in known or []}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.count += 1
        op = func.overloadpacket
        own = bool(args) and isinstance(args[0], Tensor) and args[0].data_ptr() in self.known
        if op in WAITING | FROM_PYTHON and not own:
            self.found.append(str(func))
        if op is aten.index and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.found.append(f"{func} by a mask")
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Watch]]:
    """All steps of training, each under a watch."""
    seen: list[Watch] = []
    plain: Callable[..., None] = Training.step

    def step(self: Training, batch: Any) -> None:
        watch = Watch(getattr(self.optimiser, "steps", []))  # Adam counts its steps on the host
        seen.append(watch)
        with watch:
            plain(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", step)
        yield seen


APART = ("toy_failing", "fedseq", "cwc", "metafed")
"""Methods that fail, or that run on a chain only."""
NO_STEPS = ("afl",)
"""Methods that train nothing."""


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
@pytest.mark.parametrize("name", [n for n in registry.names("method") if n not in APART])
def test_no_step_waits_and_float32_stays_float32(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply of another type would be refused."""
    topology = registry.lookup("method", name).build().topology
    chain = topology == "sequential" and name.startswith("toy")
    if chain and engine == "vectorised":
        pytest.skip("a chain has nothing to stack")
    changes: dict[str, object] = {"topology": {"clients": 6, "sampled": 2}} if chain else {}
    if topology != "peer_to_peer":  # an epoch's steps are alike
        changes["plan"] = {**stacking.PLAN, "epochs": 1, "batch": 16}
    ready = stacking.ready(name, engine, **changes)
    with watched(monkeypatch) as steps:
        state, replies, refused = stacking.rounds(ready)
    assert replies
    assert not refused or name.startswith("toy_")
    assert {v.dtype for v in state.params.values()} <= {torch.float32, torch.int64}
    if name in NO_STEPS:
        assert not steps
        return
    assert steps
    assert sum(s.count for s in steps) > 10 * len(steps), "the watch sees operations"
    assert {op for s in steps for op in s.found} <= WRAPPED.get((name, engine), set())


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
@pytest.mark.parametrize("plan", [{"clip_norm": 0.5}, {"optimiser": "adam", "momentum": 0.0}])
def test_no_step_waits_for_images_clipping_or_adam(
    engine: str, plan: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = {"data": {"augment": ("crop", "flip", "rotation", "cutout")}, "model": "digits_cnn"}
    changes = {**images, "plan": {**stacking.PLAN, "epochs": 1, **plan}, "topology": {"clients": 3}}
    ready = prepare(resolve(stacking.experiment("fedntd", engine, **changes)), toys.blobs_of(8))
    stacking.rounds(ready, 1)  # what is sent to the device once has been sent
    with watched(monkeypatch) as steps:
        stacking.rounds(ready, 1)
    assert steps
    assert {op for s in steps for op in s.found} == set()


def test_the_watch_sees_what_waits() -> None:
    with Watch() as watch:
        v = torch.tensor([1.0, 2.0])
        v[v > 1].sum().item()
    assert len(watch.found) == 3


def test_evaluation_waits_once() -> None:
    data = Examples(torch.rand(600, 3, 2, 2), torch.arange(600) % 3)
    with Watch() as watch:
        right = correct_by_class(lambda x: x.mean((2, 3)), data, Inputs(), 3)
    assert watch.found == []
    hits = data.values.mean((2, 3)).argmax(1) == data.labels
    assert right.tolist() == [int(hits[data.labels == c].sum()) for c in range(3)]
