"""Clients' models: their accuracy on their own classes, on other classes, on public data and on
queried classes, and their distances from the global model and from each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.core.label_counts import TensorLike
from fedstill.core.records import SERVER, Tensors
from fedstill.metrics.accuracy import (
    Values,
    average_accuracy,
    check_same_classes,
    class_accuracy,
    float_array,
    forgetting,
    in_local_accuracy,
    out_local_accuracy,
    query_mask,
    uniform_accuracy,
    weighted_mean,
)

# The accuracy of local models on their client's classes and on other classes: knowledge outside of
# the local distribution (KOLD).


def local_accuracies(
    clients: Sequence[Mapping[str, Any]],
    received: Sequence[Any],
    aggregated: Sequence[Any],
    totals: Sequence[int],
) -> dict[str, float]:
    """In- and out-local accuracy of local models, and of the global model before and after the
    round.

    clients: events with ``correct_by_class`` and ``label_counts`` (C,); other events, and those of
    clients without examples, are ignored.
    received, aggregated: class accuracies (C,) of the global model before and after the round.
    totals: test examples by class (C,). Returns means over clients, unweighted and weighted by
    size, population standard deviations over clients, and the global models' accuracy on the mean
    of the clients' label distributions. Keys with ``_seen`` are unweighted means over the classes
    that a client has, or does not have; a client with all classes has no such out-local accuracy.
    Empty if no client was measured.

    Source: FedNTD, section 2.2 and figure 4; the form ``_seen``: FedADKD, figure 6.
    """
    measured = [e for e in clients if "correct_by_class" in e and any(e["label_counts"])]
    if not measured:
        return {}
    counts = np.asarray([e["label_counts"] for e in measured], dtype=np.float64)
    local = [class_accuracy(e["correct_by_class"], totals) for e in measured]
    out = {**_by_side(local, counts), **_by_side(local, counts, "_seen")}
    mean_share = _label_shares(counts).mean(0)
    for model, accuracy_by_class in (("received", received), ("global", aggregated)):
        out[f"{model}_in_local_accuracy"] = in_local_accuracy(accuracy_by_class, mean_share)
        out[f"{model}_out_local_accuracy"] = out_local_accuracy(accuracy_by_class, mean_share)
    return out


def _by_side(
    local: Sequence[TensorLike], counts: Values, form: Literal["", "_seen"] = ""
) -> dict[str, float]:
    """In- and out-local accuracy over clients.

    local: class accuracies (C,) of each client's model; counts: label counts (clients, C). form:
    "_seen" for unweighted means over classes.
    """
    unweighted = form == "_seen"
    sizes = counts.sum(1)
    shares = _label_shares(counts)
    out: dict[str, float] = {}
    for side, accuracy in (("in", in_local_accuracy), ("out", out_local_accuracy)):
        by_client = [accuracy(a, p, unweighted) for a, p in zip(local, shares, strict=True)]
        for key, value in over_clients(by_client, sizes).items():
            out[f"{side}_local_accuracy{form}{key}"] = value
    return out


def _label_shares(counts: Values) -> Values:
    """The label distribution of each client, from label counts (clients, C)."""
    shares: Values = counts / counts.sum(1, keepdims=True)
    return shares


def by_epoch(
    clients: Sequence[Mapping[str, Any]], totals: Sequence[int]
) -> dict[str, dict[str, dict[str, Any]]]:
    """In- and out-local accuracy of local models before training and after each local epoch.

    clients: events with the stage's ``name``, ``correct_by_epoch`` (epochs + 1, C) and
    ``label_counts`` (C,); other events are ignored. totals: test examples by class (C,). Returns
    ``{"by_epoch": {stage: {...}}}`` with lists over epochs of means over clients, unweighted and
    weighted by size, and of population standard deviations. Each epoch only includes the clients
    that trained so long. Empty if no client was measured. Source: FedNTD, figure 6.
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
        for name, value in _by_side(local, counts).items():
            out.setdefault(name, []).append(value)
    return out


def over_clients(by_client: Sequence[float], sizes: TensorLike) -> dict[str, float]:
    """Mean and population standard deviation over clients, unweighted (keys "" and "_std") and
    weighted by size ("_weighted" and "_weighted_std").

    by_client: a number for each client; NaN is ignored. sizes: the weight of each client. NaN if
    there are no numbers.

    >>> over_clients([0.0, 1.0], [1, 3])["_weighted"]
    0.75
    """
    numbers = float_array(by_client, 1, "numbers of clients")
    weights = float_array(sizes, 1, "sizes of clients")
    out: dict[str, float] = {}
    for key, weight in (("", np.ones_like(weights)), ("_weighted", weights)):
        mean = weighted_mean(numbers, weight)
        out |= {key: mean, f"{key}_std": weighted_mean((numbers - mean) ** 2, weight) ** 0.5}
    return out


# Accuracy of each client's own model on its held-out data and on the public images: the measure
# ``private_public``.


def private_public(clients: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The accuracy of every client's model on its held-out data and on the public images, and the
    accuracy of the server's model on the public images.

    clients: events of one round in order, with ``private`` and ``public`` as ``{"counts", "before",
    "after"}`` by class (``before`` only in stages on public data); other events are ignored.
    Returns ``private_by_client`` and ``public_by_client`` (client id to accuracy at the end of the
    round), ``private_before_by_client`` and ``public_before_by_client`` (before the last stage on
    public data), means over clients ``private_accuracy`` and ``public_accuracy``, and
    ``server_public_accuracy``. Without labels or held-out data, the corresponding numbers are
    missing. Source: HiPer-FedKD, table 1 and its notebooks.
    """
    out: dict[str, Any] = {}
    for kind in ("private", "public"):
        final: dict[str, float] = {}
        initial: dict[str, float] = {}
        for event in clients:
            counts = _counts(event, kind)
            total = sum(counts.get("counts", ()))
            if not total or event["client"] == SERVER:
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

    at_server = [_counts(e, "public") for e in clients if e["client"] == SERVER]
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


# Accuracy of personal models, for methods that end with a model for each client.


def personal_accuracy(class_accuracy: TensorLike, label_counts: Sequence[int]) -> float:
    """The accuracy of a client's model on test examples with the client's label distribution.

    class_accuracy, label_counts: (C,). NaN for a client without data, or if none of its classes has
    test examples.

    >>> personal_accuracy([1.0, 0.5], [3, 1])
    0.875
    """
    counts = np.asarray(label_counts, dtype=np.float64)
    if not counts.sum():
        return float("nan")
    return in_local_accuracy(class_accuracy, counts / counts.sum())


def personal_accuracies(
    class_accuracy: Mapping[int, TensorLike], label_counts: Sequence[Sequence[int]]
) -> dict[int, float]:
    """The accuracy of each client's model on test examples with the client's label distribution.

    class_accuracy: (C,) by client; label_counts: (clients, C). Clients without data, and clients
    whose classes have no test examples, are missing in the result.

    >>> personal_accuracies({0: [1.0, 0.5], 1: [0.0, 0.0]}, [[3, 1], [0, 0]])
    {0: 0.875}
    """
    out: dict[int, float] = {}
    for client, accuracy in class_accuracy.items():
        personal = personal_accuracy(accuracy, label_counts[client])
        if not np.isnan(personal):
            out[client] = personal
    return out


def personal_answers(
    class_accuracy: Mapping[int, TensorLike],
    best: Mapping[int, TensorLike],
    label_counts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Accuracy and forgetting of personal models, over the clients whose models were measured.

    class_accuracy: class accuracies (C,) by client; best: the best class accuracies (C,) in earlier
    rounds, by client; label_counts: (clients, C). Returns ``personal_by_client``
    (``personal_accuracies``), its mean ``personal_accuracy`` and population standard deviation
    ``personal_accuracy_std``, ``personal_class_accuracy`` (C,), the mean over clients,
    ``personal_clients``, the number of clients, and ``personal_forgetting``: the forgetting of a
    client's classes, averaged over these classes and then over clients; 0 without earlier rounds.
    Empty if no client was measured.

    >>> personal_answers({0: [0.5, 0.0]}, {0: [0.75, 0.25]}, [[4, 0]])["personal_forgetting"]
    0.25
    """
    by_client = personal_accuracies(class_accuracy, label_counts)
    if not by_client:
        return {}
    table = np.stack([float_array(class_accuracy[c], 1, "class accuracies") for c in by_client])
    lost = [_lost(class_accuracy[c], best[c], label_counts[c]) for c in by_client if c in best]
    mean_lost = 0.0
    if lost:
        mean_lost = float(np.mean(lost))
    numbers = list(by_client.values())
    return {
        "personal_accuracy": float(np.mean(numbers)),
        "personal_accuracy_std": float(np.std(numbers)),
        "personal_by_client": {str(client): value for client, value in sorted(by_client.items())},
        "personal_class_accuracy": _class_means(table),
        "personal_clients": len(by_client),
        "personal_forgetting": mean_lost,
    }


def _class_means(table: Values) -> list[float | None]:
    """The mean of each column of class accuracies (clients, C); None for a column without any."""
    means: list[float | None] = []
    for column in table.T:
        mean = None
        if not np.isnan(column).all():
            mean = float(np.nanmean(column))
        means.append(mean)
    return means


def _lost(current: TensorLike, best: TensorLike, counts: Sequence[int]) -> float:
    """The mean forgetting of a client's classes."""
    classes = [c for c, count in enumerate(counts) if count > 0]
    best_accuracy = float_array(best, 1, "class accuracies").take(classes)
    accuracy = float_array(current, 1, "class accuracies").take(classes)
    return forgetting(np.stack([best_accuracy, accuracy]))


# The gain of a querying client on the queried classes, and the forgetting of its local classes.


def query_accuracy_gain(local: TensorLike, final: TensorLike, query: Iterable[int]) -> float:
    """The mean gain in accuracy over the queried classes.

    local, final: (C,) class accuracies in [0, 1] of the local model and of the model after the
    query; query: class ids. Returns a number in [-1, 1], higher is better; NaN for an empty query.
    Raises ConfigError for a class id outside [0, C).

    Source: QKT, sec. 4.1 and appendix A.2 (Query Accuracy Gain).

    >>> query_accuracy_gain([0.0, 0.9], [0.5, 0.8], query=[0])
    0.5
    """
    old = float_array(local, 1, "accuracies before")
    new = float_array(final, 1, "accuracies after")
    check_same_classes(old, new)
    is_queried = query_mask(query, len(old))
    return weighted_mean(new - old, is_queried.astype(np.float64))


def query_forgetting(local: TensorLike, final: TensorLike, proportions: TensorLike) -> float:
    """The mean loss of accuracy over the client's local classes; gains do not offset losses.

    local, final: (C,) class accuracies in [0, 1]; proportions: (C,), above 0 for local classes.
    Returns ``mean min(0, final - local)`` in [-1, 0], higher is better; NaN for a client without
    classes.

    Source: QKT, sec. 4.1 and appendix A.2 (Forgetting).
    Reading: some values in the paper are positive, which this definition excludes; we assume
    misprints.

    >>> query_forgetting([0.75, 0.5, 0.0], [0.5, 1.0, 0.5], proportions=[0.5, 0.5, 0.0])
    -0.125
    """
    old = float_array(local, 1, "accuracies before")
    new = float_array(final, 1, "accuracies after")
    shares = float_array(proportions, 1, "label shares")
    check_same_classes(old, new, shares)
    return weighted_mean(np.minimum(0.0, new - old), (shares > 0).astype(np.float64))


# Gains and losses of querying clients, from the events of a journal.


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
"""The number of querying clients without a teacher (QKT's T_Q is empty), who learned nothing from
their peers.
"""


def answers(
    queries: Mapping[int, Sequence[int]],
    label_counts: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
    fit_events: Mapping[int, EventFields],
    client_events: Sequence[EventFields],
    *,
    server: EventFields,
    totals: Sequence[int],
    personal: Collection[str],
) -> dict[str, Any]:
    """The accuracy of each querying client before and after its query, and means over these
    clients.

    queries: class ids by client; label_counts: (C,) by client; fit_events: each client's event of
    the stage ``fit``, with ``correct_by_class``; client_events: the client events of this round, in
    order; server: ``class_accuracy`` and ``others`` of the round; totals: (C,) test examples;
    personal: the stages after which a client's answer is its personal model. Returns ``answers``, a
    mapping for each client, and for each of ``QUERY_MEASURES`` its mean ``query_…`` and population
    standard deviation; undefined numbers (such as the gain without a fit) are None. If the method
    reports teachers, ``teachers`` is a client's number of teachers, and ``query_untaught`` the
    number of clients without a teacher. Means include these clients. Empty without queries. Source:
    QKT, appendix A.2.
    """
    personal_events = {
        e["client"]: e for e in client_events if e["name"] in personal and "correct_by_class" in e
    }
    by_client = []
    for client, query in sorted(queries.items()):
        event = personal_events.get(client)
        final = _measured_accuracy(event, totals)
        if final is None:
            final = _server_accuracy(server, client)
        counts = label_counts[client]
        shares = np.asarray(counts, dtype=np.float64) / max(sum(counts), 1)
        local = _measured_accuracy(fit_events.get(client), totals)
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
    """Means and standard deviations over querying clients, and the number of those without a
    teacher.
    """
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
    """A client's number of teachers; None if the method does not report teachers."""
    if not event or "teachers" not in event:
        return None
    return len(event["teachers"])


def _measured_accuracy(event: EventFields | None, totals: Sequence[int]) -> TensorLike | None:
    """The class accuracies (C,) in a client's event; None if there are none."""
    if not event or "correct_by_class" not in event:
        return None
    return class_accuracy(event["correct_by_class"], totals)


def _server_accuracy(server: EventFields, client: int) -> TensorLike:
    """The class accuracies (C,) of the server's model for a client or, without one, of its global
    model.
    """
    models = server.get("others", {})
    accuracy: TensorLike = models.get(f"client {client}", server)["class_accuracy"]
    return accuracy


def _or_none(value: float) -> float | None:
    if np.isnan(value):
        return None
    return value


# Divergence of local weights, labels and gradients from the global ones and among clients.


def weight_divergence(a: Tensors, b: Tensors) -> tuple[float, float]:
    """The L1 and the Euclidean distance of two models' weights, summed in float64 over all entries
    of ``a``.

    a, b: named tensors of equal shapes. Raises ConfigError if an entry is missing or has another
    shape.

    Source: FedNTD, sec. 5.2 and figure 8.
    Reading: table 3 of the paper uses the L1 norm, and section 5.2 names no norm; we return both.

    >>> weight_divergence({"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([0.0, 4.0])})
    (7.0, 5.0)
    """
    total = 0.0
    squares = 0.0
    for name, value in a.items():
        if name not in b or b[name].shape != value.shape:
            raise ConfigError(
                f"the models cannot be compared: entry {name!r} is missing or has another shape"
            )
        difference = value.detach().double() - b[name].detach().double()
        total += float(difference.abs().sum())
        squares += float(difference.square().sum())
    return total, float(np.sqrt(squares))


def distribution_distance(class_accuracy: TensorLike, proportions: TensorLike) -> float:
    """``sum_c |A_c / sum A - p_c|``: the distance between a client's label distribution and a
    model's distribution of class accuracies; in [0, 2].

    class_accuracy, proportions: (C,). Classes without accuracy are ignored; NaN if all accuracies
    are 0.

    Source: FedNTD, sec. 5.2 and figure 8.
    Reading: the paper divides accuracies by their mean, so they sum to C. Since proportions sum to
    1, we divide by the sum instead.

    >>> distribution_distance([0.5, 0.5], [1.0, 0.0])
    1.0
    """
    accuracy = float_array(class_accuracy, 1, "class accuracies")
    shares = float_array(proportions, 1, "label shares")
    check_same_classes(accuracy, shares)
    measured = ~np.isnan(accuracy)
    accuracy = accuracy[measured]
    shares = shares[measured]
    total_accuracy = float(accuracy.sum())
    total_share = float(shares.sum())
    if total_accuracy <= 0 or total_share <= 0:
        return float("nan")
    return float(np.abs(accuracy / total_accuracy - shares / total_share).sum())


def gradient_diversity(gradients: list[Tensors]) -> float:
    """``mean_k ||g_k||^2 / ||mean_k g_k||^2``, at least 1: 1 for equal gradients, and larger the
    more they differ.

    gradients: for each client, named tensors of equal shapes, summed in float64. NaN if there are
    none, or if their mean is 0.

    Source: FedNTD, eq. 8.
    Reading: eq. 20 lacks the factor 1/K in the denominator, which would divide the result by K^2;
    we follow eq. 8.

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


# Weight alignment: whether the same units of two models respond to the same classes.


def preferred_classes(activations: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The class with the highest mean activation of each unit of a layer: (U,) int64.

    activations: (n, U) outputs of a layer; labels: (n,) int64 in [0, C). Classes without examples
    are ignored. Among equal classes the first is taken, so a unit that is always 0 prefers class 0.
    Raises ConfigError without examples.

    Source: FedNTD, sec. 5.1.
    Reading: the text uses the mean over a class's examples, the definition their sum. For a
    balanced test set both give the same classes. We use the mean, which does not depend on the
    balance.

    >>> preferred_classes(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1]), 2)
    tensor([0, 1])
    """
    if not len(labels):
        raise ConfigError("the preferred classes of units need at least one example")
    labels = labels.cpu()
    outputs = activations.detach().cpu().double()
    zeros = torch.zeros(classes, outputs.shape[1], dtype=torch.float64)
    sums = zeros.index_add_(0, labels, outputs)
    counts = torch.bincount(labels, minlength=classes).unsqueeze(1)
    means = torch.where(counts > 0, sums / counts.clamp(min=1), -torch.inf)
    return means.argmax(0)


def alignment(a: Tensor, b: Tensor) -> float:
    """The share of units that prefer the same class in two models, in [0, 1].

    a, b: (U,), from ``preferred_classes``. Raises ConfigError for layers of different widths or
    without units.

    Source: FedNTD, sec. 5.1 and table 2.

    >>> alignment(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2]))
    0.75
    """
    if a.shape != b.shape or not a.numel():
        raise ConfigError(
            f"layers of {tuple(a.shape)} and {tuple(b.shape)} units cannot be compared"
        )
    return float((a == b).double().mean())
