"""GLFC's clients: the loss as its code has it, written out anew, and what a run of it keeps and
sends.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import expit

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.records import TrainingStart
from fedstill.engines.step import BatchStep, Networks, StepInputs
from fedstill.methods.glfc_local import GLFCLocal, LocalGLFC
from fedstill.models.contract import initial, module, spec_for
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

STREAM = {"kind": "classes", "tasks": 3, "head": "seen"}


@pytest.mark.parametrize("class_weights", [None, (0.5, 1.0, 0.0, 2.0, 1.0)])
@pytest.mark.parametrize("first", [True, False])
def test_the_loss_by_hand(first: bool, class_weights: tuple[float, ...] | None) -> None:
    """Outputs of the classes that have come, new and old; the weights by group of classes, in each
    batch.
    """
    spec, draw = spec_for("logistic", (1, 4, 4), 5, {}), torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 1, 4, 4, generator=draw), torch.tensor([3, 2, 0, 3, 0, 2])
    new, before = initial(spec, 1), initial(spec, 2)
    old = torch.tensor([not first, False, False, False, False])
    on = torch.tensor([True, False, True, True, False])
    carry = TrainingStart(
        new, {} if first else {"old": before}, constants={"old": old, "active": on}
    )
    of_labels = np.ones(6)
    if class_weights is not None:
        carry = replace(carry, class_weights=torch.tensor(class_weights))
        of_labels = np.array(class_weights)[y.numpy()]
    networks = Networks(spec, module(spec), lambda *_: None, "fp32", "fp32", torch.device("cpu"))
    index = torch.arange(6)
    terms = LocalGLFC(GLFCLocal(), 2).terms(
        BatchStep(networks, carry, new, StepInputs(x, y, index, index, None, 0)), carry
    )

    def logits(params: dict[str, torch.Tensor]) -> np.ndarray:
        w, b = (params[k].double().numpy() for k in ("head.weight", "head.bias"))
        return np.asarray(x.flatten(1).double().numpy() @ w.T + b)[:, [0, 2, 3]]

    z, target = logits(new), np.eye(3)[[[0, 2, 3].index(c) for c in y.tolist()]]
    g = np.abs(expit(z)[np.arange(6), target.argmax(1)] - 1)
    weight, is_old = np.zeros(6), np.array([c == 0 and not first for c in y.tolist()])
    for group in (is_old, ~is_old):
        weight[group] = g[group] / g[group].mean() if group.any() else 0.0

    def bce(t: np.ndarray) -> np.ndarray:
        return np.asarray(-(t * np.log(expit(z)) + (1 - t) * np.log(expit(-z))))

    now = of_labels * (weight[:, None] * bce(target)).mean(1)
    half = 1.0 if first else 0.5
    np.testing.assert_allclose(terms["bce"].detach().numpy(), half * now, rtol=1e-4)
    if first:
        assert set(terms) == {"bce"}
        return
    distilled = target.copy()
    distilled[:, :1] = expit(logits(before)[:, :1])
    # Outputs of new classes are compared with labels, the old class with the old model.
    losses = bce(distilled) * np.stack([np.ones(6), of_labels, of_labels], axis=1)
    np.testing.assert_allclose(terms["old"].detach().numpy(), 0.5 * losses.mean(1), rtol=1e-4)


def test_clients_keep_examples_and_get_the_old_model_from_the_second_task_on(
    tmp_path: Path,
) -> None:
    method = {"name": "glfc_local", "size": 9}
    run(toys.toy(method, partition={"kind": "iid"}, stream=STREAM), tmp_path / "run", toys.blobs())
    events = [e for e in read_journal(tmp_path / "run/journal.jsonl") if e["event"] == "client"]
    assert [e["kept"] for e in events if e["name"] == "remember" and "kept" in e] == [9] * 12
    trained = [e for e in events if e["name"] == "train"]
    assert {e["round"] for e in trained if e.get("teachers") == ["old"]} == {2, 3}
    assert len({e["bytes_down"] for e in trained if e["round"] == 1}) == 1
    assert {e["bytes_down"] for e in trained if e["round"] == 2} == {2 * trained[0]["bytes_down"]}


def test_weights_of_other_methods_are_refused() -> None:
    with pytest.raises(IncompatibleMethod, match="weights"):
        prepare(
            resolve(toys.toy({"name": "glfc_local", "alpha": 0.5}, stream=STREAM)), toys.blobs()
        )
