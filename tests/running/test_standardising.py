"""By whose mean and spread examples are standardised, against NumPy; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import toys
from fedstill import from_tensors
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError
from fedstill.data.dataset import Dataset, DatasetInfo
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.standardisation import NO_SPREAD, column_moments

pytestmark = pytest.mark.usefixtures("with_threads")


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(5.0, 3.0, shape)


def table(marks: tuple[int, ...] = (), missing: bool = False) -> Dataset:
    """Forty rows of four columns; the third is constant."""
    values, held = draw(40, 4), draw(10, 4, seed=1)
    values[:, 2] = held[:, 2] = 7.0
    pairs = [(torch.from_numpy(v), torch.arange(len(v)) % 2) for v in (values, held)]
    data = from_tensors("mine", *pairs, kind="table")
    if missing:
        data.train.values[3, 1] = float("nan")
        data.test.values[0, 1] = float("nan")
    return replace(
        data, about=DatasetInfo("table", features=("a", "b", "c", "d"), binary_features=marks)
    )


def ready(data: Dataset, stream: Any = None, **said: Any) -> Prepared:
    values = {
        "topology": {"clients": 2},
        "partition": "iid",
        "model": "logistic",
        "stream": stream or {},
    }
    return prepare(resolve(toys.toy(**{**values, "rounds": 2, "data": said})), data)


def test_all_clients_training_rows_together_are_the_default_of_a_table() -> None:
    data, run = table(), ready(table())
    x = data.train.values.double().numpy()
    mean, std = x.mean(0), np.where(x.std(0) == 0, NO_SPREAD, x.std(0))
    assert np.allclose(run.sites.inputs.mean, mean)
    assert np.allclose(run.sites.inputs.std, std)
    assert np.allclose(run.sites.train.values.numpy(), (x - mean) / std, atol=1e-6)
    assert run.sites.common_test is not None
    assert np.allclose(
        run.sites.common_test.values, (data.test.values.numpy() - mean) / std, atol=1e-5
    )
    assert any("become 0: c" in note for note in run.notes)


def test_small_numbers_are_standardised_as_large_ones_are() -> None:
    draw = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    values = (2 + draw) * torch.tensor([1e-12, 1e-30, 1e9])
    own, plain = column_moments(values), values.double()
    assert own.constant == ()
    assert own.std == pytest.approx(plain.std(0, correction=0).tolist(), rel=1e-6)
    assert column_moments(torch.full((50, 1), 1.7e9)).constant == (0,)
    assert column_moments(torch.zeros(50, 1)).constant == (0,)


def test_a_constant_column_is_0_whatever_it_holds_in_the_test_set() -> None:
    data = table()
    data.train.values[:, 2] = 1.7e9 + torch.arange(40) * 75
    data.test.values[:, 2] = 905.0
    for said in ({}, {"standardise": "summed"}, {"standardise": "own"}):
        run = ready(data, **said)
        assert bool((run.sites.train.values[:, 2] == 0).all())
        for test in [run.sites.common_test, *run.sites.own_tests.values()]:
            assert test is None or bool((test.values[:, 2] == 0).all())
    assert [note for note in run.notes if "constant" in note] == [
        f"columns that are constant to six digits at client {client} become 0: c"
        for client in (0, 1)
    ]


def test_a_test_row_changes_no_statistic() -> None:
    other = table()
    other.test.values.mul_(100)
    assert ready(other).sites.inputs.mean == ready(table()).sites.inputs.mean


def test_marks_stay_as_they_are_and_what_is_missing_becomes_the_mean() -> None:
    run = ready(table(marks=(3,), missing=True), missing="mean")
    assert (run.sites.inputs.mean[3], run.sites.inputs.std[3]) == (0.0, 1.0)
    known = np.delete(table().train.values.double().numpy()[:, 1], 3)
    assert run.sites.inputs.mean[1] == pytest.approx(known.mean())
    assert run.sites.train.values[3, 1] == 0
    assert run.sites.common_test is not None
    assert run.sites.common_test.values[0, 1] == 0


def test_sums_that_clients_send_give_what_all_rows_give() -> None:
    sent, pooled = (ready(table(), **said).sites.inputs for said in ({"standardise": "summed"}, {}))
    assert sent.mean == pytest.approx(pooled.mean, rel=1e-9)
    assert sent.std == pytest.approx(pooled.std, rel=1e-9)


@pytest.mark.parametrize("origin", ["pooled", "summed", "own"])
def test_over_tasks_a_simulation_says_that_it_looks_at_those_to_come(origin: str) -> None:
    tasks = {"kind": "classes", "tasks": 2}
    over, alone = (ready(table(), stream=stream, standardise=origin) for stream in (tasks, None))
    assert over.sites.inputs.mean == pytest.approx(alone.sites.inputs.mean)
    declared = ready(table(), stream=tasks, mean=(5.0,) * 4, std=(3.0,) * 4)
    warned = [
        any("data.mean" in note and "data.std" in note for note in run.notes)
        for run in (over, alone, declared)
    ]
    assert warned == [True, False, False]


def test_series_have_a_mean_and_a_spread_by_channel() -> None:
    x = draw(40, 2, 6)
    pairs = [(torch.from_numpy(v), torch.arange(len(v)) % 2) for v in (x, draw(10, 2, 6, seed=1))]
    run = ready(from_tensors("mine", *pairs))
    assert np.allclose(run.sites.inputs.mean, x.astype(np.float32).mean((0, 2)))
    assert np.allclose(run.sites.train.values.double().numpy().mean((0, 2)), 0, atol=1e-6)
    assert np.allclose(run.sites.train.values.double().numpy().std((0, 2)), 1, atol=1e-6)


def test_each_client_by_its_own_has_no_common_test() -> None:
    run = ready(table(), standardise="own")
    assert run.sites.common_test is None
    for client in range(2):
        own = run.sites.train.values[run.sites.positions(client)].double().numpy()
        assert np.allclose(own.mean(0), 0, atol=1e-6)


def test_declared_numbers_and_the_public_sets() -> None:
    run = ready(table(), mean=(1.0, 2.0, 3.0, 4.0), std=(1.0, 2.0, 1.0, 0.5))
    assert run.sites.inputs.mean == (1.0, 2.0, 3.0, 4.0)
    run = ready(table(), standardise="server", public=10)
    assert run.sites.public is not None
    assert np.allclose(run.sites.public.values.double().numpy()[:, 0].mean(), 0, atol=1e-6)
    vectors = replace(table(), about=DatasetInfo("vector"))
    assert ready(vectors).sites.inputs.mean == (), "vectors are left as they are"


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"standardise": "declared"}, "needs data.mean and data.std"),
        ({"standardise": "server"}, "needs a public set: set data.public"),
        ({"mean": (1.0,) * 4}, "data.mean and data.std belong together"),
        (
            {"mean": (1.0,), "std": (1.0,)},
            "data.mean has 1 numbers and data.std 1, but mine has 4 columns",
        ),
        (
            {"augment": ("crop",)},
            r"data.augment = \['crop'\] is for images as pixels; mine holds rows of a table",
        ),
        ({"public_resize": True}, "data.public_resize"),
        (
            {"standardise": "own", "mean": (1.0,) * 4, "std": (1.0,) * 4},
            "data.std have no effect with data.standardise = 'own'",
        ),
        ({"standardise": "none", "missing": "mean"}, "data.missing = 'mean' needs a mean"),
        (
            {"mean": (0.0,) * 4, "std": (1.0, 1.0, 1e-9, 1.0)},
            r"data.std = 1e-09 of c: a training value is 7.0e\+09 standard deviations away",
        ),
        (
            {"mean": (0.0,) * 4, "std": (1.0, 1e-320, 1.0, 1.0)},
            "is inf standard deviations away from data.mean = 0",
        ),
    ],
)
def test_what_cannot_standardise_is_refused_in_one_line(said: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        ready(table(missing=True), **said)


def test_a_network_of_images_is_refused_with_one_that_fits() -> None:
    with pytest.raises(
        ConfigError,
        match=r"model 'cnn' .*'mlp'",
    ):
        prepare(resolve(toys.toy(model="cnn", topology={"clients": 2})), table())
    texts = [(torch.ones(20, 5).int(), torch.arange(20) % 2)] * 2
    with pytest.raises(ConfigError, match=r"model 'mlp' .* texts"):
        prepare(
            resolve(toys.toy(model="mlp", topology={"clients": 2})),
            from_tensors("t", *texts, vocabulary=9),
        )
    with pytest.raises(ConfigError, match=r"data\.mean and data\.std"):
        ready(from_tensors("t", *texts, vocabulary=9), mean=(0.5,), std=(0.5,))
