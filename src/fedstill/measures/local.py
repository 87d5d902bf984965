"""Measures of local models.

Their accuracy on all classes (``local``), after each epoch (``epochs``), on the client's own data
(``personal``), on public images (``private_public``), and after each client of a chain (``chain``).
Their distance from the global model: ``divergence`` of weights and labels, ``diversity`` of
gradients and updates, ``alignment`` of units, and the classes of ``units``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedstill.core.extensions import StageResult
from fedstill.core.records import Examples, Tensors
from fedstill.core.registry import register
from fedstill.core.trees import only, sub, zeros_like
from fedstill.engines.client_measures import AtClient
from fedstill.engines.passes import correct_by_class
from fedstill.losses import cross_entropy
from fedstill.measures.base import (
    EvaluationContext,
    Measure,
    Numbers,
    RoundReports,
    comparable,
    is_global,
    layers,
    named_models,
    none_for_nan,
    wrong_counts,
)
from fedstill.metrics.accuracy import class_accuracy, wrong_table
from fedstill.metrics.local_models import (
    alignment,
    by_epoch,
    distribution_distance,
    gradient_diversity,
    local_accuracies,
    over_clients,
    personal_accuracy,
    preferred_classes,
    private_public,
    weight_divergence,
)
from fedstill.models import contract
from fedstill.models.functional import SHARD


@register("measure", "local")
class Local(Measure):
    """In-local and out-local accuracy of local models. Each client evaluates its model on the
    common test set.

    Clients report counts with their replies, so the server needs no access to local models. The
    formulas are in ``metrics/local_models.py``. The means over clients are fields of the round's
    event.
    """

    gives: ClassVar[tuple[str, ...]] = ("label_counts", "correct_by_class")

    def at_client(self, visit: AtClient) -> Numbers | None:
        """``label_counts`` (C,) of the client, and ``correct_by_class`` (C,), the correct
        predictions of its model on the common test set.
        """
        if visit.test is None or visit.is_server:
            return None
        right = visit.correct_by_class(visit.end, visit.test)
        return {"label_counts": visit.view.counts.tolist(), "correct_by_class": right}

    def refuses(self, report: Mapping[str, Any], classes: int) -> str:
        """Counts must be lists with an integer for each class; ``correct_by_class`` requires
        ``label_counts``.
        """
        if "correct_by_class" in report and "label_counts" not in report:
            return "correct_by_class comes without label_counts"
        return wrong_counts(report, self.gives, classes)

    def of_round(self, reports: RoundReports) -> Numbers:
        """Means and standard deviations over clients, and the global models' accuracy on the mean
        label distribution of the clients.
        """
        return local_accuracies(
            reports.clients, reports.received, reports.aggregated, reports.test_counts
        )

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """A pass over the test set for each client."""
        return test * clients


@register("measure", "personal")
class Personal(Measure):
    """Accuracy of local models on their client's training data, and on test examples in the
    client's class proportions.

    It is computed after every stage on clients' own data. Clients report counts with their replies,
    so the server needs no access to local models. The means over clients are fields of the round's
    event: ``local_train_accuracy`` and ``personalised_accuracy``. The latter differs from
    ``personal_accuracy`` (measure ``local``), the accuracy of the client's answer at the end of the
    round.

    Source: FedNTD, appendices H and I, figures 11 and 12 ("local train", "personalised").
    Reading: the code evaluates on augmented training data; we evaluate without augmentation.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test_at_clients"})
    gives: ClassVar[tuple[str, ...]] = (
        "label_counts",
        "trained_counts",
        "trained_right",
        "tested_right",
    )

    def at_client(self, visit: AtClient) -> Numbers | None:
        """``label_counts`` (C,) of the client, ``trained_counts`` (C,) of its training examples,
        and the correct predictions of its model, ``trained_right`` and ``tested_right`` (C,).
        """
        if visit.test is None or visit.is_server or visit.stage.view == "public":
            return None
        labels = visit.view.data.labels.cpu().numpy()
        return {
            "label_counts": visit.view.counts.tolist(),
            "trained_counts": np.bincount(labels, minlength=visit.classes).tolist(),
            "trained_right": visit.correct_by_class(visit.end, visit.view.data),
            "tested_right": visit.correct_by_class(visit.end, visit.test),
        }

    def refuses(self, report: Mapping[str, Any], classes: int) -> str:
        """Counts must be lists with an integer for each class, and complete; no class may have more
        correct predictions than examples.
        """
        names = [name for name in self.gives if name in report]
        if names not in ([], ["label_counts"], list(self.gives)):
            return f"it has {', '.join(names)} without the other counts"
        problem = wrong_counts(report, self.gives, classes)
        if problem:
            return problem
        correct = report.get("trained_right", [])
        total = report.get("trained_counts", [])
        if any(a > b for a, b in zip(correct, total, strict=True)):
            return "trained_right is above trained_counts"
        return ""

    def of_round(self, reports: RoundReports) -> Numbers:
        """Mean and standard deviation over clients of both accuracies."""
        events = [e for e in reports.clients if "trained_right" in e and sum(e["trained_counts"])]
        trained = [sum(e["trained_right"]) / sum(e["trained_counts"]) for e in events]
        sizes = [float(sum(e["trained_counts"])) for e in events]
        personalised = [_personalised_accuracy(e, reports.test_counts) for e in events]
        numbers: dict[str, float] = {}
        for name, by_client in (("local_train", trained), ("personalised", personalised)):
            if by_client:
                for suffix, value in over_clients(by_client, sizes).items():
                    numbers[f"{name}_accuracy{suffix}"] = value
        return numbers

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """A pass over the test set and the training data of each client."""
        return test * clients + client_examples


def _personalised_accuracy(event: Mapping[str, Any], test_counts: Sequence[int]) -> float:
    """The accuracy of a client's model on test examples with the client's label distribution; NaN
    if none of its classes was tested.
    """
    tested = class_accuracy(event["tested_right"], test_counts)
    return personal_accuracy(tested, event["label_counts"])


@register("measure", "private_public")
class PrivatePublic(Measure):
    """Accuracy of each client's model on its held-out examples and on public examples, and of the
    server's model on public examples.

    *Private* examples are the held-out examples of a client (``plan.validation``), which only this
    client has. The accuracies are computed before and after every stage on public data, and after
    every other stage. Clients report counts with their replies; the formulas are in
    ``metrics/local_models.py``. The accuracies by client are fields of the round's event.

    Source: HiPer-FedKD, table 1 and its notebooks.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"held_out"})
    gives: ClassVar[tuple[str, ...]] = ("private", "public")

    def at_client(self, visit: AtClient) -> Numbers | None:
        """``private`` and ``public``: ``counts`` (C,) of labels, and correct predictions (C,)
        ``before`` and ``after`` the client's work.
        """
        models = {"after": visit.end}
        if visit.stage.view == "public":
            models = {"before": visit.start, "after": visit.end}
        report = {}
        for name, data in (("private", visit.view.validation), ("public", visit.public)):
            if data is not None and len(data) and bool((data.labels >= 0).all()):
                counts = torch.bincount(data.labels, minlength=visit.classes).tolist()
                correct = {k: visit.correct_by_class(params, data) for k, params in models.items()}
                report[name] = {"counts": counts, **correct}
        return report

    def refuses(self, report: Mapping[str, Any], classes: int) -> str:
        """Counts must be lists with an integer for each class. ``counts`` and ``after`` are
        required, and correct predictions may not exceed the counts.
        """
        for name in self.gives:
            table = report.get(name, {})
            if table != {}:
                problem = wrong_table(name, table, classes)
                if problem:
                    return problem
        return ""

    def of_round(self, reports: RoundReports) -> Numbers:
        """The accuracies by client, their means, and the accuracy of the server's model."""
        return private_public(reports.clients)

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """A pass over as many examples as the test set has, for each client."""
        return test * clients


@register("measure", "epochs")
class Epochs(Measure):
    """In-local and out-local accuracy of the received model and of local models after every local
    epoch.

    In stages on its own data, each client copies its model at the end of every epoch, and evaluates
    the copies on the common test set after training. Training stays identical to the bit. Clients
    report counts with their replies; the formulas are in ``metrics/local_models.py``. The means
    over clients are fields of the round's event.
    Source: FedNTD, figure 6. Reading: the curve of a client starts with the model that it receives
    (epoch 0) and ends with the model that it sends.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test_at_clients", "epochs"})
    each_epoch: ClassVar[bool] = True
    gives: ClassVar[tuple[str, ...]] = ("label_counts", "correct_by_epoch")

    def at_client(self, visit: AtClient) -> Numbers | None:
        """``label_counts`` (C,) of the client, and ``correct_by_epoch`` (epochs + 1, C), the
        correct predictions on the common test set.
        """
        if visit.test is None or not visit.by_epoch:
            return None
        models = (visit.start, *visit.by_epoch)
        correct = [visit.correct_by_class(params, visit.test) for params in models]
        return {"label_counts": visit.view.counts.tolist(), "correct_by_epoch": correct}

    def refuses(self, report: Mapping[str, Any], classes: int) -> str:
        """Counts must be lists with an integer for each class, for the start and each epoch;
        ``correct_by_epoch`` requires ``label_counts``.
        """
        if "correct_by_epoch" not in report:
            return wrong_counts(report, ("label_counts",), classes)
        rows = report["correct_by_epoch"]
        if not isinstance(rows, list) or not rows:
            return "correct_by_epoch is not a list with the counts of each epoch"
        by_epoch_number = {f"correct_by_epoch[{i}]": row for i, row in enumerate(rows)}
        fields = ("label_counts", *by_epoch_number)
        problem = wrong_counts({**report, **by_epoch_number}, fields, classes)
        if problem:
            return problem
        if "label_counts" not in report:
            return "correct_by_epoch comes without label_counts"
        if len(rows) > report.get("epochs", 0) + 1:
            return f"correct_by_epoch has {len(rows)} epochs"
        return ""

    def of_round(self, reports: RoundReports) -> Numbers:
        """``by_epoch``: for each stage, lists over epochs of means and standard deviations over
        clients.
        """
        return by_epoch(reports.clients, reports.test_counts)

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """A pass over the test set for each client, before training and after each epoch."""
        return test * clients


@register("measure", "chain")
class Chain(Measure):
    """Accuracy by class after every client of a chain, and accuracy on the previous client's data
    before and after the client's training.

    For a client that continues with the previous client's model, the measure evaluates both models
    on the training data that the previous client had in its task: the model that the client
    received (``handed_over``) and its trained model (``kept``). They are None if there are no such
    data. Parallel stages are not measured.

    Source: SFedKD, figure 1 (a) to (d). Reading: the previous client of the first client of a round
    is the last client of the previous round.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"chain", "test", "global_model", "local_models", "client_data"}
    )

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """The class accuracies of the client's trained model, and both accuracies on the previous
        client's data.
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
        """A pass over the test set for each client, and two passes over the previous client's
        data.
        """
        return test * clients + 2 * client_examples


def _accuracy(params: Tensors, data: Examples, context: EvaluationContext) -> float | None:
    """The accuracy of a model on some examples; None without examples."""
    if not len(data):
        return None
    predict = context.predictor(params)
    correct = correct_by_class(predict, data, context.inputs, context.world.classes)
    return int(correct.sum()) / len(data)


# Distances of local models from the global model.


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
    if not len(data):
        return zeros_like(contract.trainable_entries(context.spec, params))
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
