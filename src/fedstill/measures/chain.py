"""The measure ``chain``: what each client of a chain learns, and what the next one keeps of it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from fedstill.core.extensions import StageResult
from fedstill.core.records import Examples, Tensors
from fedstill.core.registry import register
from fedstill.engines.passes import correct_by_class
from fedstill.measures.base import Measure, Numbers, none_for_nan
from fedstill.measures.context import EvaluationContext


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

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """Class accuracies of the model that the client left, and the two accuracies on the
        previous client's data.
        """
        if not result.stage.sequential or not result.local_models:
            return None
        ((client, params),) = result.local_models.items()
        accuracy = context.accuracy_by_class(params, context.test)
        fields: dict[str, object] = {"client": client, "class_accuracy": none_for_nan(accuracy)}
        if context.previous is None:
            return fields

        stage = result.stage
        if context.previous_round is not None:
            stage = replace(stage, round=context.previous_round)
        previous_data = context.sites.view(context.previous, stage).data
        fields["previous"] = context.previous
        fields["handed_over"] = _accuracy(result.before.params, previous_data, context)
        fields["kept"] = _accuracy(params, previous_data, context)
        return fields

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """The test set once a client, and the previous client's data twice."""
        return test * clients + 2 * client_examples


def _accuracy(params: Tensors, data: Examples, context: EvaluationContext) -> float | None:
    """The accuracy of a model on some examples; None without any."""
    if not len(data):
        return None
    predict = context.predictor(params)
    correct = correct_by_class(predict, data, context.inputs, context.world.classes)
    return int(correct.sum()) / len(data)
