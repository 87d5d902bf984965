"""Queries: a fixed seed draws them for all methods alike, clients raise them for a reason, and a
query without an answer is refused in one line.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import toys
from fedstill.config.overrides import parse_overrides
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.methods.fit import Queries, anyone_asks, queries_of
from fedstill.querying.queries import (
    ClassesByClient,
    ClientKnowledge,
    QueryRule,
    QueryTable,
    because,
    check_queries,
    check_unseen,
    drawn,
    offers,
    picked,
    reasons,
)
from fedstill.running.preparation import prepare

COUNTS = torch.tensor([[90, 0, 0, 49, 0], [0, 60, 50, 10, 0], [100, 100, 100, 100, 0]])
"""Label counts of three clients. Client 0 lacks the classes 1 to 3, client 1 lacks 0 and 3, and
client 2 lacks none that another client has: a client with fewer than 50 examples lacks a class, and
no client has an example of class 4.
"""


def test_single_queries_are_one_class_that_the_client_lacks_and_another_has() -> None:
    draws = [drawn(QueryRule("single", seed), COUNTS) for seed in range(200)]

    assert {queries[1] for queries in draws} == {(0,), (3,)}
    assert all(2 not in queries for queries in draws)
    occurrences = Counter(queries[0] for queries in draws)
    assert set(occurrences) == {(1,), (2,), (3,)}
    assert min(occurrences.values()) / 200 > 0.2, "the draw is uniform"


def test_multi_queries_have_two_or_three_of_the_classes_that_the_client_lacks() -> None:
    draws = [drawn(QueryRule("multi", seed), COUNTS) for seed in range(300)]

    assert all(queries[1] == (0, 3) for queries in draws)
    for queries in draws:
        query = queries[0]
        assert list(query) == sorted(set(query))

    sizes = [len(queries[0]) for queries in draws]
    assert set(sizes) == {2, 3}
    assert abs(sizes.count(2) / 300 - 0.5) < 0.1
    mean = sum(1 / (1 + size) for size in sizes) / 300
    assert abs(mean - 0.292) < 0.01, "the tables of the paper imply 0.3 for CIFAR-10"


def test_a_draw_is_a_function_of_its_seed_and_of_the_client_alone() -> None:
    rule = QueryRule("multi", 5)
    queries = drawn(rule, COUNTS)

    assert drawn(rule, COUNTS) == queries
    with_a_fourth_client = torch.cat([COUNTS, COUNTS[:1]])
    assert drawn(rule, with_a_fourth_client)[0] == queries[0]


@pytest.mark.parametrize(
    ("typed", "by"),
    [
        ("lack", ("lack",)),
        ("lack,need", ("lack", "need")),
        ("[lack, need]", ("lack", "need")),
        ('"lack"', ("lack",)),
    ],
)
def test_triggers_may_be_typed_with_commas(typed: str, by: tuple[str, ...]) -> None:
    fields = {"draw": "all", **parse_overrides((f"by={typed}",))}
    if "need" in by:
        fields["needs"] = {"3": [1]}
    assert QueryTable.read(fields, "query").by == by


def queries_of_run(method: str, rounds: int = 1, **query: object) -> ClassesByClient:
    """The queries that are drawn for a run of six clients."""
    table = {"draw": "multi", "fewer_than": 8, **query}
    experiment = toys.toy(method, rounds=rounds, topology={"clients": 6}, query=table)
    return queries_of(prepare(resolve(experiment), toys.blobs()).world)


def test_all_methods_of_a_run_share_the_queries() -> None:
    queries = queries_of_run("qkt")

    assert queries
    assert queries_of_run("local_only") == queries
    assert queries_of_run("fedavg", rounds=3) == queries
    assert queries_of_run("qkt", seed=4) != queries


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        ({7: (1,)}, "there is no client 7"),
        ({0: (5,)}, "there is no class 5"),
        ({0: ()}, "client 0 asks for no class"),
        ({0: (1, 0)}, "90 examples of class 0"),
        ({1: (4,)}, "no other client has an example of class 4"),
    ],
)
def test_a_query_that_nobody_can_answer_is_refused(
    queries: dict[int, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_queries(queries, COUNTS)
    assert "\n" not in str(caught.value)


def test_the_classes_of_a_written_query_are_sorted_and_without_duplicates() -> None:
    assert check_queries({0: (3, 1, 1)}, COUNTS) == {0: (1, 3)}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"draw": "some"}, "query.draw = 'some'"),
        ({"classes": {"first": [1]}}, "query.classes.first"),
        ({"classes": {"0": [-1]}}, "query.classes"),
        ({"classes": {"0": "1"}}, "query.classes"),
        ({"classes": 3}, "query.classes = 3"),
        ({"classes": {"0": [1]}, "draw": "single"}, "query.draw"),
        ({"fewer_than": 0}, "query.fewer_than = 0"),
        ({"kind": "single"}, "unknown key 'query.kind'"),
        ({"draw": "all", "by": ["luck"]}, "query.by = 'luck'"),
        ({"draw": "all", "by": []}, "query.by = []"),
        ({"draw": "all", "by": ["lack", "lack"]}, "query.by = ['lack', 'lack']"),
        ({"by": "lack"}, "query.draw"),
        ({"by": "lack", "classes": {"0": [1]}}, "query.draw"),
        ({"draw": "all", "by": "accuracy"}, "query.accuracy_under"),
        ({"draw": "all", "by": "accuracy", "accuracy_under": 1.5}, "query.accuracy_under = 1.5"),
        ({"draw": "all", "by": "accuracy", "accuracy_under": 0.0}, "query.accuracy_under = 0.0"),
        (
            {"draw": "all", "accuracy_under": 0.5},
            "query.accuracy_under",
        ),
        ({"draw": "all", "by": "need"}, "[query.needs]"),
        ({"draw": "all", "needs": {"0": [1]}}, "query.needs"),
        (
            {"draw": "all", "by": "need", "needs": {"one": [1]}},
            "query.needs.one",
        ),
        ({"draw": "all", "by": "need", "needs": {"0": ["a"]}}, "query.needs"),
        ({"again": "mixed"}, "query.again"),
        ({"draw": "all", "again": "yes"}, "query.again = 'yes'"),
        ({"draw": "all", "again": "mixed"}, "rounds = 1"),
        ({"draw": "all", "data_at_first": 0.5}, "query.data_at_first"),
    ],
)
def test_a_wrong_query_table_is_refused_in_one_line(query: dict[str, object], message: str) -> None:
    experiment = toys.toy("qkt", rounds=1, topology={"clients": 6}, query=query)
    with pytest.raises(ConfigError) as caught:
        resolve(experiment)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_qkt_without_queries_is_refused_before_round_one() -> None:
    settings = resolve(toys.toy("qkt", rounds=1, topology={"clients": 6}))
    with pytest.raises(IncompatibleMethod, match="queries"):
        prepare(settings, toys.blobs())


def test_qkt_whose_clients_lack_no_class_is_not_asked_to_set_draw_again() -> None:
    query = {"draw": "all", "fewer_than": 1}
    clients = {"clients": 6}
    experiment = toys.toy("qkt", rounds=1, topology=clients, partition="iid", query=query)
    with pytest.raises(IncompatibleMethod, match=r"raise query\.fewer_than") as caught:
        prepare(resolve(experiment), toys.blobs())
    assert "query.draw" not in str(caught.value)


def test_more_least_than_most_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"query\.least = 4 .*query\.most = 3"):
        QueryRule("multi", 0, least=4)


LABEL_COUNTS = torch.tensor([90, 0, 49, 50, 0])
WITHOUT_ACCURACY = ClientKnowledge(LABEL_COUNTS)
HELD_OUT = torch.tensor([10, 0, 10, 10, 0])
WITH_ACCURACY = ClientKnowledge(
    LABEL_COUNTS, correct=torch.tensor([6, 0, 7, 7, 0]), held_out=HELD_OUT
)
"""The accuracies of the classes 0, 2 and 3 are 0.6, 0.7 and 0.7. No other class has held-out
examples.
"""


def test_a_client_lacks_a_class_of_which_it_has_fewer_examples() -> None:
    fewer_than_50 = reasons(QueryRule("all", 0), 0, WITHOUT_ACCURACY)
    none = reasons(QueryRule("all", 0, fewer_than=1), 0, WITHOUT_ACCURACY)

    assert fewer_than_50 == {1: {"lack": 0}, 2: {"lack": 49}, 4: {"lack": 0}}
    assert none == {1: {"lack": 0}, 4: {"lack": 0}}


def by_accuracy(accuracy_under: float) -> QueryRule:
    """A rule of which a low accuracy is the only trigger."""
    return QueryRule("all", 0, by=("accuracy",), accuracy_under=accuracy_under)


@pytest.mark.parametrize(
    ("accuracy_under", "eligible"),
    [(0.6, set()), (0.61, {0}), (0.7, {0}), (0.700001, {0, 2, 3}), (1, {0, 2, 3})],
)
def test_by_accuracy_a_class_is_eligible_if_the_models_accuracy_on_it_is_lower(
    accuracy_under: float, eligible: set[int]
) -> None:
    """A class without held-out examples is not eligible."""
    accuracies = {0: 0.6, 2: 0.7, 3: 0.7}
    expected = {c: {"accuracy": accuracies[c], "held_out": 10} for c in eligible}
    assert reasons(by_accuracy(accuracy_under), 0, WITH_ACCURACY) == expected


@pytest.mark.parametrize(("correct", "held_out"), [(7, 100), (57, 100), (29, 100), (1, 3)])
def test_an_accuracy_that_equals_the_threshold_is_no_reason(correct: int, held_out: int) -> None:
    """None of these quotients is exact in binary."""
    knowledge = ClientKnowledge(
        torch.tensor([held_out]), torch.tensor([correct]), torch.tensor([held_out])
    )
    assert not reasons(by_accuracy(correct / held_out), 0, knowledge)


def test_by_need_the_listed_classes_are_eligible_whatever_the_client_has() -> None:
    rule = QueryRule("all", 0, by=("need",), needs={0: (0, 4)})
    assert reasons(rule, 0, WITHOUT_ACCURACY) == {0: {"need": 1}, 4: {"need": 1}}
    assert reasons(rule, 1, WITHOUT_ACCURACY) == {}


def test_all_reasons_for_a_class_are_listed() -> None:
    rule = QueryRule("all", 0, by=("lack", "accuracy", "need"), accuracy_under=0.9, needs={3: (2,)})
    class_reasons = reasons(rule, 3, WITH_ACCURACY)[2]
    assert class_reasons == {"lack": 49, "accuracy": 0.7, "held_out": 10, "need": 1}
    words = "has 49 examples; right on 70 % of 10 held out; will need it"
    assert because(class_reasons) == words


@pytest.mark.parametrize(
    "knowledge",
    [WITHOUT_ACCURACY, ClientKnowledge(LABEL_COUNTS, torch.zeros(5), torch.zeros(5))],
    ids=["not measured", "none held out"],
)
def test_accuracy_as_a_trigger_needs_held_out_examples(knowledge: ClientKnowledge) -> None:
    with pytest.raises(ConfigError, match=r"client 2 .*plan\.fit\.validation"):
        reasons(by_accuracy(0.5), 2, knowledge)


def test_of_the_eligible_classes_those_are_picked_that_another_client_has() -> None:
    rule = QueryRule("all", 0, offered={0: (1, 2, 4)})
    assert picked(rule, 0, [4, 0, 1]) == (1, 4)
    assert picked(rule, 0, [0]) == ()
    assert picked(rule, 1, [4, 0, 1]) == (0, 1, 4), "it is unknown what peers of client 1 have"
    assert offers(torch.tensor([[1, 0, 2], [0, 0, 3]])) == {0: (2,), 1: (0, 2)}


def test_a_later_query_is_another_draw_of_the_same_seed() -> None:
    rule = QueryRule("single", 5)
    eligible = list(range(20))
    counts = torch.tensor([[0] * 20, [90] * 20])

    assert picked(rule, 0, eligible, 1) == drawn(rule, counts)[0]
    assert len({picked(rule, 0, eligible, number) for number in range(1, 9)}) > 1
    in_reverse = list(reversed(eligible))
    assert picked(rule, 0, eligible, 3) == picked(rule, 0, in_reverse, 3)


def test_without_a_limit_a_query_needs_only_another_client_that_has_the_class() -> None:
    """Client 0 has 90 examples of class 0."""
    assert check_queries({0: (0,)}, COUNTS, None) == {0: (0,)}
    with pytest.raises(ConfigError, match="class 4"):
        check_queries({0: (4,)}, COUNTS, None)


def test_the_classes_of_queries_are_checked_even_if_the_label_counts_are_unknown() -> None:
    assert check_unseen({1: (3, 0, 3)}, 4) == {1: (0, 3)}
    with pytest.raises(ConfigError, match=r"client 1: .*class 4.* 0 to 3"):
        check_unseen({1: (4,)}, 4)


def test_a_world_has_one_record_of_a_kind_and_none_until_it_is_added() -> None:
    world = prepare(resolve(toys.toy()), toys.blobs()).world
    assert world.get(Queries) is None
    assert queries_of(world) == {}
    assert not anyone_asks(world)
    first = world.extend(Queries({0: (1,)}))
    second = first.extend(Queries(raised="all"))
    assert queries_of(first) == {0: (1,)}
    assert queries_of(second) == {}
    assert anyone_asks(first)
    assert anyone_asks(second)
    assert world.get(Queries) is None
