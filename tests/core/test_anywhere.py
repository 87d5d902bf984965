"""Stages that any method may have: where the stage ``fit`` means something, and what it leaves as
it is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
from fedstill.methods.fit import Fit
from fedstill.running.preparation import Prepared, prepare
from loops import context_of, first_state, next_state, states_after

PLAN = {"epochs": 1, "batch": 50, "lr": 0.05}


def ready(method: str, **changes: Any) -> Prepared:
    return prepare(resolve(toys.toy(method, **{"plan": PLAN, **changes})), toys.blobs())


@pytest.mark.parametrize("where", ["before", "after", "task_end", "last"])
def test_models_are_trained_alone_at_the_beginning_or_not_at_all(where: str) -> None:
    with pytest.raises(
        IncompatibleMethod, match=r"trains? nothing in stage 'fit'.*topology\.first = 'fit'"
    ):
        ready("scaffold", topology={"clients": 6, where: "fit"})


def test_what_clients_remember_outlives_a_fit() -> None:
    run = ready("scaffold", topology={"clients": 4, "first": "fit", "after": "fit"}, rounds=1)
    engine, seen = run.engine(), list[tuple[str, list[bool]]]()

    class Looking(NoRecorder):
        def stage(self, result: StageResult) -> None:
            seen.append((result.stage.name, ["control" in engine.memory.load(c) for c in range(4)]))

    states_after(context_of(run, engine, Looking()), 1)
    engine.close()
    assert seen == [("fit", [False] * 4), ("train", [True] * 4), ("fit", [True] * 4)]


@pytest.mark.parametrize("name", ["fedavg_once", "local_only", "pfnm"])
def test_among_peers_a_client_goes_on_from_the_model_it_ended_the_last_task_with(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = dict[tuple[int, int], Tensors](), dict[tuple[int, int], Tensors]()
    begin, end = Fit.begin, Fit.end
    now = [0]

    def beginning(
        self: Fit, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        carry = begin(self, payload, client_state, view, world)
        began[now[0], view.client] = carry.params
        return carry

    def ending(
        self: Fit,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> Any:
        ended[now[0], view.client] = params
        return end(self, params, start, result, view, world)

    monkeypatch.setattr(Fit, "begin", beginning)
    monkeypatch.setattr(Fit, "end", ending)
    stream = {"kind": "classes", "tasks": 3}
    method: Any = {"name": name, "gamma": (1.0,), "variance": (1.0, 0.1), "prior_variance": (1.0,)}
    run = ready(
        method if name == "pfnm" else name,
        rounds=3,
        topology={"clients": 4},
        stream=stream,
        partition="iid",
    )
    engine = run.engine()
    context = context_of(run, engine)
    state = first_state(context)
    while state.round <= 3:
        now[0] = state.round
        state = next_state(state, context)
    engine.close()
    for client in range(4):
        first = run.world.initial(client)
        assert all(torch.equal(began[1, client][k], first[k]) for k in first)
        for task in (2, 3):
            assert all(
                torch.equal(began[task, client][k], ended[task - 1, client][k]) for k in first
            )
