"""Public data: a share of the training set, another set, a folder without labels, noise; and what
does not fit.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, DataError
from fedstill.core.records import Examples
from fedstill.data.dataset import Dataset, examples_digest
from fedstill.data.sources import files, load_dataset
from fedstill.running import client_data
from fedstill.running.client_data import ExampleForm, public_copy
from fedstill.running.preparation import prepare
from fedstill.running.runner import run


def public(
    method: object = "hiper_fedkd", dataset: Dataset | None = None, **data: object
) -> Examples:
    """The public examples of a run, with keys of its table ``[data]``."""
    plan = {"epochs": 1, "batch": 20, "lr": 0.05}
    experiment = toys.toy(method, data=data, topology={"clients": 4}, plan=plan)
    examples = prepare(resolve(experiment), dataset or toys.blobs()).sites.public
    assert examples is not None
    return examples


def images(folder: Path, count: int = 12, side: int = toys.SIDE, mode: str = "L") -> Path:
    """The folder, with random images in it: 000.png, 001.png and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    shape = (side, side, *[3] * (mode == "RGB"))
    for number in range(count):
        pixels = draw.integers(0, 256, shape, dtype=np.uint8)
        Image.fromarray(pixels, mode).save(folder / f"{number:03}.png")
    return folder


def test_a_share_of_the_training_set_is_the_default() -> None:
    examples = public(public=30)
    assert len(examples) == 30
    assert examples.labels.min() >= 0


def test_hidden_labels_are_missing_everywhere() -> None:
    assert (public(public=30, public_labels=False).labels == -1).all()


def test_noise_is_standard_normal_after_normalisation_and_the_same_each_time() -> None:
    noise = public(public=2000, public_from="noise")
    assert noise.values.shape == (2000, 1, toys.SIDE, toys.SIDE)
    assert (noise.labels == -1).all()
    values = (noise.values.double() / 255 - 0.5) / 0.5
    assert values.std() == pytest.approx(0.7, abs=0.1), "standard normal, cut at black and white"
    assert values.mean() == pytest.approx(0, abs=0.02)
    assert torch.equal(noise.values, public(public=2000, public_from="noise").values)


def test_a_folder_of_ones_own_images(tmp_path: Path) -> None:
    folder = images(tmp_path / "mine")
    examples = public(public_from=str(folder))
    assert examples.values.shape == (12, 1, toys.SIDE, toys.SIDE)
    assert (examples.labels == -1).all()
    assert len(public(public_from=str(folder), public=5)) == 5


def test_hidden_files_are_no_public_images(tmp_path: Path) -> None:
    folder = images(tmp_path / "mine")
    (folder / "._000.png").write_bytes(b"a Mac writes such a file beside each image")
    assert len(public(public_from=str(folder))) == 12


def test_images_of_another_size_or_kind_are_resized_if_that_is_said(tmp_path: Path) -> None:
    folder = images(tmp_path / "large", side=9, mode="RGB")
    with pytest.raises(DataError, match=r"\(3, 9, 9\).*\(1, 4, 4\).*public_resize"):
        public(public_from=str(folder))
    assert public(public_from=str(folder), public_resize=True).values.shape == (12, 1, 4, 4)

    mixed = images(tmp_path / "mixed", count=3, side=9)
    small = images(tmp_path / "small", count=1)
    (small / "000.png").rename(mixed / "100.png")
    with pytest.raises(DataError, match=r"100\.png .*data\.public_resize = true"):
        public(public_from=str(mixed))
    assert len(public(public_from=str(mixed), public_resize=True)) == 4


def test_images_that_would_be_too_many_when_they_are_resized_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = images(tmp_path / "mine", count=40, side=1)
    monkeypatch.setattr(files, "memory_bytes", lambda: 3 * 41 * 4 * 4)
    monkeypatch.setattr(files, "EXAMPLE_BYTES", 0)
    monkeypatch.setattr("fedstill.data.sources.images.EXAMPLE_BYTES", 0)
    assert len(public(public_from=str(folder), public_resize=True)) == 40
    monkeypatch.setattr(files, "memory_bytes", lambda: 3 * 39 * 4 * 4)
    with pytest.raises(DataError, match=r"640 bytes of memory, .* 624 bytes"):
        public(public_from=str(folder), public_resize=True)


def test_images_are_resized_the_same_however_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.randint(0, 256, (12, 3, 9, 7), dtype=torch.uint8)
    all_at_once = client_data._resized(draw, (1, 4, 4))
    monkeypatch.setattr(client_data, "RESIZED_AT_ONCE", 5)
    assert torch.equal(client_data._resized(draw, (1, 4, 4)), all_at_once)


def test_pixels_that_are_floats_are_resized_without_rounding() -> None:
    pixels = torch.rand(2, 3, 4, 4)

    resized = client_data._resized(pixels, (1, 4, 4))

    torch.testing.assert_close(resized, pixels.mean(1, keepdim=True))


def test_public_pixels_have_the_type_of_the_runs_pixels(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from fedstill import from_tensors\n"
        "def floats():\n"
        f"    images = torch.rand(8, 1, {toys.SIDE}, {toys.SIDE})\n"
        "    labels = torch.arange(8) % 4\n"
        "    return from_tensors('floats', (images, labels), (images, labels))\n"
    )

    with pytest.raises(DataError, match=r"float32.*uint8"):
        public(public_from=f"{tmp_path}/mine.py:floats", public_resize=True, public_labels=False)


def test_a_folder_of_images_is_no_public_set_for_pixels_that_are_floats(tmp_path: Path) -> None:
    folder = images(tmp_path / "mine")
    blobs = toys.blobs()
    floats = replace(blobs.train, values=blobs.train.values.float() / 255)

    with pytest.raises(DataError, match=r"uint8.*float32"):
        public(dataset=replace(blobs, train=floats), public_from=str(folder))


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    folder = images(tmp_path / "mine")
    (folder / "004.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"004\.png"):
        public(public_from=str(folder))


def test_broken_public_images_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = images(tmp_path / "mine")
    (folder / "004.png").write_bytes(b"not a picture")
    assert len(public(public_from=str(folder), broken="skip")) == 11
    assert "004.png" in caplog.text


def test_public_images_have_the_mode_of_the_run(tmp_path: Path) -> None:
    folder = images(tmp_path / "mine", mode="RGB")
    examples = public(public_from=str(folder), mode="grey")
    assert examples.values.shape == (12, 1, toys.SIDE, toys.SIDE)

    by_class = tmp_path / "classes"
    images(by_class / "train" / "a", mode="RGB")
    images(by_class / "test" / "a", mode="RGB")
    examples = public(public_from=str(by_class), mode="grey", public_labels=False)
    assert examples.values.shape == (12, 1, toys.SIDE, toys.SIDE)


def test_another_data_set_must_have_the_classes_or_give_no_labels() -> None:
    with pytest.raises(DataError, match=r"shape \(1, 8, 8\), but the run's have \(1, 4, 4\)"):
        public(public_from="digits")
    with pytest.raises(DataError, match=r"10 classes.*data\.public_labels = false"):
        public(public_from="digits", public_resize=True)
    examples = public(public_from="digits", public_resize=True, public_labels=False, public=50)
    assert examples.values.shape == (50, 1, 4, 4)


def write_shades(folder: Path, shades: dict[str, int]) -> Path:
    """Images of one shade per class, in folders by class, with the same training and test split."""
    for name, shade in shades.items():
        for split in ("train", "test"):
            path = folder / split / name / "0.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (toys.SIDE, toys.SIDE), shade).save(path)
    return folder


def test_public_labels_are_mapped_by_class_name(tmp_path: Path) -> None:
    shades = {f"class {number}": number for number in range(5)}
    folder = write_shades(tmp_path / "shades", shades)
    dataset = toys.blobs()
    reverse = replace(dataset, classes=dataset.classes[::-1])
    examples = public(dataset=reverse, public_from=str(folder))
    reversed_shades = 4 - examples.values[:, 0, 0, 0].int()
    assert examples.labels.tolist() == reversed_shades.tolist()

    write_shades(tmp_path / "others", {"a class": 5, **shades})
    shutil.rmtree(tmp_path / "others/train/class 3")
    shutil.rmtree(tmp_path / "others/test/class 3")
    with pytest.raises(DataError, match=r"a class 'a class', which .*data\.public_labels = false"):
        public(public_from=str(tmp_path / "others"))


def test_all_examples_of_a_public_set_without_a_test_split_are_public(tmp_path: Path) -> None:
    for number in range(5):
        images(tmp_path / "mine" / f"class {number}", count=6)
    labels = np.repeat(np.arange(5), 6).tolist()
    for _ in range(2):  # the second time, from the cache
        examples = public(public_from=str(tmp_path / "mine"))
        assert examples.labels.tolist() == labels
    assert len(load_dataset(tmp_path / "mine").train) == 25


@pytest.mark.parametrize("source", ["train", "the same folder"])
def test_a_copy_of_a_public_set_at_a_site_has_the_digest_of_the_servers(
    source: str, tmp_path: Path
) -> None:
    for place in ("server", "site"):
        for number in range(5):
            images(tmp_path / place / f"class {number}", count=6)
    data = {"public_from": str(tmp_path / "server")}
    if source == "train":
        data = {"public": 30}
    settings = resolve(toys.toy("hiper_fedkd", data=data))
    dataset = toys.blobs()
    form = ExampleForm(dataset.input_shape, dataset.classes, about=dataset.about)
    copy = public_copy(settings, str(tmp_path / "site"), form)
    assert copy is not None
    assert len(copy) == 30
    assert examples_digest(copy) == examples_digest(public(public_from=str(tmp_path / "server")))


def test_public_labels_are_used_directly_if_classes_are_only_numbered(tmp_path: Path) -> None:
    folder = write_shades(tmp_path / "shades", {str(number): number for number in range(5)})
    examples = public(public_from=str(folder))
    assert examples.labels.tolist() == examples.values[:, 0, 0, 0].tolist()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"public_from": "noise"}, "needs data.public"),
        (
            {
                "public_from": "digits",
                "public_resize": True,
                "public_labels": False,
                "public": 9999,
            },
            "more than the 1",
        ),
        ({"public": 300}, "leaves nothing"),
        ({"public_from": "nowhere"}, "^data.public_from: unknown dataset 'nowhere'"),
        ({"public_from": "/"}, "/ is the root of a file system, not a data set; "),
    ],
)
def test_too_many_or_none_are_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        public(**data)


def test_fedmd_refuses_to_pretrain_without_labels_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="'pretrain' of method fedmd"):
        public("fedmd", public=30, public_from="noise")


@pytest.mark.parametrize("source", ["noise", "folder"])
def test_a_run_learns_from_images_that_have_no_labels(source: str, tmp_path: Path) -> None:
    data = {"public": 30, "public_from": "noise"}
    if source == "folder":
        data["public_from"] = str(images(tmp_path / "mine", count=30))
    experiment = toys.toy("hiper_fedkd", data=data, topology={"clients": 4}, rounds=1)
    assert run(experiment, tmp_path / "run", data=toys.blobs()).accuracy is not None
