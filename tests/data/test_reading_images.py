"""How encoded images are read: upright, one page, 8 of 16 bits, one mode, and without the broken
ones where the user says so.
"""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageFile, ImageOps, TiffImagePlugin

import fedstill
from fedstill.cli import call
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, DataError
from fedstill.data.dataset import FILE, Dataset, ReadRequest, examples_digest
from fedstill.data.sources import images as image_decoding
from fedstill.data.sources import load_dataset
from fedstill.data.sources.image_sets import read_image_folder, read_unlabelled
from fedstill.data.sources.images import Pictures, decode_images
from fedstill.data.sources.load import read_hub

ORIENTATION = 0x0112
WITH_EXIF = ("PNG", "JPEG", "WEBP", "TIFF", "AVIF")


pytestmark = pytest.mark.usefixtures("place")


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def rotated(kind: str, orientation: int) -> bytes:
    """A 16 × 10 picture with a bright corner, stored with an EXIF orientation."""
    pixels = np.zeros((10, 16, 3), np.uint8)
    pixels[:5, :4] = 250
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(pixels, kind, exif=exif)


def folder(place: Path, images: Sequence[bytes], suffix: str = "png") -> str:
    """A folder with as many images in each of two classes."""
    for name in ("cat", "dog"):
        (place / name).mkdir(parents=True)
        for number, data in enumerate(images):
            (place / name / f"{number:02}.{suffix}").write_bytes(data)
    return str(place)


def table(place: Path, images: Sequence[bytes | None], **columns: list[Any]) -> str:
    """A folder with a parquet file of images and labels."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    cells = pa.array(map(cell, images), kind)
    columns.setdefault("label", [number % 2 for number in range(len(images))])
    place.mkdir(parents=True)
    pq.write_table(pa.table({"image": cells, **columns}), place / "train-0.parquet")
    return str(place)


def cell(image: bytes | None) -> dict[str, bytes | None] | None:
    """The cell of an image column, or of a missing image."""
    if image is None:
        return None
    return {"bytes": image, "path": None}


def every_example(data: Dataset) -> np.ndarray:
    """The images of both splits."""
    return np.concatenate([data.train.values.numpy(), data.test.values.numpy()])


def decoded(data: bytes) -> np.ndarray:
    """A single image as it is read."""
    return decode_images(Pictures("x"), [(cell(data), 0)]).images[0]


def message(name: str, **fields: Any) -> str:
    """The line that refuses a data set, with a remedy."""
    with pytest.raises(DataError) as caught:
        load_dataset(name, **fields)
    text = str(caught.value)
    assert "\n" not in text
    assert "; " in text, "it says what to do"
    return text


# EXIF orientation.


@pytest.mark.parametrize("kind", WITH_EXIF)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_orientation_says(kind: str, orientation: int) -> None:
    data = rotated(kind, orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    shape = (3, 10, 16)
    if orientation >= 5:
        shape = (3, 16, 10)

    pixels = decoded(data)

    assert pixels.shape == shape
    assert np.array_equal(pixels, np.asarray(upright).transpose(2, 0, 1))


LANDSCAPE = np.zeros((10, 16, 3), np.uint8)


def test_an_orientation_in_xmp_counts() -> None:
    packet = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="6"/></x:xmpmeta>'
    assert decoded(encoded(LANDSCAPE, "JPEG", xmp=packet)).shape == (3, 16, 10)


@pytest.mark.parametrize("exif", [b"Exif\0\0nonsense", b"Exif\0\0II*\0\xff\xff\xff\xff", b"MM"])
def test_an_image_with_damaged_exif_stays_as_it_is(exif: bytes) -> None:
    assert decoded(encoded(LANDSCAPE, "JPEG", exif=exif)).shape == (3, 10, 16)


def test_images_in_folders_and_in_tables_are_turned(place: Path) -> None:
    images = [rotated("JPEG", 6), rotated("JPEG", 8)] * 5
    for name in (folder(place / "files", images, "jpg"), table(place / "rows", images)):
        assert load_dataset(name).input_shape == (3, 16, 10)


def test_the_sizes_in_a_message_are_those_after_turning(place: Path) -> None:
    name = folder(place / "mine", [rotated("PNG", 1), rotated("PNG", 6)] * 5)
    assert "01.png is 10×16 RGB, but the first is 16×10 RGB; set data.size = 10" in message(name)
    assert load_dataset(name, size=12).input_shape == (3, 12, 12)


def test_a_png_is_not_decoded_for_its_exif_before_its_size_is_checked(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("an image was decoded"))
    monkeypatch.setattr("fedstill.data.sources.images.MAX_PIXELS", 159)
    assert "16 × 10 pixels" in message(folder(place / "mine", [rotated("PNG", 6)]))


# Pages and frames.


def pages(kind: str, count: int) -> bytes:
    """A file with several pages or frames, which differ in their shade of red."""
    reds = range(0, 40 * count, 40)
    first, *further_pages = [Image.new("RGB", (8, 8), (red, 0, 0)) for red in reds]
    return encoded(first, kind, save_all=True, append_images=further_pages)


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "PNG", "WEBP", "AVIF"])
def test_an_image_of_several_pages_is_refused_even_where_broken_ones_are_skipped(
    kind: str, place: Path
) -> None:
    suffix = {"TIFF": "tif"}.get(kind, kind.lower())
    name = folder(place / "mine", [pages(kind, 5)] * 3, suffix)
    for broken in ("refuse", "skip"):
        assert f"00.{suffix} has several pages or frames" in message(name, broken=broken)
    single = folder(place / "single", [pages(kind, 1)] * 5, suffix)
    assert load_dataset(single).input_shape == (3, 8, 8)
    rows = table(place / "rows", [pages(kind, 2)])
    assert "example 0 has several pages or frames" in message(rows)


def test_the_pages_of_a_long_tiff_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise AssertionError("pages were counted")

    monkeypatch.setattr(TiffImagePlugin.TiffImageFile, "n_frames", property(fail))
    with pytest.raises(DataError, match="several pages"):
        decoded(pages("TIFF", 3))


def test_an_image_of_several_frames_from_python_is_refused() -> None:
    class Frames(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 5

        def __getitem__(self, _: int) -> tuple[Image.Image, int]:
            return Image.open(io.BytesIO(pages("GIF", 2))), 0

    with pytest.raises(DataError, match="example 0 has several pages"):
        fedstill.from_python("mine", Frames())


def test_of_an_mpo_file_as_phones_write_it_the_photo_is_read(place: Path) -> None:
    image = pages("MPO", 2)
    assert Image.open(io.BytesIO(image)).format == "MPO"
    data = load_dataset(folder(place / "mine", [image] * 5, "jpg"))
    assert every_example(data).max() < 20, "the second picture is red"
    assert data.about.warnings == ()


# Images with 16 bits a pixel.


@pytest.mark.parametrize(
    ("kind", "suffix", "options"),
    [
        ("PNG", "png", {}),
        ("TIFF", "tif", {}),
        ("TIFF", "tif", {"compression": "tiff_lzw"}),
        ("PPM", "pgm", {}),
    ],
)
def test_of_16_bit_grey_images_the_upper_8_bits_are_read(
    kind: str, suffix: str, options: dict[str, Any], place: Path
) -> None:
    values = np.arange(160, dtype=np.uint16).reshape(10, 16) * 411
    image = encoded(values, kind, **options)
    data = load_dataset(folder(place / "mine", [image] * 5, suffix))
    assert data.about.warnings == ()
    assert np.array_equal(data.train.values[0, 0].numpy(), values >> 8)


def short_tag(tag: int, value: int) -> bytes:
    """An entry of a big-endian TIFF directory with one number of 16 bits."""
    return struct.pack(">HHIHxx", tag, 3, 1, value)


def long_tag(tag: int, value: int) -> bytes:
    """An entry of a big-endian TIFF directory with one number of 32 bits."""
    return struct.pack(">HHII", tag, 4, 1, value)


def big_endian_tiff(values: np.ndarray) -> bytes:
    """A TIFF file of 16-bit grey pixels, the most significant byte first."""
    height, width = values.shape
    pixels = values.astype(">u2").tobytes()
    entries = [
        short_tag(256, width),
        short_tag(257, height),
        short_tag(258, 16),  # bits per sample
        short_tag(259, 1),  # no compression
        short_tag(262, 1),  # black is zero
        long_tag(273, 8),  # where the pixels begin
        short_tag(277, 1),  # samples per pixel
        short_tag(278, height),  # rows per strip
        long_tag(279, len(pixels)),
    ]
    header = b"MM\0*" + struct.pack(">I", 8 + len(pixels))
    directory = struct.pack(">H", len(entries)) + b"".join(entries)
    return header + pixels + directory + bytes(4)


def test_16_bits_in_the_other_order_of_bytes_and_turned() -> None:
    values = np.arange(160, dtype=np.uint16).reshape(10, 16) * 411
    data = big_endian_tiff(values)
    assert Image.open(io.BytesIO(data)).mode == "I;16B"
    assert np.array_equal(decoded(data)[0], values >> 8)

    exif = Image.Exif()
    exif[ORIENTATION] = 6
    turned = decoded(encoded(values, "PNG", exif=exif))
    assert np.array_equal(turned[0], np.rot90(values >> 8, -1))


def test_a_warning_says_that_12_bits_stored_in_16_are_nearly_black(place: Path) -> None:
    dark = encoded(np.full((8, 8), 4095, np.uint16))
    (warning,) = load_dataset(folder(place / "dark", [dark] * 5)).about.warnings
    assert "4,095" in warning

    bright = encoded(np.full((8, 8), 4096, np.uint16))
    of_8_bits = encoded(np.zeros((8, 8), np.uint8))
    for name in (folder(place / "mixed", [dark, bright] * 5), folder(place / "8", [of_8_bits] * 5)):
        assert load_dataset(name).about.warnings == ()


def test_pixels_that_do_not_fit_into_16_bits_are_refused(place: Path) -> None:
    for name, value in (("low", -1), ("high", 65536)):
        image = encoded(np.full((8, 8), value, np.int32), "TIFF")
        data = folder(place / name, [image], "tif")
        assert f"{value:,}" in message(data, broken="skip")


def test_an_image_of_floats_is_refused(place: Path) -> None:
    image = encoded(np.zeros((8, 8), np.float32), "TIFF")
    assert "mode F" in message(folder(place / "mine", [image], "tif"), broken="skip")


# One mode.


def test_grey_images_among_colour_ones_are_converted_on_request(place: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    grey = Image.fromarray(colours).convert("L")
    images = [encoded(grey), encoded(colours), encoded(grey.convert("LA")), encoded(grey, "TIFF")]
    for name in (folder(place / "files", images), table(place / "rows", images * 3)):
        assert "data.mode" in message(name)

        rgb = load_dataset(name, mode="rgb")
        assert rgb.input_shape == (3, 8, 8)
        channels = [image.reshape(3, -1) for image in every_example(rgb)]
        different_channels = {len(np.unique(image, axis=0)) for image in channels}
        assert different_channels == {1, 3}, "grey images have three equal channels"

        greys = load_dataset(name, mode="grey")
        assert greys.input_shape == (1, 8, 8)
        assert (every_example(greys) == np.asarray(grey)).all()


def test_the_mode_holds_for_16_bits_too(place: Path) -> None:
    image = encoded(np.full((8, 8), 51 << 8, np.uint16))
    data = load_dataset(folder(place / "mine", [image] * 5), mode="rgb")
    assert data.input_shape == (3, 8, 8)
    assert (every_example(data) == 51).all()


def test_splits_of_different_modes_are_converted_on_request(place: Path) -> None:
    folder(place / "mine/train", [encoded(np.zeros((8, 8), np.uint8))])
    folder(place / "mine/test", [encoded(np.zeros((8, 8, 3), np.uint8))])
    assert "data.mode" in message("mine")
    assert load_dataset("mine", mode="grey").input_shape == (1, 8, 8)


def test_a_mode_is_refused_where_there_are_no_encoded_images(place: Path) -> None:
    images = np.zeros((10, 8, 8), np.uint8)
    labels = np.arange(10) % 2
    np.savez("mine.npz", train_images=images, train_labels=labels)
    Path("mine.csv").write_text("a,label\n" + "1,0\n2,1\n" * 10, encoding="utf-8")
    for name in ("mine.npz", "mine.csv"):
        assert "data.mode" in message(name, mode="rgb")
    for fields in ({"mode": "RGBA"}, {"broken": "drop"}):
        with pytest.raises(ConfigError, match=next(iter(fields))):
            load_dataset("mine.csv", **fields)


# Broken images.


GOOD = encoded(np.full((8, 8), 200, np.uint8))
BAD = b"not a picture"


def numbered(count: int) -> list[bytes]:
    """Images whose pixels are their numbers."""
    return [encoded(np.full((8, 8), number, np.uint8)) for number in range(count)]


def test_broken_images_of_all_splits_are_listed_at_once(place: Path) -> None:
    folder(place / "mine/train", [GOOD, BAD, GOOD, BAD, GOOD[:45]])
    folder(place / "mine/test", [GOOD, BAD, b""])
    text = message("mine")
    assert "10 images are broken: " in text
    assert "train/cat/01.png, train/cat/03.png, train/cat/04.png" in text
    assert "test/dog/02.png" in text
    assert "data.broken = 'skip'" in text
    (place / "mine/test/dog/03.png").write_bytes(BAD)
    assert "test/dog/02.png and 1 more" in message("mine")


def test_images_that_are_all_broken_have_names_within_their_folder(place: Path) -> None:
    folder(place / "mine", [BAD, BAD])
    assert "4 images are broken: cat/00.png, cat/01.png, dog/00.png" in message(str(place / "mine"))


def test_a_single_broken_image_is_named_by_its_path(place: Path) -> None:
    folder(place / "mine", [GOOD, GOOD])
    (place / "mine/dog/01.png").write_bytes(BAD)
    text = message("mine")
    assert text.startswith(str(Path("mine/dog/01.png")) + " ") or "mine/dog/01.png cannot" in text
    assert "data.broken = 'skip'" in text


def test_skipped_images_leave_labels_and_owners_in_step(place: Path) -> None:
    images = numbered(40)
    labels = [number // 10 for number in range(40)]
    owners = [f"site {number % 2}" for number in range(40)]
    broken: list[bytes | None] = list(images)
    for number in (0, 11, 25):
        broken[number] = BAD
    broken[32] = None
    name = table(place / "rows", broken, label=labels, owner=owners)
    assert "4 images are broken: train: example 0, train: example 11" in message(
        name, owner="owner"
    )

    data = load_dataset(name, broken="skip", owner="owner")
    for split in (data.train, data.test):
        numbers = split.values[:, 0, 0, 0].numpy()
        assert np.array_equal(split.labels.numpy(), numbers // 10)
        assert split.owners is not None
        assert np.array_equal(split.owners.numpy(), numbers % 2)
    good = [number for number in range(40) if number not in (0, 11, 25, 32)]
    assert sorted(every_example(data)[:, 0, 0, 0].tolist()) == good
    (warning,) = [text for text in data.about.warnings if "broken" in text]
    assert "4 broken images of 40" in warning

    columns = {"label": labels, "owner": owners}
    good_columns = {name: [column[row] for row in good] for name, column in columns.items()}
    without = table(place / "without", [images[row] for row in good], **good_columns)
    same = load_dataset(without, owner="owner")
    assert examples_digest(data.train) == examples_digest(same.train)
    assert examples_digest(data.test) == examples_digest(same.test)


def test_an_image_without_an_owner_has_its_row_in_the_file(place: Path) -> None:
    images: list[bytes | None] = [BAD, None, *numbered(8)]
    owners = [None if row in (0, 7) else "site" for row in range(10)]
    name = table(place / "rows", images, label=[0, 1] * 5, owner=owners)
    assert "example 7 has no owner" in message(name, broken="skip", owner="owner")


def test_the_default_network_for_a_column_of_images_takes_images(place: Path) -> None:
    columns = {"image": numbered(4), "age": [1, 2, 3, 4], "label": [0, 1, 0, 1]}
    pq.write_table(pa.table(columns), place / "patients.parquet")
    data = {"name": str(place / "patients.parquet")}
    assert resolve(fedstill.Experiment(data=data)).named.model.name == "mlp"
    images = {**data, "image_column": "image"}
    assert resolve(fedstill.Experiment(data=images)).named.model.name == "cnn"


def test_skipped_images_in_folders_leave_clients_in_step(place: Path) -> None:
    images = numbered(10)
    folder(place / "mine/north", images)
    folder(place / "mine/south", [BAD, *images[1:]])
    data = load_dataset("mine", broken="skip", owner=FILE)
    assert data.about.owners == ("north", "south")
    owners = np.concatenate([data.train.owners.numpy(), data.test.owners.numpy()])
    assert np.bincount(owners).tolist() == [20, 18]
    assert "south/cat/00.png" in data.about.warnings[0]


def test_each_parquet_file_of_images_is_a_client(place: Path) -> None:
    table(place / "mine/north", numbered(10))
    table(place / "mine/south", [BAD, *numbered(20)[11:]])
    data = load_dataset("mine", broken="skip", owner=FILE)
    assert data.about.owners == ("north/0", "south/0")
    for split in (data.train, data.test):
        assert split.owners is not None
        assert np.array_equal(split.owners, split.values[:, 0, 0, 0] >= 10)


class Stream:
    """A split of a data set as the hub streams it."""

    def __init__(self, images: Sequence[bytes]) -> None:
        import datasets

        self.features = datasets.Features(
            {"image": datasets.Image(), "label": datasets.Value("int64")}
        )
        self._images = images

    def select_columns(self, _: Sequence[str]) -> Stream:
        return self

    def cast_column(self, *_: object) -> Stream:
        return self

    def iter(self, batch_size: int) -> Any:
        for start in range(0, len(self._images), batch_size):
            part = self._images[start : start + batch_size]
            labels = [(start + number) % 2 for number in range(len(part))]
            yield {"image": list(map(cell, part)), "label": labels}


def test_images_of_the_hub_are_turned_and_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    images = [rotated("JPEG", 6), BAD, *[rotated("JPEG", 6)] * 30]
    monkeypatch.setattr("fedstill.data.sources.load._check_hub_has", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": Stream(images)})
    with pytest.raises(DataError, match="example 1 cannot be decoded"):
        read_hub("owner/name", ReadRequest(), "check the name")
    data = read_hub("owner/name", ReadRequest(broken="skip"), "check the name")
    train = data.splits["train"]
    assert train.values.shape == (31, 3, 16, 10)
    assert train.labels.tolist() == [0] + [0, 1] * 15, "without the label of example 1"
    assert "1 broken image of 32" in data.about.warnings[0]


def test_a_file_of_the_hub_that_cannot_be_fetched_breaks_no_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fsspec

    monkeypatch.setattr("fedstill.data.sources.images._on_hub", lambda *_: True)
    rows = [({"bytes": None, "path": "memory://mine/a.png"}, 0)]
    hub = Pictures("x", ReadRequest(broken="skip"), within="owner/name")
    with pytest.raises(DataError, match="example 0 cannot be read"):
        decode_images(hub, rows)
    with fsspec.open("memory://mine/a.png", "wb") as file:
        file.write(GOOD)
    assert decode_images(hub, rows).images.shape == (1, 1, 8, 8)


def test_an_image_without_any_good_one_beside_it_is_refused(place: Path) -> None:
    folder(place / "mine", [BAD])
    assert "2 images are broken" in message("mine", broken="skip")


def test_what_must_not_be_read_is_refused_and_not_skipped(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "secret.png").write_bytes(GOOD)
    cells = [{"bytes": GOOD, "path": None}, {"bytes": None, "path": "../secret.png"}]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    (place / "rows").mkdir()
    pq.write_table(pa.table({"image": pa.array(cells, kind), "label": [0, 1]}), "rows/a.parquet")
    assert "refers to the file '../secret.png'" in message("rows", broken="skip")

    large = encoded(np.zeros((64, 64), np.uint8))
    name = folder(place / "large", [GOOD, large])
    monkeypatch.setattr("fedstill.data.sources.images.MAX_PIXELS", 64 * 64 - 1)
    assert "64 × 64 pixels" in message(name, broken="skip", size=8)
    monkeypatch.setattr("fedstill.data.sources.images.IMAGE_BYTES", len(GOOD) - 1)
    assert "above the limit of" in message(name, broken="skip", size=8)


def test_a_disk_that_fails_breaks_no_image(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = folder(place / "mine", [GOOD, GOOD])

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Image, "open", fail)
    assert "Input/output error" in message(name, broken="skip")


def test_the_journal_and_explain_count_skipped_images(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder(place / "mine", [*numbered(20), BAD])
    Path("run.toml").write_text(
        'rounds = 1\nmeasure = []\nmodel = "logistic"\n[data]\nname = "mine"\nbroken = "skip"\n'
        'mode = "grey"\n[topology]\nclients = 2\n[plan]\nepochs = 1\nbatch = 8\nlr = 0.05\n',
        encoding="utf-8",
    )
    assert call(["explain", "run.toml", "--no-split"]) == 0
    assert "2 broken images of 42" in " ".join(capsys.readouterr().out.split())
    fedstill.run(fedstill.load("run.toml"), out="out")
    journal = Path("out/journal.jsonl").read_text(encoding="utf-8")
    start = json.loads(journal.splitlines()[0])
    assert any("2 broken images of 42" in note for note in start["notes"])
    config = Path("out/config.toml").read_text(encoding="utf-8")
    assert 'broken = "skip"' in config
    assert 'mode = "grey"' in config


def test_images_without_a_label_are_left_out_on_request(place: Path) -> None:
    labels: list[int | None] = [0, 1] * 10
    labels[3] = None
    name = table(place / "rows", numbered(20), label=labels)
    assert "example 3" in message(name)
    data = load_dataset(name, unlabelled="drop")
    assert 3 not in every_example(data)[:, 0, 0, 0]
    assert any("1 of 20 images" in note for note in data.about.notes)


# Tables beside images.


@pytest.mark.parametrize("table_name", ["labels.csv", "train.tsv", "images/all.jsonl"])
@pytest.mark.parametrize("inner", ["images", "."])
def test_a_table_that_holds_the_labels_of_images_is_named(
    table_name: str, inner: str, place: Path
) -> None:
    (place / "mine/images").mkdir(parents=True)
    for number, data in enumerate(numbered(5)):
        (place / "mine" / inner / f"{number}.png").write_bytes(data)
    (place / "mine" / table_name).write_text("file,label\n0.png,cat\n", encoding="utf-8")
    text = message("mine")
    assert Path(table_name).name in text
    assert "not read" in text
    assert "class" in text


def test_a_table_beside_images_in_folders_by_class_is_a_warning(place: Path) -> None:
    folder(place / "mine", numbered(5))
    Path("mine/sizes.csv").write_text("file,size\n", encoding="utf-8")
    data = load_dataset("mine")
    assert data.classes == ("cat", "dog")
    assert any("sizes.csv" in warning for warning in data.about.warnings)


def test_a_parquet_file_that_holds_the_labels_of_images_is_named(place: Path) -> None:
    (place / "mine/images").mkdir(parents=True)
    for number, data in enumerate(numbered(6)):
        (place / f"mine/images/{number}.png").write_bytes(data)
    names = [f"images/{number}.png" for number in range(6)]
    labels = pa.table({"file": names, "label": [0, 1] * 3})
    pq.write_table(labels, "mine/labels.parquet")
    assert "labels.parquet cannot be used" in message("mine")
    assert load_dataset("mine", image_column="file").input_shape == (1, 8, 8)

    Path("numbers").mkdir()
    numbers = pa.table({"a": np.arange(40.0), "label": [0, 1] * 20})
    pq.write_table(numbers, "numbers/train.parquet")
    Path("numbers/plot.png").write_bytes(GOOD)
    data = load_dataset("numbers")
    assert data.about.kind == "table"
    assert any("1 image files" in warning for warning in data.about.warnings)


def test_words_of_splits_in_the_names_of_images_mean_nothing(place: Path) -> None:
    for name in ("cat", "dog"):
        (place / "mine" / name).mkdir(parents=True)
        for number, data in enumerate(numbered(10)):
            (place / "mine" / name / f"test_{number}.png").write_bytes(data)
            (place / "mine" / name / f"train-{number}.png").write_bytes(data)
    data = load_dataset("mine")
    assert (len(data.train), len(data.test), data.validation) == (32, 8, None)
    assert data.about.warnings == ()


@pytest.mark.parametrize(
    ("names", "unused"),
    [
        (["cat/1.png", "dog/1.png"], None),
        (["train/cat/1.png", "test/cat/1.png"], None),
        (["test/1.png", "cat/1.png"], None),
        (["cat/eva/1.png", "dog/ida/1.png"], "'cat'"),
        (["train/cat/eva/1.png", "test/dog/ida/1.png"], "'dog'"),
        (["cat/1.png", "cat/sub/1.png", "dog/1.png"], "'cat'"),
    ],
)
def test_a_folder_above_the_class_is_reported(
    names: list[str], unused: str | None, place: Path
) -> None:
    for name, image in zip(names, numbered(len(names)), strict=True):
        path = place / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    files = sorted((place / "mine").rglob("*.png"))
    data = read_image_folder(place / "mine", files, ReadRequest())
    about_folders = [warning for warning in data.about.warnings if "not used" in warning]
    if unused is None:
        assert about_folders == []
    else:
        (warning,) = about_folders
        assert unused in warning


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_images_have_the_same_order_in_both_unicode_forms(form: str, place: Path) -> None:
    # In composed form the second name comes last, in decomposed form first.
    names = [unicodedata.normalize(form, name) for name in ("f", "é")]
    for label in ("cat", "dog"):
        (place / "mine" / label).mkdir(parents=True)
        for image, name in zip(numbered(2), names, strict=True):
            (place / "mine" / label / f"{name}.png").write_bytes(image)
    files = sorted((place / "mine").rglob("*.png"))
    values = read_image_folder(place / "mine", files, ReadRequest()).splits["train"].values
    assert values[:, 0, 0, 0].tolist() == [0, 1, 0, 1]


def test_broken_public_images_are_listed_or_skipped(place: Path) -> None:
    folder(place / "mine", [BAD, GOOD, BAD])
    with pytest.raises(DataError, match=r"2 images are broken: 00\.png, 02\.png"):
        read_unlabelled(place / "mine/cat")
    read = read_unlabelled(place / "mine/cat", ReadRequest(broken="skip"))
    assert len(read.images) == 1
    assert "00.png, 02.png" in read.warnings[0]


# Threads.


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_neither_arrays_nor_errors_depend_on_the_threads(
    threads: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (200, 1, 9, 9), dtype=np.uint8)
    images = [encoded(image[0]) for image in pixels]
    monkeypatch.setattr(image_decoding, "THREADS", threads)
    monkeypatch.setattr(image_decoding, "THREAD_PIXELS", 0)  # threads decode small images, too
    monkeypatch.setattr(image_decoding, "TASKS_AHEAD", 2 * threads)
    monkeypatch.setattr(image_decoding, "TASK_ROWS", 7)
    for count in (0, 200):
        rows = [({"bytes": image, "path": None}, number) for number, image in enumerate(images)]
        read = decode_images(Pictures("x", rows=count), rows)
        assert np.array_equal(read.images, pixels)
        assert read.labels == list(range(200))

    images[150] = encoded(np.zeros((9, 9, 3), np.uint8))
    images[151] = encoded(np.zeros((7, 9), np.uint8))
    assert "example 150 is 9×9 RGB" in message(table(place / "kinds", images))
    labels: list[int | None] = [0, 1] * 100
    labels[149] = None
    assert "example 149" in message(table(place / "labels", images, label=labels))


def test_many_images_are_read_in_little_more_memory_than_they_take(place: Path) -> None:
    image = encoded(np.zeros((256, 256, 3), np.uint8))
    folder(place / "mine/train", [image] * 100)
    folder(place / "mine/test", [image] * 2)
    files = sorted(Path("mine").rglob("*.png"))
    tracemalloc.start()
    try:
        data = read_image_folder(Path("mine"), files, ReadRequest())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = sum(split.values.nbytes for split in data.splits.values())
    assert peak < 1.3 * size
