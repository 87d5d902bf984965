"""What data cannot show is said before a run: one class, classes without training or test examples,
no tests.
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


def _said(data: Dataset, **changes: object) -> list[str]:
    what = {"model": "logistic", "partition": "iid", "measure": (), **changes}
    return list(setting_warnings(prepare(resolve(toys.toy(**what)), data)))


def test_data_with_all_classes_are_passed_over() -> None:
    assert _said(_data([0, 1, 2, 3], [0, 1, 2, 3])) == []


def test_classes_that_are_not_trained_or_not_tested_are_named() -> None:
    (untrained,) = _said(_data([0, 1, 2], [0, 1, 2, 3]))
    assert "training" in untrained
    assert "'dog'" in untrained
    (untested,) = _said(_data([0, 1, 2, 3], [0, 1]))
    assert "test" in untested
    assert "'cat', 'dog'" in untested


def test_classes_without_any_example_are_named_and_that_labels_count_from_0() -> None:
    (numbered,) = _said(_data([1, 2], [1, 2], names=("0", "1", "2")))
    assert "'0'" in numbered
    assert "begin at 1" in numbered
    (named,) = _said(_data([0, 3], [0, 3]))
    assert "'bee', 'cat'" in named
    (skipped,) = _said(_data([0, 1, 3], [0, 1, 3], names=("0", "1", "2", "3")))
    assert "'2'" in skipped
    assert "4 classes" in skipped


def test_classes_that_are_alike_but_for_blanks_and_capitals_are_named() -> None:
    first, second = _said(_data([0, 1, 2, 3], [0, 1, 2, 3], names=("yes", " yes", "no", "No ")))
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
    said = _said(_data([0, 1, 2, 3], [0, 1, 2, 3]), method=method)
    assert ["method.suspected" in warning for warning in said] == [True] * warns


def test_a_run_says_which_columns_were_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = "\n".join(f"{i},2024-01-{i % 9 + 1:02d},{i % 2}" for i in range(40))
    (tmp_path / "mine.csv").write_text(f"a,admitted,label\n{rows}\n")
    what = {
        "data": str(tmp_path / "mine.csv"),
        "model": "logistic",
        "partition": "iid",
        "measure": (),
    }
    fedstill.run(toys.toy(**what), tmp_path / "run")
    assert "data: left out: admitted (date)" in caplog.messages


def test_a_run_of_one_class_is_refused() -> None:
    with pytest.raises(DataError, match="'ant'"):
        _said(_data([0], [0], names=("ant",)))


def test_without_test_examples_it_is_said_that_nothing_is_measured() -> None:
    data = _data([0, 1], [0, 1], names=("ant", "bee"))
    none = replace(data, test=data.test.take(torch.zeros(0, dtype=torch.int64)))
    assert any("no test examples" in text for text in _said(none))


def test_pictures_that_lie_in_no_folder_of_a_class_are_refused(tmp_path: Path) -> None:
    flat, split = tmp_path / "flat", tmp_path / "split"
    for folder in (flat, split / "train", split / "test"):
        folder.mkdir(parents=True)
        for i in range(3):
            Image.new("L", (4, 4), i).save(folder / f"{i}.png")
    for place, where in ((flat, "0.png"), (split, "test/0.png")):
        with pytest.raises(
            DataError,
            match=rf"{place / where} .*{place.name}/cat/0\.png",
        ):
            load_dataset(str(place))


def test_classes_may_be_called_as_splits_are(tmp_path: Path) -> None:
    for name in ("train", "tram"):
        (tmp_path / name).mkdir()
        for i in range(10):
            Image.new("L", (4, 4), i).save(tmp_path / name / f"{i}.png")
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
    with pytest.raises(UnknownName) as said:
        lookup("method", "mine.py:Nine", tmp_path)
    assert "Mine" in str(said.value)
    assert "Method" not in str(said.value)


def test_seeds_that_are_none_are_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["compare", "--methods", "fedavg", "--seeds", "1..3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--seeds" in line
    assert "'1..3'" in line


def test_a_number_that_is_too_large_is_named_with_its_column(tmp_path: Path) -> None:
    rows = "\n".join(f"{i},0.5,{i % 2}" for i in range(20))
    (tmp_path / "t.csv").write_text(f"a,b,label\n{rows}\n1e300,2,1\n")
    with pytest.raises(DataError, match=r"column 'a' .*1e\+300"):
        load_dataset(str(tmp_path / "t.csv"))


def test_a_rate_of_sgd_that_reaches_a_stage_of_adam_is_said() -> None:
    data = _data([0, 1, 2, 3], [0, 1, 2, 3])
    (said,) = _said(data, method="ft_fedavg", plan={"train": {"optimiser": "sgd"}, "lr": 0.05})
    assert "plan.finetune.lr = 0.05" in said
    assert "plan.finetune.optimiser = 'sgd'" in said
    assert _said(data, method="ft_fedavg", plan={"lr": 0.005}) == []
    assert _said(data, method="ft_fedavg", plan={"lr": 0.05, "optimiser": "sgd"}) == []


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
    (warning,) = _said(_data([0, 1, 2, 3], [0, 1, 2, 3]), plan=plan)
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
    assert _said(_data([0, 1, 2, 3], [0, 1, 2, 3]), plan=plan) == []


@dataclass(frozen=True)
class DecaysWithMomentum(FedAvg):
    """FedAvg with settings of its own."""

    plans: ClassVar[Mapping[str, Plan]] = {"train": Plan(momentum=0.9, lr_decay=0.99)}


@pytest.mark.parametrize("plan", [{"lr_schedule": "cosine"}, ADAM])
def test_values_that_a_method_sets_cause_no_warning(plan: dict[str, object]) -> None:
    data = _data([0, 1, 2, 3], [0, 1, 2, 3])
    assert _said(data, method=DecaysWithMomentum(), plan=plan) == []


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
