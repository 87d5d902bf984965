"""FedEWC: its Fisher information by hand, its edges, and the penalty without gradient that
published codes have.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from torch import Tensor

import toys
from double import in_double
from fedstill.config.resolve import resolve
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, State, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.losses import quadratic
from fedstill.methods.fedewc import Anchored, FedEWC
from fedstill.running.preparation import prepare
from fedstill.running.runner import run
from loops import context_of, states_after
from run_bits import bits

STREAM = {"kind": "classes", "tasks": 3, "head": "task"}


@method("toy_received_ewc")
@dataclass(frozen=True)
class Published(FedEWC):
    """EWC as released codes run it: the penalty is that of the model received, while a copy of it
    is trained.
    """

    def work(self, stage: Stage) -> ClientWork:
        return super().work(stage) if stage.name != "train" else AtTheReceived(self)


class AtTheReceived(Anchored):
    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        carry = super().begin(payload, client_state, view, world)
        return TrainingStart(
            carry.params, constants={**carry.constants, "received": dict(payload.params)}
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        ce = ClientWork.terms(self, step, start)
        if "fisher" not in start.constants:
            return ce
        return {
            **ce,
            "pull": quadratic(
                start["received"], start["anchor"], start["fisher"], self.method.weight
            ),
        }


def model_of(folder: Path, method: Any, **more: Any) -> str:
    run(
        toys.toy(method, **{"partition": {"kind": "iid"}, "stream": STREAM, **more}),
        folder,
        toys.blobs(),
    )
    return str(bits(folder)["model.safetensors"])


def states(method: Any, **more: Any) -> tuple[Any, list[State]]:
    """A run in float64 in this process: the state after each round."""
    values = {
        "partition": {"kind": "iid"},
        "stream": STREAM,
        "model": "logistic",
        "engine": "serial",
        **more,
    }
    ready = in_double(prepare(resolve(toys.toy(method, **values)), toys.blobs()))
    return ready, states_after(context_of(ready), ready.world.rounds)[1:]


def by_hand(ready: Any, state: State, round: int) -> dict[str, np.ndarray]:
    """F of a logistic regression over all clients' examples of a task: p_y (p - y)² x², mean over
    all.
    """
    stage = ready.settings.schedule(round, ready.world)[-1]
    total: dict[str, Any] = {"head.weight": 0.0, "head.bias": 0.0}
    count, w = 0, {k: v.numpy() for k, v in state.params.items()}
    classes = list(ready.world.stream.classes(ready.world.stream.task(round)))
    for client in stage.clients:
        data = ready.sites.view(client, stage).data
        x = ready.sites.inputs.plain(data.values).flatten(1).numpy()
        for row, y in zip(x, data.labels.tolist(), strict=True):
            z = w["head.weight"] @ row + w["head.bias"]
            p = np.zeros(len(z))
            p[classes] = softmax(z[classes])
            slope = p - np.eye(len(z))[y]
            total["head.weight"] = total["head.weight"] + p[y] * np.outer(slope, row) ** 2
            total["head.bias"] = total["head.bias"] + p[y] * slope**2
            count += 1
    return {k: v / count for k, v in total.items()}


@pytest.mark.parametrize("clients", [1, 6])
def test_fisher_information_is_that_of_all_examples_and_adds_up_over_tasks(clients: int) -> None:
    ready, after = states({"name": "fedewc", "gamma": 0.7}, topology={"clients": clients})
    first, second = (by_hand(ready, after[r - 1], r) for r in (1, 2))
    for name in first:
        assert (after[0].extra.tensors("fisher")[name] >= 0).all()
        np.testing.assert_allclose(
            after[0].extra.tensors("fisher")[name].numpy(), first[name], atol=1e-9
        )
        both = 0.7 * first[name] + second[name]
        np.testing.assert_allclose(after[1].extra.tensors("fisher")[name].numpy(), both, atol=1e-9)
        assert torch.equal(after[1].extra.tensors("anchor")[name], after[1].params[name])
    assert torch.equal(
        after[2].extra.tensors("fisher")["head.bias"], after[1].extra.tensors("fisher")["head.bias"]
    )


def test_no_more_examples_are_looked_at_than_asked_for() -> None:
    """One example of each client: its own squared gradient, by its probability."""
    ready, after = states({"name": "fedewc", "samples": 1}, topology={"clients": 1})
    stage = ready.settings.schedule(1, ready.world)[-1]
    data = ready.sites.view(0, stage).data
    some = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[0]
    x, y = (
        ready.sites.inputs.plain(data.values[some : some + 1]).flatten().numpy(),
        int(data.labels[some]),
    )
    z = after[0].params["head.weight"].numpy() @ x + after[0].params["head.bias"].numpy()
    p, classes = np.zeros(5), list(ready.world.stream.classes(0))
    p[classes] = softmax(z[classes])
    np.testing.assert_allclose(
        after[0].extra.tensors("fisher")["head.bias"].numpy(),
        p[y] * (p - np.eye(5)[y]) ** 2,
        atol=1e-9,
    )


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
def test_without_weight_it_is_fedavg(engine: str, tmp_path: Path) -> None:
    plain = model_of(tmp_path / "fedavg", "fedavg", engine=engine)
    assert model_of(tmp_path / "none", {"name": "fedewc", "weight": 0.0}, engine=engine) == plain
    assert model_of(tmp_path / "some", {"name": "fedewc", "weight": 1.0}, engine=engine) != plain


def test_in_the_first_task_it_is_fedavg(tmp_path: Path) -> None:
    plain = model_of(tmp_path / "fedavg", "fedavg", stream={})
    assert model_of(tmp_path / "ewc", {"name": "fedewc", "weight": 1000.0}, stream={}) == plain


def test_at_the_anchor_there_is_neither_penalty_nor_gradient() -> None:
    anchor = {"w": torch.tensor([1.0, -2.0])}
    leaf = {"w": anchor["w"].clone().requires_grad_()}
    pull = quadratic(leaf, anchor, {"w": torch.tensor([3.0, 0.5])}, 10.0)
    pull.backward()
    assert float(pull.detach()) == 0.0
    assert leaf["w"].grad is not None
    assert leaf["w"].grad.tolist() == [0.0, 0.0]


def test_the_penalty_of_published_codes_is_finetuning_to_the_bit_and_this_one_is_not(
    tmp_path: Path,
) -> None:
    """Whatever its weight: what is taken at the received model has no gradient at the trained
    one.
    """
    plain = model_of(tmp_path / "fedavg", "fedavg")
    assert model_of(tmp_path / "published", {"name": "toy_received_ewc", "weight": 1000.0}) == plain
    assert model_of(tmp_path / "ours", {"name": "fedewc", "weight": 1.0}) != plain


def test_a_firm_pull_keeps_the_model_near_the_last_tasks() -> None:
    """By the measure of its Fisher information, which both runs have alike: their first task is the
    same.
    """
    more = {"plan": {"epochs": 2, "batch": 10, "lr": 0.01}, "stream": {**STREAM, "head": "all"}}
    (_, loose), (_, firm) = (
        states({"name": "fedewc", "weight": weight}, **more) for weight in (1e-9, 300.0)
    )
    fisher = firm[0].extra.tensors("fisher")
    free, held = (
        float(quadratic(run[1].params, run[0].params, fisher, 1.0)) for run in (loose, firm)
    )
    assert held < 0.8 * free
