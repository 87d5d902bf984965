"""Measures that clients take: when they are due, what they give, and what is refused of a report
over a wire.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import FedstillError
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage
from fedstill.engines.client_measures import AtClient, ClientMeasures
from fedstill.flower.engine import FlowerEngine, KnownCounts
from fedstill.flower.messages import Request, SiteReply
from fedstill.measures.base import Measure, at_clients
from fedstill.measures.choice import measures
from fedstill.running.preparation import prepare

pytestmark = pytest.mark.usefixtures("with_threads")

BUILT_IN = ("local", "epochs", "private_public")
TRAIN = Stage(2, 0, "train", (0, 1))


def test_only_measures_that_clients_take_are_sent_to_them() -> None:
    chosen = measures(("diversity", *BUILT_IN))
    assert list(at_clients(chosen, frozenset({2})).named) == list(BUILT_IN)
    assert at_clients(measures(("diversity",)), frozenset({2})).rounds == frozenset()


def test_they_are_due_in_measured_rounds_and_wherever_clients_fit_alone() -> None:
    due = at_clients(measures(("local",)), frozenset({2})).due
    assert due(TRAIN)
    assert due(Stage(1, 0, "fit", (0,)))
    assert not due(Stage(1, 0, "train", (0,)))
    assert not ClientMeasures().due(TRAIN)


def test_parameters_are_kept_by_epoch_only_where_a_measure_wants_them() -> None:
    rounds = frozenset({2})
    assert at_clients(measures(("epochs",)), rounds).keeps_epochs(TRAIN)
    assert not at_clients(measures(("local",)), rounds).keeps_epochs(TRAIN)
    assert not at_clients(measures(("epochs",)), rounds).keeps_epochs(
        Stage(2, 0, "distil", (0,), "public")
    )


class Mistaken(Measure):
    def at_client(self, seen: AtClient) -> dict[str, Any]:
        return {"share": seen.no_such_thing}  # type: ignore[attr-defined]


def test_a_measures_mistake_is_named_with_its_client() -> None:
    ready = prepare(resolve(toys.toy()), toys.blobs())
    view, start = ready.sites.view(3, TRAIN), ready.world.initial(3)
    seen = AtClient(
        TRAIN, view, start, start, (), ready.sites.common_test, None, ready.sites.inputs, 5
    )
    with pytest.raises(FedstillError, match=r"measure mine .*client 3: AttributeError"):
        ClientMeasures({"mine": Mistaken()}, frozenset({2})).take(seen)


@dataclass
class Answers:
    """A fleet whose client 0 answers with some report."""

    report: dict[str, Any] = field(default_factory=dict)

    def ask(self, requests: Sequence[Request]) -> list[SiteReply]:
        return [SiteReply(0, 2, 0, Payload(params={"w": torch.zeros(1)}), 3, self.report)]


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (
            {"label_counts": [1, 0, 0, 0, 0], "correct_by_class": []},
            "'local' is malformed: correct_by_class has 0",
        ),
        (
            {"label_counts": [1, 0, 0, 0, -1], "correct_by_class": [0] * 5},
            "label_counts is not a list of counts",
        ),
        (
            {"label_counts": [1, 0, 0, 0, True], "correct_by_class": [0] * 5},
            "label_counts is not a list of counts",
        ),
        (
            {"correct_by_epoch": [[0] * 5, [0] * 4]},
            r"'epochs' is malformed: correct_by_epoch\[1\] has 4",
        ),
        ({"correct_by_epoch": 3}, "correct_by_epoch is not a list"),
        ({"private": {"counts": [1] * 5}}, "'private_public' is malformed: private is not a table"),
        (
            {"public": {"counts": [1] * 5, "after": [1.5] * 5}},
            "public: after is not a list of counts",
        ),
        ({"label_counts": [1] * 5, "correct_by_class": [1] * 5, "correct_by_epoch": [[1] * 5]}, ""),
        ({"private": {"counts": [1] * 5, "after": [0] * 5}}, ""),
        ({}, ""),
    ],
)
def test_a_report_over_a_wire_that_no_measure_can_have_made_is_a_failure(
    report: dict[str, Any], why: str
) -> None:
    ready = prepare(resolve(toys.toy(measure=BUILT_IN, plan={"validation": 0.2})), toys.blobs())
    engine = FlowerEngine(
        ready.engine(),
        Answers(report),  # type: ignore[arg-type]
        lambda **_: None,  # type: ignore[arg-type,return-value]
        measures=ready.client_measures(site=True),
    )
    (reply,) = engine.run(ClientWork(), TRAIN, {0: Payload()}, 7)
    assert re.search(why, reply.failure) if why else reply.failure == "", reply.failure


@dataclass
class Idle:
    """A fleet whose client 0 claims to have no data."""

    def ask(self, requests: Sequence[Request]) -> list[SiteReply]:
        return [SiteReply(0, 2, 0, idle=True)]


@pytest.mark.parametrize("may_be_idle", [False, True])
def test_only_sites_with_tasks_of_their_own_may_be_idle(may_be_idle: bool) -> None:
    ready = prepare(resolve(toys.toy(measure=())), toys.blobs())
    engine = FlowerEngine(
        ready.engine(),
        Idle(),
        lambda **_: None,  # type: ignore[arg-type,return-value]
        known_counts=lambda client, round: KnownCounts(may_be_idle=may_be_idle),
    )
    (reply,) = engine.run(ClientWork(), TRAIN, {0: Payload()}, 7)
    assert bool(reply.failure) is not may_be_idle


class Undeclared(Measure):
    at_sites = True

    def at_client(self, seen: AtClient) -> dict[str, Any]:
        return {"spread": 0.5}


class Declared(Undeclared):
    gives = ("spread",)


ALWAYS = frozenset({2})
SPREAD = {"loss": {"ce": 1.0}, "spread": 0.5, "seconds_mine": 0.1, "report": {"helper": 1}}


def test_names_are_known_where_every_measure_says_its_own() -> None:
    known, open_ = (ClientMeasures({"mine": m}, ALWAYS) for m in (Declared(), Undeclared()))
    assert known.refuses(SPREAD, TRAIN, 5) == open_.refuses(SPREAD, TRAIN, 5) == ""
    assert "'more'" in known.refuses({**SPREAD, "more": 1}, TRAIN, 5)
    assert open_.refuses({**SPREAD, "more": 1}, TRAIN, 5) == ""
    other = Stage(1, 0, "train", (0,))
    assert "'seconds_mine'" in open_.refuses(SPREAD, other, 5), "it is not due, so nobody asked"
    assert "'spread'" in known.refuses({"report": {"spread": 1.0}}, other, 5)


def test_a_real_site_may_not_send_what_stays_at_sites() -> None:
    chosen = {**measures(BUILT_IN), "mine": Declared()}
    sent = {"label_counts": [1] * 5, "correct_by_class": [1] * 5}
    assert at_clients(chosen, ALWAYS).refuses(sent, TRAIN, 5) == ""
    there = at_clients(chosen, ALWAYS, real_site=True)
    assert list(there.named) == ["mine"]
    assert "'correct_by_class'" in there.refuses(sent, TRAIN, 5)


def test_a_check_that_raises_is_a_refusal() -> None:
    class Raising(Declared):
        def refuses(self, report: Any, classes: int) -> str:
            return str(report["spread"].upper())

    ready = prepare(resolve(toys.toy(measure=())), toys.blobs())
    taken = ClientMeasures({"mine": Raising()}, ALWAYS)
    engine = FlowerEngine(
        ready.engine(), Answers({"spread": 0.5}), lambda **_: None, measures=taken
    )  # type: ignore[arg-type,return-value]
    (reply,) = engine.run(ClientWork(), TRAIN, {0: Payload()}, 7)
    assert reply.failure.startswith("its report could not be checked: AttributeError")
