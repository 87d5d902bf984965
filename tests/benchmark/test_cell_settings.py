"""Where a run stands among the cells of a map."""

from __future__ import annotations

import math

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


def ready(**more: object) -> Prepared:
    return prepare(resolve(from_tree({**BASE, **more}, {}, None)))


def test_the_three_numbers_from_the_label_counts_by_hand() -> None:
    prepared = ready(partition={"kind": "dirichlet", "alpha": 0.5})
    labels, parts = prepared.sites.train.labels.tolist(), prepared.sites.split
    each = [[[labels[i] for i in parts[c]].count(k) for k in range(10)] for c in range(4)]
    whole = [sum(own[k] for own in each) / 200 for k in range(10)]
    apart, pace = 0.0, 0.0
    for own in each:
        p = [n / sum(own) for n in own]
        for mine, all_of in zip(p, whole, strict=True):
            middle = (mine + all_of) / 2
            apart += sum(v * math.log(v / middle) / 2 for v in (mine, all_of) if v > 0) / 4
        pace += 3 * math.ceil(sum(own) / 20) / sum(own) / 4
    here = setting_of(prepared)
    assert here
    assert (here.labels_apart, here.steps_per_example) == pytest.approx((apart, pace), rel=1e-12)
    assert here.clients_share == 0.25


def test_steps_that_a_plan_fixes_are_taken_as_they_are() -> None:
    here = setting_of(ready(plan={"epochs": 0, "steps": 7, "batch": 20, "validation": 0.0}))
    assert here
    assert here.steps_per_example == pytest.approx(7 / 50)


@pytest.mark.parametrize(
    "more",
    [
        {"rounds": 4, "stream": {"kind": "classes", "tasks": 2}},
        {"topology": {"kind": "sequential", "clients": 4}, "method": "fedseq"},
    ],
)
def test_tasks_and_chains_are_no_cells(more: dict[str, object]) -> None:
    assert setting_of(ready(**more)) is None
