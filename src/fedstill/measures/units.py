"""The measure ``units``: which class each unit of the last hidden layer stands for, in each
model.
"""

from __future__ import annotations

from typing import ClassVar

from fedstill.core.registry import register
from fedstill.core.results import StageResult
from fedstill.measures.base import Measure, Numbers, Room, comparable, layers, named_models
from fedstill.metrics.distances import preferred_classes

MODELS = 10


@register("measure", "units")
class Units(Measure):
    """The preferred class of each unit of the last hidden layer, in the received, the local and the
    new global model.

    At most ten local models, at the end of the run. Source: FedNTD, figure 17.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "features"}
    )
    only_last: ClassVar[bool] = True

    def look(self, seen: StageResult, room: Room) -> Numbers | None:
        """(models, U) class ids."""
        if not comparable(seen, room):
            return None
        preferred = {
            name: preferred_classes(
                layers(room, p, room.test)["features"], room.test.labels, room.world.classes
            )
            for name, p in named_models(seen, room, MODELS)
        }
        return {"models": list(preferred), "classes": [v.tolist() for v in preferred.values()]}

    def examples(self, test: int, clients: int, own: int) -> int:
        """The test set at each model."""
        return test * (min(clients, MODELS) + 2)
