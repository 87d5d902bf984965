"""The cost model: the reasons to stack clients or not, and that more work never costs less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedstill.core.records import ModelSpec, Plan
from fedstill.engines import vectorised
from fedstill.engines.passes import forward_flops
from fedstill.engines.vectorised import StageWork, suited_engine
from fedstill.models import contract


def mlp(*hidden: int) -> ModelSpec:
    """A perceptron on 8 × 8 images of ten classes."""
    return contract.spec_for("mlp", (1, 8, 8), 10, {"hidden": hidden})


DROPOUT = contract.spec_for("simple_cnn", (1, 8, 8), 10, {})
SMALL = StageWork(Plan(batch=10), clients=10, specs={mlp(16)}, examples=100.0)
LARGE = replace(SMALL, specs={mlp(2000, 2000)})
LONE = replace(LARGE, clients=1)
KEEPS_BEST = replace(SMALL, plan=Plan(keep="best", validation=0.1))


@pytest.mark.parametrize(
    ("stages", "device", "engine", "words"),
    [
        ([SMALL], "cpu", "vectorised", "stacking is faster up to 30 MFLOP"),
        ([LARGE], "cpu", "pooled", "stacking is faster up to 30 MFLOP"),
        ([SMALL, LARGE], "cpu", "pooled", "stacking is faster up to 30 MFLOP"),
        ([SMALL, LONE], "cpu", "vectorised", "10 clients in a stage"),
        ([LONE], "cpu", "pooled", "one client acts at a time"),
        ([], "cpu", "pooled", "one client acts at a time"),
        ([SMALL], "mps", "pooled", "no measurements of stacking on mps"),
        ([replace(SMALL, clients=3)], "cpu", "pooled", "stacking needs at least 4"),
        ([SMALL, replace(SMALL, clients=2)], "cpu", "pooled", "2 clients in a stage"),
        ([KEEPS_BEST], "cpu", "pooled", "plan.keep is set"),
        ([replace(SMALL, specs={mlp(16), DROPOUT})], "cpu", "pooled", "draws random numbers"),
    ],
    ids=[
        "small",
        "large",
        "one large",
        "chain beside",
        "chain",
        "nothing",
        "mps",
        "few",
        "fewest",
        "best",
        "dropout",
    ],
)
def test_the_reason_for_an_engine_is_given(
    stages: list[StageWork], device: str, engine: str, words: str
) -> None:
    choice = suited_engine(stages, device)
    assert choice.engine == engine
    assert words in choice.reason


def test_clients_are_stacked_up_to_the_crossover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vectorised.CROSSOVER, "cpu", SMALL.flops)
    assert suited_engine([SMALL], "cpu").engine == "vectorised"
    monkeypatch.setitem(vectorised.CROSSOVER, "cpu", SMALL.flops - 1)
    assert suited_engine([SMALL], "cpu").engine == "pooled"


def test_a_step_is_three_forward_passes_of_a_batch_of_the_costliest_network() -> None:
    forward_of_16 = 2 * (64 * 16 + 16 * 10)
    forward_of_32 = 2 * (64 * 32 + 32 * 10)

    assert replace(SMALL, specs={mlp(16), mlp(32)}).flops == 3 * 10 * forward_of_32
    fewer_than_a_batch = replace(SMALL, examples=4.0)
    assert fewer_than_a_batch.flops == 3 * 4 * forward_of_16, "no batch is larger than the data"
    assert replace(SMALL, examples=0.0).flops == 3 * forward_of_16


def assert_rising(costs: list[float]) -> None:
    """Assert that no cost is below the one before it, and that the last exceeds the first."""
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


def test_more_work_never_costs_less() -> None:
    assert_rising([replace(SMALL, specs={mlp(w)}).flops for w in (4, 8, 16, 64, 256)])
    assert_rising([replace(SMALL, plan=Plan(batch=b)).flops for b in (1, 5, 50, 100, 1000)])
    assert_rising([replace(SMALL, examples=float(n)).flops for n in (0, 1, 5, 10, 1000)])

    networks = [contract.spec_for("digits_cnn", (c, 8, 8), 10, {}) for c in (1, 2, 3)]
    assert_rising([forward_flops(network) for network in networks])
