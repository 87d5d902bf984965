"""The measure ``sphere``: in which direction each class lies, for models whose features are points
on a circle.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.core.registry import register
from fedstill.core.results import StageResult
from fedstill.measures.base import Measure, Numbers, Room, comparable, named_models

MODELS, BINS = 3, 72


@register("measure", "sphere")
class Sphere(Measure):
    """Directions of test examples' features by class, for the received, three local and the new
    global model.

    Needs features of two numbers, as ``sphere_cnn`` has them. At the end of the run; counts in 72
    steps of 5 degrees.
    Source: FedNTD, appendix N, figure 18.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "features", "plane"}
    )
    only_last: ClassVar[bool] = True

    def look(self, seen: StageResult, room: Room) -> Numbers | None:
        """(models, C, bins) counts of test examples; bin 0 begins at -180 degrees."""
        if not comparable(seen, room):
            return None
        labels, passes = room.test.labels.cpu(), room.passes()
        counts = {
            name: directions(passes.features(p, room.test).cpu(), labels, room.world.classes)
            for name, p in named_models(seen, room, MODELS)
        }
        return {"models": list(counts), "counts": [v.tolist() for v in counts.values()]}

    def examples(self, test: int, clients: int, own: int) -> int:
        """The test set at each model."""
        return test * (min(clients, MODELS) + 2)


def directions(features: Tensor, labels: Tensor, classes: int, bins: int = BINS) -> Tensor:
    """How many features (n, 2) of each class point into each of ``bins`` equal parts of the circle:
    (C, bins) int64.

    >>> directions(torch.tensor([[0.0, -1.0], [0.1, 1.0]]), torch.tensor([0, 1]), 2, bins=4)
    tensor([[0, 1, 0, 0],
            [0, 0, 1, 0]])
    """
    angle = torch.atan2(features[:, 1].double(), features[:, 0].double())
    bin_ = ((angle + math.pi) / (2 * math.pi) * bins).floor().long().clamp(0, bins - 1)
    return torch.bincount(labels * bins + bin_, minlength=classes * bins).reshape(classes, bins)
