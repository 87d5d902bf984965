"""One's own function that gives a data set: what it must be, and the line that says what is wrong
with it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedstill
from fedstill.config.experiment import load
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, DataError
from fedstill.data.sources import from_tensors, load_dataset
from fedstill.running.preparation import prepare

FILE = '''
import torch
import fedstill

def some(n):
    draw = torch.Generator().manual_seed(n)
    return torch.randn(n, 4, generator=draw), torch.arange(n) % 3

def data(folder=None):
    """Four numbers a row."""
    return fedstill.from_tensors(f"mine in {folder}", some(30), some(9), kind="table")

def pairs():
    return some(3), some(3)

def nothing():
    pass

def needs(seed, size=3):
    return data()

def raises():
    return some("three")

def refuses():
    raise fedstill.core.errors.DataError("the station sent nothing yet; ask again tomorrow")
'''


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with the file of functions above."""
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


def test_a_function_is_given_the_folder_if_it_takes_one(base: Path) -> None:
    data = load_dataset("mine.py:data", base=base, folder=base / "here")
    assert data.about.kind == "table"
    assert data.input_shape == (4,)
    assert len(data.train) == 30
    assert data.name == f"mine in {base / 'here'}"


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        ("pairs", ConfigError, "'mine.py:pairs' returned a tuple"),
        ("nothing", ConfigError, "'mine.py:nothing' returned None"),
        ("needs", ConfigError, "'mine.py:needs' has a parameter 'seed'"),
        (
            "raises",
            DataError,
            r"dataset 'mine.py:raises': RuntimeError: .* \(mine.py, line 6, in some\)",
        ),
        ("refuses", DataError, "^the station sent nothing yet; ask again tomorrow$"),
    ],
)
def test_a_broken_contract_is_one_line(
    function: str, kind: type[Exception], words: str, base: Path
) -> None:
    with pytest.raises(kind, match=words) as caught:
        load_dataset(f"mine.py:{function}", base=base)
    assert "\n" not in str(caught.value)
    if function == "raises":
        assert isinstance(caught.value.__cause__, RuntimeError), "--debug shows the traceback"


FILE_OF_OWNERS = """
import numpy as np
import fedstill

def rows(seed):
    return np.random.default_rng(seed).normal(size=(6, 4)), np.arange(6) % 2

def data():
    wards = [(rows(seed), rows(seed + 9)) for seed in range(3)]
    return fedstill.from_clients("wards", wards, kind="table")

def none():
    return fedstill.from_tensors("all", rows(0), rows(1), kind="table")
"""


def test_owners_of_a_function_are_clients_or_tasks_by_any_column_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE_OF_OWNERS)
    data = load_dataset("mine.py:data", base=tmp_path, owner="ward")
    assert data.train.owners is not None
    assert data.train.owners.bincount().tolist() == [6, 6, 6]
    with pytest.raises(DataError, match=r"'mine\.py:none' .*column 'ward'"):
        load_dataset("mine.py:none", base=tmp_path, owner="ward")


def test_a_file_without_a_name_says_which_are_there(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.py:some or"):
        load_dataset("mine.py", base=base)
    with pytest.raises(ConfigError, match=r"mine\.py: .*'date'.*'data'"):
        load_dataset("mine.py:date", base=base)


def test_what_a_data_set_is_fits_on_a_line(base: Path) -> None:
    data = load_dataset("mine.py:data", base=base)
    line = "<Dataset mine in None: 30 train, 9 test; rows of a table of (4,), 3 classes>"
    assert repr(data) == line
    assert repr(data.train) == "<Examples: 30 of shape (4,), torch.float32>"


def test_images_with_their_channels_last_are_refused() -> None:
    labels = np.arange(6) % 2
    images = np.zeros((6, 8, 8, 3), np.uint8)
    with pytest.raises(DataError, match=r"values\.transpose\(0, 3, 1, 2\)"):
        from_tensors("photos", (images, labels), (images, labels))
    pair = (images.transpose(0, 3, 1, 2), labels)
    assert from_tensors("photos", pair, pair).input_shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("labels", "remedy"),
    [
        (
            np.array([0.0, 1.0, 1.0]),
            r"labels are float64 of shape \(3,\), .*labels.astype\('int64'\)",
        ),
        (
            np.array(["a", "b", "b"]),
            r"names, ids = np.unique\(labels, return_inverse=True\), .* classes=names",
        ),
        (np.array([0, 1]), r"labels are int64 of shape \(2,\), not whole numbers of shape \(3,\);"),
    ],
)
def test_labels_of_another_type_are_refused_with_what_makes_class_ids(
    labels: np.ndarray, remedy: str
) -> None:
    with pytest.raises(DataError, match=remedy):
        from_tensors("mine", (np.zeros((3, 2)), labels), (np.zeros((3, 2)), labels))


def test_a_client_without_examples_is_named() -> None:
    pair = np.zeros((3, 2)), np.arange(3)
    empty_pair = np.zeros((0, 2)), np.zeros(0, dtype=int)
    with pytest.raises(DataError, match="mine, client 1"):
        fedstill.from_clients("mine", [pair, empty_pair], test=pair)
    with pytest.raises(DataError, match="mine, client 1 "):
        fedstill.from_clients("mine", [(pair, pair), (pair, empty_pair)])


def test_data_in_memory_that_are_no_data_set_are_refused(tmp_path: Path) -> None:
    three = np.zeros((3, 2)), np.arange(3), np.arange(3)
    with pytest.raises(ConfigError, match=r"tuple.*fedstill\.from_tensors\("):
        fedstill.run(fedstill.Experiment(rounds=1), tmp_path / "run", data=three)
    assert not (tmp_path / "run").exists()


def test_sounds_and_archives_of_other_numbers_are_led_to_a_function(tmp_path: Path) -> None:
    (tmp_path / "tones/high").mkdir(parents=True)
    (tmp_path / "tones/high/1.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match=r"1 \.wav.*'mine\.py:data'"):
        load_dataset("tones", base=tmp_path)
    arrays = {f"{split}_images": np.zeros((4, 8, 8)) for split in ("train", "test")}
    np.savez(tmp_path / "tones.npz", **arrays, train_labels=np.arange(4), test_labels=np.arange(4))
    with pytest.raises(DataError, match=r"train_images\.npy .*float64.*'mine\.py:data'"):
        load_dataset("tones.npz", base=tmp_path)


def test_a_run_may_resize_images_of_several_sizes(tmp_path: Path) -> None:
    for split, count in (("train", 6), ("test", 4)):
        for number in range(count):
            folder = tmp_path / "scans" / split / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            image = Image.new("L", (8 + number, 8), number)
            image.save(folder / f"{number}.png")
    config = tmp_path / "scans.toml"
    config.write_text('data = "scans"\ntopology = { clients = 2 }\npartition = "iid"\n')
    with pytest.raises(DataError, match=r"data\.size = 8"):
        prepare(resolve(load(config)))
    ready = prepare(resolve(load(config, ("data.size=8",))))
    assert ready.dataset.input_shape == (1, 8, 8)
