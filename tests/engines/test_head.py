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
X, Y = torch.randn(6, 1, 4, 4, generator=DRAW), torch.tensor([0, 2, 3, 0, 2, 3])
OTHER = initial(SPEC, 3)


def step(head: torch.Tensor | None) -> BatchStep:
    params = {k: v.clone().requires_grad_() for k, v in initial(SPEC, 1).items()}
    networks = Networks(SPEC, module(SPEC), lambda *_: None, "fp32", "fp32", torch.device("cpu"))
    index = torch.arange(len(Y))
    start = TrainingStart(params, {"old": OTHER}, head=head)
    return BatchStep(networks, start, params, StepInputs(X, Y, index, index, None, 0))


def test_nothing_is_masked_where_all_outputs_take_part() -> None:
    whole = step(None)
    assert whole.logits() is whole.logits(raw=True)
    torch.testing.assert_close(
        step(torch.ones(5, dtype=torch.bool)).logits(), whole.logits(), rtol=0, atol=0
    )


def test_logits_and_teachers_are_off_where_they_take_no_part_and_plain_where_asked() -> None:
    seen = step(ON)
    for logits, plain in (
        (seen.logits(), seen.logits(raw=True)),
        (seen.teacher("old"), seen.teacher("old", raw=True)),
    ):
        assert torch.equal(logits[:, ON], plain[:, ON])
        assert (logits[:, ~ON] == OFF).all()
        assert (plain != OFF).all()


def test_losses_are_those_without_the_columns_and_their_gradients_are_zero() -> None:
    seen, few = step(ON), torch.tensor([0, -1, 1, 2, -1])
    gone, old = seen.logits(raw=True)[:, ON], seen.teacher("old", raw=True)[:, ON]
    masked = losses.cross_entropy(seen.logits(), Y) + losses.kd(
        seen.logits(), seen.teacher("old"), 2.0
    )
    removed = losses.cross_entropy(gone, few[Y]) + losses.kd(gone, old, 2.0)
    torch.testing.assert_close(masked, removed, rtol=1e-6, atol=1e-6)
    masked.sum().backward()
    grad = seen.params["head.weight"].grad
    assert grad is not None
    assert (grad[~ON] == 0).all()
    assert (grad[ON] != 0).any()


@pytest.mark.parametrize("tau", [0.1, 1.0, 20.0])
def test_distillation_is_finite_under_a_mask(tau: float) -> None:
    seen = step(ON)
    logits, old = seen.logits(), seen.teacher("old")
    apart = (losses.nckd, losses.nckd_slice, losses.nckd_zero, losses.tckd)
    for values in (losses.kd(logits, old, tau), *(loss(logits, old, Y, tau) for loss in apart)):
        assert values.isfinite().all()


@pytest.mark.parametrize("name", ["fedavg", "metafed"])
def test_an_output_that_takes_no_part_is_no_answer_where_epochs_are_scored(
    name: str, tmp_path: Path
) -> None:
    """A model of the first task is tested among the second one's classes, of which it has seen
    none.
    """
    plan = {"epochs": 2, "batch": 20, "lr": 1e-5, "validation": 0.3, "keep": "best"}
    plans = {
        "fedavg": {"train": plan},
        "metafed": dict.fromkeys(("warm_up", "train", "personalise"), plan),
    }
    stream = {"kind": "classes", "tasks": 2, "order": [[0, 1, 4], [2, 3]], "head": "task"}
    start = {
        "topology": {"clients": 3},
        "partition": "iid",
        "rounds": 2,
        "stream": stream,
        "measure": (),
    }
    run(toys.toy(name, plan=plans[name], **start), tmp_path / "run", toys.blobs())
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    scores = [s for e in events if e["event"] == "client" and e["round"] == 2 for s in e["scores"]]
    assert scores
    assert min(scores) > 0.2, "one of two is right by chance"
