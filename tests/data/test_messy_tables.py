"""Tables as they come out of hospitals: marks of missing values, decimal commas, Unicode forms."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedstill.config.tables import DataTable
from fedstill.core.errors import DataError
from fedstill.data.dataset import FILE, ReadRequest
from fedstill.data.sources import load_dataset
from fedstill.data.sources.schema import table_schema
from fedstill.data.sources.tables import ParquetFrame

COUNT = 40


pytestmark = pytest.mark.usefixtures("place")


def csv(header: str, *rows: str, name: str = "mine.csv") -> str:
    """A file whose rows repeat some texts, in which {} is the number of the row."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    lines = [rows[index % len(rows)].format(index) for index in range(COUNT)]
    Path(name).write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return name


def composed(text: str) -> str:
    """A text whose accented letters are one character."""
    return unicodedata.normalize("NFC", text)


def decomposed(text: str) -> str:
    """A text whose accents are characters of their own."""
    return unicodedata.normalize("NFD", text)


# Names in two Unicode forms


def test_labels_in_two_unicode_forms_are_one_class() -> None:
    name = csv("x,label", f"{{}},{composed('gestört')}", "{},frei", f"{{}},{decomposed('gestört')}")
    assert load_dataset(name).classes == ("frei", composed("gestört"))


@pytest.mark.parametrize("declared", [(), (decomposed("Köln"), "Bonn")])
def test_categories_in_two_unicode_forms_are_one(declared: tuple[str, ...]) -> None:
    rows = [f"{{}},{composed('Köln')},0", f"{{}},{decomposed('Köln')},1", "{},Bonn,1"]
    name = csv("x,ward,label", *rows)
    data = load_dataset(name, columns=("x", "ward"), categorical=(("ward", declared),))
    assert set(data.about.features) == {"x", "ward=Bonn", composed("ward=Köln")}
    one_hot_wards = data.train.values[:, 1:]
    assert (one_hot_wards.sum(1) == 1.0).all()


def test_owners_and_columns_in_two_unicode_forms_are_one() -> None:
    header = f"{decomposed('Größe')},{composed('Träger')},label"
    name = csv(header, f"{{}},{composed('Süd')},0", f"{{}},{decomposed('Süd')},1")
    data = load_dataset(name, columns=(composed("Größe"),), owner=decomposed("Träger"))
    assert data.about.owners == (composed("Süd"),)
    assert data.about.features == (composed("Größe"),)


def test_columns_of_parquet_files_in_two_unicode_forms_are_one() -> None:
    Path("d").mkdir()
    for split, form in (("train", composed), ("test", decomposed)):
        columns = [np.arange(10.0), ["a"] * 10, [0, 1] * 5]
        names = [form("Größe"), form("Gerät"), "label"]
        pq.write_table(pa.table(columns, names), f"d/{split}.parquet")
    data = load_dataset("d", columns=(decomposed("Größe"),), owner=composed("Gerät"))
    assert data.about.features == (composed("Größe"),)
    twice = {composed("ä"): [1.0, 2.0], decomposed("ä"): [1.0, 2.0], "label": [0, 1]}
    pq.write_table(pa.table(twice), "twice.parquet")
    with pytest.raises(DataError, match=r"twice\.parquet"):
        load_dataset("twice.parquet")


def test_class_folders_in_two_unicode_forms_are_one() -> None:
    for split, form in (("train", composed), ("test", decomposed)):
        for kind in ("Kätzchen", "Hund"):
            folder = Path("d") / split / form(kind)
            folder.mkdir(parents=True)
            for index in range(3):
                Image.new("L", (4, 4), index).save(folder / f"{index}.png")
    assert load_dataset("d").classes == ("Hund", composed("Kätzchen"))


# Missing values, labels that are none


@pytest.mark.parametrize("mark", ["None", "NA", "nan"])
@pytest.mark.parametrize(
    ("header", "row", "fields"),
    [
        ("x,label", "{{}},{}", {}),
        (
            "x,region,label",
            "{{}},{},0",
            {"columns": ("x", "region"), "categorical": (("region", ()),)},
        ),
        ("x,region,label", "{{}},{},0", {"owner": "region", "columns": ("x",)}),
    ],
)
def test_a_mark_that_may_be_a_name_is_named(
    mark: str, header: str, row: str, fields: dict[str, Any]
) -> None:
    rows = [row.format(value) for value in ("EU", mark, "AS")]
    with pytest.raises(DataError, match=f"example 1 .*{mark}.*data\\.missing_values"):
        load_dataset(csv(header, *rows), **fields)

    data = load_dataset(csv(header, *rows), **fields, missing_values=("?",))
    assert len(data.train) + len(data.test) == COUNT
    names = (*data.classes, *data.about.owners, *data.about.features)
    assert any(name.endswith(mark) for name in names)


def test_an_empty_field_is_no_name_whatever_marks_there_are() -> None:
    with pytest.raises(DataError, match="example 1 has no label") as caught:
        load_dataset(csv("x,label", "{},0", "{},"))
    assert "missing_values" not in str(caught.value)


@pytest.mark.parametrize("column", ["dose=mg", "x"])
def test_a_missing_value_names_its_column_even_if_its_name_has_an_equals_sign(column: str) -> None:
    name = csv(f"{column},label", "{},0", ",1")
    with pytest.raises(DataError, match=f"example 1 has no value in column '{column}'"):
        load_dataset(name)


def test_marks_of_missing_values_are_compared_as_numbers_and_as_texts() -> None:
    name = csv("a,b,label", "{},1.5,x", "-999.0,k.A.,y", "{},-999,x", "4,2.5,k.A.")
    fields: dict[str, Any] = {"missing_values": (-999, "k.A."), "missing": "mean"}
    data = load_dataset(name, **fields, unlabelled="drop")
    values = torch.cat([data.train.values, data.test.values])
    assert data.classes == ("x", "y")
    assert len(values) == 30
    assert int(values[:, 0].isnan().sum()) == 10
    assert int(values[:, 1].isnan().sum()) == 20

    table = {"a": [1, -999] * 20, "b": ["u", "k.A."] * 20, "label": [0, 1] * 20}
    pq.write_table(pa.table(table), "mine.parquet")
    columns = {"columns": ("a", "b"), "categorical": (("b", ()),)}
    read = load_dataset("mine.parquet", **columns, **fields)
    assert read.about.features == ("a", "b=u")
    assert int(read.train.values.isnan().sum()) == len(read.train)


@pytest.mark.parametrize(("first_label", "second_label"), [("0", "1"), ("0", "A")])
def test_numbers_mark_no_labels_and_no_owners(first_label: str, second_label: str) -> None:
    name = csv(
        "x,dose,site,label",
        f"{{}},1,{first_label},{first_label}",
        f"{{}},0,{second_label},{second_label}",
    )
    data = load_dataset(
        name, columns=("x", "dose"), owner="site", missing_values=(0,), missing="mean"
    )
    assert data.classes == data.about.owners == (first_label, second_label)
    assert set(data.train.labels.tolist()) == {0, 1}
    assert torch.equal(data.train.values[:, 1].isnan(), data.train.labels == 1)
    assert any("the label 0 is a class" in warning for warning in data.about.warnings)


def test_texts_mark_numbers_that_are_labels() -> None:
    name = csv("x,label", "{},0", "{},1", "{},-9")
    data = load_dataset(name, missing_values=("-9",), unlabelled="drop")
    assert data.classes == ("0", "1")


def test_other_marks_replace_the_usual_ones() -> None:
    with pytest.raises(DataError, match="'NA' in column 'a'"):
        load_dataset(csv("a,label", *["{},0"] * 9, "NA,1"), missing_values=(-1,), missing="mean")


def test_rows_without_a_label_are_left_out_on_request() -> None:
    name = csv("x,label", "{},0", "{},1", "{},")
    with pytest.raises(DataError, match=r"example 2 .*data\.unlabelled"):
        load_dataset(name)
    data = load_dataset(name, unlabelled="drop")
    assert len(data.train) + len(data.test) == 27
    assert 2.0 not in torch.cat([data.train.values, data.test.values])
    assert any("13 of 40" in note for note in data.about.notes)


def test_a_few_texts_among_numeric_labels_are_reported() -> None:
    data = load_dataset(csv("x,label", *["{},0", "{},1"] * 6, "{},k.A."))
    assert data.classes == ("0", "1", "k.A.")
    (warning,) = data.about.warnings
    assert "'k.A.' (3)" in warning
    assert load_dataset(csv("x,label", "{},ill", "{},well", "{},2")).about.warnings == ()
    name = csv("x,label", *["{},0", "{},1"] * 6, "{},k.A.")
    assert load_dataset(name, missing_values=("k.A.",), unlabelled="drop").classes == ("0", "1")


def test_a_column_without_any_value_is_one_of_missing_numbers_where_it_is_named() -> None:
    name = csv("age,ca,label", "{},,0", "{},,1")
    data = load_dataset(name, columns=("age", "ca"), missing="mean")
    assert data.about.features == ("age", "ca")
    assert bool(data.train.values[:, 1].isnan().all())
    assert load_dataset(name).about.features == ("age",)
    with pytest.raises(DataError, match=r"example 0 .*'ca'"):
        load_dataset(name, columns=("age", "ca"))


def test_fractional_labels_are_refused_with_their_row() -> None:
    with pytest.raises(DataError, match=r"example 1 .*0\.5"):
        load_dataset(csv("x,label", "{},1", "{},0.5"))


def test_a_negative_label_is_refused_with_the_start_of_class_ids() -> None:
    with pytest.raises(DataError, match=r"label -1.*from 0"):
        load_dataset(csv("x,label", "{},-1", "{},1"))


@pytest.mark.parametrize("text_split", ["train", "test"])
def test_codes_with_leading_zeros_are_the_same_in_all_files(text_split: str) -> None:
    for split in ("train", "test"):
        codes = ["01", "10"]
        if split == text_split:
            codes.append("A1")
        rows = [f"{{}},{code},{code},{code}" for code in codes]
        csv("x,ward, site ,label", *rows, name=f"d/{split}.csv")
    categories = (("ward", ("01", "10", "A1")),)
    data = load_dataset("d", columns=("x", "ward"), categorical=categories, owner="site")
    assert data.classes == data.about.owners == ("01", "10", "A1")
    for examples in (data.train, data.test):
        assert torch.equal(examples.labels, examples.values[:, 1:].argmax(1))
        assert examples.owners is not None
        assert torch.equal(examples.owners, examples.labels)
        assert {0, 1} <= set(examples.labels.tolist())


@pytest.mark.parametrize("codes", [("01", "02"), ("1.50", "10"), ("false", "true")])
def test_declared_categories_are_compared_as_they_are_written(codes: tuple[str, ...]) -> None:
    name = csv("x,code,label", *(f"{{}},{code},{code}!" for code in codes))
    data = load_dataset(name, columns=("x", "code"), categorical=(("code", codes),))
    assert data.about.categories == (("code", codes),)
    assert torch.equal(data.train.labels, data.train.values[:, 1:].argmax(1))


def test_declared_numbers_are_equal_however_they_are_written() -> None:
    name = csv("x,code,label", "{},1.0,a", "{},2,b")
    data = load_dataset(name, columns=("x", "code"), categorical=(("code", ("1", "2")),))
    assert torch.equal(data.train.labels, data.train.values[:, 1:].argmax(1))


# Decimal commas


def test_decimal_commas_are_read_on_request() -> None:
    name = csv("größe;gewicht;label", "1,{};12,5;0", "2,{};13;1")
    with pytest.raises(DataError, match=r'data\.decimal = ","'):
        load_dataset(name)
    data = load_dataset(name, decimal=",")
    values = torch.cat([data.train.values, data.test.values])
    assert data.about.features == ("größe", "gewicht")
    assert {12.5, 13.0} == set(values[:, 1].tolist())
    assert torch.isclose(values[:, 0], torch.tensor(1.2)).any()


@pytest.mark.parametrize(
    ("values", "decimal"),
    [
        (("1.000,5", "2.000,5"), ","),
        (("1.000", "2.000"), ","),
        (("1,000.5", "2,000.5"), "."),
        (("1 000", "2 000"), "."),
        (("1\u00a0000,5", "2\u00a0000,5"), ","),
        (("1\u202f000", "2\u202f000"), "."),
        (("1’000", "2’000"), "."),
        (("0%", "1%"), "."),
        (("0,5 %", "1 %"), ","),
    ],
)
def test_numbers_in_another_notation_are_not_suggested_as_missing(
    values: tuple[str, str], decimal: str
) -> None:
    first, second = values
    name = csv("x;y;label", f"{first};{{}};0", f"{second};{{}};1")
    with pytest.raises(DataError, match="'x'") as refusal:
        load_dataset(name, decimal=decimal)
    assert "missing_values" not in str(refusal.value)
    assert "remove" in str(refusal.value)


@pytest.mark.parametrize(
    ("cell", "remedy"),
    [("0,5 €", "'€'"), ("$ 20", "'[$]'"), ("5 mg", "'mg'")],
)
def test_units_of_numbers_are_to_be_removed(cell: str, remedy: str) -> None:
    lines = [f"{index};{index % 2}" for index in range(COUNT)]
    Path("mine.csv").write_text("\n".join(["x;label", *lines, f"{cell};1"]), encoding="utf-8")
    with pytest.raises(DataError, match=remedy) as refusal:
        load_dataset("mine.csv")
    assert "missing_values" not in str(refusal.value)


@pytest.mark.parametrize("cell", ["<5", "> 90", "<=0.5"])
def test_bounds_are_to_be_replaced_by_numbers_or_declared_missing(cell: str) -> None:
    name = csv("x,label", "{},0", "{},1", f"{cell},1")
    with pytest.raises(DataError, match=r"bounds.*data\.missing_values"):
        load_dataset(name)
    assert len(load_dataset(name, missing_values=(cell,), missing="drop").train) < COUNT


def test_a_number_with_a_decimal_comma_is_no_stray_if_commas_are_decimal_marks() -> None:
    name = csv("x;label", "1,5;0", "2,5;1", "k.A.;1")
    with pytest.raises(DataError, match=r"example 2 has 'k\.A\.'"):
        load_dataset(name, decimal=",")


@pytest.mark.parametrize(
    ("fields", "role"),
    [({}, "label"), ({"owner": "label", "label_column": "x"}, "owner")],
)
def test_a_column_with_another_role_is_no_input(fields: dict[str, Any], role: str) -> None:
    name = csv("x,y,label", "{},1,0", "{},2,1")
    with pytest.raises(DataError, match=f"'label' holds the {role}s.*remove"):
        load_dataset(name, columns=("y", "label"), **fields)


# A column that names the split, a file for each client


def test_a_column_names_the_split() -> None:
    name = csv("x,fold,label", "{},Train,0", "{},train,1", "{},TEST,1", "{},val,0")
    data = load_dataset(name, split_column="fold")
    assert data.about.features == ("x",)
    assert (len(data.train), len(data.test)) == (20, 10)
    assert data.validation is not None
    assert data.train.values[:3, 0].tolist() == [0.0, 1.0, 4.0]
    assert data.test.values[:2, 0].tolist() == [2.0, 6.0]


def test_rows_of_no_split_are_left_out_with_a_warning() -> None:
    rows = ["{},train,0", "{},train,1", "{},test,1", "{},spare,0", "{},,1"]
    name = csv("x,fold,label", *rows)
    data = load_dataset(name, split_column="fold")
    assert len(data.train) == 16
    assert len(data.test) == 8
    assert any("16 of 40 rows" in warning for warning in data.about.warnings)

    for values in (("a", "b"), ("test", "test")):
        without_training = csv("x,fold,label", *[f"{{}},{value},0" for value in values])
        with pytest.raises(DataError, match="'fold'"):
            load_dataset(without_training, split_column="fold")
    with pytest.raises(DataError, match=r"data\.split_column"):
        load_dataset(name, split_column="split")


def test_each_file_is_a_client() -> None:
    for hospital in ("south", "north"):
        csv("x,label", "{},0", "{},1", name=f"d/{hospital}_train.csv")
        csv("x,label", "{},0", "{},1", name=f"d/{hospital}_test.csv")
    data = load_dataset("d", owner=FILE)
    assert data.about.owners == ("north", "south")
    assert data.train.owners is not None
    assert data.test.owners is not None
    assert data.train.owners.tolist() == [0] * COUNT + [1] * COUNT
    assert data.about.features == ("x",)


def test_each_folder_is_a_client() -> None:
    for hospital in ("south", "north"):
        for kind in ("cat", "dog"):
            folder = Path("d") / hospital / kind
            folder.mkdir(parents=True)
            for index in range(5):
                Image.new("L", (4, 4), index).save(folder / f"{index}.png")
    data = load_dataset("d", owner=FILE)
    assert data.about.owners == ("north", "south")
    assert data.train.owners is not None
    assert torch.bincount(data.train.owners).tolist() == [8, 8]


# What is not clear, and what is explained


def test_the_lines_of_a_message_can_be_pasted() -> None:
    name = csv('age,sex,"on ward",note,label', "{0},f,A,{0} words,0", "{0},m,B,{0} others,1")
    with pytest.raises(DataError, match=r"data\]") as caught:
        load_dataset(name)
    lines = re.search(r"(columns = \[.*?\]) and (categorical = \{.*?\}) \(", str(caught.value))
    assert lines is not None
    data = DataTable.read(tomllib.loads("\n".join(lines.groups())), "data")
    assert data.columns == ("age", "sex", "on ward")
    read = load_dataset(name, **data.form)
    assert read.about.features == ("age", "sex=f", "sex=m", "on ward=A", "on ward=B")


def test_a_schema_explains_each_column() -> None:
    times = pa.array([0, 1], pa.timestamp("s"))
    columns = {"": [0, 1], "age": [1.0, 2.0], "when": times, "label": [0, 1]}
    pq.write_table(pa.table(columns), "mine.parquet")
    frame = ParquetFrame((Path("mine.parquet"),))
    schema = table_schema("mine", frame.schema, ReadRequest())
    assert schema is not None
    assert [role.role for role in schema.roles] == ["left out", "input", "left out", "label"]
    assert len(str(schema).splitlines()) == len(columns)
    assert "a column without a name (" in schema.left_out
    assert "when (timestamp)" in schema.left_out


# Size


def test_texts_and_numbers_are_read_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of its own for each value would take minutes for a million rows."""
    rows = 50_000
    labels = np.where(np.arange(rows) % 2, "ill", "well")
    notes = [f"n{row}" for row in range(rows)]
    table = pa.table({"x": np.arange(rows) % 7, "note": notes, "label": labels})
    pq.write_table(table, "large.parquet")
    batches = 0
    iter_batches = pq.ParquetFile.iter_batches

    def counted(self: pq.ParquetFile, *args: Any, **options: Any) -> Any:
        nonlocal batches
        for batch in iter_batches(self, *args, **options):
            batches += 1
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    read = load_dataset("large.parquet", columns=("x",), owner="note")
    assert len(read.about.owners) == rows
    assert batches < 10
