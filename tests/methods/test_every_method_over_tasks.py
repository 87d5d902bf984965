"""Every method runs under a stream as it is: new classes in each task, few outputs in training,
late clients.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from test_every_method import METHODS, experiment

import toys
from fedstill.config.resolve import settle
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError
from fedstill.core.registry import lookup
from fedstill.running.journal import read_journal
from fedstill.running.runner import run

STREAM = {"kind": "classes", "tasks": 2, "order": [[0, 1, 4], [2, 3]], "head": "seen", "join": 0.7}
ASKS = [name for name in METHODS if Need.QUERIES in lookup("method", name).build().requires()]


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ASKS])
def test_a_method_goes_through_two_tasks(name: str, tmp_path: Path) -> None:
    base = experiment(name)
    plan = {"epochs": 1, "batch": 50, "lr": 0.01}
    what = replace(base, rounds=2, plan=plan, query={}, partition={"kind": "iid"}, stream=STREAM)
    result = run(what, tmp_path / "run", toys.blobs())
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    losses = [v for e in events if e["event"] == "client" for v in (e.get("loss") or {}).values()]
    assert all(v is not None and math.isfinite(v) for v in losses)
    assert not [e for e in events if e["event"] == "client" and "refused" in e]
    assert len(result.history) == 2
    if result.accuracy is not None:
        assert [e["task"] for e in events if e["event"] == "task"][-2:] == [1, 2]


@pytest.mark.parametrize("name", ASKS)
def test_clients_that_ask_have_no_tasks_and_are_told(name: str) -> None:
    what = replace(experiment(name), rounds=2, partition={"kind": "iid"}, stream=STREAM)
    with pytest.raises(ConfigError, match=r"\[stream\] and \[query\]"):
        settle(what)
