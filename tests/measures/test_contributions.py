"""The measure ``contributions``: what a round's change consists of, over methods and topologies."""

from __future__ import annotations

import json
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


def events(method: Any, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    suited = toys.suited(method) if isinstance(method, str) and method.islower() else {}
    fedstill.run(
        toys.toy(method, **{**suited, "measure": ("contributions",), **changes}),
        folder,
        data=toys.blobs(),
    )
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [e for e in lines if e["event"] == "measure"]


def adds_up(event: dict[str, Any]) -> None:
    change = torch.tensor(event["after"]) - torch.tensor(event["before"])
    assert torch.allclose(torch.tensor(list(event["parts"].values())).sum(0), change, atol=5e-6)


@pytest.mark.parametrize("method", AFFINE)
def test_a_round_is_divided_by_the_path_where_the_fold_is_a_sum(
    method: str, tmp_path: Path
) -> None:
    looks = [e for e in events(method, tmp_path / "run") if e["name"] == "train"]
    for event in looks:
        adds_up(event)
        assert list(event["parts"]) == ["local training", "averaging"]
        assert event["game"] == "idle"
        if event["classes"]:
            assert event["rule"] == "path"
            assert max(event["gap"]) < 0.05
            assert [len(row) for row in event["values"]] == [len(event["clients"])] * len(
                event["classes"]
            )
            assert len(event["drawn"]) == 5
    assert any(event["classes"] for event in looks)


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
    topology = (
        {"topology": {"kind": "sequential", "clients": 6, "sampled": 3}}
        if method == "fedseq"
        else {}
    )
    looks = events(method, tmp_path / "run", **topology)
    for event in looks:
        adds_up(event)
    told = {name for event in looks for name in event["parts"]}
    assert {name.partition(" ")[0] if name.startswith("client") else name for name in told} == parts


def last_round(method: str, folder: Path) -> tuple[StageResult, EvaluationContext]:
    """The last round of a method, as a measure sees it."""
    kept: list[tuple[StageResult, EvaluationContext]] = []
    plain = Contributions.look
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Contributions,
            "look",
            lambda self, seen, context: kept.append((seen, context)) or plain(self, seen, context),
        )
        fedstill.run(toys.toy(method, measure=("contributions",)), folder, data=toys.blobs())
    return kept[-1]


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> tuple[StageResult, EvaluationContext]:
    return last_round("fedavg", tmp_path_factory.mktemp("looked") / "run")


def with_replies(
    seen: StageResult, context: EvaluationContext, replies: list[Reply]
) -> StageResult:
    after = context.method.aggregate(seen.before, replies, seen.stage, context.world)
    return replace(seen, accepted=replies, after=after)


def test_a_client_that_changed_nothing_has_contributed_nothing(
    looked: tuple[StageResult, EvaluationContext],
) -> None:
    seen, context = looked
    first, *rest = seen.accepted
    null = replace(first, content=Payload(params=seen.payloads[first.client].params))
    told = Contributions(classes=range(5)).look(with_replies(seen, context, [null, *rest]), context)
    assert told is not None
    assert told["rule"] == "path"
    assert [row[0] for row in told["values"]] == [0.0] * 5


def test_equal_replies_have_equal_shares_and_order_does_not_count(
    looked: tuple[StageResult, EvaluationContext],
) -> None:
    seen, context = looked
    first, second, *rest = seen.accepted
    twin = replace(second, content=first.content, examples=first.examples)
    told = Contributions(classes=range(5)).look(
        with_replies(seen, context, [first, twin, *rest]), context
    )
    assert told is not None
    for row in told["values"]:
        assert row[0] == pytest.approx(row[1], abs=2e-6)
    exact = Contributions(exactly=True, classes=range(5)).look(
        with_replies(seen, context, [first, twin, *rest]), context
    )
    assert exact is not None
    assert (exact["rule"], max(exact["gap"])) == ("exact", 0.0)
    for row, near in zip(exact["values"], told["values"], strict=True):
        assert row[0] == pytest.approx(row[1], abs=2e-6)
        assert near == pytest.approx(row, abs=0.12)


@pytest.mark.parametrize(("method", "least"), [("fedavgm", 0.01), ("fedavg", 0.0)])
def test_with_what_the_server_does_by_itself_contributions_sum_to_the_change(
    method: str, least: float, tmp_path: Path
) -> None:
    seen, context = last_round(method, tmp_path / "run")
    told = Contributions(classes=range(5)).look(seen, context)
    assert told is not None
    data = at_most(context.test, 100, 5)
    worth = []
    for state in (seen.before, seen.after):
        right = (
            context.method.predictors(state, context.world)["global"](
                context.inputs.plain(data.values)
            )
            / 0.25
        ).softmax(1)
        worth.append([float(right[data.labels == c, c].double().mean()) for c in range(5)])
    for at, c in enumerate(told["classes"]):
        whole = sum(told["values"][at]) + told["nobody"][at]
        assert whole == pytest.approx(worth[1][c] - worth[0][c], abs=told["gap"][at] + 1e-5)
    assert max(map(abs, told["nobody"])) >= least
    assert least or max(map(abs, told["nobody"])) < 1e-4


def test_the_idle_game_keeps_the_weights_and_the_absent_one_does_not(
    looked: tuple[StageResult, EvaluationContext],
) -> None:
    seen, context = looked
    absent = StageGame(context.method, seen.before, seen.stage, seen.accepted, context.world)
    replies = idle_replies(context.method, seen.accepted, seen.payloads)
    idle = replace(absent, idle_replies=replies)
    assert (absent.game, idle.game) == ("absent", "idle")
    nobody = idle.state(()).params
    assert all(torch.allclose(nobody[k], v, atol=1e-6) for k, v in seen.before.params.items())
    assert absent.state(()) is seen.before
    sizes = [r.examples for r in seen.accepted]
    one = idle.state((0,)).params
    for name, value in trees.floats(seen.before.params).items():
        own = value + sizes[0] / sum(sizes) * (seen.accepted[0].content.params[name] - value)
        assert torch.allclose(one[name], own, atol=1e-6)
        assert torch.allclose(
            absent.state((0,)).params[name], seen.accepted[0].content.params[name], atol=1e-6
        )


@dataclass(frozen=True)
class MedianOfModels(fedstill.Method):
    """The median of each entry: no sum of what clients change."""

    def aggregate(self, state: State, replies: Any, stage: Stage, world: World) -> State:
        each = [r.content.params for r in replies]
        return state.next(
            params={k: torch.stack([p[k] for p in each]).median(0).values for k in state.params}
        )


@dataclass(frozen=True)
class Secretive(fedstill.Method):
    """FedAvg that cannot say what an idle client would send."""

    def idle_reply(self, reply: Reply, payload: Payload) -> None:
        return None


@pytest.mark.parametrize(("method", "game"), [(MedianOfModels(), "idle"), (Secretive(), "absent")])
def test_other_folds_are_asked_at_two_ends(method: Any, game: str, tmp_path: Path) -> None:
    told = [e for e in events(method, tmp_path / "run") if e["classes"]]
    assert told
    assert {(e["rule"], e["game"]) for e in told} == {("two ends", game)}


@pytest.mark.parametrize("mean", ["trimmed_mean", "median", "norm_clipping", "krum"])
def test_robust_means_are_asked_at_two_ends_and_still_add_up(mean: str, tmp_path: Path) -> None:
    looks = events({"name": "fedavg", "aggregation": mean}, tmp_path / "run")
    for event in looks:
        adds_up(event)
        if event["classes"]:
            assert (event["rule"], event["game"]) == ("two ends", "idle")
    assert any(event["classes"] for event in looks)


def test_test_examples_are_few_a_class_and_the_same_each_time() -> None:
    test = toys.blobs(size=3000).test
    some = at_most(test, 15, 5)
    assert torch.bincount(some.labels).tolist() == [15] * 5
    assert torch.equal(some.values, at_most(test, 15, 5).values)
    assert len(at_most(test, 10**6, 5)) == len(test)
