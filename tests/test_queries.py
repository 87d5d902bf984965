"""Queries: drawn by a fixed seed and shared by all methods; what nobody can answer is refused in one line."""

from __future__ import annotations

import pytest
import torch

import toys
from fedstill.errors import ConfigError, IncompatibleMethod
from fedstill.experiment.config.settle import settle
from fedstill.experiment.preparing.prepared import prepare
from fedstill.queries import Asking, check_queries, drawn

COUNTS = torch.tensor([[90, 0, 0, 49, 0], [0, 60, 50, 10, 0], [100, 100, 100, 100, 0]])


def test_single_queries_are_one_class_that_the_client_lacks_and_another_has() -> None:
    found = [drawn(Asking("single", seed), COUNTS) for seed in range(200)]
    assert {q for f in found for q in [f[0]]} == {(1,), (2,), (3,)}, "fewer than 50 are few, and nobody has class 4"
    assert {f[1] for f in found} == {(0,), (3,)}
    assert all(2 not in f for f in found), "client 2 lacks nothing that another has"
    shares = [sum(f[0] == (c,) for f in found) / 200 for c in (1, 2, 3)]
    assert min(shares) > 0.2, "uniform"


def test_multi_queries_have_two_or_three_classes_as_far_as_there_are_any() -> None:
    found = [drawn(Asking("multi", seed), COUNTS) for seed in range(300)]
    assert {len(f[0]) for f in found} == {2, 3}
    assert abs(sum(len(f[0]) == 2 for f in found) / 300 - 0.5) < 0.1
    assert all(f[1] == (0, 3) for f in found)
    assert all(len(set(f[0])) == len(f[0]) and list(f[0]) == sorted(f[0]) for f in found)
    means = sum(1 / (1 + len(f[0])) for f in found) / 300
    assert abs(means - 0.292) < 0.01, "the mean that the paper's tables imply for CIFAR-10 is .3"


def test_a_draw_is_a_function_of_its_seed_and_of_the_client_alone() -> None:
    assert drawn(Asking("multi", 5), COUNTS) == drawn(Asking("multi", 5), COUNTS)
    more = torch.cat([COUNTS, COUNTS[:1]])
    assert drawn(Asking("multi", 5), more)[0] == drawn(Asking("multi", 5), COUNTS)[0]


def test_all_methods_of_a_run_share_the_queries() -> None:
    split = {"rounds": 1, "topology": {"clients": 6}, "query": {"draw": "multi", "fewer_than": 8}}
    asked = [prepare(settle(toys.toy(m, **split)), toys.blobs()).world.queries for m in ("local_only", "qkt")]
    fed = toys.toy("fedavg", **{**split, "rounds": 3})
    assert asked[0] == asked[1] == prepare(settle(fed), toys.blobs()).world.queries != {}
    other = toys.toy("qkt", **{**split, "query": {"draw": "multi", "fewer_than": 8, "seed": 4}})
    assert prepare(settle(other), toys.blobs()).world.queries != asked[0]


@pytest.mark.parametrize(
    ("queries", "said"),
    [
        ({7: (1,)}, "there is no client 7; clients are 0 to 2"),
        ({0: (5,)}, "there is no class 5; classes are 0 to 4"),
        ({0: ()}, "client 0 asks for no class"),
        ({0: (1, 0)}, "it has class 0 itself, 90 examples"),
        ({1: (4,)}, "no other client has an example of class 4"),
    ],
)
def test_a_query_that_nobody_can_answer_is_refused(queries: dict[int, tuple[int, ...]], said: str) -> None:
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
        ({"classes": {"0": [1]}, "draw": "single"}, "written and drawn"),
        ({"fewer_than": 0}, "query.fewer_than = 0"),
        ({"kind": "single"}, "unknown key 'query.kind'"),
    ],
)
def test_a_query_table_that_is_wrong_is_one_line(query: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settle(toys.toy("qkt", rounds=1, topology={"clients": 6}, query=query))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_qkt_without_queries_is_refused_before_round_one() -> None:
    with pytest.raises(IncompatibleMethod, match="method qkt needs queries"):
        prepare(settle(toys.toy("qkt", rounds=1, topology={"clients": 6})), toys.blobs())


def test_more_least_than_most_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"query\.least = 4 is more than query\.most = 3"):
        Asking("multi", 0, least=4)
