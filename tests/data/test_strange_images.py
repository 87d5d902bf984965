"""Images as people have them: channels first, other names in an archive, keys of tables, pixels as
floats, no pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedstill.core.errors import DataError
from fedstill.data.sources import from_clients, from_tensors, load_dataset

N = 20
LABELS = np.arange(N) % 2


pytestmark = pytest.mark.usefixtures("place")


def pixels(*shape: int) -> np.ndarray:
    """Random images of one shape."""
    return np.random.default_rng(0).integers(0, 256, (N, *shape), dtype=np.uint8)


@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        ((3, 8, 9), "first"),
        ((1, 8, 8), "first"),
        ((8, 9, 3), "last"),
        ((3, 3, 3), "last"),
        ((8, 8, 5), "last"),
        ((8, 9), "none"),
    ],
)
def test_an_archive_has_its_channels_first_or_last(shape: tuple[int, ...], channels: str) -> None:
    images = pixels(*shape)
    arrays = {f"{split}_images": images for split in ("train", "test")}
    np.savez("mine.npz", **arrays, train_labels=LABELS, test_labels=LABELS)
    expected = {
        "first": images,
        "last": np.moveaxis(images, -1, 1),
        "none": images[:, None],
    }

    data = load_dataset("mine.npz")

    assert data.input_shape == expected[channels].shape[1:]
    assert np.array_equal(data.train.values.numpy(), expected[channels])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"x_train": pixels(8, 8), "y_train": LABELS},
            "'train_images' .it has 'x_train', 'y_train'",
        ),
        (
            {"train_images": pixels(8, 8)},
            "'train_labels' .it has 'train_images'",
        ),
        (
            {"train_images": pixels(8, 8), "train_labels": np.eye(2)[LABELS]},
            r"train_labels.npy has shape \(20, 2\)",
        ),
        (
            {"train_images": pixels(8, 8), "train_labels": np.array(["cat", "dog"])[LABELS]},
            r"train_labels\.npy .*np\.unique\(labels, return_inverse=True\)",
        ),
    ],
)
def test_an_archive_of_other_arrays_is_told_which_it_needs(
    arrays: dict[str, Any], message: str
) -> None:
    np.savez("mine.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load_dataset("mine.npz")


def pictures(folder: Path, modes: tuple[str, str], sides: tuple[int, int]) -> None:
    """Square images of two classes in folders, whose modes and sides alternate."""
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(4):
            side = sides[number % 2]
            image = Image.new(modes[number % 2], (side, side), number)
            image.save(folder / name / f"{number}.png")


def test_images_that_differ_are_refused_with_the_difference(place: Path) -> None:
    pictures(place / "kinds", ("L", "RGB"), (8, 16))
    with pytest.raises(DataError, match=r"16×16 RGB, but the first is 16×16 grey"):
        load_dataset("kinds", size=16)
    with pytest.raises(DataError, match=r"data\.size = 8 .*data\.mode"):
        load_dataset("kinds")

    pictures(place / "sizes", ("L", "L"), (8, 16))
    with pytest.raises(DataError, match=r"data\.size = 8"):
        load_dataset("sizes")


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"columns": ("a",)}, "data.columns"),
        ({"kind": "table"}, "data.kind = 'table'"),
        ({"categorical": (("a", ()),)}, "data.categorical"),
        ({"input": "a"}, "data.input_column"),
    ],
)
def test_keys_of_tables_are_refused_of_images(
    fields: dict[str, Any], key: str, place: Path
) -> None:
    pictures(place / "mine", ("L", "L"), (8, 8))
    np.savez("mine.npz", train_images=pixels(8, 8), train_labels=LABELS)
    for name in ("mine", "mine.npz"):
        with pytest.raises(DataError, match=key):
            load_dataset(name, **fields)


def test_pixels_as_floats_of_another_scale_are_said() -> None:
    images = np.full((N, 1, 8, 8), 255.0)
    images[0] = 0
    pair = (images, LABELS)
    (warning,) = from_tensors("mine", pair, pair).about.warnings
    assert "from 0 to 255" in warning
    assert "-1 to 509" in warning
    assert from_tensors("mine", pair, pair, mean=[128.0], std=[64.0]).about.warnings == ()
    assert from_tensors("mine", (images / 255, LABELS), pair).about.warnings == ()


def test_names_from_numpy_are_classes() -> None:
    names, ids = np.unique(np.array(["no", "yes"])[LABELS], return_inverse=True)
    pair = (np.zeros((N, 2)), ids)
    assert from_tensors("mine", pair, pair, classes=names).classes == ("no", "yes")


def test_data_that_are_no_pair_are_refused_with_their_type() -> None:
    pair: Any = (torch.zeros(N, 2), torch.from_numpy(LABELS))
    wrong_data: dict[str, Any] = {"a dict": {}, "a Tensor": pair[0], "a tuple of 3": (*pair, 1)}
    request = r"pass a pair \(values, labels\), not"
    for name, wrong in wrong_data.items():
        with pytest.raises(DataError, match=f"mine, test: {request} {name}"):
            from_tensors("mine", pair, wrong)
        with pytest.raises(DataError, match=f"mine, client 1.*: {request} a"):
            from_clients("mine", [(pair, pair), wrong])


def saved_archive(path: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    """The path, with an archive of training data in it."""
    np.savez(path, train_images=images, train_labels=labels)
    return path


def test_an_intact_archive_with_labels_as_objects_is_not_called_damaged(tmp_path: Path) -> None:
    images = np.zeros((6, 8, 8), dtype=np.uint8)
    labels = np.array(["cat", "dog"] * 3, dtype=object)
    path = saved_archive(tmp_path / "pets.npz", images, labels)
    with pytest.raises(DataError, match=r"np\.unique") as caught:
        load_dataset(str(path))
    assert "damaged" not in str(caught.value)


def test_an_intact_archive_with_flat_images_is_not_called_damaged(tmp_path: Path) -> None:
    images = np.zeros((6, 64), dtype=np.uint8)
    path = saved_archive(tmp_path / "flat.npz", images, np.arange(6) % 2)
    with pytest.raises(DataError, match="reshape") as caught:
        load_dataset(str(path))
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "labels", "message"),
    [((6, 8, 8), 5, "6 images.* 5 labels"), ((6, 8, 8, 8, 1), 6, r"\(6, 8, 8, 8, 1\)")],
)
def test_an_intact_archive_of_unsuitable_arrays_is_not_called_damaged(
    shape: tuple[int, ...], labels: int, message: str, tmp_path: Path
) -> None:
    images = np.zeros(shape, dtype=np.uint8)
    path = saved_archive(tmp_path / "pets.npz", images, np.arange(labels) % 2)
    with pytest.raises(DataError, match=message) as caught:
        load_dataset(str(path))
    assert "damaged" not in str(caught.value)
