"""Measures of answered queries: identities of QKT's measures, and which model is a client's
answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from fedstill.metrics.local_models import answers

TOTALS = [10, 10, 10, 10]
"""Test examples by class."""

COUNTS = [[30, 10, 0, 0], [0, 0, 20, 20]]
"""Training examples of both clients, by class."""

SERVER = {
    "class_accuracy": [0.1, 0.2, 0.3, 0.4],
    "others": {"client 1": {"class_accuracy": [1.0, 0.0, 0.0, 0.0]}},
}


def event(client: int, stage: str, correct: list[int], **fields: Any) -> dict[str, Any]:
    """The event of a client whose model is correct on so many test examples of each class."""
    return {"client": client, "name": stage, "correct_by_class": correct, **fields}


FITS = [event(0, "fit", [10, 10, 0, 0]), event(1, "fit", [0, 0, 10, 0])]
"""Each client fits its own classes, client 1 only one of two."""


def measured(
    queries: Mapping[int, tuple[int, ...]],
    events: Sequence[dict[str, Any]],
    personal: Collection[str],
    fits: Sequence[dict[str, Any]] = FITS,
) -> dict[str, Any]:
    """The measures of queries; ``personal`` are the stages that train models of clients."""
    return answers(
        queries,
        COUNTS,
        {fit["client"]: fit for fit in fits},
        list(events),
        server=SERVER,
        totals=TOTALS,
        personal=set(personal),
    )


@pytest.mark.parametrize("query", [(2,), (2, 3)])
def test_a_client_without_any_answer_scores_one_over_one_more_than_its_queries(
    query: tuple[int, ...],
) -> None:
    """It is perfect on its own classes, and always wrong on those of its query."""
    numbers = measured({0: query}, FITS, personal={"fit"})

    assert numbers["query_average_accuracy"] == pytest.approx(1 / (1 + len(query)))
    assert numbers["query_gain"] == 0
    assert numbers["query_forgetting"] == 0
    assert numbers["query_average_accuracy_before"] == numbers["query_average_accuracy"]


def test_the_last_personal_model_is_the_answer() -> None:
    transfer = event(0, "transfer", [0, 0, 10, 0])
    refine = event(0, "refine", [5, 10, 8, 0])

    numbers = measured({0: (2,)}, [*FITS, transfer, refine], personal={"fit", "transfer", "refine"})

    (answer,) = numbers["answers"]
    assert answer["gain"] == pytest.approx(0.8)
    assert answer["forgetting"] == pytest.approx(-0.25), "half of one of two classes"
    accuracy_on_data = 0.75 * 0.5 + 0.25 * 1
    assert answer["average_accuracy"] == pytest.approx((accuracy_on_data + 0.8) / 2)
    assert answer["uniform_accuracy"] == pytest.approx((0.5 + 1 + 0.8) / 3)


def test_without_a_personal_model_the_servers_answer_is_scored_with_the_clients_weights() -> None:
    """A predictor of the client's own name takes precedence, as for client 1."""
    numbers = measured({0: (2,), 1: (0,)}, FITS, personal=())

    first, second = numbers["answers"]
    assert first["gain"] == pytest.approx(0.3)
    assert second["gain"] == pytest.approx(1.0)
    assert numbers["query_gain"] == pytest.approx((0.3 + 1.0) / 2)
    assert numbers["query_gain_std"] == pytest.approx((1.0 - 0.3) / 2)


def test_gain_needs_a_fit_and_forgetting_is_never_positive() -> None:
    without_fit = measured({1: (0,)}, [], personal=(), fits=())
    improved = measured({1: (0,)}, [event(1, "fit", [9, 0, 10, 9])], personal={"fit"})

    assert without_fit["query_gain"] is None
    assert without_fit["query_forgetting"] is None
    assert without_fit["query_average_accuracy"] is not None
    assert improved["query_forgetting"] == 0


def test_queries_without_a_teacher_are_counted_if_the_method_names_teachers() -> None:
    correct = [10, 10, 0, 0]
    untaught = event(0, "refine", correct, query=[2], teachers=[])
    taught = event(1, "refine", correct, query=[2], teachers=[0])
    unknown = event(0, "refine", correct)

    numbers = measured({0: (2,), 1: (0,)}, [untaught, taught], personal={"refine"})
    without_teachers = measured({0: (2,)}, [unknown], personal={"refine"})

    assert [answer["teachers"] for answer in numbers["answers"]] == [0, 1]
    assert numbers["query_untaught"] == 1
    assert without_teachers["answers"][0]["teachers"] is None
    assert "query_untaught" not in without_teachers


def test_no_queries_no_measures() -> None:
    assert measured({}, [], personal=()) == {}
