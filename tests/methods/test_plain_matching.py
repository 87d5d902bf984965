"""PFNM against a plain re-derivation: one hidden layer, matched by loops; of several settings the
best is taken.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from plain import Federation, check, drive
from scipy.optimize import linear_sum_assignment
from test_plain_one_shot import ready
from torch import Tensor

import toys
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.core.fields import check_ranges
from fedstill.core.keys import seed_for
from fedstill.methods.pfnm import PFNM
from fedstill.models.predictors import predictor
from fedstill.running.model_files import read_model, save_model
from fedstill.running.preparation import Prepared
from fedstill.running.runner import run

ONE = {"name": "pfnm", "gamma": [1.0], "variance": [0.5], "prior_variance": [10.0]}
Params = dict[str, Tensor]


def local(prepared: Prepared) -> list[Params]:
    return list(drive(ready("local_only"))[0][-1].extra.many("model").values())


def counts_of(prepared: Prepared) -> np.ndarray:
    fed = Federation(prepared)
    return np.array(
        [np.bincount(fed.data(c)[1].numpy(), minlength=toys.CLASSES) for c in range(6)], dtype=float
    )


def matched(
    models: list[Params], counts: np.ndarray, gamma: float, s2: float, s0: float, passes: int = 5
) -> Params:
    """A unit is what comes in, bias, what goes out: that to a class is as precise as the client's
    share of it.
    """
    share, n = counts / counts.sum(0), len(models)
    flat = [{k: v.double().numpy() for k, v in m.items()} for m in models]
    vectors = [np.c_[m["body.1.weight"], m["body.1.bias"], m["head.weight"].T] for m in flat]
    precise = [np.r_[np.full(17, 1 / s2), share[j] / s2] for j in range(n)]
    mean = np.r_[np.zeros(16), 0.1, np.zeros(toys.CLASSES)]
    groups: list[list[tuple[int, int]]] = []

    def known(group: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        total = mean / s0 + sum(precise[j] * vectors[j][r] for j, r in group)
        return total, 1 / s0 + sum(precise[j] for j, _ in group)

    def worth(j: int, row: int, group: list[tuple[int, int]]) -> float:
        total, weight = known(group)
        return float(
            (
                (precise[j] * vectors[j][row] + total) ** 2 / (precise[j] + weight)
                - total**2 / weight
            ).sum()
        )

    def join(j: int) -> None:
        size = len(vectors[j])
        scores = np.zeros((size, len(groups) + size))
        for row in range(size):
            for g, group in enumerate(groups):
                scores[row, g] = worth(j, row, group) + math.log(len(group) / (n - len(group)))
            for k in range(size):
                scores[row, len(groups) + k] = (
                    worth(j, row, []) - 2 * math.log(k + 1) + 2 * math.log(gamma / n)
                )
        fresh = len(groups)
        if not groups:
            groups.extend([(j, row)] for row in range(size))
            return
        for row, g in enumerate(linear_sum_assignment(-scores)[1]):
            if g < fresh:
                groups[g].append((j, row))
            else:
                groups.append([(j, row)])

    for j in range(n):
        join(j)
    draw = np.random.default_rng(seed_for(7, 1, 0, -1, "matching"))
    for _ in range(passes):
        for j in draw.permutation(n):
            groups[:] = [left for g in groups if (left := [m for m in g if m[0] != j])]
            join(int(j))
    units = np.array([np.divide(*known(g)) for g in groups])
    head = (0.1 / s0 + sum(share[j] / s2 * flat[j]["head.bias"] for j in range(n))) / (
        1 / s0 + share.sum(0) / s2
    )
    found = {
        "body.1.weight": units[:, :16],
        "body.1.bias": units[:, 16],
        "head.weight": units[:, 17:].T,
        "head.bias": head,
    }
    return {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in found.items()}


@pytest.mark.parametrize("gamma", [1e-3, 50.0])
def test_the_model_is_that_of_loops(gamma: float) -> None:
    prepared = ready({**ONE, "gamma": [gamma]})
    state = drive(prepared)[0][-1]
    expected = matched(local(prepared), counts_of(prepared), gamma, 0.5, 10.0)
    assert len(expected["body.1.bias"]) > 8 or gamma < 1, "it needs more units than a client has"
    assert state.model is not None
    assert state.model.widths == (len(expected["body.1.bias"]),)
    check(state.params, expected)


def test_of_several_settings_the_best_on_the_clients_data_is_taken() -> None:
    prepared = ready(
        {"name": "pfnm", "gamma": [1.0, 50.0], "variance": [1.0, 0.1], "prior_variance": [1.0]}
    )
    models, counts, fed = local(prepared), counts_of(prepared), Federation(prepared)
    grid = [matched(models, counts, gamma, s2, 1.0) for gamma in (1.0, 50.0) for s2 in (1.0, 0.1)]
    x, y = (torch.cat(parts) for parts in zip(*(fed.data(c) for c in range(6)), strict=True))
    right = []
    for m in grid:
        z = (
            torch.relu(x.flatten(1) @ m["body.1.weight"].T + m["body.1.bias"]) @ m["head.weight"].T
            + m["head.bias"]
        )
        right.append(int((z.argmax(1) == y).sum()))
    assert len(set(right)) > 1
    state = drive(prepared)[0][-1]
    check(state.params, grid[int(np.argmax(right))])
    assert not state.extra.many("candidate")


@pytest.mark.parametrize("changes", [{"model": "toy_slim"}, {"model": "logistic"}], ids=str)
def test_other_networks_keep_their_widths(changes: dict[str, object]) -> None:
    state = drive(ready(ONE, plan={"epochs": 1, "batch": 50}, **changes))[0][-1]
    assert all(bool(v.isfinite().all()) for v in state.params.values())


def test_a_wider_model_is_measured_and_can_be_saved(tmp_path) -> None:
    result = run(
        toys.toy({**ONE, "gamma": [50.0]}, **toys.suited("pfnm")),
        tmp_path / "run",
        data=toys.blobs(),
    )
    assert len(result.model["body.1.bias"]) > 8
    assert 0.4 < result.accuracy <= 1
    prepared = ready({**ONE, "gamma": [50.0]})
    state = drive(prepared)[0][-1]
    assert state.model is not None
    made = {k: v.float() for k, v in state.params.items()}  # as every run keeps it
    save_model(tmp_path / "model", state.model, made)
    spec, params = read_model(tmp_path / "model")
    assert spec == state.model
    x = torch.randn(3, 1, toys.SIDE, toys.SIDE)
    assert torch.equal(predictor(spec, params)(x), predictor(state.model, made)(x))


def test_models_that_differ_or_cannot_be_matched_are_refused_by_name() -> None:
    with pytest.raises(IncompatibleMethod, match=r"pfnm .*clients\.models"):
        ready("pfnm", clients={"models": ("mlp", "logistic")})
    with pytest.raises(IncompatibleMethod, match=r"pfnm.*toy_batchnorm is neither.*qkt_cnn"):
        ready("pfnm", model="toy_batchnorm")


@pytest.mark.parametrize("field", ["gamma", "variance", "prior_variance"])
def test_candidates_out_of_range_are_refused_by_name(field: str) -> None:
    for value in ([0.0], [1.0, -1.0], [float("nan")], [], ["1"]):
        with pytest.raises(ConfigError, match=rf"method\.{field} = "):
            ready({"name": "pfnm", field: value})
    with pytest.raises(ConfigError, match=rf"PFNM\.{field} = "):
        PFNM(**{field: (1.0, 0.0)})
    with pytest.raises(ConfigError, match=rf"PFNM\.{field} = \[\]"):
        PFNM(**{field: ()})
    check_ranges(PFNM())
