"""Reading options that do not apply to the data are refused, and the message names a key that is
set.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fedstill
from fedstill.core.errors import ConfigError, DataError
from fedstill.data.dataset import FILE
from fedstill.data.partition import column
from fedstill.data.sources import load_dataset

ROWS = 24
LABELS = [row % 2 for row in range(ROWS)]
NUMBERS = {"age": [float(row) for row in range(ROWS)], "label": LABELS}
TEXTS = {"note": [f"well number {row}" for row in range(ROWS)], "label": LABELS}
VECTORS = {"code": [[float(row), 1.0] for row in range(ROWS)], "label": LABELS}
SERIES = {"curve": [[[float(row)], [1.0]] for row in range(ROWS)], "label": LABELS}


def problem(columns: dict[str, list[Any]], /, **options: Any) -> str:
    """The message that refuses a frame of these columns with these options."""
    with pytest.raises(ConfigError) as caught:
        fedstill.from_python("mine", pd.DataFrame(columns), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        (NUMBERS, {"size": 8}),
        (NUMBERS, {"broken": "skip"}),
        (NUMBERS, {"tokenizer": "bytes"}),
        (NUMBERS, {"vocabulary": 99}),
        (NUMBERS, {"length": 5}),
        (VECTORS, {"length": 5}),
        (SERIES, {"tokenizer": "bytes"}),
        (TEXTS, {"size": 8}),
    ],
)
def test_an_option_for_data_of_another_kind_is_named(
    columns: dict[str, list[Any]], options: dict[str, Any]
) -> None:
    (key,) = options
    assert f"data.{key}" in problem(columns, **options)


def test_a_vocabulary_is_for_the_tokenizer_of_words() -> None:
    assert "data.vocabulary" in problem(TEXTS, tokenizer="bytes", vocabulary=99)


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        (NUMBERS, {"broken": "refuse", "tokenizer": "words", "vocabulary": 8192}),
        (TEXTS, {"vocabulary": 99, "length": 5}),
        (TEXTS, {"tokenizer": "bytes", "length": 5}),
        (SERIES, {"length": 1}),
    ],
)
def test_defaults_and_options_that_apply_are_accepted(
    columns: dict[str, list[Any]], options: dict[str, Any]
) -> None:
    data = fedstill.from_python("mine", pd.DataFrame(columns), **options)
    assert len(data.train) + len(data.test) == ROWS


def test_a_size_is_refused_for_arrays_of_pixels(tmp_path: Path) -> None:
    pixels = np.zeros((ROWS, 4, 4), np.uint8)
    np.savez(tmp_path / "mine.npz", train_images=pixels, train_labels=np.array(LABELS))
    with pytest.raises(DataError, match=r"data\.size"):
        load_dataset(tmp_path / "mine.npz", size=8)


@pytest.fixture(params=["folder", "archive"])
def images(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Images without columns, in folders by class or in an archive."""
    pixels = np.zeros((ROWS, 4, 4), np.uint8)
    if request.param == "archive":
        np.savez(tmp_path / "mine.npz", train_images=pixels, train_labels=np.array(LABELS))
        return tmp_path / "mine.npz"
    for row, label in enumerate(LABELS):
        folder = tmp_path / "mine" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[row]).save(folder / f"{row}.png")
    return tmp_path / "mine"


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"missing": "drop"}, "data.missing = 'drop'"),
        ({"marks": True}, "data.missing_marks"),
        ({"missing_values": [-1]}, "data.missing_values"),
        ({"decimal": ","}, "data.decimal"),
        ({"label_column": "label"}, "data.label_column"),
        ({"image_column": "image"}, "data.image_column"),
        ({"owner": "site"}, "no column 'site'"),
    ],
)
def test_options_of_columns_are_refused_for_images_without_columns(
    options: dict[str, Any], key: str, images: Path
) -> None:
    assert len(load_dataset(images).train)
    with pytest.raises(DataError, match=key):
        load_dataset(images, **options)


def test_files_are_no_clients_if_all_examples_are_in_one(tmp_path: Path) -> None:
    pixels = np.zeros((ROWS, 4, 4), np.uint8)
    np.savez(tmp_path / "mine.npz", train_images=pixels, train_labels=np.array(LABELS))
    with pytest.raises(DataError, match=r"partition\.column = '<file>'"):
        load_dataset(tmp_path / "mine.npz", owner=FILE)


def test_a_column_that_the_data_lack_is_named_by_the_partition() -> None:
    with pytest.raises(
        DataError, match=r"partition\.column = 'site', but the data have no clients"
    ):
        column([0, 1], clients=2, groups=None, column="site")


NOT_IMAGES = r"column 'age' holds .*data\.image_column"


def test_a_column_of_numbers_in_a_frame_is_no_column_of_images() -> None:
    with pytest.raises(DataError, match=NOT_IMAGES):
        fedstill.from_python("mine", pd.DataFrame(NUMBERS), image_column="age")


def test_a_column_of_numbers_in_a_file_is_no_column_of_images(tmp_path: Path) -> None:
    pd.DataFrame(NUMBERS).to_parquet(tmp_path / "mine.parquet")
    with pytest.raises(DataError, match=NOT_IMAGES):
        load_dataset(tmp_path / "mine.parquet", image_column="age")


def test_a_frame_may_hold_encoded_images_as_bytes() -> None:
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, "png")
    frame = pd.DataFrame({"scan": [file.getvalue()] * ROWS, "label": LABELS})
    assert fedstill.from_python("mine", frame, image_column="scan").input_shape == (1, 4, 4)


@pytest.mark.parametrize(
    ("options", "set_keys", "unset_key"),
    [
        ({"input": "age", "columns": ("age",)}, ("data.input_column", "data.columns"), "data.kind"),
        ({"input": "age", "kind": "table"}, ("data.input_column", "data.kind"), "data.columns"),
        ({"columns": ("age",), "kind": "text"}, ("data.columns", "data.kind"), "data.input_column"),
        ({"image_column": "age", "columns": ("age",)}, ("data.image_column",), "data.kind"),
        ({"image_column": "age", "length": 3}, ("data.image_column", "data.length"), "data.kind"),
    ],
)
def test_messages_name_keys_that_are_set(
    options: dict[str, Any], set_keys: tuple[str, ...], unset_key: str
) -> None:
    message = problem(NUMBERS, **options)
    assert all(key in message for key in set_keys)
    assert unset_key not in message


def test_a_csv_file_with_a_column_of_images_names_only_that_key(tmp_path: Path) -> None:
    pd.DataFrame(NUMBERS).to_csv(tmp_path / "mine.csv", index=False)
    with pytest.raises(DataError, match=r"data\.image_column") as caught:
        load_dataset(tmp_path / "mine.csv", image_column="age")
    assert "data.kind" not in str(caught.value)


def test_a_sparse_tensor_is_refused() -> None:
    values = torch.eye(ROWS).to_sparse()
    with pytest.raises(DataError, match=r"to_dense\(\)"):
        fedstill.from_tensors("mine", (values, torch.tensor(LABELS)))


@pytest.mark.parametrize("masked", ["values", "labels"])
def test_masked_values_are_not_read_as_numbers(masked: str) -> None:
    pair = {"values": np.ma.array(np.zeros((ROWS, 2))), "labels": np.ma.array(LABELS)}
    fedstill.from_tensors("mine", (pair["values"], pair["labels"]))
    pair[masked][1] = np.ma.masked
    with pytest.raises(DataError, match=rf"{masked}.*filled"):
        fedstill.from_tensors("mine", (pair["values"], pair["labels"]))
