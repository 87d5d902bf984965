"""Losses: pure functions of logits that return one value per example. The engine takes the mean.

The prediction (student) is the first argument and the target (teacher) the second, as in
``torch.nn.functional``. All losses compute in log space, support ``torch.func.vmap`` and return the
student's dtype. The caller detaches the teacher's logits.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstill.losses.distillation import (
        kd,
        minority_kd,
        nckd,
        nckd_slice,
        nckd_zero,
        other_mse,
        target_kl,
        tckd,
    )
    from fedstill.losses.several_teachers import (
        confidence_weights,
        entropy_weights,
        logit_error,
        masked_ce,
        masked_kl,
        multi_kd,
        multi_nckd,
        multi_tckd,
        soft_cross_entropy,
        standardize,
    )
    from fedstill.losses.without_teacher import (
        adjusted_cross_entropy,
        cross_entropy,
        model_contrast,
        proximal,
        quadratic,
    )

__all__ = [
    "adjusted_cross_entropy",
    "confidence_weights",
    "cross_entropy",
    "entropy_weights",
    "kd",
    "logit_error",
    "masked_ce",
    "masked_kl",
    "minority_kd",
    "model_contrast",
    "multi_kd",
    "multi_nckd",
    "multi_tckd",
    "nckd",
    "nckd_slice",
    "nckd_zero",
    "other_mse",
    "proximal",
    "quadratic",
    "soft_cross_entropy",
    "standardize",
    "target_kl",
    "tckd",
]

_MODULES = ("without_teacher", "distillation", "several_teachers")
"""The modules of this package; the most frequently used ones come first."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module_name in _MODULES:
            module = importlib.import_module(f"fedstill.losses.{module_name}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'fedstill.losses' has no attribute {name!r}")
