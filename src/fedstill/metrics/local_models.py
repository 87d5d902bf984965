"""Clients' models: their accuracy on their own classes, on other classes, on public data and on the
classes that they asked their peers for; and their distances to the global model and to each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.core.label_counts import TensorLike
from fedstill.core.records import Tensors
from fedstill.metrics.accuracy import (
    average_accuracy,
    class_accuracy,
    forgetting,
    in_local_accuracy,
    out_local_accuracy,
    uniform_accuracy,
)
from fedstill.metrics.values import mean_over_classes, same_classes, values

# What local models know of their own clients' classes and of the others': knowledge outside of
# local data (KOLD).


def local_accuracies(
    clients: Sequence[Mapping[str, Any]],
    received: Sequence[Any],
    aggregated: Sequence[Any],
    totals: Sequence[int],
) -> dict[str, float]:
    """In- and out-local accuracy of local models, and of the global model before and after the
    round.

    clients: events with ``correct_by_class`` and ``label_counts`` (C,), others are passed over;
    received, aggregated: class accuracies (C,) of the global models; totals: test examples by class
    (C,). Gives means over clients, plain and weighted by size, the spread (population) over
    clients, and the global models' accuracy on the mean of the clients' label distributions. Keys
    with ``_seen`` are the plain means over classes that a client has, or does not have; a client
    that has them all has no such out-local accuracy. Empty if no client was measured.

    Source: FedNTD, section 2.2 and figure 4; the form ``_seen``: FedADKD, figure 6.
    """
    measured = [e for e in clients if "correct_by_class" in e]
    if not measured:
        return {}
    counts = np.asarray([e["label_counts"] for e in measured], dtype=np.float64)
    sizes = counts.sum(1)
    shares = counts / counts.sum(1, keepdims=True)
    local = [class_accuracy(e["correct_by_class"], totals) for e in measured]
    out: dict[str, float] = {}
    for form, unweighted in (("", False), ("_seen", True)):
        for side, accuracy in (("in", in_local_accuracy), ("out", out_local_accuracy)):
            by_client = [accuracy(a, p, unweighted) for a, p in zip(local, shares, strict=True)]
            for key, value in over_clients(by_client, sizes).items():
                out[f"{side}_local_accuracy{form}{key}"] = value
    mean_share = shares.mean(0)
    for model, accuracy_by_class in (("received", received), ("global", aggregated)):
        out[f"{model}_in_local_accuracy"] = in_local_accuracy(accuracy_by_class, mean_share)
        out[f"{model}_out_local_accuracy"] = out_local_accuracy(accuracy_by_class, mean_share)
    return out


def by_epoch(
    clients: Sequence[Mapping[str, Any]], totals: Sequence[int]
) -> dict[str, dict[str, dict[str, Any]]]:
    """In- and out-local accuracy of models in training: as received, and after each local epoch.

    clients: events with their stage's ``name``, ``correct_by_epoch`` (epochs + 1, C) and
    ``label_counts`` (C,), others are passed over; totals: test examples by class (C,). Gives
    ``{"by_epoch": {stage: {...}}}`` with lists over epochs of the means over clients, plain and
    weighted by size, and of the spread (population); a client that stopped earlier is left out from
    there on. Empty if no client was measured. Source: FedNTD, figure 6.
    """
    stages: dict[str, list[Mapping[str, Any]]] = {}
    for event in clients:
        if "correct_by_epoch" in event:
            stages.setdefault(event["name"], []).append(event)
    if not stages:
        return {}
    return {"by_epoch": {name: _epochs(events, totals) for name, events in stages.items()}}


def _epochs(events: Sequence[Mapping[str, Any]], totals: Sequence[int]) -> dict[str, Any]:
    out: dict[str, Any] = {"clients": len(events)}
    for epoch in range(max(len(e["correct_by_epoch"]) for e in events)):
        measured = [e for e in events if epoch < len(e["correct_by_epoch"])]
        local = [class_accuracy(e["correct_by_epoch"][epoch], totals) for e in measured]
        counts = np.asarray([e["label_counts"] for e in measured], dtype=np.float64)
        sizes = counts.sum(1)
        shares = counts / counts.sum(1, keepdims=True)
        for side, accuracy in (("in", in_local_accuracy), ("out", out_local_accuracy)):
            by_client = [accuracy(a, p) for a, p in zip(local, shares, strict=True)]
            for key, value in over_clients(by_client, sizes).items():
                out.setdefault(f"{side}_local_accuracy{key}", []).append(value)
    return out


def over_clients(by_client: Sequence[float], sizes: TensorLike) -> dict[str, float]:
    """Mean and population spread over clients, plain (keys "" and "_std") and weighted by size
    ("_weighted", ...).

    by_client: a number for each client; NaN, where it has none, is left out; sizes: as many
    weights. NaN if nothing is left.

    >>> over_clients([0.0, 1.0], [1, 3])["_weighted"]
    0.75
    """
    numbers = values(by_client, 1, "numbers of clients")
    weights = values(sizes, 1, "sizes of clients")
    out: dict[str, float] = {}
    for key, weight in (("", np.ones_like(weights)), ("_weighted", weights)):
        mean = mean_over_classes(numbers, weight)
        out |= {key: mean, f"{key}_std": mean_over_classes((numbers - mean) ** 2, weight) ** 0.5}
    return out


# Accuracy of each client's own model on its held-out data and on the public images: the measure
# ``private_public``.


SERVER_ID = -1


def private_public(clients: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy of every client's model on its held-out data and on the public images, and the
    server's on the latter.

    clients: events of one round in order, with ``private`` and ``public`` as
    ``{"counts", "before", "after"}`` by class (``before`` only in stages on public data); others
    are passed over. Gives ``private_by_client`` and ``public_by_client`` (client id to accuracy at
    the end of the round), ``private_before_by_client`` and ``public_before_by_client`` (before the
    last stage on public data), means over clients ``private_accuracy`` and ``public_accuracy``, and
    ``server_public_accuracy``. What was not measured is left out: data without labels, clients
    without held-out data. Source: HiPer-FedKD, table 1 and its notebooks.
    """
    out: dict[str, Any] = {}
    for kind in ("private", "public"):
        final: dict[str, float] = {}
        initial: dict[str, float] = {}
        for event in clients:
            counts = _counts(event, kind)
            total = sum(counts.get("counts", ()))
            if not total or event["client"] == SERVER_ID:
                continue
            client = str(event["client"])
            final[client] = sum(counts["after"]) / total
            if "before" in counts:
                initial[client] = sum(counts["before"]) / total
        if final:
            out[f"{kind}_accuracy"] = sum(final.values()) / len(final)
            out[f"{kind}_by_client"] = final
        if initial:
            out[f"{kind}_before_by_client"] = initial

    at_server = [_counts(e, "public") for e in clients if e["client"] == SERVER_ID]
    labelled = [counts for counts in at_server if sum(counts.get("counts", ()))]
    if labelled:
        counts = labelled[-1]
        out["server_public_accuracy"] = sum(counts["after"]) / sum(counts["counts"])
    return out


def _counts(event: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """An event's counts of the kind private or public; empty if it has none."""
    counts = event.get(kind)
    if not isinstance(counts, Mapping):
        return {}
    return counts


# Accuracy of clients' own models, for methods that leave each client a model of its own.


def personal_accuracies(
    class_accuracy: Mapping[int, TensorLike], label_counts: Sequence[Sequence[int]]
) -> dict[int, float]:
    """{client: accuracy of its model on test examples whose classes are distributed as its own
    data}.

    class_accuracy: (C,) by client; label_counts: (clients, C). A client without data, or none of
    whose classes has a test image, is left out.

    >>> personal_accuracies({0: [1.0, 0.5], 1: [0.0, 0.0]}, [[3, 1], [0, 0]])
    {0: 0.875}
    """
    out: dict[int, float] = {}
    for client, accuracy in class_accuracy.items():
        counts = np.asarray(label_counts[client], dtype=np.float64)
        if not counts.sum():
            continue
        personal = in_local_accuracy(accuracy, counts / counts.sum())
        if not np.isnan(personal):
            out[client] = personal
    return out


def personal_answers(
    class_accuracy: Mapping[int, TensorLike],
    best: Mapping[int, TensorLike],
    label_counts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Accuracy and forgetting of the clients' own models, over the clients whose models were
    measured.

    class_accuracy: (C,) by client, of its own model; best: by client, the best of its earlier looks
    for each class;
    label_counts: (clients, C). Gives ``personal_accuracy`` (``personal_accuracies``, the mean over
    clients) and its population spread ``personal_accuracy_std``, ``personal_by_client``,
    ``personal_class_accuracy`` (C,), the mean over clients, ``personal_clients``, how many they
    are, and ``personal_forgetting``: how far a client's own classes are below its best earlier
    look, the mean over these classes and then over clients; 0 before the second look. Empty if no
    client was measured.

    >>> personal_answers({0: [0.5, 0.0]}, {0: [0.75, 0.25]}, [[4, 0]])["personal_forgetting"]
    0.25
    """
    by_client = personal_accuracies(class_accuracy, label_counts)
    if not by_client:
        return {}
    table = np.stack([values(class_accuracy[c], 1, "class accuracies") for c in by_client])
    means: list[float | None] = []
    for column in table.T:
        mean = None
        if not np.isnan(column).all():
            mean = float(np.nanmean(column))
        means.append(mean)

    lost = [_lost(class_accuracy[c], best[c], label_counts[c]) for c in by_client if c in best]
    mean_lost = 0.0
    if lost:
        mean_lost = float(np.mean(lost))
    numbers = list(by_client.values())
    return {
        "personal_accuracy": float(np.mean(numbers)),
        "personal_accuracy_std": float(np.std(numbers)),
        "personal_by_client": {str(client): value for client, value in sorted(by_client.items())},
        "personal_class_accuracy": means,
        "personal_clients": len(by_client),
        "personal_forgetting": mean_lost,
    }


def _lost(current: TensorLike, best: TensorLike, counts: Sequence[int]) -> float:
    """The forgetting of a client's own classes."""
    classes = [c for c, count in enumerate(counts) if count > 0]
    best_accuracy = values(best, 1, "class accuracies").take(classes)
    accuracy = values(current, 1, "class accuracies").take(classes)
    return forgetting(np.stack([best_accuracy, accuracy]))


# Gain of a querying client on the queried classes, and forgetting of its own classes.


def query_accuracy_gain(local: TensorLike, final: TensorLike, query: Iterable[int]) -> float:
    """The mean gain in accuracy over the queried classes.

    local, final: (C,) class accuracies in [0, 1] of the local model and of the model after the
    query; query: class ids. Gives a number in [-1, 1], higher is better; NaN for an empty query.
    Raises ConfigError for a class id outside [0, C).

    Source: QKT, sec. 4.1 and appendix A.2 (Query Accuracy Gain).

    >>> query_accuracy_gain([0.0, 0.9], [0.5, 0.8], query=[0])
    0.5
    """
    old = values(local, 1, "accuracies before")
    new = values(final, 1, "accuracies after")
    same_classes(old, new)
    weights = np.zeros_like(old)
    for c in query:
        if not 0 <= c < len(old):
            raise ConfigError(f"query class {c} is outside [0, {len(old)})")
        weights[c] = 1.0
    return mean_over_classes(new - old, weights)


def query_forgetting(local: TensorLike, final: TensorLike, proportions: TensorLike) -> float:
    """The mean loss of accuracy over the client's own classes; gains do not make up for losses.

    local, final: (C,) class accuracies in [0, 1]; proportions: (C,), own classes are those
    above 0. Gives ``mean min(0, final - local)`` in [-1, 0], higher is better; NaN for a client
    without classes.

    Source: QKT, sec. 4.1 and appendix A.2 (Forgetting).
    Reading: some printed values are positive, which this definition rules out; they are misprints.

    >>> query_forgetting([0.75, 0.5, 0.0], [0.5, 1.0, 0.5], proportions=[0.5, 0.5, 0.0])
    -0.125
    """
    old = values(local, 1, "accuracies before")
    new = values(final, 1, "accuracies after")
    shares = values(proportions, 1, "label shares")
    same_classes(old, new, shares)
    return mean_over_classes(np.minimum(0.0, new - old), (shares > 0).astype(np.float64))


# Gains and losses of clients by their queries: per client and over clients, from the events of a
# journal.


EventFields = Mapping[str, Any]

QUERY_MEASURES = (
    "average_accuracy",
    "gain",
    "forgetting",
    "uniform_accuracy",
    "average_accuracy_before",
)
"""The numbers of a querying client; the journal has their means over clients as ``query_NAME``."""

UNTAUGHT = "query_untaught"
"""How many of the querying clients had no teacher at all (QKT's T_Q is empty); they learned nothing
from their peers.
"""


def answers(
    queries: Mapping[int, Sequence[int]],
    label_counts: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
    alone: Mapping[int, EventFields],
    acted: Sequence[EventFields],
    *,
    server: EventFields,
    totals: Sequence[int],
    personal: Collection[str],
) -> dict[str, Any]:
    """The accuracy of each querying client after its query and alone, and the means over these
    clients.

    queries: class ids by client; label_counts: (C,) by client; alone: each client's event of the
    stage ``fit``, with ``correct_by_class``; acted: this round's client events, in order; server:
    the round's ``class_accuracy`` and ``others``; totals: (C,) test examples; personal: the stages
    after which a client's own model is its answer. Gives ``answers``, one mapping a client, and for
    each of ``QUERY_MEASURES`` its mean ``query_…`` and population spread; a number that cannot be
    had (gain without a fit) is None. ``teachers`` is how many taught a client, and
    ``query_untaught`` how many clients nobody taught, where the method says it. Clients that nobody
    taught count in all means. Empty without queries. Source: QKT, appendix A.2.
    """
    personal_events = {
        e["client"]: e for e in acted if e["name"] in personal and "correct_by_class" in e
    }
    by_client = []
    for client, query in sorted(queries.items()):
        event = personal_events.get(client)
        final = _measured_accuracy(event, totals)
        if final is None:
            others = server.get("others", {})
            final = others.get(f"client {client}", server)["class_accuracy"]
        counts = label_counts[client]
        shares = np.asarray(counts, dtype=np.float64) / max(sum(counts), 1)
        local = _measured_accuracy(alone.get(client), totals)
        by_client.append(
            {
                "client": client,
                "query": list(query),
                "teachers": _teacher_count(event),
                **_query_numbers(local, final, shares, query),
            }
        )
    if not by_client:
        return {}
    return {"answers": by_client, **_means_over_queries(by_client)}


def _query_numbers(
    local: TensorLike | None, final: TensorLike, shares: TensorLike, query: Sequence[int]
) -> dict[str, float | None]:
    """The numbers of ``QUERY_MEASURES``, from class accuracies (C,) of the local and the final
    model; None if there is no local model.
    """
    numbers: dict[str, float | None] = {
        "average_accuracy": _or_none(average_accuracy(final, shares, query)),
        "uniform_accuracy": _or_none(uniform_accuracy(final, shares, query)),
        "gain": None,
        "forgetting": None,
        "average_accuracy_before": None,
    }
    if local is not None:
        numbers["gain"] = _or_none(query_accuracy_gain(local, final, query))
        numbers["forgetting"] = _or_none(query_forgetting(local, final, shares))
        numbers["average_accuracy_before"] = _or_none(average_accuracy(local, shares, query))
    return numbers


def _means_over_queries(by_client: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means and spreads over querying clients, and how many of them had no teacher."""
    means: dict[str, Any] = {}
    for name in QUERY_MEASURES:
        numbers = [fields[name] for fields in by_client if fields[name] is not None]
        means[f"query_{name}"] = None
        means[f"query_{name}_std"] = None
        if numbers:
            means[f"query_{name}"] = float(np.mean(numbers))
            means[f"query_{name}_std"] = float(np.std(numbers))
    teachers = [fields["teachers"] for fields in by_client if fields["teachers"] is not None]
    if teachers:
        means[UNTAUGHT] = teachers.count(0)
    return means


def _teacher_count(event: EventFields | None) -> int | None:
    """How many teachers a client had, if its method reports them."""
    if not event or "teachers" not in event:
        return None
    return len(event["teachers"])


def _measured_accuracy(event: EventFields | None, totals: Sequence[int]) -> TensorLike | None:
    """The class accuracies (C,) in a client's event; None if there are none."""
    if not event or "correct_by_class" not in event:
        return None
    return class_accuracy(event["correct_by_class"], totals)


def _or_none(value: float) -> float | None:
    if np.isnan(value):
        return None
    return value


# Divergence: how far local weights, labels and gradients are from the global ones and from each
# other.


def weight_divergence(a: Tensors, b: Tensors) -> tuple[float, float]:
    """The L1 and the Euclidean distance of two models' weights, summed in float64 over all entries
    of ``a``.

    a, b: named tensors of equal shapes. Raises ConfigError if an entry is missing or has another
    shape.

    Source: FedNTD, sec. 5.2 and figure 8.
    Reading: table 3 of the paper is an L1 norm, section 5.2 does not say which; both are given.

    >>> weight_divergence({"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([0.0, 4.0])})
    (7.0, 5.0)
    """
    total = 0.0
    squares = 0.0
    for name, value in a.items():
        if name not in b or b[name].shape != value.shape:
            raise ConfigError(
                f"entry {name!r} is not in both models with one shape: they cannot be compared"
            )
        difference = value.detach().double() - b[name].detach().double()
        total += float(difference.abs().sum())
        squares += float(difference.square().sum())
    return total, float(np.sqrt(squares))


def distribution_distance(class_accuracy: TensorLike, proportions: TensorLike) -> float:
    """``sum_c |A_c / sum A - p_c|``: the distance between a client's label distribution and a
    model's distribution of class accuracies; in [0, 2].

    class_accuracy, proportions: (C,). Classes without accuracy are left out of both; NaN for a
    model right nowhere.

    Source: FedNTD, sec. 5.2 and figure 8.
    Reading: the paper divides accuracies by their mean, which would sum to C; to compare with
    proportions they must sum to 1, so we divide by their sum.

    >>> distribution_distance([0.5, 0.5], [1.0, 0.0])
    1.0
    """
    accuracy = values(class_accuracy, 1, "class accuracies")
    shares = values(proportions, 1, "label shares")
    same_classes(accuracy, shares)
    measured = ~np.isnan(accuracy)
    accuracy = accuracy[measured]
    shares = shares[measured]
    total_accuracy = float(accuracy.sum())
    total_share = float(shares.sum())
    if total_accuracy <= 0 or total_share <= 0:
        return float("nan")
    return float(np.abs(accuracy / total_accuracy - shares / total_share).sum())


def gradient_diversity(gradients: list[Tensors]) -> float:
    """``mean_k ||g_k||^2 / ||mean_k g_k||^2``: 1 for clients that agree, more the more they pull
    apart; at least 1.

    gradients: one a client, named tensors of equal shapes, summed in float64. NaN without any, or
    if their mean is 0.

    Source: FedNTD, eq. 8.
    Reading: eq. 20 leaves out 1/K under the sum in the denominator, and would be this over K^2; we
    follow eq. 8.

    >>> gradient_diversity([{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}])
    2.0
    """
    if not gradients:
        return float("nan")
    clients = len(gradients)
    mean_of_squares = 0.0
    square_of_mean = 0.0
    for name in gradients[0]:
        entries = [gradient[name].detach().double() for gradient in gradients]
        mean_of_squares += sum(float(entry.square().sum()) for entry in entries) / clients
        square_of_mean += float((torch.stack(entries).sum(0) / clients).square().sum())
    if not square_of_mean > 0:
        return float("nan")
    return mean_of_squares / square_of_mean


# Weight alignment: whether the same units of two models still stand for the same classes.


def preferred_classes(activations: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The class at which each unit of a layer is most active on average: (U,) int64.

    activations: (n, U) outputs of a layer; labels: (n,) int64 in [0, C). No unit prefers a class
    without examples; of equal classes the first counts, so a silent unit prefers class 0. Raises
    ConfigError without an example.

    Source: FedNTD, sec. 5.1.
    Reading: the text takes the mean over a class's examples, the definition their sum; on a test
    set with equally many examples of each class, both give the same classes. We take the mean,
    which unequal numbers of examples do not distort.

    >>> preferred_classes(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1]), 2)
    tensor([0, 1])
    """
    if not len(labels):
        raise ConfigError("the class of a unit needs at least one example")
    labels = labels.cpu()
    outputs = activations.detach().cpu().double()
    zeros = torch.zeros(classes, outputs.shape[1], dtype=torch.float64)
    sums = zeros.index_add_(0, labels, outputs)
    counts = torch.bincount(labels, minlength=classes).unsqueeze(1)
    means = torch.where(counts > 0, sums / counts.clamp(min=1), -torch.inf)
    return means.argmax(0)


def alignment(a: Tensor, b: Tensor) -> float:
    """The share of units that prefer the same class in two models, in [0, 1].

    a, b: (U,) as ``preferred_classes`` gives them. Raises ConfigError for layers of different
    widths, or of none.

    Source: FedNTD, sec. 5.1 and table 2.

    >>> alignment(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2]))
    0.75
    """
    if a.shape != b.shape or not a.numel():
        raise ConfigError(
            f"layers of {tuple(a.shape)} and {tuple(b.shape)} units cannot be compared"
        )
    return float((a == b).double().mean())
