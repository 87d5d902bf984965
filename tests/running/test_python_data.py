"""Runs on data that Python has: each kind is trained on, and clients keep their names."""

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
    draw = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "age": draw.normal(LABELS, 0.5),
            "ward": draw.choice(["A", "B"], N),
            "hospital": np.array(["north", "south"])[np.arange(N) % 2],
            "outcome": LABELS,
        }
    )


def texts() -> datasets.Dataset:
    sentences = [f"{('sun', 'rain', 'snow')[k]} on day {i}" for i, k in enumerate(LABELS)]
    return datasets.Dataset.from_dict({"text": sentences, "label": LABELS.tolist()})


def vectors() -> TensorDataset:
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
    return fedstill.Experiment(rounds=1, measure=(), plan={"epochs": 1}, data=data, **fields)


def start(result: fedstill.Result) -> dict[str, Any]:
    return read_journal(result.directory / "journal.jsonl")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_trained_on_with_the_keys_of_the_config(kind: str, tmp_path: Path) -> None:
    data, keys = KINDS[kind]
    few = {"topology": {"clients": 3}}
    result = fedstill.run(experiment(keys, **few), tmp_path / "run", data=data)
    assert result.summary["dataset"] == "data"
    made = fedstill.from_python("data", data, **keys)
    same = fedstill.run(experiment(keys, **few), tmp_path / "same", data=made)
    assert same.summary["model_sha256"] == result.summary["model_sha256"]
    assert len(made.classes) == 3


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
    asked = experiment({**TABLE, "name": "hospitals"}, **by_column)
    whole = fedstill.run(asked, tmp_path / "whole", data=rows())
    assert start(whole)["client_names"] == ["north", "south"]
    assert whole.summary["dataset"] == "hospitals"

    def stop(*_: Any) -> None:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fedstill.run(asked, tmp_path / "stopped", data=rows(), on_round=stop)
    resumed = fedstill.resume(tmp_path / "stopped", data=rows())
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]


def test_a_run_by_client_resumes_and_refuses_other_data(tmp_path: Path) -> None:
    def stop(*_: Any) -> None:
        raise RuntimeError("stopped")

    clients = {"north": rows()[::2], "south": rows()[1::2]}
    whole = fedstill.run(experiment(TABLE), tmp_path / "whole", data=clients)
    with pytest.raises(RuntimeError, match="stopped"):
        fedstill.run(experiment(TABLE), tmp_path / "stopped", data=clients, on_round=stop)
    with pytest.raises(DataError):
        fedstill.resume(tmp_path / "stopped", data={"north": rows()[:30], "south": rows()[30:]})
    resumed = fedstill.resume(tmp_path / "stopped", data=clients)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]


def test_what_is_no_data_is_refused_before_there_is_a_directory(tmp_path: Path) -> None:
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
