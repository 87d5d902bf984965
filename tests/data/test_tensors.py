"""Data sets of tensors: held-out tests, images with their channels last, labels that are no ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedstill.core.errors import DataError
from fedstill.data.sources import from_clients, from_tensors, load_dataset

N = 90
LABELS = np.arange(N) % 3


def images(*shape: int, dtype: str = "uint8") -> np.ndarray[Any, Any]:
    """Random images of one shape, in bytes or from 0 to 1."""
    draw = np.random.default_rng(0)
    if dtype == "uint8":
        return draw.integers(0, 255, (N, *shape)).astype("uint8")
    return draw.random((N, *shape)).astype(dtype)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
@pytest.mark.parametrize(
    "shape", [(64, 48, 4), (12, 12, 3), (64, 48, 3), (64, 512, 3), (28, 28, 1), (512, 64, 3)]
)
def test_channels_last_are_refused_with_the_transposition(
    shape: tuple[int, ...], dtype: str
) -> None:
    values = images(*shape, dtype=dtype)
    with pytest.raises(DataError, match=r"mine, train.*transpose\(0, 3, 1, 2\)"):
        from_tensors("mine", (values, LABELS))
    right = torch.from_numpy(values).permute(0, 3, 1, 2)
    with pytest.raises(DataError, match=r"mine, test.*permute\(0, 3, 1, 2\)"):
        from_tensors("mine", (right, LABELS), (torch.from_numpy(values), LABELS))
    data = from_tensors("mine", (values.transpose(0, 3, 1, 2), LABELS))
    assert data.input_shape == (shape[2], *shape[:2])
    assert data.about.warnings == ()


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 3, 3), (512, 4, 4), (64, 1, 1), (1, 28, 28)])
def test_small_squares_are_maps_of_channels(shape: tuple[int, ...], dtype: str) -> None:
    data = from_tensors("mine", (images(*shape, dtype=dtype), LABELS))
    assert data.input_shape == shape
    assert data.about.warnings == ()


@pytest.mark.parametrize("shape", [(4, 64, 4), (3, 64, 3), (1, 28, 1), (64, 8, 4), (2, 64, 3)])
def test_channels_that_may_be_first_or_last_are_a_warning(shape: tuple[int, ...]) -> None:
    data = from_tensors("mine", (images(*shape), LABELS))
    assert data.input_shape == shape
    (warning,) = data.about.warnings
    assert "transpose(0, 3, 1, 2)" in warning


def test_whole_labels_of_another_type_are_cast_as_the_message_says() -> None:
    values = np.zeros((N, 2))
    labels = LABELS.astype("float32")
    with pytest.raises(DataError, match=r"astype.*long"):
        from_tensors("mine", (values, labels))
    assert len(from_tensors("mine", (values, labels.astype("int64"))).classes) == 3


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_fractions_are_no_labels_and_no_cast_is_suggested(kind: Any) -> None:
    labels = kind(np.linspace(0, 2.9, N))
    with pytest.raises(DataError, match="regression") as caught:
        from_tensors("mine", (np.zeros((N, 2)), labels))
    assert "astype" not in str(caught.value)
    assert "long()" not in str(caught.value)
    assert "example 1 " in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e39])
def test_a_value_that_is_not_finite_in_32_bits_is_named_by_its_example(value: float) -> None:
    values = np.zeros((N, 2))
    values[7, 1] = value
    with pytest.raises(DataError, match="mine, train: example 7 "):
        from_tensors("mine", (values, LABELS))


@pytest.mark.parametrize("unknown", [np.nan, np.inf])
def test_a_label_that_is_missing_is_named_by_its_example(unknown: float) -> None:
    labels = LABELS.astype("float64")
    labels[7] = unknown
    with pytest.raises(DataError, match="mine, train: example 7") as caught:
        from_tensors("mine", (np.zeros((N, 2)), labels))
    assert "astype" not in str(caught.value)
    labels[8] = 0.5
    with pytest.raises(DataError, match="regression"):
        from_tensors("mine", (np.zeros((N, 2)), labels))


def test_fractions_of_one_client_name_the_client() -> None:
    values = np.zeros((N, 2))
    pairs = [(values, LABELS), (values, LABELS + 0.5)]
    with pytest.raises(DataError, match=r"mine, client south.*regression"):
        from_clients("mine", pairs, names=["north", "south"])


@pytest.mark.parametrize(
    ("labels", "remedy"),
    [
        (LABELS[:, None], r"reshape\(-1\)"),
        (np.eye(3)[LABELS], r"argmax\(1\)"),
        (LABELS * 1j, "mine, train: labels"),
    ],
)
def test_labels_of_another_shape_or_type_have_a_remedy(labels: Any, remedy: str) -> None:
    with pytest.raises(DataError, match=remedy):
        from_tensors("mine", (np.zeros((N, 2)), labels))


def test_without_a_test_set_the_same_fifth_is_held_out_as_of_a_file(tmp_path: Any) -> None:
    values = images(3, 8, 8)
    data = from_tensors("mine", (values, LABELS))
    assert (len(data.train), len(data.test)) == (72, 18)
    assert data.test.labels.bincount().tolist() == [6, 6, 6]
    again = from_tensors("mine", (torch.from_numpy(values), torch.from_numpy(LABELS)))
    assert torch.equal(again.test.values, data.test.values)
    np.savez(tmp_path / "mine.npz", train_images=values.transpose(0, 2, 3, 1), train_labels=LABELS)
    stored = load_dataset(tmp_path / "mine.npz")
    assert torch.equal(stored.test.values, data.test.values)
    assert torch.equal(stored.train.labels, data.train.labels)


def test_too_few_examples_to_hold_any_out_are_refused() -> None:
    with pytest.raises(DataError, match="mine has no test split"):
        from_tensors("mine", (np.zeros((3, 2)), np.arange(3)))


def test_clients_without_test_sets_are_tested_on_what_is_held_out_of_them() -> None:
    draw = np.random.default_rng(0)
    pairs = [(draw.random((size, 2)), np.arange(size) % 3) for size in (30, 60)]
    data = from_clients("mine", pairs, names=["north", "south"])
    assert data.train.owners is not None
    assert data.test.owners is not None
    assert len(data.train) == 72
    assert len(data.test) == 18
    counts = data.train.owners.bincount() + data.test.owners.bincount()
    assert counts.tolist() == [30, 60]
    for owner, (values, _) in enumerate(pairs):
        held_out = data.test.values[data.test.owners == owner].numpy()
        rows = {tuple(row) for row in values.astype("float32").tolist()}
        assert {tuple(row) for row in held_out.tolist()} <= rows


def test_a_common_test_set_beside_own_ones_is_a_warning() -> None:
    pair = np.zeros((N, 2)), LABELS
    data = from_clients("mine", [(pair, pair), pair], test=pair)
    assert data.test.owners is None
    (warning,) = data.about.warnings
    assert "test=" in warning
    assert from_clients("mine", [pair, pair], test=pair).about.warnings == ()
