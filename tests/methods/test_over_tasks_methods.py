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
from scipy.special import log_softmax

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.records import NOTHING, Payload, Stage, TrainingStart
from fedstill.engines.step import BatchStep, Networks, StepInputs, frozen
from fedstill.methods.fedlwf import FedLwF, Remembered
from fedstill.models.contract import initial, module, spec_for
from fedstill.models.predictors import predictor
from fedstill.running.preparation import prepare
from fedstill.running.runner import run
from run_bits import bits

STREAM = {"kind": "classes", "tasks": 3, "head": "task"}


def model_of(folder: Path, method: Any, **more: Any) -> str:
    run(
        toys.toy(method, partition={"kind": "iid"}, **{"stream": STREAM, **more}),
        folder,
        toys.blobs(),
    )
    return str(bits(folder)["model.safetensors"])


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
def test_fedlwf_without_weight_is_fedavg(engine: str, tmp_path: Path) -> None:
    plain = model_of(tmp_path / "fedavg", "fedavg", engine=engine)
    assert model_of(tmp_path / "none", {"name": "fedlwf", "weight": 0.0}, engine=engine) == plain
    assert model_of(tmp_path / "some", {"name": "fedlwf", "weight": 1.0}, engine=engine) != plain


def test_in_the_first_task_fedlwf_is_fedavg(tmp_path: Path) -> None:
    plain = model_of(tmp_path / "fedavg", "fedavg", stream={})
    assert model_of(tmp_path / "lwf", {"name": "fedlwf", "weight": 9.0}, stream={}) == plain


def test_the_terms_of_fedlwf_by_hand() -> None:
    spec, tau, draw = spec_for("logistic", (1, 4, 4), 5, {}), 3.0, torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 1, 4, 4, generator=draw), torch.tensor([3, 4, 3, 3, 4, 4])
    new, old = initial(spec, 1), initial(spec, 2)
    head, before = torch.tensor([False, False, False, True, True]), torch.tensor([0, 2])
    carry = TrainingStart(new, {"old": old}, constants={"old_classes": before}, head=head)
    networks = Networks(spec, module(spec), lambda *_: None, "fp32", "fp32", torch.device("cpu"))
    index = torch.arange(6)
    work = Remembered(FedLwF(weight=0.5, temperature=tau), 4)
    terms = work.terms(
        BatchStep(networks, carry, new, StepInputs(x, y, index, index, None, 0)), carry
    )

    def logits(params: Any) -> Any:
        return (
            x.flatten(1).double().numpy() @ params["head.weight"].double().numpy().T
            + params["head.bias"].numpy()
        )

    z, was = logits(new), logits(old)
    ce = -log_softmax(z[:, 3:], axis=1)[np.arange(6), y.numpy() - 3]
    q, p = (log_softmax(v[:, [0, 2]] / tau, axis=1) for v in (z, was))
    np.testing.assert_allclose(terms["ce"].detach().numpy(), ce, atol=1e-5)
    np.testing.assert_allclose(
        terms["old"].detach().numpy(), 0.5 * tau**2 * (np.exp(p) * (p - q)).sum(1), atol=1e-5
    )


@pytest.mark.parametrize(("method", "known"), [("fedlwf", "old_classes"), ("glfc_local", "old")])
def test_which_classes_are_old_is_by_the_task_that_a_client_is_in(method: str, known: str) -> None:
    """A client that stays has none in its first task, and no teacher; later the old classes are
    those of its own.
    """
    what = toys.toy(method, partition={"kind": "iid"}, stream={**STREAM, "stay": 0.5})
    ready = prepare(resolve(what), toys.blobs())
    method_, world = ready.settings.method, ready.world
    start, came = method_.initial_state(world), set()
    for round in (2, 3):
        stage = Stage(round, 0, "train", tuple(range(6)))
        state = start.next(old=start.params)
        for client in range(6):
            task = world.stream.task(round, client)
            down = method_.payload_for_client(state, client, stage, world)
            assert down is not None
            carry = method_.work(stage).begin(
                down, Payload(), ready.sites.view(client, stage), world
            )
            assert set(carry.teachers) == ({"old"} if task else set())
            if task:
                old = carry.constants[known]
                classes = (old.nonzero().flatten() if old.dtype == torch.bool else old).tolist()
                assert tuple(classes) == world.stream.seen(task - 1)
            came.add((round, task))
    assert came >= {(2, 0), (2, 1), (3, 1), (3, 2)}


def test_ridge_would_forget_earlier_tasks_and_is_refused(tmp_path: Path) -> None:
    topology = {"clients": 6, "last": "ridge"}
    stream = {"kind": "classes", "tasks": 3}
    with pytest.raises(IncompatibleMethod, match="analytic"):
        prepare(resolve(toys.toy(stream=stream, topology=topology)), toys.blobs())
    kept = {**stream, "past": "kept"}
    prepare(resolve(toys.toy(stream=kept, topology=topology)), toys.blobs())


@pytest.mark.parametrize("method", ["fedrs", "fedlc", "fedlmd", "fedrod"])
def test_held_out_examples_change_no_objective(method: str) -> None:
    """Their classes may be missing among the examples that are trained on."""
    stage = Stage(1, 0, "train", (0,))
    starts = []
    for share in (0.0, 0.5):
        plan = {"epochs": 1, "validation": share}
        ready = prepare(resolve(toys.toy(method, plan=plan, measure=())), toys.blobs())
        view = ready.sites.view(0, stage)
        if share == 0.0:
            half = prepare(
                resolve(toys.toy(method, plan={**plan, "validation": 0.5}, measure=())),
                toys.blobs(),
            ).sites.view(0, stage)
            counts = torch.bincount(half.data.labels, minlength=toys.CLASSES)
            assert not torch.equal(counts, half.counts)
            view = replace(view, data=half.data, counts=counts)
        payload = Payload(params=ready.world.initial(0))
        state = ready.settings.method.initial_state(ready.world)
        payload = ready.settings.method.payload_for_client(state, 0, stage, ready.world)
        work = ready.settings.method.work(stage)
        starts.append(work.begin(payload, NOTHING, view, ready.world).constants)
    assert starts[0].keys() == starts[1].keys()
    assert starts[0]
    for name, value in starts[0].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(starts[1][name]))


@pytest.mark.parametrize("method", ["fedrod", "fml"])
def test_the_best_epoch_is_that_of_the_model_that_answers(method: str) -> None:
    changes: dict[str, Any] = {"measure": ()}
    if method == "fml":
        changes["model"] = toys.two_networks()
    ready = prepare(resolve(toys.toy(method, plan={"validation": 0.3}, **changes)), toys.blobs())
    stage = Stage(1, 0, "train", (0,))
    view = ready.sites.view(0, stage)
    params = ready.world.initial(0)
    for name in params:
        if "head" in name:
            params = {**params, name: torch.randn(params[name].shape)}
    work = ready.settings.method.work(stage)
    answer = frozen(work.answer(params, view.model), view.model)
    x = ready.sites.inputs.plain(view.validation.values)
    hits = predictor(answer.spec, answer.params)(x).argmax(1) == view.validation.labels
    assert work.validation_score(params, view) == pytest.approx(float(hits.double().mean()))
