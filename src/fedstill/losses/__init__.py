"""Losses: pure functions of logits that give one value per example, never a mean; the engine
reduces.

Prediction (student) first, target (teacher) second, as in ``torch.nn.functional``. All of them stay
in log space, run under ``torch.func.vmap``, keep the student's dtype, and leave it to the caller to
keep gradients out of teachers.
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
