"""The split of a file, by its name and the folders above it."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from fedstill.core.errors import DataError
from fedstill.data.dataset import Dataset
from fedstill.data.sources import load_dataset
from fedstill.data.sources.files import (
    client_name,
    image_files_by_split,
    split_of_name,
    table_files_by_split,
)

pytestmark = pytest.mark.usefixtures("place")


def csv(name: str, rows: int = 20) -> None:
    """Write a CSV file of rows with a number and a label."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{row}.5,{row % 2}" for row in range(rows)]
    path.write_text("\n".join(["x,label", *lines]) + "\n")


def images(folder: str, count: int = 5) -> None:
    """Write images of one shade each, whose names begin with the name of a split."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        Image.new("L", (4, 4), index).save(place / f"train-{index}.png")


def sizes(data: Dataset) -> tuple[int, int]:
    """The numbers of training and test examples."""
    return len(data.train), len(data.test)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("heart_train.csv", "heart_test.csv"),
        ("Heart TRAINING2.csv", "Heart Eval.csv"),
        ("train.csv", "Test.csv"),
        ("2020.training.csv", "2020.testing.csv"),
        ("Train/a.csv", "TEST/a.csv"),
        ("x/training/2020/a.csv", "x/evaluation/2020/a.csv"),
        ("train-00000-of-00001.csv", "test-00000-of-00001.csv"),
        ("attest_train.csv", "attest_test.csv"),
    ],
)
def test_names_of_files_and_folders_name_splits(train: str, test: str) -> None:
    csv(f"d/{train}", 30)
    csv(f"d/{test}", 8)
    assert sizes(load_dataset("d")) == (30, 8)


def test_a_validation_split_is_none_to_train_on() -> None:
    for name, rows in (("my_train", 30), ("my_dev", 10), ("my_test", 8)):
        csv(f"d/{name}.csv", rows)
    data = load_dataset("d")
    assert sizes(data) == (30, 8)
    assert data.validation is not None
    assert len(data.validation) == 10


def test_the_folder_of_the_data_set_names_no_split() -> None:
    csv("test/a.csv")
    assert sizes(load_dataset("test")) == (16, 4)


def test_a_name_without_a_split_beside_one_with_a_split_is_refused() -> None:
    csv("d/heart_train.csv")
    csv("d/heart_extra.csv")
    with pytest.raises(DataError, match=r"heart_extra\.csv"):
        load_dataset("d")


def test_a_name_of_two_splits_is_refused() -> None:
    csv("d/train_test.csv")
    with pytest.raises(DataError, match=r"train_test\.csv"):
        load_dataset("d")


def test_shards_of_an_unknown_split_are_left_out_with_a_warning() -> None:
    csv("d/train-00000-of-00001.csv", 30)
    csv("d/test-00000-of-00001.csv", 8)
    csv("d/unsupervised-00000-of-00001.csv", 99)
    data = load_dataset("d")
    assert sizes(data) == (30, 8)
    assert any("unsupervised-00000-of-00001.csv" in warning for warning in data.about.warnings)


def test_shards_of_one_unknown_name_are_all_the_data() -> None:
    for shard in range(2):
        csv(f"d/data-{shard:05}-of-00002.csv")
    assert sizes(load_dataset("d")) == (32, 8)


@pytest.mark.parametrize("hospital", ["training hospital", "val-dor", "Testhaus St. Test", "eval2"])
def test_a_longer_folder_name_is_no_split(hospital: str) -> None:
    for folder in (hospital, "north", "south"):
        for kind in ("cat", "dog"):
            images(f"d/{folder}/{kind}")
    data = load_dataset("d")
    assert sum(sizes(data)) == 30
    assert any(hospital in warning for warning in data.about.warnings)

    for folder in (hospital, "north"):
        csv(f"tables/{folder}/a.csv")
    tables = load_dataset("tables")
    assert sum(sizes(tables)) == 40
    assert any(hospital in warning for warning in tables.about.warnings)


def test_images_outside_of_the_splits_are_left_out_with_a_warning() -> None:
    for kind in ("cat", "dog"):
        images(f"d/Train/{kind}", 6)
        images(f"d/test/{kind}", 3)
        images(f"d/unlabelled/{kind}", 7)
    data = load_dataset("d")
    assert sizes(data) == (12, 6)
    assert any("14 images in unlabelled" in warning for warning in data.about.warnings)


def test_a_class_may_be_named_as_a_split_is() -> None:
    for kind in ("test", "control"):
        images(f"d/{kind}", 10)
    data = load_dataset("d")
    assert data.classes == ("control", "test")
    assert sizes(data) == (16, 4)


def test_the_split_of_a_folder_is_its_whole_name() -> None:
    assert [split_of_name(name) for name in ("Valid", " test ", "test 2", "")] == [
        "validation",
        "test",
        "",
        "",
    ]


def test_files_keep_their_order() -> None:
    place = Path("d")
    tables = [place / name for name in ("a_test.csv", "a_train.csv", "b_train.csv")]
    parts = table_files_by_split(place, tables).parts
    assert list(parts) == ["train", "test"]
    assert parts["train"] == tuple(tables[1:])
    assert parts["test"] == (tables[0],)

    pictures = [place / "b" / "2.png", place / "a" / "1.png"]
    assert image_files_by_split(place, pictures).parts == {"train": tuple(pictures)}


@pytest.mark.parametrize(
    ("path", "client"),
    [
        ("north_train.csv", "north"),
        ("Test/north.csv", "north"),
        ("north/train.csv", "north"),
        ("st-anna/train-00000-of-00002.parquet", "st-anna"),
        ("region/north.csv", "region/north"),
        ("site1_train.csv", "site1"),
        ("site2train.csv", "site2"),
        ("1_train.csv", "1"),
        ("train_2024_north.csv", "2024_north"),
    ],
)
def test_the_client_of_a_table(path: str, client: str) -> None:
    assert client_name(Path("d"), Path("d") / path, class_folders=False) == client


def test_the_client_of_an_image() -> None:
    for path in ("north/cat/1.png", "train/north/cat/1.png"):
        assert client_name(Path("d"), Path("d") / path, class_folders=True) == "north"
    with pytest.raises(DataError, match=r"cat/1\.png"):
        client_name(Path("d"), Path("d/train/cat/1.png"), class_folders=True)
