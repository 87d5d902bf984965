"""One step of a client's training on a logistic regression, without an engine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedstill.core.method import ClientWork
from fedstill.core.records import TrainingStart
from fedstill.engines.step import BatchStep, Networks, StepInputs
from fedstill.models.contract import module, spec_for

LOGISTIC = spec_for("logistic", (1, 4, 4), 5, {})
"""Its entries are ``head.weight`` and ``head.bias``."""


def terms_of(work: ClientWork, start: TrainingStart, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The terms of an objective on one batch, at the parameters that training starts from."""
    networks = Networks(
        model=LOGISTIC,
        module=module(LOGISTIC),
        teacher_table=lambda *_: None,
        precision="fp32",
        teacher_precision="fp32",
        device=torch.device("cpu"),
    )
    index = torch.arange(len(y))
    inputs = StepInputs(x=x, y=y, positions=index, rows=index, mask=None, epoch=0)
    return work.terms(BatchStep(networks, start, start.params, inputs), start)


def logits_by_hand(params: Mapping[str, Tensor], x: Tensor) -> np.ndarray:
    """The logits of a logistic regression, in float64."""
    weight = params["head.weight"].double().numpy()
    bias = params["head.bias"].double().numpy()
    return np.asarray(x.flatten(1).double().numpy() @ weight.T + bias)
