"""The measure ``chain``: its numbers are those of the models that went from client to client, after
a resume too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.records import Stage
from fedstill.engines import serial
from fedstill.measures.local import _accuracy as share_of
from fedstill.models.predictors import predictor
from fedstill.report.knowledge import read_hops
from fedstill.running.journal import read_journal, without_times
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from fedstill.running.runs import groups
from run_bits import stopped

CHAIN = {"kind": "sequential", "clients": 6, "sampled": 3}


def toy(method: object = "fedseq", **changes: object) -> Experiment:
    plan = {"epochs": 1, "batch": 10, "lr": 0.1}
    values = {
        "rounds": 2,
        "measure": ("chain",),
        "measure_every": 1,
        "topology": CHAIN,
        "plan": plan,
    }
    return toys.toy(method, **{**values, **changes})


def looked(folder: Path) -> list[dict]:  # type: ignore[type-arg]
    return [e for e in read_journal(folder / "journal.jsonl") if e["event"] == "measure"]


def share(ready, params: dict[str, Tensor], images: Tensor, labels: Tensor) -> float:  # type: ignore[no-untyped-def]
    x = ready.sites.inputs.plain(images)
    return float((predictor(ready.world.model(0), params)(x).argmax(1) == labels).double().mean())


def test_its_numbers_are_those_of_plain_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, hops = serial.train, []

    def kept(work, start, view, setup):  # type: ignore[no-untyped-def]
        done = train(work, start, view, setup)
        hops.append((view.client, dict(start.params), dict(done.params)))
        return done

    monkeypatch.setattr(serial, "train", kept)
    run(toy(), tmp_path / "run", data=toys.blobs())
    ready, test = prepare(resolve(toy()), toys.blobs()), toys.blobs().test
    events = looked(tmp_path / "run")
    assert [e["client"] for e in events] == [c for c, _, _ in hops]
    assert len(events) == 6
    for i, (event, (_, start, end)) in enumerate(zip(events, hops, strict=True)):
        by_class = [
            share(ready, end, test.values[test.labels == c], test.labels[test.labels == c])
            for c in range(5)
        ]
        assert event["class_accuracy"] == pytest.approx(by_class)
        if i == 0:
            assert "previous" not in event, "nobody trained before the first client"
            continue
        previous = hops[i - 1][0]
        part = ready.sites.positions(previous)
        images, labels = ready.sites.train.values[part], ready.sites.train.labels[part]
        assert event["previous"] == previous
        assert event["handed_over"] == pytest.approx(share(ready, start, images, labels))
        assert event["kept"] == pytest.approx(share(ready, end, images, labels))


def test_it_is_the_same_after_a_resume_at_any_hop(tmp_path: Path) -> None:
    run(toy("sfedkd"), tmp_path / "whole", data=toys.blobs())
    for stages in (1, 3, 4, 5):
        parts = stopped(toy("sfedkd"), tmp_path / str(stages), stages)
        resume(parts, data=toys.blobs())
        ours, theirs = (
            without_times(read_journal(f / "journal.jsonl")) for f in (parts, tmp_path / "whole")
        )
        assert ours == theirs


def test_over_tasks_it_looks_at_what_the_previous_client_had_in_its_own_task(
    tmp_path: Path,
) -> None:
    """In round 2 all are in another task, of whose data the last client of round 1 has seen
    none.
    """
    what = toy(stream={"kind": "classes", "tasks": 2}, topology={**CHAIN, "sampled": 2})
    run(what, tmp_path / "run", data=toys.blobs())
    ready, events = prepare(resolve(what), toys.blobs()), looked(tmp_path / "run")
    assert [e["round"] for e in events] == [1, 1, 2, 2]
    before, crossed = events[1], events[2]
    assert crossed["previous"] == before["client"]
    own = ready.sites.view(
        before["client"], Stage(1, 1, "train", (before["client"],), sequential=True)
    ).data
    later = ready.sites.view(
        before["client"], Stage(2, 0, "train", (before["client"],), sequential=True)
    ).data
    assert not set(own.labels.tolist()) & set(later.labels.tolist())
    assert crossed["handed_over"] > 0.5, "the model that it left knows the classes that it has seen"
    assert crossed["handed_over"] * len(own) == pytest.approx(
        round(crossed["handed_over"] * len(own))
    )


def test_a_client_that_is_not_there_any_more_is_looked_at_in_the_round_in_which_it_was(
    tmp_path: Path,
) -> None:
    """The last client has examples of class 0 alone, and so none in the second task."""

    def first_class_last(labels: np.ndarray, clients: int) -> list[np.ndarray]:
        return [*np.array_split(np.flatnonzero(labels), clients - 1), np.flatnonzero(labels == 0)]

    what = toy(
        partition=first_class_last,
        topology={"kind": "sequential", "clients": 3, "order": "fixed"},
        stream={
            "kind": "classes",
            "tasks": 2,
            "order": [[0, 1], [2, 3, 4]],
            "compose": "clients_first",
        },
    )
    run(what, tmp_path / "run", data=toys.blobs())
    crossed = looked(tmp_path / "run")[3]
    assert (crossed["round"], crossed["client"], crossed["previous"]) == (2, 0, 2)
    assert crossed["handed_over"] == 1.0, (
        "its model answers with the one class that it trained on last"
    )


def test_of_no_examples_nothing_is_known(tmp_path: Path) -> None:
    ready = prepare(resolve(toy()), toys.blobs())
    context = ready.evaluation_context(None, None)
    assert context is not None
    none = context.test.take(torch.arange(0))
    assert share_of(ready.world.initial(0), none, context) is None
    run(toy(rounds=1), tmp_path / "run", data=toys.blobs())
    path = tmp_path / "run" / "journal.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    emptied = [
        {**e, "kept": None, "handed_over": None} if e.get("stage") == 1 and "kept" in e else e
        for e in lines
    ]
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # they know what the journal was
    path.write_text("".join(f"{json.dumps(e)}\n" for e in emptied))
    (group,) = groups([tmp_path / "run"])
    (hops,) = read_hops(group)
    assert (list(hops.accuracy), list(hops.kept)) == ([1, 2, 3], [3]), "the page leaves it out"


def test_after_a_failed_link_the_previous_client_is_the_last_that_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = serial.train

    def failing(work, start, view, setup):  # type: ignore[no-untyped-def]
        if setup.stage.index == 1:
            raise RuntimeError("gone")
        return train(work, start, view, setup)

    monkeypatch.setattr(serial, "train", failing)
    run(toy(rounds=1, clients=toys.TOLERANT), tmp_path / "run", data=toys.blobs())
    first, second = looked(tmp_path / "run")
    assert (first["stage"], second["stage"]) == (0, 2)
    assert second["previous"] == first["client"]


def test_side_by_side_it_is_refused() -> None:
    with pytest.raises(IncompatibleMethod, match=r"measure chain: .*topology\.kind = 'sequential'"):
        prepare(resolve(toy("fedavg", topology={"kind": "parallel", "clients": 6})), toys.blobs())


def test_the_journal_says_who_taught_whom(tmp_path: Path) -> None:
    run(toy({"name": "sfedkd", "k": 2}, measure=()), tmp_path / "run", data=toys.blobs())
    events = [
        e
        for e in read_journal(tmp_path / "run" / "journal.jsonl")
        if e["event"] == "client" and e["round"] > 0
    ]
    before = {str(e["client"]) for e in events if e["round"] == 1}
    assert all("teachers" not in e for e in events if e["round"] == 1)
    taught = [e["teachers"] for e in events if e["round"] == 2]
    assert all(len(t) == 2 and set(t) <= before for t in taught)
    assert len({tuple(t) for t in taught}) == 1, "the same for all clients of a round"
    assert torch.tensor(len(taught)) == 3
