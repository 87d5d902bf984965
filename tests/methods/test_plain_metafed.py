"""MetaFed against a plain implementation, and what it is at its edges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plain import (
    MANY_EXAMPLES,
    PLAN,
    Examples,
    Federation,
    Loss,
    Params,
    Split,
    assert_same_model,
    ce,
    drive,
    ready_for,
    run_of,
    split_for_validation,
)
from torch import Tensor, nn

import toys
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.registry import register
from fedstill.core.trees import only, same_bits
from fedstill.methods.metafed import InRing, MetaFed, statistics
from fedstill.running.runner import resume, run
from run_bits import assert_same_bits, bits, stopped

RING = {"clients": 4}
HELD_OUT = {"validation": 0.25}
STRENGTH = 0.7


class HoldingOut(Federation):
    """Its clients hold out a quarter of their examples."""

    def split(self, client: int) -> Split:
        """Which examples a client holds out."""
        size = len(super().data(client).labels)
        return split_for_validation(size, round(size * HELD_OUT["validation"]), client)

    def data(self, client: int) -> Examples:
        """The examples that a client trains on."""
        return super().data(client).take(self.split(client).training)

    def accuracy(self, params: Params, client: int) -> float:
        """The accuracy of a model on a client's held-out examples."""
        held_out = super().data(client).take(self.split(client).validation)
        answers = self.net(params)(held_out.inputs).argmax(1)
        return float((answers == held_out.labels).double().mean())


def near_features(teacher: nn.Module, weight: float) -> Loss:
    """Cross-entropy, and the distance of the features from the teacher's."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        gap = model.body(x) - teacher.body(x).detach()
        return ce(model, x, y) + weight * (gap**2).mean()

    return loss


class Ring:
    """Clients that hand their models on, and keep a model that is accurate enough."""

    def __init__(self, fed: HoldingOut, keeps_above: float) -> None:
        self.fed = fed
        self.keeps_above = keeps_above
        self.models = dict.fromkeys(range(4), fed.start)
        self.is_ready = dict.fromkeys(range(4), False)
        """Whether a client keeps its model, and learns from its predecessor's."""
        self.handed_over: Params | None = None
        self.learned_from_a_predecessor = False

    def visit(
        self, client: int, round_index: int, stage: int, epochs: int, weight: float = STRENGTH
    ) -> None:
        """One stage of a client."""
        start = self.models[client]
        loss: Loss = ce
        if self.handed_over is not None:
            if self.is_ready[client]:
                loss = near_features(self.fed.net(self.handed_over), weight)
                self.learned_from_a_predecessor = True
            else:
                start = self.handed_over

        fed = self.fed.with_plan(epochs=epochs)
        self.models[client] = fed.fit(start, loss, round_index, client, stage=stage).params
        if self.fed.accuracy(self.models[client], client) > self.keeps_above:
            self.is_ready[client] = True

    def personalise(self, client: int, listens_below: float) -> None:
        """The last stage: a client listens to the ring's model as far as that is better."""
        own_accuracy = self.fed.accuracy(self.models[client], client)
        ring_accuracy = self.fed.accuracy(self.handed_over, client)
        weight = STRENGTH * 10 ** min(1, 5 * (ring_accuracy - own_accuracy)) / 10
        if ring_accuracy <= own_accuracy and ring_accuracy < listens_below:
            weight = 0.0
        self.visit(client, round_index=2, stage=4, epochs=1, weight=weight)


@pytest.mark.parametrize(("keeps_above", "listens_below"), [(0.5, 0.5), (0.0, 0.9), (1.1, 0.5)])
def test_two_rounds_are_those_of_a_ring_written_out(
    keeps_above: float, listens_below: float
) -> None:
    method = {
        "name": "metafed",
        "keeps_above": keeps_above,
        "listens_below": listens_below,
        "strength": STRENGTH,
    }
    plan = {
        **HELD_OUT,
        "warm_up": {"epochs": 1},
        "train": {"epochs": 2},
        "personalise": {"epochs": 1},
        "lr": 0.05,
    }
    ready = ready_for(method, topology=RING, plan=plan)
    ring = Ring(HoldingOut(ready, sampled=4, plan={**PLAN, "lr": 0.05}), keeps_above)

    for client in range(4):
        ring.visit(client, round_index=1, stage=0, epochs=1)
    for round_index, first_stage in ((1, 1), (2, 0)):  # the warm-up is a stage of round 1
        for client in range(4):
            ring.visit(client, round_index, first_stage + client, epochs=2)
            ring.handed_over = ring.models[client]
    for client in range(4):
        ring.personalise(client, listens_below)

    ours = drive(ready)

    assert_same_model(ours.params, ring.handed_over)
    for client in range(4):
        assert_same_model(ours.personal_model(client), ring.models[client])
        assert ours.remembered(client).number("ready") == ring.is_ready[client]
    assert ring.learned_from_a_predecessor == (keeps_above < 1)


def test_where_no_client_keeps_its_model_it_is_fedseq_in_fixed_order_to_the_bit() -> None:
    metafed = run_of(
        {"name": "metafed", "keeps_above": 1.1},
        topology={**RING, "first": ""},
        plan={**HELD_OUT, "warm_up": {"epochs": 0}, "personalise": {"epochs": 0}},
    )
    fedseq = run_of(
        "fedseq", topology={"kind": "sequential", "order": "fixed", **RING}, plan=HELD_OUT
    )

    assert same_bits(metafed.params, fedseq.params)


def test_where_all_clients_keep_their_models_and_lambda_is_0_they_train_alone() -> None:
    """In data order: stages of a ring have other numbers."""
    plan = {**HELD_OUT, "shuffle": False, "lr_decay": 1.0}
    metafed = run_of(
        {"name": "metafed", "keeps_above": 0.0, "strength": 0.0},
        examples=MANY_EXAMPLES,
        topology=RING,
        plan={**plan, "warm_up": {"epochs": 2}, "personalise": {"epochs": 2}},
    )
    alone = run_of(
        {"name": "lg_fedavg", "layers": 0},
        examples=MANY_EXAMPLES,
        rounds=4,
        topology={"kind": "parallel", "clients": 4, "sampled": 4},
        plan=plan,
    )

    ready_clients = [c for c in range(4) if metafed.remembered(c).number("ready")]
    assert ready_clients
    for client in ready_clients:
        assert_same_model(metafed.personal_model(client), alone.personal_model(client))


@pytest.mark.parametrize(
    ("own_accuracy", "ring_accuracy", "factor"),
    [
        (0.5, 0.7, 1.0),
        (0.6, 0.6, 0.1),
        (0.5, 0.9, 1.0),
        (0.9, 0.6, 10**-2.5),
        (0.5, 0.4, 0.0),
        (0.4, 0.45, 10**-0.75),
    ],
)
def test_how_much_a_client_listens_in_the_last_stage(
    own_accuracy: float, ring_accuracy: float, factor: float
) -> None:
    work = InRing(MetaFed(), "personalise")

    assert work.strength_factor(own_accuracy, ring_accuracy) == pytest.approx(factor)


def test_normalisation_can_stay_each_clients_own() -> None:
    """The other entries are the same for all clients."""
    plan = {
        **HELD_OUT,
        "lr": 0.02,
        "train": {"epochs": 0},
        "warm_up": {"epochs": 1},
        "personalise": {"epochs": 0},
    }
    for shared in (True, False):
        method = {"name": "metafed", "keeps_above": 1.1, "share_norms": shared}
        ready = ready_for(method, rounds=1, topology=RING, model="toy_batchnorm", plan=plan)
        names = statistics(ready.world.model(0))
        assert len(names) == 5

        ours = drive(ready)

        first = ours.personal_model(0)
        last = ours.personal_model(3)
        assert same_bits(only(first, names), only(last, names)) == shared
        assert torch.equal(first["head.weight"], last["head.weight"])


@register("model", "toy_batch_statistics")
class OfBatches(toys.BatchNormed):
    """Batch normalisation without running statistics, whose entries can stay untrained."""

    def __init__(self, input_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.body[1] = nn.BatchNorm2d(4, track_running_stats=False)


def test_untrained_normalisation_is_not_personalised(tmp_path: Path) -> None:
    run(toys.toy(model="toy_batch_statistics", rounds=1), tmp_path / "start", toys.blobs())
    experiment = toys.toy(
        {"name": "metafed", "keeps_above": 1.1, "share_norms": False},
        model="toy_batch_statistics",
        topology=RING,
        rounds=1,
        start_from=str(tmp_path / "start"),
        train_only=("head.",),
    )

    result = run(experiment, tmp_path / "run", toys.blobs())

    assert len(result.history) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": {"kind": "parallel", "clients": 4}}, r"topology\.kind"),
        ({"plan": {"validation": 0.0}}, r"plan\.warm_up\.validation = 0\.2"),
    ],
)
def test_missing_requirements_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(IncompatibleMethod, match=message):
        run(toys.toy("metafed", **changes), None, toys.blobs())


def test_it_resumes_in_mid_ring(tmp_path: Path) -> None:
    """A run that was stopped between two clients has the bits of an uninterrupted one."""
    toy = toys.toy("metafed", rounds=2, topology=RING, plan={"epochs": 1, "batch": 20, "lr": 0.1})
    run(toy, tmp_path / "uninterrupted", data=toys.blobs())

    folder = stopped(toy, tmp_path / "stopped", stages=3)
    resume(folder, data=toys.blobs())

    assert_same_bits(bits(folder), bits(tmp_path / "uninterrupted"))
