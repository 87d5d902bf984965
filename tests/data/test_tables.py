"""Tables, vectors, series and texts in parquet and CSV files: what is read, what is left out, what
is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedstill.core.errors import ConfigError, DataError
from fedstill.data.dataset import Dataset, ReadingOptions
from fedstill.data.sources import from_clients, load, load_dataset
from fedstill.data.sources.folders import likely_kind

COLUMNS: dict[str, list[Any]] = {
    "alter": [61.0, None, 45.0, 70.0, 52.0, 33.0, 48.0, 59.0, 41.0, 66.0],
    "größe": [1.8, 1.6, 1.7, 1.75, 1.62, 1.9, 1.66, 1.71, 1.69, 1.73],
    "pain": [1, 2, 3, 1, 2, 3, 1, 2, 3, 1],
    "sex": ["f", "m", "f", "f", "m", "m", "f", "m", "f", "m"],
    "ward": ["b", "a", "b", "a", "b", "a", "b", "a", "b", "a"],
    "label": [0, 1, 0, 1, 0, 1, 0, 1, 0, 1],
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(**changes: list[Any]) -> pa.Table:
    return pa.table({k: v for k, v in {**COLUMNS, **changes}.items() if v is not None})


def both(written: pa.Table, folder: Path) -> list[str]:
    """The same rows as a parquet and as a CSV file, to train and to test on."""
    for name in ("p", "c"):
        (folder / name).mkdir(exist_ok=True)
    for split in ("train", "test"):
        pq.write_table(written, folder / "p" / f"{split}.parquet")
        written.to_pandas().to_csv(folder / "c" / f"{split}.csv", index=False)
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
        kept = [i for i in range(10) if i != 1]
        assert data.train.owners is not None
        assert data.train.owners.tolist() == [COLUMNS["ward"][i] == "b" for i in kept]
        assert data.train.labels.tolist() == [COLUMNS["label"][i] for i in kept]
        pain = np.eye(3)[[COLUMNS["pain"][i] - 1 for i in kept]]
        want = np.array(
            [
                [COLUMNS["alter"][i], COLUMNS["größe"][i], *one]
                for i, one in zip(kept, pain, strict=True)
            ]
        )
        assert torch.equal(data.train.values, torch.from_numpy(want).float())


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
        assert data.train.values[:, 3].tolist() == [0, 1, *[0] * 8]
        assert data.train.values[:, 2].isnan().tolist() == [False, True, *[False] * 8]
        assert any("train:" in note and "alter 1" in note for note in data.about.notes)


NAN = float("nan")


def test_a_name_that_is_nan_is_missing(place: Path) -> None:
    pain = [1.0, NAN, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, NAN]
    name, _ = both(table(pain=pain), place)
    data = load_dataset(
        name, columns=("größe", "pain"), categorical=(("pain", ()),), missing="mean"
    )
    assert data.about.features == ("größe", "pain=1", "pain=2", "pain=3")
    assert data.train.values[:, 1:].isnan().all(1).tolist() == np.isnan(pain).tolist()


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
    assert (data.about.kind, data.about.features, len(data.train), len(data.test)) == (
        "table",
        ("a", "b"),
        8,
        2,
    )


@pytest.mark.parametrize(
    ("changes", "fields", "said"),
    [
        ({}, {"owner": "ward"}, "it is not clear what an example is: columns of numbers"),
        (
            {},
            {**WANTED},
            r"train: example 1 .*'alter' \(1 of 10 .*data\.missing",
        ),
        (
            {"alter": [float("inf")] * 10},
            WANTED,
            "example 0 .*'alter'",
        ),
        (
            {"alter": [float("nan")] * 10},
            {**WANTED, "missing": "drop"},
            "data.columns",
        ),
        (
            {"pain": [4] * 10},
            {**WANTED, "missing": "drop"},
            r"example 0 has '4' in column 'pain', which is none of 1, 2, 3",
        ),
        (
            {},
            {"columns": ("sex",)},
            "column 'sex' contains text, not numbers",
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
    changes: dict[str, Any], fields: dict[str, Any], said: str, place: Path
) -> None:
    name, _ = both(table(**changes), place)
    with pytest.raises(DataError, match=said) as caught:
        load_dataset(name, **fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"a,a,label\n1,2,0\n3,4,1\n", "has two columns named 'a'; rename one"),
        (
            "a,stadt,label\n1,K\xf6ln,0\n2,Bonn,1\n".encode("latin-1"),
            "column 'stadt', is not in UTF-8",
        ),
    ],
)
def test_a_csv_file_with_a_column_twice_or_in_another_encoding_is_refused(
    text: bytes, said: str, place: Path
) -> None:
    (place / "odd.csv").write_bytes(text * 1)
    with pytest.raises(DataError, match=said):
        load_dataset("odd.csv")


def test_a_csv_file_that_is_none_is_named(place: Path) -> None:
    for text in ("a,b,label\n1,2\n", "", "a,label\n\xff\xfe,1\n", "h\xfc,label\n1,0\n2,1\n"):
        (place / "bad.csv").write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError, match=r"bad\.csv"):
            load_dataset("bad.csv")


def lists(values: list[Any]) -> pa.Table:
    return pa.table({"x": values, "label": [i % 2 for i in range(len(values))]})


def test_vectors_and_series_are_columns_of_lists(place: Path) -> None:
    numbers = np.arange(10 * 2 * 3, dtype=np.float32).reshape(10, 2, 3)
    for own, kind in ((numbers.reshape(10, 6), "vector"), (numbers, "series")):
        name, _ = both(lists(own.tolist()), place)
        data = load_dataset(name)
        assert data.about.kind == kind
        assert torch.equal(data.train.values, torch.from_numpy(own))
    fixed = pa.array(numbers.reshape(-1, 3).tolist(), pa.list_(pa.float32(), 3))
    fixed = pa.FixedSizeListArray.from_arrays(fixed, 2)
    pq.write_table(pa.table({"x": fixed, "label": [0, 1] * 5}), place / "p" / "train.parquet")
    assert torch.equal(load_dataset(str(place / "p")).train.values, torch.from_numpy(numbers))


def test_series_of_several_lengths_need_one_length(place: Path) -> None:
    values = [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[1.0], [2.0]]] * 5
    name, _ = both(lists(values), place)
    with pytest.raises(DataError, match=r"example 1 .*data\.length"):
        load_dataset(name)
    read = load_dataset(name, length=2).train.values
    assert read[0].tolist() == [[1.0, 2.0], [4.0, 5.0]]
    assert read[1, :, 0].tolist() == [1.0, 2.0]
    assert read[1, :, 1].isnan().all()


def fixed(values: list[Any]) -> pa.Table:
    """The same with lists of one size."""
    kind = pa.list_(pa.list_(pa.float32(), 3), 2)
    return lists(values).set_column(0, "x", pa.array(values, kind))


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("made", [lists, fixed])
@pytest.mark.parametrize(
    "gap", [None, [None, [4.0, 5.0, 6.0]], [[1.0, NAN, 3.0], [4.0] * 3], [[1.0, 2.0, None]] * 2]
)
def test_what_a_series_lacks_is_missing_however_it_is_written(
    gap: Any, made: Any, length: int, place: Path
) -> None:
    values = [gap if i == 3 else [[1.0, 2.0, 3.0], [4.0, 5.0, i]] for i in range(10)]
    try:
        pq.write_table(made(values), place / "mine.parquet")
    except pa.ArrowNotImplementedError as error:
        pytest.skip(f"pyarrow {pa.__version__} cannot write such a file: {error}")
    with pytest.raises(DataError, match=r"example 3 .*data\.missing"):
        load_dataset("mine.parquet", length=length)
    data = load_dataset("mine.parquet", length=length, missing="drop")
    kept = torch.cat([data.train.values, data.test.values])
    assert kept.shape == (9, 2, 3)
    assert 3 not in kept[:, 1, 2]
    assert kept.isfinite().all()


def test_a_number_that_is_cut_off_is_not_missed(place: Path) -> None:
    name, _ = both(lists([[[1.0, 2.0, NAN], [3.0, 4.0, 5.0]]] * 10), place)
    assert load_dataset(name, length=2).train.values[0].tolist() == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ([1.0, 2.0], "example 4 has 2 values"),
        ([[1.0, 2.0]], "example 4 has 1 channels"),
    ],
)
def test_a_length_is_asked_for_only_where_it_helps(odd: list[Any], said: str, place: Path) -> None:
    usual = [[1.0, 2.0]] * 2 if isinstance(odd[0], list) else [1.0, 2.0, 3.0]
    name, _ = both(lists([odd if i == 4 else usual for i in range(10)]), place)
    with pytest.raises(DataError, match=said) as refusal:
        load_dataset(name)
    assert "data.length" not in str(refusal.value)


def test_texts_are_token_ids(place: Path) -> None:
    rows = pa.table({"text": ["a cat", "", "ein Hund im Garten"] * 4, "label": ["x", "y", "x"] * 4})
    for name in both(
        rows.set_column(0, "text", pa.array(["a cat", "no", "ein Hund im Garten"] * 4)), place
    ):
        data = load_dataset(name, length=3, vocabulary=50)
        assert (data.about.kind, data.vocabulary, data.input_shape, data.classes) == (
            "text",
            50,
            (3,),
            ("x", "y"),
        )
        assert (data.train.values[:2] > 0).sum(1).tolist() == [2, 1]
        assert "train: 33.3 %" in data.about.notes[0]
    name, _ = both(rows, place)
    assert load_dataset(name).train.values[1].sum() == 0, "a text without words is padding alone"


def test_the_cache_keeps_owners_and_what_is_known_of_the_columns(place: Path) -> None:
    name, _ = both(table(), place)
    first, again = (load_dataset(name, **WANTED, owner="ward", missing="drop") for _ in range(2))
    assert first.about == again.about
    assert first.train.owners is not None
    assert torch.equal(first.train.owners, again.train.owners)
    other = load_dataset(name, columns=("größe",), owner="ward")
    assert other.input_shape == (1,), "other columns are another data set"


def test_the_kind_is_told_without_reading_the_rows(place: Path) -> None:
    name, csv = both(table(), place)
    assert likely_kind(name, "", "", {}) == "image", (
        "it is not clear, and whoever reads it will say so"
    )
    assert likely_kind(name, "", "", {"columns": ("alter",)}) == "table"
    assert likely_kind(csv, "", "", {"columns": ("alter",)}) == "table"
    assert likely_kind("heart_disease", "", "", {}) == "table"
    assert [likely_kind(n, "", "", {}) for n in ("cifar10", "absent", "mine.py:data")] == [
        "image"
    ] * 3


def some(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)), torch.arange(n) % 2


def test_clients_own_data_sets_are_one_with_owners() -> None:
    data = from_clients(
        "mine", [(some(4, 0), some(2, 1)), (some(6, 2), some(3, 3))], names=["north", "south"]
    )
    assert data.about.owners == ("north", "south")
    assert data.train.owners is not None
    assert data.test.owners is not None
    assert (data.train.owners.tolist(), data.test.owners.tolist()) == (
        [0] * 4 + [1] * 6,
        [0] * 2 + [1] * 3,
    )
    assert torch.equal(data.train.values[4:], some(6, 2)[0])
    with pytest.raises(DataError, match=r"differ between clients: \(3,\), \(4,\)"):
        from_clients(
            "mine", [some(4, 0), (torch.zeros(2, 4), torch.zeros(2).long())], test=some(2, 0)
        )
    with pytest.raises(DataError, match="2 clients and 1"):
        from_clients("mine", [some(4, 0)] * 2, test=some(2, 0), names=["a", "a"])


def test_what_is_no_example_of_a_kind_is_refused_from_python() -> None:
    y = torch.zeros(4).long()

    def made(values: object, **fields: Any) -> Dataset:
        from fedstill import from_tensors

        return from_tensors("mine", (values, y), (values, y), **fields)  # type: ignore[arg-type]

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
    }
    rows["series"] = lists(numbers)
    folder, _ = both(rows[kind], place)
    fields: dict[str, Any] = {**WANTED, "owner": "ward"} if kind == "table" else {}
    real, files = datasets.load_dataset, {s: f"{folder}/{s}.parquet" for s in ("train", "test")}
    monkeypatch.setattr(load, "_check_hub_has", lambda name, remedy: None)
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, streaming: real("parquet", data_files=files, streaming=True),
    )
    here, there = load_dataset(folder, **fields), load_dataset("somebody/data", **fields)
    assert here.about == there.about
    assert torch.equal(here.train.values, there.train.values)
    assert torch.equal(here.test.labels, there.test.labels)


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
