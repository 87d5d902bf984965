"""Whose mean and spread standardise the examples, compared with NumPy, and which configs are
refused.
"""

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
from fedstill.running.setting_warnings import setting_warnings
from fedstill.running.standardisation import NO_SPREAD, column_moments

pytestmark = pytest.mark.usefixtures("with_threads")


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers with mean 5 and standard deviation 3."""
    return np.random.default_rng(seed).normal(5.0, 3.0, shape)


def labelled(values: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The values as a tensor, and labels of two classes."""
    return torch.from_numpy(values), torch.arange(len(values)) % 2


def table(marks: tuple[int, ...] = (), missing: bool = False) -> Dataset:
    """Forty rows of four columns; the third is constant."""
    train_values = draw(40, 4)
    test_values = draw(10, 4, seed=1)
    train_values[:, 2] = 7.0
    test_values[:, 2] = 7.0
    data = from_tensors("mine", labelled(train_values), labelled(test_values), kind="table")
    if missing:
        data.train.values[3, 1] = float("nan")
        data.test.values[0, 1] = float("nan")
    about = DatasetInfo("table", features=("a", "b", "c", "d"), binary_features=marks)
    return replace(data, about=about)


def ready(data: Dataset, stream: Any = None, **data_table: Any) -> Prepared:
    """A prepared run of two clients with these keys in its table ``[data]``."""
    experiment = toys.toy(
        rounds=2,
        topology={"clients": 2},
        partition="iid",
        model="logistic",
        stream=stream or {},
        data=data_table,
    )
    return prepare(resolve(experiment), data)


def test_all_clients_training_rows_together_are_the_default_of_a_table() -> None:
    data = table()
    run = ready(table())
    rows = data.train.values.double().numpy()
    mean = rows.mean(0)
    std = rows.std(0)
    std[std == 0] = NO_SPREAD

    assert np.allclose(run.sites.inputs.mean, mean)
    assert np.allclose(run.sites.inputs.std, std)
    assert np.allclose(run.sites.train.values.numpy(), (rows - mean) / std, atol=1e-6)
    assert run.sites.common_test is not None
    standardised_test = (data.test.values.numpy() - mean) / std
    assert np.allclose(run.sites.common_test.values, standardised_test, atol=1e-5)
    assert any("become 0: c" in note for note in run.notes)


def test_small_numbers_are_standardised_like_large_ones() -> None:
    noise = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    values = (2 + noise) * torch.tensor([1e-12, 1e-30, 1e9])
    moments = column_moments(values)

    assert moments.constant == ()

    std = values.double().std(0, correction=0)
    assert moments.std == pytest.approx(std.tolist(), rel=1e-6)
    assert column_moments(torch.full((50, 1), 1.7e9)).constant == (0,)
    assert column_moments(torch.zeros(50, 1)).constant == (0,)


@pytest.mark.parametrize("origin", ["pooled", "summed", "own"])
def test_a_constant_column_is_0_whatever_it_holds_in_the_test_set(origin: str) -> None:
    data = table()
    data.train.values[:, 2] = 1.7e9 + torch.arange(40) * 75
    data.test.values[:, 2] = 905.0
    run = ready(data, standardise=origin)

    assert bool((run.sites.train.values[:, 2] == 0).all())
    for test in (run.sites.common_test, *run.sites.own_tests.values()):
        assert test is None or bool((test.values[:, 2] == 0).all())

    if origin == "own":
        constant = "columns that are constant to six digits at client {} become 0: c"
        notes = [note for note in run.notes if "constant" in note]
        assert notes == [constant.format(0), constant.format(1)]


def test_a_test_row_changes_no_statistic() -> None:
    changed = table()
    changed.test.values.mul_(100)
    assert ready(changed).sites.inputs.mean == ready(table()).sites.inputs.mean


def test_marks_are_not_standardised_and_missing_values_become_the_mean() -> None:
    run = ready(table(marks=(3,), missing=True), missing="mean")
    assert run.sites.inputs.mean[3] == 0.0
    assert run.sites.inputs.std[3] == 1.0

    present = np.delete(table().train.values.double().numpy()[:, 1], 3)
    assert run.sites.inputs.mean[1] == pytest.approx(present.mean())
    assert run.sites.train.values[3, 1] == 0
    assert run.sites.common_test is not None
    assert run.sites.common_test.values[0, 1] == 0


def test_sums_that_clients_send_have_the_mean_and_the_spread_of_all_rows() -> None:
    summed = ready(table(), standardise="summed").sites.inputs
    pooled = ready(table()).sites.inputs
    assert summed.mean == pytest.approx(pooled.mean, rel=1e-9)
    assert summed.std == pytest.approx(pooled.std, rel=1e-9)


@pytest.mark.parametrize("origin", ["pooled", "summed", "own"])
def test_a_simulation_of_tasks_notes_that_its_statistics_use_the_data_of_later_tasks(
    origin: str,
) -> None:
    def has_note(run: Prepared) -> bool:
        return any("data.mean" in note and "data.std" in note for note in run.notes)

    tasks = {"kind": "classes", "tasks": 2}
    with_tasks = ready(table(), stream=tasks, standardise=origin)
    without_tasks = ready(table(), standardise=origin)
    declared = ready(table(), stream=tasks, mean=(5.0,) * 4, std=(3.0,) * 4)

    assert with_tasks.sites.inputs.mean == pytest.approx(without_tasks.sites.inputs.mean)
    assert has_note(with_tasks)
    assert not has_note(without_tasks)
    assert not has_note(declared)


def test_series_have_a_mean_and_a_spread_by_channel() -> None:
    series = draw(40, 2, 6)
    test_series = draw(10, 2, 6, seed=1)
    run = ready(from_tensors("mine", labelled(series), labelled(test_series)))

    assert np.allclose(run.sites.inputs.mean, series.astype(np.float32).mean((0, 2)))

    standardised = run.sites.train.values.double().numpy()
    assert np.allclose(standardised.mean((0, 2)), 0, atol=1e-6)
    assert np.allclose(standardised.std((0, 2)), 1, atol=1e-6)


def test_without_common_statistics_there_is_no_common_test() -> None:
    run = ready(table(), standardise="own")
    assert run.sites.common_test is None
    for client in range(2):
        rows = run.sites.train.values[run.sites.positions(client)].double().numpy()
        assert np.allclose(rows.mean(0), 0, atol=1e-6)
    (warning,) = setting_warnings(run)
    assert "partition.own_test" in warning


def test_statistics_may_be_declared_or_those_of_the_public_set() -> None:
    declared = ready(table(), mean=(1.0, 2.0, 3.0, 4.0), std=(1.0, 2.0, 1.0, 0.5))
    assert declared.sites.inputs.mean == (1.0, 2.0, 3.0, 4.0)

    by_server = ready(table(), standardise="server", public=10)
    assert by_server.sites.public is not None
    first_column = by_server.sites.public.values.double().numpy()[:, 0]
    assert np.allclose(first_column.mean(), 0, atol=1e-6)

    vectors = replace(table(), about=DatasetInfo("vector"))
    assert ready(vectors).sites.inputs.mean == (), "vectors are left as they are"


@pytest.mark.parametrize(
    ("data_table", "message"),
    [
        ({"standardise": "declared"}, "needs data.mean and data.std"),
        ({"standardise": "server"}, "needs a public set .*: set data.public"),
        ({"standardise": "server", "public": 5, "public_from": "noise"}, "data.public_from"),
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
def test_faulty_settings_of_statistics_are_refused(
    data_table: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ready(table(missing=True), **data_table)


def test_a_network_of_images_is_refused_with_one_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"model 'cnn' .*'mlp'"):
        prepare(resolve(toys.toy(model="cnn", topology={"clients": 2})), table())

    tokens = (torch.ones(20, 5).int(), torch.arange(20) % 2)
    texts = from_tensors("t", tokens, tokens, vocabulary=9)
    with pytest.raises(ConfigError, match=r"model 'mlp' .* texts"):
        prepare(resolve(toys.toy(model="mlp", topology={"clients": 2})), texts)
    with pytest.raises(ConfigError, match=r"data\.mean and data\.std"):
        ready(texts, mean=(0.5,), std=(0.5,))
