"""Errors and warnings about data before a run: one class, classes without training or test
examples, and no test examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

import fedstill
import toys
from fedstill.cli import call
from fedstill.config.resolve import resolve
from fedstill.config.validation import WrongConfig
from fedstill.core.errors import DataError, InfeasiblePartition, UnknownName
from fedstill.core.records import Plan
from fedstill.core.registry import lookup
from fedstill.data.dataset import Dataset
from fedstill.data.partition.rules import check_enough_examples
from fedstill.data.sources import load_dataset
from fedstill.methods.fedavg import FedAvg
from fedstill.running.preparation import prepare
from fedstill.running.setting_warnings import ineffective_plan_keys, setting_warnings

NAMES = ("ant", "bee", "cat", "dog")


def _data(trained: list[int], tested: list[int], names: tuple[str, ...] = NAMES) -> Dataset:
    def split(classes: list[int]) -> tuple[np.ndarray, np.ndarray]:
        labels = np.repeat(classes, 12)
        return np.random.default_rng(len(labels)).normal(size=(len(labels), 3)), labels

    return fedstill.from_tensors("mine", split(trained), split(tested), classes=names)


def _warnings(data: Dataset, /, **changes: object) -> list[str]:
    """The warnings of a run before it begins."""
    values = {"model": "logistic", "partition": "iid", "measure": (), **changes}
    return list(setting_warnings(prepare(resolve(toys.toy(**values)), data)))


def test_data_with_all_classes_are_passed_over() -> None:
    assert _warnings(_data([0, 1, 2, 3], [0, 1, 2, 3])) == []


def test_a_key_about_examples_that_the_run_lacks_is_warned_of() -> None:
    data = _data([0, 1, 2, 3], [0, 1, 2, 3])
    (held_out,) = _warnings(data, data={"held_out": "last"})
    assert "data.held_out" in held_out
    assert _warnings(data, data={"held_out": "last"}, plan={"validation": 0.2, "epochs": 1}) == []

    (labels,) = _warnings(data, data={"public_labels": False})
    assert "data.public_labels" in labels
    assert _warnings(data, data={"public_labels": False, "public": 5}) == []


def test_training_images_that_are_public_are_not_resized() -> None:
    public = {"public": 10, "public_resize": True}
    (warning,) = _warnings(load_dataset("digits"), data=public, model="digits_cnn")
    assert "data.public_resize" in warning


def test_classes_that_are_not_trained_or_not_tested_are_named() -> None:
    (untrained,) = _warnings(_data([0, 1, 2], [0, 1, 2, 3]))
    assert "training" in untrained
    assert "'dog'" in untrained
    (untested,) = _warnings(_data([0, 1, 2, 3], [0, 1]))
    assert "test" in untested
    assert "'cat', 'dog'" in untested


def test_classes_without_any_example_are_named_and_that_labels_count_from_0() -> None:
    (numbered,) = _warnings(_data([1, 2], [1, 2], names=("0", "1", "2")))
    assert "'0'" in numbered
    assert "begin at 1" in numbered

    (without_examples,) = _warnings(_data([0, 3], [0, 3]))
    assert "'bee', 'cat'" in without_examples

    without_2 = _data([0, 1, 3], [0, 1, 3], names=("0", "1", "2", "3"))
    (skipped,) = _warnings(without_2)
    assert "'2'" in skipped
    assert "4 classes" in skipped


def test_classes_that_differ_only_in_blanks_and_capitals_are_named() -> None:
    classes = [0, 1, 2, 3]
    first, second = _warnings(_data(classes, classes, names=("yes", " yes", "no", "No ")))
    assert "'yes' and ' yes'" in first
    assert "'no' and 'No '" in second


@pytest.mark.parametrize(
    ("aggregation", "warns"),
    [("examples", True), ("median", True), ("trimmed_mean", False), ("krum", False)],
)
def test_a_share_of_suspected_clients_needs_a_rule_that_uses_it(
    aggregation: str, warns: bool
) -> None:
    method = {"name": "fedavg", "aggregation": aggregation, "suspected": 0.2}
    messages = _warnings(_data([0, 1, 2, 3], [0, 1, 2, 3]), method=method)
    assert len(messages) == warns
    assert all("method.suspected" in message for message in messages)


def test_a_run_logs_the_columns_that_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ["a,admitted,label"]
    for number in range(40):
        day = number % 9 + 1
        lines.append(f"{number},2024-01-{day:02d},{number % 2}")
    csv = tmp_path / "mine.csv"
    csv.write_text("\n".join(lines) + "\n")
    fedstill.run(
        toys.toy(data=str(csv), model="logistic", partition="iid", measure=()), tmp_path / "run"
    )

    assert "data: left out: admitted (date)" in caplog.messages


def test_a_run_of_one_class_is_refused() -> None:
    with pytest.raises(DataError, match="'ant'"):
        _warnings(_data([0], [0], names=("ant",)))


def test_the_absence_of_test_examples_is_warned_of() -> None:
    data = _data([0, 1], [0, 1], names=("ant", "bee"))
    none = replace(data, test=data.test.take(torch.zeros(0, dtype=torch.int64)))
    assert any("no test examples" in text for text in _warnings(none))


def test_pictures_that_lie_in_no_folder_of_a_class_are_refused(tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    split = tmp_path / "split"
    for folder in (flat, split / "train", split / "test"):
        _save_images(folder, 3)

    with pytest.raises(DataError, match=rf"{flat}/0.png .*flat/cat/0\.png"):
        load_dataset(str(flat))
    with pytest.raises(DataError, match=rf"{split}/test/0.png .*split/cat/0\.png"):
        load_dataset(str(split))


def _save_images(folder: Path, count: int) -> None:
    """Save grey images in a new folder."""
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("L", (4, 4), number).save(folder / f"{number}.png")


def test_classes_may_have_the_names_of_splits(tmp_path: Path) -> None:
    _save_images(tmp_path / "train", 10)
    _save_images(tmp_path / "tram", 10)
    assert load_dataset(str(tmp_path)).classes == ("train", "tram")


def test_a_smaller_min_size_is_advised_only_where_there_is_one() -> None:
    with pytest.raises(InfeasiblePartition, match="lower clients"):
        check_enough_examples("iid", 3, 4)
    with pytest.raises(InfeasiblePartition, match="min_size"):
        check_enough_examples("iid", 30, 4, 10)


def test_what_an_own_file_imports_is_not_proposed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fedstill import Method\n\nclass Mine(Method):\n    pass\n"
    )

    with pytest.raises(UnknownName) as caught:
        lookup("method", "mine.py:Nine", tmp_path)
    assert "Mine" in str(caught.value)
    assert "Method" not in str(caught.value)


def test_faulty_seeds_are_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["compare", "--methods", "fedavg", "--seeds", "1..3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--seeds" in line
    assert "'1..3'" in line


def test_a_number_that_is_too_large_is_named_with_its_column(tmp_path: Path) -> None:
    rows = "\n".join(f"{i},0.5,{i % 2}" for i in range(20))
    (tmp_path / "t.csv").write_text(f"a,b,label\n{rows}\n1e300,2,1\n")
    with pytest.raises(DataError, match=r"column 'a' .*1e\+300"):
        load_dataset(str(tmp_path / "t.csv"))


def test_a_learning_rate_of_sgd_in_a_stage_of_adam_is_warned_of() -> None:
    data = _data([0, 1, 2, 3], [0, 1, 2, 3])
    (warning,) = _warnings(
        data, method="ft_fedavg", plan={"train": {"optimiser": "sgd"}, "lr": 0.05}
    )
    assert "plan.finetune.lr = 0.05" in warning
    assert "plan.finetune.optimiser = 'sgd'" in warning
    assert _warnings(data, method="ft_fedavg", plan={"lr": 0.005}) == []
    assert _warnings(data, method="ft_fedavg", plan={"lr": 0.05, "optimiser": "sgd"}) == []


ADAM = {"optimiser": "adam"}


@pytest.mark.parametrize(
    ("plan", "key"),
    [
        ({**ADAM, "momentum": 0.5}, "momentum"),
        ({"lr_end": 0.1}, "lr_end"),
        ({"lr_rounds": 4}, "lr_rounds"),
        ({"lr_schedule": "step", "lr_decay": 0.5, "lr_end": 0.1}, "lr_end"),
        ({"lr_schedule": "cosine", "lr_decay": 0.5}, "lr_decay"),
    ],
)
def test_values_of_a_plan_without_effect_are_named(plan: dict[str, object], key: str) -> None:
    (warning,) = _warnings(_data([0, 1, 2, 3], [0, 1, 2, 3]), plan=plan)
    assert f"plan.train.{key} = {plan[key]}" in warning


@pytest.mark.parametrize(
    "plan",
    [
        {**ADAM, "momentum": 0.0},
        {"lr_schedule": "cosine", "lr_end": 0.1, "lr_rounds": 4},
        {"lr_schedule": "cosine"},
        {"lr_schedule": "step", "lr_decay": 0.5, "lr_step": 2},
        {"momentum": 0.9},
    ],
)
def test_values_of_a_plan_with_an_effect_cause_no_warning(plan: dict[str, object]) -> None:
    assert _warnings(_data([0, 1, 2, 3], [0, 1, 2, 3]), plan=plan) == []


def test_a_cosine_that_ends_before_the_last_round_causes_a_warning() -> None:
    data = _data([0, 1, 2, 3], [0, 1, 2, 3])
    plan = {"lr_schedule": "cosine", "lr_rounds": 4}
    (warning,) = _warnings(data, plan=plan, rounds=6)
    assert "plan.train.lr_rounds = 4" in warning
    assert _warnings(data, plan=plan, rounds=4) == []
    # The schedule restarts with each task, and a task has three rounds.
    assert _warnings(data, plan=plan, rounds=6, stream={"kind": "drift", "tasks": 2}) == []


@dataclass(frozen=True)
class DecaysWithMomentum(FedAvg):
    """FedAvg with settings of its own."""

    plans: ClassVar[Mapping[str, Plan]] = {"train": Plan(momentum=0.9, lr_decay=0.99)}


@pytest.mark.parametrize("plan", [{"lr_schedule": "cosine"}, ADAM])
def test_values_that_a_method_sets_cause_no_warning(plan: dict[str, object]) -> None:
    data = _data([0, 1, 2, 3], [0, 1, 2, 3])
    assert _warnings(data, method=DecaysWithMomentum(), plan=plan) == []


def test_a_value_for_all_stages_causes_no_warning_if_it_has_an_effect_in_one() -> None:
    plans = {"first": Plan(optimiser="adam", momentum=0.9), "second": Plan(momentum=0.9)}
    defaults = {"first": Plan(optimiser="adam"), "second": Plan()}
    assert not list(ineffective_plan_keys(plans, defaults))
    alone = {"first": plans["first"]}
    assert len(list(ineffective_plan_keys(alone, defaults))) == 1


def test_a_step_without_a_schedule_in_steps_is_refused() -> None:
    with pytest.raises(WrongConfig) as caught:
        resolve(toys.toy(plan={"lr_step": 3, "lr_decay": 0.5}))
    assert caught.value.problems[0].key == "plan.train.lr_step"
