"""Models can be tested on training examples that no client has. A run's summary has the time of the
processor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from fedstill.config.resolve import resolve
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError
from fedstill.data.sources import load_dataset
from fedstill.running.client_data import split_data, training_and_test_sets
from fedstill.running.journal import read_journal
from fedstill.running.runner import run


def settings(seed: int = 0, **data: Any) -> Settings:
    """The settings of four clients on the digits, with these keys in their table ``[data]``."""
    return resolve(toys.toy(seed=seed, data={"name": "digits", **data}, topology={"clients": 4}))


def test_held_out_examples_are_a_fifth_of_each_class_and_belong_to_no_client() -> None:
    digits = load_dataset("digits")
    held_out_settings = settings(test_from="held_out")
    train, test = training_and_test_sets(held_out_settings, digits)
    assert len(test) == round(0.2 * len(digits.train))
    assert len(train) + len(test) == len(digits.train)
    class_counts = torch.bincount(digits.train.labels, minlength=10).double()
    test_counts = torch.bincount(test.labels, minlength=10).double()
    proportional_counts = class_counts * len(test) / len(digits.train)
    assert ((test_counts - proportional_counts).abs() < 1).all()
    together = torch.cat([train.values, test.values])
    assert torch.equal(_sorted(together), _sorted(digits.train.values)), "each occurs once"

    shared = split_data(held_out_settings, digits)
    assert shared.test is not None
    assert torch.equal(shared.test.values, test.values)
    assert sum(map(len, shared.split)) == len(train)


def test_held_out_examples_are_the_same_for_every_seed_and_size() -> None:
    digits = load_dataset("digits")
    _, test = training_and_test_sets(settings(0, test_from="held_out"), digits)
    of_another_run = settings(5, test_from="held_out", train_size=300)
    _, other_test = training_and_test_sets(of_another_run, digits)
    assert torch.equal(test.values, other_test.values)

    few = split_data(settings(test_from="held_out", test_size=100, train_size=300), digits)
    assert few.test is not None
    assert len(few.test) == 100
    assert len(few.train) == 300


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        ({"test_size": 1438}, {}, r"data.test_size = 1438 leaves nothing of 1438"),
        (
            {},
            {"partition": {"kind": "column", "column": "by", "own_test": 0.2, "pool": True}},
            "no effect with partition.pool = true",
        ),
    ],
)
def test_settings_that_leave_no_examples_or_have_no_effect_are_refused(
    data: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    table = {"name": "digits", "test_from": "held_out", **data}
    resolved = resolve(toys.toy(data=table, topology={"clients": 4}, **changes))
    with pytest.raises(ConfigError, match=message):
        split_data(resolved, load_dataset("digits"))


def test_a_run_is_tested_on_held_out_examples_and_has_the_time_of_the_processor(
    tmp_path: Path,
) -> None:
    data = {"name": "digits", "test_from": "held_out", "test_size": 50, "train_size": 100}
    experiment = toys.toy(rounds=2, data=data, topology={"clients": 4}, measure=())
    result = run(experiment, tmp_path / "run")

    events = read_journal(tmp_path / "run" / "journal.jsonl")

    assert 'test_from = "held_out"' in (tmp_path / "run" / "config.toml").read_text()
    assert sum(events[0]["test_counts"]) == 50

    seconds = [e["seconds_cpu"] for e in events if e["event"] == "round"]
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert result.summary["seconds_cpu"] == sum(seconds)


def _sorted(images: torch.Tensor) -> torch.Tensor:
    """The images as rows, in an order that depends on their values alone."""
    rows = images.flatten(1)
    order = sorted(range(len(rows)), key=lambda i: rows[i].tolist())
    return rows[order]
