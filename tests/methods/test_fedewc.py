"""FedEWC: its Fisher information by hand, its edges, and the penalty without gradient that
published codes have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from over_tasks import RunOverTasks, model_hash, run_over_tasks
from scipy.special import softmax
from torch import Tensor

from double import NEAR
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.losses import quadratic
from fedstill.methods.fedewc import Anchored, FedEWC

STREAM = {"kind": "classes", "tasks": 3, "head": "task"}


@method("toy_received_ewc")
@dataclass(frozen=True)
class Published(FedEWC):
    """EWC as released codes run it: the penalty is that of the model received, while a copy of it
    is trained.
    """

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == "train":
            return AtTheReceived(self)
        return super().work(stage)


class AtTheReceived(Anchored):
    """A client whose penalty does not depend on the model that it trains."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        start = super().begin(payload, client_state, view, world)
        constants = {**start.constants, "received": dict(payload.params)}
        return TrainingStart(start.params, constants=constants)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        terms = ClientWork.terms(self, step, start)
        if "fisher" in start.constants:
            terms["pull"] = quadratic(
                start["received"], start["anchor"], start["fisher"], self.method.weight
            )
        return terms


def run_logistic(method: dict[str, Any], **changes: Any) -> RunOverTasks:
    """A run of logistic regressions in float64."""
    return run_over_tasks(method, model="logistic", **{"stream": STREAM, **changes})


def example_fisher(
    params: Mapping[str, Tensor], x: np.ndarray, label: int, classes: list[int]
) -> dict[str, np.ndarray]:
    """The squared gradient of an example's loss, times the probability of its label, over the
    outputs of a task.
    """
    z = params["head.weight"].numpy() @ x + params["head.bias"].numpy()
    p = np.zeros(len(z))
    p[classes] = softmax(z[classes])
    gradient = p - np.eye(len(z))[label]
    return {
        "head.weight": p[label] * np.outer(gradient, x) ** 2,
        "head.bias": p[label] * gradient**2,
    }


def fisher_by_hand(run: RunOverTasks, round_index: int) -> dict[str, np.ndarray]:
    """The mean over all clients' examples of the task that ends with a round."""
    ready = run.ready
    params = run.states[round_index - 1].params
    stage = ready.settings.schedule(round_index, ready.world)[-1]
    stream = ready.world.stream
    classes = list(stream.classes(stream.task(round_index)))
    values = []
    for client in stage.clients:
        data = ready.sites.view(client, stage).data
        inputs = ready.sites.inputs.plain(data.values).flatten(1).numpy()
        for x, label in zip(inputs, data.labels.tolist(), strict=True):
            values.append(example_fisher(params, x, label, classes))
    return {name: np.mean([value[name] for value in values], axis=0) for name in values[0]}


@pytest.mark.parametrize("clients", [1, 6])
def test_fisher_information_is_that_of_all_examples_and_adds_up_over_tasks(clients: int) -> None:
    """The information of earlier tasks counts less. The last task needs none."""
    run = run_logistic({"name": "fedewc", "gamma": 0.7}, topology={"clients": clients})

    of_first = fisher_by_hand(run, 1)
    of_second = fisher_by_hand(run, 2)
    fishers = [state.extra.tensors("fisher") for state in run.states]
    for name, value in of_first.items():
        assert (fishers[0][name] >= 0).all()
        np.testing.assert_allclose(fishers[0][name].numpy(), value, atol=NEAR)
        of_both = 0.7 * value + of_second[name]
        np.testing.assert_allclose(fishers[1][name].numpy(), of_both, atol=NEAR)
        anchor = run.states[1].extra.tensors("anchor")
        assert torch.equal(anchor[name], run.states[1].params[name])
    assert torch.equal(fishers[2]["head.bias"], fishers[1]["head.bias"])


def test_the_information_is_measured_on_no_more_examples_than_configured() -> None:
    """One example of each client: its own squared gradient, by its probability."""
    run = run_logistic({"name": "fedewc", "samples": 1}, topology={"clients": 1})

    ready = run.ready
    stage = ready.settings.schedule(1, ready.world)[-1]
    data = ready.sites.view(0, stage).data
    position = int(torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[0])
    x = ready.sites.inputs.plain(data.values[position : position + 1]).flatten().numpy()
    classes = list(ready.world.stream.classes(0))
    state = run.states[0]
    expected = example_fisher(state.params, x, int(data.labels[position]), classes)
    fisher = state.extra.tensors("fisher")["head.bias"].numpy()
    np.testing.assert_allclose(fisher, expected["head.bias"], atol=NEAR)


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
def test_without_weight_it_is_fedavg(engine: str, tmp_path: Path) -> None:
    """And with it, it is not."""

    def hash_of(method: dict[str, Any]) -> str:
        folder = tmp_path / str(method)
        return model_hash(folder, method, stream=STREAM, engine=engine)

    fedavg = hash_of({"name": "fedavg"})
    assert hash_of({"name": "fedewc", "weight": 0.0}) == fedavg
    assert hash_of({"name": "fedewc", "weight": 1.0}) != fedavg


def test_in_the_first_task_it_is_fedavg(tmp_path: Path) -> None:
    fedavg = model_hash(tmp_path / "fedavg", "fedavg", stream={})

    fedewc = model_hash(tmp_path / "fedewc", {"name": "fedewc", "weight": 1000.0}, stream={})

    assert fedewc == fedavg


def test_at_the_anchor_there_is_neither_penalty_nor_gradient() -> None:
    anchor = {"w": torch.tensor([1.0, -2.0])}
    params = {"w": anchor["w"].clone().requires_grad_()}
    fisher = {"w": torch.tensor([3.0, 0.5])}

    penalty = quadratic(params, anchor, fisher, 10.0)
    penalty.backward()

    assert float(penalty.detach()) == 0.0
    assert params["w"].grad is not None
    assert params["w"].grad.tolist() == [0.0, 0.0]


def test_the_penalty_of_published_codes_has_no_effect_and_this_one_has(
    tmp_path: Path,
) -> None:
    """Whatever its weight: what is taken at the received model has no gradient at the trained
    one.
    """
    fedavg = model_hash(tmp_path / "fedavg", "fedavg", stream=STREAM)
    published = {"name": "toy_received_ewc", "weight": 1000.0}
    fedewc = {"name": "fedewc", "weight": 1.0}

    assert model_hash(tmp_path / "published", published, stream=STREAM) == fedavg
    assert model_hash(tmp_path / "fedewc", fedewc, stream=STREAM) != fedavg


def test_a_large_weight_keeps_the_model_near_that_of_the_last_task() -> None:
    """By the measure of its Fisher information, which both runs share: their first task is the
    same.
    """
    changes = {"plan": {"epochs": 2, "batch": 10, "lr": 0.01}, "stream": {**STREAM, "head": "all"}}
    loose = run_logistic({"name": "fedewc", "weight": 1e-9}, **changes)
    firm = run_logistic({"name": "fedewc", "weight": 300.0}, **changes)
    fisher = firm.states[0].extra.tensors("fisher")

    def distance_of_second_task(run: RunOverTasks) -> float:
        return float(quadratic(run.states[1].params, run.states[0].params, fisher, 1.0))

    assert distance_of_second_task(firm) < 0.8 * distance_of_second_task(loose)
