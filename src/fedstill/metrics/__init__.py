"""Metrics: formulas that give numbers from class-wise counts and accuracies, taken from tensors,
arrays or lists.

Accuracies and shares are in [0, 1]. A class without a test example has accuracy NaN (or ``None``,
as a journal writes it): metrics leave it out, and give NaN where nothing is left.
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
