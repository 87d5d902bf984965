"""Real sites whose server has several models: each site trains and tests the model that fits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.aggregation import weighted_mean
from fedstill.core.capabilities import Need
from fedstill.core.errors import Interrupted
from fedstill.core.keys import seed_for
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    NOTHING,
    SERVER,
    Payload,
    Reply,
    Stage,
    State,
    TrainingStart,
    View,
    World,
    many,
)
from fedstill.core.registry import method
from fedstill.flower.engine import LoopbackGrid
from fedstill.flower.site import StageExecutor, client_app
from fedstill.losses import cross_entropy
from fedstill.models.contract import initial
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.result import Result
from fedstill.running.runner import resume, run
from flowers import needs_flower, own_sites
from run_bits import StopAfter, assert_same_bits, bits

pytestmark = needs_flower

CLIENTS = 3


@method("toy_clustered")
@dataclass(frozen=True)
class Clustered(Method):
    """IFCA: each client trains the one of two models that has the lowest loss on its data."""

    needs: ClassVar[Need] = Need.SAME_SHAPES

    def initial_state(self, world: World) -> State:
        network = world.model(SERVER)
        models = {
            k: initial(network, seed_for(world.seed, 0, 0, SERVER, f"cluster {k}"))
            for k in range(2)
        }
        chosen = torch.zeros(world.clients, dtype=torch.int64)
        return State(params={}, extra=Payload(many("cluster", models), chosen=chosen))

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        return Payload(many("cluster", state.extra.many("cluster")))

    def work(self, stage: Stage) -> ClientWork:
        return TrainBest()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(params=world.initial(client), cluster=0)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        models = state.extra.many("cluster")
        chosen = state.extra.tensor("chosen").clone()
        for reply in replies:
            chosen[reply.client] = int(reply.content["cluster"])  # type: ignore[call-overload]
        for k in models:
            members = [reply for reply in replies if reply.content["cluster"] == k]
            if members:
                models[k] = weighted_mean(members)
        return state.next(groups=many("cluster", models), chosen=chosen)

    def predictors(self, state: State, world: World) -> dict[str, Callable[[Tensor], Tensor]]:
        models = state.extra.many("cluster")
        return {f"cluster {k}": world.predictor(params) for k, params in models.items()}

    def client_predictors(self, state: State, world: World) -> dict[int, str]:
        chosen = state.extra.tensor("chosen").tolist()
        return {client: f"cluster {k}" for client, k in enumerate(chosen)}


class TrainBest(ClientWork):
    """Trains the model with the lowest loss on the client's data, and sends its number."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        models = payload.many("cluster")
        labels = view.data.labels.cpu()
        losses = {
            k: float(cross_entropy(view.logits(params), labels).mean())
            for k, params in models.items()
        }
        best = min(losses, key=lambda k: losses[k])
        return TrainingStart(params=models[best], constants={"cluster": best})

    def end(
        self, params: Any, start: TrainingStart, result: Any, view: View, world: World
    ) -> tuple[Payload, Payload]:
        return Payload(params=params, cluster=start["cluster"]), NOTHING


def clustered(**changes: Any) -> Experiment:
    what = {"rounds": 3, "measure": (), "data": {}, "topology": {"clients": CLIENTS}}
    return toys.toy("toy_clustered", **{**what, **changes})


def at_sites(experiment: Experiment) -> Experiment:
    """The same experiment over sites that have the simulation's parts of the data."""
    flower = {"deadline": 30, "poll": 1, "data": "sites", "federation": "/federation"}
    flower["test_every"] = int(bool(experiment.metrics))  # a simulation has no stage of tests
    return replace(experiment, engine="flower", flower=flower)


def grid_of(experiment: Experiment, folder: Path) -> LoopbackGrid:
    """The grid of these sites."""
    simulated = prepare(
        resolve(experiment.with_values({"data.name": "blobs"}, "test")), toys.blobs()
    )
    executors = {
        site.client: StageExecutor(site, shows_reasons=True)
        for site in own_sites(simulated, folder)
    }

    def executor_of(context: Any) -> tuple[int, StageExecutor]:
        client = int(context.node_config["partition-id"])
        return client, executors[client]

    return LoopbackGrid(client_app(executor_of, 1 << 30), range(CLIENTS))


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    events = read_journal(folder / "journal.jsonl")
    return [event for event in events if event["event"] == "round"]


def test_sites_give_the_models_and_choices_of_the_simulation(tmp_path: Path) -> None:
    asked = clustered()
    run(replace(asked, engine="serial"), tmp_path / "simulated", toys.blobs())
    grid = grid_of(asked, tmp_path / "sites")
    run(at_sites(asked), tmp_path / "there", toys.blobs(), grid=grid)

    simulated, there = rounds_of(tmp_path / "simulated"), rounds_of(tmp_path / "there")
    choices = [event["client_predictors"] for event in there]
    assert choices == [event["client_predictors"] for event in simulated]
    assert len({name for choice in choices for name in choice.values()}) == 2, "both are chosen"
    assert [event["others"] for event in there] == [event["others"] for event in simulated]
    assert [event["accuracy"] for event in there] == [event["accuracy"] for event in simulated]
    models = [
        {path.name: path.read_bytes() for path in (folder / "models").glob("*")}
        for folder in (tmp_path / "simulated", tmp_path / "there")
    ]
    assert models[0] == models[1]


def test_a_run_over_sites_resumes_to_the_same_bits(tmp_path: Path) -> None:
    asked = at_sites(clustered())
    grid = grid_of(clustered(), tmp_path / "sites")
    run(asked, tmp_path / "complete", toys.blobs(), grid=grid)

    again = grid_of(clustered(), tmp_path / "again")
    folder = tmp_path / "stopped"
    with pytest.raises(Interrupted):
        run(asked, folder, toys.blobs(), watch=StopAfter(2), grid=again)
    resume(folder, data=toys.blobs(), grid=again)
    assert_same_bits(bits(folder), bits(tmp_path / "complete"))


def test_each_site_tests_its_model_on_its_own_examples(tmp_path: Path) -> None:
    """Rounds are compared by held-out examples, and metrics are those of each site's model."""
    asked = toys.stopping_early(
        "toy_clustered",
        topology={"clients": CLIENTS},
        stop={"patience": 2},
        measure=(),
        data={},
        metrics=("recall",),
    )
    run(asked, tmp_path / "simulated", toys.blobs())
    grid = grid_of(asked, tmp_path / "sites")
    run(at_sites(asked), tmp_path / "there", toys.blobs(), grid=grid)

    result, simulated = Result.of(tmp_path / "there"), Result.of(tmp_path / "simulated")
    scores = [event["selection_score"] for event in result.history]
    assert scores == [event["selection_score"] for event in simulated.history]
    assert result.summary["best_round"] == simulated.summary["best_round"]

    # all sites have the common test set, so theirs are the accuracies of the models on it
    for event in result.history:
        for client, name in event["client_predictors"].items():
            accuracy = event["own_test_by_client"][client]
            assert accuracy == pytest.approx(event["others"][name]["accuracy"])
    tested = [e for e in read_journal(tmp_path / "there/journal.jsonl") if "held_out_accuracy" in e]
    assert {event["name"] for event in tested} == {"held_out_test"}
    assert len(tested) == CLIENTS * len(result.history)


def test_a_site_without_a_test_set_at_the_server_has_its_own_accuracy(tmp_path: Path) -> None:
    """The metrics of a run whose server has no data are those that sites report."""
    asked = clustered(metrics=("recall",))
    grid = grid_of(asked, tmp_path / "sites")
    run(at_sites(asked), tmp_path / "there", toys.blobs(), grid=grid)
    for event in rounds_of(tmp_path / "there")[1:]:
        assert event["own_test_by_client"].keys() == {str(c) for c in range(CLIENTS)}
        assert 0 <= event["own_test_recall"] <= 1
