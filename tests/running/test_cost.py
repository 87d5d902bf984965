"""The cost model: each reason to stack clients or not, and that more work never costs less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedstill.core.records import ModelSpec, Plan
from fedstill.engines import vectorised
from fedstill.engines.passes import forward_flops
from fedstill.engines.vectorised import StageWork, suited_engine
from fedstill.models import contract


def mlp(*hidden: int) -> ModelSpec:
    return contract.spec_for("mlp", (1, 8, 8), 10, {"hidden": hidden})


SMALL = StageWork(Plan(batch=10), clients=10, specs={mlp(16)}, examples=100.0)
LARGE = replace(SMALL, specs={mlp(2000, 2000)})
LONE = replace(LARGE, clients=1)


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
        (
            [replace(SMALL, plan=Plan(keep="best", validation=0.1))],
            "cpu",
            "pooled",
            "plan.keep is set",
        ),
        (
            [replace(SMALL, specs={mlp(16), contract.spec_for("simple_cnn", (1, 8, 8), 10, {})})],
            "cpu",
            "pooled",
            "draws random numbers",
        ),
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
def test_each_reason_is_said(stages: list[StageWork], device: str, engine: str, words: str) -> None:
    kind, why = suited_engine(stages, device)
    assert kind == engine
    assert words in why


def test_the_crossover_is_where_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, engine in ((SMALL.flops, "vectorised"), (SMALL.flops - 1, "pooled")):
        monkeypatch.setitem(vectorised.CROSSOVER, "cpu", limit)
        assert suited_engine([SMALL], "cpu").engine == engine


def test_a_step_is_three_forward_passes_of_a_batch_of_the_costliest_network() -> None:
    two = replace(SMALL, specs={mlp(16), mlp(32)})
    assert two.flops == 3 * 10 * 2 * (64 * 32 + 32 * 10)
    assert replace(SMALL, examples=4.0).flops == 3 * 4 * 2 * (64 * 16 + 16 * 10), (
        "no batch is larger than the data"
    )
    assert replace(SMALL, examples=0.0).flops == 3 * 2 * (64 * 16 + 16 * 10)


def test_more_work_never_costs_less() -> None:
    widths = [replace(SMALL, specs={mlp(w)}).flops for w in (4, 8, 16, 64, 256)]
    batches = [replace(SMALL, plan=Plan(batch=b)).flops for b in (1, 5, 50, 100, 1000)]
    examples = [replace(SMALL, examples=float(n)).flops for n in (0, 1, 5, 10, 1000)]
    images = [
        forward_flops(contract.spec_for("digits_cnn", (channels, 8, 8), 10, {}))
        for channels in (1, 2, 3)
    ]
    for costs in (widths, batches, examples, images):
        assert costs == sorted(costs)
        assert costs[0] < costs[-1]
