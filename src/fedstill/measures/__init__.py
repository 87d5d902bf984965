"""Measures: numbers that a run records in its journal in addition to accuracy and forgetting.

``base`` defines the interface of a measure and the objects that it may use, and ``choice`` the
selection of a run's measures. Each other module has one measure, or several of one kind. The forms
of their lists are here, because a journal is read without torch.
"""

import functools
from collections.abc import Mapping

from fedstill import manifest
from fedstill.manifest import ListForm, ListForms

SHARES_BY_CLASS = ListForm(("class",), "numbers or null")
"""A share for each class; null for a class without test examples."""

LIST_FORMS: Mapping[str, ListForms] = {
    "alignment": {
        "layers/*/clients": ListForm(("clients",)),
    },
    "boundaries": {
        "query": ListForm(("point",), "classes"),
        "own": ListForm(("point",), "classes"),
        "labels": ListForm(("point",), "classes"),
        "x": ListForm(("labels",)),
        "y": ListForm(("labels",)),
        "x_range": ListForm((2,)),
        "y_range": ListForm((2,)),
        # A class for each point of a grid with ``measures.features.STEPS`` points per side.
        "plane": ListForm((48, 48), "classes"),
        "accuracy": SHARES_BY_CLASS,
    },
    "chain": {
        "class_accuracy": SHARES_BY_CLASS,
    },
    "contributions": {
        "before": SHARES_BY_CLASS,
        "after": SHARES_BY_CLASS,
        "parts/*": SHARES_BY_CLASS,
        "classes": ListForm(("point",), "classes", is_optional=True),
        "values": ListForm(("classes", "clients"), "numbers or null", is_optional=True),
        "gap": ListForm(("classes", "[clients]"), "numbers or null", is_optional=True),
        "nobody": ListForm(("classes",), "numbers or null", is_optional=True),
        "drawn": ListForm(("class",), "numbers or null", is_optional=True),
        "tasks": ListForm(("clients",), "counts", is_optional=True),
        "had": ListForm(("clients", "class"), "counts", is_optional=True),
    },
    "divergence": {
        "l1": ListForm(("clients",), "numbers or null"),
        "l2": ListForm(("clients",), "numbers or null"),
        "distance": ListForm(("clients",), "numbers or null"),
    },
    "landscape": {
        "axis": ListForm(("point",)),
        "scales": ListForm(("point",)),
        "models/*/random": ListForm(("axis", "axis"), "numbers or null"),
        "models/*/hessian": ListForm(("axis", "axis"), "numbers or null"),
        "models/*/eigenvalues": ListForm((2,), "numbers or null"),
        "models/*/noise": ListForm(("scales",), "numbers or null"),
    },
    "sphere": {
        "counts": ListForm(("models", "class", "point"), "counts"),
    },
    "tsne": {
        "labels": ListForm(("point",), "classes"),
        "x": ListForm(("models", "labels")),
        "y": ListForm(("models", "labels")),
    },
    "units": {
        "classes": ListForm(("models", "point"), "classes"),
    },
}
"""The lists that the measures of this package record."""


@functools.cache
def list_forms(measure: str) -> ListForms:
    """The lists that a measure records; empty if they are unknown, as for a user's own measure."""
    return {**LIST_FORMS, **manifest.list_forms()}.get(measure, {})
