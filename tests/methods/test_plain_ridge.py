"""AFL and the stage ``ridge`` against ridge regression in NumPy on the data of all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plain import Federation, Params, check, drive, experiment, ready_for

import toys
from double import in_double
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.methods.ridge import feature_sums, solved
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run

HEAD = ("head.weight", "head.bias")
ALL = {"topology": {"clients": 6}}


def ridge_head(
    ready: Prepared, body: Params, clients: range | set[int], ridge: float, balanced: bool = False
) -> Params:
    """The last layer by the normal equations of centred features: the bias has no penalty then."""
    fed = Federation(ready)
    both = [fed.data(c) for c in sorted(clients)]
    x, y = torch.cat([x for x, _ in both]), torch.cat([y for _, y in both]).numpy()
    h, targets = fed.net(body).body(x).detach().numpy(), np.eye(toys.CLASSES)[y]
    w = 1 / np.bincount(y)[y] if balanced else np.full(len(y), 1.0)
    w = (w * (len(y) / w.sum()))[:, None]
    mean_h, mean_t = (w * h).sum(0) / len(y), (w * targets).sum(0) / len(y)
    centred = h - mean_h
    weight = np.linalg.solve(
        centred.T @ (w * centred) + ridge * np.eye(h.shape[1]), centred.T @ (w * (targets - mean_t))
    )
    return {
        "head.weight": torch.from_numpy(weight.T.copy()),
        "head.bias": torch.from_numpy(mean_t - mean_h @ weight),
    }


@pytest.mark.parametrize(("ridge", "balanced"), [(1.0, False), (100.0, False), (1.0, True)])
def test_afl(ridge: float, balanced: bool) -> None:
    ready = ready_for({"name": "afl", "ridge": ridge, "balanced": balanced}, rounds=1, **ALL)
    states, _ = drive(ready)
    start = ready.world.initial(0)
    check(
        {k: states[-1].params[k] for k in HEAD}, ridge_head(ready, start, range(6), ridge, balanced)
    )
    assert all(torch.equal(states[-1].params[k], v) for k, v in start.items() if k not in HEAD)


def test_any_two_splits_of_the_same_data_give_one_layer() -> None:
    one, other = (
        drive(ready_for("afl", rounds=1, topology={"clients": n}, partition=partition))[0][
            -1
        ].params
        for n, partition in ((6, {"kind": "dirichlet", "alpha": 0.1, "min_size": 4}), (3, "iid"))
    )
    check(one, other)


def test_clients_that_come_later_and_come_again_add_what_is_new() -> None:
    ready = ready_for("afl", rounds=4, topology={"clients": 6, "sampled": 2})
    fed, seen = Federation(ready, sampled=2), set[int]()
    states, memory = drive(ready)
    for round in (1, 2, 3, 4):
        seen |= set(fed.cohort(round))
        check({k: states[round].params[k] for k in HEAD}, ridge_head(ready, fed.start, seen, 1.0))
    assert len(seen) < 8, "some came again"
    assert {c for c in range(6) if memory.load(c)} == seen


def test_who_has_sent_everything_adds_nothing() -> None:
    states, _ = drive(ready_for("afl", rounds=2, **ALL))
    assert all(torch.equal(v, states[2].params[k]) for k, v in states[1].params.items())


@pytest.mark.parametrize("past", ["gone", "kept"])
def test_tasks_one_after_another_give_the_layer_of_all_at_once(past: str) -> None:
    tasks = {"stream": {"kind": "classes", "tasks": 2, "past": past}}
    states, memory = drive(ready_for("afl", rounds=4, **ALL, **tasks))
    (_, once), _ = drive(ready_for("afl", rounds=1, **ALL))
    check(states[-1].params, once.params)
    assert float((states[2].params["head.weight"] - once.params["head.weight"]).norm()) > 0.01
    assert {memory.load(c).number("task") for c in range(6)} == {0.0 if past == "kept" else 1.0}


@pytest.mark.parametrize("who", [{}, {"past": "kept"}, {"join": 0.5, "past": "gone"}])
def test_balanced_classes_weigh_alike_over_tasks_whatever_their_numbers_of_examples(
    who: dict[str, object],
) -> None:
    """The head at the end is that of all examples told of, balanced at once, with the penalty of
    that many.
    """
    blobs, afl = toys.blobs(), {"name": "afl", "balanced": True}
    # 60 examples of class 0, 12 of class 4
    keep = (torch.arange(300) // 5) % (1 + blobs.train.labels) == 0
    data = replace(blobs, train=blobs.train.take(keep.nonzero().flatten()))
    stream = {"kind": "classes", "tasks": 2, "order": [[0, 4], [1, 2, 3]], **who}
    values = {"partition": "iid", **ALL}
    ready = in_double(prepare(resolve(experiment(afl, stream=stream, **values)), data))
    states, _ = drive(ready)
    tasks = ready.sites.tasks
    assert tasks is not None
    told = [
        part[tasks.of_task(part, t)]
        for c, part in enumerate(ready.sites.split.tensors())
        for t in tasks.stream.tasks_until(c, 2)
    ]
    whole = replace(data, train=data.train.take(torch.cat(told)))
    once, _ = drive(in_double(prepare(resolve(experiment(afl, rounds=1, **values)), whole)))
    check({k: states[-1].params[k] for k in HEAD}, {k: once[-1].params[k] for k in HEAD})


@pytest.mark.parametrize(
    "stream",
    [
        {"kind": "drift"},
        {"kind": "domains", "transform": "invert"},
        {"kind": "classes", "stay": 0.5},
    ],
)
def test_balanced_classes_of_several_tasks_are_refused_where_data_go(
    stream: dict[str, object],
) -> None:
    afl = {"name": "afl", "balanced": True}
    with pytest.raises(IncompatibleMethod, match=r"method\.balanced = false"):
        ready_for(afl, **ALL, stream={"tasks": 2, **stream})
    ready_for(afl, **ALL, stream={"tasks": 2, "past": "kept", **stream})


def test_the_papers_law_of_merging_two_solved_layers_is_a_sum() -> None:
    draw = torch.Generator().manual_seed(0)
    x = [torch.randn(40, 6, generator=draw, dtype=torch.float64) for _ in range(2)]
    y = [
        torch.eye(3, dtype=torch.float64)[torch.randint(3, (40,), generator=draw)] for _ in range(2)
    ]
    c = [a.T @ a + torch.eye(6, dtype=torch.float64) for a in x]
    w = [torch.linalg.solve(k, a.T @ b) for k, a, b in zip(c, x, y, strict=True)]
    eye, inv = torch.eye(6, dtype=torch.float64), torch.linalg.inv
    u = eye - inv(c[0]) @ c[1] @ (eye - inv(c[0] + c[1]) @ c[1])
    v = eye - inv(c[1]) @ c[0] @ (eye - inv(c[0] + c[1]) @ c[0])
    merged = u @ w[0] + v @ w[1]
    summed = torch.linalg.solve(c[0] + c[1], x[0].T @ y[0] + x[1].T @ y[1])
    torch.testing.assert_close(merged, summed, rtol=1e-9, atol=1e-9)


def test_more_features_than_examples_have_a_solution_for_every_penalty_and_none_without() -> None:
    h, y = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 2])
    sums = feature_sums(h, y, 3)
    assert sums.tensor("cross")[-1].tolist() == [1.0, 1.0, 2.0]
    assert all(bool(v.isfinite().all()) for v in solved(**sums, ridge=1e-3).values())
    with pytest.raises(ConfigError, match=r"method\.ridge"):
        solved(**sums, ridge=0.0)
    nothing = feature_sums(h[:0], y[:0], 3)
    assert not any(v.any() for v in nothing.values())
    more = {g: nothing.tensor(g) + sums.tensor(g) for g in sums}
    assert all(torch.equal(v, more[g]) for g, v in sums.items()), (
        "a client without examples adds nothing"
    )


def test_sums_that_no_examples_have_do_not_ask_for_the_penalty_that_is_set() -> None:
    sums = feature_sums(torch.eye(3), torch.tensor([0, 1, 1]), 2)
    flipped = [-value for value in sums.values()]
    with pytest.raises(ConfigError, match="ridge") as without:
        solved(*flipped, ridge=0.0)
    assert "method.ridge above 0" in str(without.value)
    with pytest.raises(ConfigError, match="ridge") as penalised:
        solved(*flipped, ridge=1.0)
    assert "above 0" not in str(penalised.value)


@pytest.mark.parametrize("method", ["fedavg", "feddc"])
def test_any_method_may_end_with_it(method: str) -> None:
    last = ready_for(method, topology={"clients": 6, "sampled": 4, "last": "ridge"})
    (*_, ours), (*_, theirs) = (drive(r)[0] for r in (last, ready_for(method)))
    assert all(torch.equal(ours.params[k], v) for k, v in theirs.params.items() if k not in HEAD)
    check({k: ours.params[k] for k in HEAD}, ridge_head(last, dict(theirs.params), range(6), 1.0))
    assert ours.extra.keys() == theirs.extra.keys()


def test_what_clients_remember_is_as_before() -> None:
    changes = {"topology": {"clients": 6, "sampled": 4, "last": "ridge"}}
    ours, theirs = (drive(ready_for("feddyn", **c))[1] for c in (changes, {}))
    for c in range(6):
        assert ours.load(c).keys() == theirs.load(c).keys()


def test_a_run_that_ends_with_it_says_so_and_learns(tmp_path: Path) -> None:
    toy = toys.toy(
        "fedavg",
        topology={"clients": 6, "sampled": 4, "last": "ridge"},
        plan={"epochs": 1, "lr": 0.05},
    )
    result = run(toy, tmp_path / "run", toys.blobs())
    assert result.history[-1]["accuracy"] > 0.5
    assert "[plan.ridge]" in (tmp_path / "run/config.toml").read_text()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"method": "lg_fedavg"},
            "topology.last = 'ridge' with method lg_fedavg: its clients have models of their own",
        ),
        ({"method": "fd"}, "its clients have models of their own"),
        ({"model": {"name": "sphere_mlp", "hidden": (8,)}}, "is no linear layer with a bias"),
    ],
)
def test_where_there_is_no_layer_to_solve_for_it_is_refused(
    changes: dict[str, object], says: str
) -> None:
    toy = toys.toy(**{"method": "fedavg", **changes, "topology": {"clients": 6, "last": "ridge"}})
    with pytest.raises(IncompatibleMethod, match=says):
        prepare(resolve(toy), toys.blobs())


def test_a_head_without_a_bias_is_refused_by_afl_too() -> None:
    with pytest.raises(IncompatibleMethod, match=r"afl .*linear layer"):
        prepare(
            resolve(toys.toy("afl", model={"name": "sphere_mlp", "hidden": (8,)})), toys.blobs()
        )
