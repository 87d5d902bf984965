"""The position of a run among the cells of a map."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedstill.benchmark.maps import setting_of
from fedstill.config.experiment import from_tree
from fedstill.config.resolve import resolve
from fedstill.running.preparation import Prepared, prepare

BASE = {
    "rounds": 1,
    "data": {"name": "digits", "train_size": 200, "test_size": 50},
    "partition": {"kind": "iid"},
    "topology": {"kind": "parallel", "clients": 4, "sampled": 1},
    "model": {"name": "mlp", "hidden": [4]},
    "method": "fedavg",
    "plan": {"epochs": 3, "batch": 20, "validation": 0.0},
}


def ready(**changes: object) -> Prepared:
    """A prepared run of four clients and 200 examples, with changes of its config."""
    return prepare(resolve(from_tree({**BASE, **changes}, {}, None)))


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """The Jensen-Shannon divergence of two distributions."""
    middle = (p + q) / 2
    terms = []
    for distribution in (p, q):
        is_positive = distribution > 0
        ratios = distribution[is_positive] / middle[is_positive]
        terms.append((distribution[is_positive] * np.log(ratios)).sum())
    return sum(terms) / 2


def test_the_three_numbers_from_the_label_counts_by_hand() -> None:
    prepared = ready(partition={"kind": "dirichlet", "alpha": 0.5})
    labels = prepared.sites.train.labels.numpy()
    counts = [np.bincount(labels[part], minlength=10) for part in prepared.sites.split]
    all_labels = np.bincount(labels, minlength=10) / 200
    divergences = []
    steps_per_example = []
    for client_counts in counts:
        size = client_counts.sum()
        divergences.append(divergence(client_counts / size, all_labels))
        steps_per_example.append(3 * math.ceil(size / 20) / size)

    setting = setting_of(prepared)

    assert setting
    assert setting.labels_apart == pytest.approx(np.mean(divergences), rel=1e-12)
    assert setting.steps_per_example == pytest.approx(np.mean(steps_per_example), rel=1e-12)
    assert setting.clients_share == 0.25


def test_steps_that_a_plan_fixes_are_taken_as_they_are() -> None:
    setting = setting_of(ready(plan={"epochs": 0, "steps": 7, "batch": 20, "validation": 0.0}))
    assert setting
    assert setting.steps_per_example == pytest.approx(7 / 50)


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 4, "stream": {"kind": "classes", "tasks": 2}},
        {"topology": {"kind": "sequential", "clients": 4}, "method": "fedseq"},
    ],
)
def test_tasks_and_chains_are_no_cells(changes: dict[str, object]) -> None:
    assert setting_of(ready(**changes)) is None
