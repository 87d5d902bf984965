"""Outputs that take no part in training: losses as if their columns were gone, no gradient, and
finite everywhere.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import toys
from fedstill import losses
from fedstill.core.records import OFF, TrainingStart
from fedstill.engines.step import BatchStep, Networks, StepInputs
from fedstill.models.contract import initial, module, spec_for
from fedstill.running.journal import read_journal
from fedstill.running.runner import run

SPEC = spec_for("logistic", (1, 4, 4), 5, {})
ON = torch.tensor([True, False, True, True, False])
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(6, 1, 4, 4, generator=DRAW)
Y = torch.tensor([0, 2, 3, 0, 2, 3])
TEACHER = initial(SPEC, 3)


def step(head: torch.Tensor | None) -> BatchStep:
    """The step of one batch, with a teacher, in which some outputs take part, or all."""
    params = {k: v.clone().requires_grad_() for k, v in initial(SPEC, 1).items()}
    networks = Networks(
        model=SPEC,
        module=module(SPEC),
        teacher_table=lambda *_: None,
        precision="fp32",
        teacher_precision="fp32",
        device=torch.device("cpu"),
    )
    index = torch.arange(len(Y))
    inputs = StepInputs(x=X, y=Y, positions=index, rows=index, mask=None, epoch=0)
    start = TrainingStart(params, {"old": TEACHER}, head=head)
    return BatchStep(networks, start, params, inputs)


def test_nothing_is_masked_where_all_outputs_take_part() -> None:
    unmasked = step(None)
    assert unmasked.logits() is unmasked.logits(raw=True)
    all_on = step(torch.ones(5, dtype=torch.bool))
    torch.testing.assert_close(all_on.logits(), unmasked.logits(), rtol=0, atol=0)


def test_logits_and_teachers_are_off_where_they_take_no_part_and_plain_where_asked() -> None:
    masked = step(ON)
    logit_pairs = {
        "student": (masked.logits(), masked.logits(raw=True)),
        "teacher": (masked.teacher("old"), masked.teacher("old", raw=True)),
    }
    for logits, plain in logit_pairs.values():
        assert torch.equal(logits[:, ON], plain[:, ON])
        assert (logits[:, ~ON] == OFF).all()
        assert (plain != OFF).all()


def test_losses_are_those_without_the_columns_and_their_gradients_are_zero() -> None:
    step_of_some = step(ON)
    masked_logits = step_of_some.logits()
    masked = losses.cross_entropy(masked_logits, Y)
    masked = masked + losses.kd(masked_logits, step_of_some.teacher("old"), 2.0)

    # The same losses of the columns that take part; their labels count the columns anew.
    new_labels = torch.tensor([0, -1, 1, 2, -1])[Y]
    logits = step_of_some.logits(raw=True)[:, ON]
    teacher_logits = step_of_some.teacher("old", raw=True)[:, ON]
    removed = losses.cross_entropy(logits, new_labels)
    removed = removed + losses.kd(logits, teacher_logits, 2.0)
    torch.testing.assert_close(masked, removed, rtol=1e-6, atol=1e-6)

    masked.sum().backward()
    grad = step_of_some.params["head.weight"].grad
    assert grad is not None
    assert (grad[~ON] == 0).all()
    assert (grad[ON] != 0).any()


@pytest.mark.parametrize("tau", [0.1, 1.0, 20.0])
def test_distillation_is_finite_under_a_mask(tau: float) -> None:
    masked = step(ON)
    logits = masked.logits()
    teacher_logits = masked.teacher("old")
    assert losses.kd(logits, teacher_logits, tau).isfinite().all()
    for loss in (losses.nckd, losses.nckd_slice, losses.nckd_zero, losses.tckd):
        assert loss(logits, teacher_logits, Y, tau).isfinite().all()


@pytest.mark.parametrize("name", ["fedavg", "metafed"])
def test_an_output_that_takes_no_part_is_no_answer_where_epochs_are_scored(
    name: str, tmp_path: Path
) -> None:
    """A model of the first task is tested among the second one's classes, of which it has seen
    none.
    """
    plan = {"epochs": 2, "batch": 20, "lr": 1e-5, "validation": 0.3, "keep": "best"}
    stages = ("train",)
    if name == "metafed":
        stages = ("warm_up", "train", "personalise")
    experiment = toys.toy(
        name,
        plan=dict.fromkeys(stages, plan),
        topology={"clients": 3},
        partition="iid",
        rounds=2,
        stream={"kind": "classes", "tasks": 2, "order": [[0, 1, 4], [2, 3]], "head": "task"},
        measure=(),
    )

    run(experiment, tmp_path / "run", toys.blobs())

    scores = []
    for event in read_journal(tmp_path / "run" / "journal.jsonl"):
        if event["event"] == "client" and event["round"] == 2:
            scores += event["scores"]
    assert scores
    assert min(scores) > 0.2, "one of two is right by chance"
