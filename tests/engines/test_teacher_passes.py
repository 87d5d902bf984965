"""Teachers' outputs are those of plain forward passes, with as few passes as possible, and do not
depend on the number of workers.
"""

from __future__ import annotations

import itertools
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
from fedstill.core.trees import same_bits
from fedstill.engines import hardware
from fedstill.engines.hardware import WORKERS, run_in_parallel, torch_threads
from fedstill.engines.step import FrozenModel, Teachers
from fedstill.models import contract
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

SPEC = contract.spec_for("digits_cnn", (1, 8, 8), 5)
IMAGES = torch.randn(610, 1, 8, 8, generator=torch.Generator().manual_seed(0))
WIDE = IMAGES.double()
NAMED = {str(i): FrozenModel(SPEC, contract.initial(SPEC, i)) for i in range(4)}


def output(teachers: Teachers, name: str, kind: str, x: Tensor, index: Tensor) -> Tensor:
    """The output of a teacher in the step of one batch."""
    table = teachers.table(name, kind)
    if table is None:
        return teachers.on_batch(name, kind, x)
    return table[index]


def plain_logits(params: Tensors, x: Tensor) -> Tensor:
    """The logits of a module in evaluation mode."""
    module = contract.build(SPEC).double().eval()
    module.load_state_dict(dict(params))
    with torch.no_grad():
        return module(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("table_images", [WIDE, None], ids=["still", "moving"])
@pytest.mark.parametrize("kind", ["logits", "features"])
def test_outputs_are_those_of_a_plain_forward_pass(table_images: Tensor | None, kind: str) -> None:
    """Also where a step has already read another output."""
    params_by_name = {name: widened(frozen.params) for name, frozen in NAMED.items()}
    wide = {name: FrozenModel(SPEC, params) for name, params in params_by_name.items()}
    teachers = Teachers(wide, table_images, workers=2)
    index = torch.tensor([3, 600, 201, 99, 100])
    x = WIDE[index]
    for name, params in params_by_name.items():
        output(teachers, name, kind, x, index)
        logits = output(teachers, name, "logits", x, index)
        torch.testing.assert_close(logits, plain_logits(params, x), rtol=0, atol=NEAR)


@pytest.mark.parametrize("table_images", [IMAGES, None], ids=["still", "moving"])
def test_the_bits_do_not_depend_on_the_number_of_workers(table_images: Tensor | None) -> None:
    index = torch.arange(64)
    outputs = []
    for workers, threads in ((1, 1), (2, 1), (3, 1), (1, 2), (3, 2)):
        with torch_threads(threads):
            x = IMAGES[index].clone()
            teachers = Teachers(NAMED, table_images, workers)
            sums = []
            for name, kind in itertools.product(NAMED, ("logits", "features")):
                sums.append(output(teachers, name, kind, x, index).sum(1))
            outputs.append(torch.stack(sums))
            assert torch.get_num_threads() == threads, "the caller's setting is left as it was"
    for sums_of_workers in outputs:
        assert torch.equal(sums_of_workers, outputs[0])


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The forward passes of teachers: of the body, or of the network."""
    parts: list[str] = []

    def counted(run: Callable[..., Tensor], part: str) -> Callable[..., Tensor]:
        def wrapped(*args: object) -> Tensor:
            parts.append(part)
            return run(*args)

        return wrapped

    monkeypatch.setattr(contract, "forward", counted(contract.forward, "network"))
    monkeypatch.setattr(contract, "features", counted(contract.features, "body"))
    return parts


def test_still_inputs_are_passed_once(passes: list[str]) -> None:
    teachers = Teachers(NAMED, IMAGES, workers=1)
    for start in range(0, 600, 60):
        index = torch.arange(start, start + 60)
        for name in NAMED:
            output(teachers, name, "logits", IMAGES[index], index)
    assert passes == ["network"] * 7 * len(NAMED), "610 examples are seven shards"


def test_moving_inputs_are_passed_once_a_batch_whatever_is_asked(passes: list[str]) -> None:
    teachers = Teachers(NAMED, None, workers=1)
    for start in (0, 60, 120):
        index = torch.arange(start, start + 60)
        x = IMAGES[index]
        for kind in ("features", "logits", "features"):
            for name in NAMED:
                output(teachers, name, kind, x, index)
    assert passes == ["body"] * 3 * len(NAMED)


def test_a_job_has_one_thread_and_stays_in_order() -> None:
    def job(i: int) -> Callable[[], tuple[int, int]]:
        return lambda: (i, torch.get_num_threads())

    for workers in (1, 2, 3):
        assert run_in_parallel([job(i) for i in range(7)], workers) == [(i, 1) for i in range(7)]


def test_the_number_of_threads_is_a_threads_own_setting() -> None:
    """What the bits rest on: shards set one thread while the caller keeps its own number."""
    counts: list[int] = []

    def set_one() -> None:
        torch.set_num_threads(1)
        counts.append(torch.get_num_threads())

    with torch_threads(2):
        thread = threading.Thread(target=set_one)
        thread.start()
        thread.join()
        assert counts == [1]
        assert torch.get_num_threads() == 2


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
    experiment = toys.toy(
        {"name": "sfedkd", "k": 3},
        rounds=2,
        topology={"kind": "sequential", "clients": 6, "sampled": 4},
        data={"augment": augment},
        measure=(),
    )
    models = []
    for workers in (1, 2, 3):
        monkeypatch.setenv(WORKERS, str(workers))
        models.append(run(experiment, tmp_path / str(workers), data=toys.blobs()).model)
    assert same_bits(models[1], models[0])
    assert same_bits(models[2], models[0])


def test_a_stage_of_many_clients_leaves_the_cores_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedstill.engines import clients

    worker_counts: list[int] = []

    class Watched(Teachers):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**fields)
            worker_counts.append(self.workers)

    monkeypatch.setattr(clients, "Teachers", Watched)
    monkeypatch.setenv(WORKERS, "3")
    for kind, expected in (("parallel", {1}), ("sequential", {3})):
        worker_counts.clear()
        topology = {"kind": kind, "clients": 6, "sampled": 4}
        ready = prepare(resolve(toys.toy("fedntd", topology=topology)), toys.blobs())
        method = ready.settings.method
        stage = ready.settings.schedule(1, ready.world)[0]
        state = method.initial_state(ready.world)
        payloads = {}
        for client in stage.clients:
            payloads[client] = method.payload_for_client(state, client, stage, ready.world)

        ready.engine().run(method.work(stage), stage, payloads, 7)  # type: ignore[arg-type]

        assert set(worker_counts) == expected
    assert hardware.cores() >= 1
