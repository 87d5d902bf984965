"""One's own function that gives a data set: what it must be, and the line that says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstill.data.sources import load_dataset
from fedstill.errors import ConfigError, DataError

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
    raise fedstill.errors.DataError("the station sent nothing yet; ask again tomorrow")
'''


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


def test_a_function_is_given_the_folder_if_it_takes_one(base: Path) -> None:
    data = load_dataset("mine.py:data", base=base, folder=base / "here")
    assert (data.about.kind, data.input_shape, len(data.train)) == ("table", (4,), 30)
    assert data.name == f"mine in {base / 'here'}"


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        ("pairs", ConfigError, "dataset 'mine.py:pairs' gave a tuple; it must return a Dataset, as fedstill.from_ten"),
        ("nothing", ConfigError, "dataset 'mine.py:nothing' gave None; it must return a Dataset"),
        ("needs", ConfigError, "dataset 'mine.py:needs' has a parameter 'seed' without a default; it is given the par"),
        ("raises", DataError, r"dataset 'mine.py:raises': RuntimeError: .* \(mine.py, line 6, in some\)"),
        ("refuses", DataError, "^the station sent nothing yet; ask again tomorrow$"),
    ],
)
def test_a_broken_contract_is_one_line(function: str, kind: type[Exception], words: str, base: Path) -> None:
    with pytest.raises(kind, match=words) as caught:
        load_dataset(f"mine.py:{function}", base=base)
    assert "\n" not in str(caught.value)
    if function == "raises":
        assert isinstance(caught.value.__cause__, RuntimeError), "--debug shows the traceback"
