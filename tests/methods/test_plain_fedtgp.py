"""FedTGP against a plain implementation, and what its server's stage is bound to."""

from __future__ import annotations

import pytest
import torch
from plain import Federation, Params, ce, check, drive, ready_for
from torch import Tensor, nn

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Payload, Plan, Reply, Stage
from fedstill.core.registry import lookup
from fedstill.core.trees import same_bits
from fedstill.engines.clients import TrainingSetup
from fedstill.engines.loop import train
from fedstill.methods.fedtgp import TrainPrototypes, all_prototypes, table_of
from fedstill.models import contract
from fedstill.running.preparation import prepare

CLASSES, WIDTH = toys.CLASSES, 8
SERVERS = {
    "epochs": 4,
    "batch": 3,
    "lr": 0.05,
    "lr_decay": 1.0,
    "momentum": 0.0,
    "weight_decay": 0.0,
}


class Table(nn.Module):
    """A prototype for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = (
            nn.Linear(CLASSES, WIDTH).double(),
            nn.Linear(WIDTH, WIDTH).double(),
        )
        start = contract.initial(
            table_of(torch.zeros(CLASSES, WIDTH)), seed_for(7, 0, 0, SERVER, "prototypes")
        )
        self.load_state_dict(
            {
                **{f"embedding.{k}": start[f"body.1.{k}"] for k in ("weight", "bias")},
                **{f"out.{k}": start[f"head.{k}"] for k in ("weight", "bias")},
            }
        )

    def forward(self) -> Tensor:
        return self.out(self.embedding(torch.eye(CLASSES, dtype=torch.float64)).relu())


def fit(table: Table, said: dict[int, dict[int, Tensor]], round: int, largest: float) -> None:
    """The server's training, pair by pair."""
    means = {c: [m[c] for m in said.values() if c in m] for c in range(CLASSES)}
    plain = {c: sum(v) / len(v) for c, v in means.items() if v}
    gaps = [min(float((plain[a] - plain[b]).norm()) for b in plain if b != a) for a in plain]
    margin = min(max(gaps), largest)
    pairs = [(said[k][c], c) for k in sorted(said) for c in sorted(said[k])]
    sgd = torch.optim.SGD(table.parameters(), lr=SERVERS["lr"], foreach=False)
    order = generator(seed_for(7, round, 1, SERVER, "order"))
    for _ in range(SERVERS["epochs"]):
        for index in torch.randperm(len(pairs), generator=order).split(SERVERS["batch"]):
            sgd.zero_grad()
            prototypes, losses = table(), []
            for i in index.tolist():
                u, c = pairs[i]
                far = torch.stack(
                    [(u - p).norm() + margin * (j == c) for j, p in enumerate(prototypes)]
                )
                losses.append(-(-far).log_softmax(0)[c])
            torch.stack(losses).mean().backward()
            sgd.step()


@pytest.mark.parametrize("largest", [100.0, 0.1])
def test_fedtgp(largest: float) -> None:
    method = {"name": "fedtgp", "strength": 0.5, "largest_margin": largest}
    ready = ready_for(method, rounds=3, plan={"prototypes": SERVERS})
    fed, table = Federation(ready), Table()
    own, seen, prototypes = (
        dict.fromkeys(range(6), fed.start),
        set[int](),
        torch.zeros(CLASSES, WIDTH),
    )
    for round in (1, 2, 3):
        said = {}
        for k in fed.cohort(round):

            def loss(
                m: nn.Module,
                x: Tensor,
                y: Tensor,
                p: Tensor = prototypes,
                known: frozenset[int] = frozenset(seen),
            ) -> Tensor:
                pairs = [(a, c) for a, c in zip(x.split(1), y.tolist(), strict=True) if c in known]
                return ce(m, x, y) + 0.5 * sum(
                    ((m.body(a) - p[c]) ** 2).mean() for a, c in pairs
                ) / len(y)

            own[k] = fed.fit(own[k], loss, round, k).params
            x, y = fed.data(k)
            h = fed.net(own[k]).body(x).detach()
            said[k] = {c: h[y == c].mean(0) for c in range(CLASSES) if bool((y == c).any())}
        seen |= {c for m in said.values() for c in m}
        fit(table, said, round, largest)
        prototypes = table().detach()
    states, memory = drive(ready)
    state = states[-1].extra
    torch.testing.assert_close(state.tensor("values"), prototypes, rtol=1e-9, atol=1e-9)
    assert {c for c in range(CLASSES) if state.tensor("seen")[c] > 0} == seen
    assert set(state) == {"values", "seen", "table"}
    for k in range(6):
        if memory.load(k):
            check(memory.load(k).params, own[k])


def test_without_weight_clients_train_alone_to_the_bit() -> None:
    same = {"rounds": 3, "topology": {"clients": 6}, "plan": {"epochs": 1}}
    zero = drive(
        ready_for({"name": "fedtgp", "strength": 0.0}, **{**same, "topology": {"clients": 6}})
    )[1]
    alone = drive(ready_for({"name": "lg_fedavg", "layers": 0}, **same))[1]
    assert all(same_bits(zero.load(k).params, alone.load(k).params) for k in range(6))


def test_a_server_of_no_epochs_leaves_the_prototypes_as_they_were_drawn() -> None:
    states, _ = drive(ready_for("fedtgp", plan={"prototypes": {"epochs": 0}}))
    assert same_bits(states[0].extra.tensors("table"), states[-1].extra.tensors("table"))
    torch.testing.assert_close(states[-1].extra.tensor("values"), Table()().detach())


def one_pair_a_class() -> tuple[Payload, Params]:
    draw = torch.Generator().manual_seed(0)
    table = contract.initial(table_of(torch.zeros(CLASSES, WIDTH)), 0)
    means = torch.randn(CLASSES, WIDTH, generator=draw)
    counts = torch.tensor([1, 2, 0, 3, 1])
    return Payload({"means.0": means, "counts.0": counts, "table": table, "margin": 0.0}), table


def test_without_a_margin_and_with_one_pair_a_class_the_loss_falls_in_every_epoch() -> None:
    ready = ready_for("fedtgp")
    down, table = one_pair_a_class()
    stage = Stage(1, 1, "prototypes", (SERVER,), "public")
    view = ready.sites.view(SERVER, stage)
    start = TrainPrototypes().begin(down, Payload(), view, ready.world)
    assert start.examples.labels.tolist() == [0, 1, 3, 4], "a class without examples never enters"
    losses = []
    for epochs in range(1, 6):
        plan = Plan(epochs=epochs, batch=10, lr=0.01)
        setup = TrainingSetup(plan=plan, stage=stage, inputs=ready.sites.inputs, seed=7)
        losses.append(train(TrainPrototypes(), start, view, setup).losses["apart"])
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]
    distances = torch.cdist(
        start.examples.values.double(), all_prototypes(start["spec"], table).double()
    )
    first = nn.functional.cross_entropy(-distances, start.examples.labels)
    assert losses[0] == pytest.approx(float(first), rel=1e-5)


def test_the_margin_is_the_widest_gap_to_the_next_class_up_to_its_bound() -> None:
    ready = ready_for("fedtgp")
    method, stage = lookup("method", "fedtgp").build(), Stage(1, 0, "train", (0, 1))
    means = torch.zeros(CLASSES, WIDTH, dtype=torch.float64)
    means[:3, 0] = torch.tensor([0.0, 3.0, 10.0])
    state, counts = method.initial_state(ready.world), torch.tensor([1, 1, 1, 0, 0])
    sent = method.aggregate(
        state, [Reply(0, Payload(means=means, counts=counts), 3)], stage, ready.world
    )
    assert method.margin(sent) == pytest.approx(7.0)
    assert lookup("method", "fedtgp").build(largest_margin=5.0).margin(sent) == 5.0
    single = [Reply(0, Payload(means=means, counts=torch.tensor([1, 0, 0, 0, 0])), 3)]
    assert method.margin(method.aggregate(state, single, stage, ready.world)) == 0.0


def test_without_its_servers_stage_it_is_refused() -> None:
    with pytest.raises(IncompatibleMethod, match=r"set topology\.server = 'prototypes'"):
        prepare(resolve(toys.toy("fedtgp", topology={"clients": 6, "server": ""})), toys.blobs())
