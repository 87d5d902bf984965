"""The measure ``boundaries``: what it writes agrees with the model that it looked at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.files import digest
from fedstill.measures.features import STEPS, principal_plane
from fedstill.models.predictors import predictor
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from fedstill.running.split_file import read_label_counts
from run_bits import assert_same_bits, bits, stopped


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose features are two numbers: there the plane is all there is."""
    folder = tmp_path_factory.mktemp("boundaries") / "run"
    run(asking("local", "boundaries"), folder, data=toys.blobs())
    return folder


def asking(*measure: str) -> Experiment:
    plan = {"epochs": 4, "batch": 20, "lr": 0.1}
    return toys.toy(
        "qkt",
        measure=measure,
        model={"name": "mlp", "hidden": (8, 2)},
        plan=plan,
        **toys.suited("qkt"),
    )


def test_it_leaves_no_trace_and_resumes_to_the_same_bits(looked: Path, tmp_path: Path) -> None:
    run(asking("local"), tmp_path / "run", data=toys.blobs())
    assert bits(tmp_path / "run")["model.safetensors"] == bits(looked)["model.safetensors"]
    other = stopped(asking("local", "boundaries"), tmp_path / "stopped", 2)
    resume(other, data=toys.blobs())
    assert_same_bits(bits(other), bits(looked))


def test_it_looks_at_the_first_client_that_asked_after_each_of_its_stages(looked: Path) -> None:
    events = read_journal(looked / "journal.jsonl")
    found = [e for e in events if e.get("measure") == "boundaries"]
    assert [e["name"] for e in found] == ["fit", "transfer", "refine"]
    start, asked = events[0], events[0]["queries"]
    client = min(int(c) for c in asked)
    for event in found:
        assert (event["client"], event["query"]) == (client, asked[str(client)])
        own = [
            c
            for c, n in enumerate(read_label_counts(looked, start)[client])
            if n and c not in event["query"]
        ]
        assert event["own"] == own
        assert set(event["labels"]) == {*own, *event["query"]}
        same = next(
            e
            for e in events
            if e.get("client") == client and e["event"] == "client" and e["name"] == event["name"]
        )
        right = [n / t for n, t in zip(same["correct_by_class"], start["test_counts"], strict=True)]
        assert event["accuracy"] == pytest.approx(right)


def test_the_plane_says_what_the_model_says_of_the_images_on_it(looked: Path) -> None:
    event = [e for e in read_journal(looked / "journal.jsonl") if e.get("measure") == "boundaries"][
        -1
    ]
    prepared = prepare(resolve(asking()), toys.blobs())
    config = digest((looked / "config.toml").read_bytes())
    restored = Checkpoints(looked / "checkpoints", config, looked / "memory").latest()
    assert restored is not None
    params = restored.state.extra.many("student")[event["client"]]
    test = prepared.sites.common_test
    assert test is not None
    shown = torch.isin(test.labels, torch.tensor([*event["query"], *event["own"]]))
    x = prepared.sites.inputs.plain(test.values[shown])
    said = predictor(prepared.world.model(event["client"]), params)(x).argmax(1).tolist()
    plane = np.array(event["plane"])
    at = [
        np.clip(
            np.round((np.array(event[k]) - low) / (high - low) * (STEPS - 1)).astype(int),
            0,
            STEPS - 1,
        )
        for k, (low, high) in (("x", event["x_range"]), ("y", event["y_range"]))
    ]
    agree = plane[at[1], at[0]] == np.array(said)
    assert agree.mean() > 0.9, "but for images within half a step of a line"
    assert len(set(plane.flatten().tolist())) > 1


def test_without_queries_it_is_refused_by_name() -> None:
    with pytest.raises(IncompatibleMethod, match=r"boundaries.*query"):
        prepare(resolve(toys.toy("fedavg", measure=("boundaries",))), toys.blobs())


def test_a_plane_has_two_sides_where_features_lie_on_a_line() -> None:
    line = torch.stack([torch.linspace(0, 1, 30), torch.zeros(30)], dim=1)
    plane = principal_plane(line)
    places, ends, points = plane.places, plane.ends, plane.points
    assert (ends[:, 1] - ends[:, 0] > 0.01).all()
    assert len(points.unique(dim=0)) == STEPS**2
    assert places[:, 1].abs().max() < 1e-9
