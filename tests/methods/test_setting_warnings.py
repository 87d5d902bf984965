"""A run on which a method's own part does nothing, and trains as FedAvg: it says so, and does.

Of two classes one is not the true one, and there is no other to distil. Where there is one task,
nothing came before.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import stacking
import torch
from torch import Tensor

import toys
from fedstill.config.resolve import resolve
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run
from fedstill.running.setting_warnings import log_once

NOT_TRUE_ALONE = ["fedntd", "fedntd_asd", "fedlmd", "fedlmd_tf", {"name": "kd_ntd", "mix": 1.0}]
MORE = ["kd", {"name": "kd_ntd", "mix": 0.5}, "fedavg_asd", "fedntd_mse", "fedadkd", "feddkd"]


def two_classes() -> Dataset:
    blobs = toys.blobs()
    some, test = (
        (x.values[keep], x.labels[keep])
        for x in (blobs.train, blobs.test)
        for keep in [x.labels < 2]
    )
    return from_tensors("two", some, test, classes=["yes", "no"])


def ready(method: object, data: Dataset, **changes: object) -> Prepared:
    name = method["name"] if isinstance(method, dict) else method
    return prepare(
        resolve(stacking.experiment(str(name), "serial", method=method, **changes)), data
    )


def trained(prepared: Prepared) -> dict[str, Tensor]:
    return stacking.rounds(prepared)[0].params


@pytest.mark.parametrize("method", NOT_TRUE_ALONE, ids=str)
def test_it_is_fedavg_and_says_so(method: object) -> None:
    one, plain = ready(method, two_classes()), ready("fedavg", two_classes())
    assert "fedavg" in one.settings.method.setting_warnings(one.world)
    got, expected = trained(one), trained(plain)
    assert all(torch.equal(got[k], v) for k, v in expected.items())
    assert not ready(method, toys.blobs()).settings.method.setting_warnings(
        ready(method, toys.blobs()).world
    )


@pytest.mark.parametrize("method", ["fedewc", "fedlwf", "fot", "replay"])
def test_over_one_task_it_is_fedavg_and_says_so(method: str) -> None:
    one, plain = ready(method, toys.blobs()), ready("fedavg", toys.blobs())
    assert "[stream]" in one.settings.method.setting_warnings(one.world)
    got, expected = trained(one), trained(plain)
    assert all(torch.equal(got[k], v) for k, v in expected.items())
    two = ready(method, toys.blobs(), stream={"kind": "classes", "tasks": 2}, rounds=4)
    assert two.settings.method.setting_warnings(two.world) == ""


def test_over_one_task_the_clients_of_glfc_have_a_loss_of_their_own_and_say_which() -> None:
    one, plain = ready("glfc_local", toys.blobs()), ready("fedavg", toys.blobs())
    assert "[stream]" in one.settings.method.setting_warnings(one.world)
    got, expected = trained(one), trained(plain)
    assert any(not torch.equal(got[k], v) for k, v in expected.items())
    two = ready("glfc_local", toys.blobs(), stream={"kind": "classes", "tasks": 2}, rounds=4)
    assert two.settings.method.setting_warnings(two.world) == ""


@pytest.mark.parametrize("method", MORE, ids=str)
def test_what_does_more_says_nothing(method: object) -> None:
    one, plain = ready(method, two_classes()), ready("fedavg", two_classes())
    assert one.settings.method.setting_warnings(one.world) == ""
    got, expected = trained(one), trained(plain)
    assert any(not torch.equal(got[k], v) for k, v in expected.items())


@pytest.mark.parametrize(
    ("head", "past", "said"),
    [
        ("task", "gone", True),
        ("all", "gone", False),
        ("seen", "gone", False),
        ("task", "kept", False),
    ],
)
def test_in_tasks_of_two_classes_the_head_decides(head: str, past: str, said: bool) -> None:
    stream = {"kind": "classes", "tasks": 2, "head": head, "past": past}
    four = toys.blobs()
    keep = four.train.labels < 4, four.test.labels < 4
    data = from_tensors(
        "four",
        *((x.values[k], x.labels[k]) for x, k in zip((four.train, four.test), keep, strict=True)),
        classes=["a", "b", "c", "d"],
    )
    one = ready("fedntd", data, stream=stream, rounds=4)
    warning = one.settings.method.setting_warnings(one.world)
    assert bool(warning) == said
    assert not said or "stream.head" in warning


def test_a_run_says_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "fedstill.run"):
        for seed in (1, 2):
            run(toys.toy("fedntd", rounds=1, seed=seed), tmp_path / str(seed), data=two_classes())
    assert [r.message.partition(":")[0] for r in caplog.records] == ["method fedntd"]
