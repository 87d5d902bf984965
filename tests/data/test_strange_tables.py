"""Tables as people have them, with an index of pandas, dates, stray words or other separators: they
are read right, with a note, or refused.
"""

from __future__ import annotations

import datetime
import os
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedstill.core.errors import DataError
from fedstill.data.sources import from_python, load_dataset, tables

pytestmark = pytest.mark.usefixtures("place")

N = 40
LABELS = [i % 2 for i in range(N)]
MEASUREMENTS = [f"{20 + i}.5,{100 + i}" for i in range(N)]
LINES = [f"{pair},{label}" for pair, label in zip(MEASUREMENTS, LABELS, strict=True)]
LINES_OF_NAMES = [
    f"{pair},{name}" for pair, name in zip(MEASUREMENTS, ["ill", "well"] * (N // 2), strict=True)
]


def csv(name: str, head: str = "age,pressure,label", lines: list[str] = LINES) -> str:
    """The name of a new CSV file with these lines."""
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
    return name


def parquet(name: str = "mine.parquet", **columns: Any) -> str:
    """The name of a new parquet file with a column of numbers, these columns, and labels."""
    Path(name).parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"x": np.arange(N) * 0.5, **columns, "label": LABELS}), name)
    return name


def told(name: str, **fields: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The features of a data set, and the warnings about it."""
    about = load_dataset(name, **fields).about
    assert set(about.warnings) <= set(about.notes)
    return about.features, about.warnings


def test_the_index_of_a_pandas_table_is_no_feature() -> None:
    rows = pd.DataFrame({"a": np.arange(N) * 0.5, "label": LABELS})
    rows.sample(frac=1, random_state=0).to_parquet("mixed.parquet")
    note = ("left out: __index_level_0__ (the index of a pandas table)",)
    assert told("mixed.parquet") == (("a",), note)
    columns = ("a", "__index_level_0__")
    assert told("mixed.parquet", columns=columns) == (columns, ())

    rows.set_index("label").to_parquet("labelled.parquet")  # a label is one wherever it stands
    assert told("labelled.parquet") == (("a",), ())

    rows.to_csv("mixed.csv")
    assert told("mixed.csv")[0] == ("a",)


def test_a_column_that_numbers_the_rows_is_doubted_unless_it_is_asked_for() -> None:
    for name in ("id", "patient_id", "patientID", "Unnamed: 0"):
        parquet(**{name: np.arange(N)})
        doubt = (
            f"{name}: all {N} values differ; if it only numbers the rows, leave it out with "
            "data.columns"
        )
        assert told("mine.parquet") == (("x", name), (doubt,))
        assert told("mine.parquet", columns=("x", name)) == (("x", name), ())

    _, warnings = told(parquet(acid=np.arange(N), id=np.arange(N) // 2))
    assert warnings == ()


def test_decimals_are_numbers_and_columns_that_are_left_out_are_named() -> None:
    parquet(
        price=[Decimal("1.5") + i for i in range(N)],
        when=[datetime.datetime(2020, 1, 1)] * N,
        took=[datetime.time(1, 2)] * N,
        none=pa.nulls(N),
    )
    note = "left out: when (timestamp), took (time), none (no values)"
    assert told("mine.parquet") == (("x", "price"), (note,))
    prices = load_dataset("mine.parquet").train.values[:, 1]
    assert (prices % 1 == 0.5).all()


@pytest.mark.parametrize("places", [0, 9])
def test_whole_decimals_are_class_ids(places: int) -> None:
    ids = [Decimal(label) for label in LABELS]
    labels = pa.array(ids, pa.decimal128(38, places))
    pq.write_table(pa.table({"x": np.arange(N) * 0.5, "y": labels}), "mine.parquet")
    data = load_dataset("mine.parquet", label_column="y")
    assert data.classes == ("0", "1")
    # Column x counts in halves, so that its fraction tells odd rows.
    expected = data.train.values[:, 0] % 1 * 2
    assert (data.train.labels == expected).all()


def test_decimals_with_a_fraction_are_no_labels() -> None:
    measured = [Decimal(label) + Decimal("0.25") for label in LABELS]
    pq.write_table(pa.table({"x": np.arange(N) * 0.5, "y": measured}), "mine.parquet")
    with pytest.raises(DataError, match=r"example 0 has the label 0\.25"):
        load_dataset("mine.parquet", label_column="y")


def test_owners_and_categories_that_are_decimals_have_no_zeros_at_the_end() -> None:
    thirds = [Decimal(i % 3) for i in range(N)]
    sites = pa.array([10 * third for third in thirds], pa.decimal128(38, 2))
    doses = pa.array([third / 2 for third in thirds], pa.decimal128(10, 2))
    name = parquet(site=sites, dose=doses)
    categories = (("dose", (0, "0.5", 1.0)),)

    data = load_dataset(name, columns=("x", "dose"), categorical=categories, owner="site")

    assert data.about.owners == ("0", "10", "20")
    assert data.about.features == ("x", "dose=0", "dose=0.5", "dose=1")


def test_numbers_that_are_equal_in_32_bits_cause_a_warning() -> None:
    seconds = 1_700_000_000 + np.arange(N)
    _, (warning,) = told(parquet(at=seconds, tiny=np.arange(N) * 1e-12))
    assert warning.startswith("at: ")
    assert "1700000000 to 1700000039" in warning


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_the_training_columns_are_those_of_the_data_set(kind: str, place: Path) -> None:
    def write(name: str, rows: pd.DataFrame) -> None:
        (place / name).parent.mkdir(exist_ok=True)
        if kind == "csv":
            rows.to_csv(place / f"{name}.csv", index=False)
        else:
            rows.to_parquet(place / f"{name}.parquet", index=False)

    narrow = pd.DataFrame({"x": [0.5, 1.5] * 4, "label": [0, 1] * 4})
    wide = narrow.assign(z=1.0)
    write("less/train", wide)
    write("less/test", narrow)
    with pytest.raises(DataError, match=rf"less/test\.{kind} .*'z' .*train\.{kind}"):
        load_dataset("less")
    assert told("less", columns=("x",))[0] == ("x",)

    write("more/train", narrow)
    write("more/test", wide)
    assert told("more")[0] == ("x",)


def test_files_and_splits_that_hold_other_things_in_a_column_are_named() -> None:
    csv("two/a.csv")
    csv("two/b.csv", lines=LINES_OF_NAMES)
    with pytest.raises(DataError, match=r"two/b\.csv: column 'label' .*a\.csv"):
        load_dataset("two")

    numbered = [f"{i},{label}" for i, label in enumerate(LABELS)]
    csv("texts/train.csv", "text,label", [f"a word {line}" for line in numbered])
    csv("texts/test.csv", "text,label", numbered)
    with pytest.raises(DataError, match=r"texts/test\.csv: column 'text' .*train\.csv"):
        load_dataset("texts")

    csv("names/train.csv")
    csv("names/test.csv", lines=LINES_OF_NAMES)
    with pytest.raises(DataError, match=r"'ill', 'well', .*'0', '1'"):
        load_dataset("names")


def test_decimals_in_one_file_and_integers_in_another_are_named() -> None:
    parquet("mixed/a.parquet", price=pa.array([Decimal(label) for label in LABELS]))
    parquet("mixed/b.parquet", price=LABELS)
    with pytest.raises(DataError, match=r"mixed/b\.parquet: column 'price' .*a\.parquet"):
        load_dataset("mixed")


def test_a_file_may_lack_a_column_only_where_something_is_done_about_it() -> None:
    csv("two/a.csv")
    csv("two/b.csv", "age,label", [f"{20 + i}.5,{label}" for i, label in enumerate(LABELS)])
    with pytest.raises(DataError, match=r"b\.csv .*'pressure'"):
        load_dataset("two")
    assert len(load_dataset("two", missing="mean").train) == 64


@pytest.mark.parametrize("stray", ["k.A.", "<0.5", "12%", '"1,234"', '"0,5"'])
def test_the_value_that_makes_numbers_a_text_is_named(stray: str) -> None:
    lines = [*LINES[:3], f"30,{stray},0", *LINES[3:]]
    place = rf"mine\.csv: example 3 has '{stray.strip(chr(34))}' in column 'pressure'"
    for fields in ({}, {"columns": ("age", "pressure")}, {"kind": "table"}):
        with pytest.raises(DataError, match=place):
            load_dataset(csv("mine.csv", lines=lines), **fields)
    assert told("mine.csv", columns=("age",))[0] == ("age",)


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators_are_told_by_the_first_line(separator: str) -> None:
    lines = [line.replace(",", separator) for line in LINES]
    csv("mine.csv", "age,pressure,label".replace(",", separator), lines)
    assert told("mine.csv")[0] == ("age", "pressure")

    decimal_commas = [line.replace(",", ";").replace(".5", ",5") for line in LINES]
    csv("commas.csv", "age;pressure;label", decimal_commas)
    with pytest.raises(DataError, match="example 0 has '20,5' in column 'age'"):
        load_dataset("commas.csv")


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_line_that_tells_excel_the_separator_is_named(separator: str, encoding: str) -> None:
    rows = [f"{i},{label}" for i, label in enumerate(LABELS)]
    lines = [f"sep={separator}", "age,label", *rows]
    text = "\r\n".join(lines).replace(",", separator)
    Path("mine.csv").write_text(text, encoding=encoding)
    with pytest.raises(DataError, match=r"mine\.csv .*sep="):
        load_dataset("mine.csv")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_csv_file_in_utf_16_is_named_with_its_encoding(encoding: str) -> None:
    text = Path(csv("mine.csv")).read_text(encoding="utf-8")
    Path("mine.csv").write_text(text, encoding=encoding)
    with pytest.raises(DataError, match=r"mine\.csv .*UTF-16"):
        load_dataset("mine.csv")


def test_endings_in_capitals_tabs_and_packed_files() -> None:
    assert told(csv("MINE.CSV"))[0] == ("age", "pressure")
    tabbed = [f"{i}\t{label}" for i, label in enumerate(LABELS)]
    assert told(csv("mine.tsv", "age\tlabel", tabbed))[0] == ("age",)
    with pytest.raises(DataError, match=r"mine\.csv\.gz"):
        load_dataset(csv("mine.csv.gz"))


def test_blanks_around_names_of_columns_do_not_count() -> None:
    assert told(csv("mine.csv", "age, pressure, label"))[0] == ("age", "pressure")


def test_a_quoted_name_is_a_name_and_nothing_is_missing() -> None:
    names = ("None", "tumour")
    lines = [f'{i},"{names[label]}"' for i, label in enumerate(LABELS)]
    assert load_dataset(csv("mine.csv", "age,label", lines)).classes == names

    lines[3] = '3,""'
    with pytest.raises(DataError, match="example 3 has no label"):
        load_dataset(csv("none.csv", "age,label", lines))


def test_the_column_labels_is_the_label_where_there_is_no_other() -> None:
    data = load_dataset(csv("mine.csv", "age,pressure,labels"))
    assert data.about.features == ("age", "pressure")
    assert data.classes == ("0", "1")


def test_a_file_of_names_alone_has_no_rows() -> None:
    with pytest.raises(DataError, match=r"mine\.csv"):
        load_dataset(csv("mine.csv", lines=[]))


def test_one_parquet_file_is_named_not_its_folder() -> None:
    pq.write_table(pa.table({"x": [1.0], "y": [1]}), "mine.parquet")
    with pytest.raises(DataError, match=r"mine\.parquet: .*'x', 'y'"):
        load_dataset("mine.parquet")


def test_which_files_were_read_is_said_where_names_do_not_say_it() -> None:
    for name in ("a", "b"):
        csv(f"mine/{name}.csv")
    assert load_dataset("mine").about.notes[0] == "read train from a.csv, b.csv"
    csv("mixed/train.csv")
    parquet("mixed/test.parquet")
    with pytest.raises(DataError, match=r"test\.parquet.*train\.csv"):
        load_dataset("mixed")


def test_a_validation_split_that_is_not_used_is_said() -> None:
    csv("mine/train.csv")
    csv("mine/valid.csv")
    (warning,) = load_dataset("mine").about.warnings
    assert "'validation'" in warning


def test_the_time_to_read_columns_does_not_grow_with_their_square(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is opened a few times, not once for each of its columns."""
    opened = []
    real = pq.ParquetFile

    def counting(*arguments: Any, **options: Any) -> Any:
        opened.append(arguments)
        return real(*arguments, **options)

    columns = {f"c{number}": ["a", "b"] for number in range(50)}
    columns |= {f"l{number}": [[1, 2], [3, 4]] for number in range(50)}
    path = tmp_path / "wide.parquet"
    pq.write_table(pa.table(columns), path)
    monkeypatch.setattr("pyarrow.parquet.ParquetFile", counting)

    read = tables.ParquetFrame((path,)).read(list(columns))

    assert read.column_names == list(columns)
    assert read.to_pydict() == columns
    assert len(opened) <= 3


# Types of columns that only some libraries write


def test_whole_numbers_in_lists_that_a_float_cannot_represent_are_refused() -> None:
    lists = [[2**60 + i] for i in range(N)]
    pq.write_table(pa.table({"v": lists, "label": LABELS}), "v.parquet")
    with pytest.raises(DataError, match=r"2\^53") as caught:
        load_dataset("v.parquet")
    assert "damaged" not in str(caught.value)
    with pytest.raises(DataError, match=r"2\^53"):
        from_python("mine", pq.read_table("v.parquet"))


@pytest.mark.parametrize("empty", [0, 3])
def test_the_example_with_an_empty_list_is_named(empty: int) -> None:
    lists = [[1.0, 2.0]] * N
    lists[empty] = []
    pq.write_table(pa.table({"v": lists, "label": LABELS}), "v.parquet")
    with pytest.raises(DataError, match=rf"example {empty} has no values"):
        load_dataset("v.parquet")


def test_records_are_neither_owners_nor_categories() -> None:
    name = parquet(place=[{"x": i % 2, "y": 1} for i in range(N)])
    with pytest.raises(DataError, match="'place' holds struct"):
        load_dataset(name, owner="place")
    with pytest.raises(DataError, match="'place' holds struct"):
        load_dataset(name, columns=("place",), categorical=(("place", ()),))


class _Celsius(pa.ExtensionType):  # type: ignore[misc]
    """Temperatures, as a library of another program may define them."""

    def __init__(self) -> None:
        super().__init__(pa.float64(), "test.celsius")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> _Celsius:
        del storage_type, serialized
        return cls()


def test_a_file_is_read_alike_whatever_extension_types_are_known() -> None:
    degrees = pa.ExtensionArray.from_storage(_Celsius(), pa.array(np.arange(N) * 0.1))
    name = parquet(degrees=degrees)
    features = ("x", "degrees")
    pa.register_extension_type(_Celsius())
    try:
        assert told(name) == (features, ())
    finally:
        pa.unregister_extension_type("test.celsius")
    shutil.rmtree(os.environ["FEDSTILL_CACHE"])
    assert told(name) == (features, ())


def test_texts_that_are_stored_as_views_are_texts() -> None:
    texts = pa.array([f"it is {label}" for label in LABELS], pa.string_view())
    pq.write_table(pa.table({"says": texts, "label": LABELS}), "mine.parquet")
    assert load_dataset("mine.parquet").about.kind == "text"
