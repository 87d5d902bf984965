"""Whole numbers of a run that every machine draws alike: split, tests, tasks, and the clients of every round."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fedstill.data.examples import Dataset
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.preparing.prepared import Prepared, prepare
from fedstill.experiment.run_directory.journal import Event
from fedstill.experiment.run_directory.split_file import split_told
from fedstill.experiment.running.measuring import Measuring

TOLD = ("classes", "test_counts", "split", "stream")
"""What the event ``start`` says of them."""


def other_draws(settings: Settings, events: Sequence[Event], data: Dataset) -> str:
    """What in a journal is not what these settings draw of the data here; empty where all is."""
    ready = prepare(settings, data)
    measuring = Measuring(ready)
    told = measuring.about(seals=False) | ({"split": split_told(measuring.dealt_out)} if measuring.dealt_out else {})
    for key in TOLD:
        has, draws = (json.loads(json.dumps(of.get(key))) for of in (events[0], told))
        if has != draws:
            return f"its {key} is {_short(has)}, and here {_short(draws)} is drawn"
    return _other_clients(ready, events)


def _other_clients(ready: Prepared, events: Sequence[Event]) -> str:
    """The first round in which other clients took part than its schedule has; there may be a stage for all of them."""
    acted: dict[int, set[int]] = {}
    for event in events:
        if event["event"] == "client" and event["round"] > 0 and event["client"] >= 0:
            acted.setdefault(event["round"], set()).add(event["client"])
    everyone = set(range(ready.world.clients))
    for number, clients in acted.items():
        drawn = {c for stage in ready.settings.topology(number, ready.world) for c in stage.clients if c >= 0}
        if clients not in (drawn, everyone):
            return f"in round {number} clients {sorted(clients)} took part, and here {sorted(drawn)} are drawn"
    return ""


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
