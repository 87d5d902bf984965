"""The measure ``contributions``: the parts of a round's change, for methods and topologies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstill
import toys
from fedstill.core import trees
from fedstill.core.extensions import StageResult
from fedstill.core.records import Payload, Reply, Stage, State, World
from fedstill.measures.base import EvaluationContext
from fedstill.measures.contributions import Contributions, StageGame, at_most, idle_replies
from journals import journal_events

AFFINE = (
    "fedavg",
    "fedavgm",
    "fedntd",
    "fednova",
    "scaffold",
    "feddyn",
    "feddc",
    "fedadkd",
    "fedcurv",
    "moon",
    "feddf",
)


def measured(method: Any, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """The events of the measure in a run of a method."""
    values: dict[str, Any] = {"measure": ("contributions",)}
    if isinstance(method, str):
        values = {**toys.suited(method), **values}
    fedstill.run(toys.toy(method, **{**values, **changes}), folder, data=toys.blobs())
    return journal_events(folder, event="measure")


def assert_adds_up(event: dict[str, Any]) -> None:
    """The parts sum to the change of the stage."""
    change = torch.tensor(event["after"]) - torch.tensor(event["before"])
    parts = torch.tensor(list(event["parts"].values()))
    assert torch.allclose(parts.sum(0), change, atol=5e-6)


@pytest.mark.parametrize("method", AFFINE)
def test_a_round_is_divided_by_the_path_where_the_aggregation_is_a_sum(
    method: str, tmp_path: Path
) -> None:
    looks = measured(method, tmp_path / "run")

    trained = [event for event in looks if event["name"] == "train"]
    for event in trained:
        assert_adds_up(event)
        assert list(event["parts"]) == ["local training", "averaging"]
        assert event["game"] == "idle"
    with_classes = [event for event in trained if event["classes"]]
    assert with_classes
    for event in with_classes:
        assert event["rule"] == "path"
        assert max(event["gap"]) < 0.05
        assert len(event["values"]) == len(event["classes"])
        assert {len(row) for row in event["values"]} == {len(event["clients"])}
        assert len(event["drawn"]) == 5


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("fedseq", {"client"}),
        ("qkt", {"fit", "transfer", "refine"}),
        ("fedmd", {"local", "revisit", "distil", "teach_server at the server"}),
        ("local_only", {"fit"}),
    ],
)
def test_other_topologies_have_a_part_for_each_link_stage_or_phase(
    method: str, parts: set[str], tmp_path: Path
) -> None:
    """In a chain, the names of parts are ``client 3``, …"""
    changes: dict[str, Any] = {}
    if method == "fedseq":
        changes["topology"] = {"kind": "sequential", "clients": 6, "sampled": 3}

    looks = measured(method, tmp_path / "run", **changes)

    names = set()
    for event in looks:
        assert_adds_up(event)
        names |= event["parts"].keys()
    if method == "fedseq":
        names = {name.partition(" ")[0] for name in names}
    assert names == parts


@dataclass(frozen=True)
class Look:
    """What the measure sees of a round."""

    result: StageResult
    context: EvaluationContext

    def with_replies(self, *replies: Reply) -> Look:
        """The same round with other replies, and the state that they give."""
        result = self.result
        world = self.context.world
        after = self.context.method.aggregate(result.before, replies, result.stage, world)
        return Look(replace(result, accepted=list(replies), after=after), self.context)

    def contributions(self, exactly: bool = False) -> dict[str, Any]:
        """The numbers of the measure for all classes."""
        measure = Contributions(exactly=exactly, classes=range(5))
        numbers = measure.look(self.result, self.context)
        assert numbers is not None
        return dict(numbers)


def last_round(method: str, folder: Path) -> Look:
    """The last round of a run with the measure."""
    looks: list[Look] = []
    look = Contributions.look

    def recorded(self: Contributions, result: StageResult, context: EvaluationContext) -> Any:
        looks.append(Look(result, context))
        return look(self, result, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Contributions, "look", recorded)
        fedstill.run(toys.toy(method, measure=("contributions",)), folder, data=toys.blobs())
    return looks[-1]


@pytest.fixture(scope="module")
def last_look(tmp_path_factory: pytest.TempPathFactory) -> Look:
    """The last round of FedAvg."""
    return last_round("fedavg", tmp_path_factory.mktemp("fedavg") / "run")


def test_a_client_without_change_has_no_contribution(last_look: Look) -> None:
    first, *further = last_look.result.accepted
    received = last_look.result.payloads[first.client].params
    unchanged = replace(first, content=Payload(params=received))

    numbers = last_look.with_replies(unchanged, *further).contributions()

    assert numbers["rule"] == "path"
    assert [row[0] for row in numbers["values"]] == [0.0] * 5


def test_equal_replies_have_equal_shares(last_look: Look) -> None:
    """By the path and exactly; both agree approximately."""
    first, second, *further = last_look.result.accepted
    twin = replace(second, content=first.content, examples=first.examples)
    with_twins = last_look.with_replies(first, twin, *further)

    numbers = with_twins.contributions()
    exact = with_twins.contributions(exactly=True)

    assert exact["rule"] == "exact"
    assert max(exact["gap"]) == 0.0
    for row, exact_row in zip(numbers["values"], exact["values"], strict=True):
        assert row[0] == pytest.approx(row[1], abs=2e-6)
        assert exact_row[0] == pytest.approx(exact_row[1], abs=2e-6)
        assert row == pytest.approx(exact_row, abs=0.12)


def soft_accuracy_by_class(look: Look, state: State) -> list[float]:
    """The mean probability of the label, at temperature 0.25, by class."""
    context = look.context
    examples = at_most(context.test, 100, 5)
    predict = context.method.predictors(state, context.world)["global"]
    logits = predict(context.inputs.plain(examples.values))
    probabilities = (logits / 0.25).softmax(1)
    return [
        float(probabilities[examples.labels == label, label].double().mean()) for label in range(5)
    ]


@pytest.mark.parametrize("method", ["fedavgm", "fedavg"])
def test_with_the_servers_own_change_contributions_sum_to_the_change(
    method: str, tmp_path: Path
) -> None:
    """The momentum of FedAvgM moves the model without clients; FedAvg has no such part."""
    look = last_round(method, tmp_path / "run")
    start = soft_accuracy_by_class(look, look.result.before)
    end = soft_accuracy_by_class(look, look.result.after)

    numbers = look.contributions()

    for index, label in enumerate(numbers["classes"]):
        total = sum(numbers["values"][index]) + numbers["nobody"][index]
        tolerance = numbers["gap"][index] + 1e-5
        assert total == pytest.approx(end[label] - start[label], abs=tolerance)
    without_clients = max(map(abs, numbers["nobody"]))
    if method == "fedavgm":
        assert without_clients >= 0.01
    else:
        assert without_clients < 1e-4


def test_the_idle_game_keeps_the_weights_and_the_absent_one_does_not(last_look: Look) -> None:
    """A game of client 0 alone: the others send what they received, or nothing."""
    result = last_look.result
    method = last_look.context.method
    world = last_look.context.world
    absent = StageGame(method, result.before, result.stage, result.accepted, world)
    idle = replace(absent, idle_replies=idle_replies(method, result.accepted, result.payloads))
    received = trees.floats(result.before.params)
    examples = [reply.examples for reply in result.accepted]
    weight = examples[0] / sum(examples)
    reply = result.accepted[0].content.params

    assert absent.game == "absent"
    assert idle.game == "idle"
    assert absent.state(()) is result.before
    for name, value in result.before.params.items():
        assert torch.allclose(idle.state(()).params[name], value, atol=1e-6)
    idle_params = idle.state((0,)).params
    absent_params = absent.state((0,)).params
    for name, value in received.items():
        moved = value + weight * (reply[name] - value)
        assert torch.allclose(idle_params[name], moved, atol=1e-6)
        assert torch.allclose(absent_params[name], reply[name], atol=1e-6)


@dataclass(frozen=True)
class MedianOfModels(fedstill.Method):
    """The median of each entry: no sum of what clients change."""

    def aggregate(self, state: State, replies: Any, stage: Stage, world: World) -> State:
        medians = {}
        for name in state.params:
            entries = [reply.content.params[name] for reply in replies]
            medians[name] = torch.stack(entries).median(0).values
        return state.next(params=medians)


@dataclass(frozen=True)
class Secretive(fedstill.Method):
    """FedAvg without a definition of an idle client's reply."""

    def idle_reply(self, reply: Reply, payload: Payload) -> None:
        return None


@pytest.mark.parametrize(("method", "game"), [(MedianOfModels(), "idle"), (Secretive(), "absent")])
def test_other_aggregations_are_evaluated_at_two_ends(
    method: Any, game: str, tmp_path: Path
) -> None:
    looks = measured(method, tmp_path / "run")

    with_classes = [event for event in looks if event["classes"]]
    assert with_classes
    assert {event["rule"] for event in with_classes} == {"two ends"}
    assert {event["game"] for event in with_classes} == {game}


@pytest.mark.parametrize("mean", ["trimmed_mean", "median", "norm_clipping", "krum"])
def test_robust_means_are_evaluated_at_two_ends_and_add_up(mean: str, tmp_path: Path) -> None:
    looks = measured({"name": "fedavg", "aggregation": mean}, tmp_path / "run")

    for event in looks:
        assert_adds_up(event)
    with_classes = [event for event in looks if event["classes"]]
    assert with_classes
    assert {event["rule"] for event in with_classes} == {"two ends"}
    assert {event["game"] for event in with_classes} == {"idle"}


def test_at_most_a_number_of_test_examples_of_each_class_is_taken_always_the_same() -> None:
    test = toys.blobs(size=3000).test

    limited = at_most(test, 15, 5)

    assert torch.bincount(limited.labels).tolist() == [15] * 5
    assert torch.equal(limited.values, at_most(test, 15, 5).values)
    assert len(at_most(test, 10**6, 5)) == len(test)
