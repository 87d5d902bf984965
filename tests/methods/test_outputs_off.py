"""Every method over two tasks, with late clients: it refuses nothing, and outputs that take no part
in a task's training are not pushed by its objective, nor make it large.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from test_every_method import METHODS, experiment
from torch import Tensor

import toys
from fedstill.config.resolve import resolve
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError
from fedstill.core.registry import lookup
from fedstill.engines.clients import Batch
from fedstill.engines.loop import Training
from fedstill.running.journal import read_journal
from fedstill.running.runner import run

ORDER = [[0, 1, 4], [2, 3]]
BEFORE = {"fedlwf", "replay", "glfc_local"}
"""Methods that train outputs of earlier tasks on purpose, whatever the task's own are."""
PULLED = {"ditto", "fedcurv", "feddc", "feddyn", "fedewc", "scaffold"}
"""Methods that draw all weights towards others, whatever outputs say."""
LARGE = 100.0


@dataclass
class FirstSteps:
    """What the first step of each client on its own data was: terms, and the gradients of outputs
    that are off.
    """

    terms: list[tuple[str, float]] = field(default_factory=list)
    pushed: list[str] = field(default_factory=list)

    def watching(self, step: Callable[[Any, Batch], None]) -> Callable[[Any, Batch], None]:
        seen: set[int] = set()
        alive: list[Training] = []  # so that no two have one id

        def watched(training: Any, batch: Batch) -> None:
            on = training.clients.start.head
            if on is None or id(training) in seen:
                step(training, batch)
                return
            seen.add(id(training))
            alive.append(training)
            add = training.sums.add

            def noted(terms: dict[str, Tensor], b: Batch) -> None:
                self.terms.extend((k, float(v.detach())) for k, v in terms.items())
                add(terms, b)

            training.sums.add = noted
            step(training, batch)
            for name, leaf in training.leaves.items():
                if leaf.dim() and leaf.shape[0] == toys.CLASSES and leaf.grad is not None:
                    self.pushed += [name] if leaf.grad[~on].any() else []

        return watched


NAMES = [n for n in METHODS if Need.QUERIES not in lookup("method", n).build().requires()]
FIELDS: list[tuple[str, dict[str, object]]] = [
    ("fedrs", {"alpha": 0.0}),
    ("fd", {"average_weights": True}),
]


@pytest.mark.parametrize(("name", "fields"), [*((n, {}) for n in NAMES), *FIELDS])
def test_a_method_goes_through_two_tasks_and_outputs_that_are_off_get_no_gradient(
    name: str, fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first task they are those of classes still to come, as with ``seen``; then also those
    of before.
    """
    first = FirstSteps()
    monkeypatch.setattr(Training, "step", first.watching(Training.step))
    base = experiment(name)
    method = {**(base.method if isinstance(base.method, dict) else {"name": base.method}), **fields}
    peers = lookup("method", name).build().topology == "peer_to_peer"
    stream = {
        "kind": "classes",
        "tasks": 2,
        "order": ORDER,
        "head": "task",
        "lag": 0 if peers else 1,
        "join": 0.7,
    }
    what = replace(
        base,
        method=method,
        rounds=2 if peers else 4,
        query={},
        partition={"kind": "iid"},
        stream=stream,
        topology={"clients": 4},
        plan={"epochs": 1, "batch": 50, "lr": 0.01},
        engine="serial",
    )
    result = run(what, tmp_path / "run", toys.blobs())
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    assert not [e for e in events if e["event"] == "client" and "refused" in e]
    assert len(result.history) == what.rounds
    if result.accuracy is not None:
        assert [e["task"] for e in events if e["event"] == "task"][-2:] == [1, 2]
    assert first.terms or name == "afl", "which solves its last layer, and trains nothing"
    losses = [v for e in events if e["event"] == "client" for v in (e.get("loss") or {}).values()]
    assert all(v is not None and math.isfinite(v) for v in losses)
    assert not [(k, v) for k, v in first.terms if not abs(v) < LARGE]
    assert not first.pushed or name in BEFORE | PULLED


@pytest.mark.parametrize("name", [name for name in METHODS if name not in NAMES])
def test_clients_that_ask_have_no_tasks_and_are_told(name: str) -> None:
    stream = {"kind": "classes", "tasks": 2, "order": ORDER}
    what = replace(experiment(name), rounds=2, partition={"kind": "iid"}, stream=stream)
    with pytest.raises(ConfigError, match=r"\[stream\] and \[query\]"):
        resolve(what)
