"""The measure ``chain``: its numbers are those of the models that clients passed on, also after a
resume.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.method import ClientWork
from fedstill.core.records import Examples, Stage, Tensors, TrainingResult, TrainingStart, View
from fedstill.engines import serial
from fedstill.engines.clients import TrainingSetup
from fedstill.measures.local import _accuracy as measure_accuracy
from fedstill.models.predictors import predictor
from fedstill.report.knowledge import read_hops
from fedstill.running.journal import without_times
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import resume, run
from fedstill.running.runs import groups
from journals import journal_events
from run_bits import stopped

CHAIN = {"kind": "sequential", "clients": 6, "sampled": 3}


def toy(method: object = "fedseq", **changes: object) -> Experiment:
    """Chains of three clients, in two rounds."""
    values: dict[str, object] = {
        "rounds": 2,
        "measure": ("chain",),
        "measure_every": 1,
        "topology": CHAIN,
        "plan": {"epochs": 1, "batch": 10, "lr": 0.1},
    }
    return toys.toy(method, **{**values, **changes})


def looks(folder: Path) -> list[dict[str, Any]]:
    """The events of the measure."""
    return journal_events(folder, event="measure")


def accuracy(ready: Prepared, params: Tensors, examples: Examples) -> float:
    """The accuracy of a model, in a pass of its own."""
    predict = predictor(ready.world.model(0), params)
    predicted = predict(ready.sites.inputs.plain(examples.values)).argmax(1)
    return float((predicted == examples.labels).double().mean())


@dataclass(frozen=True)
class Hop:
    """A client's training: the model that it received, and the one that it passed on."""

    client: int
    start: Tensors
    end: Tensors


def test_its_numbers_are_those_of_plain_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``handed_over`` and ``kept`` are the accuracies of both models on the data of the client
    before; nobody trained before the first client.
    """
    hops: list[Hop] = []
    train = serial.train

    def recorded(
        work: ClientWork, start: TrainingStart, view: View, setup: TrainingSetup
    ) -> TrainingResult:
        result = train(work, start, view, setup)
        hops.append(Hop(view.client, dict(start.params), dict(result.params)))
        return result

    monkeypatch.setattr(serial, "train", recorded)
    run(toy(), tmp_path / "run", data=toys.blobs())

    ready = prepare(resolve(toy()), toys.blobs())
    test = toys.blobs().test
    events = looks(tmp_path / "run")
    assert [event["client"] for event in events] == [hop.client for hop in hops]
    assert len(events) == 6
    assert "previous" not in events[0]
    for event, hop in zip(events, hops, strict=True):
        for label, class_accuracy in enumerate(event["class_accuracy"]):
            of_class = test.take((test.labels == label).nonzero().flatten())
            assert class_accuracy == pytest.approx(accuracy(ready, hop.end, of_class))
    for event, previous, hop in zip(events[1:], hops, hops[1:], strict=False):
        data = ready.sites.train.take(ready.sites.positions(previous.client))
        assert event["previous"] == previous.client
        assert event["handed_over"] == pytest.approx(accuracy(ready, hop.start, data))
        assert event["kept"] == pytest.approx(accuracy(ready, hop.end, data))


def test_it_is_the_same_after_a_resume_at_any_hop(tmp_path: Path) -> None:
    run(toy("sfedkd"), tmp_path / "uninterrupted", data=toys.blobs())
    expected = without_times(journal_events(tmp_path / "uninterrupted"))

    for stages in (1, 3, 4, 5):
        folder = stopped(toy("sfedkd"), tmp_path / str(stages), stages)
        resume(folder, data=toys.blobs())
        assert without_times(journal_events(folder)) == expected


def chained(round_index: int, position: int, client: int) -> Stage:
    """The stage of one client in a chain."""
    return Stage(round_index, position, "train", (client,), sequential=True)


def test_over_tasks_it_uses_the_previous_clients_data_of_the_earlier_task(tmp_path: Path) -> None:
    """In round 2 all are in another task, of whose data the last client of round 1 has seen
    none. Its model knows the classes of its own task.
    """
    experiment = toy(stream={"kind": "classes", "tasks": 2}, topology={**CHAIN, "sampled": 2})
    run(experiment, tmp_path / "run", data=toys.blobs())

    events = looks(tmp_path / "run")
    assert [event["round"] for event in events] == [1, 1, 2, 2]
    last_of_task_1 = events[1]
    first_of_task_2 = events[2]
    client = last_of_task_1["client"]
    sites = prepare(resolve(experiment), toys.blobs()).sites
    earlier_data = sites.view(client, chained(1, 1, client)).data
    later_data = sites.view(client, chained(2, 0, client)).data
    assert not set(earlier_data.labels.tolist()) & set(later_data.labels.tolist())
    assert first_of_task_2["previous"] == client
    assert first_of_task_2["handed_over"] > 0.5
    correct = first_of_task_2["handed_over"] * len(earlier_data)
    assert correct == pytest.approx(round(correct)), "a number of examples"


def test_a_client_without_data_in_the_new_task_is_measured_on_those_of_its_last_task(
    tmp_path: Path,
) -> None:
    """The last client has examples of class 0 only, and so none in the second task. Its model
    predicts the one class that it trained on last.
    """

    def first_class_last(labels: np.ndarray, clients: int) -> list[np.ndarray]:
        of_class_0 = np.flatnonzero(labels == 0)
        of_other_classes = np.flatnonzero(labels)
        return [*np.array_split(of_other_classes, clients - 1), of_class_0]

    stream = {
        "kind": "classes",
        "tasks": 2,
        "order": [[0, 1], [2, 3, 4]],
        "compose": "clients_first",
    }
    topology = {"kind": "sequential", "clients": 3, "order": "fixed"}
    experiment = toy(partition=first_class_last, topology=topology, stream=stream)

    run(experiment, tmp_path / "run", data=toys.blobs())

    first_of_task_2 = looks(tmp_path / "run")[3]
    assert first_of_task_2["round"] == 2
    assert first_of_task_2["client"] == 0
    assert first_of_task_2["previous"] == 2
    assert first_of_task_2["handed_over"] == 1.0


def test_without_examples_there_is_no_accuracy() -> None:
    ready = prepare(resolve(toy()), toys.blobs())
    context = ready.evaluation_context(None, None)
    assert context is not None
    no_examples = context.test.take(torch.arange(0))

    assert measure_accuracy(ready.world.initial(0), no_examples, context) is None


def test_the_page_leaves_out_a_hop_without_accuracy(tmp_path: Path) -> None:
    """The checkpoints have a digest of the journal, and are removed with its change."""
    run(toy(rounds=1), tmp_path / "run", data=toys.blobs())
    events = journal_events(tmp_path / "run")
    for event in events:
        if event.get("stage") == 1 and "kept" in event:
            event.update(kept=None, handed_over=None)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    lines = [f"{json.dumps(event)}\n" for event in events]
    (tmp_path / "run" / "journal.jsonl").write_text("".join(lines))

    (group,) = groups([tmp_path / "run"])
    (hops,) = read_hops(group)

    assert list(hops.accuracy) == [1, 2, 3]
    assert list(hops.kept) == [3]


def test_after_a_failed_link_the_previous_client_is_the_last_that_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = serial.train

    def failing(
        work: ClientWork, start: TrainingStart, view: View, setup: TrainingSetup
    ) -> TrainingResult:
        if setup.stage.index == 1:
            raise RuntimeError("gone")
        return train(work, start, view, setup)

    monkeypatch.setattr(serial, "train", failing)
    run(toy(rounds=1, clients=toys.TOLERANT), tmp_path / "run", data=toys.blobs())

    first, third = looks(tmp_path / "run")
    assert first["stage"] == 0
    assert third["stage"] == 2
    assert third["previous"] == first["client"]


def test_in_a_parallel_topology_it_is_refused() -> None:
    experiment = toy("fedavg", topology={"kind": "parallel", "clients": 6})

    with pytest.raises(IncompatibleMethod, match=r"measure chain: .*topology\.kind = 'sequential'"):
        prepare(resolve(experiment), toys.blobs())


def test_the_journal_names_the_teachers_of_a_client(tmp_path: Path) -> None:
    """They are clients of the round before, the same for all clients of a round."""
    run(toy({"name": "sfedkd", "k": 2}, measure=()), tmp_path / "run", data=toys.blobs())

    first_round = journal_events(tmp_path / "run", event="client", round=1)
    second_round = journal_events(tmp_path / "run", event="client", round=2)
    assert not any("teachers" in event for event in first_round)
    assert len(second_round) == 3
    teachers = second_round[0]["teachers"]
    assert len(teachers) == 2
    assert set(teachers) <= {str(event["client"]) for event in first_round}
    assert all(event["teachers"] == teachers for event in second_round)
