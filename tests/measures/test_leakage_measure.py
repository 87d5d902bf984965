"""The measure ``leakage``: whom it tries, what it takes for seen, and that it sees what is there to
be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import FedstillError, IncompatibleMethod
from fedstill.core.extensions import StageResult
from fedstill.core.method import Method
from fedstill.core.records import Payload, Stage, World
from fedstill.core.registry import method, register
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors
from fedstill.losses import standardize
from fedstill.measures.base import EvaluationContext, Measure, Numbers
from fedstill.measures.choice import MeasuredRun, measures, unsuited_measures
from fedstill.metrics.membership import attack, confidences, likelihood_ratios
from fedstill.privacy import leakage
from fedstill.privacy.noise import clip_rows
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

pytestmark = pytest.mark.usefixtures("with_threads")

LOOKS: list[tuple[StageResult, EvaluationContext]] = []
OWN: dict[int, Any] = {}
"""The clients' own models after the first stage that was looked at."""
LOGITS = {"data": {"public": toys.PUBLIC}, "topology": {"clients": 6}}
BY_HEART = {
    "rounds": 1,
    "partition": {"kind": "iid"},
    "model": {"name": "mlp", "hidden": (64,)},
    "plan": {"epochs": 60, "batch": 10, "lr": 0.05, "momentum": 0.9},
}


@register("measure", "toy_leak_spy")
class LeakSpy(Measure):
    """Keeps what it was shown, and what ``leakage`` needs."""

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
        LOOKS.append((seen, context))
        if len(LOOKS) == 1 and context.remembered is not None:
            OWN.update({c: context.remembered(c).get("params") for c in seen.stage.clients})
        return None


def looked(
    folder: Path, method: object = "fedavg", shown: Dataset | None = None, **changes: Any
) -> list[Any]:
    """The measure's events, with ``LOOKS`` beside them."""
    LOOKS.clear()
    result = run(
        toys.toy(method, measure=("leakage", "toy_leak_spy"), **changes),
        folder,
        data=shown or toys.blobs(),
    )
    return result.measures


def noise(size: int = 240) -> Dataset:
    """Images that have nothing to do with their labels: what a model knows of them it has learned
    by heart.
    """
    draw = torch.Generator().manual_seed(1)

    def some() -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randint(
            0, 256, (size, 1, toys.SIDE, toys.SIDE), generator=draw, dtype=torch.uint8
        )
        return images, torch.arange(size) % toys.CLASSES

    return from_tensors(
        "noise", some(), some(), classes=[f"class {c}" for c in range(toys.CLASSES)]
    )


def own(context: EvaluationContext, client: int) -> Any:
    """A client's examples in training."""
    return context.sites.view(client, LOOKS[0][0].stage).data


def test_others_are_test_images_of_the_members_classes_and_members_were_trained_on(
    tmp_path: Path,
) -> None:
    looked(tmp_path / "run", rounds=1, partition={"kind": "iid"})
    ((seen, context),) = LOOKS
    tried = leakage._candidates(seen.stage.clients, seen.stage, context)
    assert tried is not None
    inside, outside = torch.chunk(tried.examples.labels, 2)
    assert torch.equal(inside, outside)
    members, others = torch.chunk(tried.examples.values, 2)
    for client in seen.stage.clients:
        mine = tried.owners[: len(inside)] == client
        data = own(context, client)
        assert mine.sum() == len(data), "few examples: all are tried"
        there = {image.numpy().tobytes() for image in data.values}
        assert {image.numpy().tobytes() for image in members[mine]} == there
    tested = {image.numpy().tobytes() for image in context.test.values}
    assert {image.numpy().tobytes() for image in others} <= tested
    again = leakage._candidates(seen.stage.clients, replace(seen.stage, round=9), context)
    assert again is not None
    assert torch.equal(again.examples.values, tried.examples.values), "the same in every round"


def test_no_more_are_tried_than_there_are_test_images_of_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked(tmp_path / "run", rounds=1, data={"test_size": 10})
    ((seen, context),) = LOOKS
    tried = leakage._candidates((3,), seen.stage, context)
    assert tried is not None
    counts = torch.bincount(torch.chunk(tried.examples.labels, 2)[0], minlength=toys.CLASSES)
    assert torch.equal(
        counts, torch.bincount(own(context, 3).labels, minlength=toys.CLASSES).clamp(max=2)
    )
    monkeypatch.setattr(leakage, "MOST", 6)
    few = leakage._candidates((0, 1, 2), seen.stage, context)
    assert few is not None
    assert [int((few.owners == c).sum()) <= 4 for c in (0, 1, 2)] == [True] * 3


def test_examples_that_are_held_out_are_no_members(tmp_path: Path) -> None:
    looked(tmp_path / "run", rounds=1, plan={"epochs": 1, "validation": 0.4})
    ((seen, context),) = LOOKS
    tried = leakage._candidates((0,), replace(seen.stage, name="another"), context)
    assert tried is not None
    view = context.sites.view(0, seen.stage)
    assert view.validation is not None
    held = {image.numpy().tobytes() for image in view.validation.values}
    assert not held & {
        image.numpy().tobytes() for image in torch.chunk(tried.examples.values, 2)[0]
    }


def attacks_by_hand(phi: Mapping[int, np.ndarray], owners: np.ndarray) -> tuple[Any, Any]:
    """Both attacks, one client after the other."""
    by_loss, by_ratio = np.zeros(len(owners)), np.zeros(len(owners))
    for client, row in phi.items():
        mine = owners == client
        rest = np.stack([phi[c][mine] for c in phi if c != client])
        by_loss[mine], by_ratio[mine] = row[mine], likelihood_ratios(row[mine], rest)
    n = len(owners) // 2
    return attack(by_loss[:n], by_loss[n:]), attack(by_ratio[:n], by_ratio[n:])


def test_models_that_were_sent_are_attacked(tmp_path: Path) -> None:
    (event,) = looked(tmp_path / "run", rounds=1)
    ((seen, context),) = LOOKS
    tried = leakage._candidates(seen.stage.clients, seen.stage, context)
    assert tried is not None
    phi = {
        c: confidences(context.passes().logits(p, tried.examples), tried.examples.labels)
        for c, p in seen.local_models.items()
    }
    by_loss, by_ratio = attacks_by_hand(phi, tried.owners)
    assert event["seen"] == {"loss": by_loss, "likelihood_ratio": by_ratio}
    assert "raw" not in event
    assert event["members"] * 2 == len(tried.owners)
    assert event["clients"] == list(seen.stage.clients)
    n = event["members"]
    for client, area in zip(event["clients"], event["client_auc"], strict=True):
        mine = tried.owners[:n] == client
        assert area == attack(phi[client][:n][mine], phi[client][n:][mine])["auc"]
    everyone = leakage._candidates(range(6), seen.stage, context)
    assert everyone is not None
    logits = context.passes().logits(seen.after.params, everyone.examples)
    members, others = np.split(confidences(logits, everyone.examples.labels), 2)
    assert event["global"] == {"members": len(members), "loss": attack(members, others)}


def test_of_logits_it_is_what_would_be_sent_before_and_after_privacy(tmp_path: Path) -> None:
    options = {"privacy": {"clip": 1.5, "noise": 0.0}, "rounds": 1, **LOGITS}
    local, ends = looked(tmp_path / "run", "hiper_fedkd", **options)
    (seen, context), *_ = LOOKS
    assert (local["name"], ends["name"]) == ("local", "distil")
    assert set(ends) & {"seen", "raw", "global"} == {"global"}
    tried = leakage._candidates(seen.stage.clients, seen.stage, context)
    assert tried is not None
    clear, clipped = {}, {}
    for client in seen.stage.clients:
        sent = standardize(context.passes().logits(OWN[client], tried.examples))
        clear[client] = confidences(sent, tried.examples.labels)
        clipped[client] = confidences(clip_rows(sent, 1.5), tried.examples.labels)
    assert local["raw"]["loss"] == attacks_by_hand(clear, tried.owners)[0]
    assert local["seen"]["loss"] == attacks_by_hand(clipped, tried.owners)[0]
    assert local["seen"]["loss"] != local["raw"]["loss"]


@pytest.mark.slow
def test_noise_hides_what_was_learned_by_heart(tmp_path: Path) -> None:
    """Images of noise: a model can only learn them by heart. What it sends betrays them, and noise
    hides that.
    """
    quiet = {"privacy": {"clip": 20.0, "noise": 0.0}}
    loud = {"privacy": {"clip": 20.0, "noise": 100.0}}
    clear, hidden = (
        next(
            e
            for e in looked(tmp_path / name, "dsfl", noise(), **BY_HEART, **LOGITS, **privacy)
            if "seen" in e
        )
        for name, privacy in (("clear", quiet), ("hidden", loud))
    )
    assert clear["seen"] == clear["raw"]
    assert clear["raw"]["loss"] == hidden["raw"]["loss"]
    assert clear["seen"]["loss"]["auc_interval"][0] > 0.7
    assert abs(hidden["seen"]["loss"]["auc"] - 0.5) < 0.1, "of 240 pairs, three standard errors"


def test_models_betray_what_was_learned_by_heart(tmp_path: Path) -> None:
    (event,) = looked(tmp_path / "run", shown=noise(), **BY_HEART)
    for name in ("loss", "likelihood_ratio"):
        assert event["seen"][name]["auc_interval"][0] > 0.7


def test_a_model_that_was_not_trained_betrays_nothing(tmp_path: Path) -> None:
    """And labels that are uneven do not look like a leak: the classes of the others are the
    members'.
    """
    uneven = {"kind": "dirichlet", "alpha": 0.1, "min_size": 4}
    (event,) = looked(tmp_path / "run", rounds=1, partition=uneven, plan={"epochs": 1, "lr": 1e-9})
    low, high = event["seen"]["loss"]["auc_interval"]
    assert low < 0.5 < high
    (event,) = looked(tmp_path / "other", rounds=1, partition=uneven, plan={"epochs": 3, "lr": 0.1})
    low, high = event["seen"]["loss"]["auc_interval"]
    assert low - 0.03 < 0.5 < high + 0.03, "classes alone would give far more"


def test_with_two_others_there_is_no_likelihood_ratio(tmp_path: Path) -> None:
    (event,) = looked(tmp_path / "run", rounds=1, topology={"clients": 6, "sampled": 3})
    assert set(event["seen"]) == {"loss"}


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        (
            "toy_logits",
            LOGITS,
            "method toy_logits does not define",
        ),
        (
            "hiper_fedkd",
            {**LOGITS, "engine": "flower"},
            ".*engine = 'flower'",
        ),
    ],
)
def test_it_is_refused_where_it_could_not_see(
    method: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(IncompatibleMethod, match=f"measure leakage: {words}"):
        prepare(resolve(toys.toy(method, measure=("leakage",), **changes)), toys.blobs())


@method("toy_says")
@dataclass(frozen=True)
class Says(toys.Logits):
    """A method of logits that says what its clients send."""

    def sent_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


@dataclass(frozen=True)
class Prototypes(Method):
    """Clients send a mean feature of each class, and no model."""

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(prototypes=torch.zeros(world.classes, 8))


@dataclass(frozen=True)
class Silent(Method):
    """Clients send nothing at all."""

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload()


@pytest.mark.parametrize(
    ("sends", "words"),
    [(Prototypes(), "nor logits but prototypes; choose"), (Silent(), "nor logits; c")],
)
def test_what_is_neither_a_model_nor_logits_is_refused_by_name(sends: Method, words: str) -> None:
    ready = prepare(resolve(toys.toy("fedavg")), toys.blobs())
    schedule = replace(ready.settings.schedule, method=sends)
    setting = MeasuredRun(schedule, "mine", schedule(1, ready.world), ready.world)
    problem = unsuited_measures(measures(["leakage"]), setting)
    assert problem.startswith("measure leakage: ")
    assert "method mine " in problem
    assert words in problem


def test_a_method_of_ones_own_is_measured_if_it_says_what_is_sent(tmp_path: Path) -> None:
    options = {"rounds": 1, **LOGITS}
    (event, *_), _ = looked(tmp_path / "run", "toy_says", **options), LOOKS
    seen, context = LOOKS[0]
    tried = leakage._candidates(seen.stage.clients, seen.stage, context)
    assert tried is not None
    phi = {
        c: confidences(context.passes().logits(OWN[c], tried.examples), tried.examples.labels)
        for c in seen.stage.clients
    }
    assert event["seen"]["loss"] == attacks_by_hand(phi, tried.owners)[0]


def test_clients_that_remember_no_model_are_named() -> None:
    with pytest.raises(FedstillError, match="leakage: client 3"):
        leakage._model_of_logits(Payload(visits=1), 3)


def test_every_engine_gives_the_same(tmp_path: Path) -> None:
    def events(engine: str) -> list[Any]:
        found = looked(tmp_path / engine, rounds=1, engine=engine)
        return [{k: v for k, v in e.items() if not k.startswith("seconds")} for e in found]

    assert events("serial") == events("pooled") == events("flower")


def test_cost_grows_with_the_clients() -> None:
    images = measures(["leakage"])["leakage"].examples
    assert images(100, 10, 300) == 2 * 300 * 11
    assert images(10_000, 10, 50_000) == 2 * 2000 * 11
