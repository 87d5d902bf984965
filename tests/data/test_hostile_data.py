"""Hostile files: their claims are checked before anything is unpacked, and an error of one line
names the file that is refused.
"""

from __future__ import annotations

import gzip
import io
import os
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets  # noqa: F401 - before memory is traced
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageFile

from fedstill.core.errors import ConfigError, DataError
from fedstill.data.dataset import ReadRequest
from fedstill.data.sources import files, load_dataset
from fedstill.data.sources import images as pictures
from fedstill.data.sources.files import (
    check_ratio,
    check_size,
    file_errors,
    max_data_bytes,
    memory_bytes,
)
from fedstill.data.sources.image_sets import read_unlabelled
from fedstill.data.sources.images import FORMATS, Pictures

MEGABYTE = 1_000_000


pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
def not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a test fail that decodes an image."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)


@contextmanager
def at_most(allowed: int = 64 * MEGABYTE) -> Iterator[None]:
    """Limits the memory that the block allocates in Python and NumPy, the modules that it imports
    included.
    """
    tracemalloc.start()
    try:
        bytes_at_start = tracemalloc.get_traced_memory()[0]
        yield
        peak = tracemalloc.get_traced_memory()[1]
        assert peak - bytes_at_start < allowed
    finally:
        tracemalloc.stop()


def refused(text: str, place: Path, **fields: Any) -> str:
    """The error of one line, with a remedy, that refuses a data set; it matches ``text``."""
    with pytest.raises(DataError, match=text) as caught:
        load_dataset(str(place), **fields)
    message = str(caught.value)
    assert "\n" not in message
    assert "; " in message, "it says what to do"
    return message


def test_the_memory_that_there_is_is_known() -> None:
    assert 1 << 28 < memory_bytes() < 1 << 50
    check_size("CIFAR-100", 60_000 * 3 * 32 * 32)
    with pytest.raises(DataError, match="640 TB"):
        check_size("x", 582 << 40)


def test_ten_gigabytes_pass_on_a_machine_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "memory_bytes", lambda: 64 << 30)
    check_size("x", 10 << 30)
    check_ratio("x", 10 << 30, 5 << 30)
    with pytest.raises(DataError, match="200 times"):
        check_ratio("x", 10 << 30, 5 << 20)


def test_a_machine_that_does_not_say_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setattr(files, "_GROUPS", ())
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    assert max_data_bytes() == 4 << 30


def test_memory_that_ran_out_is_named_with_the_file_and_its_size(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(bytes(420_000))
    sentence = r"a\.npz, 420 kB, does not fit into memory \(MemoryError\); "
    with pytest.raises(DataError, match=sentence), file_errors(tmp_path / "a.npz"):
        raise MemoryError


def damaged(
    intact: bytes, draw: np.random.Generator, *, changes: int, cut_off: float = 0.0
) -> bytes:
    """A copy with some bytes replaced, which is cut off first with a probability."""
    data = bytearray(intact)
    if cut_off and draw.random() < cut_off:
        del data[draw.integers(1, len(intact)) :]
    for position in draw.integers(0, len(data), changes):
        data[position] = draw.integers(0, 256)
    return bytes(data)


# Images


def image_cell(image: Any) -> dict[str, Any]:
    """The cell of an image column: encoded bytes, or the path of a file."""
    if isinstance(image, bytes):
        return {"bytes": image, "path": None}
    return {"bytes": None, "path": image}


def table(path: Path, images: list[Any], labels: list[Any], **options: Any) -> Path:
    """The folder of a new parquet file with images, as bytes or as paths, and labels."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    cells = pa.array(map(image_cell, images), kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": cells, "label": labels}), path, **options)
    return path.parent


def encoded(kind: str = "PNG", side: int = 8, mode: str = "RGB") -> bytes:
    """A file of one square image of one colour."""
    file = io.BytesIO()
    Image.new(mode, (side, side), 7).save(file, kind)
    return file.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file: length, kind, data, checksum."""
    length = struct.pack(">I", len(data))
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return length + kind + data + checksum


def png_of(width: int, height: int) -> bytes:
    """A PNG file whose header claims any size, with next to no pixels."""
    eight_bit_rgb = bytes([8, 2, 0, 0, 0])
    size = struct.pack(">II", width, height)
    header_chunk = png_chunk(b"IHDR", size + eight_bit_rgb)
    pixel_chunk = png_chunk(b"IDAT", zlib.compress(b"\0" * 9))
    return b"\x89PNG\r\n\x1a\n" + header_chunk + pixel_chunk + png_chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [12_000, 9_000, 20_000, 2**31 - 1])
@pytest.mark.usefixtures("not_decoded")
def test_an_image_of_too_many_pixels_is_refused_from_its_header(side: int, tmp_path: Path) -> None:
    place = table(tmp_path / "mine/train-0.parquet", [png_of(side, side)], [0])
    (tmp_path / "images").mkdir()
    (tmp_path / "images/large.png").write_bytes(png_of(side, side))
    refusal = rf"image of {side} × {side} pixels, above the limit of 67,108,864|too large for"

    with at_most():
        refused(refusal, place, size=8)
        with pytest.raises(DataError, match=r"images/large\.png"):
            read_unlabelled(tmp_path / "images", ReadRequest(size=8))


@pytest.mark.parametrize("kind", FORMATS)
def test_the_limit_holds_in_every_format(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow writes no {kind}")
    image = encoded(kind, 64)
    place = table(tmp_path / "mine/train-0.parquet", [image] * 10, [0, 1] * 5)
    larger = table(tmp_path / "other/a.parquet", [image], [0])

    assert load_dataset(str(place)).input_shape == (3, 64, 64)
    monkeypatch.setattr(pictures, "MAX_PIXELS", 64 * 64 - 1)
    refused("example 0 is an image of 64 × 64 pixels", larger)


@pytest.mark.parametrize("kind", ["EPS", "ICO", "PDF"])
def test_formats_that_start_programs_or_lie_about_their_size_are_not_read(
    kind: str, tmp_path: Path
) -> None:
    place = table(tmp_path / "mine/train-0.parquet", [encoded(kind, 16)], [0])
    refused("example 0 cannot be decoded", place)


@pytest.mark.parametrize("kind", FORMATS)
def test_images_that_are_spoilt_end_in_one_line(kind: str) -> None:
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow writes no {kind}")
    intact = encoded(kind, 32)
    draw = np.random.default_rng(0)
    messages = []

    for _ in range(50):
        image = damaged(intact, draw, changes=4, cut_off=0.3)
        try:
            Pictures("x").decoded(image_cell(image), 0)
        except DataError as error:
            messages.append(str(error))

    assert len(messages) > 10
    assert all(text.startswith("x: example 0 ") for text in messages)
    assert all("\n" not in text for text in messages)


@pytest.mark.usefixtures("not_decoded")
def test_images_that_together_are_too_many_are_refused_at_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "memory_bytes", lambda: 3 * MEGABYTE)
    image = encoded(side=64)
    place = tmp_path / "mine/train/cat"
    place.mkdir(parents=True)
    for number in range(100):
        (place / f"{number}.png").write_bytes(image)
    parquet = table(tmp_path / "t/a.parquet", [image] * 100, [0] * 100)

    refused("train needs 1.2 MB of memory, .* at most 1.0 MB here", parquet)
    refused("train needs 1.2 MB of memory", tmp_path / "mine")
    with pytest.raises(DataError, match="needs 1"):
        read_unlabelled(place)


def test_a_file_that_is_larger_than_an_image_can_be_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "IMAGE_BYTES", MEGABYTE)
    (tmp_path / "mine").mkdir()
    with (tmp_path / "mine/a.webp").open("wb") as file:
        file.write(encoded("WEBP"))
        file.truncate(20 * MEGABYTE)  # a hole: it takes no room on the disk

    with at_most(), pytest.raises(DataError, match=r"a\.webp has 20 MB"):
        read_unlabelled(tmp_path / "mine")


# NPZ


def archive(
    path: Path, labels: np.ndarray | None = None, count: int = 10, **arrays: np.ndarray
) -> Path:
    """The folder of a new NPZ file with black images, and labels that alternate if there are
    none; further arrays, also other images, have their names.
    """
    if labels is None:
        labels = np.arange(count) % 2
    images = np.zeros((count, 4, 4), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{"train_images": images, "train_labels": labels, **arrays})
    return path.parent


def header(shape: str, descr: str = "'|u1'", order: str = "False", version: int = 1) -> bytes:
    """An NPY header with any claims."""
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    length_format = "<H"
    if version > 1:
        length_format = "<I"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack(length_format, len(text)) + text


def lying(
    path: Path,
    images: bytes,
    change: Callable[[zipfile.ZipInfo], None] = lambda _: None,
    **options: Any,
) -> Path:
    """The folder of a new NPZ file whose member of images has these bytes.

    ``change`` alters that member's entry in the directory of the archive.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = io.BytesIO()
    np.save(labels, np.arange(10) % 2)
    options = {"compression": zipfile.ZIP_DEFLATED, **options}
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("train_images.npy", images)
        file.writestr("train_labels.npy", labels.getvalue())
        change(file.getinfo("train_images.npy"))
    return path.parent


def test_what_the_lies_are_made_of_is_read_when_it_is_true(tmp_path: Path) -> None:
    place = lying(tmp_path / "mine/a.npz", header("(10, 4, 4)") + bytes(160))

    data = load_dataset(str(place))

    assert len(data.train) == 8
    assert data.input_shape == (1, 4, 4)


def test_a_folder_with_several_npz_files_is_refused(tmp_path: Path) -> None:
    place = archive(tmp_path / "mine/a.npz")
    archive(tmp_path / "mine/b.npz")
    refused(r"a\.npz, b\.npz.*data\.name = 'mine/a\.npz'", place)


def test_images_beside_an_npz_are_reported(tmp_path: Path) -> None:
    place = archive(tmp_path / "mine/a.npz")
    Image.new("L", (4, 4)).save(place / "b.png")
    (warning,) = load_dataset(str(place)).about.warnings
    assert "a.npz: b.png" in warning


LIES = {
    "582 TiB": header("(10, 8000000, 8000000)"),
    "negative": header("(10, -4, -4)") + bytes(160),
    "overflow": header("(10, 4294967296, 4294967296)"),
    "no pixels": header("(10, 0, 99999999999)"),
    "bool": header("(10, True, True)") + bytes(10),
    "pickle": header("(10, 4, 4)", "'|O'") + bytes(1280),
    "structured": header("(10, 4, 4)", "[('a', '|u1', (99999999,))]"),
    "nested": header("(10, 4, 4)", "('|u1', (99999999,))"),
    "text": header("(10, 4, 4)", "'<U9'") + bytes(160 * 36),
    "no tuple": header("160") + bytes(160),
    "deep": header("(" * 500 + ")" * 500),
    "minus": header("-" * 9000 + "1"),
    "long": header(" " * 20_000 + "(10, 4, 4)", version=2) + bytes(160),
    "version": header("(10, 4, 4)", version=3) + bytes(160),
    "short": header("(10, 4, 4)") + bytes(159),
    "longer": header("(10, 4, 4)") + bytes(161),
    "no magic": bytes(200),
    "empty": b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_an_npz_whose_header_lies_is_refused_before_its_array_is_read(
    lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = lying(tmp_path / "mine/a.npz", LIES[lie])
    monkeypatch.setattr(
        "fedstill.data.sources.image_sets._npz_array", lambda *_: pytest.fail("an array was read")
    )
    with at_most():
        assert str(tmp_path / "mine/a.npz") in refused("damaged or not an archive", place)


def test_an_npz_in_fortran_order_is_read_right(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (10, 4, 6, 3), dtype=np.uint8)
    place = archive(
        tmp_path / "mine/a.npz",
        train_images=np.asfortranarray(images),
        test_images=images,
        test_labels=np.ones(10),
    )

    data = load_dataset(str(place))

    assert np.array_equal(data.train.values.numpy(), images.transpose(0, 3, 1, 2))


def test_an_archive_that_says_that_it_is_larger_than_memory(tmp_path: Path) -> None:
    def change(info: zipfile.ZipInfo) -> None:
        info.file_size = 582 << 40

    place = lying(tmp_path / "mine/a.npz", header("(10, 8000000, 8000000)"), change)
    with at_most():
        refused(r"a\.npz needs 640 TB of memory", place)


def test_an_archive_that_unpacks_to_too_much_in_one_or_in_several_members_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UNLIMITED_BYTES", 3 * MEGABYTE)
    single = lying(tmp_path / "one/a.npz", header("(10, 2000, 2000)") + bytes(40 * MEGABYTE))
    several = tmp_path / "several/a.npz"
    several.parent.mkdir()
    members = {}
    for split in ("train", "val", "test"):
        members[f"{split}_images"] = np.zeros((2, 1000, 1000), np.uint8)
        members[f"{split}_labels"] = np.zeros(2)
    np.savez_compressed(several, **members)

    with at_most(20 * MEGABYTE):
        refused(r"a\.npz is 39 kB, but would unpack to 40 MB, more than 200 times its size", single)
        refused(
            r"a\.npz is 7.\d kB, but would unpack to 6.0 MB, more than 200 times its size",
            several.parent,
        )


def test_an_npz_that_is_changed_anywhere_ends_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine/a.npz"
    draw = np.random.default_rng(0)
    messages = []
    archive(path)
    intact = path.read_bytes()

    for _ in range(150):
        path.write_bytes(damaged(intact, draw, changes=4, cut_off=0.2))
        try:
            load_dataset(str(path.parent))
        except DataError as error:
            messages.append(str(error))

    assert len(messages) > 50
    assert not [text for text in messages if "\n" in text]


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_ways_of_packing_unpack_too_much_at_a_time(compression: int, tmp_path: Path) -> None:
    images = header("(10, 4, 4)") + bytes(160)
    place = lying(tmp_path / "mine/a.npz", images, compression=compression)
    refused("has a compression that NumPy does not use", place)


@pytest.mark.parametrize(
    "bad", [b"", b"PK\x05\x06", b"\x93NUMPY", header("(10, 8000000, 8000000)"), bytes(1000)]
)
def test_an_npz_that_is_none(bad: bytes, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a.npz").write_bytes(bad)
    refused("damaged or not an archive", tmp_path / "mine")


# Labels


def labelled(place: Path, labels: Any) -> Path:
    """The folder of a new parquet file with equal images and these labels."""
    return table(place / "a.parquet", [encoded()] * len(labels), labels)


BAD_LABELS = {
    "half": ([0.0, 1.0, 0.5, 1.5], "example 2 has the label 0.5"),
    "nan": ([0.0, float("nan")], "example 1 has no label"),
    "infinite": ([0.0, float("inf")], "example 1 has the label inf"),
    "huge": ([0.0, 1e300], r"example 1 has the label 1e\+300"),
    "negative": ([0, -3], "has label -3, outside"),
    "beyond": ([0, 2**62], "example 1 has the label 4611686018427387904"),
    "many": ([0, 9999], "label 9999 among"),
}


@pytest.mark.parametrize(("first_labels", "text"), BAD_LABELS.values(), ids=BAD_LABELS)
def test_labels_that_would_be_cut_off_or_wrapped_are_refused(
    first_labels: list[Any], text: str, tmp_path: Path
) -> None:
    kind = type(first_labels[0])
    padding = [kind(0)] * (10 - len(first_labels))
    labels = [*first_labels, *padding]

    refused(text, archive(tmp_path / "npz/a.npz", np.array(labels)))
    refused(text, labelled(tmp_path / "parquet", labels))


def test_labels_of_64_bits_without_a_sign_do_not_wrap_around(tmp_path: Path) -> None:
    labels = np.zeros(10, np.uint64)
    labels[9] = 2**64 - 1

    refused("example 9 has the label 18446744073709551615", archive(tmp_path / "npz/a.npz", labels))
    refused("has the label 18446744073709551615", labelled(tmp_path / "t", pa.array(labels)))


def test_whole_numbers_pass_whatever_they_are_stored_as(tmp_path: Path) -> None:
    for kind in ("float32", "float64", "uint8", "int16", "bool"):
        labels = (np.arange(10) % 2).astype(kind)
        npz = archive(tmp_path / kind / "npz/a.npz", labels)
        parquet = labelled(tmp_path / kind / "t", pa.array(labels))
        for place in (npz, parquet):
            data = load_dataset(str(place))
            read_labels = torch.cat([data.train.labels, data.test.labels])
            assert read_labels.bincount().tolist() == [5, 5]


def test_labels_of_an_npz_that_are_no_numbers(tmp_path: Path) -> None:
    refused("damaged or not an archive", archive(tmp_path / "mine/a.npz", np.zeros(10, complex)))
    for name, label in {"texts": "0", "bytes": b"x"}.items():
        place = archive(tmp_path / name / "a.npz", np.array([label] * 10))
        refused(r"labels\.npy .*np\.unique", place)


def test_labels_of_a_table_that_are_no_labels(tmp_path: Path) -> None:
    refused("not class ids or names", labelled(tmp_path / "lists", [[1], [2]]))
    refused("not class ids or names", labelled(tmp_path / "bytes", [b"a", b"b"]))
    refused("not class ids or names", labelled(tmp_path / "structs", [{"a": 1}, {"a": 2}]))
    refused("example 1 has the label 'yyy", labelled(tmp_path / "long", ["x", "y" * 10_000]))


# Parquet


SECRET = "../secret.png"


@pytest.mark.parametrize(
    "kind", ["relative", "deep", "absolute", "link", "folder link", "url", "file url", "null"]
)
def test_a_path_in_a_table_opens_nothing_outside_of_the_folder(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    secret = tmp_path / "secret.png"
    (place / "in").mkdir(parents=True)
    secret.write_bytes(encoded())
    (place / "link.png").symlink_to(secret)
    paths = {
        "relative": "../secret.png",
        "deep": "in/../../secret.png",
        "absolute": str(secret),
        "link": "link.png",
        "folder link": "up/secret.png",
        "url": "http://127.0.0.1:9/secret.png",
        "file url": f"file://{secret}",
        "null": "a\0b",
    }
    images = [encoded()] * 3 + [paths[kind]]
    table(place / "train-0.parquet", images, [0, 1, 0, 1])

    if kind == "folder link":
        (place / "up").symlink_to(tmp_path)
        with pytest.raises(DataError, match="'up/secret"):
            Pictures("x", within=place).decoded(image_cell(paths[kind]), 0)
    else:
        refused("train: example 3 (has no image: there is no file|refers to the file)", place)


def test_a_path_in_a_table_that_lies_in_the_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    place = tmp_path / "mine"
    (place / "in").mkdir(parents=True)
    (place / "in/a.png").write_bytes(encoded())
    paths = ["in/a.png", str(place / "in/a.png")]
    table(place / "train-0.parquet", paths * 10, [0, 1] * 10)

    assert load_dataset(str(place)).input_shape == (3, 8, 8)


def test_devices_pipes_and_folders_are_no_images(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    (place / "folder.png").mkdir(parents=True)
    os.mkfifo(place / "pipe.png")
    for path in ("pipe.png", "folder.png", "", "nothing.png", "x" * 5000):
        table(place / "train-0.parquet", [path], [0])
        refused("example 0 (has no image|has neither|cannot be read)|File name too long", place)


def test_a_path_of_the_hub_is_read_from_the_same_data_set_only() -> None:
    hub = Pictures("x", within="owner/name")
    for path in (
        "hf://datasets/other/name@1/a.png",
        "hf://datasets/owner/name@1/../../b",
        "/etc/passwd",
        "s3://a/b",
    ):
        with pytest.raises(DataError, match="refers to the file"):
            hub.decoded(image_cell(path), 0)
    assert pictures._on_hub("hf://datasets/owner/name@1/a.png", "owner/name")
    assert pictures._on_hub("zip://a.png::hf://datasets/owner/name@1/a.zip", "owner/name")
    assert not pictures._on_hub("zip://a.png::file:///etc/a.zip", "owner/name")


def test_one_value_in_all_rows_is_held_once(tmp_path: Path) -> None:
    """A dictionary: the file is small, and all rows of it at once would be 200 MB."""
    image = encoded() + bytes(MEGABYTE)
    options = {
        "compression": "zstd",
        "dictionary_pagesize_limit": 10 * MEGABYTE,
        "use_dictionary": True,
    }
    path = tmp_path / "mine/train-0.parquet"
    place = table(path, [image] * 200, [0, 1] * 100, **options)
    assert path.stat().st_size < 100_000
    usual = pa.default_memory_pool()
    counting = pa.proxy_memory_pool(usual)

    pa.set_memory_pool(counting)
    try:
        assert len(load_dataset(str(place)).train) == 160
    finally:
        pa.set_memory_pool(usual)

    assert 0 < counting.max_memory() < 32 * MEGABYTE


def test_one_value_in_all_rows_is_not_decoded_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UNLIMITED_BYTES", 3 * MEGABYTE)
    image = encoded() + bytes(50_000)
    path = tmp_path / "mine/train-0.parquet"
    options = {"compression": "zstd", "use_dictionary": True}
    place = table(path, [image] * 1000, [0, 1] * 500, **options)

    refused(r"train-0\.parquet is \S+ kB, but would unpack to 3.0 MB, more than 200", place)


def test_columns_that_unpack_to_too_much_are_refused_from_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UNLIMITED_BYTES", 3 * MEGABYTE)
    image = encoded() + bytes(4 * MEGABYTE)
    path = tmp_path / "mine/train-0.parquet"
    options = {"compression": "zstd", "use_dictionary": False}
    place = table(path, [image] * 5, [0] * 5, **options)

    refused(r"train-0\.parquet is \S+ kB, but would unpack to 20 MB, more than 200", place)


def test_rows_that_are_too_many_are_refused_from_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "memory_bytes", lambda: 3 * MEGABYTE)
    place = table(tmp_path / "mine/train-0.parquet", [None] * 20_000, [0] * 20_000)
    refused(r"train-0\.parquet needs 2.0 MB of memory", place)


def test_a_column_of_numbers_is_no_column_of_images(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.mkdir()
    lists = pa.array([[0] * 64, [1] * 64], pa.list_(pa.uint8()))
    pq.write_table(pa.table({"image": lists, "label": [0, 1]}), place / "a.parquet")

    refused("column 'image' holds list<.*>, not encoded images", place, image_column="image")


def test_bytes_that_are_changed_anywhere_end_in_one_line(tmp_path: Path) -> None:
    place = table(tmp_path / "mine/train-0.parquet", [encoded()] * 20, [0, 1] * 10)
    path = place / "train-0.parquet"
    draw = np.random.default_rng(0)
    intact = path.read_bytes()
    messages = []

    for _ in range(60):
        path.write_bytes(damaged(intact, draw, changes=3))
        try:
            load_dataset(str(place))
        except DataError as error:
            messages.append(str(error))

    assert len(messages) > 10
    assert not [text for text in messages if "\n" in text]


# IDX


def idx(path: Path, shape: tuple[int, ...], data: bytes) -> None:
    """Write an IDX file of bytes, which claims a shape."""
    magic = bytes([0, 0, 8, len(shape)])
    sides = struct.pack(f">{len(shape)}i", *shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(magic + sides + data))


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((10, -4, -4), "not an IDX file"),
        ((10, 0, 4), "not an IDX file"),
        ((10, 2**31 - 1, 2**31 - 1), "of memory"),
        ((10, 4, 5), "truncated"),
        ((10, 4, 3), "truncated"),
        ((10, 8000, 8000), "more than 200 times its size"),
    ],
)
def test_an_idx_file_that_lies_about_its_size(
    shape: tuple[int, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UNLIMITED_BYTES", MEGABYTE)
    place = tmp_path / "mine"
    for prefix in ("train", "t10k"):
        idx(place / f"{prefix}-images-idx3-ubyte.gz", (10, 4, 4), bytes(160))
        idx(place / f"{prefix}-labels-idx1-ubyte.gz", (10,), bytes(10))
    assert load_dataset(str(place)).input_shape == (1, 4, 4)

    idx(place / "train-images-idx3-ubyte.gz", shape, bytes(160))
    with at_most():
        refused(text, place)

    idx(place / "train-images-idx3-ubyte.gz", (9, 4, 4), bytes(144))
    refused("9 images and 10 labels", place)


# Folders


def folder_of_images(place: Path) -> Path:
    """The folder, with five images of each of two classes."""
    for name in ("cat", "dog"):
        (place / name).mkdir(parents=True)
        for number in range(5):
            (place / name / f"{number}.png").write_bytes(encoded())
    return place


def test_links_that_lead_back_up_and_links_to_themselves(tmp_path: Path) -> None:
    place = folder_of_images(tmp_path / "mine")

    (place / "cat/up").symlink_to(place)
    refused("cat/up is a link to a folder above it", place)
    (place / "cat/up").unlink()

    (place / "cat/self.png").symlink_to(place / "cat/self.png")
    refused(r"cat/self\.png cannot be read \(Too many levels of symbolic links\)", place)
    (place / "cat/self.png").unlink()

    assert load_dataset(str(place)).classes == ("cat", "dog")


def test_a_class_that_is_a_link_to_another_folder_is_read(tmp_path: Path) -> None:
    place = folder_of_images(tmp_path / "mine")
    elsewhere = folder_of_images(tmp_path / "other")
    (place / "cow").symlink_to(elsewhere / "dog")
    assert load_dataset(str(place)).classes == ("cat", "cow", "dog")


def test_a_folder_or_file_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder_of_images(tmp_path / "mine")
    real_scan = os.scandir
    real_open = Path.open

    def scan_folder(path: Any) -> Any:
        if Path(path).name == "dog":
            raise PermissionError(13, "Permission denied", str(path))
        return real_scan(path)

    def open_file(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "3.png":
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scan_folder)
        refused(r"mine/dog cannot be read \(Permission denied\); make it readable", place)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", open_file)
        refused(r"cat/3\.png cannot be read \(Permission denied\); make it readable", place)
        with pytest.raises(DataError, match=r"cat/3\.png"):
            read_unlabelled(place / "cat")


def test_a_folder_that_is_clearly_another_is_not_walked_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused("/ is the root of a file system", Path("/"))

    with monkeypatch.context() as patched:
        patched.setattr(files, "MAX_OTHER_FILES", 20)
        place = folder_of_images(tmp_path / "mine")
        for number in range(50):
            (place / f"{number}.py").touch()
        refused("has over 20 files that are not images", place)

    deep = tmp_path / "deep" / "/".join("abcdefghij")
    deep.mkdir(parents=True)
    refused("has 9 levels of folders", tmp_path / "deep")

    monkeypatch.setattr(files, "FOLDERS_WALKED", 3)
    folder_of_images(tmp_path / "wide/train")
    refused("has 4 folders", tmp_path / "wide")


def test_a_table_beside_images_is_named_because_it_is_not_read(tmp_path: Path) -> None:
    place = folder_of_images(tmp_path / "mine")
    (place / "metadata.csv").write_text("file_name,label\n../../etc/passwd,1\n")
    refused(r"metadata\.csv cannot be used", place)


def test_names_that_no_system_has(tmp_path: Path) -> None:
    refused("File name too long", tmp_path / ("x" * 5000))
    with pytest.raises(ConfigError, match="home folder"):
        load_dataset("~nobody-has-this-name/data")
    with pytest.raises(DataError, match="there is no file or folder"):
        load_dataset("./a\0b")
