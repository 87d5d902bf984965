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
from fedstill.losses import cross_entropy
from fedstill.models.contract import initial
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from flowers import at_sites, needs_flower, own_sites, site_grid
from journals import journal_events
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
    """Three clients, each of which trains the better one of two models for three rounds."""
    values = {"rounds": 3, "measure": (), "data": {}, "topology": {"clients": CLIENTS}}
    return toys.toy("toy_clustered", **{**values, **changes})


def grid_of(experiment: Experiment, folder: Path) -> LoopbackGrid:
    """The grid of these sites."""
    settings = resolve(experiment.with_values({"data.name": "blobs"}, "test"))
    return site_grid(own_sites(prepare(settings, toys.blobs()), folder))


def model_files(folder: Path) -> dict[str, bytes]:
    """The files of a run's models, by name."""
    return {path.name: path.read_bytes() for path in (folder / "models").glob("*")}


def by_round(folder: Path, field: str) -> list[Any]:
    """A field of the events of rounds."""
    return [event[field] for event in journal_events(folder, event="round")]


def test_sites_give_the_models_and_choices_of_the_simulation(tmp_path: Path) -> None:
    experiment = clustered()
    run(replace(experiment, engine="serial"), tmp_path / "simulated", toys.blobs())

    grid = grid_of(experiment, tmp_path / "sites")
    run(at_sites(experiment), tmp_path / "run", toys.blobs(), grid=grid)

    for field in ("client_predictors", "others", "accuracy"):
        assert by_round(tmp_path / "run", field) == by_round(tmp_path / "simulated", field)
    choices = by_round(tmp_path / "run", "client_predictors")
    names = set().union(*(choice.values() for choice in choices))
    assert len(names) == 2, "both models are chosen"
    assert model_files(tmp_path / "run") == model_files(tmp_path / "simulated")


def test_a_run_over_sites_resumes_to_the_same_bits(tmp_path: Path) -> None:
    experiment = at_sites(clustered())
    uninterrupted = tmp_path / "uninterrupted"
    grid = grid_of(clustered(), tmp_path / "sites")
    run(experiment, uninterrupted, toys.blobs(), grid=grid)

    stopped = tmp_path / "stopped"
    grid = grid_of(clustered(), tmp_path / "other sites")
    with pytest.raises(Interrupted):
        run(experiment, stopped, toys.blobs(), watch=StopAfter(2), grid=grid)
    resume(stopped, data=toys.blobs(), grid=grid)

    assert_same_bits(bits(stopped), bits(uninterrupted))


def test_each_site_tests_its_model_on_its_own_examples(tmp_path: Path) -> None:
    """Rounds are compared by held-out examples, and metrics are those of each site's model."""
    experiment = toys.stopping_early(
        "toy_clustered",
        topology={"clients": CLIENTS},
        stop={"patience": 2},
        measure=(),
        data={},
        metrics=("recall",),
    )
    simulation = run(experiment, tmp_path / "simulated", toys.blobs())

    grid = grid_of(experiment, tmp_path / "sites")
    result = run(at_sites(experiment), tmp_path / "run", toys.blobs(), grid=grid)

    assert by_round(tmp_path / "run", "selection_score") == by_round(
        tmp_path / "simulated", "selection_score"
    )
    assert result.summary["best_round"] == simulation.summary["best_round"]

    # All sites have the common test set, so theirs are the accuracies of the models on it.
    for event in result.history:
        for client, name in event["client_predictors"].items():
            accuracy = event["own_test_by_client"][client]
            assert accuracy == pytest.approx(event["others"][name]["accuracy"])
    tests = [event for event in journal_events(tmp_path / "run") if "held_out_accuracy" in event]
    assert {event["name"] for event in tests} == {"held_out_test"}
    assert len(tests) == CLIENTS * len(result.history)


def test_a_site_without_a_test_set_at_the_server_has_its_own_accuracy(tmp_path: Path) -> None:
    """The metrics of a run whose server has no data are those that sites report."""
    experiment = clustered(metrics=("recall",))
    grid = grid_of(experiment, tmp_path / "sites")

    run(at_sites(experiment), tmp_path / "run", toys.blobs(), grid=grid)

    for event in journal_events(tmp_path / "run", event="round")[1:]:
        assert event["own_test_by_client"].keys() == {str(c) for c in range(CLIENTS)}
        assert 0 <= event["own_test_recall"] <= 1
