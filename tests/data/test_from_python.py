"""Data that Python has: each kind is read as files of the same data are, and clients keep names."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fedstill.core.errors import ConfigError, DataError, UnknownName
from fedstill.data.dataset import Dataset, examples_digest
from fedstill.data.sources import from_clients, from_python, from_tensors, load_dataset

N = 60
LABELS = np.arange(N) % 3


def patients(count: int = N, seed: int = 0) -> pd.DataFrame:
    """Rows with numbers, categories, owners and named labels."""
    draw = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "age": draw.integers(20, 80, count),
            "pressure": draw.normal(120, 10, count).round(1),
            "ward": draw.choice(["A", "B", "C"], count),
            "hospital": draw.choice(["north", "south"], count),
            "label": np.where(np.arange(count) % 3, "ill", "healthy"),
        }
    )


FIELDS: dict[str, Any] = {
    "columns": ("age", "pressure", "ward"),
    "categorical": (("ward", ()),),
    "label_column": "label",
}


class Pairs(torch.utils.data.Dataset[Any]):
    """A data set as torchvision's are: values by number, perhaps through a transform."""

    def __init__(self, values: Any, labels: Any, transform: Any = None) -> None:
        self.values = values
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        value = self.values[index]
        if self.transform is not None:
            value = self.transform(value)
        return value, self.labels[index]


def pixels(*shape: int) -> np.ndarray[Any, Any]:
    """Random images of one shape."""
    return np.random.default_rng(0).integers(0, 255, (N, *shape)).astype("uint8")


def pictures(mode: str = "RGB") -> list[Image.Image]:
    """Random images of 8 × 8 pixels."""
    array = pixels(8, 8, 3)
    if mode == "L":
        array = pixels(8, 8)
    return [Image.fromarray(picture) for picture in array]


def same(data: Dataset, expected: Dataset) -> bool:
    """Whether two data sets hold the same, and say the same about it."""
    return (
        examples_digest(data.train) == examples_digest(expected.train)
        and examples_digest(data.test) == examples_digest(expected.test)
        and data.classes == expected.classes
        and data.about == expected.about
    )


# Columns


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_data_frame_is_read_as_its_file_is(tmp_path: Path, suffix: str) -> None:
    frame = patients()
    path = tmp_path / f"mine{suffix}"
    if suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    for fields in (FIELDS, {**FIELDS, "owner": "hospital"}):
        assert same(from_python("mine", frame, **fields), load_dataset(path, **fields))
    table = pa.Table.from_pandas(frame)
    assert same(from_python("mine", table, **FIELDS), from_python("mine", frame, **FIELDS))


def test_categories_and_lists_are_written_as_in_a_config() -> None:
    want = from_python("mine", patients(), **FIELDS)
    columns = ["age", "pressure", "ward"]
    assert same(from_python("mine", patients(), columns=columns, categorical=["ward"]), want)
    names = {"ward": ["C", "A", "B"]}
    by_name = from_python("mine", patients(), columns=columns, categorical=names)
    assert by_name.about.categories == (("ward", ("C", "A", "B")),)


@pytest.mark.parametrize(
    "categorical",
    [
        ["ward"],
        {"ward": ["A", "B", "C"]},
        pd.Index(["ward"]),
        {"ward": pd.array(["A", "B", "C"], dtype="string")},
        {"ward": np.array(["A", "B", "C"])},
    ],
)
def test_categories_of_a_file_are_written_as_in_a_config(tmp_path: Path, categorical: Any) -> None:
    path = tmp_path / "mine.csv"
    patients().to_csv(path, index=False)
    fields = {"columns": patients().columns[:3], "categorical": categorical}
    assert same(load_dataset(path, **fields), load_dataset(path, **FIELDS))
    assert same(from_python("mine", patients(), **fields), load_dataset(path, **FIELDS))


def test_the_advice_about_an_empty_split_names_no_file() -> None:
    with pytest.raises(DataError, match="mine, test holds no examples") as caught:
        from_python("mine", patients(), test=patients()[:0], **FIELDS)
    assert "file" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("columns", "age", r"data\.columns = 'age': input should be a list, \['age'\]"),
        ("missing_values", "NA", r"data\.missing_values = 'NA': input should be a list"),
        ("kind", "tabel", r"data\.kind = 'tabel': input should be one of"),
        ("missing", "Mean", r"data\.missing = 'Mean'"),
        ("unlabelled", "keep", r"data\.unlabelled = 'keep'"),
        ("marks", ("weight",), r"data\.missing_marks = \['weight'\].*not among the inputs age"),
    ],
)
def test_a_wrong_option_is_refused(field: str, value: Any, message: str, tmp_path: Path) -> None:
    fields = {"columns": ["age"], field: value}
    with pytest.raises(ConfigError, match=message):
        from_python("mine", patients(), **fields)
    path = tmp_path / "mine.csv"
    patients().to_csv(path, index=False)
    with pytest.raises(ConfigError, match=message):
        load_dataset(path, **fields)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", "serie", "kind = 'serie': input should be one of"),
        ("vocabulary", "10", "vocabulary = '10': input should be a valid integer"),
        ("mean", [float("nan")], "be finite"),
        ("mean", "a", "must be lists of numbers"),
    ],
)
def test_a_wrong_description_of_tensors_is_refused(field: str, value: Any, message: str) -> None:
    fields = {"mean": [0.5], "std": [0.5], field: value}
    with pytest.raises(ConfigError, match=message):
        from_tensors("mine", (pixels(1, 8, 8), np.arange(N) % 2), **fields)


@pytest.mark.parametrize("as_numbers", [np.float32, torch.tensor, lambda numbers: numbers[0]])
def test_mean_and_std_may_be_arrays_or_a_number(as_numbers: Any) -> None:
    numbers = as_numbers([0.5])
    images = (pixels(1, 8, 8), np.arange(N) % 2)
    data = from_tensors("mine", images, mean=numbers, std=numbers)
    assert json.dumps([data.mean, data.std]) == "[[0.5], [0.5]]"


def test_a_vocabulary_may_be_a_number_of_numpy() -> None:
    ids = np.arange(4 * N).reshape(N, 4) % 7
    data = from_tensors("mine", (ids, np.arange(N) % 2), vocabulary=ids.max() + 1)
    assert json.dumps(data.vocabulary) == "7"


def test_an_index_is_left_out_as_that_of_a_file_is(tmp_path: Path) -> None:
    frame = patients().drop(columns=["ward", "hospital"]).set_index("age").sort_index()
    frame.to_parquet(tmp_path / "mine.parquet")
    data = from_python("mine", frame)
    assert data.about.columns == ("pressure",)
    assert same(data, load_dataset(tmp_path / "mine.parquet"))


def test_the_numbers_of_rows_of_some_clients_are_no_column() -> None:
    frame = patients().drop(columns=["ward", "hospital"])
    mixed = {"north": frame[:30].reset_index(drop=True), "south": frame[30:]}
    one_with_a_name = {"north": frame[:30], "south": frame[30:].rename_axis("patient")}
    for frames in (mixed, one_with_a_name):
        for clients in (frames, dict(reversed(frames.items()))):
            data = from_python("mine", clients, test=frame)
            assert data.about.columns == ("age", "pressure")
    assert from_python("mine", mixed, test=frame).about.warnings == ()


def test_a_column_names_the_splits_of_each_client() -> None:
    frame = patients().assign(split=["train", "train", "test"] * 20)
    clients = {"south": frame[30:], "north": frame[:30]}
    data = from_python("mine", clients, split_column="split", **FIELDS)
    assert by_client(data) == {"south": 20, "north": 20}
    assert by_client(data, "test") == {"south": 10, "north": 10}


def test_splits_may_be_a_pair_a_mapping_or_keywords() -> None:
    train = patients(40, 1)
    test = patients(20, 2)
    validation = patients(10, 3)
    want = from_python("mine", train, test, **FIELDS)
    assert len(want.train) == 40
    assert len(want.test) == 20
    assert same(from_python("mine", (train, test), **FIELDS), want)
    assert same(from_python("mine", {"train": train, "Testing": test}, **FIELDS), want)
    three = from_python("mine", {"train": train, "val": validation, "test": test}, **FIELDS)
    assert three.validation is not None
    assert len(three.validation) == 10


def test_missing_values_are_treated_as_the_fields_say() -> None:
    frame = patients()
    frame.loc[3, "pressure"] = np.nan
    with pytest.raises(DataError, match=r"mine, train: example 3 .*'pressure'.*data\.missing"):
        from_python("mine", frame, **FIELDS)
    data = from_python("mine", frame, missing="drop", **FIELDS)
    assert len(data.train) + len(data.test) == N - 1


def test_columns_that_arrow_cannot_have_are_refused_with_their_names() -> None:
    mixed = pd.DataFrame({"age": [1, "two", 3.0], "label": [0, 1, 0]})
    with pytest.raises(DataError, match=r"'?age'?"):
        from_python("mine", mixed)
    with pytest.raises(DataError, match=r"mine, train: .*Series"):
        from_python("mine", patients()["age"])


def encoded(picture: Image.Image, folder: Path, number: int) -> str:
    path = folder / f"{number:03}.png"
    picture.save(path)
    return str(path)


def test_hugging_face_columns_texts_and_class_labels(tmp_path: Path) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    texts = [f"day {i % 7} of {i}" for i in range(N)]
    columns = {"text": texts, "label": [i % 2 for i in range(N)]}
    hub = datasets.Dataset.from_dict(columns, features=features)
    hub.to_parquet(tmp_path / "mine.parquet")
    data = from_python("mine", hub, length=4, vocabulary=64)
    assert data.classes == ("no", "yes")
    assert same(data, load_dataset(tmp_path / "mine.parquet", length=4, vocabulary=64))
    shuffled = hub.shuffle(seed=1).select(range(40))
    assert len(from_python("mine", shuffled, hub, length=4).train) == 40


def test_hugging_face_images_in_bytes_and_in_files_with_their_splits(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    paths = [encoded(p, tmp_path / "images", i) for i, p in enumerate(pictures())]
    columns = {"image": paths, "label": LABELS.tolist()}
    hub = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    data = from_python("mine", hub)
    split = hub.train_test_split(test_size=0.5, shuffle=False)
    from_dict = from_python("mine", split)
    assert data.input_shape == (3, 8, 8)
    assert (len(from_dict.train), len(from_dict.test)) == (30, 30)
    split["unsupervised"] = split["test"]
    (warning,) = from_python("mine", split).about.warnings
    assert "unsupervised" in warning

    with_bytes = hub.map(lambda row: row, writer_batch_size=7)  # it embeds the files
    with_bytes.to_parquet(tmp_path / "mine.parquet")
    assert same(data, load_dataset(tmp_path / "mine.parquet"))
    assert from_python("mine", hub, size=4).input_shape == (3, 4, 4)


def test_hugging_face_arrays_and_formats(tmp_path: Path) -> None:
    waves = np.random.default_rng(0).random((N, 2, 16)).astype("float32")
    features = datasets.Features(
        {"wave": datasets.Array2D((2, 16), "float32"), "label": datasets.Value("int64")}
    )
    hub = datasets.Dataset.from_dict(
        {"wave": waves.tolist(), "label": LABELS.tolist()}, features=features
    )
    want = from_tensors("mine", (waves, LABELS))
    assert examples_digest(from_python("mine", hub).train) == examples_digest(want.train)
    formatted = hub.with_format("torch")
    assert examples_digest(from_python("mine", formatted).train) == examples_digest(want.train)
    transformed = hub.with_transform(lambda rows: rows)
    (warning,) = from_python("mine", transformed).about.warnings
    assert "map()" in warning
    two = hub.add_column("noise", list(range(N)))
    two.set_format("numpy", columns=["wave", "label"])
    assert from_python("mine", two).about.warnings == ()


# Pairs of values and labels


@pytest.mark.parametrize(
    "values",
    [
        torch.from_numpy(pixels(3, 8, 8)),
        pixels(3, 8, 8),
        pixels(3, 8, 8) / np.float32(255),
        np.random.default_rng(0).random((N, 5)),
        torch.rand(N, 2, 16),
    ],
)
@pytest.mark.parametrize("label_type", [int, np.int64, torch.tensor, float, "one_number"])
def test_items_are_read_as_arrays_of_them_are(values: Any, label_type: Any) -> None:
    labels = [int(label) for label in LABELS]
    if label_type == "one_number":  # as FLamby has them
        labels = [torch.tensor([float(label)]) for label in labels]
    else:
        labels = [label_type(label) for label in labels]
    want = from_tensors("mine", (values, LABELS))
    assert same(from_python("mine", Pairs(values, labels)), want)
    assert same(from_python("mine", (values, LABELS)), want)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pictures_are_read_as_a_folder_of_them_is(tmp_path: Path, mode: str) -> None:
    images = pictures(mode)
    order = sorted(range(N), key=lambda i: (LABELS[i], i))
    for i in order:
        folder = tmp_path / "mine" / "abc"[LABELS[i]]
        folder.mkdir(parents=True, exist_ok=True)
        encoded(images[i], folder, i)
    source = Pairs([images[i] for i in order], [int(LABELS[i]) for i in order])
    source.classes = ["a", "b", "c"]  # type: ignore[attr-defined]
    assert same(from_python("mine", source), load_dataset(tmp_path / "mine"))
    assert from_python("mine", source, size=4).input_shape[1:] == (4, 4)
    assert from_python("mine", source, mode="grey").input_shape == (1, 8, 8)

    images[1] = images[1].resize((8, 9))
    with pytest.raises(DataError, match=r"mine, train: example 1 .*data.size"):
        from_python("mine", Pairs(images, LABELS))


def test_pictures_are_upright_and_their_sixteen_bits_are_a_warning(tmp_path: Path) -> None:
    for i, picture in enumerate(pictures()[:12]):
        folder = tmp_path / "mine" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif[0x0112] = 6
        picture.resize((8, 6)).save(folder / f"{i:02}.png", exif=exif)

    files = sorted(tmp_path.glob("mine/*/*.png"))
    turned = Pairs(list(map(Image.open, files)), [0] * 6 + [1] * 6)
    turned.classes = ["a", "b"]  # type: ignore[attr-defined]
    data = from_python("mine", turned)
    assert data.input_shape == (3, 8, 6)
    assert same(data, load_dataset(tmp_path / "mine"))

    dark = [Image.fromarray(np.full((8, 8), i, dtype="uint16")) for i in range(N)]
    (warning,) = from_python("mine", Pairs(dark, LABELS)).about.warnings
    assert "16-bit" in warning


def test_a_data_set_may_draw_all_pictures_into_the_same_one() -> None:
    """Threads decode large images later than they are read."""
    side = 100
    values = pixels(3, side, side)

    class Reused(Pairs):
        canvas = Image.new("RGB", (side, side))

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            self.canvas.paste(Image.fromarray(values[index].transpose(1, 2, 0)))
            return self.canvas, int(LABELS[index])

    assert same(from_python("mine", Reused(values, LABELS)), from_tensors("mine", (values, LABELS)))


def test_a_truncated_picture_is_named() -> None:
    file = io.BytesIO()
    Image.fromarray(pixels(8, 8, 3)[0]).save(file, "png")
    good = file.getvalue()
    files = [good, good[:-60]] + [good] * 38
    images = [Image.open(io.BytesIO(content)) for content in files]
    broken = Pairs(images, [0, 1] * 20)
    with pytest.raises(DataError, match=r"mine, train: example 1 cannot be decoded"):
        from_python("mine", broken)


def test_the_classes_of_a_data_set_are_those_of_its_subsets() -> None:
    source = Pairs(pixels(3, 8, 8), LABELS)
    source.classes = ["a", "b", "c"]  # type: ignore[attr-defined]
    assert from_python("mine", Subset(source, range(30))).classes == ("a", "b", "c")
    assert from_python("mine", source, classes=["x", "y", "z"]).classes == ("x", "y", "z")
    reverse = Pairs(pixels(3, 8, 8), LABELS)
    reverse.classes = ["c", "b", "a"]  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"mine, test .*classes="):
        from_python("mine", source, reverse)
    renamed = from_python("mine", source, reverse, classes=["x", "y", "z"])
    assert renamed.classes == ("x", "y", "z")


def pairs_of_classes(names: list[str]) -> Pairs:
    """A data set that names its classes."""
    data = Pairs(torch.rand(N, 5), LABELS)
    data.classes = names  # type: ignore[attr-defined]
    return data


def test_the_classes_of_a_concatenation_are_those_of_its_parts() -> None:
    names = ["a", "b", "c"]
    parts = [
        Subset(pairs_of_classes(names), range(40)),
        ConcatDataset([pairs_of_classes(names), pairs_of_classes(names)]),
    ]
    assert from_python("mine", Subset(ConcatDataset(parts), range(100))).classes == ("a", "b", "c")


def test_a_concatenation_of_data_sets_with_other_classes_is_refused() -> None:
    mixed = ConcatDataset([pairs_of_classes(["a", "b", "c"]), pairs_of_classes(["c", "b", "a"])])
    with pytest.raises(DataError, match=r"different classes.*classes="):
        from_python("mine", mixed)
    assert from_python("mine", mixed, classes=["x", "y", "z"]).classes == ("x", "y", "z")


def test_a_data_loader_is_its_data_set() -> None:
    source = TensorDataset(torch.rand(N, 5), torch.from_numpy(LABELS))
    want = from_tensors("mine", (source.tensors[0], source.tensors[1]))
    for shuffle in (False, True):
        data = from_python("mine", DataLoader(source, batch_size=7, shuffle=shuffle))
        assert examples_digest(data.train) == examples_digest(want.train)
        (warning,) = data.about.warnings
        assert "plan.batch" in warning
    data = from_python("mine", DataLoader(source, collate_fn=lambda rows: rows))
    assert "collate_fn" in data.about.warnings[0]
    loaders = DataLoader(source), DataLoader(source)
    assert len(from_python("mine", loaders).about.warnings) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": SubsetRandomSampler(range(30))},
        {"sampler": WeightedRandomSampler([1.0] * N, N)},
        {"batch_sampler": BatchSampler(SubsetRandomSampler(range(30)), 4, drop_last=False)},
    ],
)
def test_a_sampler_that_selects_is_refused(options: dict[str, Any]) -> None:
    source = TensorDataset(torch.rand(N, 5), torch.from_numpy(LABELS))
    with pytest.raises(DataError, match=r"mine, train: .*RandomSampler.*Subset\("):
        from_python("mine", DataLoader(source, **options))


@pytest.mark.parametrize(
    "draw", [random.random, lambda: np.random.random(), lambda: torch.rand(1).item()]
)
def test_a_transform_that_draws_is_a_warning_and_gives_the_same_each_time(draw: Any) -> None:
    source = Pairs(torch.rand(N, 5), LABELS, transform=lambda row: row + draw())
    data = from_python("mine", source)
    draw()
    assert same(from_python("mine", source), data)
    (warning,) = data.about.warnings
    assert "data.augment" in warning

    python_state = random.getstate()
    numpy_state = np.random.get_state()[1].tolist()
    torch_state = torch.get_rng_state().tolist()
    from_python("mine", source)
    assert python_state == random.getstate()
    assert numpy_state == np.random.get_state()[1].tolist()
    assert torch_state == torch.get_rng_state().tolist()


@pytest.mark.parametrize(
    ("values", "labels", "match"),
    [
        (torch.rand(N, 5), LABELS + 0.5, r"mine, train: .*regression"),
        (torch.rand(N, 5), [None] * N, r"mine, train: example 0 "),
        (torch.rand(N, 5), [float("nan")] * N, r"mine, train: example 0 "),
        (torch.rand(N, 5), torch.eye(3)[LABELS], r"example 0 has shape \(3,\).*argmax"),
        (torch.rand(N, 5), ["cat"] * N, r"mine, train: labels .*classes="),
        ([[1.0, 2.0]] * N, LABELS, r"mine, train: .*example 0 is a list"),
        (["a text"] * N, LABELS, r"mine, train: .*example 0 is a str"),
        ([*torch.rand(9, 5), torch.rand(4)], LABELS, r"mine, train: example 9 .*\(4,\)"),
        ([*pictures()[:4], torch.rand(3, 8, 8)], LABELS, r"mine, train: example 4 is a Tensor"),
        ([*pixels(3, 8, 8)[:4], torch.rand(3, 8, 8)], LABELS, r"mine, train: example 4 is"),
        ([], [], "mine, train holds no examples"),
        ([image.convert("HSV") for image in pictures()], LABELS, "mine, train: example 0 .*HSV"),
        (pixels(64, 48, 3), LABELS, r"mine, train: .*transpose\(0, 3, 1, 2\)"),
    ],
)
def test_items_that_cannot_be_examples_are_named(values: Any, labels: Any, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        from_python("mine", Pairs(values, labels))
    assert "\n" not in str(caught.value)


def test_tensors_of_a_computation_are_read_without_their_gradients() -> None:
    values = torch.rand(N, 5, requires_grad=True)
    data = from_python("mine", Pairs(values, LABELS))
    assert not data.train.values.requires_grad
    half = from_python("mine", Pairs(values.detach().bfloat16(), LABELS))
    assert half.train.values.dtype == torch.float32


def test_an_item_that_is_no_pair_or_raises_is_named() -> None:
    class Rows(Pairs):
        def __getitem__(self, index: int) -> Any:
            return {"x": self.values[index], "y": self.labels[index]}

    with pytest.raises(DataError, match="mine, train: example 0 is a dict"):
        from_python("mine", Rows(torch.rand(N, 5), LABELS))
    with pytest.raises(ZeroDivisionError) as caught:
        from_python("mine", Pairs(torch.rand(N, 5), LABELS, transform=lambda row: 1 // 0))
    assert caught.value.__notes__ == ["mine, train: example 0 could not be read"]


# What is refused


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.rand(5), 0)])


@pytest.mark.parametrize(
    "data",
    [
        object(),
        "digits",
        Path("digits"),
        torch.rand(N, 5),
        [(torch.rand(5), 0)] * N,
        Stream(),
        DataLoader(Stream()),
        datasets.Dataset.from_dict({"a": [1.0]}).to_iterable_dataset(),
        {"north": 3},
    ],
)
def test_other_objects_are_refused_with_what_is_taken(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"mine.*fedstill\.from_tensors\("):
        from_python("mine", data)


def test_fields_that_the_data_do_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        from_python("mine", (torch.rand(N, 5), LABELS), tokenizer="bytes")
    with pytest.raises(ConfigError, match="classes"):
        from_python("mine", patients(), classes=["a", "b"])
    with pytest.raises(UnknownName, match=r"'label_colum'.*label_column"):
        from_python("mine", patients(), label_colum="label")

    values = torch.rand(N, 5)
    tensors = TensorDataset(values, torch.from_numpy(LABELS))
    for source in ((values, LABELS), tensors, Pairs(values, LABELS)):
        with pytest.raises(ConfigError, match="mine, train: size"):
            from_python("mine", source, size=4)

    for size in (0, 4097):
        with pytest.raises(ConfigError, match=f"data.size = {size}"):
            from_python("mine", Pairs(pictures(), LABELS), size=size)
    with pytest.raises(ConfigError, match="mode = 'blue'"):
        from_python("mine", Pairs(pictures(), LABELS), mode="blue")


def test_columns_and_pairs_in_one_data_set_are_refused() -> None:
    pair = torch.rand(N, 5), LABELS
    with pytest.raises(DataError, match=r"mine, client south, train .* mine, client north, train"):
        from_python("mine", {"north": pair, "south": patients()})


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({}, "mine: .*client"),
        ({1: 0, "1": 0}, "mine: the names of two clients"),
        ({"test": 0}, "'test'.*train"),
        ({"train": 0, "north": 0}, "mine: 'north'"),
        ({"train": 0, "training": 0}, "two splits for train"),
        ({"north": {"x": 0, "y": 0}}, "mine, client north .*'x', 'y'"),
    ],
)
def test_a_mapping_holds_either_splits_or_clients(data: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        from_python("mine", data)


# Clients


def by_client(data: Dataset, split: str = "train") -> dict[str, int]:
    """The number of examples of each client in a split."""
    owners = getattr(data, split).owners
    assert owners is not None
    counts = torch.bincount(owners, minlength=len(data.about.owners))
    return dict(zip(data.about.owners, counts.tolist(), strict=True))


def all_by_client(data: Dataset) -> dict[str, int]:
    """The number of training and test examples of each client."""
    test_counts = by_client(data, "test")
    return {name: count + test_counts[name] for name, count in by_client(data).items()}


def test_frames_of_clients_keep_the_order_and_names_of_the_mapping() -> None:
    frames = {"south": patients(30, 1), "north": patients(20, 2), 7: patients(12, 3)}
    data = from_python("mine", frames, test=patients(10, 4), **FIELDS)
    assert by_client(data) == {"south": 30, "north": 20, "7": 12}
    assert data.test.owners is None
    together = from_python("mine", pd.concat(frames.values()), test=patients(10, 4), **FIELDS)
    assert examples_digest(data.train) == examples_digest(together.train)
    assert examples_digest(data.test) == examples_digest(together.test)

    client_pairs = {name: (frame, patients(6, 5)) for name, frame in frames.items()}
    data = from_python("mine", client_pairs, **FIELDS)
    assert by_client(data, "test") == {"south": 6, "north": 6, "7": 6}
    data = from_python("mine", client_pairs, test=patients(10, 4), **FIELDS)
    assert len(data.test) == 10
    assert data.test.owners is None
    assert any("test=" in warning for warning in data.about.warnings)

    held_out = from_python("mine", frames, **FIELDS)
    assert all_by_client(held_out) == {"south": 30, "north": 20, "7": 12}


def test_a_dropped_row_leaves_the_other_rows_with_their_clients() -> None:
    frames = {"south": patients(30, 1), "north": patients(20, 2)}
    frames["south"].loc[[3, 4], "pressure"] = np.nan
    data = from_python("mine", frames, test=patients(9, 4), missing="drop", **FIELDS)
    assert by_client(data) == {"south": 28, "north": 20}
    assert any("south 2" in note for note in data.about.notes)


def test_an_empty_column_of_one_client_has_the_type_of_the_others() -> None:
    frames = {"south": patients(30, 1), "north": patients(20, 2)}
    frames["south"]["pressure"] = None
    data = from_python("mine", frames, missing="mean", **FIELDS)
    assert data.about.columns == FIELDS["columns"]
    frames["south"]["pressure"] = "high"
    with pytest.raises(DataError, match="pressure"):
        from_python("mine", frames, **FIELDS)


def test_columns_that_a_client_lacks_are_named_with_the_client() -> None:
    south = patients(30, 1)
    north = patients(20, 2).drop(columns=["pressure"])
    frames = {"south": south, "north": north}
    with pytest.raises(DataError, match="north has no 'pressure'"):
        from_python("mine", frames, **FIELDS)
    with pytest.raises(DataError, match=r"south has no 'pulse', .*north has no 'pressure'"):
        from_python(
            "mine",
            {"south": south, "north": north.assign(pulse=70)},
            label_column="label",
            columns=("age", "pressure", "pulse"),
        )
    assert by_client(from_python("mine", frames, missing="mean", **FIELDS))
    assert by_client(from_python("mine", frames, label_column="label", columns=("age",)))


def test_class_names_that_differ_between_clients_are_refused() -> None:
    def hub(names: list[str]) -> datasets.Dataset:
        features = datasets.Features(
            {"a": datasets.Value("float32"), "label": datasets.ClassLabel(names=names)}
        )
        columns = {"a": np.arange(10.0), "label": [0, 1] * 5}
        return datasets.Dataset.from_dict(columns, features=features)

    with pytest.raises(DataError, match=r"'label' has different .*mine, client b.*client a"):
        from_python("mine", {"a": hub(["no", "yes"]), "b": hub(["yes", "no"])})
    equal = {"a": hub(["no", "yes"]), "b": hub(["no", "yes"])}
    assert from_python("mine", equal).classes == ("no", "yes")


def test_pairs_of_clients_are_those_of_from_clients() -> None:
    draw = np.random.default_rng(0)
    values = [draw.random((count, 5)).astype("float32") for count in (30, 12)]
    pairs = [(rows, np.arange(len(rows)) % 3) for rows in values]
    expected = from_clients("mine", [(p, p) for p in pairs], names=["z", "a"])
    sources = [Pairs(*pair) for pair in pairs]
    loaders = [DataLoader(source) for source in sources]
    for parts in (pairs, sources):
        clients = {name: (part, part) for name, part in zip(("z", "a"), parts, strict=True)}
        assert same(from_python("mine", clients), expected)
        splits = {name: {"train": part, "test": test} for name, (part, test) in clients.items()}
        assert same(from_python("mine", splits), expected)
    data = from_python("mine", dict(zip(("z", "a"), loaders, strict=True)))
    assert len(data.train) == 33
    assert len(data.test) == 9
    assert all_by_client(data) == {"z": 30, "a": 12}

    with pytest.raises(DataError, match=r"mine, client 1, train: .*regression"):
        from_python("mine", {0: sources[0], 1: Pairs(values[1], pairs[1][1] + 0.5)})


def test_hugging_face_images_of_clients(tmp_path: Path) -> None:
    paths = [encoded(p, tmp_path, i) for i, p in enumerate(pictures())]
    columns = {"image": paths, "label": LABELS.tolist()}
    hub = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    parts = {"z": hub.select(range(40)), "a": hub.select(range(40, N))}
    data = from_python("mine", parts, test=hub)
    assert by_client(data) == {"z": 40, "a": 20}
    assert data.test.owners is None
    writers = hub.add_column("writer", ["w1", "w2"] * 30)
    assert by_client(from_python("mine", writers, test=writers, owner="writer")) == {
        "w1": 30,
        "w2": 30,
    }
    with pytest.raises(DataError, match="'wrong'"):
        from_python("mine", writers, owner="wrong")


def test_owners_and_clients_cannot_both_be_named() -> None:
    with pytest.raises(ConfigError, match="owner"):
        from_python("mine", {"a": patients(), "b": patients()}, owner="hospital", **FIELDS)
    with pytest.raises(ConfigError, match="column"):
        from_python("mine", patients(), owner="<file>", **FIELDS)


def test_nothing_is_imported_that_the_user_has_not_imported() -> None:
    code = (
        "import sys, fedstill, numpy as np\n"
        "x, y = np.zeros((30, 2)), np.arange(30) % 3\n"
        "fedstill.from_python('mine', (x, y))\n"
        "print(sorted({'pandas', 'datasets', 'torchvision'} & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_series_of_labels_is_not_taken_for_test_data_without_a_hint() -> None:
    frame = patients()
    labels = pd.Series(LABELS)
    with pytest.raises(DataError, match="label_column"):
        from_python("mine", (frame, labels))


def test_pixels_of_one_client_and_floats_of_another_are_refused() -> None:
    pixels = torch.zeros(N, 1, 4, 4, dtype=torch.uint8)
    clients = {"a": (pixels, LABELS), "b": (pixels / 255, LABELS)}
    with pytest.raises(DataError, match="float32, uint8"):
        from_python("mine", clients)
    doubles = {"a": (pixels.double(), LABELS), "b": (pixels.float(), LABELS)}
    assert len(from_python("mine", doubles).train) == 96


def test_a_client_without_rows_is_named() -> None:
    frames = {"north": patients(), "south": patients()[:0]}
    with pytest.raises(DataError, match=r"client south has no train examples"):
        from_python("mine", frames, **FIELDS)


def test_groups_of_rows_are_to_be_a_mapping() -> None:
    groups = patients().groupby("hospital")
    with pytest.raises(ConfigError, match=r"dict\(tuple\(GROUPS\)\)"):
        from_python("mine", groups, **FIELDS)
    data = from_python("mine", dict(tuple(groups)), **FIELDS)
    assert data.about.owners == ("north", "south")


def test_a_stream_is_refused_whatever_fields_there_are() -> None:
    stream = datasets.Dataset.from_pandas(patients()).to_iterable_dataset()
    with pytest.raises(ConfigError, match="read in one order only"):
        from_python("mine", {"north": stream, "south": patients()}, **FIELDS)


def test_categorical_numbers_are_numbers() -> None:
    frame = pd.DataFrame({"x": np.arange(N) % 2, "label": LABELS})
    categorical = frame.assign(x=pd.Categorical(frame["x"]))
    assert examples_digest(from_python("mine", categorical).train) == examples_digest(
        from_python("mine", frame).train
    )


def test_one_client_may_have_a_categorical_column_and_another_texts() -> None:
    fields: dict[str, Any] = {"categorical": ["x"]}
    texts = pd.DataFrame({"x": ["a", "b"] * 30, "label": LABELS})
    clients = {"one": texts, "two": texts.assign(x=pd.Categorical(texts["x"]))}
    assert from_python("mine", clients, **fields).about.features == ("x=a", "x=b")


def test_intervals_are_no_labels_and_no_categories() -> None:
    frame = pd.DataFrame({"x": np.arange(N) * 0.5, "label": LABELS})
    ranges = frame.assign(range=pd.cut(frame["x"], 3))
    with pytest.raises(DataError, match="'range' holds struct"):
        from_python("mine", ranges, columns=["x", "range"], categorical=["range"])
    with pytest.raises(DataError, match="example 0 has the label"):
        from_python("mine", ranges, columns=["x"], label_column="range")
