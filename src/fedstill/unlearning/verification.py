"""How well a model has forgotten: its distance to an exact result, its accuracy on forgotten and
remaining data, attacks on it, and what it cost to unlearn.

None of these numbers proves that a model has forgotten. A model that never had the data may predict
them well, because other clients have similar data; so the numbers are to be compared with those of
an exact result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.core.records import Examples, ModelSpec, Tensors
from fedstill.data.inputs import Inputs
from fedstill.engines.passes import ModelPasses
from fedstill.running.preparation import Prepared
from fedstill.running.result import Result
from fedstill.unlearning.attacks import Backdoor, MembershipTest, costs, relative
from fedstill.unlearning.request import UnlearningRequest
from fedstill.unlearning.strategy import OriginalRun

# ---- models and data to measure ------------------------------------------------------------------


@dataclass(frozen=True)
class ExampleSets:
    """The examples on which models are compared.

    ``test``: the common test set, if there is one.
    """

    forgotten: Examples
    remaining: Examples
    test: Examples | None

    @classmethod
    def of(cls, original: OriginalRun, request: UnlearningRequest) -> ExampleSets:
        """The training examples of a run that a request names, and all others."""
        sites = original.prepared.sites
        split = sites.split
        assert split is not None  # real sites were rejected
        is_forgotten = torch.from_numpy(request.forgets(split, sites.train.labels.cpu().numpy()))
        positions = torch.from_numpy(split.positions)
        return cls(
            forgotten=sites.train.take(positions[is_forgotten]),
            remaining=sites.train.take(positions[~is_forgotten]),
            test=sites.common_test,
        )


@dataclass(frozen=True)
class MeasuredModel:
    """A run's final model, which can predict examples in the scale of its own run."""

    params: Tensors
    spec: ModelSpec
    inputs: Inputs

    @classmethod
    def of(cls, folder: Path, prepared: Prepared) -> MeasuredModel:
        """The final model of the run in a directory."""
        return cls(Result.of(folder).model, prepared.world.model(-1), prepared.sites.inputs)

    def logits(self, examples: Examples) -> Tensor:
        """Logits (n, C)."""
        return ModelPasses(self.spec, self.inputs).logits(self.params, examples).cpu()


# ---- measurements --------------------------------------------------------------------------------


def measurements(
    original: OriginalRun,
    folder: Path,
    request: UnlearningRequest,
    exact: Path | None = None,
    backdoor: Backdoor | None = None,
) -> dict[str, Any]:
    """Measure the models of the original run, of the new run in ``folder``, and of an exact result.

    backdoor: a backdoor in the forgotten data of the original run. Returns the numbers of each
    test by model: accuracies, attacks, and with an exact result the distances to it; and the costs
    of the new rounds.
    """
    prepared = original.prepared
    models = {"original": MeasuredModel.of(original.folder, prepared)}
    models["unlearned"] = _model_of(original, folder)
    if exact is not None:
        models["exact"] = _model_of(original, exact)
    sets = ExampleSets.of(original, request)
    classes = prepared.world.classes
    fields: dict[str, Any] = {
        "accuracy": {name: accuracies(model, sets, classes) for name, model in models.items()},
        **_attacks(models, sets, classes, backdoor),
        "cost": _costs(original, folder, exact),
    }
    if exact is not None:
        test = sets.test or sets.remaining
        fields["distance_to_exact"] = {
            name: distances(model, models["exact"], test)
            for name, model in models.items()
            if name != "exact"
        }
    return fields


def _attacks(
    models: Mapping[str, MeasuredModel],
    sets: ExampleSets,
    classes: int,
    backdoor: Backdoor | None,
) -> dict[str, Any]:
    """The numbers of attacks by model; none without a common test set."""
    fields: dict[str, Any] = {}
    if sets.test is None:
        return fields
    membership = MembershipTest.of(sets.forgotten, sets.test, classes)
    if membership is not None:
        exact = None
        if "exact" in models:
            exact = models["exact"].logits
        fields["membership"] = {
            name: membership.measure(model.logits, exact) for name, model in models.items()
        }
    if backdoor is not None:
        fields["backdoor"] = {
            name: backdoor.success(model.logits, sets.test) for name, model in models.items()
        }
    return fields


def _costs(original: OriginalRun, folder: Path, exact: Path | None) -> dict[str, Any]:
    """The costs of the new rounds, and relative to those of an exact result."""
    cost = costs(original.folder, folder)
    fields: dict[str, Any] = dict(cost)
    if exact is not None:
        reference = costs(original.folder, exact)
        fields["relative_to_exact"] = relative(cost, reference)
    return fields


def _model_of(original: OriginalRun, folder: Path) -> MeasuredModel:
    """The final model of a run on the data of the original one."""
    return MeasuredModel.of(folder, original.prepared)


def accuracies(model: MeasuredModel, sets: ExampleSets, classes: int) -> dict[str, Any]:
    """The accuracy of a model on forgotten, remaining and test examples, in total and by class.

    By class: (C,), None for a class without examples.
    """
    fields: dict[str, Any] = {}
    named_sets = {"forgotten": sets.forgotten, "remaining": sets.remaining, "test": sets.test}
    for name, examples in named_sets.items():
        if examples is None or not len(examples):
            continue
        labels = examples.labels.cpu()
        is_right = model.logits(examples).argmax(1) == labels
        right = torch.bincount(labels[is_right], minlength=classes).tolist()
        totals = torch.bincount(labels, minlength=classes).tolist()
        fields[name] = sum(right) / sum(totals)
        fields[f"{name}_by_class"] = [
            _share(count, total) for count, total in zip(right, totals, strict=True)
        ]
    return fields


def _share(count: int, total: int) -> float | None:
    if not total:
        return None
    return count / total


def distances(model: MeasuredModel, exact: MeasuredModel, examples: Examples) -> dict[str, float]:
    """The distance of a model to an exact result.

    ``weights``: the L2 norm of the difference of all entries, relative to that of the exact model.
    ``predictions``: the share of examples on which the predicted classes differ.
    ``probabilities``: the mean total variation distance of the predicted distributions, in [0, 1].
    """
    difference = 0.0
    norm = 0.0
    for name, tensor in exact.params.items():
        values = tensor.double()
        difference += float((model.params[name].double() - values).square().sum())
        norm += float(values.square().sum())
    logits = model.logits(examples).double()
    exact_logits = exact.logits(examples).double()
    gaps = (logits.softmax(1) - exact_logits.softmax(1)).abs().sum(1) / 2
    return {
        "weights": (difference / norm) ** 0.5,
        "predictions": float((logits.argmax(1) != exact_logits.argmax(1)).double().mean()),
        "probabilities": float(gaps.mean()),
    }
