"""The methods whose clients or server keep models, against a plain implementation of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plain import (
    MORE,
    PLAN,
    Federation,
    Params,
    average,
    ce,
    check,
    check_matters,
    drive,
    experiment,
    ready_for,
)
from torch import Tensor, nn

import toys
from double import in_double
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Examples
from fedstill.data.partition import public_split
from fedstill.running.preparation import prepare

SAMPLES, LAMBDA = 15, 0.4


def fisher(fed: Federation, params: Params, client: int) -> Params:
    """Mean over batches of the squared gradient of the batch's mean, until more than SAMPLES
    examples were seen.
    """
    model, (x, y) = fed.net(params), fed.data(client)
    total, batches, seen = {k: torch.zeros_like(v) for k, v in params.items()}, 0, 0
    for index in torch.randperm(len(y), generator=generator(0)).split(PLAN["batch"]):
        model.zero_grad()
        ce(model, x[index], y[index]).backward()
        for k, p in model.named_parameters():
            total[k] += p.grad**2
        batches, seen = batches + 1, seen + len(index)
        if seen > SAMPLES:
            break
    return {k: v / batches for k, v in total.items()}


@pytest.mark.parametrize("scope", ["all_seen", "last_round"])
def test_fedcurv(scope: str) -> None:
    ready = ready_for(
        {"name": "fedcurv", "scope": scope, "samples": SAMPLES, "weight": LAMBDA}, rounds=3
    )
    fed = Federation(ready)
    cohorts = [set(fed.cohort(r)) for r in (1, 2, 3)]
    assert cohorts[0] & cohorts[1] & cohorts[2], "a client must come back"
    assert (cohorts[0] - cohorts[1]) & cohorts[2], "and one after a pause"
    params, kept = fed.start, {}
    for round in (1, 2, 3):
        sent, new = [], {}
        for c in fed.cohort(round):
            others = [v for k, v in kept.items() if k != c]

            def loss(model: nn.Module, x: Tensor, y: Tensor, others: list = others) -> Tensor:
                now = dict(model.named_parameters())
                far = [(u[k] * (now[k] - w[k]) ** 2).sum() for u, w in others for k in now]
                return ce(model, x, y) + LAMBDA * sum(far)

            done = fed.fit(params, loss, round, c)
            new[c] = (fisher(fed, done.params, c), done.params)
            sent.append(done)
        kept = {**kept, **new} if scope == "all_seen" else new
        params = average(sent)
    states, memory = drive(ready)
    check(states[-1].params, params)
    check_matters(states[-1].params, ready, rounds=3)
    for group, of in (
        ("fisher", lambda u, w, k: u[k]),
        ("fisher_params", lambda u, w, k: u[k] * w[k]),
    ):
        check(
            states[-1].extra.tensors(group),
            {k: sum(of(u, w, k) for u, w in kept.values()) for k in params},
        )
    for c, (u, _) in kept.items():
        check(memory.load(c).tensors("fisher"), u)


def test_fedcurvs_information_is_that_of_augmented_images() -> None:
    """A mirrored image is drawn for every other one, from the run's seed, the stage and the
    client.
    """
    ready = ready_for({"name": "fedcurv", "samples": SAMPLES}, data={"augment": ("flip",)})
    fed, params = Federation(ready), Federation(ready).start
    stage = ready.settings.schedule(2, ready.world)[0]
    client = stage.clients[0]
    (x, y), view = fed.data(client), ready.sites.view(client, stage)
    draw, total, batches = generator(seed_for(7, 2, 0, client, "fisher")), {}, 0
    for index in torch.randperm(len(y), generator=generator(0)).split(PLAN["batch"]):
        turned = torch.rand(len(index), generator=draw) < 0.5
        model, some = fed.net(params), x[index].clone()
        some[turned] = some[turned].flip(-1)
        ce(model, some, y[index]).backward()
        total = {k: total.get(k, 0) + p.grad**2 for k, p in model.named_parameters()}
        batches += 1
        if batches * PLAN["batch"] > SAMPLES:
            break
    work = ready.settings.method.work(stage)
    found = work.fisher(params, view, ready.world)  # type: ignore[attr-defined]
    pixels = 1e-6  # augmented images are float32, as in training
    for key, value in total.items():
        torch.testing.assert_close(found[key], value / batches, rtol=1e-5, atol=pixels)
    plain = fisher(fed, params, client)
    assert max(float((found[k] - plain[k]).abs().max()) for k in plain) > 100 * pixels


def test_fedcurvs_information_leaves_out_outputs_that_take_no_part() -> None:
    ready = ready_for({"name": "fedcurv", "samples": SAMPLES})
    params = Federation(ready).start
    stage = ready.settings.schedule(1, ready.world)[0]
    view = ready.sites.view(stage.clients[0], stage)
    takes_part = torch.arange(ready.world.classes) > 0
    information = ready.settings.method.work(stage).fisher  # type: ignore[attr-defined]

    in_task = information(params, replace(view, head=takes_part), ready.world)

    with_all = information(params, view, ready.world)
    for name in ("head.weight", "head.bias"):
        assert not in_task[name][~takes_part].any()
        assert in_task[name][takes_part].any()
        assert with_all[name][~takes_part].any()


@pytest.mark.parametrize(
    "model", [{"name": "mlp", "hidden": (8,)}, {"name": "mlp", "hidden": (8,), "projection": 6}]
)
def test_moon(model: dict[str, object]) -> None:
    mu, temperature = 2.0, 0.4
    ready = ready_for({"name": "moon", "mu": mu, "temperature": temperature}, rounds=3, model=model)
    fed = Federation(ready)
    params, previous = fed.start, {}
    for round in (1, 2, 3):
        sent = []
        for c in fed.cohort(round):
            near, far = fed.net(params).eval(), fed.net(previous.get(c, fed.start)).eval()

            def loss(
                model: nn.Module, x: Tensor, y: Tensor, near: nn.Module = near, far: nn.Module = far
            ) -> Tensor:
                h, g, p = (m.get_submodule("body")(x) for m in (model, near, far))
                length = [v.norm(dim=1).clamp(min=1e-8) for v in (h, g.detach(), p.detach())]
                to = [
                    ((h * v.detach()).sum(1) / length[0] / n / temperature).exp()
                    for v, n in zip((g, p), length[1:], strict=True)
                ]
                return ce(model, x, y) - mu * (to[0] / (to[0] + to[1])).log().mean()

            sent.append(fed.fit(params, loss, round, c))
            previous[c] = sent[-1].params
        params = average(sent)
    states, memory = drive(ready)
    check(states[-1].params, params)
    check_matters(states[-1].params, ready, rounds=3)
    for c, mine in previous.items():
        check(memory.load(c).params, mine)


TEACH = {"epochs": 3, "batch": 16, "lr": 0.01, "lr_decay": 1.0, "weight_decay": 0.0}
PUBLIC = {"data": {"public": toys.PUBLIC}, "plan": {"teach_server": TEACH}}


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_feddf(tau: float) -> None:
    ready = ready_for({"name": "feddf", "temperature": tau}, **PUBLIC)
    fed = Federation(ready)
    assert ready.sites.public is not None
    x, params = fed.inputs(ready.sites.public.values), fed.start
    for round in (1, 2):
        sent = [fed.fit(params, ce, round, c) for c in fed.cohort(round)]
        student = fed.net(average(sent))
        with torch.no_grad():
            goal = (sum(fed.net(s.params)(x) for s in sent) / len(sent) / tau).softmax(1)
        adam = torch.optim.Adam(student.parameters(), lr=0.01, foreach=False)
        order = generator(seed_for(7, round, 1, SERVER, "order"))
        for _ in range(3):
            for index in torch.randperm(len(x), generator=order).split(16):
                adam.zero_grad()
                q = (student(x[index]) / tau).softmax(1)
                (tau**2 * (goal[index] * (goal[index] / q).log()).sum(1).mean()).backward()
                adam.step()
        params = {k: v.detach().clone() for k, v in student.state_dict().items()}
    states, memory = drive(ready)
    check(states[-1].params, params)
    check_matters(states[-1].params, ready)
    assert not states[-1].extra.many("model"), (
        "clients' models are dropped after the server's stage"
    )
    assert not any(memory.load(c) for c in range(6))


def test_feddf_never_reads_a_public_label() -> None:
    ready = ready_for("feddf", MORE, **PUBLIC)
    data = toys.blobs(size=MORE)
    labels = data.train.labels.clone()
    labels[torch.from_numpy(public_split(len(labels), toys.PUBLIC, 7)[1])] = 0
    relabelled = replace(data, train=Examples(data.train.values, labels))
    other = in_double(prepare(resolve(experiment("feddf", **PUBLIC)), relabelled))
    assert ready.sites.public is not None
    assert other.sites.public is not None
    assert int(other.sites.public.labels.sum()) == 0 < int(ready.sites.public.labels.sum())
    one, two = (drive(r)[0][-1].params for r in (ready, other))
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_a_methods_schedule_is_the_default_of_its_own_topology_only() -> None:
    assert resolve(experiment("feddf", **PUBLIC)).named.topology.values["server"] == "teach_server"
    named = resolve(experiment("feddf", topology={"kind": "parallel", "clients": 6}, **PUBLIC))
    assert named.named.topology.values["server"] == "teach_server"
    assert resolve(experiment("fedavg")).named.topology.values["server"] == ""
    with pytest.raises(IncompatibleMethod, match="topology"):
        ready_for("feddf", topology={"kind": "public_logits", "clients": 6}, **PUBLIC)


def test_feddf_without_public_data_or_its_stage_is_refused() -> None:
    with pytest.raises(IncompatibleMethod, match=r"feddf .*data\.public"):
        ready_for("feddf")
    with pytest.raises(IncompatibleMethod, match=r"topology\.server = 'teach_server'"):
        ready_for("feddf", topology={"clients": 6, "server": ""}, **PUBLIC)
