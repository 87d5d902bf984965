"""Measures of the distance of local models from the global model: ``divergence`` of weights and
labels, ``diversity`` of gradients and updates, ``alignment`` of units, and the classes of
``units``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedstill.core.extensions import StageResult
from fedstill.core.records import Examples, Tensors
from fedstill.core.registry import register
from fedstill.core.trees import only, sub
from fedstill.losses import cross_entropy
from fedstill.measures.base import (
    EvaluationContext,
    Measure,
    Numbers,
    comparable,
    is_global,
    layers,
    named_models,
)
from fedstill.metrics.local_models import (
    alignment,
    distribution_distance,
    gradient_diversity,
    over_clients,
    preferred_classes,
    weight_divergence,
)
from fedstill.models import contract
from fedstill.models.functional import SHARD


@register("measure", "divergence")
class Divergence(Measure):
    """Distance of local weights from the received weights (L1 and L2), and of a client's label
    distribution from the received model's class accuracies.

    Source: FedNTD, section 5.2 and figure 8.
    Reading: w in ``||w - w_k||`` and A_G refer to the global model that the client received, not to
    the aggregated model.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "client_data"}
    )

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """The three distances of each client, and their means."""
        locals_ = comparable(result, context)
        if not locals_:
            return None
        start = result.before.params
        trained = contract.trainable_entries(context.spec, start)
        accuracy = context.accuracy_by_class(start, context.test)
        distances = [weight_divergence(trained, params) for params in locals_.values()]
        shares = [context.sites.view(c, result.stage).proportions for c in locals_]
        by_client = {
            "l1": [l1 for l1, _ in distances],
            "l2": [l2 for _, l2 in distances],
            "distance": [distribution_distance(accuracy, p) for p in shares],
        }
        means = {f"mean_{k}": over_clients(v, [1.0] * len(v))[""] for k, v in by_client.items()}
        return {"clients": list(locals_), **by_client, **means}

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """One pass over the test set."""
        return test


@register("measure", "diversity")
class Diversity(Measure):
    """Gradient diversity of the clients at the received model, and diversity of their updates.

    "gradients": the diversity of the gradients of the mean cross-entropy on each client's training
    data, in evaluation mode and without augmentation, independent of the method. "updates": the
    diversity of the differences between local and received weights, which depend on the method.
    Source: FedNTD, eq. 8.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"side_by_side", "test", "global_model", "local_models", "client_data"}
    )

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """Both diversities over the clients of the stage; None for a single client."""
        locals_ = comparable(result, context)
        if len(locals_) < 2:
            return None
        start = result.before.params
        # Sorted, because the order of a set, and so of the sum, differs between processes.
        names = sorted(contract.trainable_names(context.spec))
        gradients = [
            _gradient(context, start, context.sites.view(c, result.stage).data) for c in locals_
        ]
        updates: list[Tensors] = [
            sub(only(start, names), only(params, names)) for params in locals_.values()
        ]
        return {
            "clients": list(locals_),
            "gradients": gradient_diversity(gradients),
            "updates": gradient_diversity(updates),
        }

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """A gradient on each client's training data."""
        return 3 * client_examples


def _gradient(context: EvaluationContext, params: Tensors, data: Examples) -> Tensors:
    """The gradient of the mean loss over all examples, as a weighted mean over batches."""
    sizes = [len(part) for part in torch.split(torch.arange(len(data)), SHARD)]
    total: dict[str, torch.Tensor] = {}
    batches = context.passes().gradients(params, data, cross_entropy, SHARD)
    for size, grads in zip(sizes, batches, strict=True):
        for name, grad in grads.items():
            total[name] = total.get(name, torch.zeros_like(grad)) + grad * (size / len(data))
    return total


@register("measure", "alignment")
class Alignment(Measure):
    """Share of hidden units with the same preferred class as in the received global model, in local
    models and in the aggregated global model.

    The layers are "features", the last hidden layer, and "classifier". Source: FedNTD, section 5.1
    and table 2.
    Reading: the paper lists layers of 512 and 128 units, but its network only has the layer of 512
    units ("features").
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "features"}
    )

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """The alignment of each layer of the received global model with each local model and with
        the aggregated model.

        ``global`` is None if the aggregated model is another network.
        """
        locals_ = comparable(result, context)
        if not locals_:
            return None

        def classes(params: Tensors) -> dict[str, Tensor]:
            outputs = layers(context, params, context.test)
            return {
                k: preferred_classes(v, context.test.labels, context.world.classes)
                for k, v in outputs.items()
            }

        start = classes(result.before.params)
        end: dict[str, Tensor] = {}
        if is_global(result.after, context):
            end = classes(result.after.params)
        local = [classes(params) for params in locals_.values()]
        by_layer = {}
        for layer in start:
            by_client = [alignment(start[layer], preferred[layer]) for preferred in local]
            means = over_clients(by_client, [1.0] * len(by_client))
            global_alignment = None
            if end:
                global_alignment = alignment(start[layer], end[layer])
            by_layer[layer] = {
                "local": means[""],
                "local_std": means["_std"],
                "global": global_alignment,
                "clients": by_client,
            }
        return {"clients": list(locals_), "layers": by_layer}

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """A pass of each local model, and of the global model before and after the stage."""
        return test * (clients + 2)


MODELS = 10


@register("measure", "units")
class Units(Measure):
    """The preferred class of each unit of the last hidden layer, in the received, local and
    aggregated models.

    At the end of the run, for at most ten local models. Source: FedNTD, figure 17.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "features"}
    )
    only_last: ClassVar[bool] = True

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """The names of the models, and class ids (models, U)."""
        if not comparable(result, context):
            return None
        labels = context.test.labels
        preferred = {}
        for name, params in named_models(result, context, MODELS):
            features = layers(context, params, context.test)["features"]
            preferred[name] = preferred_classes(features, labels, context.world.classes)
        return {"models": list(preferred), "classes": [v.tolist() for v in preferred.values()]}

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """A pass of each model over the test set."""
        return test * (min(clients, MODELS) + 2)
