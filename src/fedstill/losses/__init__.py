"""Losses: pure functions of logits that return one value per example. The engine takes the mean.

The prediction (student) is the first argument and the target (teacher) the second, as in
``torch.nn.functional``. All losses compute in log space, support ``torch.func.vmap`` and return the
student's dtype. The caller detaches the teacher's logits.
"""

from __future__ import annotations

import importlib
import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstill.losses.decoupled import minority_kd as minority_kd
    from fedstill.losses.decoupled import nckd_slice as nckd_slice
    from fedstill.losses.decoupled import nckd_zero as nckd_zero
    from fedstill.losses.decoupled import target_kl as target_kl
    from fedstill.losses.decoupled import tckd as tckd
    from fedstill.losses.penalties import model_contrast as model_contrast
    from fedstill.losses.penalties import proximal as proximal
    from fedstill.losses.penalties import quadratic as quadratic
    from fedstill.losses.several_teachers import confidence_weights as confidence_weights
    from fedstill.losses.several_teachers import entropy_weights as entropy_weights
    from fedstill.losses.several_teachers import logit_error as logit_error
    from fedstill.losses.several_teachers import masked_ce as masked_ce
    from fedstill.losses.several_teachers import masked_kl as masked_kl
    from fedstill.losses.several_teachers import multi_kd as multi_kd
    from fedstill.losses.several_teachers import multi_nckd as multi_nckd
    from fedstill.losses.several_teachers import multi_tckd as multi_tckd
    from fedstill.losses.several_teachers import soft_cross_entropy as soft_cross_entropy
    from fedstill.losses.several_teachers import standardize as standardize
    from fedstill.losses.targets import adjusted_cross_entropy as adjusted_cross_entropy
    from fedstill.losses.targets import cross_entropy as cross_entropy
    from fedstill.losses.targets import kd as kd
    from fedstill.losses.targets import nckd as nckd
    from fedstill.losses.targets import other_mse as other_mse

_NAMES = {
    "targets": ("adjusted_cross_entropy", "cross_entropy", "kd", "nckd", "other_mse"),
    "decoupled": ("minority_kd", "nckd_slice", "nckd_zero", "target_kl", "tckd"),
    "penalties": ("model_contrast", "proximal", "quadratic"),
    "several_teachers": (
        "confidence_weights",
        "entropy_weights",
        "logit_error",
        "masked_ce",
        "masked_kl",
        "multi_kd",
        "multi_nckd",
        "multi_tckd",
        "soft_cross_entropy",
        "standardize",
    ),
}
"""The names of each module. A module is imported when one of its names is first used."""

__all__ = sorted(itertools.chain.from_iterable(_NAMES.values()))


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"fedstill.losses.{module}"), name)
    raise AttributeError(f"module 'fedstill.losses' has no attribute {name!r}")
