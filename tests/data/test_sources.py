"""Sources: real data have their checksums, each loader reads small files of its layout, and bad
input is refused in one line.
"""

from __future__ import annotations

import gzip
import multiprocessing
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedstill.core import descriptions
from fedstill.core.errors import ConfigError, DataError, UnknownName
from fedstill.core.registry import lookup, names
from fedstill.data.dataset import Decoded, Split
from fedstill.data.sources import catalog, from_tensors, load, load_dataset
from fedstill.data.sources.verification import hold_out, image_digests

NOWHERE = "http://127.0.0.1:9"
CLASSES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def _new_cache_without_a_hub(empty_cache, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty folder of data sets."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("FEDSTILL_DATA", str(folder))
    return folder


def need_real(name):
    """Skip a test that reads a data set which this machine does not have."""
    folder = os.environ.get("FEDSTILL_DATA")
    if not folder or not (Path(folder) / name).is_dir():
        pytest.skip(f"FEDSTILL_DATA holds no {name}")


def pictures(count, classes, shape):
    """(images (N, H, W[, 3]) uint8, labels (N,)): noise, every class in turn."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    return images, np.arange(count) % classes


def write_parquet(path, images, labels, classes=None, *, image="image", label="label", **columns):
    """Write images and labels, of declared classes if there are any, as the library does."""
    if classes:
        label_feature = datasets.ClassLabel(names=list(classes))
    elif isinstance(labels[0], str):
        label_feature = datasets.Value("string")
    else:
        label_feature = datasets.Value("int64")
    features = {image: datasets.Image(), label: label_feature}
    features |= {name: datasets.Value("int64") for name in columns}

    rows = {image: list(map(Image.fromarray, images)), label: list(labels), **columns}
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).to_parquet(path)


def small(monkeypatch, constant, **sizes):
    """The catalogue's entry with the sizes of a small file."""
    entry = getattr(catalog, constant)
    fields = {"sizes": sizes}
    if entry.total is not None:
        fields = {"total": sum(sizes.values())}
    monkeypatch.setattr(catalog, constant, replace(entry, digests={}, system=None, **fields))


# Real data


DIGITS_BY_CLASS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_are_there_without_anything():
    data = load_dataset("digits")
    assert data.input_shape == (1, 8, 8)
    assert len(data.train) == 1438
    assert len(data.test) == 359
    assert data.validation is None
    assert int(data.train.values.max()) == 255
    counts = data.train.labels.bincount() + data.test.labels.bincount()
    assert counts.tolist() == DIGITS_BY_CLASS
    assert data.mean == (0.5,)
    assert data.std == (0.5,)


@pytest.mark.parametrize(
    "name",
    [
        "ham10000_28",
        pytest.param("cifar100-small", marks=pytest.mark.slow),
        pytest.param("pbc_blood28", marks=pytest.mark.slow),
    ],
)
def test_shared_folders_match_their_checksums(name):
    need_real(name)
    entry = catalog.KNOWN_FOLDERS[name]

    data = load_dataset(name)

    splits = {"train": data.train, "test": data.test}
    if data.validation is not None:
        splits["validation"] = data.validation
    sizes = {}
    digests = {}
    for split, examples in splits.items():
        sizes[split] = len(examples)
        digests[split] = image_digests(Split(examples.values.numpy(), examples.labels.numpy()))
    assert sizes == entry.sizes
    assert digests == entry.digests


@pytest.mark.parametrize(
    ("name", "column", "row"),
    [
        ("heart_disease", "age", 3),
        ("har", "features", 10),
        pytest.param("har_signals", "signals", 5, marks=pytest.mark.slow),
        pytest.param("ag_news-small", "text", 7, marks=pytest.mark.slow),
        ("heart_disease", "label", 1),
    ],
)
def test_a_known_folder_with_one_changed_row_is_refused(tmp_path, monkeypatch, name, column, row):
    need_real(name)
    folder = Path(os.environ["FEDSTILL_DATA"]) / name
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path))
    shutil.copytree(folder, tmp_path / name)
    load_dataset(name)

    file = next((tmp_path / name).glob("test-*.parquet"))
    rows = pq.read_table(file)
    values = rows[column].to_pylist()
    values[row : row + 2] = reversed(values[row : row + 2])
    assert values != rows[column].to_pylist()
    position = rows.column_names.index(column)
    field = rows.field(position)
    changed = rows.set_column(position, field, pa.array(values, field.type))
    (tmp_path / name).chmod(0o755)
    file.chmod(0o644)
    pq.write_table(changed, file)

    with pytest.raises(DataError, match=f"{name}, test"):
        load_dataset(name)


@pytest.mark.slow
def test_cifar10_matches_its_checksums_and_is_read_again_at_once():
    need_real("cifar10")
    data = load_dataset("cifar10")
    assert data.train.values.shape == (50_000, 3, 32, 32)
    assert data.test.labels.bincount().tolist() == [1000] * 10
    assert torch.equal(load_dataset("cifar10").train.values, data.train.values)


def test_fashion_mnist_of_debian(monkeypatch):
    if not Path(catalog.FASHION_MNIST.system).is_dir():
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    data = load_dataset("fashion-mnist")
    assert data.train.values.shape == (60_000, 1, 28, 28)
    assert data.classes[9] == "Ankle boot"
    assert data.train.labels.bincount().tolist() == [6000] * 10


# Every other hub, on small files of its layout


def check(name, images, labels, **fields):
    """The data set, whose training examples are these, also when it is read again."""
    expected = images[:, None]
    if images.ndim == 4:
        expected = images.transpose(0, 3, 1, 2)

    data = load_dataset(name, **fields)
    again = load_dataset(name, **fields)

    assert data.train.values.dtype == torch.uint8
    assert data.train.labels.dtype == torch.int64
    assert np.array_equal(data.train.values.numpy(), expected)
    assert np.array_equal(data.train.labels.numpy(), labels)
    assert torch.equal(again.train.values, data.train.values)
    assert again.classes == data.classes
    assert again.mean == data.mean
    assert again.std == data.std
    return data


def test_mnist_as_parquet(root, monkeypatch):
    small(monkeypatch, "MNIST", train=30, test=20)
    images, labels = pictures(30, 10, (28, 28))
    for split, n in (("train", 30), ("test", 20)):
        path = root / f"mnist/mnist/{split}-00000-of-00001.parquet"
        write_parquet(path, images[:n], labels[:n], catalog.MNIST.classes)
    assert check("mnist", images, labels).mean == (0.1307,)


@pytest.mark.parametrize("damage", [None, "short", "absent", "dimension"])
def test_fashion_mnist_as_idx(root, monkeypatch, damage):
    small(monkeypatch, "FASHION_MNIST", train=30, test=20)
    images, labels = pictures(30, 10, (28, 28))
    folder = root / "fashion-mnist"
    folder.mkdir()
    for prefix, n in (("train", 30), ("t10k", 20)):
        image_header = bytes([0, 0, 8, 3]) + struct.pack(">3i", n, 28, 28)
        label_header = bytes([0, 0, 8, 1]) + struct.pack(">i", n)
        image_file = image_header + images[:n].tobytes()
        label_file = label_header + labels[:n].astype(np.uint8).tobytes()
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(image_file))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(label_file))

    victim = folder / "t10k-images-idx3-ubyte.gz"
    if damage == "short":
        victim.write_bytes(victim.read_bytes()[:500])
    elif damage == "absent":
        victim.unlink()
    elif damage == "dimension":
        victim.write_bytes((folder / "t10k-labels-idx1-ubyte.gz").read_bytes())

    if damage is None:
        check("fashion-mnist", images, labels)
    else:
        refused("t10k-images", "fashion-mnist")


def test_fashion_mnist_as_the_hub_names_its_classes(root, monkeypatch):
    small(monkeypatch, "FASHION_MNIST", train=30, test=20)
    images, labels = pictures(30, 10, (28, 28))
    spelled = ["T - shirt / top", *catalog.FASHION_MNIST.classes[1:]]
    for split, n in (("train", 30), ("test", 20)):
        write_parquet(root / f"fashion-mnist/{split}-0.parquet", images[:n], labels[:n], spelled)
    assert check("fashion-mnist", images, labels).classes == catalog.FASHION_MNIST.classes


def test_cifar10_as_the_hub_lays_it_out(root, monkeypatch):
    small(monkeypatch, "CIFAR10", train=40, test=20)
    images, labels = pictures(40, 10, (32, 32, 3))
    for split, n in (("train", 40), ("test", 20)):
        path = root / f"cifar10/plain_text/{split}-00000-of-00001.parquet"
        write_parquet(path, images[:n], labels[:n], catalog.CIFAR10.classes, image="img")
    check("cifar10", images, labels)


def test_cifar100_reads_the_fine_labels(root, monkeypatch):
    small(monkeypatch, "CIFAR100", train=200, test=100)
    images, labels = pictures(200, 100, (32, 32, 3))
    for split, n in (("train", 200), ("test", 100)):
        write_parquet(
            root / f"cifar100/cifar100/{split}-0.parquet",
            images[:n],
            labels[:n],
            catalog.CIFAR100.classes,
            image="img",
            label="fine_label",
            coarse_label=list(labels[:n] % 20),
        )
    assert len(check("cifar100", images, labels).classes) == 100


def test_cinic10_in_three_splits_and_several_files(root, monkeypatch):
    small(monkeypatch, "CINIC10", train=40, validation=20, test=20)
    images, labels = pictures(40, 10, (32, 32, 3))
    folder = root / "cinic10/data"
    classes = catalog.CINIC10.classes
    write_parquet(folder / "train-00000-of-00002.parquet", images[:20], labels[:20], classes)
    write_parquet(folder / "train-00001-of-00002.parquet", images[20:], labels[20:], classes)
    for split in ("validation", "test"):
        write_parquet(folder / f"{split}-0.parquet", images[:20], labels[:20], classes)
    assert len(check("cinic10", images, labels).validation) == 20


def test_ham10000_as_images_by_class(root, monkeypatch):
    small(monkeypatch, "HAM10000", train=70)
    rng = np.random.default_rng(0)
    for k, lesion in enumerate(catalog.HAM10000.classes):
        folder = root / "ham10000" / lesion
        folder.mkdir(parents=True)
        for number in range(10):
            pixels = rng.integers(0, 256, (30 + k, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"ISIC_{number:03}.png")

    data = load_dataset("ham10000")
    assert data.input_shape == (3, 32, 32)
    assert data.train.labels.bincount().tolist() == [8] * 7
    assert data.test.labels.bincount().tolist() == [2] * 7
    assert load_dataset("ham10000", size=28).input_shape == (3, 28, 28)


@pytest.mark.parametrize(
    ("name", "constant", "classes"),
    [("bloodmnist", "BLOODMNIST", 8), ("pathmnist", "PATHMNIST", 9)],
)
def test_medmnist_as_its_archive(root, monkeypatch, name, constant, classes):
    small(monkeypatch, constant, train=30, validation=20, test=10)
    images, labels = pictures(30, classes, (28, 28, 3))
    (root / name).mkdir()
    path = root / name / f"{name}.npz"
    arrays = {}
    for split, n in (("train", 30), ("val", 20), ("test", 10)):
        arrays[f"{split}_images"] = images[:n]
        arrays[f"{split}_labels"] = labels[:n, None].astype(np.uint8)
    np.savez(path, **arrays)
    assert len(check(name, images, labels).validation) == 20

    objects = np.array([{}], dtype=object)
    np.savez(path, train_images=objects, train_labels=np.zeros(1))
    refused("damaged or not an archive", name)


def test_the_hub_is_read_once(root, monkeypatch):
    """A stand-in hub: the library is given the files that the hub would give it."""
    images, labels = pictures(30, 3, (8, 8))
    path = root.parent / "hub/train-0.parquet"
    write_parquet(path, images, labels, CLASSES, image="img", label="fine_label")
    real_load = datasets.load_dataset

    def load_from_hub(name, streaming):
        return real_load("parquet", data_files=str(path), streaming=True)

    with monkeypatch.context() as patched:
        patched.setattr(load, "_check_hub_has", lambda name, remedy: None)
        patched.setattr(datasets, "load_dataset", load_from_hub)
        first = load_dataset("some/thing")

    assert len(first.train) == 24
    assert len(first.test) == 6
    assert first.classes == CLASSES
    assert torch.equal(load_dataset("some/thing").train.values, first.train.values)


# One's own data


def test_a_folder_of_parquet_by_name_and_by_path(root):
    images, labels = pictures(30, 3, (9, 7, 3))
    write_parquet(root / "mine/train-0.parquet", images, labels, CLASSES)
    write_parquet(root / "mine/test-0.parquet", images[:6], labels[:6], CLASSES)
    assert check("mine", images, labels).classes == CLASSES

    data = check("./mine", images, labels, base=root, mean=[0.1, 0.2, 0.3])
    assert data.mean == (0.1, 0.2, 0.3)
    assert data.std == (0.5, 0.5, 0.5)
    assert data.input_shape == (3, 9, 7)
    assert check(str(root / "mine"), images, labels).name == str(root / "mine")


def test_columns_by_name_text_labels_and_no_test_split(root):
    images, _ = pictures(30, 3, (8, 8))
    labels = ["cat", "ape", "bee"] * 10
    write_parquet(root / "zoo/all.parquet", images, labels, image="photo", label="animal")
    refused("set data.label_column", "zoo")

    data = load_dataset("zoo", label_column="animal", image_column="photo")
    assert data.classes == ("ape", "bee", "cat")
    assert len(data.train) == 24
    assert len(data.test) == 6
    assert data.train.labels.bincount().tolist() == [8, 8, 8]


def test_images_by_class_with_splits(root):
    """The blue channel of an image shows its class."""
    for split, n in (("train", 4), ("test", 2)):
        for class_id, name in enumerate(("no", "yes")):
            folder = root / "pets" / split / name
            folder.mkdir(parents=True)
            for number in range(n):
                colour = (number, 0, class_id)
                Image.new("RGB", (8, 8), colour).save(folder / f"{number}.png")

    data = load_dataset("pets")

    assert len(data.train) == 8
    assert len(data.test) == 4
    assert data.classes == ("no", "yes")
    assert torch.equal(data.train.values[:, 2, 0, 0].long(), data.train.labels)


def test_changed_files_are_decoded_anew(root):
    images, labels = pictures(30, 3, (8, 8))
    for count in (30, 20):
        write_parquet(root / "mine/train-0.parquet", images[:count], labels[:count], CLASSES)
        data = load_dataset("mine")
        assert len(data.train) + len(data.test) == count


def test_tensors():
    images = torch.zeros(6, 1, 4, 4, dtype=torch.uint8)
    labels = torch.arange(6) % 3
    pair = (images, labels)
    data = from_tensors("mine", pair, pair, classes=["a", "b", "c"])
    assert data.classes == CLASSES
    assert data.input_shape == (1, 4, 4)
    assert from_tensors("mine", (images, labels.int()), pair).classes == ("0", "1", "2")

    bad_pairs = {
        "pixels of 32 bits": (images.int(), labels),
        "too few labels": (images, labels[:5]),
        "labels with fractions": (images, labels.float()),
        "one image": (images[0], labels),
    }
    for bad_pair in bad_pairs.values():
        with pytest.raises(DataError, match="mine, train"):
            from_tensors("mine", bad_pair, pair)
    with pytest.raises(DataError, match=r"train .*float32.*test uint8"):
        from_tensors("mine", (images.float(), labels), pair)
    with pytest.raises(DataError, match=r"uint8 of shape \(1, 4, 4\)"):
        from_tensors("mine", (images[0], labels[:1]), pair)
    with pytest.raises(DataError, match="mine, test: labels"):
        from_tensors("mine", pair, (images, [0] * 6))
    with pytest.raises(DataError, match="example 2 has label 2"):
        from_tensors("mine", pair, pair, classes=["a", "b"])
    with pytest.raises(ConfigError, match="mean and std"):
        from_tensors("mine", pair, pair, mean=[0.5, 0.5])


def test_a_function_beside_the_config(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom fedstill.data.sources import from_tensors\n"
        "def data(folder=None, count: int = 4):\n    pair = torch.zeros(count, 1, 2, 2).byte(), "
        "torch.arange(count)\n"
        "    return from_tensors('mine', pair, pair)\n"
    )
    assert len(load_dataset("mine.py:data", base=tmp_path, count=5).train) == 5
    with pytest.raises(UnknownName, match="'count'"):
        load_dataset("mine.py:data", base=tmp_path, coun=5)


# Bad input: one line that says what, where, and what to do


def refused(text, name, **fields):
    """The error of one line, with a remedy, that refuses a data set; it matches ``text``."""
    with pytest.raises(ConfigError, match=text) as caught:
        load_dataset(name, **fields)
    message = str(caught.value)
    assert "\n" not in message
    assert "; " in message
    return message


def test_absent_data_say_how_to_get_them(root, monkeypatch):
    small(monkeypatch, "FASHION_MNIST", train=1)
    for name in set(names("dataset")) - {"digits"}:
        message = refused("FEDSTILL_DATA=DATA", name)
        assert str(root / name) in message
    assert "hf download uoft-cs/cifar10 --repo-type dataset" in refused("hub", "cifar10")
    assert "apt install dataset-fashion-mnist" in refused("hub", "fashion-mnist")
    monkeypatch.delenv("FEDSTILL_DATA")
    refused("FEDSTILL_DATA is not set", "cifar10")


def test_arrays_of_numpy_are_taken_as_tensors_are():
    """Of any whole type, in any order in memory, of a file that may not be written."""
    grey_images, labels = pictures(30, 3, (8, 8))
    images = grey_images[:, None]
    tensors = (torch.from_numpy(images), torch.from_numpy(labels))
    expected = from_tensors("mine", tensors, tensors)
    frozen = images.copy()
    frozen.flags.writeable = False

    for array in (images, frozen, np.asfortranarray(images)):
        for kind in (np.uint8, np.int32, np.uint16, np.int64):
            pair = (array, labels.astype(kind))
            got = from_tensors("mine", pair, pair)
            assert torch.equal(got.train.values, expected.train.values)
            assert torch.equal(got.train.labels, expected.train.labels)
    with pytest.raises(DataError, match=r"train are float32.*test uint8"):
        from_tensors("mine", (images / 255, labels), (images, labels))


def test_one_file_is_a_data_set(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images, labels = pictures(30, 3, (8, 8))
    path = tmp_path / "scans.parquet"
    write_parquet(path, images, labels, CLASSES)
    write_parquet(root / "scans/train.parquet", images, labels, CLASSES)
    expected = load_dataset("scans")

    for name in ("scans.parquet", "./scans.parquet", str(path)):
        got = load_dataset(name)
        assert len(got.train) == 24
        assert len(got.test) == 6
        assert got.classes == CLASSES
        assert torch.equal(got.train.values, expected.train.values)

    write_parquet(tmp_path / "test-only.parquet", images, labels, CLASSES)
    only_file = load_dataset("test-only.parquet")
    assert len(only_file.train) == 24, "one file is all there is, whatever it is called"

    arrays = {f"{split}_images": images for split in ("train", "test")}
    np.savez(tmp_path / "scans.npz", **arrays, train_labels=labels, test_labels=labels)
    assert len(load_dataset("scans.npz").test) == 30

    write_parquet(path, images[:20], labels[:20], CLASSES)
    assert len(load_dataset("scans.parquet").train) == 17, "a changed file is decoded anew"


def test_a_file_that_holds_no_data_set_is_named(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scans.txt").write_text("a,b")
    (tmp_path / "broken.parquet").write_text("nothing")
    refused(r"scans\.txt", "scans.txt")
    refused(r"scans\.txt is not a parquet", "./scans.txt")
    refused("cannot be read", "broken.parquet")
    refused(
        r"there is no file .*/absent\.parquet; paths are relative to the config's folder",
        "absent.parquet",
    )


def test_an_absent_spreadsheet_is_no_name_of_a_data_set(root):
    refused(r"there is no file .*sheet\.XLSX.* CSV .*sheet\.csv", "sheet.XLSX")


def test_wrong_names(root):
    (root / "my-own").mkdir()
    refused("did you mean 'cifar10'", "cifar1")
    refused("did you mean 'my-own'", "my-ow")
    refused("there is no file or folder", "./nope")
    refused("the Hugging Face hub does not provide 'some/thing'", "some/thing")
    refused("did you mean 'label_column'", "my-own", label_colum="x")
    refused("choose one of size|did you mean 'size'", "ham10000", sizes=3)
    refused("there are none", "cifar10", sizes=3)
    refused("data.size does not apply to dataset 'cifar10'", "cifar10", size=3)
    refused("^data.input_column does not apply to dataset 'digits'", "digits", input="text")
    refused("dataset 'digits' has no columns, so it has no column 'ward'", "digits", owner="ward")
    refused("^data.missing_marks does not apply to dataset 'digits'", "digits", marks=True)
    for size in (0, 4097, True):
        refused(f"data.size = {size}: ", "my-own", size=size)
    refused("is empty", "my-own")


def test_corrupt_parquet(root):
    images, labels = pictures(30, 3, (8, 8))
    path = root / "mine/train-0.parquet"
    write_parquet(path, images, labels, CLASSES)
    intact = path.read_bytes()
    overwritten = intact[:100] + bytes(400) + intact[500:]
    refusal = "cannot be read|cannot be decoded as an image|holds no examples"

    for content in (intact[:200], b"nonsense" * 100, b"", overwritten):
        path.write_bytes(content)
        assert "mine" in refused(refusal, "mine")

    path.write_bytes(intact)
    assert len(load_dataset("mine").classes) == 3


def test_images_of_different_sizes_and_kinds(root):
    images, labels = pictures(4, 2, (8, 8))
    write_parquet(root / "mine/train-0.parquet", [*images, images[0][:5]], [*labels, 0])
    assert "example 4 is 8×5" in refused("set data.size = 8", "mine")
    assert load_dataset("mine", size=8).input_shape == (1, 8, 8)

    colour_image = np.zeros((8, 8, 3), np.uint8)
    write_parquet(root / "kinds/train-0.parquet", [*images, colour_image], [*labels, 0])
    refused("example 4 is 8×8 RGB, but the first is 8×8 grey", "kinds")

    write_parquet(root / "splits/train-0.parquet", images, labels)
    write_parquet(root / "splits/test-0.parquet", images[:, :5], labels)
    refused("images differ between splits", "splits")


def test_labels_out_of_range(root):
    images, _ = pictures(5, 2, (8, 8))
    refusals = {
        -1: "label -1, outside",
        70_000: "label 70000 among 5 examples",
        None: "example 2 has no label",
    }
    for label, text in refusals.items():
        write_parquet(root / f"mine{label}/train-0.parquet", images, [0, 1, label, 0, 0])
        refused(text, f"mine{label}")

    write_parquet(root / "test-only/test-0.parquet", images, [0, 1, 0, 1, 0])
    refused("no train split", "test-only")


def test_known_names_hold_what_they_promise(root, monkeypatch):
    images, labels = pictures(20, 10, (32, 32, 3))
    for split in ("train", "test"):
        write_parquet(root / f"cifar10/{split}-0.parquet", images, labels, catalog.CIFAR10.classes)
    refused("has {'train': 20, 'test': 20} examples, not {'train': 50000", "cifar10")

    entry = catalog.CIFAR10
    monkeypatch.setattr(catalog, "CIFAR10", replace(entry, sizes={"train": 20, "test": 20}))
    refused("the pixels have SHA-256", "cifar10")

    entry = replace(entry, sizes={}, digests={})
    monkeypatch.setattr(catalog, "CIFAR10", replace(entry, shape=(3, 28, 28)))
    refused(r"not \(3, 28, 28\)", "cifar10")

    monkeypatch.setattr(catalog, "CIFAR10", replace(entry, classes=entry.classes[::-1]))
    refused("the classes are airplane", "cifar10")


# The cache


def write_declared(path, names, image):
    """Ten rows with the ids of declared class names: images, or a number each."""
    labels = [row % len(names) for row in range(10)]
    if image:
        images, _ = pictures(10, 2, (4, 4))
        write_parquet(path, images, labels, names)
        return
    features = {"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=names)}
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {"x": [float(row) for row in range(10)], "label": labels}
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).to_parquet(path)


@pytest.mark.parametrize("image", [True, False])
def test_splits_that_declare_different_class_names_are_refused(root, image):
    write_declared(root / "zoo/train.parquet", ["cat", "dog", "emu"], image)
    write_declared(root / "zoo/test.parquet", ["cat", "emu"], image)
    conflict = r"class id 1 means 'emu' in .*test\.parquet, but 'dog' in .*train\.parquet; write"
    with pytest.raises(DataError, match=conflict):
        load_dataset("zoo")
    write_declared(root / "zoo/test.parquet", ["cat", "dog"], image)
    with pytest.raises(DataError, match=r"class id 2 means nothing in .*test\.parquet, but 'emu'"):
        load_dataset("zoo")
    write_declared(root / "zoo/test.parquet", ["cat", "dog", "emu"], image)
    assert load_dataset("zoo").classes == ("cat", "dog", "emu")


@pytest.mark.parametrize("image", [True, False])
def test_files_of_a_split_that_declare_different_class_names_are_refused(root, image):
    write_declared(root / "zoo/north.parquet", ["cat", "dog"], image)
    write_declared(root / "zoo/south.parquet", ["dog", "emu"], image)
    with pytest.raises(DataError, match=r"class id 0 means 'dog' in .*south\.parquet, but 'cat'"):
        load_dataset("zoo")


@pytest.mark.parametrize("image", ["image", "path"])
def test_images_that_rows_of_a_file_name_are_decoded_again_after_a_change(tmp_path, image):
    paths = [f"{row}.png" for row in range(10)]
    columns = {"image": [{"bytes": None, "path": path} for path in paths], "path": paths}
    rows = {image: columns[image], "label": [row % 2 for row in range(10)]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    for shade in (10, 20):
        for path in paths:
            Image.new("L", (4, 4), shade).save(tmp_path / path)
        data = load_dataset(tmp_path / "rows.parquet", image_column=image)
        assert data.train.values.unique().tolist() == [shade]


def test_images_beside_a_file_that_holds_its_images_do_not_matter(tmp_path):
    write_parquet(tmp_path / "rows.parquet", *pictures(10, 2, (4, 4)))
    for shade in (10, 20):
        Image.new("L", (4, 4), shade).save(tmp_path / "beside.png")
        load_dataset(tmp_path / "rows.parquet")
    assert len(cached_folders(tmp_path / "cache")) == 1


def cached_folders(cache):
    """The folders of decoded data sets in a cache."""
    return [path for path in (cache / "decoded").iterdir() if path.is_dir()]


def test_the_cache_is_mapped_copy_on_write_and_repaired(tmp_path):
    first = load_dataset("digits")
    values = first.train.values.clone()
    first.train.values.zero_()  # must not reach the file
    assert torch.equal(load_dataset("digits").train.values, values)

    (folder,) = cached_folders(tmp_path / "cache")
    file = folder / "train-values.npy"
    for content in (file.read_bytes()[:1000], b""):
        file.write_bytes(content)
        assert torch.equal(load_dataset("digits").train.values, values)
    (folder / "about.json").write_text("{")
    assert torch.equal(load_dataset("digits").train.values, values)
    assert [p.name for p in folder.parent.iterdir() if p.name.startswith(".")] == []


def test_an_unwritable_cache_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "file" / "below"))
    assert len(load_dataset("digits").test) == 359


def _count(queue, cache):
    os.environ["FEDSTILL_CACHE"] = cache  # the process that forks may have begun with another
    queue.put(len(load_dataset("digits").train))


def test_two_processes_fill_the_cache_at_once(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedstill.data.sources"])
    queue = context.Queue()
    cache = tmp_path / "cache"
    workers = [context.Process(target=_count, args=(queue, str(cache))) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [queue.get(timeout=120) for _ in workers] == [1438, 1438]
    for worker in workers:
        worker.join()
    assert len(cached_folders(cache)) == 1


def test_held_out_examples_are_stratified_and_kept_in_order():
    labels = np.repeat(np.arange(3), [50, 10, 1])
    data = hold_out("x", Decoded({"train": Split(np.arange(61), labels)}, None))
    train = data.splits["train"]
    test = data.splits["test"]
    assert np.bincount(test.labels).tolist() == [10, 2]
    all_values = np.concatenate([train.values, test.values])
    assert np.array_equal(np.sort(all_values), np.arange(61))
    assert bool((np.diff(train.values) > 0).all())
    assert "example of 2, " in data.about.warnings[0]


def test_nothing_can_be_held_out_of_classes_of_one_or_two():
    labels = np.array([0, 0, 1, 2, 2])
    with pytest.raises(DataError, match="x has no test split"):
        hold_out("x", Decoded({"train": Split(np.arange(5), labels)}, None))


def test_registry_lists_every_name_with_a_line():
    expected = [
        "bloodmnist",
        "cifar10",
        "cifar100",
        "cinic10",
        "digits",
        "fashion-mnist",
        "ham10000",
        "mnist",
        "pathmnist",
    ]
    assert set(expected) <= set(names("dataset"))
    assert all(descriptions.summary(lookup("dataset", name)) for name in expected)
