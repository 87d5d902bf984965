"""Methods for the time axis: nothing of them before the second task, their formula, and what they
do at their edges.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from over_tasks import experiment_over_tasks, model_hash
from scipy.special import log_softmax
from single_step import LOGISTIC, logits_by_hand, terms_of
from torch import Tensor

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.records import NOTHING, Payload, Stage, TrainingStart, View
from fedstill.core.trees import same_bits
from fedstill.engines.step import frozen
from fedstill.methods.fedlwf import FedLwF, Remembered
from fedstill.models.contract import initial
from fedstill.models.predictors import predictor
from fedstill.running.preparation import Prepared, prepare

STREAM = {"kind": "classes", "tasks": 3, "head": "task"}
TRAIN = Stage(1, 0, "train", (0,))


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
def test_fedlwf_without_weight_is_fedavg(engine: str, tmp_path: Path) -> None:
    """And with it, it is not."""

    def hash_of(method: dict[str, Any]) -> str:
        return model_hash(tmp_path / str(method), method, stream=STREAM, engine=engine)

    fedavg = hash_of({"name": "fedavg"})
    assert hash_of({"name": "fedlwf", "weight": 0.0}) == fedavg
    assert hash_of({"name": "fedlwf", "weight": 1.0}) != fedavg


def test_in_the_first_task_fedlwf_is_fedavg(tmp_path: Path) -> None:
    fedavg = model_hash(tmp_path / "fedavg", "fedavg", stream={})

    fedlwf = model_hash(tmp_path / "fedlwf", {"name": "fedlwf", "weight": 9.0}, stream={})

    assert fedlwf == fedavg


def test_the_terms_of_fedlwf_by_hand() -> None:
    """Cross-entropy over the classes of the task, and distillation of the classes before it."""
    tau = 3.0
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(6, 1, 4, 4, generator=draw)
    y = torch.tensor([3, 4, 3, 3, 4, 4])
    new = initial(LOGISTIC, 1)
    old = initial(LOGISTIC, 2)
    start = TrainingStart(
        new,
        {"old": old},
        constants={"old_classes": torch.tensor([0, 2])},
        head=torch.tensor([False, False, False, True, True]),
    )

    terms = terms_of(Remembered(FedLwF(weight=0.5, temperature=tau), 4), start, x, y)

    z = logits_by_hand(new, x)
    ce = -log_softmax(z[:, 3:], axis=1)[np.arange(6), y.numpy() - 3]
    np.testing.assert_allclose(terms["ce"].detach().numpy(), ce, atol=1e-5)
    log_q = log_softmax(z[:, [0, 2]] / tau, axis=1)
    log_p = log_softmax(logits_by_hand(old, x)[:, [0, 2]] / tau, axis=1)
    divergence = (np.exp(log_p) * (log_p - log_q)).sum(1)
    distillation = 0.5 * tau**2 * divergence
    np.testing.assert_allclose(terms["old"].detach().numpy(), distillation, atol=1e-5)


def positions_of(classes: Tensor) -> tuple[int, ...]:
    """The classes that are listed, or that a mask marks."""
    if classes.dtype == torch.bool:
        classes = classes.nonzero().flatten()
    return tuple(classes.tolist())


@pytest.mark.parametrize(("name", "constant"), [("fedlwf", "old_classes"), ("glfc_local", "old")])
def test_the_old_classes_follow_from_the_task_of_each_client(name: str, constant: str) -> None:
    """A client that stays has none in its first task, and no teacher; later the old classes are
    those of its own.
    """
    experiment = experiment_over_tasks(name, stream={**STREAM, "stay": 0.5})
    ready = prepare(resolve(experiment), toys.blobs())
    method = ready.settings.method
    world = ready.world
    initial_state = method.initial_state(world)
    state = initial_state.next(old=initial_state.params)

    rounds_and_tasks = set()
    for round_index in (2, 3):
        stage = Stage(round_index, 0, "train", tuple(range(6)))
        for client in range(6):
            task = world.stream.task(round_index, client)
            rounds_and_tasks.add((round_index, task))
            payload = method.payload_for_client(state, client, stage, world)
            assert payload is not None
            view = ready.sites.view(client, stage)
            start = method.work(stage).begin(payload, Payload(), view, world)
            if task == 0:
                assert not start.teachers
            else:
                assert set(start.teachers) == {"old"}
                old_classes = positions_of(start.constants[constant])
                assert old_classes == world.stream.seen(task - 1)
    assert rounds_and_tasks >= {(2, 0), (2, 1), (3, 1), (3, 2)}


def test_ridge_would_forget_earlier_tasks_and_is_refused() -> None:
    """Where the past is kept, it is accepted."""
    topology = {"clients": 6, "last": "ridge"}
    stream = {"kind": "classes", "tasks": 3}
    with pytest.raises(IncompatibleMethod, match="analytic"):
        prepare(resolve(toys.toy(stream=stream, topology=topology)), toys.blobs())

    with_past = {**stream, "past": "kept"}
    prepare(resolve(toys.toy(stream=with_past, topology=topology)), toys.blobs())


def ready_with_validation(method: str, share: float, **changes: Any) -> Prepared:
    """A run whose clients hold out a share of their examples."""
    plan = {"epochs": 1, "validation": share}
    toy = toys.toy(method, plan=plan, measure=(), **changes)
    return prepare(resolve(toy), toys.blobs())


def constants_of(ready: Prepared, view: View) -> dict[str, Tensor]:
    """What the objective of client 0 knows besides its batches."""
    method = ready.settings.method
    state = method.initial_state(ready.world)
    payload = method.payload_for_client(state, 0, TRAIN, ready.world)
    assert payload is not None
    constants = method.work(TRAIN).begin(payload, NOTHING, view, ready.world).constants
    return {name: torch.as_tensor(value) for name, value in constants.items()}


@pytest.mark.parametrize("method", ["fedrs", "fedlc", "fedlmd", "fedrod"])
def test_held_out_examples_change_no_objective(method: str) -> None:
    """Their classes may be missing among the examples that are trained on."""
    with_validation = ready_with_validation(method, 0.5)
    without_validation = ready_with_validation(method, 0.0)
    half_view = with_validation.sites.view(0, TRAIN)
    counts = torch.bincount(half_view.data.labels, minlength=toys.CLASSES)
    assert not torch.equal(counts, half_view.counts)
    same_examples = replace(
        without_validation.sites.view(0, TRAIN), data=half_view.data, counts=counts
    )

    constants = constants_of(with_validation, half_view)

    assert constants
    assert same_bits(constants, constants_of(without_validation, same_examples))


@pytest.mark.parametrize(
    ("method", "changes"), [("fedrod", {}), ("fml", {"model": toys.two_networks()})]
)
def test_the_best_epoch_is_that_of_the_model_that_answers(
    method: str, changes: dict[str, Any]
) -> None:
    """The heads of a client's networks are drawn, so that their answers differ."""
    ready = ready_with_validation(method, 0.3, **changes)
    view = ready.sites.view(0, TRAIN)
    params = dict(ready.world.initial(0))
    for name in params:
        if "head" in name:
            params[name] = torch.randn(params[name].shape)
    work = ready.settings.method.work(TRAIN)

    score = work.validation_score(params, view)

    answer = frozen(work.answer(params, view.model), view.model)
    inputs = ready.sites.inputs.plain(view.validation.values)
    answers = predictor(answer.spec, answer.params)(inputs).argmax(1)
    is_correct = answers == view.validation.labels
    assert score == pytest.approx(float(is_correct.double().mean()))
