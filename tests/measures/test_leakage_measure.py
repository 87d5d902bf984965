"""The measure ``leakage``: the examples that it attacks, the models or logits that it attacks them
with, and that it finds known leaks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
from fedstill.core.records import Examples, Payload, Stage, Tensors, World
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

LOGITS = {"data": {"public": toys.PUBLIC}, "topology": {"clients": 6}}
OVERFITTING = {
    "rounds": 1,
    "partition": {"kind": "iid"},
    "model": {"name": "mlp", "hidden": (64,)},
    "plan": {"epochs": 60, "batch": 10, "lr": 0.05, "momentum": 0.9},
}


@dataclass(frozen=True)
class Look:
    """What a measure sees of a stage."""

    result: StageResult
    context: EvaluationContext

    def candidates(
        self, clients: Collection[int] | None = None, stage: Stage | None = None
    ) -> leakage._Candidates:
        """The examples that are attacked: by default, those of the stage's clients."""
        if clients is None:
            clients = self.result.stage.clients
        candidates = leakage._candidates(clients, stage or self.result.stage, self.context)
        assert candidates is not None
        return candidates

    def training_data(self, client: int) -> Examples:
        """A client's examples in training."""
        return self.context.sites.view(client, self.result.stage).data

    def logits(self, params: Tensors, examples: Examples) -> torch.Tensor:
        """The logits of a model."""
        return self.context.passes().logits(params, examples)


LOOKS: list[Look] = []
CLIENT_MODELS: dict[int, Any] = {}
"""The clients' own models after the first stage."""


@register("measure", "toy_leak_spy")
class LeakSpy(Measure):
    """Keeps what it was shown, and what ``leakage`` needs."""

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        LOOKS.append(Look(result, context))
        if len(LOOKS) == 1 and context.remembered is not None:
            for client in result.stage.clients:
                CLIENT_MODELS[client] = context.remembered(client).get("params")
        return None


def measured(
    folder: Path, method: object = "fedavg", images: Dataset | None = None, **changes: Any
) -> list[Any]:
    """The measure's events of a run, whose stages are then in ``LOOKS``."""
    LOOKS.clear()
    experiment = toys.toy(method, measure=("leakage", "toy_leak_spy"), **changes)
    return run(experiment, folder, data=images or toys.blobs()).measures


def noise(size: int = 240) -> Dataset:
    """Images that are independent of their labels: a model can only learn them by heart."""
    generator = torch.Generator().manual_seed(1)
    shape = (size, 1, toys.SIDE, toys.SIDE)
    train = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    test = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.arange(size) % toys.CLASSES
    names = [f"class {label}" for label in range(toys.CLASSES)]
    return from_tensors("noise", (train, labels), (test, labels), classes=names)


def image_bytes(images: torch.Tensor) -> set[bytes]:
    """The set of images."""
    return {image.numpy().tobytes() for image in images}


def test_others_are_test_images_of_the_members_classes_and_members_were_trained_on(
    tmp_path: Path,
) -> None:
    """Of few examples, all are attacked, the same ones in every round."""
    measured(tmp_path / "run", rounds=1, partition={"kind": "iid"})
    (look,) = LOOKS
    candidates = look.candidates()
    member_labels, other_labels = candidates.examples.labels.chunk(2)
    members, others = candidates.examples.values.chunk(2)
    member_owners = candidates.owners[: len(members)]

    assert torch.equal(member_labels, other_labels)
    for client in look.result.stage.clients:
        is_owned = member_owners == client
        data = look.training_data(client)
        assert is_owned.sum() == len(data)
        assert image_bytes(members[is_owned]) == image_bytes(data.values)
    assert image_bytes(others) <= image_bytes(look.context.test.values)
    in_round_9 = look.candidates(stage=replace(look.result.stage, round=9))
    assert torch.equal(in_round_9.examples.values, candidates.examples.values)


def test_of_each_class_no_more_members_are_attacked_than_there_are_test_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are two test images of each class."""
    measured(tmp_path / "run", rounds=1, data={"test_size": 10})
    (look,) = LOOKS

    member_labels, _ = look.candidates((3,)).examples.labels.chunk(2)
    monkeypatch.setattr(leakage, "MOST", 6)
    owners = look.candidates((0, 1, 2)).owners

    counts = torch.bincount(member_labels, minlength=toys.CLASSES)
    training_counts = torch.bincount(look.training_data(3).labels, minlength=toys.CLASSES)
    assert torch.equal(counts, training_counts.clamp(max=2))
    for client in (0, 1, 2):
        assert int((owners == client).sum()) <= 4


def test_held_out_examples_are_no_members(tmp_path: Path) -> None:
    measured(tmp_path / "run", rounds=1, plan={"epochs": 1, "validation": 0.4})
    (look,) = LOOKS
    view = look.context.sites.view(0, look.result.stage)
    assert view.validation is not None

    candidates = look.candidates((0,), replace(look.result.stage, name="another"))

    members, _ = candidates.examples.values.chunk(2)
    assert image_bytes(members).isdisjoint(image_bytes(view.validation.values))


@dataclass(frozen=True)
class Attacks:
    """The numbers of both attacks."""

    loss: dict[str, Any]
    likelihood_ratio: dict[str, Any]


def attack_halves(scores: np.ndarray) -> dict[str, Any]:
    """The attack on scores of as many members as others, in this order."""
    members, others = np.split(scores, 2)
    return attack(members, others)


def attacks_by_hand(confidence: Mapping[int, np.ndarray], owners: np.ndarray) -> Attacks:
    """Both attacks, one client after the other.

    ``confidence``: of each client's model in all candidates. The models of other clients are those
    that have not seen a client's examples.
    """
    by_loss = np.zeros(len(owners))
    by_ratio = np.zeros(len(owners))
    for client, row in confidence.items():
        is_owned = owners == client
        without_example = [
            other_row[is_owned] for other, other_row in confidence.items() if other != client
        ]
        by_loss[is_owned] = row[is_owned]
        by_ratio[is_owned] = likelihood_ratios(row[is_owned], np.stack(without_example))
    return Attacks(attack_halves(by_loss), attack_halves(by_ratio))


def test_models_that_were_sent_are_attacked(tmp_path: Path) -> None:
    (event,) = measured(tmp_path / "run", rounds=1)
    (look,) = LOOKS
    candidates = look.candidates()
    examples = candidates.examples
    confidence = {
        client: confidences(look.logits(params, examples), examples.labels)
        for client, params in look.result.local_models.items()
    }
    expected = attacks_by_hand(confidence, candidates.owners)

    assert event["seen"]["loss"] == expected.loss
    assert event["seen"]["likelihood_ratio"] == expected.likelihood_ratio
    assert event["seen"].keys() == {"loss", "likelihood_ratio"}
    assert "raw" not in event
    assert event["members"] * 2 == len(candidates.owners)
    assert event["clients"] == list(look.result.stage.clients)
    for client, area in zip(event["clients"], event["client_auc"], strict=True):
        is_owned = candidates.owners == client
        assert area == attack_halves(confidence[client][is_owned])["auc"]

    of_all_clients = look.candidates(range(6)).examples
    logits = look.logits(look.result.after.params, of_all_clients)
    expected_global = attack_halves(confidences(logits, of_all_clients.labels))
    assert event["global"] == {"members": len(of_all_clients) // 2, "loss": expected_global}


def test_logits_are_attacked_before_and_after_privacy(tmp_path: Path) -> None:
    """As they would be sent: standardised, then clipped."""
    options = {"privacy": {"clip": 1.5, "noise": 0.0}, "rounds": 1, **LOGITS}
    local, distil = measured(tmp_path / "run", "hiper_fedkd", **options)
    look = LOOKS[0]
    candidates = look.candidates()
    labels = candidates.examples.labels
    unclipped = {}
    clipped = {}
    for client in look.result.stage.clients:
        logits = standardize(look.logits(CLIENT_MODELS[client], candidates.examples))
        unclipped[client] = confidences(logits, labels)
        clipped[client] = confidences(clip_rows(logits, 1.5), labels)

    assert local["name"] == "local"
    assert local["raw"]["loss"] == attacks_by_hand(unclipped, candidates.owners).loss
    assert local["seen"]["loss"] == attacks_by_hand(clipped, candidates.owners).loss
    assert local["seen"]["loss"] != local["raw"]["loss"]
    assert distil["name"] == "distil"
    assert "global" in distil
    assert "seen" not in distil
    assert "raw" not in distil


def leak_of_noise_images(folder: Path, noise_size: float) -> dict[str, Any]:
    """The event of the stage in which logits are sent, with images of noise that models have
    learned by heart.
    """
    privacy = {"clip": 20.0, "noise": noise_size}
    events = measured(folder, "dsfl", noise(), **OVERFITTING, **LOGITS, privacy=privacy)
    return next(event for event in events if "seen" in event)


@pytest.mark.slow
def test_noise_hides_examples_that_were_learned_by_heart(tmp_path: Path) -> None:
    """Without noise, logits reveal the members. Of 240 pairs, 0.1 is three standard errors."""
    clear = leak_of_noise_images(tmp_path / "clear", 0.0)
    hidden = leak_of_noise_images(tmp_path / "hidden", 100.0)

    assert clear["seen"] == clear["raw"]
    assert clear["raw"]["loss"] == hidden["raw"]["loss"]
    assert clear["seen"]["loss"]["auc_interval"][0] > 0.7
    assert abs(hidden["seen"]["loss"]["auc"] - 0.5) < 0.1


def test_models_reveal_examples_that_were_learned_by_heart(tmp_path: Path) -> None:
    (event,) = measured(tmp_path / "run", images=noise(), **OVERFITTING)

    for name in ("loss", "likelihood_ratio"):
        assert event["seen"][name]["auc_interval"][0] > 0.7


UNEVEN = {"kind": "dirichlet", "alpha": 0.1, "min_size": 4}


def test_an_untrained_model_reveals_nothing_even_if_labels_are_uneven(tmp_path: Path) -> None:
    """Members and others have the same classes, so classes alone are no leak. They would give far
    more than the tolerance of the second run.
    """
    untrained_plan = {"epochs": 1, "lr": 1e-9}
    short_plan = {"epochs": 3, "lr": 0.1}

    (untrained,) = measured(tmp_path / "untrained", rounds=1, partition=UNEVEN, plan=untrained_plan)
    (trained,) = measured(tmp_path / "trained", rounds=1, partition=UNEVEN, plan=short_plan)

    low, high = untrained["seen"]["loss"]["auc_interval"]
    assert low < 0.5 < high
    low, high = trained["seen"]["loss"]["auc_interval"]
    assert low - 0.03 < 0.5 < high + 0.03


def test_with_two_other_clients_there_is_no_likelihood_ratio(tmp_path: Path) -> None:
    (event,) = measured(tmp_path / "run", rounds=1, topology={"clients": 6, "sampled": 3})

    assert set(event["seen"]) == {"loss"}


@pytest.mark.parametrize(
    ("method", "changes", "problem"),
    [
        ("toy_logits", LOGITS, "method toy_logits does not define"),
        ("hiper_fedkd", {**LOGITS, "engine": "flower"}, ".*engine = 'flower'"),
    ],
)
def test_runs_in_which_it_cannot_attack_are_refused(
    method: str, changes: dict[str, Any], problem: str
) -> None:
    experiment = toys.toy(method, measure=("leakage",), **changes)

    with pytest.raises(IncompatibleMethod, match=f"measure leakage: {problem}"):
        prepare(resolve(experiment), toys.blobs())


@method("toy_says")
@dataclass(frozen=True)
class Says(toys.Logits):
    """A method that defines the logits that its clients send."""

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
    ("method", "problem"),
    [(Prototypes(), "nor logits but prototypes; choose"), (Silent(), "nor logits; c")],
)
def test_a_method_that_sends_neither_models_nor_logits_is_refused_by_name(
    method: Method, problem: str
) -> None:
    ready = prepare(resolve(toys.toy("fedavg")), toys.blobs())
    schedule = replace(ready.settings.schedule, method=method)
    setting = MeasuredRun(schedule, "mine", schedule(1, ready.world), ready.world)

    refusal = unsuited_measures(measures(["leakage"]), setting)

    assert refusal.startswith("measure leakage: ")
    assert "method mine " in refusal
    assert problem in refusal


def test_a_method_of_ones_own_is_measured_if_it_defines_its_logits(tmp_path: Path) -> None:
    event = measured(tmp_path / "run", "toy_says", rounds=1, **LOGITS)[0]

    look = LOOKS[0]
    candidates = look.candidates()
    examples = candidates.examples
    confidence = {
        client: confidences(look.logits(CLIENT_MODELS[client], examples), examples.labels)
        for client in look.result.stage.clients
    }
    assert event["seen"]["loss"] == attacks_by_hand(confidence, candidates.owners).loss


def test_a_client_without_a_model_in_its_state_is_named() -> None:
    with pytest.raises(FedstillError, match="leakage: client 3"):
        leakage._model_of_logits(Payload(visits=1), 3)


def test_all_engines_give_the_same_numbers(tmp_path: Path) -> None:
    def event(engine: str) -> dict[str, Any]:
        (look,) = measured(tmp_path / engine, rounds=1, engine=engine)
        return {name: value for name, value in look.items() if not name.startswith("seconds")}

    serial = event("serial")

    assert event("pooled") == serial
    assert event("flower") == serial


def test_cost_grows_with_the_clients() -> None:
    examples = measures(["leakage"])["leakage"].examples

    assert examples(100, 10, 300) == 2 * 300 * 11
    assert examples(10_000, 10, 50_000) == 2 * 2000 * 11
