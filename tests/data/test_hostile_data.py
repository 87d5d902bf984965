"""Files that lie: what they claim is read before anything is unpacked, and each is refused in one
line, by its name.
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


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)


@pytest.fixture
def not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that must not decode an image."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)


@contextmanager
def at_most(allowed: int = 64 * MEGABYTE) -> Iterator[None]:
    """What is done must not allocate more than this, in Python and NumPy; modules that it imports
    first count, too.
    """
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        assert tracemalloc.get_traced_memory()[1] - before < allowed
    finally:
        tracemalloc.stop()


def refused(text: str, place: Path, **fields: Any) -> str:
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
    says = r"a\.npz, 420 kB, does not fit into memory \(MemoryError\); "
    with pytest.raises(DataError, match=says), file_errors(tmp_path / "a.npz"):
        raise MemoryError


# Images


def table(path: Path, images: list[Any], labels: list[Any], **more: Any) -> Path:
    """A parquet file of images as bytes, or as a path, and labels."""
    cells = [
        {"bytes": x, "path": None} if isinstance(x, bytes) else {"bytes": None, "path": x}
        for x in images
    ]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": pa.array(cells, kind), "label": labels}), path, **more)
    return path.parent


def encoded(kind: str = "PNG", side: int = 8, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (side, side), 7).save(file, kind)
    return file.getvalue()


def png_of(width: int, height: int) -> bytes:
    """The header of an image of any size, and next to nothing in it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b"\0" * 9))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [12_000, 9_000, 20_000, 2**31 - 1])
@pytest.mark.usefixtures("not_decoded")
def test_an_image_of_too_many_pixels_is_refused_from_its_header(side: int, tmp_path: Path) -> None:
    place = table(tmp_path / "mine/train-0.parquet", [png_of(side, side)], [0])
    (tmp_path / "images").mkdir()
    (tmp_path / "images/large.png").write_bytes(png_of(side, side))
    with at_most():
        refused(
            rf"image of {side} × {side} pixels, above the limit of 67,108,864|too large for",
            place,
            size=8,
        )
        with pytest.raises(DataError, match=r"images/large\.png"):
            read_unlabelled(tmp_path / "images", ReadRequest(size=8))


@pytest.mark.parametrize("kind", FORMATS)
def test_the_limit_holds_in_every_format(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow writes no {kind}")
    place = table(tmp_path / "mine/train-0.parquet", [encoded(kind, 64)] * 10, [0, 1] * 5)
    assert load_dataset(str(place)).input_shape == (3, 64, 64)
    monkeypatch.setattr(pictures, "MAX_PIXELS", 64 * 64 - 1)
    refused(
        "example 0 is an image of 64 × 64 pixels",
        table(tmp_path / "other/a.parquet", [encoded(kind, 64)], [0]),
    )


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
    whole, draw, said = encoded(kind, 32), np.random.default_rng(0), []
    for _ in range(50):
        data = bytearray(whole[: draw.integers(1, len(whole))] if draw.random() < 0.3 else whole)
        for at in draw.integers(0, len(data), 4):
            data[at] = draw.integers(0, 256)
        try:
            Pictures("x").decoded({"bytes": bytes(data), "path": None}, 0)
        except DataError as error:
            said.append(str(error))
    assert len(said) > 10
    assert all(text.startswith("x: example 0 ") and "\n" not in text for text in said)


@pytest.mark.usefixtures("not_decoded")
def test_images_that_together_are_too_many_are_refused_at_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "memory_bytes", lambda: 3 * MEGABYTE)
    image = encoded(side=64)
    refused(
        "train needs 1.2 MB of memory, .* at most 1.0 MB here",
        table(tmp_path / "t/a.parquet", [image] * 100, [0] * 100),
    )
    place = tmp_path / "mine/train/cat"
    place.mkdir(parents=True)
    for k in range(100):
        (place / f"{k}.png").write_bytes(image)
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
    with (
        at_most(),
        pytest.raises(DataError, match=r"a\.webp has 20 MB"),
    ):
        read_unlabelled(tmp_path / "mine")


# NPZ


def archive(
    path: Path, labels: np.ndarray | None = None, count: int = 10, **arrays: np.ndarray
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = np.arange(count) % 2 if labels is None else labels
    np.savez(
        path,
        **{"train_images": np.zeros((count, 4, 4), np.uint8), "train_labels": labels, **arrays},
    )
    return path.parent


def header(shape: str, descr: str = "'|u1'", order: str = "False", version: int = 1) -> bytes:
    """An NPY header that says what it likes."""
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + struct.pack("<H" if version == 1 else "<I", len(text))
        + text
    )


def lying(
    path: Path,
    images: bytes,
    change: Callable[[zipfile.ZipInfo], None] = lambda _: None,
    **how: Any,
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = io.BytesIO()
    np.save(labels, np.arange(10) % 2)
    with zipfile.ZipFile(path, "w", **{"compression": zipfile.ZIP_DEFLATED, **how}) as file:
        file.writestr("train_images.npy", images)
        file.writestr("train_labels.npy", labels.getvalue())
        change(file.getinfo("train_images.npy"))
    return path.parent


def test_what_the_lies_are_made_of_is_read_when_it_is_true(tmp_path: Path) -> None:
    data = load_dataset(str(lying(tmp_path / "mine/a.npz", header("(10, 4, 4)") + bytes(160))))
    assert (len(data.train), data.input_shape) == (8, (1, 4, 4))


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
    archive(
        tmp_path / "mine/a.npz",
        train_images=np.asfortranarray(images),
        test_images=images,
        test_labels=np.ones(10),
    )
    data = load_dataset(str(tmp_path / "mine"))
    assert np.array_equal(data.train.values.numpy(), images.transpose(0, 3, 1, 2))


def test_an_archive_that_says_that_it_is_larger_than_memory(tmp_path: Path) -> None:
    def change(info: zipfile.ZipInfo) -> None:
        info.file_size = 582 << 40

    place = lying(tmp_path / "mine/a.npz", header("(10, 8000000, 8000000)"), change)
    with at_most():
        refused(r"a\.npz needs 640 TB of memory", place)


def test_a_bomb_in_one_member_or_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UNLIMITED_BYTES", 3 * MEGABYTE)
    one = lying(tmp_path / "one/a.npz", header("(10, 2000, 2000)") + bytes(40 * MEGABYTE))
    several = tmp_path / "several/a.npz"
    several.parent.mkdir()
    zeros = np.zeros((2, 1000, 1000), np.uint8)
    members = {f"{split}_images": zeros for split in ("train", "val", "test")}
    np.savez_compressed(
        several, **members, **{f"{split}_labels": np.zeros(2) for split in ("train", "val", "test")}
    )
    with at_most(20 * MEGABYTE):
        refused(r"a\.npz is 39 kB, but would unpack to 40 MB, more than 200 times its size", one)
        refused(
            r"a\.npz is 7.\d kB, but would unpack to 6.0 MB, more than 200 times its size",
            several.parent,
        )


def test_an_npz_that_is_changed_anywhere_ends_in_one_line(tmp_path: Path) -> None:
    path, draw, said = tmp_path / "mine/a.npz", np.random.default_rng(0), []
    archive(path)
    whole = path.read_bytes()
    for _ in range(150):
        data = bytearray(whole[: draw.integers(1, len(whole))] if draw.random() < 0.2 else whole)
        for at in draw.integers(0, len(data), 4):
            data[at] = draw.integers(0, 256)
        path.write_bytes(data)
        try:
            load_dataset(str(path.parent))
        except DataError as error:
            said.append(str(error))
    assert len(said) > 50
    assert not [text for text in said if "\n" in text]


@pytest.mark.parametrize("how", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_ways_of_packing_unpack_too_much_at_a_time(how: int, tmp_path: Path) -> None:
    place = lying(tmp_path / "mine/a.npz", header("(10, 4, 4)") + bytes(160), compression=how)
    refused("has a compression that NumPy does not use", place)


@pytest.mark.parametrize(
    "bad", [b"", b"PK\x05\x06", b"\x93NUMPY", header("(10, 8000000, 8000000)"), bytes(1000)]
)
def test_an_npz_that_is_none(bad: bytes, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a.npz").write_bytes(bad)
    refused("damaged or not an archive", tmp_path / "mine")


# Labels

BAD_LABELS = {
    "half": ([0.0, 1.0, 0.5, 1.5], "example 2 has the label 0.5"),
    "nan": ([0.0, float("nan")], "example 1 has no label"),
    "infinite": ([0.0, float("inf")], "example 1 has the label inf"),
    "huge": ([0.0, 1e300], r"example 1 has the label 1e\+300"),
    "negative": ([0, -3], "has label -3, outside"),
    "beyond": ([0, 2**62], "example 1 has the label 4611686018427387904"),
    "many": ([0, 9999], "label 9999 among"),
}


@pytest.mark.parametrize("which", BAD_LABELS)
def test_labels_that_would_be_cut_off_or_wrapped_are_refused(which: str, tmp_path: Path) -> None:
    head, text = BAD_LABELS[which]
    labels = [*head, *[0] * (10 - len(head))]
    refused(text, archive(tmp_path / "npz/a.npz", np.array(labels)))
    refused(
        text,
        table(tmp_path / "parquet/a.parquet", [encoded()] * 10, [type(head[0])(v) for v in labels]),
    )


def test_labels_of_64_bits_without_a_sign_do_not_wrap_around(tmp_path: Path) -> None:
    labels = np.array([0] * 9 + [2**64 - 1], np.uint64)
    refused("example 9 has the label 18446744073709551615", archive(tmp_path / "npz/a.npz", labels))
    refused(
        "has the label 18446744073709551615",
        table(tmp_path / "t/a.parquet", [encoded()] * 10, pa.array(labels)),
    )


def test_whole_numbers_pass_whatever_they_are_stored_as(tmp_path: Path) -> None:
    for kind in ("float32", "float64", "uint8", "int16", "bool"):
        labels = (np.arange(10) % 2).astype(kind)
        from_npz = load_dataset(str(archive(tmp_path / kind / "npz/a.npz", labels)))
        from_table = load_dataset(
            str(table(tmp_path / kind / "t/a.parquet", [encoded()] * 10, pa.array(labels)))
        )
        for data in (from_npz, from_table):
            assert (
                sorted([*data.train.labels.tolist(), *data.test.labels.tolist()])
                == [0] * 5 + [1] * 5
            )


def test_labels_of_an_npz_that_are_no_numbers(tmp_path: Path) -> None:
    refused("damaged or not an archive", archive(tmp_path / "mine/a.npz", np.zeros(10, complex)))
    for name, labels in {"texts": np.array(["0"] * 10), "bytes": np.array([b"x"] * 10)}.items():
        refused(
            r"labels\.npy .*np\.unique",
            archive(tmp_path / name / "a.npz", labels),
        )


def test_labels_of_a_table_that_are_no_labels(tmp_path: Path) -> None:
    for name, labels in {
        "lists": [[1], [2]],
        "bytes": [b"a", b"b"],
        "structs": [{"a": 1}, {"a": 2}],
    }.items():
        refused(
            "not class ids or names", table(tmp_path / name / "a.parquet", [encoded()] * 2, labels)
        )
    refused(
        "example 1 has the label 'yyy",
        table(tmp_path / "long/a.parquet", [encoded()] * 2, ["x", "y" * 10_000]),
    )


# Parquet


SECRET = "../secret.png"


@pytest.mark.parametrize(
    "how", ["relative", "deep", "absolute", "link", "folder link", "url", "file url", "null"]
)
def test_a_path_in_a_table_opens_nothing_outside_of_the_folder(how: str, tmp_path: Path) -> None:
    place, secret = tmp_path / "mine", tmp_path / "secret.png"
    (place / "in").mkdir(parents=True)
    secret.write_bytes(encoded())
    (place / "link.png").symlink_to(secret)
    (place / "up").symlink_to(tmp_path)
    path = {
        "relative": "../secret.png",
        "deep": "in/../../secret.png",
        "absolute": str(secret),
        "link": "link.png",
        "folder link": "up/secret.png",
        "url": "http://127.0.0.1:9/secret.png",
        "file url": f"file://{secret}",
        "null": "a\0b",
    }[how]
    (place / "up").unlink() if how != "folder link" else None
    table(place / "train-0.parquet", [encoded()] * 3 + [path], [0, 1, 0, 1])
    if how == "folder link":
        with pytest.raises(DataError, match="'up/secret"):
            Pictures("x", within=place).decoded({"bytes": None, "path": path}, 0)
    else:
        refused("train: example 3 (has no image: there is no file|refers to the file)", place)


def test_a_path_in_a_table_that_lies_in_the_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    place = tmp_path / "mine"
    (place / "in").mkdir(parents=True)
    (place / "in/a.png").write_bytes(encoded())
    table(place / "train-0.parquet", ["in/a.png", str(place / "in/a.png")] * 10, [0, 1] * 10)
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
            hub.decoded({"bytes": None, "path": path}, 0)
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
    place = table(tmp_path / "mine/train-0.parquet", [image] * 200, [0, 1] * 100, **options)
    assert (place / "train-0.parquet").stat().st_size < 100_000
    usual, counting = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
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
    image, options = encoded() + bytes(50_000), {"compression": "zstd", "use_dictionary": True}
    place = table(tmp_path / "mine/train-0.parquet", [image] * 1000, [0, 1] * 500, **options)
    refused(
        r"train-0\.parquet is \S+ kB, but would unpack to 3.0 MB, more than 200",
        place,
    )


def test_columns_that_unpack_to_too_much_are_refused_from_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UNLIMITED_BYTES", 3 * MEGABYTE)
    options = {"compression": "zstd", "use_dictionary": False}
    place = table(
        tmp_path / "mine/train-0.parquet", [encoded() + bytes(4 * MEGABYTE)] * 5, [0] * 5, **options
    )
    refused(
        r"train-0\.parquet is \S+ kB, but would unpack to 20 MB, more than 200",
        place,
    )


def test_rows_that_are_too_many_are_refused_from_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "memory_bytes", lambda: 3 * MEGABYTE)
    place = table(tmp_path / "mine/train-0.parquet", [None] * 20_000, [0] * 20_000)
    refused(r"train-0\.parquet needs 2.0 MB of memory", place)


def test_a_column_of_numbers_is_no_column_of_images(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    lists = pa.array([[0] * 64, [1] * 64], pa.list_(pa.uint8()))
    pq.write_table(pa.table({"image": lists, "label": [0, 1]}), tmp_path / "mine/a.parquet")
    refused(
        "column 'image' holds list<.*>, not encoded images", tmp_path / "mine", image_column="image"
    )


def test_bytes_that_are_changed_anywhere_end_in_one_line(tmp_path: Path) -> None:
    place = table(tmp_path / "mine/train-0.parquet", [encoded()] * 20, [0, 1] * 10)
    path, draw = place / "train-0.parquet", np.random.default_rng(0)
    whole = path.read_bytes()
    said = []
    for _ in range(60):
        data = bytearray(whole)
        for at in draw.integers(0, len(whole), 3):
            data[at] = draw.integers(0, 256)
        path.write_bytes(data)
        try:
            load_dataset(str(place))
        except DataError as error:
            said.append(str(error))
    assert len(said) > 10
    assert not [text for text in said if "\n" in text]


# IDX


def idx(path: Path, shape: tuple[int, ...], data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = bytes([0, 0, 8, len(shape)]) + b"".join(struct.pack(">i", side) for side in shape)
    path.write_bytes(gzip.compress(head + data))


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
    for prefix in ("train", "t10k"):
        idx(tmp_path / f"mine/{prefix}-images-idx3-ubyte.gz", (10, 4, 4), bytes(160))
        idx(tmp_path / f"mine/{prefix}-labels-idx1-ubyte.gz", (10,), bytes(10))
    assert load_dataset(str(tmp_path / "mine")).input_shape == (1, 4, 4)
    idx(tmp_path / "mine/train-images-idx3-ubyte.gz", shape, bytes(160))
    with at_most():
        refused(text, tmp_path / "mine")
    idx(tmp_path / "mine/train-images-idx3-ubyte.gz", (9, 4, 4), bytes(144))
    refused("9 images and 10 labels", tmp_path / "mine")


# Folders


def folder_of_images(place: Path) -> Path:
    for c in ("cat", "dog"):
        (place / c).mkdir(parents=True)
        for k in range(5):
            (place / c / f"{k}.png").write_bytes(encoded())
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
    place, other = folder_of_images(tmp_path / "mine"), folder_of_images(tmp_path / "other")
    (place / "cow").symlink_to(other / "dog")
    assert load_dataset(str(place)).classes == ("cat", "cow", "dog")


def test_a_folder_or_file_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder_of_images(tmp_path / "mine")
    real_scan, real_open = os.scandir, Path.open

    def scan(path: Any) -> Any:
        if Path(path).name == "dog":
            raise PermissionError(13, "Permission denied", str(path))
        return real_scan(path)

    def opened(path: Path, *how: Any, **more: Any) -> Any:
        if path.name == "3.png":
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *how, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scan)
        refused(r"mine/dog cannot be read \(Permission denied\); make it readable", place)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", opened)
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
        for k in range(50):
            (place / f"{k}.py").touch()
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
