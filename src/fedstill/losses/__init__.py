"""Losses: pure functions of logits that give one value per example, never a mean; the engine reduces.

Prediction (student) first, target (teacher) second, as in ``torch.nn.functional``. All of them stay in log space, run
under ``torch.func.vmap``, keep the student's dtype, and leave it to the caller to keep gradients out of teachers.
"""

from fedstill.losses.classification import cross_entropy
from fedstill.losses.contrastive import model_contrast
from fedstill.losses.decoupled import nckd, nckd_slice, nckd_zero, target_kl, tckd
from fedstill.losses.distillation import kd, masked_kl, other_mse, standardize
from fedstill.losses.penalties import proximal

__all__ = [
    "cross_entropy",
    "kd",
    "masked_kl",
    "model_contrast",
    "nckd",
    "nckd_slice",
    "nckd_zero",
    "other_mse",
    "proximal",
    "standardize",
    "target_kl",
    "tckd",
]
