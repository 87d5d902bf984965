"""A check of runs whose clients have models of their own."""

from __future__ import annotations

from pathlib import Path

import torch

import fedstill
import toys
from fedstill.running.journal import read_journal


def assert_loaded_models_answer_as_measured(folder: Path, clients: int, round_index: int) -> None:
    """The model of each client that can be loaded answers the test as the journal says of the
    round.
    """
    test = toys.blobs().test
    events = [
        event
        for event in read_journal(folder / "journal.jsonl")
        if event["event"] == "client" and event["round"] == round_index
    ]
    assert [event["client"] for event in events] == list(range(clients))

    for event in events:
        model = fedstill.load_model(folder, client=event["client"]).eval()
        with torch.no_grad():
            is_correct = model(test.values).argmax(1) == test.labels
        correct = test.labels[is_correct].bincount(minlength=toys.CLASSES)
        assert correct.tolist() == event["correct_by_class"]
