"""The measure ``chain``: what each client of a chain learns, and what the next one keeps of it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from fedstill.core.extensions import StageResult
from fedstill.core.records import Examples, Tensors
from fedstill.core.registry import register
from fedstill.engines.passes import correct_by_class
from fedstill.measures.base import Measure, Numbers
from fedstill.measures.context import EvaluationContext
from fedstill.metrics.values import Values


@register("measure", "chain")
class Chain(Measure):
    """Accuracy of each class after every client of a chain, and drift: how well the last client's
    own data stay known.

    Of a client that goes on from another's model: the accuracy on that other client's training data
    of the model it left (``handed_over``) and of the model after this one (``kept``), of the task
    that it was in; None for a client without examples. Nothing to see where clients act side by
    side.

    Source: SFedKD, figure 1 (a) to (d). Reading: the first client of a round goes on from the last
    of the round before.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"chain", "test", "global_model", "local_models", "client_data"}
    )

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
        """Class accuracies of the model that the client left, and the two accuracies on the
        previous client's data.
        """
        if not seen.stage.sequential or not seen.local_models:
            return None
        ((client, params),) = seen.local_models.items()
        accuracy = context.accuracy_by_class(params, context.test)
        fields: dict[str, object] = {"client": client, "class_accuracy": _or_none(accuracy)}
        if context.previous is not None:
            then = (
                seen.stage
                if context.previous_round is None
                else replace(seen.stage, round=context.previous_round)
            )
            own = context.sites.view(context.previous, then).data
            kept = {
                "handed_over": _share(seen.before.params, own, context),
                "kept": _share(params, own, context),
            }
            fields |= {"previous": context.previous, **kept}
        return fields

    def examples(self, test: int, clients: int, own: int) -> int:
        """The test set once a client, and the previous client's data twice."""
        return test * clients + 2 * own


def _or_none(values: Values) -> list[float | None]:
    return [None if v != v else v for v in values.tolist()]


def _share(params: Tensors, data: Examples, context: EvaluationContext) -> float | None:
    right = correct_by_class(context.predictor(params), data, context.inputs, context.world.classes)
    return int(right.sum()) / len(data) if len(data) else None
