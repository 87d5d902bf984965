"""The planted clients of the benchmark of culprits, and the measure that names clients."""

from __future__ import annotations

import pytest

from benchmarks import culprits
from fedstill import load_dataset
from fedstill.data.dataset import Dataset


def class_count(dataset: Dataset) -> int:
    """The number of training examples of the harmed class."""
    return int((dataset.train.labels == culprits.HARMED_CLASS).sum())


def test_a_culprit_keeps_no_label_of_the_class_and_a_helper_has_all() -> None:
    changed = culprits.planted("all", 0.5, seed=1)
    helper = culprits.planted("helper", 0.5, seed=1)
    assert changed.client == helper.client
    digits = class_count(load_dataset("digits"))
    assert 0 < class_count(helper.dataset) < digits
    assert class_count(changed.dataset) + class_count(helper.dataset) == digits


def test_rounds_name_a_client_by_each_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(culprits, "LEAST_FALL", -1.0)
    observed = culprits.observations("all", 0.5, "fedavg", seed=1, rounds=4)
    assert 0 < len(observed) <= 4
    for observation in observed:
        assert set(observation.is_first) == set(culprits.RULES)
        assert -1 <= observation.harm <= 1


def test_shares_refer_to_harmful_rounds() -> None:
    names_it = dict.fromkeys(culprits.RULES, True)
    harmful = culprits.Observation(fall=0.3, harm=0.2, is_first=names_it)
    harmless = culprits.Observation(
        fall=0.1, harm=0.0, is_first=dict.fromkeys(culprits.RULES, False)
    )
    cells = culprits.row("all", 0.5, "fedavg", [harmful, harmless])
    assert cells == ["all", "0.5", "fedavg", "2", "20", "1", *["1.00"] * 4]
    cells = culprits.row("helper", 0.5, "fedavg", [harmful, harmless])
    assert cells == ["helper", "0.5", "fedavg", "2", "20", "2", *["0.50"] * 4]
    assert culprits.row("half", 0.5, "fedavg", [harmless])[6:] == ["–"] * 4
