"""Runs on data in Python: every kind can be trained on, and clients keep their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import fedstill
import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, DataError
from fedstill.running.journal import read_journal
from fedstill.running.runner import dataset_of

N = 90
LABELS = np.arange(N) % 3


class Photos(torch.utils.data.Dataset[Any]):
    """Pictures as torchvision's data sets give them."""

    classes = ("cat", "dog", "hen")

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        draw = np.random.default_rng(index)
        array = draw.integers(0, 255, (16, 16, 3)).astype("uint8")
        return Image.fromarray(array), int(LABELS[index])


def rows() -> pd.DataFrame:
    """Patients of two hospitals, a row each."""
    draw = np.random.default_rng(0)
    ages = draw.normal(LABELS, 0.5)
    wards = draw.choice(["A", "B"], N)
    hospitals = ["north", "south"] * (N // 2)
    return pd.DataFrame({"age": ages, "ward": wards, "hospital": hospitals, "outcome": LABELS})


def texts() -> datasets.Dataset:
    """A sentence about the weather of each day, which is its class."""
    weather = ("sun", "rain", "snow")
    sentences = [f"{weather[label]} on day {day}" for day, label in enumerate(LABELS)]
    return datasets.Dataset.from_dict({"text": sentences, "label": LABELS.tolist()})


def vectors() -> TensorDataset:
    """Random vectors of four numbers."""
    values = torch.rand(N, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(values, torch.from_numpy(LABELS))


TABLE = {"columns": ["age", "ward"], "categorical": ["ward"], "label_column": "outcome"}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "torch": (vectors(), {}),
    "loader": (DataLoader(vectors(), batch_size=8, shuffle=True), {}),
    "pictures": (Photos(), {}),
    "frame": (rows(), TABLE),
    "texts": (texts(), {"length": 4}),
    "splits": (texts().train_test_split(0.5, seed=0), {"length": 4}),
    "arrays": ((vectors().tensors[0].numpy(), LABELS), {}),
}


def experiment(data: dict[str, Any], **fields: Any) -> fedstill.Experiment:
    """A run of one round with this table ``[data]``."""
    return fedstill.Experiment(rounds=1, measure=(), plan={"epochs": 1}, data=data, **fields)


def start(result: fedstill.Result) -> dict[str, Any]:
    """The first event of the journal of a run."""
    return read_journal(result.directory / "journal.jsonl")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_trained_on_with_the_keys_of_the_config(kind: str, tmp_path: Path) -> None:
    data, keys = KINDS[kind]
    few = {"topology": {"clients": 3}}
    result = fedstill.run(experiment(keys, **few), tmp_path / "run", data=data)

    assert result.summary["dataset"] == "data"

    dataset = fedstill.from_python("data", data, **keys)
    same = fedstill.run(experiment(keys, **few), tmp_path / "same", data=dataset)
    assert same.summary["model_sha256"] == result.summary["model_sha256"]
    assert len(dataset.classes) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapping_of_each_kind_is_a_run_of_its_clients(kind: str, tmp_path: Path) -> None:
    data, keys = KINDS[kind]
    if kind == "splits":
        data = dict(data)
    clients = {"Šibenik": data, "Aachen": data}
    result = fedstill.run(experiment(keys, seed=1), tmp_path / "run", data=clients)

    assert start(result)["client_names"] == ["Šibenik", "Aachen"]
    assert len(result.summary["own_test_by_client"]) == 2


def test_a_run_on_a_frame_has_the_clients_of_its_column_and_resumes(tmp_path: Path) -> None:
    by_column = {
        "partition": {"kind": "column", "column": "hospital", "own_test": 0.2},
        "topology": {"clients": 2},
    }
    hospitals = experiment({**TABLE, "name": "hospitals"}, **by_column)
    uninterrupted = fedstill.run(hospitals, tmp_path / "whole", data=rows())

    assert start(uninterrupted)["client_names"] == ["north", "south"]
    assert uninterrupted.summary["dataset"] == "hospitals"

    def stop(*_: Any) -> None:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fedstill.run(hospitals, tmp_path / "stopped", data=rows(), on_round=stop)

    resumed = fedstill.resume(tmp_path / "stopped", data=rows())
    assert resumed.summary["model_sha256"] == uninterrupted.summary["model_sha256"]


def test_a_run_by_client_resumes_and_refuses_other_data(tmp_path: Path) -> None:
    def stop(*_: Any) -> None:
        raise RuntimeError("stopped")

    clients = {"north": rows()[::2], "south": rows()[1::2]}
    uninterrupted = fedstill.run(experiment(TABLE), tmp_path / "whole", data=clients)
    with pytest.raises(RuntimeError, match="stopped"):
        fedstill.run(experiment(TABLE), tmp_path / "stopped", data=clients, on_round=stop)

    with pytest.raises(ConfigError, match=r"fedstill\.resume\(.*, data=\.\.\.\)"):
        fedstill.resume(tmp_path / "stopped")
    other_clients = {"north": rows()[:30], "south": rows()[30:]}
    with pytest.raises(DataError):
        fedstill.resume(tmp_path / "stopped", data=other_clients)
    resumed = fedstill.resume(tmp_path / "stopped", data=clients)
    assert resumed.summary["model_sha256"] == uninterrupted.summary["model_sha256"]


@pytest.mark.uses("flower")
def test_a_run_in_a_federation_is_not_resumed_with_data(tmp_path: Path) -> None:
    settings = resolve(toys.toy("fedavg", engine="flower", flower={"federation": "fed"}))
    (tmp_path / "config.toml").write_text(settings.toml)
    with pytest.raises(ConfigError, match="data in memory"):
        fedstill.resume(tmp_path, toys.blobs())


def test_an_object_that_is_no_data_is_refused_before_there_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fedstill\.from_tensors\("):
        fedstill.run(experiment({}), tmp_path / "run", data=object())
    with pytest.raises(ConfigError, match="tokenizer"):
        fedstill.run(experiment({"tokenizer": "bytes"}), tmp_path / "run", data=vectors())
    assert not (tmp_path / "run").exists()


def test_a_column_of_owners_is_refused_for_data_by_client() -> None:
    clients = {"north": rows()[::2], "south": rows()[1::2]}
    column = {"partition": {"kind": "column", "column": "hospital"}}
    with pytest.raises(ConfigError) as caught:
        dataset_of(experiment(TABLE, **column), clients)
    assert "partition.column" in str(caught.value)
