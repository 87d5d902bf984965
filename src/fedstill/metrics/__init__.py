"""Metrics: functions of counts and accuracies by class, as tensors, arrays or lists.

Accuracies and shares are in [0, 1]. The accuracy of a class without test examples is NaN (``None``
in a journal). Metrics ignore such classes, and return NaN if there are no others.
"""

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
