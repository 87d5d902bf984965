"""Every method over two tasks, with late clients: it refuses nothing, and outputs that take no part
in a task's training are not pushed by its objective, nor make it large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from all_methods import METHODS, built, four_clients_of, needs
from torch import Tensor

import toys
from fedstill.config.resolve import resolve
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError
from fedstill.engines.clients import Batch
from fedstill.engines.loop import Training
from fedstill.running.journal import read_journal
from fedstill.running.runner import run

ORDER = [[0, 1, 4], [2, 3]]

TRAINS_EARLIER_OUTPUTS = {"fedlwf", "replay", "glfc_local"}
"""On purpose, whatever the outputs of the task are."""

DRAWS_ALL_WEIGHTS = {"ditto", "fedcurv", "feddc", "feddyn", "fedewc", "scaffold"}
"""Methods that draw all weights towards others, whatever outputs say."""

LARGE = 100.0


@dataclass
class FirstSteps:
    """What the first step of each client on its data was, where some outputs take no part."""

    terms: list[float] = field(default_factory=list)
    """The values of the objective's terms."""
    pushed: list[str] = field(default_factory=list)
    """Entries in which such an output got a gradient."""

    def watching(self, step: Callable[[Any, Batch], None]) -> Callable[[Any, Batch], None]:
        """A step that records the first one of each training."""
        seen_trainings: list[Training] = []

        def watched_step(training: Training, batch: Batch) -> None:
            takes_part = training.clients.start.head
            is_seen = any(training is seen_training for seen_training in seen_trainings)
            if takes_part is None or is_seen:
                step(training, batch)
                return

            seen_trainings.append(training)
            self._record_terms(training)
            step(training, batch)
            self._record_pushed(training, ~takes_part)

        return watched_step

    def _record_terms(self, training: Training) -> None:
        add = training.sums.add

        def add_and_record(terms: Mapping[str, Tensor], batch: Batch) -> None:
            self.terms.extend(float(value.detach()) for value in terms.values())
            add(terms, batch)

        training.sums.add = add_and_record  # type: ignore[method-assign]

    def _record_pushed(self, training: Training, is_off: Tensor) -> None:
        for name, leaf in training.leaves.items():
            has_outputs = leaf.dim() > 0 and leaf.shape[0] == toys.CLASSES
            if has_outputs and leaf.grad is not None and leaf.grad[is_off].any():
                self.pushed.append(name)


WITH_QUERIES = [name for name in METHODS if needs(name, Need.QUERIES)]
CASES = [pytest.param(name, {}, id=name) for name in METHODS if name not in WITH_QUERIES]
CASES += [
    pytest.param("fedrs", {"alpha": 0.0}, id="fedrs without missing classes"),
    pytest.param("fd", {"average_weights": True}, id="fd with weights"),
]


@pytest.mark.parametrize(("name", "fields"), CASES)
def test_over_two_tasks_outputs_that_take_no_part_get_no_gradient(
    name: str, fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first task they are those of classes still to come, as with ``seen``; then also those
    of before.
    """
    first_steps = FirstSteps()
    monkeypatch.setattr(Training, "step", first_steps.watching(Training.step))
    rounds = 4
    lag = 1
    if built(name).topology == "peer_to_peer":
        rounds = 2
        lag = 0
    base = four_clients_of(name)
    stream = {
        "kind": "classes",
        "tasks": 2,
        "order": ORDER,
        "head": "task",
        "lag": lag,
        "join": 0.7,
    }
    experiment = replace(
        base,
        method={**base.table("method"), **fields},
        rounds=rounds,
        query={},
        partition={"kind": "iid"},
        stream=stream,
        topology={"clients": 4},
        plan={"epochs": 1, "batch": 50, "lr": 0.01},
        engine="serial",
    )

    result = run(experiment, tmp_path / "run", toys.blobs())

    events = read_journal(tmp_path / "run" / "journal.jsonl")
    client_events = [event for event in events if event["event"] == "client"]
    assert not [event for event in client_events if "refused" in event]
    assert len(result.history) == rounds
    if result.accuracy is not None:
        assert [event["task"] for event in events if event["event"] == "task"][-2:] == [1, 2]
    assert first_steps.terms or name == "afl", "which solves its last layer, and trains nothing"
    for event in client_events:
        for value in (event.get("loss") or {}).values():
            assert value is not None
            assert math.isfinite(value)
    assert all(abs(value) < LARGE for value in first_steps.terms)
    if name not in TRAINS_EARLIER_OUTPUTS | DRAWS_ALL_WEIGHTS:
        assert not first_steps.pushed


@pytest.mark.parametrize("name", WITH_QUERIES)
def test_streams_are_refused_for_methods_with_queries(name: str) -> None:
    stream = {"kind": "classes", "tasks": 2, "order": ORDER}
    experiment = replace(four_clients_of(name), rounds=2, partition={"kind": "iid"}, stream=stream)
    with pytest.raises(ConfigError, match=r"\[stream\] and \[query\]"):
        resolve(experiment)
