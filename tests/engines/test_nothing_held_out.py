"""Plans that keep the best epoch, and clients without a held-out example to score it by: they keep
the last one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import toys
from fedstill.running.journal import read_journal
from fedstill.running.runner import run


def with_a_tiny_client(labels: NDArray[np.int64], clients: int) -> list[NDArray[np.int64]]:
    """Client 0 has a single example."""
    order = np.arange(len(labels))
    return [order[:1], *np.array_split(order[1:], clients - 1)]


def events_of(folder: Path, name: str, **changes: Any) -> list[dict[str, Any]]:
    run(toys.toy(name, topology={"clients": 4}, rounds=1, **changes), folder, toys.blobs())
    return [e for e in read_journal(folder / "journal.jsonl") if e["event"] == "client"]


@pytest.mark.parametrize("engine", ["serial", "pooled"])
def test_a_client_of_one_example_trains_all_epochs_and_is_not_scored(
    engine: str, tmp_path: Path
) -> None:
    fit = {"epochs": 3, "patience": 1, "keep": "best", "validation": 0.1}
    events = events_of(
        tmp_path / "run",
        "local_only",
        plan={"fit": fit},
        partition=with_a_tiny_client,
        engine=engine,
    )
    tiny, *larger = events
    assert tiny["client"] == 0
    assert tiny["examples"] == 1
    assert tiny["epochs"] == 3
    assert tiny["steps"] == 3
    assert "scores" not in tiny
    assert all(event["scores"] for event in larger)


@pytest.mark.parametrize("name", ["feddf", "fedgen", "dsfl"])
def test_the_server_has_nothing_held_out_and_keeps_its_last_epoch(
    name: str, tmp_path: Path
) -> None:
    plan = {"epochs": 2, "batch": 20, "lr": 0.1, "validation": 0.2, "keep": "best"}
    events = events_of(
        tmp_path / "run", name, plan=plan, partition={"kind": "iid"}, data={"public": toys.PUBLIC}
    )
    of_server = [e for e in events if e["client"] == -1]
    assert of_server
    assert not any("scores" in e for e in of_server)
    assert any("scores" in e for e in events if e["client"] >= 0)
