"""How well a model has forgotten: its distance to an exact result, its accuracy on forgotten and
remaining data, attacks on it (membership inference, a planted backdoor), and what it cost to
unlearn.

None of these numbers proves that a model has forgotten. A model that never had the data may predict
them well, because other clients have similar data; and another attack may find more. So the numbers
are to be compared with those of an exact result.

Sources: membership by the loss: Yeom et al. (2018), with the formulas of ``metrics/membership.py``.
Calibration by a model that did not see the examples: Watson et al., "On the Importance of
Difficulty Calibration in Membership Inference Attacks" (2022). The trigger of the
backdoor: Gu, Dolan-Gavitt and Garg, "BadNets: Identifying Vulnerabilities in the Machine Learning
Model Supply Chain" (2017); as a test of unlearning: Wu, Zhu and Mitra, "Federated Unlearning with
Knowledge Distillation" (2022), and Halimi et al. (2022).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.core.extensions import Event, common_predictor
from fedstill.core.files import read_file
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Examples, Tensors
from fedstill.data.dataset import Dataset
from fedstill.data.inputs import Inputs
from fedstill.engines.passes import Predict, outputs_by_example
from fedstill.metrics.accuracy import share_of
from fedstill.metrics.membership import attack, auc_interval, confidences
from fedstill.running.client_data import split_data
from fedstill.running.journal import JOURNAL, read_journal
from fedstill.running.replay import checkpoints_of
from fedstill.running.result import Result
from fedstill.running.split_file import stored_split
from fedstill.running.standardisation import Scaler
from fedstill.unlearning.request import UnlearningRequest
from fedstill.unlearning.strategy import OriginalRun

Predictor = Callable[[Examples], Tensor]
"""Returns a model's logits (n, C) of examples."""

# ---- membership inference ------------------------------------------------------------------------


@dataclass(frozen=True)
class MembershipTest:
    """Examples that an attack must tell apart: as many unseen as forgotten ones of each class.

    ``forgotten``, ``unseen``: (n,) examples each.
    """

    forgotten: Examples
    unseen: Examples

    @classmethod
    def of(cls, forgotten: Examples, test: Examples, classes: int) -> MembershipTest | None:
        """Forgotten examples, and test examples of the same classes, drawn by key.

        None if no class has examples of both.
        """
        pairs = zip(
            _by_class(forgotten, classes, "forgotten"),
            _by_class(test, classes, "unseen"),
            strict=True,
        )
        members = []
        others = []
        for member_positions, other_positions in pairs:
            count = min(len(member_positions), len(other_positions))
            members.append(member_positions[:count])
            others.append(other_positions[:count])
        if not sum(map(len, members)):
            return None
        return cls(forgotten.take(torch.cat(members)), test.take(torch.cat(others)))

    def measure(self, model: Predictor, exact: Predictor | None = None) -> dict[str, Any]:
        """The numbers of both attacks on a model.

        ``auc`` with ``auc_interval``, and ``tpr_at_…`` with its interval, are of the attack by the
        loss (``metrics.membership.attack``). With an exact model, ``calibrated_auc`` and its
        interval are of the attack by how much more certain the model is than the exact one.
        """
        member_scores = confidences(model(self.forgotten), self.forgotten.labels)
        other_scores = confidences(model(self.unseen), self.unseen.labels)
        numbers = attack(member_scores, other_scores)
        del numbers["roc"]
        fields = {"examples": len(member_scores), **numbers}
        if exact is not None:
            member_scores -= confidences(exact(self.forgotten), self.forgotten.labels)
            other_scores -= confidences(exact(self.unseen), self.unseen.labels)
            area, low, high = auc_interval(member_scores, other_scores)
            fields["calibrated_auc"] = area
            fields["calibrated_auc_interval"] = [low, high]
        return fields


def _by_class(examples: Examples, classes: int, purpose: str) -> list[Tensor]:
    """The positions of the examples of each class, in an order that is drawn by key."""
    labels = examples.labels.cpu()
    draw = generator(seed_for(0, 0, 0, SERVER, f"unlearning {purpose}"))
    order = torch.randperm(len(labels), generator=draw)
    return [order[labels[order] == label] for label in range(classes)]


# ---- a planted backdoor --------------------------------------------------------------------------

BRIGHT = 255
"""The value of a bright pixel."""


@dataclass(frozen=True)
class Backdoor:
    """A trigger that some training images teach: with a bright square in the lower right corner,
    an image is of the class ``target``.

    Plant it in the data of a client before the original run. A model that has forgotten this client
    should not obey the trigger more than an exact result does.
    """

    target: int
    size: int = 2

    def planted(self, data: Dataset, positions: Collection[int] | Tensor) -> Dataset:
        """The data set with the trigger and the target's label at positions of the training set.

        Raises ConfigError if the examples are no images with pixels from 0 to 255, if the square
        does not fit, or if the target is no class.
        """
        if data.about.kind != "image":
            raise ConfigError(f"a backdoor needs images, and {data.name} has {data.many}")
        pixels = data.train.values
        if pixels.dtype != torch.uint8:
            raise ConfigError(
                f"a backdoor needs pixels from 0 to 255 (torch.uint8), and those of {data.name} "
                f"are {pixels.dtype}"
            )
        height, width = pixels.shape[-2:]
        if not 1 <= self.size <= min(height, width):
            raise ConfigError(f"size {self.size}: {data.name} has {height} × {width} pixels")
        if not 0 <= self.target < len(data.classes):
            raise ConfigError(f"target {self.target}: {data.name} has {len(data.classes)} classes")
        index = torch.as_tensor(list(positions), dtype=torch.int64)
        values = pixels.clone()
        labels = data.train.labels.clone()
        values[index] = self.stamped(values[index])
        labels[index] = self.target
        return replace(data, train=replace(data.train, values=values, labels=labels))

    def stamped(self, images: Tensor) -> Tensor:
        """The images (n, channels, H, W) uint8 with the trigger."""
        stamped = images.clone()
        stamped[..., -self.size :, -self.size :] = BRIGHT
        return stamped

    def success(self, model: Predictor, test: Examples) -> float:
        """The share of test images of other classes that the trigger turns into the target."""
        is_other = test.labels.cpu() != self.target
        images = test.take(is_other.nonzero().flatten())
        triggered = replace(images, values=self.stamped(images.values))
        return float((model(triggered).argmax(1) == self.target).double().mean())


# ---- costs ---------------------------------------------------------------------------------------


def new_client_events(original: Path, folder: Path) -> list[Event]:
    """The events of clients that acted in the run in ``folder``, without those that were copied
    from the journal of the run in ``original``.
    """
    name = JOURNAL
    copied = set(read_file(original / name).splitlines())
    lines = read_file(folder / name).splitlines()
    events = read_journal(folder / name)
    return [
        event
        for line, event in zip(lines, events, strict=False)
        if event["event"] == "client" and line not in copied
    ]


def costs(original: Path, folder: Path) -> dict[str, float]:
    """What the rounds of an unlearning cost: their number, the seconds that clients worked, and the
    bytes that they received and sent.
    """
    rounds = {event["round"] for event in new_client_events(original, folder)}
    events = [
        event
        for event in read_journal(folder / JOURNAL)
        if event["event"] == "round" and event["round"] in rounds
    ]
    return {
        "rounds": len(events),
        "seconds_clients": _sum(events, "seconds_clients"),
        "bytes": _sum(events, "bytes_up") + _sum(events, "bytes_down"),
    }


def _sum(events: Sequence[Event], field: str) -> float:
    return float(sum(event.get(field, 0) for event in events))


def relative(cost: Mapping[str, float], reference: Mapping[str, float]) -> dict[str, float]:
    """Each cost divided by that of the reference, where that is not 0."""
    return {key: value / reference[key] for key, value in cost.items() if reference[key]}


# ---- models and data to measure ------------------------------------------------------------------


@dataclass(frozen=True)
class ExampleSets:
    """The examples on which models are compared, as they are stored: without scaling, unless each
    client has a mean and a standard deviation of its own.

    ``test``: the common test set, if there is one.
    """

    forgotten: Examples
    remaining: Examples
    test: Examples | None

    @classmethod
    def of(cls, original: OriginalRun, request: UnlearningRequest) -> ExampleSets:
        """The training examples of a run that a request names, and all others."""
        prepared = original.prepared
        split = original.split
        train = prepared.sites.train
        test = prepared.sites.common_test
        if prepared.scaler.by_client is None:
            stored = stored_split(original.folder)
            data = split_data(prepared.settings, prepared.dataset, stored)
            train = data.train
            if test is not None:
                test = data.test
        is_forgotten = torch.from_numpy(request.forgets(split, original.labels))
        positions = torch.from_numpy(split.positions)
        return cls(
            forgotten=train.take(positions[is_forgotten]),
            remaining=train.take(positions[~is_forgotten]),
            test=test,
        )


@dataclass(frozen=True)
class MeasuredModel:
    """A run's final model, which scales examples as its own run did.

    A run that has forgotten rows of a table computed its mean and standard deviation without them.
    """

    params: Tensors
    predict: Predict
    inputs: Inputs
    scaler: Scaler

    @classmethod
    def of(cls, run: OriginalRun) -> MeasuredModel | None:
        """The final model of a run; None if no model answers for all clients, because each has its
        own, or if the run's checkpoints were deleted.
        """
        restored = checkpoints_of(run.folder).latest()
        if restored is None:
            return None
        state = replace(restored.state, params=Result.of(run.folder).model)
        prepared = run.prepared
        method = prepared.settings.method
        predictors = method.predictors(state, prepared.world)
        common = common_predictor(predictors)
        if not common or method.client_predictors(state, prepared.world):
            return None
        return cls(state.params, predictors[common], prepared.sites.inputs, prepared.scaler)

    def logits(self, examples: Examples) -> Tensor:
        """Logits (n, C) of examples as they are stored."""
        scaled = self.scaler.transform(examples)
        return outputs_by_example(self.predict, scaled, self.inputs).logits


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

    Of real sites, whose examples this process does not have, of clients with models of their own,
    and of runs without checkpoints, it returns what the journals say.
    """
    if original.settings.on_sites:
        return journal_measurements(original, folder, request)
    runs = {"original": original, "unlearned": OriginalRun.of(folder, original.data)}
    if exact is not None:
        runs["exact"] = OriginalRun.of(exact, original.data)
    models: dict[str, MeasuredModel] = {}
    for name, run in runs.items():
        model = MeasuredModel.of(run)
        if model is None:
            return journal_measurements(original, folder, request, exact)
        models[name] = model
    sets = ExampleSets.of(original, request)
    classes = original.prepared.world.classes
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


def journal_measurements(
    original: OriginalRun, folder: Path, request: UnlearningRequest, exact: Path | None = None
) -> dict[str, Any]:
    """What the journals of two runs say of their final models: the accuracy on the server's test
    set, and the mean accuracy on the test sets of the clients that remain; and the costs.
    """
    journals = {
        "original": original.events,
        "unlearned": read_journal(folder / JOURNAL),
    }
    if exact is not None:
        journals["exact"] = read_journal(exact / JOURNAL)
    return {
        "accuracy": {
            name: _reported_accuracies(events, request) for name, events in journals.items()
        },
        "cost": _costs(original, folder, exact),
    }


def _reported_accuracies(events: Sequence[Event], request: UnlearningRequest) -> dict[str, float]:
    """The accuracies of the last round in a journal."""
    last = [event for event in events if event["event"] == "round"][-1]
    fields: dict[str, float] = {}
    if last["accuracy"] is not None:
        fields["test"] = last["accuracy"]
    tests = last.get("own_test_by_client", {})
    remaining = [value for client, value in tests.items() if int(client) not in request.clients]
    if remaining:
        fields["sites"] = sum(remaining) / len(remaining)
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
            share_of(count, total) for count, total in zip(right, totals, strict=True)
        ]
    return fields


def distances(model: MeasuredModel, exact: MeasuredModel, examples: Examples) -> dict[str, float]:
    """The distance of a model to an exact result.

    ``weights``: the L2 norm of the difference of all entries, relative to that of the exact model;
    missing for models of different sizes.
    ``predictions``: the share of examples on which the predicted classes differ.
    ``probabilities``: the mean total variation distance of the predicted distributions, in [0, 1].
    """
    logits = model.logits(examples).double()
    exact_logits = exact.logits(examples).double()
    gaps = (logits.softmax(1) - exact_logits.softmax(1)).abs().sum(1) / 2
    fields = {
        "predictions": float((logits.argmax(1) != exact_logits.argmax(1)).double().mean()),
        "probabilities": float(gaps.mean()),
    }
    if shapes_of(model.params) == shapes_of(exact.params):
        fields = {"weights": relative_distance(model.params, exact.params), **fields}
    return fields


def shapes_of(params: Tensors) -> dict[str, tuple[int, ...]]:
    """The shape of each entry."""
    return {name: tuple(tensor.shape) for name, tensor in params.items()}


def relative_distance(params: Tensors, exact: Tensors) -> float:
    """The L2 norm of the difference of two models, relative to that of the second one."""
    difference = 0.0
    norm = 0.0
    for name, tensor in exact.items():
        values = tensor.double()
        difference += float((params[name].double() - values).square().sum())
        norm += float(values.square().sum())
    return float((difference / norm) ** 0.5)
