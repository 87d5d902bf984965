"""The measures ``alignment`` and ``units``: which classes the units of local and global models
stand for, and whether these are still the same.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fedstill.core.records import Tensors
from fedstill.core.registry import register
from fedstill.core.results import StageResult
from fedstill.measures.base import Measure, Numbers
from fedstill.measures.context import EvaluationContext, comparable, is_global, layers, named_models
from fedstill.metrics.distances import alignment, preferred_classes
from fedstill.metrics.local_models import over_clients


@register("measure", "alignment")
class Alignment(Measure):
    """Share of units with the same class as in the received global model, in local models and in
    the new global one.

    By layer: "features", the last hidden one, and "classifier". Source: FedNTD, section 5.1 and
    table 2.
    Reading: the paper lists layers of 512 and 128 units; its network has the one of 512 only, which
    is "features".
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "features"}
    )

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
        """Alignment of each layer between the received global model and each local one, and with
        the new global one.

        ``global`` is None where the new one is another network.
        """
        locals_ = comparable(seen, context)
        if not locals_:
            return None

        def classes(params: Tensors) -> dict[str, Tensor]:
            outputs = layers(context, params, context.test)
            return {
                k: preferred_classes(v, context.test.labels, context.world.classes)
                for k, v in outputs.items()
            }

        start = classes(seen.before.params)
        end = classes(seen.after.params) if is_global(seen.after, context) else None
        own = {client: classes(params) for client, params in locals_.items()}
        out = {}
        for layer in start:
            each = [alignment(start[layer], ends[layer]) for ends in own.values()]
            spread = over_clients(each, [1.0] * len(each))
            out[layer] = {
                "local": spread[""],
                "local_std": spread["_std"],
                "global": alignment(start[layer], end[layer]) if end else None,
                "clients": each,
            }
        return {"clients": list(own), "layers": out}

    def examples(self, test: int, clients: int, own: int) -> int:
        """The test set at each local model, and at the global one before and after."""
        return test * (clients + 2)


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

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
        """(models, U) class ids."""
        if not comparable(seen, context):
            return None
        preferred = {
            name: preferred_classes(
                layers(context, p, context.test)["features"],
                context.test.labels,
                context.world.classes,
            )
            for name, p in named_models(seen, context, MODELS)
        }
        return {"models": list(preferred), "classes": [v.tolist() for v in preferred.values()]}

    def examples(self, test: int, clients: int, own: int) -> int:
        """The test set at each model."""
        return test * (min(clients, MODELS) + 2)
