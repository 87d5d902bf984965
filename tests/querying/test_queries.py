"""Queries: drawn by a fixed seed and shared by all methods; what nobody can answer is refused in
one line.
"""

from __future__ import annotations

import pytest
import torch

import toys
from fedstill.config.overrides import parse_overrides
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.methods.fit import Queries, anyone_asks, queries_of
from fedstill.querying.queries import (
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


def test_single_queries_are_one_class_that_the_client_lacks_and_another_has() -> None:
    found = [drawn(QueryRule("single", seed), COUNTS) for seed in range(200)]
    assert {q for f in found for q in [f[0]]} == {(1,), (2,), (3,)}, (
        "fewer than 50 are few, and nobody has class 4"
    )
    assert {f[1] for f in found} == {(0,), (3,)}
    assert all(2 not in f for f in found), "client 2 lacks nothing that another has"
    shares = [sum(f[0] == (c,) for f in found) / 200 for c in (1, 2, 3)]
    assert min(shares) > 0.2, "uniform"


def test_multi_queries_have_two_or_three_classes_as_far_as_there_are_any() -> None:
    found = [drawn(QueryRule("multi", seed), COUNTS) for seed in range(300)]
    assert {len(f[0]) for f in found} == {2, 3}
    assert abs(sum(len(f[0]) == 2 for f in found) / 300 - 0.5) < 0.1
    assert all(f[1] == (0, 3) for f in found)
    assert all(len(set(f[0])) == len(f[0]) and list(f[0]) == sorted(f[0]) for f in found)
    means = sum(1 / (1 + len(f[0])) for f in found) / 300
    assert abs(means - 0.292) < 0.01, "the mean that the paper's tables imply for CIFAR-10 is .3"


def test_a_draw_is_a_function_of_its_seed_and_of_the_client_alone() -> None:
    assert drawn(QueryRule("multi", 5), COUNTS) == drawn(QueryRule("multi", 5), COUNTS)
    more = torch.cat([COUNTS, COUNTS[:1]])
    assert drawn(QueryRule("multi", 5), more)[0] == drawn(QueryRule("multi", 5), COUNTS)[0]


@pytest.mark.parametrize(
    ("typed", "by"),
    [
        ("lack", ("lack",)),
        ("lack,need", ("lack", "need")),
        ("[lack, need]", ("lack", "need")),
        ('"lack"', ("lack",)),
    ],
)
def test_reasons_to_ask_may_be_typed_with_commas(typed: str, by: tuple[str, ...]) -> None:
    needs = {"needs": {"3": [1]}} if "need" in by else {}
    read = QueryTable.read({"draw": "all", **needs, **parse_overrides((f"by={typed}",))}, "query")
    assert read.by == by


def test_all_methods_of_a_run_share_the_queries() -> None:
    split = {"rounds": 1, "topology": {"clients": 6}, "query": {"draw": "multi", "fewer_than": 8}}
    asked = [
        queries_of(prepare(resolve(toys.toy(m, **split)), toys.blobs()).world)
        for m in ("local_only", "qkt")
    ]
    fed = toys.toy("fedavg", **{**split, "rounds": 3})
    assert asked[0] == asked[1] == queries_of(prepare(resolve(fed), toys.blobs()).world) != {}
    other = toys.toy("qkt", **{**split, "query": {"draw": "multi", "fewer_than": 8, "seed": 4}})
    assert queries_of(prepare(resolve(other), toys.blobs()).world) != asked[0]


@pytest.mark.parametrize(
    ("queries", "said"),
    [
        ({7: (1,)}, "there is no client 7"),
        ({0: (5,)}, "there is no class 5"),
        ({0: ()}, "client 0 asks for no class"),
        ({0: (1, 0)}, "90 examples of class 0"),
        ({1: (4,)}, "no other client has an example of class 4"),
    ],
)
def test_a_query_that_nobody_can_answer_is_refused(
    queries: dict[int, tuple[int, ...]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_queries(queries, COUNTS)
    assert "\n" not in str(caught.value)


def test_written_queries_are_kept_sorted_and_once() -> None:
    assert check_queries({0: (3, 1, 1)}, COUNTS) == {0: (1, 3)}


@pytest.mark.parametrize(
    ("query", "said"),
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
def test_a_query_table_that_is_wrong_is_one_line(query: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(toys.toy("qkt", rounds=1, topology={"clients": 6}, query=query))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_qkt_without_queries_is_refused_before_round_one() -> None:
    with pytest.raises(IncompatibleMethod, match="queries"):
        prepare(resolve(toys.toy("qkt", rounds=1, topology={"clients": 6})), toys.blobs())


def test_more_least_than_most_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"query\.least = 4 .*query\.most = 3"):
        QueryRule("multi", 0, least=4)


COUNTED = torch.tensor([90, 0, 49, 50, 0])
MEASURED = ClientKnowledge(
    COUNTED, correct=torch.tensor([6, 0, 7, 7, 0]), held_out=torch.tensor([10, 0, 10, 10, 0])
)


def test_a_client_lacks_a_class_of_which_it_has_fewer_examples() -> None:
    assert reasons(QueryRule("all", 0), 0, ClientKnowledge(COUNTED)) == {
        1: {"lack": 0},
        2: {"lack": 49},
        4: {"lack": 0},
    }
    assert reasons(QueryRule("all", 0, fewer_than=1), 0, ClientKnowledge(COUNTED)) == {
        1: {"lack": 0},
        4: {"lack": 0},
    }


@pytest.mark.parametrize(
    ("under", "asked"),
    [(0.6, set()), (0.61, {0}), (0.7, {0}), (0.700001, {0, 2, 3}), (1, {0, 2, 3})],
)
def test_by_accuracy_it_asks_for_what_its_model_is_wrong_on_too_often(
    under: float, asked: set[int]
) -> None:
    why = reasons(QueryRule("all", 0, by=("accuracy",), accuracy_under=under), 0, MEASURED)
    assert set(why) == asked, "a class of which none is held out is not asked for"
    assert all(
        w == {"accuracy": float(MEASURED.correct[c]) / 10, "held_out": 10} for c, w in why.items()
    )  # type: ignore[index]


def test_shares_that_no_float_has_are_compared_as_they_are_written() -> None:
    for right, held in ((7, 100), (57, 100), (29, 100), (1, 3)):
        standing = ClientKnowledge(
            torch.tensor([held]), torch.tensor([right]), torch.tensor([held])
        )
        assert not reasons(
            QueryRule("all", 0, by=("accuracy",), accuracy_under=right / held), 0, standing
        )


def test_by_need_it_asks_for_what_it_says_whatever_it_has() -> None:
    rule = QueryRule("all", 0, by=("need",), needs={0: (0, 4)})
    assert reasons(rule, 0, ClientKnowledge(COUNTED)) == {0: {"need": 1}, 4: {"need": 1}}
    assert reasons(rule, 1, ClientKnowledge(COUNTED)) == {}


def test_several_reasons_stand_side_by_side() -> None:
    rule = QueryRule("all", 0, by=("lack", "accuracy", "need"), accuracy_under=0.9, needs={3: (2,)})
    assert reasons(rule, 3, MEASURED)[2] == {"lack": 49, "accuracy": 0.7, "held_out": 10, "need": 1}
    assert (
        because(reasons(rule, 3, MEASURED)[2])
        == "has 49 examples; right on 70 % of 10 held out; will need it"
    )


@pytest.mark.parametrize(
    "nothing", [ClientKnowledge(COUNTED), ClientKnowledge(COUNTED, torch.zeros(5), torch.zeros(5))]
)
def test_without_held_out_examples_no_accuracy(nothing: ClientKnowledge) -> None:
    with pytest.raises(ConfigError, match=r"client 2 .*plan\.fit\.validation"):
        reasons(QueryRule("all", 0, by=("accuracy",), accuracy_under=0.5), 2, nothing)


def test_of_the_classes_wanted_those_are_picked_that_another_client_has() -> None:
    rule = QueryRule("all", 0, offered={0: (1, 2, 4)})
    assert picked(rule, 0, [4, 0, 1]) == (1, 4)
    assert picked(rule, 0, [0]) == ()
    assert picked(rule, 1, [4, 0, 1]) == (0, 1, 4), "nobody knows who has what"
    assert offers(torch.tensor([[1, 0, 2], [0, 0, 3]])) == {0: (2,), 1: (0, 2)}


def test_a_later_query_is_another_draw_of_the_same_seed() -> None:
    rule = QueryRule("single", 5)
    wanted = list(range(20))
    assert picked(rule, 0, wanted, 1) == drawn(rule, torch.tensor([[0] * 20, [90] * 20]))[0]
    assert len({picked(rule, 0, wanted, n) for n in range(1, 9)}) > 1
    assert picked(rule, 0, wanted, 3) == picked(rule, 0, wanted[::-1], 3)


def test_what_is_needed_may_be_a_class_that_the_client_has_but_not_one_that_nobody_else_has() -> (
    None
):
    assert check_queries({0: (0,)}, COUNTS, None) == {0: (0,)}
    with pytest.raises(ConfigError, match="class 4"):
        check_queries({0: (4,)}, COUNTS, None)


def test_of_sites_whose_labels_nobody_sees_the_classes_are_checked() -> None:
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
