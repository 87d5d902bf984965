"""GLFC's clients: the loss as its code has it, written out anew, and what a run of it keeps and
sends.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from over_tasks import experiment_over_tasks
from scipy.special import expit
from single_step import LOGISTIC, logits_by_hand, terms_of

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.records import TrainingStart
from fedstill.methods.glfc_local import GLFCLocal, LocalGLFC
from fedstill.models.contract import initial
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

STREAM = {"kind": "classes", "tasks": 3, "head": "seen"}

SEEN = [0, 2, 3]
"""The classes that have come."""

LABELS = np.array([3, 2, 0, 3, 0, 2])
TARGETS = np.eye(3)[[SEEN.index(label) for label in LABELS]]
"""One column for each class that has come."""


def binary_cross_entropy(z: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The loss of each example and class."""
    return -(targets * np.log(expit(z)) + (1 - targets) * np.log(expit(-z)))


def example_weights(z: np.ndarray, is_old: np.ndarray) -> np.ndarray:
    """How far each label's probability is from 1, relative to the mean of its group of classes."""
    gaps = 1 - expit(z)[np.arange(6), TARGETS.argmax(1)]
    weights = np.zeros(6)
    for group in (is_old, ~is_old):
        if group.any():
            weights[group] = gaps[group] / gaps[group].mean()
    return weights


def start_of(has_old_model: bool, class_weights: np.ndarray | None) -> TrainingStart:
    """A client's start; with an old model, class 0 is an old one."""
    teachers = {}
    is_old_class = torch.zeros(5, dtype=torch.bool)
    if has_old_model:
        teachers["old"] = initial(LOGISTIC, 2)
        is_old_class[0] = True
    is_seen = torch.tensor([True, False, True, True, False])
    constants = {"old": is_old_class, "active": is_seen}
    start = TrainingStart(initial(LOGISTIC, 1), teachers, constants=constants)
    if class_weights is None:
        return start
    return replace(start, class_weights=torch.tensor(class_weights, dtype=torch.float32))


@pytest.mark.parametrize(
    "class_weights", [None, np.array([0.5, 1.0, 0.0, 2.0, 1.0])], ids=["unweighted", "weighted"]
)
@pytest.mark.parametrize("has_old_model", [False, True])
def test_the_loss_by_hand(has_old_model: bool, class_weights: np.ndarray | None) -> None:
    """Outputs of the classes that have come, new and old; the weights by group of classes, in each
    batch.
    """
    x = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    start = start_of(has_old_model, class_weights)

    terms = terms_of(LocalGLFC(GLFCLocal(), 2), start, x, torch.from_numpy(LABELS))

    z = logits_by_hand(start.params, x)[:, SEEN]
    is_old = (LABELS == 0) & has_old_model
    label_weights = np.ones(6)
    if class_weights is not None:
        label_weights = class_weights[LABELS]
    losses = example_weights(z, is_old)[:, None] * binary_cross_entropy(z, TARGETS)
    expected = label_weights * losses.mean(1)
    if not has_old_model:
        assert set(terms) == {"bce"}
        np.testing.assert_allclose(terms["bce"].detach().numpy(), expected, rtol=1e-4)
        return

    np.testing.assert_allclose(terms["bce"].detach().numpy(), 0.5 * expected, rtol=1e-4)
    # Outputs of new classes are compared with labels, the old class with the old model.
    targets = TARGETS.copy()
    targets[:, 0] = expit(logits_by_hand(start.teachers["old"], x)[:, 0])
    column_weights = np.stack([np.ones(6), label_weights, label_weights], axis=1)
    expected = (column_weights * binary_cross_entropy(z, targets)).mean(1)
    np.testing.assert_allclose(terms["old"].detach().numpy(), 0.5 * expected, rtol=1e-4)


def test_clients_keep_examples_and_get_the_old_model_from_the_second_task_on(
    tmp_path: Path,
) -> None:
    """The old model doubles what they are sent."""
    experiment = experiment_over_tasks({"name": "glfc_local", "size": 9}, stream=STREAM)

    run(experiment, tmp_path / "run", toys.blobs())

    events = [e for e in read_journal(tmp_path / "run/journal.jsonl") if e["event"] == "client"]
    numbers = [e["kept"] for e in events if e["name"] == "remember" and "kept" in e]
    assert numbers == [9] * 12
    training = [event for event in events if event["name"] == "train"]
    rounds_with_teacher = {e["round"] for e in training if e.get("teachers") == ["old"]}
    assert rounds_with_teacher == {2, 3}
    (bytes_at_first,) = {event["bytes_down"] for event in training if event["round"] == 1}
    (bytes_later,) = {event["bytes_down"] for event in training if event["round"] == 2}
    assert bytes_later == 2 * bytes_at_first


def test_weights_of_other_methods_are_refused() -> None:
    toy = toys.toy({"name": "glfc_local", "alpha": 0.5}, stream=STREAM)
    with pytest.raises(IncompatibleMethod, match="weights"):
        prepare(resolve(toy), toys.blobs())
