"""Sums with noise: rows are clipped, the moments are those of clipped values, and the cost is
accounted for.
"""

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

WORK = NoisedSums(
    shape=(3,), fixed=(1,), places=(0, 2), low=(0.0, -2.0), high=(100.0, 2.0), clip=5.0
)
"""Three columns, of which the second is binary."""

EXTREME = torch.tensor([[1e9, 0.0, -1e9]])
"""A row beyond the limits of both columns."""


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e3, 1e30])
def test_a_row_is_never_longer_than_the_clipping(scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    for missing_share in (0.0, 0.5, 1.0):
        values = scale * torch.randn(50, 3, generator=draw)
        values[torch.rand(50, 3, generator=draw) < missing_share] = torch.nan
        rows = WORK.sent(values).tensor(SUMS_GROUP)
        assert rows.shape == WORK.expected.tensor(SUMS_GROUP).shape == (2, 2)
        assert float(rows.norm(dim=1).max()) <= WORK.clip * (1 + 1e-12)


def test_the_longest_row_is_as_long_as_the_clipping() -> None:
    rows = WORK.sent(EXTREME).tensor(SUMS_GROUP)
    torch.testing.assert_close(rows.norm(dim=1), torch.full((2,), WORK.clip, dtype=torch.float64))


def test_without_noise_the_moments_are_those_of_the_clipped_values() -> None:
    draw = np.random.default_rng(0)
    values = draw.normal((60, 0.5, 0), (30, 1, 1.5), (70, 3))
    first = Reply(0, WORK.sent(torch.from_numpy(values[:20])), 20)
    second = Reply(1, WORK.sent(torch.from_numpy(values[20:])), 50)
    moments = WORK.moments([first, second])

    first_column = values[:, 0].clip(0, 100)
    third_column = values[:, 2].clip(-2, 2)
    assert moments.mean[0] == pytest.approx(first_column.mean(), rel=1e-10)
    assert moments.std[0] == pytest.approx(first_column.std(), rel=1e-10)
    assert moments.mean[2] == pytest.approx(third_column.mean(), rel=1e-10)
    assert moments.std[2] == pytest.approx(third_column.std(), rel=1e-10)
    assert (moments.mean[1], moments.std[1]) == (0.0, 1.0), "a binary column is not changed"


def test_with_any_noise_the_mean_is_within_the_limits_and_the_spread_is_not_zero() -> None:
    privacy = Privacy(clip=WORK.clip, noise=100.0)
    for seed in range(20):
        sums = privacy.protect(WORK.sent(torch.zeros(4, 3)), seed)
        moments = WORK.moments([Reply(0, sums, 4)])
        assert 0 <= moments.mean[0] <= 100
        assert 50 * LEAST_SPREAD <= moments.std[0] <= 50


def test_noise_has_the_spread_that_is_accounted_for() -> None:
    columns = 4000
    wide = replace(
        WORK,
        shape=(columns,),
        places=tuple(range(columns)),
        low=(0.0,) * columns,
        high=(1.0,) * columns,
    )
    sums = wide.sent(torch.zeros(1, columns))
    noised_sums = Privacy(clip=wide.clip, noise=0.5).protect(sums, None)
    noise = noised_sums.tensor(SUMS_GROUP) - sums.tensor(SUMS_GROUP)
    assert float(noise.std()) == pytest.approx(0.5 * wide.clip, rel=0.05)


def reply(examples: int = 20, **groups: torch.Tensor) -> Reply:
    """A reply of client 0 with these groups."""
    return Reply(
        client=0, content=Payload(**groups), examples=examples, metrics={}, round=0, stage=1
    )


def test_sums_that_noise_can_produce_are_accepted() -> None:
    noisy = replace(WORK, noise=8.0)
    sums = noisy.sent(torch.zeros(4, 3))
    privacy = Privacy(clip=noisy.clip, noise=8.0)
    for seed in range(50):
        assert noisy.refuses(reply(**privacy.protect(sums, seed))) == ""
    assert WORK.refuses(reply(**WORK.sent(EXTREME))) == "", "without noise, a row of full length"


def test_sums_that_noise_cannot_produce_are_refused() -> None:
    """A number near the largest one would be an infinite mean over all clients."""
    noisy = replace(WORK, noise=8.0)
    sums = noisy.sent(torch.zeros(4, 3)).tensor(SUMS_GROUP).clone()
    sums[1, 0] = 1.7e308
    assert "at most 1.61e+03" in noisy.refuses(reply(noised_sums=sums))

    too_long = torch.full((2, 2), 5.1, dtype=torch.float64)
    assert "are at most 5" in WORK.refuses(reply(noised_sums=too_long))


def test_sums_of_a_table_with_binary_columns_only_are_empty_and_not_refused() -> None:
    work = NoisedSums(shape=(3,), fixed=(0, 1, 2), places=(), low=(), high=(), clip=5.0)
    rows = work.sent(torch.ones(4, 3))
    assert rows.tensor(SUMS_GROUP).shape == (0, 2)
    assert work.refuses(reply(**rows)) == ""


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
    sums = {
        "count": torch.tensor([count], dtype=torch.float64),
        "total": torch.tensor([total], dtype=torch.float64),
        "squares": torch.tensor([squares], dtype=torch.float64),
    }
    assert "no values can have the sums" in SumsWork((1,)).refuses(reply(**sums))


@pytest.mark.parametrize(
    "values", [[3.0] * 7, [0.0], [1e-200, 2e-200], [1e150, -1e150], [float("nan")] * 2]
)
def test_the_sums_of_any_numbers_are_accepted(values: list[float]) -> None:
    work = SumsWork((1,))
    column = torch.tensor(values, dtype=torch.float64)[:, None]
    assert work.refuses(reply(len(values), **work.sent(column))) == ""


def test_plain_sums_have_no_rows_to_account_for() -> None:
    assert SumsWork((3,)).rows == 0
    assert WORK.rows == 2


PRIVACY = {"clip": 2.0, "noise": 8.0}


def table() -> Dataset:
    """Two columns of two clients."""
    draw = torch.Generator().manual_seed(0)

    def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(count, 2, generator=draw), torch.arange(count) % 2

    first = (rows(30), rows(10))
    second = (rows(30), rows(10))
    data = from_clients("pairs", [first, second], kind="table", classes=["a", "b"])
    return replace(data, about=replace(data.about, columns=("x", "y"), features=("x", "y")))


def experiment(**data: Any) -> Experiment:
    """Two rounds of the two clients on seven public rows, with sums under noise."""
    return Experiment(
        method={"name": "hiper_fedkd"},
        model={"name": "logistic"},
        rounds=2,
        plan={"epochs": 1},
        data={"standardise": "summed", "public": 7, "public_from": "noise", **data},
        privacy=PRIVACY,
        measure=(),
    )


def test_a_simulation_accounts_for_sums_from_the_first_round_on(tmp_path: Path) -> None:
    """A client sends two rows of sums once, and seven rows of logits in every round."""
    run(experiment(limits={"x": [-3, 3], "y": [-3.0, 3.0]}), tmp_path / "run", table())
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    accounts = [event["privacy"] for event in events if event["event"] == "round"]
    assert len(accounts) == 2
    for round_index, account in enumerate(accounts, 1):
        epsilon = Privacy(**PRIVACY).spent(2 + 7 * round_index)
        assert account["epsilon"] == [epsilon, epsilon]
        assert account["covers"] == "logits and sums"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "limits .*'x'"),
        ({"limits": {"x": [0, 1]}}, "limits .*'y'"),
        (
            {"limits": {"z": [0, 1]}},
            "names 'z', which is not among the standardised columns: x, y",
        ),
        (
            {"limits": {"x": [1, 0], "y": [0, 1]}},
            "'x' has limits 1 and 0; write the lower one first",
        ),
        ({"limits": {"x": [1], "y": [0, 1]}}, "data.limits"),
    ],
    ids=["none", "one", "another column", "exchanged", "one number"],
)
def test_faulty_limits_are_refused(data: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        run(experiment(**data), tmp_path / "run", table())
    assert "\n" not in str(raised.value)
