"""ResNets with batch normalisation: averaged with running statistics, refined in evaluation mode,
asked as peers.
"""

from __future__ import annotations

import copy
import functools

import plain
import pytest
import torch
from plain import Federation, Params, ce, drive
from torch import Tensor, nn

import toys
from double import NEAR, in_double
from fedstill.config.resolve import resolve
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import Tensors
from fedstill.data.dataset import Dataset
from fedstill.methods.fit import queries_of
from fedstill.running.preparation import Prepared, prepare

RESNET = {"name": "resnet10", "norm": "batch"}
SIZE = 20


@functools.cache
def images() -> Dataset:
    return toys.blobs_of(9, size=SIZE)


def ready(method: object, model: object = RESNET, **changes: object) -> Prepared:
    given = {
        "rounds": 1,
        "model": model,
        "partition": {"kind": "iid"},
        "topology": {"clients": 2},
        "plan": {"epochs": 1, "batch": SIZE},
    }
    return in_double(prepare(resolve(plain.experiment(method, **{**given, **changes})), images()))


@pytest.mark.parametrize(
    "model",
    [
        RESNET,
        *(
            pytest.param({"name": n, "norm": "batch"}, marks=pytest.mark.slow)
            for n in ("resnet18", "resnet50")
        ),
    ],
    ids=str,
)
def test_running_statistics_are_averaged_like_weights(model: dict[str, str]) -> None:
    prepared = ready("fedavg", model, plan={"epochs": 1, "batch": plain.PLAN["batch"]})
    fed = Federation(prepared, epochs=1)
    sent = [fed.fit(fed.start, ce, 1, c) for c in range(2)]
    expected, ours = plain.average(sent), drive(prepared)[0][-1].params
    counters = [k for k in ours if k.endswith("num_batches_tracked")]
    statistics = [k for k in ours if k.endswith(("running_mean", "running_var"))]
    # a stem, the blocks' and the shortcuts'
    norms = {"resnet10": 12, "resnet18": 20, "resnet50": 53}
    assert len(statistics) == 2 * len(counters) == 2 * norms[model["name"]]
    for key in counters:
        assert ours[key].dtype == torch.int64
        assert int(ours[key]) == len(prepared.sites.positions(0).split(plain.PLAN["batch"])), (
            "the batches of a client"
        )
    for key in set(ours) - set(counters):
        torch.testing.assert_close(ours[key], expected[key], rtol=0, atol=NEAR)
    a, b = (s.params["body.stem.1.running_mean"] for s in sent)
    assert not torch.allclose(a, b), "the clients' differ, so their mean says something"


def lacking(parts: int = 2) -> dict[str, object]:
    """Each of two clients asks for a class; with one class more the other has."""
    return {
        "partition": {"kind": "pathological", "classes_per_client": 3},
        "query": {"draw": "single", "fewer_than": 1},
        "topology": {"clients": parts},
        "seed": 7,
    }


def local_and_students(prepared: Prepared) -> tuple[dict[int, Tensors], dict[int, Tensors]]:
    extra = drive(prepared)[0][-1].extra
    return extra.many("model"), extra.many("student")


def test_the_head_is_refined_on_features_in_evaluation_mode_and_nothing_else_moves() -> None:
    """Without teachers phase 2 is cross-entropy on the head: one step of Adam on what the frozen
    extractor gives.
    """
    fit = {"validation": 0.0, "keep": "last", "lr": 1e-5}  # nobody is certain of a class on noise
    plan = {"epochs": 1, "batch": SIZE, "lr": 0.01, "weight_decay": 0.0, "fit": fit}
    method = {"name": "qkt", "threshold": 1.0}
    one = local_and_students(ready({**method, "phases": 1}, plan=plan, **lacking()))[1]
    prepared = ready(method, plan=plan, **lacking())
    local, two = local_and_students(prepared)
    fed = Federation(prepared)
    assert set(two) == set(queries_of(prepared.world)) == set(one)
    for c, params in two.items():
        for key in set(params) - {"head.weight", "head.bias"}:
            assert torch.equal(params[key], one[c][key]), key
        net = fed.net({**one[c], **{k: v for k, v in local[c].items() if k.startswith("head.")}})
        head = one_step(net.eval(), *fed.data(c), generator(seed_for(7, 1, 2, c, "order")))
        torch.testing.assert_close(params["head.weight"], head["weight"], rtol=0, atol=NEAR)
        trained = one_step(
            copy.deepcopy(net).train(), *fed.data(c), generator(seed_for(7, 1, 2, c, "order"))
        )
        assert not torch.allclose(params["head.weight"], trained["weight"], atol=1e-5), (
            "in training mode it differs"
        )


def one_step(net: nn.Module, x: Tensor, y: Tensor, draw: torch.Generator) -> Params:
    order = torch.randperm(len(y), generator=draw)
    head = copy.deepcopy(net.head)
    adam = torch.optim.Adam(head.parameters(), lr=0.01)
    features = net.body(x[order]).detach()
    nn.functional.cross_entropy(head(features), y[order]).backward()
    adam.step()
    return {k: v.detach() for k, v in head.state_dict().items()}


def test_a_resnet_and_a_small_cnn_teach_each_other() -> None:
    both = {"models": (RESNET, "qkt_cnn")}
    prepared = ready(
        "qkt", plan={"epochs": 1, "batch": SIZE, "fit": {"keep": "last"}}, clients=both, **lacking()
    )
    local, students = local_and_students(prepared)
    assert students
    for c, params in students.items():
        assert {k: v.shape for k, v in params.items()} == {k: v.shape for k, v in local[c].items()}
        assert all(bool(v.isfinite().all()) for v in params.values())
        assert any(not torch.equal(params[k], local[c][k]) for k in params)
