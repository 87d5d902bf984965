"""Attacks find what a model has memorised, and find nothing in a model that never had it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import toys
from fedstill.cli import call
from fedstill.core.errors import ConfigError
from fedstill.core.records import Examples
from fedstill.data.dataset import Dataset, DatasetInfo
from fedstill.report.page import page
from fedstill.running.runner import run
from fedstill.running.runs import groups
from fedstill.unlearning.request import UnlearningRequest, strategy_named
from fedstill.unlearning.strategy import OriginalRun
from fedstill.unlearning.unlearn import Unlearned, unlearn
from fedstill.unlearning.verification import Backdoor, MembershipTest, costs, relative
from journals import journal_events

CLIENT = 1
TARGET = 0
BACKDOOR = Backdoor(TARGET, size=3)

EXPERIMENT = toys.toy(
    rounds=4,
    topology={"clients": 3},
    partition={"kind": "iid", "seed": 7},
    plan={"epochs": 8, "batch": 10, "lr": 0.3},
    measure=(),
)
"""The split depends on no label, so that it is the same with a backdoor."""


def examples(labels: list[int]) -> Examples:
    """Examples whose only value is their position."""
    positions = torch.arange(len(labels), dtype=torch.float32)
    return Examples(positions[:, None], torch.tensor(labels))


def certain_of(*known: float) -> Any:
    """A model of two classes that is certain of the examples with these values only."""

    def logits(batch: Examples) -> Tensor:
        is_known = torch.isin(batch.values.flatten(), torch.tensor(known))
        certainty = 1.0 + 9.0 * is_known
        signs = torch.nn.functional.one_hot(batch.labels, 2)
        return certainty[:, None] * signs

    return logits


# ---- membership ----------------------------------------------------------------------------------


def test_the_classes_of_unseen_examples_are_those_of_the_forgotten_ones() -> None:
    test = MembershipTest.of(examples([0, 0, 0, 1]), examples([0, 1, 1, 1, 0]), classes=3)
    assert test is not None
    assert test.forgotten.labels.tolist() == test.unseen.labels.tolist() == [0, 0, 1]


def test_without_an_unseen_example_of_a_forgotten_class_there_is_no_test() -> None:
    assert MembershipTest.of(examples([0, 0]), examples([1]), classes=2) is None


def test_the_attack_finds_examples_that_a_model_is_certain_of() -> None:
    forgotten = examples([0, 0, 1, 1])
    unseen = replace(forgotten, values=forgotten.values + 100)
    test = MembershipTest(forgotten, unseen)
    assert test.measure(certain_of(0, 1, 2, 3))["auc"] == 1.0
    assert test.measure(certain_of())["auc"] == 0.5


def test_a_reference_shows_what_hard_examples_hide() -> None:
    """Both sets have an example that every model is certain of."""
    unseen = replace(examples([0, 0]), values=torch.tensor([[8.0], [9.0]]))
    test = MembershipTest(examples([0, 0]), unseen)
    exact = certain_of(1, 9)
    model = certain_of(0, 1, 9)
    numbers = test.measure(model, exact)
    assert numbers["auc"] == 0.75
    assert numbers["calibrated_auc"] == 0.75
    assert test.measure(exact, exact)["calibrated_auc"] == 0.5


# ---- a backdoor ----------------------------------------------------------------------------------


def test_a_trigger_changes_the_corner_and_the_label_of_the_named_images_only() -> None:
    data = toys.blobs()
    planted = BACKDOOR.planted(data, [1, 4])
    assert planted.train.labels[[1, 4]].tolist() == [TARGET, TARGET]
    assert (planted.train.values[[1, 4], :, -3:, -3:] == 255).all()
    assert torch.equal(planted.train.values[1, :, :1], data.train.values[1, :, :1])
    untouched = [0, 2, 3]
    assert torch.equal(planted.train.values[untouched], data.train.values[untouched])
    assert torch.equal(data.train.labels, toys.blobs().train.labels)


def test_a_backdoor_needs_images_and_a_class() -> None:
    data = toys.blobs()
    with pytest.raises(ConfigError, match="images"):
        BACKDOOR.planted(replace(data, about=DatasetInfo(kind="vector")), [0])
    with pytest.raises(ConfigError, match="99"):
        Backdoor(99).planted(data, [0])


def test_a_backdoor_needs_pixels_from_0_to_255_and_a_square_that_fits() -> None:
    data = toys.blobs()
    floats = replace(data.train, values=data.train.values / 255)
    with pytest.raises(ConfigError, match="float32"):
        BACKDOOR.planted(replace(data, train=floats), [0])
    for size in (0, 99):
        with pytest.raises(ConfigError, match=f"size {size}"):
            Backdoor(TARGET, size).planted(data, [0])


def test_the_success_of_a_trigger_is_counted_on_other_classes() -> None:
    data = toys.blobs()

    def always_target(batch: Examples) -> Tensor:
        assert (batch.labels != TARGET).all()
        assert (batch.values[..., -3:, -3:] == 255).all()
        return torch.tensor([1.0, 0, 0, 0, 0]).repeat(len(batch.labels), 1)

    assert BACKDOOR.success(always_target, data.test) == 1.0


# ---- a run with a backdoor -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Blobs in which one client's data have a backdoor."""
    folder = tmp_path_factory.mktemp("clean") / "run"
    clean = run(replace(EXPERIMENT, rounds=1, plan={"epochs": 1}), folder, toys.blobs())
    split = OriginalRun.of(clean.directory, toys.blobs()).prepared.sites.split
    assert split is not None
    return BACKDOOR.planted(toys.blobs(), split.positions[split.owners == CLIENT])


@pytest.fixture(scope="module")
def folder(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An original run with a backdoor, its retraining and a fine-tuning, for two seeds."""
    folder = tmp_path_factory.mktemp("unlearned")
    for seed in (7, 8):
        original = folder / f"original{seed}"
        run(replace(EXPERIMENT, seed=seed), original, data)
        exact = folder / f"exact{seed}"
        forget(original, "retraining", exact, data)
        forget(original, "fine_tuning", folder / f"tuned{seed}", data, exact)
    return folder


def forget(
    original: Path, strategy: str, out: Path, data: Dataset, exact: Path | None = None
) -> Unlearned:
    """Unlearn the client with the backdoor."""
    return unlearn(
        original,
        UnlearningRequest(clients=(CLIENT,)),
        strategy_named(strategy, {}),
        out,
        exact=exact,
        backdoor=BACKDOOR,
        data=data,
    )


def measured(folder: Path) -> dict[str, Any]:
    """The measurements in a certificate."""
    certificate = json.loads((folder / "certificate.json").read_text(encoding="utf-8"))
    return dict(certificate["measurements"])


def test_retraining_removes_a_backdoor(folder: Path) -> None:
    success = measured(folder / "exact7")["backdoor"]
    assert success["original"] > 0.3
    assert success["unlearned"] < 0.15


def test_costs_count_the_new_rounds_only(folder: Path) -> None:
    cost = measured(folder / "tuned7")["cost"]
    rounds = journal_events(folder / "tuned7", event="round")
    new_rounds = [event for event in rounds if event["round"] > 4]
    assert cost["rounds"] == len(new_rounds) == 5
    assert cost["bytes"] == sum(event["bytes_up"] + event["bytes_down"] for event in new_rounds)
    assert cost["relative_to_exact"]["bytes"] == 5 / 4
    assert costs(folder / "original7", folder / "original7")["rounds"] == 0


def test_a_cost_without_a_reference_is_left_out() -> None:
    assert relative({"bytes": 3, "rounds": 1}, {"bytes": 0, "rounds": 2}) == {"rounds": 0.5}


def test_the_report_has_a_line_for_each_model_and_intervals_over_seeds(folder: Path) -> None:
    text = page(groups([folder]))
    _, _, start = text.partition('id="unlearning"')
    section, _, _ = start.partition("<section")
    for name in ("original", "fine_tuning", "retraining", "exact"):
        assert f">{name}<" in section
    assert section.count(" to ") > 10


def test_a_report_without_a_certificate_has_no_section(folder: Path) -> None:
    assert 'id="unlearning"' not in page(groups([folder / "original7"]))


def test_the_command_prints_the_measurements_of_a_certificate(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["unlearn", str(folder / "tuned7"), "--check"]) == 0
    printed = capsys.readouterr().out
    assert "fine_tuning" in printed
    assert f"{100 * measured(folder / 'tuned7')['backdoor']['exact']:.2f}" in printed


def test_a_pack_keeps_the_certificate(folder: Path, tmp_path: Path) -> None:
    assert call(["pack", str(folder)]) == 0
    packed = folder.with_name(folder.name + ".runs.tar.xz")
    moved = tmp_path / packed.name
    packed.rename(moved)
    assert 'id="unlearning"' in page(groups([moved]))
