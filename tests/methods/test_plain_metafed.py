"""MetaFed against a plain implementation, and what it is at its edges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain import MORE, PLAN, Federation, Params, ce, check, drive, ready_for
from torch import Tensor, nn

import toys
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.keys import generator, seed_for
from fedstill.core.registry import register
from fedstill.core.trees import only, same_bits
from fedstill.methods.metafed import InRing, MetaFed, statistics
from fedstill.running.runner import resume, run
from run_bits import assert_same_bits, bits, stopped

RING = {"clients": 4}
HELD = {"validation": 0.25}


class Ring(Federation):
    """Its clients hold out the part that the library draws for it."""

    def halves(self, client: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        x, y = self.data(client)
        held = round(len(y) * HELD["validation"])
        order = torch.randperm(len(y), generator=generator(seed_for(7, 0, 0, client, "validation")))
        own, other = order[held:].sort().values, order[:held].sort().values
        return (x[own], y[own]), (x[other], y[other])

    def visit(
        self,
        start: Params,
        loss: Callable[..., Tensor],
        round: int,
        stage: int,
        client: int,
        epochs: int,
    ):
        model, ((x, y), _) = self.net(start), self.halves(client)
        sgd = torch.optim.SGD(
            model.parameters(),
            lr=self.lr(round),
            momentum=PLAN["momentum"],
            weight_decay=PLAN["weight_decay"],
        )
        order = generator(seed_for(7, round, stage, client, "order"))
        for _ in range(epochs):
            for index in torch.randperm(len(y), generator=order).split(PLAN["batch"]):
                sgd.zero_grad()
                loss(model, x[index], y[index]).backward()
                sgd.step()
        return {k: v.detach().clone() for k, v in model.state_dict().items()}

    def right(self, params: Params, client: int) -> float:
        _, (x, y) = self.halves(client)
        return float((self.net(params)(x).argmax(1) == y).double().mean())


@pytest.mark.parametrize(("above", "below"), [(0.5, 0.5), (0.0, 0.9), (1.1, 0.5)])
def test_two_rounds_are_those_of_a_ring_written_out(above: float, below: float) -> None:
    method = {"name": "metafed", "keeps_above": above, "listens_below": below, "strength": 0.7}
    plan = {
        **HELD,
        "warm_up": {"epochs": 1},
        "train": {"epochs": 2},
        "personalise": {"epochs": 1},
        "lr": 0.05,
    }
    ready = ready_for(method, topology=RING, plan=plan)
    fed = Ring(ready, sampled=4)
    fed.lr = lambda round: 0.05 * 0.9 ** (round - 1)  # type: ignore[method-assign]
    own = {c: fed.visit(fed.start, ce, 1, 0, c, 1) for c in range(4)}
    flag = {c: fed.right(own[c], c) > above for c in range(4)}
    before, seen = None, set()

    def act(client: int, round: int, stage: int, epochs: int, weight: float) -> None:
        seen.add((flag[client], before is not None))
        if before is None or not flag[client]:
            own[client] = fed.visit(before or own[client], ce, round, stage, client, epochs)
        else:
            teacher = fed.net(before)

            def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
                return (
                    ce(model, x, y)
                    + weight * ((model.body(x) - teacher.body(x).detach()) ** 2).mean()
                )

            own[client] = fed.visit(own[client], loss, round, stage, client, epochs)
        flag[client] = flag[client] or fed.right(own[client], client) > above

    for round in (1, 2):
        for link in range(4):
            act(link, round, link + (round == 1), 2, 0.7)
            before = own[link]
    for c in range(4):
        mine, theirs = fed.right(own[c], c), fed.right(before, c)
        silent = theirs <= mine and theirs < below
        act(c, 2, 4, 1, 0.0 if silent else 0.7 * 10 ** min(1, 5 * (theirs - mine)) / 10)
    states, memory = drive(ready)
    check(states[-1].params, before)
    for c in range(4):
        check(memory.load(c).params, own[c])
        assert memory.load(c).number("ready") == flag[c]
    assert (above > 1) == ((True, True) not in seen)


def test_where_no_client_keeps_its_model_it_is_fedseq_in_fixed_order_to_the_bit() -> None:
    plan = {**HELD, "warm_up": {"epochs": 0}, "personalise": {"epochs": 0}}
    ready = ready_for(
        {"name": "metafed", "keeps_above": 1.1}, topology={**RING, "first": ""}, plan=plan
    )
    other = ready_for(
        "fedseq", topology={"kind": "sequential", "order": "fixed", **RING}, plan=HELD
    )
    ours, theirs = (drive(r)[0][-1].params for r in (ready, other))
    assert same_bits(ours, theirs)


def test_where_all_do_and_lambda_is_0_clients_train_alone() -> None:
    """In data order: stages of a ring have other numbers."""
    alone = {"kind": "parallel", "clients": 4, "sampled": 4}
    plan = {**HELD, "shuffle": False, "lr_decay": 1.0}
    ends = {"warm_up": {"epochs": 2}, "personalise": {"epochs": 2}}
    ours = drive(
        ready_for(
            {"name": "metafed", "keeps_above": 0.0, "strength": 0.0},
            MORE,
            topology=RING,
            plan={**plan, **ends},
        )
    )[1]
    theirs = drive(
        ready_for({"name": "lg_fedavg", "layers": 0}, MORE, rounds=4, topology=alone, plan=plan)
    )[1]
    ready = [c for c in range(4) if ours.load(c).number("ready")]
    assert ready
    for c in ready:
        check(ours.load(c).params, theirs.load(c).params)


@pytest.mark.parametrize(
    ("own", "other", "times"),
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
    own: float, other: float, times: float
) -> None:
    assert InRing(MetaFed(), "personalise").strength_factor(own, other) == pytest.approx(times)


def test_normalisation_can_stay_each_clients_own() -> None:
    plan = {
        **HELD,
        "lr": 0.02,
        "train": {"epochs": 0},
        "warm_up": {"epochs": 1},
        "personalise": {"epochs": 0},
    }
    for shared in (True, False):
        method = {"name": "metafed", "keeps_above": 1.1, "share_norms": shared}
        ready = ready_for(method, rounds=1, topology=RING, model="toy_batchnorm", plan=plan)
        memory = drive(ready)[1]
        names = statistics(ready.world.model(0))
        assert len(names) == 5
        one, other = (memory.load(c).params for c in (0, 3))
        assert same_bits(only(one, names), only(other, names)) == shared
        assert torch.equal(one["head.weight"], other["head.weight"])


@register("model", "toy_batch_statistics")
class OfBatches(toys.BatchNormed):
    """Batch normalisation without running statistics, whose entries can stay untrained."""

    def __init__(self, input_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.body[1] = nn.BatchNorm2d(4, track_running_stats=False)


def test_normalisation_that_is_not_trained_is_nobodys_own(tmp_path: Path) -> None:
    run(toys.toy(model="toy_batch_statistics", rounds=1), tmp_path / "start", toys.blobs())
    experiment = toys.toy(
        {"name": "metafed", "keeps_above": 1.1, "share_norms": False},
        model="toy_batch_statistics",
        topology=RING,
        rounds=1,
        start_from=str(tmp_path / "start"),
        train_only=("head.",),
    )
    assert len(run(experiment, tmp_path / "run", toys.blobs()).history) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"topology": {"kind": "parallel", "clients": 4}}, r"topology\.kind"),
        ({"plan": {"validation": 0.0}}, r"plan\.warm_up\.validation = 0\.2"),
    ],
)
def test_what_it_cannot_do_without_is_said(changes: dict[str, object], says: str) -> None:
    with pytest.raises(IncompatibleMethod, match=says):
        run(toys.toy("metafed", **changes), None, toys.blobs())


def test_it_resumes_in_mid_ring(tmp_path: Path) -> None:
    toy = toys.toy("metafed", rounds=2, topology=RING, plan={"epochs": 1, "batch": 20, "lr": 0.1})
    run(toy, tmp_path / "whole", data=toys.blobs())
    parts = stopped(toy, tmp_path / "parts", stages=3)
    resume(parts, data=toys.blobs())
    assert_same_bits(bits(parts), bits(tmp_path / "whole"))
