"""The stage ``fit``: where any method may have it, and what it does not change."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.extensions import NoRecorder, StageResult
from fedstill.core.records import (
    Payload,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.trees import same_bits
from fedstill.methods.fit import Fit
from fedstill.running.preparation import Prepared, prepare
from loops import context_of, states_after

PLAN = {"epochs": 1, "batch": 50, "lr": 0.05}


def ready(method: object, **changes: Any) -> Prepared:
    """A prepared run with short training."""
    return prepare(resolve(toys.toy(method, **{"plan": PLAN, **changes})), toys.blobs())


@pytest.mark.parametrize("position", ["before", "after", "task_end", "last"])
def test_models_are_trained_alone_at_the_beginning_or_not_at_all(position: str) -> None:
    message = r"trains? nothing in stage 'fit'.*topology\.first = 'fit'"
    with pytest.raises(IncompatibleMethod, match=message):
        ready("scaffold", topology={"clients": 6, position: "fit"})


def test_the_states_of_clients_outlive_a_fit() -> None:
    run = ready("scaffold", topology={"clients": 4, "first": "fit", "after": "fit"}, rounds=1)
    engine = run.engine()
    stages = list[str]()
    clients_with_state = list[int]()

    class Looking(NoRecorder):
        def stage(self, result: StageResult) -> None:
            stages.append(result.stage.name)
            states = [engine.memory.load(client) for client in range(4)]
            clients_with_state.append(sum("control" in state for state in states))

    states_after(context_of(run, engine, Looking()), 1)
    engine.close()

    assert stages == ["fit", "train", "fit"]
    assert clients_with_state == [0, 4, 4]


@pytest.mark.parametrize("name", ["fedavg_once", "local_only", "pfnm"])
def test_among_peers_a_client_goes_on_from_the_model_it_ended_the_last_task_with(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round is a task here."""
    starts: dict[int, list[Tensors]] = defaultdict(list)
    ends: dict[int, list[Tensors]] = defaultdict(list)
    begin = Fit.begin
    end = Fit.end

    def noted_begin(
        self: Fit, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        start = begin(self, payload, client_state, view, world)
        starts[view.client].append(start.params)
        return start

    def noted_end(
        self: Fit,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> Any:
        ends[view.client].append(params)
        return end(self, params, start, result, view, world)

    monkeypatch.setattr(Fit, "begin", noted_begin)
    monkeypatch.setattr(Fit, "end", noted_end)
    method: dict[str, Any] = {"name": name}
    if name == "pfnm":
        method |= {"gamma": (1.0,), "variance": (1.0, 0.1), "prior_variance": (1.0,)}
    run = ready(
        method,
        rounds=3,
        topology={"clients": 4},
        stream={"kind": "classes", "tasks": 3},
        partition="iid",
    )
    engine = run.engine()

    states_after(context_of(run, engine), 3)
    engine.close()

    for client in range(4):
        expected = [run.world.initial(client), *ends[client][:2]]
        for start_params, expected_params in zip(starts[client], expected, strict=True):
            assert same_bits(start_params, expected_params)
