"""Experiments of one round in which clients first train alone: the one-shot family's, CLUE's and
PFNM's.
"""

from __future__ import annotations

from plain import Params, drive, ready_for

from fedstill.running.preparation import Prepared

PLAN = {"epochs": 2, "batch": 10, "lr": 0.02, "weight_decay": 4e-3, "patience": 2}
FIT_EPOCHS = 6
VALIDATION = 0.2
"""The share of its examples that a client holds out while it trains alone."""


def ready_one_shot(method: object, **changes: object) -> Prepared:
    """Six clients of skewed data, who ask for several classes; ready to run, in float64."""
    values = {
        "rounds": 1,
        "topology": {"clients": 6},
        "query": {"draw": "multi", "fewer_than": 8, "least": 1},
        "plan": {**PLAN, "fit": {"epochs": FIT_EPOCHS, "validation": VALIDATION}},
        "partition": {"kind": "dirichlet", "alpha": 0.3, "min_size": 8},
    }
    return ready_for(method, **{**values, **changes})


def local_models(**changes: object) -> dict[int, Params]:
    """The models of clients that train alone, as the library trains them."""
    return drive(ready_one_shot("local_only", **changes)).final.extra.many("model")
