"""ResNets with batch normalisation: averaged with running statistics, refined in evaluation mode,
asked as peers.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from plain import (
    HEAD,
    PLAN,
    SEED,
    Federation,
    Params,
    all_finite,
    average,
    ce,
    drive,
    experiment,
)
from torch import Tensor, nn

import toys
from double import NEAR, in_double
from fedstill.config.resolve import resolve
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import State
from fedstill.core.trees import only, same_bits
from fedstill.data.dataset import Dataset
from fedstill.methods.fit import queries_of
from fedstill.running.preparation import Prepared, prepare

RESNET = {"name": "resnet10", "norm": "batch"}
SIZE = 20
ONE_BATCH = {"epochs": 1, "batch": SIZE}

QUERIES = {
    "partition": {"kind": "pathological", "classes_per_client": 3},
    "query": {"draw": "single", "fewer_than": 1},
}
"""Each of two clients asks for a class that the other one has."""


@functools.cache
def images() -> Dataset:
    """Ten images for each of two clients."""
    return toys.blobs_of(9, size=SIZE)


def ready(method: object, **changes: object) -> Prepared:
    """A round of two clients, in float64."""
    values = {
        "rounds": 1,
        "model": RESNET,
        "partition": {"kind": "iid"},
        "topology": {"clients": 2},
        "plan": ONE_BATCH,
        **changes,
    }
    return in_double(prepare(resolve(experiment(method, **values)), images()))


@pytest.mark.parametrize(
    ("model", "normalisations"),
    [
        ("resnet10", 12),
        pytest.param("resnet18", 20, marks=pytest.mark.slow),
        pytest.param("resnet50", 53, marks=pytest.mark.slow),
    ],
)
def test_running_statistics_are_averaged_like_weights(model: str, normalisations: int) -> None:
    """Those of the stem, of the blocks and of the shortcuts. Counters count a client's batches."""
    plan = {"epochs": 1, "batch": PLAN["batch"]}
    prepared = ready("fedavg", model={"name": model, "norm": "batch"}, plan=plan)
    fed = Federation(prepared).with_plan(epochs=1)
    results = [fed.fit(fed.start, ce, 1, client) for client in range(2)]

    ours = drive(prepared).params

    counters = {name for name in ours if name.endswith("num_batches_tracked")}
    statistics = {name for name in ours if name.endswith(("running_mean", "running_var"))}
    assert len(counters) == normalisations
    assert len(statistics) == 2 * normalisations
    batches = len(prepared.sites.positions(0).split(PLAN["batch"]))
    for name in counters:
        assert ours[name].dtype == torch.int64
        assert int(ours[name]) == batches
    expected = average(results)
    for name in set(ours) - counters:
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=NEAR)
    means = [result.params["body.stem.1.running_mean"] for result in results]
    assert not torch.allclose(means[0], means[1]), "the clients' differ"


def local_models(state: State) -> dict[int, Params]:
    """The models that clients trained alone."""
    return state.extra.many("model")


def students(state: State) -> dict[int, Params]:
    """The models of clients that asked their peers."""
    return state.extra.many("student")


def refined_head(network: nn.Module, x: Tensor, y: Tensor, client: int) -> Tensor:
    """The head's weights after one step of Adam on what the body gives, in the network's mode."""
    draw = generator(seed_for(SEED, 1, 2, client, "order"))
    order = torch.randperm(len(y), generator=draw)
    head = copy.deepcopy(network.head)
    adam = torch.optim.Adam(head.parameters(), lr=0.01)
    features = network.body(x[order]).detach()
    nn.functional.cross_entropy(head(features), y[order]).backward()
    adam.step()
    return head.weight.detach()


def test_the_head_is_refined_on_features_in_evaluation_mode_and_nothing_else_moves() -> None:
    """Without teachers phase 2 is cross-entropy on the head: one step of Adam on what the frozen
    extractor gives.
    """
    fit = {"validation": 0.0, "keep": "last", "lr": 1e-5}  # nobody is certain of a class on noise
    changes = {"plan": {**ONE_BATCH, "lr": 0.01, "weight_decay": 0.0, "fit": fit}, **QUERIES}
    method = {"name": "qkt", "threshold": 1.0}
    prepared = ready(method, **changes)
    fed = Federation(prepared)

    after_phase_one = students(drive(ready({**method, "phases": 1}, **changes)).final)
    final = drive(prepared).final

    assert set(students(final)) == set(after_phase_one) == set(queries_of(prepared.world))
    for client, params in students(final).items():
        start = {**after_phase_one[client], **only(local_models(final)[client], HEAD)}
        body = set(params) - set(HEAD)
        assert same_bits(only(params, body), only(start, body))
        data = fed.data(client)
        in_evaluation = refined_head(fed.net(start).eval(), *data, client)
        torch.testing.assert_close(params["head.weight"], in_evaluation, rtol=0, atol=NEAR)
        in_training = refined_head(fed.net(start).train(), *data, client)
        assert not torch.allclose(params["head.weight"], in_training, atol=1e-5)


def test_a_resnet_and_a_small_cnn_teach_each_other() -> None:
    plan = {**ONE_BATCH, "fit": {"keep": "last"}}
    prepared = ready("qkt", plan=plan, clients={"models": (RESNET, "qkt_cnn")}, **QUERIES)

    state = drive(prepared).final

    assert students(state)
    for client, params in students(state).items():
        local = local_models(state)[client]
        shapes = {name: value.shape for name, value in params.items()}
        assert shapes == {name: value.shape for name, value in local.items()}
        assert all_finite(params)
        assert not same_bits(params, local)
