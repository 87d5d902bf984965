"""What the server's models are worth on the common test set, by class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedstill.data.views import SiteViews
from fedstill.engines.passes import correct_by_class
from fedstill.records import Examples

Counting = Callable[[Callable[[Tensor], Tensor], Examples], Tensor]


def tests_by_class(sites: SiteViews, classes: int) -> list[int]:
    """Test examples by class (C,); zeros without a common test set."""
    test = sites.common_test
    return (
        [0] * classes if test is None else torch.bincount(test.labels, minlength=classes).tolist()
    )


def of_some_clients(name: str) -> bool:
    """Whether a predictor's name ends with a number: then it answers for a client or a group, not
    for all.

    >>> of_some_clients("cluster 0"), of_some_clients("client 3"), of_some_clients("global")
    (True, True, False)
    """
    return name.rpartition(" ")[2].isdecimal()


def evaluated(
    predictors: Mapping[str, Callable[[Tensor], Tensor]],
    sites: SiteViews,
    classes: int,
    right_of: Counting | None = None,
) -> dict[str, Any]:
    """``accuracy`` and ``class_accuracy`` (C,) of the first predictor, those of further ones by
    name in ``others``.

    right_of: counts a predictor's right answers by class; unset, in a pass of its own. Models of
    some clients ("client 3", "cluster 0") all stand in ``others``: none of them is the
    federation's. None where there is no test set, or no test example of a class.
    """
    test, totals = sites.common_test, tests_by_class(sites, classes)
    if test is None or not predictors:
        return {"accuracy": None, "class_accuracy": [None] * classes}
    each = {}
    for name, predict in predictors.items():
        right = (
            right_of(predict, test)
            if right_of
            else correct_by_class(predict, test, sites.inputs, classes)
        )
        by_class = [r / t if t else None for r, t in zip(right.tolist(), totals, strict=True)]
        each[name] = {"accuracy": int(right.sum()) / sum(totals), "class_accuracy": by_class}
    first, *others = each
    if of_some_clients(first):
        return {"accuracy": None, "class_accuracy": [None] * classes, "others": each}
    return {**each[first], **({"others": {n: each[n] for n in others}} if others else {})}
