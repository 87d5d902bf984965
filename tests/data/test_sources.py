"""Sources: real data against their checksums, every loader on small files of its layout, and bad
input in one line.
"""

from __future__ import annotations

import gzip
import multiprocessing
import os
import shutil
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


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)


@pytest.fixture
def root(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("FEDSTILL_DATA", str(folder))
    return folder


def real_root(name):
    folder = os.environ.get("FEDSTILL_DATA")
    if not folder or not (Path(folder) / name).is_dir():
        pytest.skip(f"FEDSTILL_DATA holds no {name}")


def pictures(count, classes, shape, seed=0):
    """(images (N, H, W[, 3]) uint8, labels (N,)): noise, every class in turn."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), np.arange(count) % classes


def write_parquet(path, images, labels, classes=None, image="image", label="label", **more):
    import datasets

    path.parent.mkdir(parents=True, exist_ok=True)
    features = {
        image: datasets.Image(),
        label: datasets.ClassLabel(names=list(classes)) if classes else None,
    }
    if features[label] is None:
        features[label] = datasets.Value("string" if isinstance(labels[0], str) else "int64")
    features |= {name: datasets.Value("int64") for name in more}
    rows = {image: [Image.fromarray(x) for x in images], label: list(labels), **more}
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).to_parquet(path)


def small(monkeypatch, constant, **sizes):
    """The catalogue's entry with the sizes of a small file."""
    known = getattr(catalog, constant)
    fields = {"total": sum(sizes.values())} if known.total is not None else {"sizes": sizes}
    monkeypatch.setattr(catalog, constant, replace(known, digests={}, system=None, **fields))


# Real data


def test_digits_are_there_without_anything():
    data = load_dataset("digits")
    assert data.input_shape == (1, 8, 8)
    assert (len(data.train), len(data.test), data.validation) == (1438, 359, None)
    assert int(data.train.values.max()) == 255
    assert torch.equal(
        data.train.labels.bincount() + data.test.labels.bincount(), torch.tensor(REAL_DIGITS)
    )
    assert (data.mean, data.std) == ((0.5,), (0.5,))


REAL_DIGITS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@pytest.mark.parametrize(
    "name",
    [
        "ham10000_28",
        pytest.param("cifar100-small", marks=pytest.mark.slow),
        pytest.param("pbc_blood28", marks=pytest.mark.slow),
    ],
)
def test_shared_folders_match_their_checksums(name):
    real_root(name)
    data = load_dataset(name)
    known = catalog.KNOWN_FOLDERS[name]
    splits = {"train": data.train, "test": data.test} | (
        {"validation": data.validation} if data.validation else {}
    )
    assert {s: len(x) for s, x in splits.items()} == known.sizes
    assert {
        s: image_digests(Split(x.values.numpy(), x.labels.numpy())) for s, x in splits.items()
    } == known.digests


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
    real_root(name)
    folder = Path(os.environ["FEDSTILL_DATA"]) / name
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path))
    shutil.copytree(folder, tmp_path / name)
    load_dataset(name)
    file = next((tmp_path / name).glob("test-*.parquet"))
    rows = pq.read_table(file)
    values = rows[column].to_pylist()
    values[row], values[row + 1] = values[row + 1], values[row]
    assert values != rows[column].to_pylist()
    at = rows.column_names.index(column)
    changed = rows.set_column(at, rows.field(at), pa.array(values, rows.field(at).type))
    (tmp_path / name).chmod(0o755)
    file.chmod(0o644)
    pq.write_table(changed, file)
    with pytest.raises(DataError, match=f"{name}, test"):
        load_dataset(name)


@pytest.mark.slow
def test_cifar10_matches_its_checksums_and_is_read_again_at_once():
    real_root("cifar10")
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
    data = load_dataset(name, **fields)
    expected = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    assert data.train.values.dtype == torch.uint8
    assert data.train.labels.dtype == torch.int64
    assert np.array_equal(data.train.values.numpy(), expected)
    assert np.array_equal(data.train.labels.numpy(), labels)
    again = load_dataset(name, **fields)
    assert torch.equal(again.train.values, data.train.values)
    assert (again.classes, again.mean, again.std) == (data.classes, data.mean, data.std)
    return data


def test_mnist_as_parquet(root, monkeypatch):
    small(monkeypatch, "MNIST", train=30, test=20)
    images, labels = pictures(30, 10, (28, 28))
    write_parquet(
        root / "mnist/mnist/train-00000-of-00001.parquet", images, labels, catalog.MNIST.classes
    )
    write_parquet(
        root / "mnist/mnist/test-00000-of-00001.parquet",
        images[:20],
        labels[:20],
        catalog.MNIST.classes,
    )
    assert check("mnist", images, labels).mean == (0.1307,)


@pytest.mark.parametrize("damage", [None, "short", "absent", "dimension"])
def test_fashion_mnist_as_idx(root, monkeypatch, damage):
    small(monkeypatch, "FASHION_MNIST", train=30, test=20)
    images, labels = pictures(30, 10, (28, 28))
    folder = root / "fashion-mnist"
    folder.mkdir()
    for prefix, n in (("train", 30), ("t10k", 20)):
        sizes = [x.to_bytes(4, "big") for x in (n, 28, 28)]
        head = bytes([0, 0, 8, 3]) + b"".join(sizes)
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(head + images[:n].tobytes())
        )
        body = bytes([0, 0, 8, 1]) + sizes[0] + labels[:n].astype(np.uint8).tobytes()
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(body))
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
        path, coarse = (
            root / f"cifar100/cifar100/{split}-0.parquet",
            {"coarse_label": list(labels[:n] % 20)},
        )
        write_parquet(
            path, images[:n], labels[:n], catalog.CIFAR100.classes, "img", "fine_label", **coarse
        )
    assert len(check("cifar100", images, labels).classes) == 100


def test_cinic10_in_three_splits_and_several_files(root, monkeypatch):
    small(monkeypatch, "CINIC10", train=40, validation=20, test=20)
    images, labels = pictures(40, 10, (32, 32, 3))
    write_parquet(
        root / "cinic10/data/train-00000-of-00002.parquet",
        images[:20],
        labels[:20],
        catalog.CINIC10.classes,
    )
    write_parquet(
        root / "cinic10/data/train-00001-of-00002.parquet",
        images[20:],
        labels[20:],
        catalog.CINIC10.classes,
    )
    for split in ("validation", "test"):
        write_parquet(
            root / f"cinic10/data/{split}-0.parquet",
            images[:20],
            labels[:20],
            catalog.CINIC10.classes,
        )
    assert len(check("cinic10", images, labels).validation) == 20


def test_ham10000_as_images_by_class(root, monkeypatch):
    small(monkeypatch, "HAM10000", train=70)
    rng = np.random.default_rng(0)
    for k, lesion in enumerate(catalog.HAM10000.classes):
        (root / "ham10000" / lesion).mkdir(parents=True)
        for i in range(10):
            picture = Image.fromarray(rng.integers(0, 256, (30 + k, 40, 3), dtype=np.uint8))
            picture.save(root / "ham10000" / lesion / f"ISIC_{i:03}.png")
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
    arrays = {}
    for split, n in (("train", 30), ("val", 20), ("test", 10)):
        arrays |= {
            f"{split}_images": images[:n],
            f"{split}_labels": labels[:n, None].astype(np.uint8),
        }
    np.savez(root / name / f"{name}.npz", **arrays)
    assert len(check(name, images, labels).validation) == 20
    np.savez(
        root / name / f"{name}.npz",
        train_images=np.array([{}], dtype=object),
        train_labels=np.zeros(1),
    )
    refused("damaged or not an archive", name)


def test_the_hub_is_read_once(root, monkeypatch):
    """A stand-in hub: the library is given the files that the hub would give it."""
    import datasets

    images, labels = pictures(30, 3, (8, 8))
    path = root.parent / "hub/train-0.parquet"
    write_parquet(path, images, labels, ["a", "b", "c"], image="img", label="fine_label")
    real = datasets.load_dataset
    with monkeypatch.context() as patched:
        patched.setattr(load, "_check_hub_has", lambda name, remedy: None)
        patched.setattr(
            datasets,
            "load_dataset",
            lambda name, streaming: real("parquet", data_files=str(path), streaming=True),
        )
        first = load_dataset("some/thing")
    assert (len(first.train), len(first.test), first.classes) == (24, 6, ("a", "b", "c"))
    assert torch.equal(load_dataset("some/thing").train.values, first.train.values)


# One's own data


def test_a_folder_of_parquet_by_name_and_by_path(root):
    images, labels = pictures(30, 3, (9, 7, 3))
    write_parquet(root / "mine/train-0.parquet", images, labels, ["a", "b", "c"])
    write_parquet(root / "mine/test-0.parquet", images[:6], labels[:6], ["a", "b", "c"])
    assert check("mine", images, labels).classes == ("a", "b", "c")
    data = check("./mine", images, labels, base=root, mean=[0.1, 0.2, 0.3])
    assert (data.mean, data.std, data.input_shape) == ((0.1, 0.2, 0.3), (0.5, 0.5, 0.5), (3, 9, 7))
    assert check(str(root / "mine"), images, labels).name == str(root / "mine")


def test_columns_by_name_text_labels_and_no_test_split(root):
    images, _ = pictures(30, 3, (8, 8))
    labels = ["cat", "ape", "bee"] * 10
    write_parquet(root / "zoo/all.parquet", images, labels, image="photo", label="animal")
    refused("set data.label_column", "zoo")
    data = load_dataset("zoo", label_column="animal", image_column="photo")
    assert data.classes == ("ape", "bee", "cat")
    assert (len(data.train), len(data.test)) == (24, 6)
    assert data.train.labels.bincount().tolist() == [8, 8, 8]


def test_images_by_class_with_splits(root):
    for split, n in (("train", 4), ("test", 2)):
        for c in ("no", "yes"):
            (root / "pets" / split / c).mkdir(parents=True)
            for i in range(n):
                Image.new("RGB", (8, 8), (i, 0, c == "yes")).save(
                    root / "pets" / split / c / f"{i}.png"
                )
    data = load_dataset("pets")
    assert (len(data.train), len(data.test), data.classes) == (8, 4, ("no", "yes"))
    assert torch.equal(data.train.values[:, 2, 0, 0].long(), data.train.labels)


def test_changed_files_are_decoded_anew(root):
    images, labels = pictures(30, 3, (8, 8))
    for count in (30, 20):
        write_parquet(
            root / "mine/train-0.parquet", images[:count], labels[:count], ["a", "b", "c"]
        )
        assert len(load_dataset("mine").train) + len(load_dataset("mine").test) == count


def test_tensors():
    images, labels = torch.zeros(6, 1, 4, 4, dtype=torch.uint8), torch.arange(6) % 3
    data = from_tensors("mine", (images, labels), (images, labels), classes=["a", "b", "c"])
    assert (data.classes, data.input_shape) == (("a", "b", "c"), (1, 4, 4))
    assert from_tensors("mine", (images, labels.int()), (images, labels)).classes == ("0", "1", "2")
    for bad in [
        (images.int(), labels),
        (images, labels[:5]),
        (images, labels.float()),
        (images[0], labels),
    ]:
        with pytest.raises(DataError, match="mine, train"):
            from_tensors("mine", bad, (images, labels))
    with pytest.raises(DataError, match=r"train .*float32.*test uint8"):
        from_tensors("mine", (images.float(), labels), (images, labels))
    with pytest.raises(
        DataError,
        match=r"uint8 of shape \(1, 4, 4\)",
    ):
        from_tensors("mine", (images[0], labels[:1]), (images, labels))
    with pytest.raises(DataError, match="mine, test: labels"):
        from_tensors("mine", (images, labels), (images, [0] * 6))
    with pytest.raises(DataError, match="example 2 has label 2"):
        from_tensors("mine", (images, labels), (images, labels), classes=["a", "b"])
    with pytest.raises(ConfigError, match="mean and std"):
        from_tensors("mine", (images, labels), (images, labels), mean=[0.5, 0.5])


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
    images, labels = pictures(30, 3, (8, 8))
    images = np.asarray(images)[:, None]
    want = from_tensors(
        "mine", *[(torch.from_numpy(images), torch.from_numpy(np.array(labels)))] * 2
    )
    frozen = images.copy()
    frozen.flags.writeable = False
    for own in (images, frozen, np.asfortranarray(images)):
        for kind in (np.uint8, np.int32, np.uint16, np.int64):
            got = from_tensors(
                "mine", (own, np.array(labels, dtype=kind)), (own, np.array(labels, dtype=kind))
            )
            assert torch.equal(got.train.values, want.train.values)
            assert torch.equal(got.train.labels, want.train.labels)
    with pytest.raises(DataError, match=r"train are float32.*test uint8"):
        from_tensors("mine", (images / 255, np.array(labels)), (images, np.array(labels)))


def test_one_file_is_a_data_set(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images, labels = pictures(30, 3, (8, 8))
    write_parquet(tmp_path / "scans.parquet", images, labels, ["a", "b", "c"])
    write_parquet(root / "scans/train.parquet", images, labels, ["a", "b", "c"])
    want = load_dataset("scans")
    for name in ("scans.parquet", "./scans.parquet", str(tmp_path / "scans.parquet")):
        got = load_dataset(name)
        assert (len(got.train), len(got.test), got.classes) == (24, 6, ("a", "b", "c"))
        assert torch.equal(got.train.values, want.train.values)
    write_parquet(tmp_path / "test-only.parquet", images, labels, ["a", "b", "c"])
    assert len(load_dataset("test-only.parquet").train) == 24, (
        "one file is all there is, whatever it is called"
    )
    arrays = {
        f"{split}_{what}": x
        for split in ("train", "test")
        for what, x in (("images", images), ("labels", labels))
    }
    np.savez(tmp_path / "scans.npz", **{k: np.asarray(v) for k, v in arrays.items()})
    assert len(load_dataset("scans.npz").test) == 30
    write_parquet(tmp_path / "scans.parquet", images[:20], labels[:20], ["a", "b", "c"])
    assert len(load_dataset("scans.parquet").train) == 17, "a changed file is decoded anew"


def test_a_file_that_holds_no_data_set_is_named(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scans.txt").write_text("a,b")
    (tmp_path / "broken.parquet").write_text("nothing")
    refused(
        r"scans\.txt",
        "scans.txt",
    )
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
    refused(
        "data.size does not apply to dataset 'cifar10'",
        "cifar10",
        size=3,
    )
    refused("^data.input_column does not apply to dataset 'digits'", "digits", input="text")
    refused("^data.missing_marks does not apply to dataset 'digits'", "digits", marks=True)
    for size in (0, 4097, True):
        refused(f"data.size = {size}: ", "my-own", size=size)
    refused("is empty", "my-own")


def test_corrupt_parquet(root):
    images, labels = pictures(30, 3, (8, 8))
    path = root / "mine/train-0.parquet"
    write_parquet(path, images, labels, ["a", "b", "c"])
    whole = path.read_bytes()
    for bad in (whole[:200], b"nonsense" * 100, b"", whole[:100] + bytes(400) + whole[500:]):
        path.write_bytes(bad)
        assert "mine" in refused(
            "cannot be read|cannot be decoded as an image|holds no examples", "mine"
        )
    path.write_bytes(whole)
    assert len(load_dataset("mine").classes) == 3


def test_images_of_different_sizes_and_kinds(root):
    images, labels = pictures(4, 2, (8, 8))
    write_parquet(root / "mine/train-0.parquet", [*images, images[0][:5]], [*labels, 0])
    assert "example 4 is 8×5" in refused("set data.size = 8", "mine")
    assert load_dataset("mine", size=8).input_shape == (1, 8, 8)
    write_parquet(
        root / "kinds/train-0.parquet", [*images, np.zeros((8, 8, 3), np.uint8)], [*labels, 0]
    )
    refused("example 4 is 8×8 RGB, but the first is 8×8 grey", "kinds")
    write_parquet(root / "splits/train-0.parquet", images, labels)
    write_parquet(root / "splits/test-0.parquet", images[:, :5], labels)
    refused("images differ between splits", "splits")


def test_labels_out_of_range(root):
    images, _ = pictures(5, 2, (8, 8))
    for name, labels, text in [
        ("minus", [0, 1, -1, 0, 0], "label -1, outside"),
        ("huge", [0, 1, 70000, 0, 0], "label 70000 among 5 examples"),
        ("none", [0, 1, None, 0, 0], "example 2 has no label"),
    ]:
        write_parquet(root / name / "train-0.parquet", images, labels)
        refused(text, name)
    write_parquet(root / "test-only/test-0.parquet", images, [0, 1, 0, 1, 0])
    refused("no train split", "test-only")


def test_known_names_hold_what_they_promise(root, monkeypatch):
    images, labels = pictures(20, 10, (32, 32, 3))
    for split in ("train", "test"):
        write_parquet(root / f"cifar10/{split}-0.parquet", images, labels, catalog.CIFAR10.classes)
    refused("has {'train': 20, 'test': 20} examples, not {'train': 50000", "cifar10")
    real = catalog.CIFAR10
    monkeypatch.setattr(catalog, "CIFAR10", replace(real, sizes={"train": 20, "test": 20}))
    refused("the pixels have SHA-256", "cifar10")
    monkeypatch.setattr(catalog, "CIFAR10", replace(real, sizes={}, digests={}, shape=(3, 28, 28)))
    refused(r"not \(3, 28, 28\)", "cifar10")
    monkeypatch.setattr(
        catalog, "CIFAR10", replace(real, sizes={}, digests={}, classes=real.classes[::-1])
    )
    refused("the classes are airplane", "cifar10")


# The cache


def write_declared(path, names, image):
    """Ten rows with the ids of declared class names: images, or a number each."""
    labels = [row % len(names) for row in range(10)]
    if image:
        write_parquet(path, pictures(10, 2, (4, 4))[0], labels, names)
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
    assert len([path for path in (tmp_path / "cache/decoded").iterdir() if path.is_dir()]) == 1


def test_the_cache_is_mapped_copy_on_write_and_repaired(tmp_path):
    first = load_dataset("digits")
    whole = first.train.values.clone()
    first.train.values.zero_()  # must not reach the file
    assert torch.equal(load_dataset("digits").train.values, whole)
    (folder,) = (p for p in (tmp_path / "cache/decoded").iterdir() if p.is_dir())
    file = folder / "train-values.npy"
    for bad in (file.read_bytes()[:1000], b""):
        file.write_bytes(bad)
        assert torch.equal(load_dataset("digits").train.values, whole)
    (folder / "about.json").write_text("{")
    assert torch.equal(load_dataset("digits").train.values, whole)
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
    workers = [
        context.Process(target=_count, args=(queue, str(tmp_path / "cache"))) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    assert [queue.get(timeout=120) for _ in workers] == [1438, 1438]
    for worker in workers:
        worker.join()
    assert len([p for p in (tmp_path / "cache/decoded").iterdir() if p.is_dir()]) == 1


def test_held_out_examples_are_stratified_and_kept_in_order():
    labels = np.repeat(np.arange(3), [50, 10, 1])
    data = hold_out("x", Decoded({"train": Split(np.arange(61), labels)}, None))
    train, test = data.splits["train"], data.splits["test"]
    assert np.bincount(test.labels).tolist() == [10, 2]
    assert np.array_equal(np.sort(np.concatenate([train.values, test.values])), np.arange(61))
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
