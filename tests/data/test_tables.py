"""Tables, vectors, series and texts in parquet and CSV files: what is read, what is left out, what
is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedstill.core.errors import ConfigError, DataError
from fedstill.data.dataset import FILE, Dataset, ReadingOptions
from fedstill.data.sources import from_clients, from_tensors, load, load_dataset
from fedstill.data.sources.folders import likely_kind

COLUMNS: dict[str, list[Any]] = {
    "alter": [61.0, None, 45.0, 70.0, 52.0, 33.0, 48.0, 59.0, 41.0, 66.0],
    "größe": [1.8, 1.6, 1.7, 1.75, 1.62, 1.9, 1.66, 1.71, 1.69, 1.73],
    "pain": [1, 2, 3, 1, 2, 3, 1, 2, 3, 1],
    "sex": ["f", "m", "f", "f", "m", "m", "f", "m", "f", "m"],
    "ward": ["b", "a", "b", "a", "b", "a", "b", "a", "b", "a"],
    "label": [0, 1, 0, 1, 0, 1, 0, 1, 0, 1],
}


pytestmark = pytest.mark.usefixtures("place")


def table(**changes: list[Any] | None) -> pa.Table:
    """The columns above with changes; a column that becomes None is left out."""
    columns = {**COLUMNS, **changes}
    return pa.table({name: values for name, values in columns.items() if values is not None})


def both(rows: pa.Table, folder: Path) -> list[str]:
    """The same rows as a parquet and as a CSV file, to train and to test on."""
    for name in ("p", "c"):
        (folder / name).mkdir(exist_ok=True)
    for split in ("train", "test"):
        pq.write_table(rows, folder / "p" / f"{split}.parquet")
        rows.to_pandas().to_csv(folder / "c" / f"{split}.csv", index=False)
    return [str(folder / "p"), str(folder / "c")]


WANTED_NUMBERS = {"columns": ("größe", "pain")}
WANTED = {"columns": ("alter", "größe", "pain"), "categorical": (("pain", (1, 2, 3)),)}


def test_a_table_is_read_alike_from_parquet_and_csv(place: Path) -> None:
    for name in both(table(), place):
        data = load_dataset(name, **WANTED, owner="ward", missing="drop")
        assert data.about.kind == "table"
        assert data.about.features == ("alter", "größe", "pain=1", "pain=2", "pain=3")
        assert data.about.binary_features == (2, 3, 4)
        assert data.about.owners == ("a", "b")
        assert re.search(r"train: 1 of 10 .*\(a 1\)", data.about.notes[0])
        assert data.input_shape == (5,)

        complete = pd.DataFrame(COLUMNS).drop(index=1)
        one_hot_pain = np.eye(3)[complete["pain"] - 1]
        values = np.column_stack([complete["alter"], complete["größe"], one_hot_pain])
        assert data.train.owners is not None
        assert data.train.owners.tolist() == (complete["ward"] == "b").tolist()
        assert data.train.labels.tolist() == complete["label"].tolist()
        assert torch.equal(data.train.values, torch.from_numpy(values).float())


def test_categories_are_read_where_none_are_declared_and_missing_numbers_get_a_mark(
    place: Path,
) -> None:
    for name in both(table(), place):
        data = load_dataset(
            name,
            columns=("sex", "alter"),
            categorical=(("sex", ()),),
            missing="mean",
            marks=True,
            owner="ward",
        )
        assert data.about.features == ("sex=f", "sex=m", "alter", "alter is missing")
        only_second = [False, True] + [False] * 8
        assert data.train.values[:, 3].tolist() == only_second
        assert data.train.values[:, 2].isnan().tolist() == only_second
        assert any("train:" in note and "alter 1" in note for note in data.about.notes)


NAN = float("nan")


def test_a_name_that_is_nan_is_missing(place: Path) -> None:
    pain = [1.0, NAN, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, NAN]
    name, _ = both(table(pain=pain), place)
    data = load_dataset(
        name, columns=("größe", "pain"), categorical=(("pain", ()),), missing="mean"
    )
    assert data.about.features == ("größe", "pain=1", "pain=2", "pain=3")
    one_hot_pain = data.train.values[:, 1:]
    assert one_hot_pain.isnan().all(1).tolist() == np.isnan(pain).tolist()


@pytest.mark.parametrize("test", [[1.0, 2.0] * 5, ["1", "2"] * 5])
def test_an_owner_has_one_name_however_a_split_writes_it(test: list[Any], place: Path) -> None:
    name, _ = both(table(ward=[1, 10, 2, 10, 1, 2, 1, 10, 2, 1]), place)
    pq.write_table(table(ward=test), Path(name) / "test.parquet")
    data = load_dataset(name, columns=("größe",), owner="ward")
    assert data.about.owners == ("1", "2", "10")
    assert data.train.owners is not None
    assert data.test.owners is not None
    assert data.train.owners.tolist()[:3] == [0, 2, 1]
    assert data.test.owners.tolist() == [0, 1] * 5


def test_all_columns_of_numbers_are_a_table_where_nothing_is_said(place: Path) -> None:
    (place / "mine.csv").write_text(
        "a,b,label\n1,2.5,0\n3,4,1\n5,6,0\n7,8,1\n9,0,0\n1,1,1\n2,2,0\n3,3,1\n4,4,0\n5,5,1\n"
    )
    data = load_dataset("mine.csv")
    assert data.about.kind == "table"
    assert data.about.features == ("a", "b")
    assert len(data.train) == 8
    assert len(data.test) == 2


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({}, {"owner": "ward"}, "it is not clear what an example is: columns of numbers"),
        ({}, WANTED, r"train: example 1 .*'alter' \(1 of 10 .*data\.missing"),
        ({"alter": [float("inf")] * 10}, WANTED, "example 0 .*'alter'"),
        ({"alter": [NAN] * 10}, {**WANTED, "missing": "drop"}, "data.columns"),
        (
            {"pain": [4] * 10},
            {**WANTED, "missing": "drop"},
            r"example 0 has '4' in column 'pain', which is none of 1, 2, 3",
        ),
        ({}, {"columns": ("sex",)}, "column 'sex' contains text, not numbers"),
        ({}, {"columns": ("alter", "alter")}, "data.columns has 'alter' more than once"),
        (
            {},
            {**WANTED, "categorical": (("pain", (1, 2, 3, "1")),)},
            "data.categorical has '1' more than once in column 'pain'",
        ),
        ({}, {"columns": ("weight",)}, "has no column 'weight' among alter"),
        ({}, {"owner": "hospital"}, "has no column 'hospital' among .*; set partition.column"),
        (
            {"ward": [None, *"abababab", "a"]},
            {**WANTED, "owner": "ward", "missing": "drop"},
            "example 0 .*'ward'",
        ),
        (
            {"ward": [1.0, NAN] * 5},
            {**WANTED, "owner": "ward", "missing": "drop"},
            "example 1 .*'ward'",
        ),
        (
            {"pain": [2**60] * 10},
            WANTED_NUMBERS,
            r"'pain' holds whole numbers beyond 2\^53.*data\.columns",
        ),
        ({"label": [None] * 10}, {**WANTED, "missing": "drop"}, "example 0 has no label"),
        ({"label": None}, WANTED, "cannot tell which column holds the labels"),
        (
            {},
            {"input": "sex", "kind": "series"},
            "column 'sex' contains text, not texts or lists of numbers",
        ),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(
    changes: dict[str, Any], fields: dict[str, Any], message: str, place: Path
) -> None:
    name, _ = both(table(**changes), place)
    with pytest.raises(DataError, match=message) as caught:
        load_dataset(name, **fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a,a,label\n1,2,0\n3,4,1\n", "has two columns named 'a'; rename one"),
        (
            "a,stadt,label\n1,K\xf6ln,0\n2,Bonn,1\n".encode("latin-1"),
            "column 'stadt', is not in UTF-8",
        ),
    ],
)
def test_a_csv_file_with_a_column_twice_or_in_another_encoding_is_refused(
    text: bytes, message: str, place: Path
) -> None:
    (place / "odd.csv").write_bytes(text)
    with pytest.raises(DataError, match=message):
        load_dataset("odd.csv")


def test_a_csv_file_that_is_none_is_named(place: Path) -> None:
    for text in ("a,b,label\n1,2\n", "", "a,label\n\xff\xfe,1\n", "h\xfc,label\n1,0\n2,1\n"):
        (place / "bad.csv").write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError, match=r"bad\.csv"):
            load_dataset("bad.csv")


def lists(values: list[Any]) -> pa.Table:
    """A table with a column of lists, and labels that alternate."""
    return pa.table({"x": values, "label": [i % 2 for i in range(len(values))]})


def test_vectors_and_series_are_columns_of_lists(place: Path) -> None:
    numbers = np.arange(10 * 2 * 3, dtype=np.float32).reshape(10, 2, 3)
    for values, kind in ((numbers.reshape(10, 6), "vector"), (numbers, "series")):
        name, _ = both(lists(values.tolist()), place)
        data = load_dataset(name)
        assert data.about.kind == kind
        assert torch.equal(data.train.values, torch.from_numpy(values))

    channels = pa.array(numbers.reshape(-1, 3).tolist(), pa.list_(pa.float32(), 3))
    series = pa.FixedSizeListArray.from_arrays(channels, 2)
    pq.write_table(pa.table({"x": series, "label": [0, 1] * 5}), place / "p" / "train.parquet")
    data = load_dataset(str(place / "p"))
    assert torch.equal(data.train.values, torch.from_numpy(numbers))


def test_series_of_several_lengths_need_one_length(place: Path) -> None:
    values = [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[1.0], [2.0]]] * 5
    name, _ = both(lists(values), place)
    with pytest.raises(DataError, match=r"example 1 .*data\.length"):
        load_dataset(name)

    long_series, short_series = load_dataset(name, length=2).train.values[:2]
    assert long_series.tolist() == [[1.0, 2.0], [4.0, 5.0]]
    assert short_series[:, 0].tolist() == [1.0, 2.0]
    assert short_series[:, 1].isnan().all()


def fixed(values: list[Any]) -> pa.Table:
    """The same with lists of one size."""
    kind = pa.list_(pa.list_(pa.float32(), 3), 2)
    return lists(values).set_column(0, "x", pa.array(values, kind))


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("table_of", [lists, fixed])
@pytest.mark.parametrize(
    "gap", [None, [None, [4.0, 5.0, 6.0]], [[1.0, NAN, 3.0], [4.0] * 3], [[1.0, 2.0, None]] * 2]
)
def test_what_a_series_lacks_is_missing_however_it_is_written(
    gap: Any, table_of: Any, length: int, place: Path
) -> None:
    values: list[Any] = [[[1.0, 2.0, 3.0], [4.0, 5.0, i]] for i in range(10)]
    values[3] = gap
    try:
        pq.write_table(table_of(values), place / "mine.parquet")
    except pa.ArrowNotImplementedError as error:
        pytest.skip(f"pyarrow {pa.__version__} cannot write such a file: {error}")

    with pytest.raises(DataError, match=r"example 3 .*data\.missing"):
        load_dataset("mine.parquet", length=length)
    data = load_dataset("mine.parquet", length=length, missing="drop")
    complete = torch.cat([data.train.values, data.test.values])
    assert complete.shape == (9, 2, 3)
    assert 3 not in complete[:, 1, 2]
    assert complete.isfinite().all()


def test_a_number_that_is_cut_off_is_not_missed(place: Path) -> None:
    series = [[1.0, 2.0, NAN], [3.0, 4.0, 5.0]]
    name, _ = both(lists([series] * 10), place)
    values = load_dataset(name, length=2).train.values
    assert values[0].tolist() == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("usual", "odd", "message"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0], "example 4 has 2 values"),
        ([[1.0, 2.0], [1.0, 2.0]], [[1.0, 2.0]], "example 4 has 1 channels"),
    ],
)
def test_a_length_is_asked_for_only_where_it_helps(
    usual: list[Any], odd: list[Any], message: str, place: Path
) -> None:
    values = [usual] * 10
    values[4] = odd
    name, _ = both(lists(values), place)
    with pytest.raises(DataError, match=message) as refusal:
        load_dataset(name)
    assert "data.length" not in str(refusal.value)


def test_texts_are_token_ids(place: Path) -> None:
    labels = ["x", "y", "x"] * 4
    texts = ["a cat", "no", "ein Hund im Garten"] * 4
    for name in both(pa.table({"text": texts, "label": labels}), place):
        data = load_dataset(name, length=3, vocabulary=50)
        assert data.about.kind == "text"
        assert data.vocabulary == 50
        assert data.input_shape == (3,)
        assert data.classes == ("x", "y")
        assert (data.train.values[:2] > 0).sum(1).tolist() == [2, 1]
        assert "train: 33.3 %" in data.about.notes[0]

    texts = ["a cat", "", "ein Hund im Garten"] * 4
    name, _ = both(pa.table({"text": texts, "label": labels}), place)
    assert load_dataset(name).train.values[1].sum() == 0, "a text without words is padding alone"


def test_the_cache_keeps_owners_and_what_is_known_of_the_columns(place: Path) -> None:
    name, _ = both(table(), place)
    fields = {**WANTED, "owner": "ward", "missing": "drop"}
    first = load_dataset(name, **fields)
    again = load_dataset(name, **fields)
    assert first.about == again.about
    assert first.train.owners is not None
    assert torch.equal(first.train.owners, again.train.owners)
    fewer_columns = load_dataset(name, columns=("größe",), owner="ward")
    assert fewer_columns.input_shape == (1,), "other columns are another data set"


def test_the_kind_is_told_without_reading_the_rows(place: Path) -> None:
    name, csv = both(table(), place)
    assert likely_kind(name, "", "", {}) == "image", (
        "it is not clear, and whoever reads it will say so"
    )
    assert likely_kind(name, "", "", {"columns": ("alter",)}) == "table"
    assert likely_kind(csv, "", "", {"columns": ("alter",)}) == "table"
    assert likely_kind("heart_disease", "", "", {}) == "table"
    for name in ("cifar10", "absent", "mine.py:data"):
        assert likely_kind(name, "", "", {}) == "image"


def test_the_kind_is_that_of_the_files_that_are_read(place: Path) -> None:
    numbers = table(sex=None, ward=None)
    folder = place / "by_split"
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        numbers.to_pandas().to_csv(folder / split / "north.csv", index=False)
    assert likely_kind(str(folder), "", "", {}) == "table"

    # macOS writes such files onto disks of other systems.
    (folder / "train" / "._north.csv").write_bytes(b"\0\5\x16\7")
    assert likely_kind(str(folder), "", "", {}) == "table"

    photos = place / "photos"
    (photos / "cat").mkdir(parents=True)
    (photos / "cat" / "1.png").touch()
    numbers.to_pandas().to_csv(photos / "notes.csv", index=False)
    assert likely_kind(str(photos), "", "", {}) == "image"


def vectors(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random vectors of three numbers, and labels that alternate."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator), torch.arange(count) % 2


def test_clients_own_data_sets_are_one_with_owners() -> None:
    north = (vectors(4, 0), vectors(2, 1))
    south = (vectors(6, 2), vectors(3, 3))
    data = from_clients("mine", [north, south], names=["north", "south"])
    assert data.about.owners == ("north", "south")
    assert data.train.owners is not None
    assert data.test.owners is not None
    assert data.train.owners.tolist() == [0] * 4 + [1] * 6
    assert data.test.owners.tolist() == [0] * 2 + [1] * 3
    assert torch.equal(data.train.values[4:], vectors(6, 2)[0])

    test = vectors(2, 0)
    wider = (torch.zeros(2, 4), torch.zeros(2).long())
    with pytest.raises(DataError, match=r"differ between clients: \(3,\), \(4,\)"):
        from_clients("mine", [vectors(4, 0), wider], test=test)
    with pytest.raises(DataError, match="2 clients and 1"):
        from_clients("mine", [vectors(4, 0)] * 2, test=test, names=["a", "a"])


def test_values_that_are_no_examples_of_a_kind_are_refused_from_python() -> None:
    def made(values: object, **fields: Any) -> Dataset:
        pair: Any = (values, torch.zeros(4).long())
        return from_tensors("mine", pair, pair, **fields)

    assert made(np.zeros((4, 3))).about.kind == "vector"
    assert made(np.zeros((4, 3)), kind="table").about.kind == "table"
    assert made(torch.zeros(4, 2, 5)).about.kind == "series"
    assert made(torch.ones(4, 7).int(), vocabulary=9).train.values.dtype == torch.int64
    with pytest.raises(DataError, match="0 to 8"):
        made(torch.full((4, 7), 9), vocabulary=9)
    with pytest.raises(DataError, match="example 0"):
        made(torch.full((4, 7), float("nan")))
    with pytest.raises(DataError, match="vocabulary="):
        made(torch.ones(4, 7).int())
    with pytest.raises(DataError, match="are not series"):
        made(torch.zeros(4, 7), kind="series")
    with pytest.raises(ConfigError, match="mean and std"):
        made(torch.zeros(4, 7), mean=[0.0], std=[1.0])


def test_a_form_says_nothing_by_default() -> None:
    assert ReadingOptions() == ReadingOptions(
        kind="auto", missing="refuse", tokenizer="words", vocabulary=8192
    )


@pytest.mark.parametrize("kind", ["table", "text", "series"])
def test_the_hub_gives_what_files_of_the_same_columns_give(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in hub: the library is given the files that the hub would give it."""
    import datasets

    numbers = np.arange(60, dtype=np.float32).reshape(10, 2, 3).tolist()
    rows = {
        "table": table(alter=[1.0] * 10),
        "text": pa.table({"text": ["a b"] * 10, "label": [0, 1] * 5}),
        "series": lists(numbers),
    }
    folder, _ = both(rows[kind], place)
    fields: dict[str, Any] = {}
    if kind == "table":
        fields = {**WANTED, "owner": "ward"}
    real_load = datasets.load_dataset
    files = {split: f"{folder}/{split}.parquet" for split in ("train", "test")}

    def load_from_hub(name: str, streaming: bool) -> object:
        return real_load("parquet", data_files=files, streaming=True)

    monkeypatch.setattr(load, "_check_hub_has", lambda name, remedy: None)
    monkeypatch.setattr(datasets, "load_dataset", load_from_hub)

    in_files = load_dataset(folder, **fields)
    on_hub = load_dataset("somebody/data", **fields)

    assert in_files.about == on_hub.about
    assert torch.equal(in_files.train.values, on_hub.train.values)
    assert torch.equal(in_files.test.labels, on_hub.test.labels)


def test_files_of_the_hub_are_no_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    stream = datasets.Dataset.from_dict({"text": ["a b"] * 10, "label": [0, 1] * 5})
    monkeypatch.setattr(load, "_check_hub_has", lambda name, remedy: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, streaming: {"train": stream})
    with pytest.raises(DataError, match=r"no files of clients; set partition\.column"):
        load_dataset("somebody/data", owner=FILE)


def test_splits_of_the_hub_that_mean_the_same_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    stream = datasets.Dataset.from_dict({"text": ["a b"] * 10, "label": [0, 1] * 5})
    splits = {"train": stream, "valid": stream, "dev": stream}
    monkeypatch.setattr(load, "_check_hub_has", lambda name, remedy: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, streaming: splits)
    with pytest.raises(DataError, match=r"'valid' and 'dev'"):
        load_dataset("somebody/data")
    del splits["train"], splits["dev"]
    with pytest.raises(DataError, match="no split 'train'"):
        load_dataset("somebody/data")
