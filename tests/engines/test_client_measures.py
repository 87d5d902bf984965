"""Measures that clients take: when they are due, what they return, and which reports over a wire
are refused.
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
    on_public_data = Stage(2, 0, "distil", (0,), "public")
    assert not at_clients(measures(("epochs",)), rounds).keeps_epochs(on_public_data)


class Mistaken(Measure):
    """Reads an attribute that does not exist."""

    def at_client(self, client: AtClient) -> dict[str, Any]:
        return {"share": client.no_such_thing}  # type: ignore[attr-defined]


def test_a_measures_mistake_is_named_with_its_client() -> None:
    ready = prepare(resolve(toys.toy()), toys.blobs())
    view = ready.sites.view(3, TRAIN)
    start = ready.world.initial(3)
    trained = AtClient(
        stage=TRAIN,
        view=view,
        start=start,
        end=start,
        by_epoch=(),
        test=ready.sites.common_test,
        public=None,
        inputs=ready.sites.inputs,
        world=ready.world,
    )
    with pytest.raises(FedstillError, match=r"measure mine .*client 3: AttributeError"):
        ClientMeasures({"mine": Mistaken()}, frozenset({2})).take(trained)


@dataclass
class Answers:
    """A fleet whose client 0 answers with some report."""

    report: dict[str, Any] = field(default_factory=dict)

    def ask(self, requests: Sequence[Request]) -> list[SiteReply]:
        content = Payload(params={"w": torch.zeros(1)})
        reply = SiteReply(
            client=0, round=2, stage=0, content=content, examples=3, metrics=self.report
        )
        return [reply]


@pytest.mark.parametrize(
    ("report", "reason"),
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
    report: dict[str, Any], reason: str
) -> None:
    ready = prepare(resolve(toys.toy(measure=BUILT_IN, plan={"validation": 0.2})), toys.blobs())
    engine = FlowerEngine(
        ready.engine(),
        Answers(report),  # type: ignore[arg-type]
        lambda **_: None,  # type: ignore[arg-type,return-value]
        measures=ready.client_measures(site=True),
    )
    (reply,) = engine.run(ClientWork(), TRAIN, {0: Payload()}, 7)
    if reason:
        assert re.search(reason, reply.failure)
    else:
        assert reply.failure == ""


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
    """Returns a number whose name it does not declare."""

    at_sites = True

    def at_client(self, client: AtClient) -> dict[str, Any]:
        return {"spread": 0.5}


class Declared(Undeclared):
    """Declares the name of its number."""

    gives = ("spread",)


ALWAYS = frozenset({2})
SPREAD = {"loss": {"ce": 1.0}, "spread": 0.5, "seconds_mine": 0.1, "report": {"helper": 1}}


def test_names_are_known_where_every_measure_says_its_own() -> None:
    all_declared = ClientMeasures({"mine": Declared()}, ALWAYS)
    undeclared = ClientMeasures({"mine": Undeclared()}, ALWAYS)
    assert all_declared.refuses(SPREAD, TRAIN, 5) == undeclared.refuses(SPREAD, TRAIN, 5) == ""
    assert "'more'" in all_declared.refuses({**SPREAD, "more": 1}, TRAIN, 5)
    assert undeclared.refuses({**SPREAD, "more": 1}, TRAIN, 5) == ""
    not_due = Stage(1, 0, "train", (0,))
    assert "'seconds_mine'" in undeclared.refuses(SPREAD, not_due, 5), "no measure is due"
    assert "'spread'" in all_declared.refuses({"report": {"spread": 1.0}}, not_due, 5)


def test_a_real_site_may_not_send_what_stays_at_sites() -> None:
    chosen = {**measures(BUILT_IN), "mine": Declared()}
    report = {"label_counts": [1] * 5, "correct_by_class": [1] * 5}
    assert at_clients(chosen, ALWAYS).refuses(report, TRAIN, 5) == ""
    at_real_site = at_clients(chosen, ALWAYS, real_site=True)
    assert list(at_real_site.named) == ["mine"]
    assert "'correct_by_class'" in at_real_site.refuses(report, TRAIN, 5)


def test_a_check_that_raises_is_a_refusal() -> None:
    class Raising(Declared):
        def refuses(self, report: Any, classes: int) -> str:
            return str(report["spread"].upper())

    ready = prepare(resolve(toys.toy(measure=())), toys.blobs())
    client_measures = ClientMeasures({"mine": Raising()}, ALWAYS)
    engine = FlowerEngine(
        ready.engine(), Answers({"spread": 0.5}), lambda **_: None, measures=client_measures
    )  # type: ignore[arg-type,return-value]
    (reply,) = engine.run(ClientWork(), TRAIN, {0: Payload()}, 7)
    assert reply.failure.startswith("its report could not be checked: AttributeError")
