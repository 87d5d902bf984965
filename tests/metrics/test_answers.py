"""What came of queries: identities of QKT's measures, and which model is a client's answer."""

from __future__ import annotations

import pytest

from fedstill.metrics.local_models import answers

TOTALS = [10, 10, 10, 10]
COUNTS = [[30, 10, 0, 0], [0, 0, 20, 20]]


def event(client: int, name: str, right: list[int]) -> dict[str, object]:
    return {"client": client, "name": name, "correct_by_class": right}


SERVER = {
    "class_accuracy": [0.1, 0.2, 0.3, 0.4],
    "others": {"client 1": {"class_accuracy": [1.0, 0.0, 0.0, 0.0]}},
}
ALONE = {0: event(0, "fit", [10, 10, 0, 0]), 1: event(1, "fit", [0, 0, 10, 0])}


def test_a_client_perfect_at_home_and_blind_for_its_query_scores_one_over_one_more() -> None:
    for query in ((2,), (2, 3)):
        found = answers(
            {0: query},
            COUNTS,
            ALONE,
            list(ALONE.values()),
            server=SERVER,
            totals=TOTALS,
            personal={"fit"},
        )
        assert found["query_average_accuracy"] == pytest.approx(1 / (1 + len(query)))
        assert found["query_gain"] == found["query_forgetting"] == 0
        assert found["query_average_accuracy_before"] == found["query_average_accuracy"]


def test_the_last_personal_model_is_the_answer() -> None:
    acted = [
        *ALONE.values(),
        event(0, "transfer", [0, 0, 10, 0]),
        event(0, "refine", [5, 10, 8, 0]),
    ]
    found = answers(
        {0: (2,)},
        COUNTS,
        ALONE,
        acted,
        server=SERVER,
        totals=TOTALS,
        personal={"fit", "transfer", "refine"},
    )
    (own,) = found["answers"]
    assert own["gain"] == pytest.approx(0.8)
    assert own["forgetting"] == pytest.approx(-0.25), "half of one of two classes"
    assert own["average_accuracy"] == pytest.approx((0.75 * 0.5 + 0.25 * 1 + 0.8) / 2)
    assert own["uniform_accuracy"] == pytest.approx((0.5 + 1 + 0.8) / 3)


def test_without_a_personal_model_the_servers_answer_is_scored_with_the_clients_weights() -> None:
    found = answers(
        {0: (2,), 1: (0,)},
        COUNTS,
        ALONE,
        list(ALONE.values()),
        server=SERVER,
        totals=TOTALS,
        personal=set(),
    )
    first, second = found["answers"]
    assert first["gain"] == pytest.approx(0.3)
    assert second["gain"] == pytest.approx(1.0), "a predictor of its own name comes first"
    assert found["query_gain"] == pytest.approx(0.65)
    assert found["query_gain_std"] == pytest.approx(0.35)


def test_gain_needs_a_fit_and_forgetting_is_never_positive() -> None:
    found = answers({1: (0,)}, COUNTS, {}, [], server=SERVER, totals=TOTALS, personal=set())
    assert found["query_gain"] is None
    assert found["query_forgetting"] is None
    assert found["query_average_accuracy"] is not None
    better = answers(
        {1: (0,)},
        COUNTS,
        ALONE,
        [event(1, "fit", [9, 0, 10, 9])],
        server=SERVER,
        totals=TOTALS,
        personal={"fit"},
    )
    assert better["query_forgetting"] == 0


def test_who_had_no_teacher_is_counted_where_the_method_says_who_taught() -> None:
    right = [10, 10, 0, 0]
    taught = [
        {**event(c, "refine", right), "query": [2], "teachers": t} for c, t in ((0, []), (1, [0]))
    ]
    found = answers(
        {0: (2,), 1: (0,)}, COUNTS, ALONE, taught, server=SERVER, totals=TOTALS, personal={"refine"}
    )
    assert [a["teachers"] for a in found["answers"]] == [0, 1]
    assert found["query_untaught"] == 1
    silent = answers(
        {0: (2,)},
        COUNTS,
        ALONE,
        [event(0, "refine", right)],
        server=SERVER,
        totals=TOTALS,
        personal={"refine"},
    )
    assert silent["answers"][0]["teachers"] is None
    assert "query_untaught" not in silent


def test_no_queries_no_measures() -> None:
    assert answers({}, COUNTS, ALONE, [], server=SERVER, totals=TOTALS, personal=set()) == {}
