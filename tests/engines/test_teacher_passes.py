"""Teachers' outputs: equal to plain forward passes, in as few of them as there can be, whatever the
workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import toys
from double import NEAR, widened
from fedstill.config.resolve import resolve
from fedstill.core.records import Tensors
from fedstill.engines import hardware
from fedstill.engines.hardware import WORKERS, run_in_parallel
from fedstill.engines.step import FrozenModel, Teachers
from fedstill.models import contract
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

SPEC = contract.spec_for("digits_cnn", (1, 8, 8), 5)
IMAGES = torch.randn(610, 1, 8, 8, generator=torch.Generator().manual_seed(0))
WIDE = IMAGES.double()
NAMED = {str(i): FrozenModel(SPEC, contract.initial(SPEC, i)) for i in range(4)}


def asked(teachers: Teachers, name: str, kind: str, x: Tensor, index: Tensor) -> Tensor:
    """What a step gets of a teacher for one batch."""
    known = teachers.table(name, kind)
    return teachers.on_batch(name, kind, x) if known is None else known[index]


def plainly(params: Tensors, x: Tensor) -> Tensor:
    module = contract.build(SPEC).double().eval()
    module.load_state_dict(dict(params))
    with torch.no_grad():
        return module(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("still", [True, False])
@pytest.mark.parametrize("kind", ["logits", "features"])
def test_outputs_are_those_of_a_plain_forward_pass(still: bool, kind: str) -> None:
    named = {name: widened(frozen.params) for name, frozen in NAMED.items()}
    wide = {name: FrozenModel(SPEC, params) for name, params in named.items()}
    teachers = Teachers(wide, WIDE if still else None, workers=2)
    index = torch.tensor([3, 600, 201, 99, 100])
    for name, params in named.items():
        asked(teachers, name, kind, WIDE[index], index)
        out = asked(teachers, name, "logits", WIDE[index], index)
        torch.testing.assert_close(out, plainly(params, WIDE[index]), rtol=0, atol=NEAR)


@pytest.mark.parametrize("still", [True, False])
def test_the_bits_do_not_depend_on_the_number_of_workers(still: bool) -> None:
    index = torch.arange(64)
    before = torch.get_num_threads()
    found = []
    for workers, threads in ((1, 1), (2, 1), (3, 1), (1, 2), (3, 2)):
        torch.set_num_threads(threads)
        x = IMAGES[index].clone()
        teachers = Teachers(NAMED, IMAGES if still else None, workers)
        found.append(
            torch.stack(
                [
                    asked(teachers, n, k, x, index).sum(1)
                    for n in NAMED
                    for k in ("logits", "features")
                ]
            )
        )
        assert torch.get_num_threads() == threads, "the caller's setting is left as it was"
    torch.set_num_threads(before)
    assert all(torch.equal(f, found[0]) for f in found)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every forward pass of a teacher that is made: of the body or of the whole."""
    made: list[str] = []

    def counted(run: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        def wrapped(*args: object) -> Tensor:
            made.append(name)
            return run(*args)

        return wrapped

    monkeypatch.setattr(contract, "forward", counted(contract.forward, "whole"))
    monkeypatch.setattr(contract, "features", counted(contract.features, "body"))
    return made


def test_still_inputs_are_passed_once(passes: list[str]) -> None:
    teachers = Teachers(NAMED, IMAGES, workers=1)
    for start in range(0, 600, 60):
        index = torch.arange(start, start + 60)
        for name in NAMED:
            asked(teachers, name, "logits", IMAGES[index], index)
    assert passes == ["whole"] * 7 * len(NAMED), "610 examples are seven shards"


def test_moving_inputs_are_passed_once_a_batch_whatever_is_asked(passes: list[str]) -> None:
    teachers = Teachers(NAMED, None, workers=1)
    for start in (0, 60, 120):
        index = torch.arange(start, start + 60)
        x = IMAGES[index]
        for kind in ("features", "logits", "features"):
            for name in NAMED:
                asked(teachers, name, kind, x, index)
    assert passes == ["body"] * 3 * len(NAMED)


def test_a_job_has_one_thread_and_stays_in_order() -> None:
    def job(i: int) -> Callable[[], tuple[int, int]]:
        return lambda: (i, torch.get_num_threads())

    for workers in (1, 2, 3):
        assert run_in_parallel([job(i) for i in range(7)], workers) == [(i, 1) for i in range(7)]


def test_the_number_of_threads_is_a_threads_own_setting() -> None:
    """What the bits rest on: shards set one thread while the caller keeps its own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    inside: list[int] = []

    def other() -> None:
        torch.set_num_threads(1)
        inside.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert (inside, torch.get_num_threads()) == ([1], 2)
    torch.set_num_threads(before)


def test_a_teacher_that_fails_says_so() -> None:
    def broken() -> int:
        raise ValueError("no such layer")

    for workers in (1, 2):
        with pytest.raises(ValueError, match="no such layer"):
            run_in_parallel([broken, lambda: 1], workers)


@pytest.mark.parametrize("augment", [(), ("flip",)])
def test_a_chain_with_teachers_gives_the_same_bits_on_any_number_of_cores(
    augment: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = {"kind": "sequential", "clients": 6, "sampled": 4}
    models = []
    for workers in (1, 2, 3):
        monkeypatch.setenv(WORKERS, str(workers))
        toy = toys.toy(
            {"name": "sfedkd", "k": 3},
            rounds=2,
            topology=chain,
            data={"augment": augment},
            measure=(),
        )
        models.append(run(toy, tmp_path / str(workers), data=toys.blobs()).model)
    assert all(torch.equal(m[k], models[0][k]) for m in models for k in m)


def test_a_stage_of_many_clients_leaves_the_cores_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedstill.engines import clients

    seen: list[int] = []

    class Watched(Teachers):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**fields)
            seen.append(self.workers)

    monkeypatch.setattr(clients, "Teachers", Watched)
    monkeypatch.setenv(WORKERS, "3")
    for kind, expected in (("parallel", {1}), ("sequential", {3})):
        seen.clear()
        ready = prepare(
            resolve(toys.toy("fedntd", topology={"kind": kind, "clients": 6, "sampled": 4})),
            toys.blobs(),
        )
        method, stage = ready.settings.method, ready.settings.schedule(1, ready.world)[0]
        state, engine = method.initial_state(ready.world), ready.engine()
        payloads = {
            c: method.payload_for_client(state, c, stage, ready.world) for c in stage.clients
        }
        engine.run(method.work(stage), stage, payloads, 7)  # type: ignore[arg-type]
        assert set(seen) == expected
    assert hardware.cores() >= 1
