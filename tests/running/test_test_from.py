"""Models tested on training examples that clients lack, and the processor's time in a run's
summary.
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
    return resolve(toys.toy(seed=seed, data={"name": "digits", **data}, topology={"clients": 4}))


def test_held_out_examples_are_a_fifth_of_each_class_and_no_clients() -> None:
    digits = load_dataset("digits")
    own = settings(test_from="held_out")
    rest, held = training_and_test_sets(own, digits)
    assert len(held) == round(0.2 * len(digits.train))
    assert len(rest) + len(held) == len(digits.train)
    whole, some = (torch.bincount(e.labels, minlength=10).double() for e in (digits.train, held))
    assert ((some - whole * len(held) / len(digits.train)).abs() < 1).all()
    assert torch.equal(
        _sorted(torch.cat([rest.values, held.values])), _sorted(digits.train.values)
    ), "each occurs once"
    shared = split_data(own, digits)
    assert shared.test is not None
    assert torch.equal(shared.test.values, held.values)
    assert sum(map(len, shared.split)) == len(rest)


def test_they_are_the_same_for_every_seed_and_size() -> None:
    digits = load_dataset("digits")
    held = [
        training_and_test_sets(settings(seed, test_from="held_out", train_size=n), digits)[1]
        for seed, n in ((0, 0), (5, 300))
    ]
    assert torch.equal(held[0].values, held[1].values)
    few = split_data(settings(test_from="held_out", test_size=100, train_size=300), digits)
    assert few.test is not None
    assert (len(few.test), len(few.train)) == (100, 300)


@pytest.mark.parametrize(
    ("data", "more", "said"),
    [
        ({"test_size": 1438}, {}, r"data.test_size = 1438 leaves nothing of 1438"),
        (
            {},
            {"partition": {"kind": "column", "column": "by", "own_test": 0.2, "pool": True}},
            "no effect with partition.pool = true",
        ),
    ],
)
def test_what_leaves_nothing_or_has_no_meaning_is_refused(
    data: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    asked = resolve(
        toys.toy(
            data={"name": "digits", "test_from": "held_out", **data},
            topology={"clients": 4},
            **more,
        )
    )
    with pytest.raises(ConfigError, match=said):
        split_data(asked, load_dataset("digits"))


def test_a_run_is_tested_on_them_and_says_what_the_processor_spent(tmp_path: Path) -> None:
    data = {"name": "digits", "test_from": "held_out", "test_size": 50, "train_size": 100}
    done = run(toys.toy(rounds=2, data=data, topology={"clients": 4}, measure=()), tmp_path / "run")
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    assert 'test_from = "held_out"' in (tmp_path / "run" / "config.toml").read_text()
    assert sum(next(e for e in events if e["event"] == "start")["test_counts"]) == 50
    spent = [e["seconds_cpu"] for e in events if e["event"] == "round"]
    assert len(spent) == 2
    assert min(spent) > 0
    assert done.summary["seconds_cpu"] == sum(spent)


def _sorted(images: torch.Tensor) -> torch.Tensor:
    rows = images.flatten(1)
    order = sorted(range(len(rows)), key=lambda i: rows[i].tolist())
    return rows[order]
