"""Metrics: functions of counts and accuracies by class, as tensors, arrays or lists.

Accuracies and shares are in [0, 1]. The accuracy of a class without test examples is NaN (``None``
in a journal). Metrics ignore such classes, and return NaN if there are no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedstill.metrics.accuracy import (
    average_accuracy,
    class_accuracy,
    consistency,
    forgetting,
    in_local_accuracy,
    out_local_accuracy,
    running_consistency,
    running_forgetting,
    top1,
    uniform_accuracy,
)

if TYPE_CHECKING:
    from fedstill.metrics.local_models import query_accuracy_gain, query_forgetting

__all__ = [
    "average_accuracy",
    "class_accuracy",
    "consistency",
    "forgetting",
    "in_local_accuracy",
    "out_local_accuracy",
    "query_accuracy_gain",
    "query_forgetting",
    "running_consistency",
    "running_forgetting",
    "top1",
    "uniform_accuracy",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from fedstill.metrics import local_models  # lazy, because it imports torch

        return getattr(local_models, name)
    raise AttributeError(f"module 'fedstill.metrics' has no attribute {name!r}")
