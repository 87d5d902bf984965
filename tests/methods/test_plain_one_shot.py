"""The one-shot family against plain re-derivations: early stopping, naive KD, QKT's two phases, its
light form.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from plain import Federation, check, drive, minus, norm, ready_for
from torch import Tensor, nn

import toys
from double import NEAR
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import State
from fedstill.methods.fit import queries_of
from fedstill.methods.qkt import QKT, REFINE, PartlyRefined
from fedstill.methods.qkt_light import QKTLight
from fedstill.models import contract
from fedstill.running.preparation import Prepared

PLAN = {"epochs": 3, "batch": 10, "lr": 0.02, "weight_decay": 4e-3, "patience": 2}
QUERY = {"draw": "multi", "fewer_than": 8, "least": 1}
THRESHOLD = 0.08
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def ready(method: object, **changes: object) -> Prepared:
    given = {
        "rounds": 1,
        "topology": {"clients": 6},
        "query": QUERY,
        "plan": {**PLAN, "fit": {"epochs": 6, "validation": 0.2}},
        "partition": {"kind": "dirichlet", "alpha": 0.3, "min_size": 8},
    }
    return ready_for(method, **{**given, **changes})


class Plain:
    """The family with torch.optim.Adam, deep copies and no engine; ``mean``: over teachers, else
    their sum.
    """

    def __init__(self, prepared: Prepared, mean: bool = False) -> None:
        self.fed, self.ready, self.mean = Federation(prepared), prepared, mean
        self.queries = queries_of(prepared.world)
        self.local = {c: self.fit(c) for c in range(6)}

    def train(
        self,
        net: nn.Module,
        client: int,
        stage: int,
        loss: Loss,
        epochs: int,
        rows: Tensor,
        only: str = "",
    ):
        """Epochs of Adam; yields after each."""
        x, y = (v[rows] for v in self.fed.data(client))
        leaves = [p for k, p in net.named_parameters() if k.startswith(only)]
        adam = torch.optim.Adam(
            leaves, lr=PLAN["lr"], weight_decay=PLAN["weight_decay"], foreach=False
        )
        draw = generator(seed_for(7, 1, stage, client, "order"))
        for _ in range(epochs):
            for index in torch.randperm(len(y), generator=draw).split(PLAN["batch"]):
                adam.zero_grad()
                loss(net(x[index]), x[index], y[index]).backward()
                adam.step()
            yield net

    def fit(self, client: int) -> nn.Module:
        n = len(self.fed.data(client)[1])
        order = torch.randperm(n, generator=generator(seed_for(7, 0, 0, client, "validation")))
        held, rows = (
            order[: max(1, round(0.2 * n))].sort().values,
            order[max(1, round(0.2 * n)) :].sort().values,
        )
        x, y = (v[held] for v in self.fed.data(client))
        best, kept, stale = -1.0, None, 0
        for net in self.train(
            self.fed.net(self.fed.start), client, 0, lambda z, x, y: ce(z, y), 6, rows
        ):
            score = (net(x).argmax(1) == y).double().mean().item()
            if score > best:
                best, kept, stale = score, copy.deepcopy(net), 0
            else:
                stale += 1
            if stale == 2:
                break
        return kept

    def all_of(self, client: int) -> Tensor:
        return torch.arange(len(self.fed.data(client)[1]))

    def last(
        self, net: nn.Module, client: int, stage: int, loss: Loss, only: str = ""
    ) -> nn.Module:
        return list(
            self.train(copy.deepcopy(net), client, stage, loss, 3, self.all_of(client), only)
        )[-1]

    def naive(self, client: int) -> Loss:
        def loss(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
            total, peers = ce(z, y), self.peers(client).values()
            for t in peers:
                p = t(x).detach().softmax(1)
                total = (
                    total + self.each(len(peers)) * (p * (p.log() - z.log_softmax(1))).sum(1).mean()
                )
            return total

        return loss

    def each(self, teachers: int) -> float:
        """What one of so many teachers weighs."""
        return 0.7 / teachers if self.mean else 0.7

    def peers(self, client: int) -> dict[int, nn.Module]:
        return {c: m for c, m in self.local.items() if c != client}

    def chosen(self, client: int) -> list[int]:
        noise = torch.randn(
            20, 1, toys.SIDE, toys.SIDE, generator=generator(seed_for(7, 0, 0, -1, "probe"))
        ).double()
        seen = {c: t(noise).softmax(1).mean(0).tolist() for c, t in self.peers(client).items()}
        return [c for c, p in seen.items() if max(p[q] for q in self.queries[client]) >= THRESHOLD]

    def masked(self, client: int) -> Loss:
        own, chosen = set(self.fed.data(client)[1].tolist()), self.chosen(client)
        mask = torch.tensor(
            [1.5 if c in self.queries[client] else float(c in own) for c in range(toys.CLASSES)]
        )

        def loss(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
            total = ce(z, y)
            for c in chosen:
                p = self.local[c](x).detach().softmax(1)
                total = (
                    total
                    + self.each(len(chosen))
                    * (mask * p * (p.log() - z.log_softmax(1))).sum(1).mean()
                )
            return total

        return loss

    def refined(self, net: nn.Module, client: int, stage: int, head: nn.Module) -> nn.Module:
        start = copy.deepcopy(net)
        start.head.load_state_dict(head.head.state_dict())
        return self.last(start, client, stage, self.masked(client), "head")


def ce(z: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(z, y)


def ends(prepared: Prepared) -> tuple[State, dict[int, dict[str, Tensor]]]:
    state = drive(prepared)[0][-1]
    return state, state.extra.many("student")


def test_fitting_stops_early_and_keeps_the_best_epoch() -> None:
    prepared = ready("local_only")
    plain = Plain(prepared)
    models = drive(prepared)[0][-1].extra.many("model")
    for c in range(6):
        check(models[c], plain.local[c].state_dict())


SUM_AND_MEAN = pytest.mark.parametrize("over", ["sum", "mean"])


@SUM_AND_MEAN
def test_naive_kd_distils_all_peers(over: str) -> None:
    prepared = ready({"name": "naive_kd", "alpha": 0.7, "over_teachers": over})
    plain, (_, students) = Plain(prepared, over == "mean"), ends(prepared)
    assert set(students) == set(queries_of(prepared.world))
    for c, params in students.items():
        check(params, plain.last(plain.local[c], c, 1, plain.naive(c)).state_dict())


@SUM_AND_MEAN
def test_qkt_filters_masks_replaces_the_head_and_refines_it(over: str) -> None:
    prepared = ready({"name": "qkt", "alpha": 0.7, "threshold": THRESHOLD, "over_teachers": over})
    plain, (_, students) = Plain(prepared, over == "mean"), ends(prepared)
    counts = [len(plain.chosen(c)) for c in students]
    assert min(counts) < 5, "the filter leaves some out"
    assert max(counts) > 0, "and not all"
    for c, params in students.items():
        phase1 = plain.last(plain.local[c], c, 1, plain.masked(c))
        expected = plain.refined(phase1, c, 2, plain.local[c]).state_dict()
        check(params, expected)
        way = norm(
            minus({k: v for k, v in expected.items() if "head" in k}, plain.local[c].state_dict())
        )
        assert way > 0.01


@SUM_AND_MEAN
@pytest.mark.parametrize("first", ["sum", "mean", "same"])
def test_qkt_light_is_naive_kd_and_then_the_heads_refinement(over: str, first: str) -> None:
    fields = {
        "name": "qkt_light",
        "alpha": 0.7,
        "threshold": THRESHOLD,
        "over_teachers": over,
        "phase1_over": first,
    }
    prepared = ready(fields)
    plain, phase1 = (
        Plain(prepared, which == "mean") for which in (over, over if first == "same" else first)
    )
    for c, params in ends(prepared)[1].items():
        transferred = phase1.last(phase1.local[c], c, 1, phase1.naive(c))
        check(params, plain.refined(transferred, c, 2, plain.local[c]).state_dict())


@pytest.mark.parametrize("name", ["naive_kd", "qkt", "qkt_light"])
def test_by_default_both_equations_are_sums(name: str) -> None:
    printed = {"naive_kd": {}, "qkt": {}, "qkt_light": {"phase1_over": "sum"}}[name]
    by_default = ends(ready({"name": name}))[1]
    sums = ends(ready({"name": name, "over_teachers": "sum", **printed}))[1]
    for c, params in by_default.items():
        check(params, sums[c])


@pytest.mark.parametrize("name", ["qkt", "qkt_light"])
def test_a_client_keeps_its_peers_and_is_sent_them_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload_of, payloads = QKT.payload_for_client, []

    def noted(self, state, client, stage, world):
        payload = payload_of(self, state, client, stage, world)
        if stage.name == REFINE and payload is not None:
            payloads.append(payload)
        return payload

    monkeypatch.setattr(QKT, "payload_for_client", noted)
    prepared = ready({"name": name, "threshold": THRESHOLD})
    states, memory = drive(prepared)
    once = states[-1].extra.many("student")
    assert len(once) == len(payloads) > 0
    assert all(set(payload) == {"params"} for payload in payloads)
    assert not any(memory.load(client) for client in range(6))

    payloads.clear()
    for cls in (QKT, QKTLight):
        monkeypatch.setattr(cls, "keeps_peers", False)
    twice = ends(ready({"name": name, "threshold": THRESHOLD}))[1]
    assert all(payload.many("peer") for payload in payloads)
    for c in once:
        assert all(torch.equal(once[c][k], twice[c][k]) for k in once[c])


@SUM_AND_MEAN
def test_a_volunteer_does_phase_one_for_all_and_its_head_is_refined(over: str) -> None:
    own = {"name": "qkt_light_volunteer", "alpha": 0.7, "threshold": THRESHOLD}
    prepared = ready({**own, "over_teachers": over, "phase1_over": "same"})
    plain, (_, students) = Plain(prepared, over == "mean"), ends(prepared)
    sizes = [len(part) for part in prepared.sites.split.tensors()]
    volunteer = max(range(6), key=lambda c: sizes[c])
    shared = plain.last(plain.local[volunteer], volunteer, 1, plain.naive(volunteer))
    for c, params in students.items():
        check(params, plain.refined(shared, c, 2, shared).state_dict())


@SUM_AND_MEAN
def test_a_server_does_phase_one_without_labels(over: str) -> None:
    method = {"name": "qkt_light_server", "threshold": THRESHOLD, "alpha": 0.7}
    prepared = ready({**method, "over_teachers": over, "phase1_over": "same"}, data={"public": 40})
    plain, (_, students) = Plain(prepared, over == "mean"), ends(prepared)
    sizes = [len(part) for part in prepared.sites.split.tensors()]
    net = copy.deepcopy(plain.local[max(range(6), key=lambda c: sizes[c])])
    x = plain.fed.inputs(prepared.sites.public.values)
    adam = torch.optim.Adam(
        net.parameters(), lr=PLAN["lr"], weight_decay=PLAN["weight_decay"], foreach=False
    )
    draw = generator(seed_for(7, 1, 1, -1, "order"))
    for _ in range(3):
        for index in torch.randperm(40, generator=draw).split(10):
            adam.zero_grad()
            q = net(x[index]).log_softmax(1)
            each = [t(x[index]).detach().softmax(1) for t in plain.local.values()]
            distances = sum((p * (p.log() - q)).sum(1).mean() for p in each)
            (distances / len(each) if over == "mean" else distances).backward()
            adam.step()
    for c, params in students.items():
        check(params, plain.refined(net, c, 2, net).state_dict())


def test_without_a_server_stage_phase_one_at_the_server_is_refused_before_the_run() -> None:
    method = {"name": "qkt_light_server", "threshold": THRESHOLD}
    with pytest.raises(IncompatibleMethod, match=r"topology\.server"):
        ready(method, data={"public": 40}, topology={"clients": 6, "server": ""})


def test_one_mean_and_the_ensemble_are_those_of_the_local_models() -> None:
    prepared = ready("fedavg_once")
    plain = Plain(prepared)
    total = [round(len(p) - max(1, round(0.2 * len(p)))) for p in prepared.sites.split.tensors()]
    expected = {
        k: sum(n * plain.local[c].state_dict()[k] for c, n in enumerate(total)) / sum(total)
        for k in plain.fed.start
    }
    check(drive(prepared)[0][-1].params, expected)
    state = drive(ready("ensemble"))[0][-1]
    predictor = prepared_predictor(ready("ensemble"), state)
    x = plain.fed.data(0)[0]
    with torch.no_grad():
        mean = sum(m(x).softmax(1) for m in plain.local.values()) / 6
    torch.testing.assert_close(predictor(x).exp(), mean, rtol=0, atol=NEAR)


def prepared_predictor(prepared: Prepared, state: State) -> Callable[[Tensor], Tensor]:
    return prepared.settings.method.predictors(state, prepared.world)["ensemble"]


@pytest.mark.parametrize("name", ["naive_kd", "qkt", "qkt_light"])
def test_of_one_teacher_the_sum_is_the_mean_to_the_bit(name: str) -> None:
    of_two = {"name": name, "participants": 2}
    one, other = (ends(ready({**of_two, "over_teachers": over}))[1] for over in ("sum", "mean"))
    more = ends(ready({"name": name, "participants": 4, "over_teachers": "mean"}))[1]
    for c in one:
        assert all(torch.equal(one[c][k], other[c][k]) for k in one[c])
    assert any(not torch.equal(one[c][k], more[c][k]) for c in one for k in one[c])


@pytest.mark.parametrize("importance", ["rms", "mean", "objective"])
def test_the_most_important_entries_of_the_head_are_frozen_to_the_bit(
    importance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under Adam with weight decay; and they are the ones with the largest gradients of the
    client's own data.
    """
    given = {
        "name": "qkt",
        "frozen": 0.3,
        "importance": importance,
        "alpha": 0.7,
        "threshold": THRESHOLD,
    }
    prepared, told, report = ready(given), {}, PartlyRefined.report

    def noted(self, params, start, view, world):
        told[view.client] = report(self, params, start, view, world)
        return told[view.client]

    monkeypatch.setattr(PartlyRefined, "report", noted)
    state, students = ends(prepared)
    fed, plain = Federation(prepared), Plain(prepared)
    for c, params in students.items():
        start = {**params, **{k: v for k, v in state.extra.many("model")[c].items() if "head" in k}}
        net, (x, y) = fed.net(start).eval(), fed.data(c)
        grads = []
        for index in torch.randperm(len(y), generator=generator(0)).split(10):
            net.zero_grad()
            z = net(x[index])
            (
                plain.masked(c)(z, x[index], y[index])
                if importance == "objective"
                else ce(z, y[index])
            ).backward()
            grads.append(torch.cat([net.head.weight.grad.flatten(), net.head.bias.grad]))
        g = torch.stack(grads)
        scores = g.abs().mean(0) if importance == "mean" else g.square().mean(0).sqrt()
        old = torch.cat([start["head.weight"].flatten(), start["head.bias"]])
        new = torch.cat([params["head.weight"].flatten(), params["head.bias"]])
        kept = old == new
        assert int(kept.sum()) == round(0.3 * len(old))
        assert float(scores[kept].min()) >= float(scores[~kept].max())
        rows = kept[: params["head.weight"].numel()].reshape(params["head.weight"].shape)
        assert told[c]["frozen_rows"] == [sum(row) / len(row) for row in rows.tolist()]
        assert told[c]["query"] == list(queries_of(prepared.world)[c])


def test_phase_two_moves_the_head_alone_and_leaves_running_statistics() -> None:
    prepared = ready("qkt", model="toy_batchnorm", plan={**PLAN, "refine": {"epochs": 1}})
    one, two = (
        ends(ready({"name": "qkt", "phases": 1}, model="toy_batchnorm", plan=PLAN))[1],
        ends(prepared)[1],
    )
    assert "body.1.running_mean" in one[next(iter(one))]
    for c in one:
        assert all(torch.equal(one[c][k], two[c][k]) for k in one[c] if not k.startswith("head."))
        assert not torch.equal(one[c]["head.weight"], two[c]["head.weight"])


def test_teachers_may_be_of_other_architectures() -> None:
    prepared = ready("qkt", clients={"models": ("mlp", "logistic")})
    _, students = ends(prepared)
    specs = {prepared.world.model(c).name for c in range(6)}
    assert specs == {"mlp", "logistic"}
    assert {frozenset(p) for p in students.values()} == {
        frozenset(contract.initial(prepared.world.model(c), 0)) for c in students
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            {
                "name": "qkt",
                "teachers": "all",
                "classes": "all",
                "phases": 1,
                "over_teachers": "mean",
            },
            {"name": "naive_kd", "over_teachers": "mean"},
        ),
        ({"name": "qkt", "teachers": "all", "classes": "all", "phases": 1}, "naive_kd"),
        ({"name": "qkt", "threshold": 0.0}, {"name": "qkt", "teachers": "all"}),
        (
            {"name": "qkt", "head": "phase1", "alpha": 0.0},
            {"name": "qkt", "head": "phase1", "threshold": 1.0},
        ),
        (
            {"name": "qkt_light", "classes": "all", "teachers": "all", "phase1_over": "same"},
            {"name": "qkt", "classes": "all", "teachers": "all"},
        ),
    ],
    ids=str,
)
def test_at_its_edge_it_is_another(one: object, other: object) -> None:
    a, b = (ends(ready(m))[1] for m in (one, other))
    assert set(a) == set(b)
    for c in a:
        check(a[c], b[c])


def test_the_volunteer_is_the_student_with_most_examples() -> None:
    prepared = ready(
        "qkt_light_volunteer", topology={"clients": 6, "students": (1, 4)}, query={"draw": "single"}
    )
    sizes = [len(part) for part in prepared.sites.split.tensors()]
    others = [c for c in range(6) if c not in (1, 4)]
    assert max(sizes[c] for c in others) > max(sizes[1], sizes[4]), (
        "a client that is no student has more"
    )
    _, students = ends(prepared)
    assert set(students) == {1, 4}
