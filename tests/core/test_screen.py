"""The screen refuses each kind of poisoned reply for its reason; others stay, sorted by client."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedstill.core import trees
from fedstill.core.capabilities import Need
from fedstill.core.label_counts import CensusChecks
from fedstill.core.records import Payload, Reply, Stage, State
from fedstill.core.screen import MAX_EXAMPLES, MAX_STRING, Refusal, Rules, screen

STAGE = Stage(3, 1, "train", (4, 0, 2, 7))
PARAMS = {"weight": torch.full((2, 3), 0.5), "bias": torch.zeros(2), "seen": torch.tensor(5)}
EXPECTED = Payload(
    params=trees.zeros_like(PARAMS),
    mean=torch.zeros(4),
    gini=0.0,
    visits=0,
    ready=True,
    said="",
    empty={},
)
GOOD = Payload(
    params=PARAMS, mean=torch.ones(4), gini=0.5, visits=3, ready=False, said="hello", empty={}
)
SENT = dict.fromkeys(STAGE.clients, Payload(params=PARAMS))
BAD = 2


def reply(client: int, content: Payload = GOOD) -> Reply:
    """The reply of a client to the stage."""
    return Reply(client, content, 10 + client, round=STAGE.round, stage=STAGE.index)


DEFAULT = Rules()


def screened(*replies: Reply, rules: Rules = DEFAULT) -> tuple[list[Reply], list[Refusal]]:
    """The accepted replies, and the refusals of all others."""
    return screen(lambda _: EXPECTED, STAGE, SENT, replies, rules)


def refusals_of(*replies: Reply, rules: Rules = DEFAULT) -> list[Refusal]:
    """The refusals alone."""
    _, refusals = screened(*replies, rules=rules)
    return refusals


def clients_of(replies: Sequence[Reply | Refusal]) -> list[int]:
    """The clients of replies or refusals, in their order."""
    return [reply.client for reply in replies]


def params(**changes: object) -> Payload:
    """The expected payload with other parameters."""
    return Payload(GOOD, params={**PARAMS, **changes})  # type: ignore[arg-type]


def without(name: str) -> Payload:
    """The expected payload without a group."""
    return Payload({group: value for group, value in GOOD.items() if group != name})


def scaled(factor: float) -> Payload:
    """Weights so many times as large."""
    return params(weight=PARAMS["weight"] * factor)


def holding(value: float) -> Payload:
    """Weights with one number of this value."""
    return params(weight=torch.tensor([[0.1, 0.2, value], [0.0, 0.0, 0.0]]))


POISONED: dict[str, tuple[Payload, str]] = {
    "NaN": (holding(math.nan), "params/weight holds numbers that are not finite"),
    "+Inf": (holding(math.inf), "params/weight holds numbers that are not finite"),
    "-Inf": (holding(-math.inf), "params/weight holds numbers that are not finite"),
    "NaN in a bare tensor": (
        Payload(GOOD, mean=torch.full((4,), math.nan)),
        "mean holds numbers that are not finite",
    ),
    "NaN for a number": (Payload(GOOD, gini=math.nan), "gini is nan"),
    "Inf for a number": (Payload(GOOD, gini=math.inf), "gini is inf"),
    "wrong shape": (
        params(weight=torch.zeros(3, 2)),
        r"params/weight has shape \(3, 2\), not \(2, 3\)",
    ),
    "one axis more": (params(bias=torch.zeros(1, 2)), r"params/bias has shape \(1, 2\)"),
    "zero-size": (params(weight=torch.zeros(0, 3)), r"params/weight has shape \(0, 3\)"),
    "a broadcastable ()": (params(bias=torch.zeros(())), r"params/bias has shape \(\)"),
    "missing tensor": (
        Payload(GOOD, params=trees.only(PARAMS, ["weight", "seen"])),
        r"params differs: missing \['bias'\]",
    ),
    "extra tensor": (params(more=torch.zeros(1)), r"params differs: .*not asked for \['more'\]"),
    "missing group": (without("mean"), r"missing \['mean'\]"),
    "extra group": (Payload(GOOD, secret=1), r"not asked for \['secret'\]"),
    "path-like group": (Payload({**GOOD, "../x": 1}), r"not asked for \['../x'\]"),
    "nothing at all": (Payload(), "missing"),
    "wrong dtype": (
        params(weight=PARAMS["weight"].double()),
        "params/weight is torch.float64, not torch.float32",
    ),
    "half precision": (params(weight=PARAMS["weight"].half()), "torch.float16"),
    "complex": (params(weight=torch.zeros(2, 3, dtype=torch.complex64)), "torch.complex64"),
    "a float counter": (
        params(seen=torch.tensor(5.0)),
        "params/seen is torch.float32, not torch.int64",
    ),
    "sparse": (params(weight=torch.eye(2, 3).to_sparse()), "params/weight is not a dense tensor"),
    "a list for a tensor": (params(weight=[[1.0]]), "params/weight is not a dense tensor"),
    "a number for tensors": (Payload(GOOD, params=1.0), "params is a float, not named tensors"),
    "a tensor for tensors": (
        Payload(GOOD, params=torch.zeros(2)),
        "params is a Tensor, not named tensors",
    ),
    "tensors for a tensor": (
        Payload(GOOD, mean={"a": torch.zeros(4)}),
        "mean is not a dense tensor",
    ),
    "a tensor for a number": (
        Payload(GOOD, gini=torch.tensor(0.5)),
        "gini is of type Tensor, not float",
    ),
    "a string for a number": (Payload(GOOD, gini="0.5"), "gini is of type str, not float"),
    "yes for a number": (Payload(GOOD, visits=True), "visits is of type bool, not int"),
    "half a visit": (Payload(GOOD, visits=0.5), "visits is of type float, not int"),
    "a number for yes": (Payload(GOOD, ready=7), "ready is of type int, not bool"),
    "endless number": (Payload(GOOD, visits=10**400), "visits is a number beyond"),
    "endless number for a float": (Payload(GOOD, gini=-(10**400)), "gini is a number beyond"),
    "a number for a string": (Payload(GOOD, said=3), "said is not a short string"),
    "a long string": (Payload(GOOD, said="x" * (MAX_STRING + 1)), "said is not a short string"),
    "ten times the norm": (scaled(10.5), r"norm .* is over 10 times"),
    "a thousand times the norm": (scaled(-1e3), r"norm .* is over 10 times"),
    "the largest numbers": (scaled(1e38), r"norm .* is over 10 times"),
}

ENVELOPES: dict[str, tuple[dict[str, Any], str]] = {
    "failed": ({"failure": "OSError: no disk"}, "failed: OSError: no disk"),
    "a failure that brings parameters": ({"failure": "x"}, "failed: x"),
    "another round": ({"round": 2}, "replied for round 2 stage 1, not 3 and 1"),
    "a later round": ({"round": 4}, "replied for round 4"),
    "another stage": ({"stage": 0}, "replied for round 3 stage 0"),
    "negative count": ({"examples": -1}, "claims -1 examples"),
    "NaN count": ({"examples": math.nan}, "claims nan examples"),
    "Inf count": ({"examples": math.inf}, "claims inf examples"),
    "huge count": ({"examples": MAX_EXAMPLES + 1}, "claims 10000001 examples, over"),
    "fractional count": ({"examples": 1.5}, "claims 1.5 examples"),
    "count True": ({"examples": True}, "claims True examples"),
    "count a string": ({"examples": "9"}, "claims '9' examples"),
    "no count": ({"examples": None}, "claims None examples"),
    "a stranger": ({"client": 99}, "was not asked"),
    "the server": ({"client": -1}, "was not asked"),
    "a client that is a float": ({"client": 2.0}, "was not asked"),
    "a client that is a list": ({"client": [2]}, "was not asked"),
}
"""Changes of a reply beside its content, and the reason of the refusal."""


@pytest.mark.parametrize("name", POISONED)
def test_poison_is_left_out_for_its_reason_and_the_others_stay(name: str) -> None:
    content, reason = POISONED[name]
    accepted, refused = screened(reply(7), reply(BAD, content), reply(0), reply(4))
    assert clients_of(refused) == [BAD]
    assert re.search(reason, refused[0].reason), refused[0].reason
    assert accepted == [reply(0), reply(4), reply(7)]


@pytest.mark.parametrize("name", ENVELOPES)
def test_a_reply_that_is_not_what_was_asked_for_is_left_out(name: str) -> None:
    changes, reason = ENVELOPES[name]
    accepted, refused = screened(reply(4), replace(reply(BAD), **changes), reply(0))
    assert clients_of(accepted) == [0, 4]
    assert len(refused) == 1
    assert refused[0].reason.startswith(reason)
    assert not refused[0].diverged


def test_only_wild_numbers_count_as_divergence() -> None:
    wild = set()
    for name, (content, _) in POISONED.items():
        (refusal,) = refusals_of(reply(BAD, content))
        if refusal.diverged:
            wild.add(name)
    assert wild == {
        "NaN", "+Inf", "-Inf", "NaN in a bare tensor", "NaN for a number", "Inf for a number",
        "ten times the norm", "a thousand times the norm", "the largest numbers",
    }  # fmt: skip


def test_good_replies_are_accepted_and_sorted() -> None:
    accepted, refused = screened(*map(reply, (7, 2, 4, 0)))
    assert clients_of(accepted) == [0, 2, 4, 7]
    assert refused == []


@pytest.mark.parametrize(
    "content",
    [
        scaled(9.9),
        Payload(GOOD, gini=1),
        Payload(GOOD, said="x" * MAX_STRING),
        Payload({name: GOOD[name] for name in reversed(list(GOOD))}),
        params(weight=PARAMS["weight"].t().contiguous().t()),
    ],
    ids=[
        "just below the limit",
        "a whole number for a float",
        "the longest string",
        "another order",
        "other strides",
    ],
)
def test_unusual_and_legal_replies_are_accepted(content: Payload) -> None:
    accepted, refused = screened(reply(BAD, content))
    assert clients_of(accepted) == [BAD]
    assert refused == []


@pytest.mark.parametrize("count", [0, 1, MAX_EXAMPLES])
def test_counts_at_the_ends_of_the_range_are_accepted(count: int) -> None:
    assert refusals_of(replace(reply(BAD), examples=count)) == []


def test_a_claim_is_compared_with_the_census_where_there_is_one() -> None:
    """Clients 0 and 2 claim 10 and 12 examples. Client 4 gave no census."""
    labels = torch.zeros(8, 5, dtype=torch.int64)
    labels[0, 3] = 10
    labels[BAD, 1] = 11
    replies = [reply(0), reply(BAD), replace(reply(4), examples=11)]
    state = State({}, Payload(labels=labels))
    census = CensusChecks(MAX_EXAMPLES)

    accepted, refused = screen(
        lambda _: EXPECTED,
        STAGE,
        SENT,
        replies,
        DEFAULT,
        refusal=lambda reply: census.check_reply(reply, STAGE, Need.LABEL_COUNTS, state),
    )

    assert clients_of(accepted) == [0, 4]
    assert refused == [Refusal(BAD, "claims 12 examples, and 11 in the census")]


def test_the_most_examples_are_the_configs() -> None:
    accepted, _ = screened(reply(0), reply(7), rules=Rules(max_examples=12))
    assert clients_of(accepted) == [0]


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"refused": ""}, "'refused'"),
        ({"steps": True}, "'steps' is malformed"),
        ({"report": {"loss": 1}}, "'loss'"),
        ({"report": {"x": torch.zeros(1)}}, "'x' is malformed"),
        ({3: 1}, "a name that is no short text"),
    ],
)
def test_reports_are_screened_whatever_the_engine(metrics: dict[str, object], reason: str) -> None:
    accepted, refused = screened(replace(reply(BAD), metrics=metrics), reply(0))
    assert clients_of(accepted) == [0]
    assert reason in refused[0].reason
    assert refused[0].content is GOOD, "the refusal has the content, whose bytes are counted"


def test_replies_that_cannot_be_checked_are_refused_and_reasons_end_at_300_characters() -> None:
    class Odd(dict):  # type: ignore[type-arg]
        def items(self) -> None:  # type: ignore[override]
            raise MemoryError("x" * 6_000_000)

    accepted, refused = screened(replace(reply(BAD), metrics=Odd()), reply(0))
    assert clients_of(accepted) == [0]
    assert refused[0].reason.startswith("could not be checked: MemoryError: x")
    assert len(refused[0].reason) == 300
    assert len(Refusal(1, "no\n" * 10**6).reason) <= 300


def test_a_report_that_is_unusual_and_honest_is_accepted() -> None:
    metrics = {
        "loss": {"ce": math.nan},
        "scores": [0.5, math.nan],
        "teachers": ["peer 3"],
        "seconds_mine.py": 0.0,
        "report": {
            "probe": [0.1] * 1000,
            "teachers": [1, 2],
            "why": "because",
            "nothing": None,
            "deep": {"a": [[1]]},
        },
    }
    assert refusals_of(replace(reply(BAD), metrics=metrics)) == []


def test_a_repeated_reply_counts_once_the_first_time() -> None:
    first = reply(BAD)
    second = replace(reply(BAD), examples=999)
    accepted, refused = screened(first, reply(0), second)
    assert [reply.examples for reply in accepted] == [10, 12]
    assert refused == [Refusal(BAD, "replied twice")]


def test_a_good_reply_after_a_bad_one_of_the_same_client_counts() -> None:
    accepted, refused = screened(reply(BAD, holding(math.nan)), reply(BAD))
    assert clients_of(accepted) == [BAD]
    assert len(refused) == 1


def test_the_norm_limit_is_measured_against_what_was_sent() -> None:
    strict = Rules(norm_limit=2.0)
    assert refusals_of(reply(BAD, scaled(1.5)), rules=strict) == []
    assert len(refusals_of(reply(BAD, scaled(2.5)), rules=strict)) == 1

    zeros = dict.fromkeys(STAGE.clients, Payload(params=trees.zeros_like(PARAMS)))
    accepted, _ = screen(lambda _: EXPECTED, STAGE, zeros, [reply(BAD)], strict)
    assert accepted, "sent parameters count as a norm of at least 1"


def test_the_screen_changes_no_reply() -> None:
    copies = trees.clone(PARAMS)
    (accepted,), _ = screened(reply(0))
    assert trees.same_bits(PARAMS, copies)
    assert accepted.content is GOOD
