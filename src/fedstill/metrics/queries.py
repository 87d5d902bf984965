"""Gain and forgetting of clients that asked for classes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedstill.core.errors import ConfigError
from fedstill.core.labels import TensorLike
from fedstill.metrics.accuracy import average_accuracy, class_accuracy, uniform_accuracy
from fedstill.metrics.values import mean_over_classes, same_classes, values

# What a client that asked for classes gained on them, and what it lost on its own.


def query_accuracy_gain(before: TensorLike, after: TensorLike, query: Iterable[int]) -> float:
    """The mean gain in accuracy over the queried classes.

    before, after: (C,) class accuracies in [0, 1] of the local model and of the model after the
    query; query: class ids. Gives a number in [-1, 1], higher is better; NaN for an empty query.
    Raises ConfigError for a class id outside [0, C).

    Source: QKT, sec. 4.1 and appendix A.2 (Query Accuracy Gain).

    >>> query_accuracy_gain([0.0, 0.9], [0.5, 0.8], query=[0])
    0.5
    """
    old, new = values(before, 1, "accuracies before"), values(after, 1, "accuracies after")
    same_classes(old, new)
    weights = np.zeros_like(old)
    for c in query:
        if not 0 <= c < len(old):
            raise ConfigError(f"query class {c} is outside [0, {len(old)})")
        weights[c] = 1.0
    return mean_over_classes(new - old, weights)


def query_forgetting(before: TensorLike, after: TensorLike, proportions: TensorLike) -> float:
    """The mean loss of accuracy over the client's own classes; gains do not make up for losses.

    before, after: (C,) class accuracies in [0, 1]; proportions: (C,), own classes are those
    above 0. Gives ``mean min(0, after - before)`` in [-1, 0], higher is better; NaN for a client
    without classes.

    Source: QKT, sec. 4.1 and appendix A.2 (Forgetting).
    Reading: some printed values are positive, which this definition rules out; they are misprints.

    >>> query_forgetting([0.75, 0.5, 0.0], [0.5, 1.0, 0.5], proportions=[0.5, 0.5, 0.0])
    -0.125
    """
    old, new = values(before, 1, "accuracies before"), values(after, 1, "accuracies after")
    shares = values(proportions, 1, "label shares")
    same_classes(old, new, shares)
    return mean_over_classes(np.minimum(0.0, new - old), (shares > 0).astype(np.float64))


# What clients gained and lost by their queries: per client and over clients, from the events of a
# journal.


EventFields = Mapping[str, Any]

QUERY_MEASURES = (
    "average_accuracy",
    "gain",
    "forgetting",
    "uniform_accuracy",
    "average_accuracy_before",
)
"""What is measured of a client that asked; over clients it is journaled as ``query_`` and the
name.
"""

UNTAUGHT = "query_untaught"
"""How many of the clients that asked had no teacher at all (QKT's T_Q is empty); they learned
nothing by asking.
"""


def answers(
    queries: Mapping[int, Sequence[int]],
    label_counts: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
    alone: Mapping[int, EventFields],
    acted: Sequence[EventFields],
    server: EventFields,
    totals: Sequence[int],
    personal: Collection[str],
) -> dict[str, Any]:
    """What each client that asked can do now, what it could do alone, and the means over these
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
    own = {e["client"]: e for e in acted if e["name"] in personal and "correct_by_class" in e}
    by_client = [
        _one(c, query, label_counts[c], alone.get(c), own.get(c), server, totals)
        for c, query in sorted(queries.items())
    ]
    if not by_client:
        return {}
    means: dict[str, Any] = {}
    for name in QUERY_MEASURES:
        known = [f[name] for f in by_client if f[name] is not None]
        means[f"query_{name}"] = float(np.mean(known)) if known else None
        means[f"query_{name}_std"] = float(np.std(known)) if known else None
    taught = [f["teachers"] for f in by_client if f["teachers"] is not None]
    means |= {UNTAUGHT: taught.count(0)} if taught else {}
    return {"answers": by_client, **means}


def _one(
    client: int,
    query: Sequence[int],
    counts: Sequence[int],
    alone: EventFields | None,
    own: EventFields | None,
    server: EventFields,
    totals: Sequence[int],
) -> dict[str, Any]:
    before = _of(alone, totals)
    after = _of(own, totals)
    if after is None:
        after = server.get("others", {}).get(f"client {client}", server)["class_accuracy"]
    shares = np.asarray(counts, dtype=np.float64) / max(sum(counts), 1)
    return {
        "client": client,
        "query": list(query),
        "teachers": len(own["teachers"]) if own and "teachers" in own else None,
        "average_accuracy": _or_none(average_accuracy(after, shares, query)),
        "uniform_accuracy": _or_none(uniform_accuracy(after, shares, query)),
        "gain": None if before is None else _or_none(query_accuracy_gain(before, after, query)),
        "forgetting": None if before is None else _or_none(query_forgetting(before, after, shares)),
        "average_accuracy_before": None
        if before is None
        else _or_none(average_accuracy(before, shares, query)),
    }


def _of(event: EventFields | None, totals: Sequence[int]) -> TensorLike | None:
    return (
        class_accuracy(event["correct_by_class"], totals)
        if event and "correct_by_class" in event
        else None
    )


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else value
