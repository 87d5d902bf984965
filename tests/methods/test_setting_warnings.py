"""A run on which a method's own part does nothing, and trains as FedAvg: it says so, and does.

Of two classes one is not the true one, and there is no other to distil. Where there is one task,
nothing came before.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import pytest
import stacking

import toys
from fedstill.config.resolve import resolve
from fedstill.core.records import Examples
from fedstill.core.trees import same_bits
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run
from fedstill.running.setting_warnings import log_once

DISTILS_NOT_TRUE_ALONE = [
    "fedntd",
    "fedntd_asd",
    "fedlmd",
    "fedlmd_tf",
    {"name": "kd_ntd", "mix": 1.0},
]
DISTILS_THE_TRUE_CLASS_TOO = [
    "kd",
    {"name": "kd_ntd", "mix": 0.5},
    "fedavg_asd",
    "fedntd_mse",
    "fedadkd",
    "feddkd",
]
TWO_TASKS = {"stream": {"kind": "classes", "tasks": 2}, "rounds": 4}


def first_classes(number: int) -> Dataset:
    """The blobs of so many classes."""
    blobs = toys.blobs()

    def of_first_classes(examples: Examples) -> tuple[object, object]:
        is_used = examples.labels < number
        return examples.values[is_used], examples.labels[is_used]

    names = [f"class {c}" for c in range(number)]
    train = of_first_classes(blobs.train)
    return from_tensors("few classes", train, of_first_classes(blobs.test), classes=names)


def ready(method: object, data: Dataset, **changes: object) -> Prepared:
    """A prepared run of the serial engine."""
    name = str(method)
    if isinstance(method, dict):
        name = method["name"]
    experiment = stacking.experiment(name, "serial", method=method, **changes)
    return prepare(resolve(experiment), data)


def warning_of(prepared: Prepared) -> str:
    """What the method says about the run before it starts."""
    return prepared.settings.method.setting_warnings(prepared.world)


@functools.cache
def fedavg_of_classes(number: int) -> dict[str, object]:
    """FedAvg's model of so many classes."""
    return dict(stacking.rounds(ready("fedavg", first_classes(number))).state.params)


def trains_as_fedavg(prepared: Prepared) -> bool:
    """Whether two rounds end with FedAvg's model, to the bit."""
    params = stacking.rounds(prepared).state.params
    return same_bits(params, fedavg_of_classes(prepared.world.classes))


@pytest.mark.parametrize("method", DISTILS_NOT_TRUE_ALONE, ids=str)
def test_distillation_of_not_true_classes_alone_warns_that_it_is_fedavg(method: object) -> None:
    """Of two classes; of five it says nothing."""
    prepared = ready(method, first_classes(2))

    assert "fedavg" in warning_of(prepared)
    assert trains_as_fedavg(prepared)
    assert not warning_of(ready(method, toys.blobs()))


@pytest.mark.parametrize("method", ["fedewc", "fedlwf", "fot", "replay"])
def test_over_one_task_a_method_warns_that_it_is_fedavg(method: str) -> None:
    """Over two tasks it says nothing."""
    prepared = ready(method, toys.blobs())

    assert "[stream]" in warning_of(prepared)
    assert trains_as_fedavg(prepared)
    assert warning_of(ready(method, toys.blobs(), **TWO_TASKS)) == ""


def test_over_one_task_glfc_warns_although_it_is_not_fedavg() -> None:
    """Over two tasks it says nothing."""
    prepared = ready("glfc_local", toys.blobs())

    assert "[stream]" in warning_of(prepared)
    assert not trains_as_fedavg(prepared)
    assert warning_of(ready("glfc_local", toys.blobs(), **TWO_TASKS)) == ""


@pytest.mark.parametrize("method", DISTILS_THE_TRUE_CLASS_TOO, ids=str)
def test_a_method_that_also_distils_the_true_class_does_not_warn(method: object) -> None:
    prepared = ready(method, first_classes(2))

    assert warning_of(prepared) == ""
    assert not trains_as_fedavg(prepared)


@pytest.mark.parametrize(
    ("head", "past", "warns"),
    [
        ("task", "gone", True),
        ("all", "gone", False),
        ("seen", "gone", False),
        ("task", "kept", False),
    ],
)
def test_in_tasks_of_two_classes_the_head_decides(head: str, past: str, warns: bool) -> None:
    stream = {"kind": "classes", "tasks": 2, "head": head, "past": past}

    warning = warning_of(ready("fedntd", first_classes(4), stream=stream, rounds=4))

    assert ("stream.head" in warning) == warns
    assert bool(warning) == warns


def test_a_warning_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "fedstill.run"):
        for seed in (1, 2):
            toy = toys.toy("fedntd", rounds=1, seed=seed)
            run(toy, tmp_path / str(seed), data=first_classes(2))

    assert [record.message.partition(":")[0] for record in caplog.records] == ["method fedntd"]
