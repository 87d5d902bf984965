"""The programs of the page on the tutorials' data convert files in the form of UCI's archives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedstill
from docs.test_documents import blocks
from fedstill.config.resolve import resolve
from fedstill.running.preparation import read_data

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path / "data"))
    return tmp_path


def execute(title: str) -> None:
    (code,) = [text for _, name, text in blocks("tutorials/data.md") if name == title]
    exec(compile(code, title, "exec"), {})


def test_heart_disease(folder: Path) -> None:
    (folder / "heart_source").mkdir()
    for hospital in HOSPITALS:
        text = ""
        for i in range(12):
            cholesterol = "?" if i == 4 else "200"
            text += (
                f"{40 + i}.0,1,{1 + i % 4}.0,130,{cholesterol},0,{i % 3},150,0,1.5,?,?,?,{i % 5}\n"
            )
        (folder / "heart_source" / f"processed.{hospital}.data").write_text(text)
    execute("heart.py")

    categories = {"cp": [1, 2, 3, 4], "restecg": [0, 1, 2]}
    table = {"name": "heart", "categorical": categories, "missing": "drop"}
    data = read_data(resolve(fedstill.Experiment(data=table)))
    assert data.classes == ("disease", "healthy")
    assert data.input_shape == (15,)
    assert len(data.train) == 4 * 7  # one of eight misses a value
    assert len(data.test) == 4 * 4


def test_human_activity(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder / "UCI HAR Dataset"
    draw = np.random.default_rng(0)
    source.mkdir()
    for split, count in {"train": 12, "test": 6}.items():
        (source / split).mkdir()
        np.savetxt(source / split / f"X_{split}.txt", draw.normal(size=(count, 5)))
        np.savetxt(source / split / f"y_{split}.txt", np.arange(count) % 6 + 1, fmt="%d")
        np.savetxt(source / split / f"subject_{split}.txt", np.arange(count) % 3, fmt="%d")
    execute("har.py")

    (folder / "data" / "har").rename(folder / "data" / "made")  # the name has checksums
    data = fedstill.load_dataset("made", kind="vector", input="features")
    assert (len(data.train), len(data.test)) == (12, 6)
    assert data.input_shape == (5,)
    assert data.train.labels.tolist() == [*range(6), *range(6)]
