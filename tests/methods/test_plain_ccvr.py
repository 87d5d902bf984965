"""CCVR against a plain implementation: covariances by NumPy over all clients' features, the head by
torch's SGD.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from plain import PLAN, Federation, Params, average, ce, check, drive, ready_for
from torch import Tensor, nn

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import BadPayload, IncompatibleMethod
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Stage
from fedstill.core.registry import method
from fedstill.methods.ccvr import CCVR, class_moments, covariance_roots, gaussians
from fedstill.methods.fedntd import FedNTD
from fedstill.running.preparation import prepare

HEAD = ("head.weight", "head.bias")
CLASSES, WIDTH = toys.CLASSES, 8
QUICK = {
    "calibrate": {
        "epochs": 2,
        "batch": 16,
        "lr": 0.05,
        "lr_decay": 1.0,
        "momentum": 0.5,
        "weight_decay": 0.0,
    }
}


@method("toy_ccvr_ntd")
@dataclass(frozen=True)
class CalibratedNTD(CCVR, FedNTD):
    """FedNTD, calibrated in the end."""


def plain_gaussians(
    h: Tensor, y: Tensor, diagonal: bool
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    spread = {c: np.cov(h[y == c].numpy().T) for c in range(CLASSES) if int((y == c).sum()) > 1}
    if diagonal:
        spread = {c: np.diag(np.diag(s)) for c, s in spread.items()}
    out = {}
    for c in sorted(set(y.tolist())):
        s = spread.get(c, sum(spread.values()) / len(spread))
        size = np.trace(s) / WIDTH
        out[c] = (
            h[y == c].numpy().mean(0),
            np.linalg.cholesky(s + (1e-6 * size + 1e-12) * np.eye(WIDTH)),
        )
    return out


def calibrated(fed: Federation, params: Params, diagonal: bool, samples: int) -> Params:
    """The head of a model after training on drawn features."""
    data = [fed.data(k) for k in range(6)]
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    known = plain_gaussians(fed.net(params).body(x).detach(), y, diagonal)
    draw = generator(seed_for(7, 0, 0, SERVER, "virtual features"))
    noise = torch.randn(CLASSES, samples, WIDTH, generator=draw, dtype=torch.float64).numpy()
    drawn = {c: mean + noise[c] @ root.T for c, (mean, root) in known.items()}
    values = torch.from_numpy(np.concatenate(list(drawn.values())))
    labels = torch.tensor([c for c in drawn for _ in range(samples)])
    head = nn.Linear(WIDTH, CLASSES).double()
    head.load_state_dict({k.removeprefix("head."): params[k] for k in HEAD})
    sgd = torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.5, foreach=False)
    order = generator(seed_for(7, 2, 2, SERVER, "order"))
    for _ in range(2):
        for index in torch.randperm(len(labels), generator=order).split(16):
            sgd.zero_grad()
            ce(head, values[index], labels[index]).backward()
            sgd.step()
    return {f"head.{k}": v.detach() for k, v in head.state_dict().items()}


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_ccvr(covariance: str) -> None:
    ready = ready_for({"name": "ccvr", "samples": 20, "covariance": covariance}, plan=QUICK)
    fed = Federation(ready)
    server = fed.start
    for round in (1, 2):
        server = average([fed.fit(server, ce, round, k) for k in fed.cohort(round)])
    states, _ = drive(ready)
    ours = states[-1]
    check(
        {k: v for k, v in ours.params.items() if k not in HEAD},
        {k: v for k, v in server.items() if k not in HEAD},
    )
    check(ours.extra.tensors("before"), {k: server[k] for k in HEAD})
    after = calibrated(fed, dict(server), covariance == "diagonal", 20)
    check({k: ours.params[k] for k in HEAD}, after)
    assert float((after["head.weight"] - server["head.weight"]).norm()) > 0.01
    named = ready.settings.method.predictors(ours, ready.world)
    x = fed.data(0)[0]
    torch.testing.assert_close(named["before"](x), fed.net(server)(x).detach())
    assert not torch.equal(named["before"](x), named["global"](x))


def test_the_pooled_moments_are_those_of_all_examples_however_they_are_split() -> None:
    draw = torch.Generator().manual_seed(0)
    h, y = (
        torch.randn(60, WIDTH, generator=draw, dtype=torch.float64).relu(),
        torch.randint(4, (60,), generator=draw),
    )
    for covariance in ("full", "diagonal"):
        whole = class_moments(h, y, CLASSES, covariance)
        for parts in (h.split(60), h.split(7), [h[:0], *h.split(31)]):
            labels = y.split([len(p) for p in parts])
            each = [
                class_moments(a, b, CLASSES, covariance) for a, b in zip(parts, labels, strict=True)
            ]
            for g in whole:
                torch.testing.assert_close(
                    sum(e.tensor(g) for e in each), whole.tensor(g), rtol=1e-12, atol=1e-12
                )
        means, roots = gaussians(*whole.values())
        for c, (mean, root) in plain_gaussians(h, y, covariance == "diagonal").items():
            np.testing.assert_allclose(means[c], mean, rtol=1e-10)
            np.testing.assert_allclose(roots[c], root, rtol=1e-8, atol=1e-10)


def test_a_class_of_one_example_gets_the_mean_of_the_others_covariances() -> None:
    draw = torch.Generator().manual_seed(0)
    h, y = (
        torch.randn(21, WIDTH, generator=draw, dtype=torch.float64),
        torch.tensor([0] * 10 + [1] * 10 + [2]),
    )
    _, roots = gaussians(*class_moments(h, y, 3, "full").values())
    zero, one, two = (root @ root.T for root in roots)
    torch.testing.assert_close(two, (zero + one) / 2, rtol=1e-5, atol=1e-5)
    means, roots = gaussians(*class_moments(h[20:], y[20:], 3, "full").values())
    assert torch.equal(means[2], h[20])
    assert float(roots.abs().max()) <= 1e-5, "of one example there is no spread"


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("size", [1.0, 10.0, 1e4])
def test_a_class_of_constant_features_gets_a_covariance_of_almost_nothing(
    size: float, covariance: str
) -> None:
    """The rounding of the sums is larger than the spread of the features."""
    draw = torch.Generator().manual_seed(0)
    constant = size * torch.rand(64, generator=draw).repeat(2000, 1)
    varied = torch.randn(2000, 64, generator=draw)
    features = torch.cat([constant, varied])
    labels = torch.arange(2).repeat_interleave(2000)
    moments = class_moments(features, labels, 2, covariance)

    means, roots = gaussians(*moments.values())

    torch.testing.assert_close(means[0], constant[0].double())
    assert float(roots[0].abs().max()) < 1e-3 * size
    _, alone = gaussians(*(group[1:] for group in moments.values()))
    assert torch.equal(roots[1], alone[0]), "other classes keep their roots"


def test_covariances_that_are_not_finite_have_no_roots() -> None:
    with pytest.raises(torch.linalg.LinAlgError):
        covariance_roots(torch.full((1, 2, 2), float("nan"), dtype=torch.float64))


@pytest.mark.parametrize("how", [{"samples": 0}, {"samples": 50}])
@pytest.mark.parametrize(("ours", "base"), [("ccvr", "fedavg"), ("toy_ccvr_ntd", "fedntd")])
def test_the_body_is_that_of_the_method_beneath_and_of_no_samples_all_of_it(
    ours: str, base: str, how: dict
) -> None:
    (*_, a), (*_, b) = (drive(ready_for(m))[0] for m in ({"name": ours, **how}, base))
    same = {k: torch.equal(a.params[k], v) for k, v in b.params.items()}
    assert all(same[k] for k in same if k not in HEAD)
    assert [same[k] for k in HEAD] == [how["samples"] == 0] * 2
    assert a.extra.keys() == {"before"}


def test_what_it_cannot_do_is_one_clear_line() -> None:
    with pytest.raises(IncompatibleMethod, match=r"set topology\.kind = 'parallel'"):
        prepare(
            resolve(toys.toy("ccvr", topology={"kind": "sequential", "clients": 6})), toys.blobs()
        )
    with pytest.raises(IncompatibleMethod, match="linear layer"):
        prepare(
            resolve(toys.toy("ccvr", model={"name": "sphere_mlp", "hidden": (8,)})), toys.blobs()
        )
    with pytest.raises(BadPayload, match=r"set topology\.last = 'statistics'"):
        drive(ready_for("ccvr", topology={"clients": 6, "last": ""}))


def test_the_plan_of_training_is_federated_averagings() -> None:
    assert ready_for("ccvr").world.plans["train"].batch == PLAN["batch"]


def test_a_class_that_no_client_has_keeps_its_row_of_the_head() -> None:
    """Such as a class of an earlier task: training the head against it would forget it."""
    ready = ready_for("ccvr", plan={**PLAN, **QUICK})
    method, world = ready.settings.method, ready.world
    state = method.initial_state(world)
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(60, WIDTH, generator=draw)
    labels = torch.tensor([1, 3]).repeat(30)
    moments = class_moments(features + 3 * labels.unsqueeze(1), labels, CLASSES, "full")
    state = state.next(groups=dict(moments))
    stage = Stage(4, 0, "calibrate", (SERVER,), view="public")
    payload = method.payload_for_client(state, SERVER, stage, world)
    (reply,) = ready.engine().run(method.work(stage), stage, {SERVER: payload}, 7)
    head = reply.content.tensors("head")
    for name in HEAD:
        before = state.params[name]
        changed = (head[name] != before).reshape(CLASSES, -1).any(1)
        assert changed.tolist() == [False, True, False, True, False]
