"""How well a model has forgotten: its distance to an exact result, and its accuracy on forgotten
and remaining data.

None of these numbers proves that a model has forgotten. A model that never had the data may predict
them well, because other clients have similar data; so the numbers are to be compared with those of
an exact result.
"""

from __future__ import annotations

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
    original: OriginalRun, folder: Path, request: UnlearningRequest, exact: Path | None = None
) -> dict[str, Any]:
    """Measure the models of the original run, of the new run in ``folder``, and of an exact result.

    Returns accuracies by model, and distances to the exact model if there is one.
    """
    prepared = original.prepared
    models = {"original": MeasuredModel.of(original.folder, prepared)}
    models["unlearned"] = _model_of(original, folder)
    if exact is not None:
        models["exact"] = _model_of(original, exact)
    sets = ExampleSets.of(original, request)
    fields: dict[str, Any] = {
        "accuracy": {
            name: accuracies(model, sets, prepared.world.classes) for name, model in models.items()
        }
    }
    if exact is not None:
        test = sets.test or sets.remaining
        fields["distance_to_exact"] = {
            name: distances(model, models["exact"], test)
            for name, model in models.items()
            if name != "exact"
        }
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
