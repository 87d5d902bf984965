"""The measure ``boundaries``: its numbers agree with the model that it looked at."""

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
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from fedstill.running.split_file import read_label_counts
from journals import journal_events
from run_bits import assert_same_bits, bits, model_bytes, stopped


def experiment(*measures: str) -> Experiment:
    """QKT with two features, so that the plane has all of them."""
    return toys.toy(
        "qkt",
        measure=measures,
        model={"name": "mlp", "hidden": (8, 2)},
        plan={"epochs": 4, "batch": 20, "lr": 0.1},
        **toys.suited("qkt"),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with the measure."""
    folder = tmp_path_factory.mktemp("boundaries") / "run"
    run(experiment("local", "boundaries"), folder, data=toys.blobs())
    return folder


def test_it_does_not_change_the_model_and_resumes_to_the_same_bits(
    finished: Path, tmp_path: Path
) -> None:
    run(experiment("local"), tmp_path / "unmeasured", data=toys.blobs())
    resumed = stopped(experiment("local", "boundaries"), tmp_path / "stopped", 2)
    resume(resumed, data=toys.blobs())

    assert model_bytes(tmp_path / "unmeasured") == model_bytes(finished)
    assert_same_bits(bits(resumed), bits(finished))


def test_it_looks_at_the_first_client_with_a_query_after_each_of_its_stages(
    finished: Path,
) -> None:
    (start,) = journal_events(finished, event="start")
    client = min(int(number) for number in start["queries"])
    query = start["queries"][str(client)]
    counts = read_label_counts(finished, start)[client]
    client_labels = [label for label, count in enumerate(counts) if count and label not in query]

    looks = journal_events(finished, measure="boundaries")

    assert [event["name"] for event in looks] == ["fit", "transfer", "refine"]
    for event in looks:
        assert event["client"] == client
        assert event["query"] == query
        assert event["own"] == client_labels
        assert set(event["labels"]) == {*client_labels, *query}
        stage_event = journal_events(finished, event="client", client=client, name=event["name"])[0]
        correct = np.array(stage_event["correct_by_class"])
        assert event["accuracy"] == pytest.approx((correct / start["test_counts"]).tolist())


def cells(positions: list[float], ends: tuple[float, float]) -> np.ndarray:
    """The index of the cell of the plane for each position on an axis."""
    low, high = ends
    shares = (np.array(positions) - low) / (high - low)
    return np.clip(np.round(shares * (STEPS - 1)).astype(int), 0, STEPS - 1)


def test_the_plane_has_the_models_classes_at_the_places_of_images(finished: Path) -> None:
    """But for images within half a step of a boundary."""
    event = journal_events(finished, measure="boundaries")[-1]
    client = event["client"]
    prepared = prepare(resolve(experiment()), toys.blobs())
    config = digest((finished / "config.toml").read_bytes())
    checkpoints = Checkpoints(finished / "checkpoints", config, finished / "memory")
    restored = checkpoints.latest()
    assert restored is not None
    params = restored.state.extra.many("student")[client]
    test = prepared.sites.common_test
    assert test is not None
    is_shown = torch.isin(test.labels, torch.tensor([*event["query"], *event["own"]]))
    inputs = prepared.sites.inputs.plain(test.values[is_shown])

    predicted = predictor(prepared.world.model(client), params)(inputs).argmax(1).numpy()

    plane = np.array(event["plane"])
    columns = cells(event["x"], event["x_range"])
    rows = cells(event["y"], event["y_range"])
    assert (plane[rows, columns] == predicted).mean() > 0.9
    assert len(np.unique(plane)) > 1


def test_without_queries_it_is_refused_by_name() -> None:
    with pytest.raises(IncompatibleMethod, match=r"boundaries.*query"):
        prepare(resolve(toys.toy("fedavg", measure=("boundaries",))), toys.blobs())


def test_a_plane_has_two_dimensions_even_if_features_are_on_a_line() -> None:
    line = torch.stack([torch.linspace(0, 1, 30), torch.zeros(30)], dim=1)

    plane = principal_plane(line)

    widths = plane.ends[:, 1] - plane.ends[:, 0]
    assert (widths > 0.01).all()
    assert len(plane.points.unique(dim=0)) == STEPS**2
    assert plane.places[:, 1].abs().max() < 1e-9
