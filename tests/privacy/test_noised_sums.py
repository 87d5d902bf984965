"""Sums with noise: the bound of what a client sends, what it comes to, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstill.config.experiment import Experiment
from fedstill.core.errors import ConfigError
from fedstill.core.records import Payload, Reply
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_clients
from fedstill.privacy.extensions import LEAST_SPREAD, NoisedSums
from fedstill.privacy.noise import SUMS_GROUP, Privacy
from fedstill.running.journal import read_journal
from fedstill.running.runner import run
from fedstill.running.standardisation import SumsWork

WORK = NoisedSums((3,), (1,), (0, 2), (0.0, -2.0), (100.0, 2.0), 5.0)
"""Three columns, of which the second is of 0 and 1."""


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e3, 1e30])
def test_whatever_the_values_a_row_is_no_longer_than_the_clipping(scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    for share in (0.0, 0.5, 1.0):
        values = scale * torch.randn(50, 3, generator=draw)
        values[torch.rand(50, 3, generator=draw) < share] = torch.nan
        rows = WORK.sent(values).tensor(SUMS_GROUP)
        assert rows.shape == WORK.expected.tensor(SUMS_GROUP).shape == (2, 2)
        assert float(rows.norm(dim=1).max()) <= WORK.clip * (1 + 1e-12)


def test_the_longest_row_is_as_long_as_the_clipping() -> None:
    rows = WORK.sent(torch.tensor([[1e9, 0.0, -1e9]])).tensor(SUMS_GROUP)
    torch.testing.assert_close(rows.norm(dim=1), torch.full((2,), WORK.clip, dtype=torch.float64))


def test_without_noise_they_are_the_moments_of_the_clipped_values() -> None:
    draw = np.random.default_rng(0)
    each = [draw.normal((60, 0.5, 0), (30, 1, 1.5), (size, 3)) for size in (20, 50)]
    replies = [
        Reply(client, WORK.sent(torch.from_numpy(own)), len(own)) for client, own in enumerate(each)
    ]
    got, every = WORK.moments(replies), np.concatenate(each)
    clipped = np.stack([every[:, 0].clip(0, 100), every[:, 2].clip(-2, 2)], 1)
    np.testing.assert_allclose(np.array(got.mean)[[0, 2]], clipped.mean(0), rtol=1e-10)
    np.testing.assert_allclose(np.array(got.std)[[0, 2]], clipped.std(0), rtol=1e-10)
    assert (got.mean[1], got.std[1]) == (0.0, 1.0)


def test_noise_leaves_a_mean_within_the_limits_and_a_spread_that_can_be_divided_by() -> None:
    wild = Privacy(clip=WORK.clip, noise=100.0)
    for seed in range(20):
        got = WORK.moments([Reply(0, wild.protect(WORK.sent(torch.zeros(4, 3)), seed), 4)])
        assert 0 <= got.mean[0] <= 100
        assert 50 * LEAST_SPREAD <= got.std[0] <= 50


def test_noise_has_the_spread_that_is_accounted_for() -> None:
    wide = replace(
        WORK, shape=(4000,), places=tuple(range(4000)), low=(0.0,) * 4000, high=(1.0,) * 4000
    )
    values = torch.zeros(1, 4000)
    clean = wide.sent(values).tensor(SUMS_GROUP)
    noised = Privacy(clip=wide.clip, noise=0.5).protect(wide.sent(values), None).tensor(SUMS_GROUP)
    assert float((noised - clean).std()) == pytest.approx(0.5 * wide.clip, rel=0.05)


def reply(work: SumsWork, examples: int = 20, **groups: torch.Tensor) -> Reply:
    return Reply(0, Payload(**groups), examples, {}, 0, 1)


def test_sums_that_noise_cannot_give_are_refused_and_those_that_it_gives_are_not() -> None:
    """One number near the largest there is would make a mean of all clients that is none."""
    noisy = replace(WORK, noise=8.0)
    own = noisy.sent(torch.zeros(4, 3))
    for seed in range(50):
        up = Privacy(clip=noisy.clip, noise=8.0).protect(own, seed)
        assert noisy.refuses(reply(noisy, **up)) == ""
    far = own.tensor(SUMS_GROUP).clone()
    far[1, 0] = 1.7e308
    assert "at most 1.61e+03" in noisy.refuses(reply(noisy, noised_sums=far))
    assert WORK.refuses(reply(WORK, **WORK.sent(torch.tensor([[1e9, 0.0, -1e9]])))) == ""
    assert "are at most 5" in WORK.refuses(
        reply(WORK, noised_sums=torch.full((2, 2), 5.1, dtype=torch.float64))
    )


def test_sums_of_a_table_with_binary_columns_only_are_empty_and_not_refused() -> None:
    work = NoisedSums((3,), (0, 1, 2), (), (), (), 5.0)
    rows = work.sent(torch.ones(4, 3))
    assert rows.tensor(SUMS_GROUP).shape == (0, 2)
    assert work.refuses(reply(work, **rows)) == ""


@pytest.mark.parametrize(
    ("count", "total", "squares"),
    [
        (20.0, 1.7e308, 1.7e308),
        (20.0, 30.0, 10.0),
        (0.0, 0.0, 1.0),
        (20.0, 0.0, -1.0),
        (0.0, 1.0, 0.0),
    ],
)
def test_plain_sums_that_no_numbers_have_are_refused(
    count: float, total: float, squares: float
) -> None:
    work = SumsWork((1,))
    sums = dict(
        zip(
            ("count", "total", "squares"),
            torch.tensor([[count], [total], [squares]], dtype=torch.float64),
            strict=True,
        )
    )
    assert "no values can have the sums" in work.refuses(reply(work, **sums))


@pytest.mark.parametrize(
    "values", [[3.0] * 7, [0.0], [1e-200, 2e-200], [1e150, -1e150], [float("nan")] * 2]
)
def test_the_sums_of_any_numbers_are_accepted(values: list[float]) -> None:
    work = SumsWork((1,))
    assert (
        work.refuses(
            reply(
                work, len(values), **work.sent(torch.tensor(values, dtype=torch.float64)[:, None])
            )
        )
        == ""
    )


def test_plain_sums_have_no_rows_to_account_for() -> None:
    assert (SumsWork((3,)).rows, WORK.rows) == (0, 2)


CLIP = {"clip": 2.0, "noise": 8.0}


def table() -> Dataset:
    """Two columns of two clients."""
    draw = torch.Generator().manual_seed(0)

    def some(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(n, 2, generator=draw), torch.arange(n) % 2

    data = from_clients(
        "pairs", [(some(30), some(10)), (some(30), some(10))], kind="table", classes=["a", "b"]
    )
    return replace(data, about=replace(data.about, columns=("x", "y"), features=("x", "y")))


def experiment(**data: Any) -> Experiment:
    return Experiment(
        method={"name": "hiper_fedkd"},
        model={"name": "logistic"},
        rounds=2,
        plan={"epochs": 1},
        data={"standardise": "summed", "public": 7, "public_from": "noise", **data},
        privacy=CLIP,
        measure=(),
    )


def test_a_simulation_counts_what_sums_cost_from_the_first_round_on(tmp_path: Path) -> None:
    run(experiment(limits={"x": [-3, 3], "y": [-3.0, 3.0]}), tmp_path / "run", table())
    told = [
        e["privacy"]
        for e in read_journal(tmp_path / "run" / "journal.jsonl")
        if e["event"] == "round"
    ]
    assert [one["epsilon"] for one in told] == [
        [Privacy(**CLIP).spent(2 + 7 * k)] * 2 for k in (1, 2)
    ]
    assert {one["covers"] for one in told} == {"logits and sums"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "limits .*'x'"),
    "one": ({"limits": {"x": [0, 1]}}, "limits .*'y'"),
    "another column": (
        {"limits": {"z": [0, 1]}},
        "names 'z', which is not among the standardised columns: x, y",
    ),
    "turned round": (
        {"limits": {"x": [1, 0], "y": [0, 1]}},
        "'x' has limits 1 and 0; write the lower one first",
    ),
    "one number": ({"limits": {"x": [1], "y": [0, 1]}}, "data.limits"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_limits_that_bound_nothing_are_refused(what: str, tmp_path: Path) -> None:
    data, line = REFUSED[what]
    with pytest.raises(ConfigError, match=line) as raised:
        run(experiment(**data), tmp_path / "run", table())
    assert "\n" not in str(raised.value)
