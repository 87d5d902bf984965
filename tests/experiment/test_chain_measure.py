"""The measure ``chain``: its numbers are those of the models that went from client to client, after a resume too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import toys
from fedstill.engines import serial
from fedstill.errors import IncompatibleMethod
from fedstill.experiment.config.experiment import Experiment
from fedstill.experiment.config.settle import settle
from fedstill.experiment.preparing.prepared import prepare
from fedstill.experiment.run_directory.journal import read_journal, without_times
from fedstill.experiment.running.runner import resume, run
from fedstill.models import contract
from run_bits import stopped

CHAIN = {"kind": "sequential", "clients": 6, "sampled": 3}


def toy(method: object = "fedseq", **changes: object) -> Experiment:
    plan = {"epochs": 1, "batch": 10, "lr": 0.1}
    values = {"rounds": 2, "measure": ("chain",), "measure_every": 1, "topology": CHAIN, "plan": plan}
    return toys.toy(method, **{**values, **changes})


def looked(folder: Path) -> list[dict]:  # type: ignore[type-arg]
    return [e for e in read_journal(folder / "journal.jsonl") if e["event"] == "measure"]


def share(ready, params: dict[str, Tensor], images: Tensor, labels: Tensor) -> float:  # type: ignore[no-untyped-def]
    x = ready.sites.inputs.plain(images)
    return float((contract.predictor(ready.world.model(0), params)(x).argmax(1) == labels).double().mean())


def test_its_numbers_are_those_of_plain_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, hops = serial.train, []

    def kept(work, carry, plan, stage, view, *rest):  # type: ignore[no-untyped-def]
        done = train(work, carry, plan, stage, view, *rest)
        hops.append((view.client, dict(carry.params), dict(done.params)))
        return done

    monkeypatch.setattr(serial, "train", kept)
    run(toy(), tmp_path / "run", data=toys.blobs())
    ready, test = prepare(settle(toy()), toys.blobs()), toys.blobs().test
    events = looked(tmp_path / "run")
    assert [e["client"] for e in events] == [c for c, _, _ in hops]
    assert len(events) == 6
    for i, (event, (_, start, end)) in enumerate(zip(events, hops, strict=True)):
        by_class = [share(ready, end, test.values[test.labels == c], test.labels[test.labels == c]) for c in range(5)]
        assert event["class_accuracy"] == pytest.approx(by_class)
        if i == 0:
            assert "previous" not in event, "nobody trained before the first client"
            continue
        previous = hops[i - 1][0]
        part = ready.sites.parts[previous]
        images, labels = ready.sites.train.values[part], ready.sites.train.labels[part]
        assert event["previous"] == previous
        assert event["handed_over"] == pytest.approx(share(ready, start, images, labels))
        assert event["kept"] == pytest.approx(share(ready, end, images, labels))


def test_it_is_the_same_after_a_resume_at_any_hop(tmp_path: Path) -> None:
    run(toy("sfedkd"), tmp_path / "whole", data=toys.blobs())
    for stages in (1, 3, 4, 5):
        parts = stopped(toy("sfedkd"), tmp_path / str(stages), stages)
        resume(parts, data=toys.blobs())
        ours, theirs = (without_times(read_journal(f / "journal.jsonl")) for f in (parts, tmp_path / "whole"))
        assert ours == theirs


def test_after_a_failed_link_the_previous_client_is_the_last_that_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = serial.train

    def failing(work, carry, plan, stage, *rest):  # type: ignore[no-untyped-def]
        if stage.index == 1:
            raise RuntimeError("gone")
        return train(work, carry, plan, stage, *rest)

    monkeypatch.setattr(serial, "train", failing)
    run(toy(rounds=1, clients=toys.TOLERANT), tmp_path / "run", data=toys.blobs())
    first, second = looked(tmp_path / "run")
    assert (first["stage"], second["stage"]) == (0, 2)
    assert second["previous"] == first["client"]


def test_side_by_side_it_is_refused() -> None:
    with pytest.raises(IncompatibleMethod, match=r"measure chain: .*topology\.kind = 'sequential'"):
        prepare(settle(toy("fedavg", topology={"kind": "parallel", "clients": 6})), toys.blobs())


def test_the_journal_says_who_taught_whom(tmp_path: Path) -> None:
    run(toy({"name": "sfedkd", "k": 2}, measure=()), tmp_path / "run", data=toys.blobs())
    events = [e for e in read_journal(tmp_path / "run" / "journal.jsonl") if e["event"] == "client" and e["round"] > 0]
    before = {str(e["client"]) for e in events if e["round"] == 1}
    assert all("teachers" not in e for e in events if e["round"] == 1)
    taught = [e["teachers"] for e in events if e["round"] == 2]
    assert all(len(t) == 2 and set(t) <= before for t in taught)
    assert len({tuple(t) for t in taught}) == 1, "the same for all clients of a round"
    assert torch.tensor(len(taught)) == 3
