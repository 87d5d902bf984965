"""Losses: pure functions of logits that return one value per example. The engine takes the mean.

The prediction (student) is the first argument and the target (teacher) the second, as in
``torch.nn.functional``. All losses compute in log space, support ``torch.func.vmap`` and return the
student's dtype. The caller detaches the teacher's logits.
"""

from fedstill.losses.distillation import (
    confidence_weights,
    entropy_weights,
    kd,
    logit_error,
    masked_ce,
    masked_kl,
    minority_kd,
    multi_kd,
    multi_nckd,
    multi_tckd,
    nckd,
    nckd_slice,
    nckd_zero,
    other_mse,
    soft_cross_entropy,
    standardize,
    target_kl,
    tckd,
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
