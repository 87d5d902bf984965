"""Crafted reports over the loopback grid: each is refused by name, and the run goes on as without
it, also after a resume.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.errors import Interrupted
from fedstill.core.records import Payload
from fedstill.flower.engine import Parcel, parsed, serialised
from fedstill.flower.messages import SiteReply
from fedstill.running.journal import read_journal, without_times
from fedstill.running.runner import resume, run
from flowers import needs_flower, over_flower
from run_bits import StopAfter
from troubled_grid import Delivery, Fault, FaultyGrid

pytestmark = needs_flower

HOSTILE = 1
CLIENTS = 3
C = toys.CLASSES
SHORT = toys.toy(
    toys.Failing(who=-9),
    rounds=2,
    topology={"clients": CLIENTS, "sampled": CLIENTS},
    plan={"epochs": 1, "batch": 10, "lr": 0.1},
    measure=("local", "epochs", "personal", "private_public", "contributions"),
    data={"public": toys.PUBLIC},
    measure_every=1,
)
"""Two rounds; client 1 is hostile in the first."""

Header = dict[str, Any]
Attack = Callable[[Header], Any]
"""A change of the header of a reply."""


def metrics(**changes: Any) -> Attack:
    """Sets metrics of the engine and of measures."""
    return lambda header: header["metrics"].update(changes)


def own(**report: Any) -> Attack:
    """Sets the report of the client's part of the method."""
    return metrics(report=report)


def said(**changes: Any) -> Attack:
    """Sets fields beside the metrics."""
    return lambda header: header.update(changes)


def without(name: str) -> Attack:
    """Deletes a metric."""
    return lambda header: header["metrics"].pop(name)


def right(*first_counts: Any, appended: Sequence[int] = ()) -> Attack:
    """Replaces the first numbers of correct predictions, and appends others."""

    def spoil(header: Header) -> None:
        counts = header["metrics"]["correct_by_class"]
        unchanged = counts[len(first_counts) :]
        header["metrics"]["correct_by_class"] = [*first_counts, *unchanged, *appended]

    return spoil


TABLE = {"counts": [3] * C, "after": [1] * C}
MALFORMED = r"its report '{}' is malformed"
SERVER_NAMES = (
    "event",
    "round",
    "client",
    "refused",
    "idle",
    "bytes_up",
    "examples",
    "noised_rows",
)
ATTACKS: dict[str, tuple[Attack, str]] = {
    "self": (metrics(self=1), "'self' belongs to no measure of this run"),
    "an unknown name": (metrics(mine=1), "'mine' belongs to no measure of this run"),
    "a name of another measure": (
        metrics(spread=0.5),
        "'spread' belongs to no measure of this run",
    ),
    "seconds of no measure": (metrics(seconds_mine=1.0), "'seconds_mine'"),
    "a long name": (metrics(**{"n" * 10_000: 1}), "a name that is no short text"),
    "an empty name": (metrics(**{"": 1}), "a name that is no short text"),
    **{f"the server's {name}": (metrics(**{name: 1}), f"'{name}'") for name in SERVER_NAMES},
    "endless seconds": (metrics(seconds_training=10**400), MALFORMED.format("seconds_training")),
    "endless seconds of measures": (
        metrics(seconds_measuring=10**400),
        MALFORMED.format("seconds_measuring"),
    ),
    "endless seconds of a measure": (
        metrics(seconds_local=10**400),
        MALFORMED.format("seconds_local"),
    ),
    "negative seconds": (metrics(seconds=-1.0), MALFORMED.format("seconds")),
    "text for seconds": (metrics(seconds_training="long"), MALFORMED.format("seconds_training")),
    "a table for seconds": (metrics(seconds_local={"a": 1}), MALFORMED.format("seconds_local")),
    "no seconds": (metrics(seconds_training=None), MALFORMED.format("seconds_training")),
    "true seconds": (metrics(seconds_training=True), MALFORMED.format("seconds_training")),
    "text for steps": (metrics(steps="5"), MALFORMED.format("steps")),
    "endless steps": (metrics(steps=10**300), MALFORMED.format("steps")),
    "endless epochs": (metrics(epochs=10**300), MALFORMED.format("epochs")),
    "text for a loss": (metrics(loss={"ce": "low"}), MALFORMED.format("loss")),
    "an endless loss": (metrics(loss={"ce": 10**400}), MALFORMED.format("loss")),
    "a loss that is a number": (metrics(loss=0.5), MALFORMED.format("loss")),
    "text for scores": (metrics(scores=["good"]), MALFORMED.format("scores")),
    "teachers that are a number": (metrics(teachers=7), MALFORMED.format("teachers")),
    "an accuracy over 1": (metrics(site_accuracy=1.5), MALFORMED.format("site_accuracy")),
    "too few counts": (
        metrics(label_counts=[1] * (C - 1)),
        "label_counts has 4 numbers for 5 classes",
    ),
    "too many counts": (right(appended=[0]), "correct_by_class has 6 numbers for 5 classes"),
    "text for counts": (metrics(label_counts="many"), MALFORMED.format("label_counts")),
    "text among counts": (right("1"), MALFORMED.format("correct_by_class")),
    "negative counts": (right(-1), MALFORMED.format("correct_by_class")),
    "halves for counts": (right(0.5), MALFORMED.format("correct_by_class")),
    "endless counts": (right(10**400), MALFORMED.format("correct_by_class")),
    "more right than test examples": (
        right(10**6),
        "more correct predictions than there are test examples",
    ),
    "more right than test examples, in personal": (
        metrics(tested_right=[10**6] * C),
        "more correct predictions than there are test examples",
    ),
    "more training examples than it has": (
        metrics(trained_counts=[10**6] * C),
        "'trained_counts' counts more examples than there are",
    ),
    "more right before its work than test examples": (
        metrics(correct_before=[99] * C, correct_after=[0] * C),
        "more correct predictions than there are test examples",
    ),
    "more right than examples of a class": (
        metrics(correct_before=[0] * C, correct_after=[101] * C),
        "correct_after is above 100 for a class",
    ),
    "counts before its work alone": (
        metrics(correct_before=[0] * C),
        "it has correct_before without the other counts",
    ),
    "counts after its work alone": (
        metrics(correct_after=[0] * C),
        "it has correct_after without the other counts",
    ),
    "label counts of others": (
        metrics(label_counts=[7] * C),
        "'label_counts' differs from its data",
    ),
    "no label counts": (without("label_counts"), "correct_by_class comes without label_counts"),
    "epochs of another length": (
        metrics(correct_by_epoch=[[0] * C, [0]]),
        r"correct_by_epoch\[1\] has 1 numbers",
    ),
    "no epochs": (metrics(correct_by_epoch=[]), "correct_by_epoch is not a list"),
    "epochs that are numbers": (
        metrics(correct_by_epoch=[1, 2]),
        MALFORMED.format("correct_by_epoch"),
    ),
    "more epochs than it had": (
        metrics(correct_by_epoch=[[0] * C] * 9),
        "correct_by_epoch has 9 epochs",
    ),
    "private text": (metrics(private="mine"), "private is not a table"),
    "private without after": (metrics(private={"counts": [1] * C}), "private is not a table"),
    "private with more": (metrics(private={**TABLE, "more": [1] * C}), "private is not a table"),
    "private of another length": (
        metrics(private={**TABLE, "after": [1]}),
        "private: after has 1 numbers",
    ),
    "more right than private": (
        metrics(private={**TABLE, "after": [4] * C}),
        "private: after",
    ),
    "more private than it has": (
        metrics(private={"counts": [10**6] * C, "after": [1] * C}),
        "counts more examples",
    ),
    "a report that is a list": (metrics(report=[1]), MALFORMED.format("report")),
    "a report in the server's name": (own(refused="no"), "'refused'"),
    "a report in the engine's name": (own(steps=10**6), "'steps'"),
    "a report in a measure's name": (
        own(label_counts=[1] * C),
        "'label_counts'",
    ),
    "a report in a reader's name": (own(private=TABLE), "'private'"),
    "a report in a measure's time": (
        own(seconds_epochs=3.0),
        "'seconds_epochs'",
    ),
    "a report with endless numbers": (own(mine=10**400), MALFORMED.format("mine")),
    "a deep report": (own(mine=[[[[1]]]]), MALFORMED.format("mine")),
    "a large report": (own(mine=[0.123456789] * 20_000), "characters, over the limit of"),
    "a long word": (own(mine="x" * 301), MALFORMED.format("mine")),
    "a probe that is text": (own(probe="noise"), MALFORMED.format("probe")),
    "a probe of another length": (own(probe=[0.5]), "'probe' has 1 numbers for 5 classes"),
    "reasons that are text": (own(why_asked="because"), MALFORMED.format("why_asked")),
    "a reason for no class": (own(why_asked={"-1": {"lack": 3}}), MALFORMED.format("why_asked")),
    "a reason that is no number": (
        own(why_asked={"1": {"lack": "3"}}),
        MALFORMED.format("why_asked"),
    ),
    "a class without reasons": (own(why_asked={"1": 3}), MALFORMED.format("why_asked")),
    "endless reasons": (
        own(why_asked={"1": {str(i): 1 for i in range(9)}}),
        MALFORMED.format("why_asked"),
    ),
    "many losses": (metrics(loss={str(i): 0.5 for i in range(10_001)}), MALFORMED.format("loss")),
    "many teachers": (metrics(teachers=["x"] * 10_001), MALFORMED.format("teachers")),
    "text that no file can hold": (own(mine="\ud800"), MALFORMED.format("mine")),
    "a failure that no terminal can show": (
        said(failure="\x1b[2J\ud800 no"),
        r"failed: \?\[2J\? no",
    ),
    "a memory without SHA-256": (
        said(memory=["client1.safetensors", "x" * 100_000]),
        "memory has no SHA-256",
    ),
    "too many examples": (said(examples=10**9), "claims 1000000000 examples"),
    "more examples than it has": (said(examples=500), "claims 500 examples, but has"),
    "negative examples": (said(examples=-1), "examples is out of range"),
    "text for examples": (said(examples="all"), "'all' is not a whole number"),
    "half an example": (said(examples=1.5), "is not a whole number"),
    "metrics that are a list": (said(metrics=[]), "metrics is missing"),
    "another round": (said(round=2), "replied for round 2"),
    "a long failure": (said(failure="x" * 6_000), "failed: x{100}"),
}

TextAttack = Callable[[str], str]
"""A change of the JSON text of a header."""


def with_loss(literal: str) -> TextAttack:
    """Adds a number to the losses, which may be none in JSON."""
    return lambda text: text.replace('"loss": {', f'"loss": {{"more": {literal}, ')


TEXT_ATTACKS: dict[str, tuple[TextAttack, str]] = {
    "NaN": (
        lambda text: text.replace('"seconds": ', '"seconds": NaN, "was": '),
        "the header is not JSON",
    ),
    "-Infinity": (with_loss("-Infinity"), "the header is not JSON"),
    "1e999": (with_loss("1e999"), "the header is not JSON"),
    "a number of 5000 digits": (with_loss("9" * 5000), "not JSON"),
    "deep lists": (lambda text: "[" * 100_000, "the header is not JSON"),
    "a long header": (lambda text: text + " " * (1 << 20), "over the limit of 1048576"),
    "no text": (lambda text: "", "the header is not JSON"),
}


def as_text(attack: Attack) -> TextAttack:
    """The attack on the text of a header."""

    def spoil(text: str) -> str:
        header = json.loads(text)
        attack(header)
        return json.dumps(header)

    return spoil


ALL = {name: (as_text(attack), reason) for name, (attack, reason) in ATTACKS.items()}
ALL |= TEXT_ATTACKS


def spoiled(attack: TextAttack) -> Fault:
    """Changes the header of the hostile client's reply in round 1."""

    def fault(delivery: Delivery) -> Parcel:
        reply = delivery.reply()
        if (delivery.client, delivery.round) != (HOSTILE, 1):
            return reply
        message = parsed(reply)
        header = message.content.config_records["header"]
        header["json"] = attack(str(header["json"]))
        return serialised(message)

    return fault


Events = list[dict[str, Any]]


def journal(folder: Path) -> Events:
    """The events of a run without times."""
    return [without_times(event) for event in read_journal(folder / "journal.jsonl")]


def is_refusal(event: dict[str, Any]) -> bool:
    """Whether an event of a client says why its reply was refused."""
    return "refused" in event and "client" in event


def refusals(events: Events) -> Events:
    """The events of clients whose reply was refused."""
    return list(filter(is_refusal, events))


def assert_reason(event: dict[str, Any], pattern: str) -> None:
    """Check the reason of a refusal, which is never long."""
    assert re.search(pattern, event["refused"])
    assert len(event["refused"]) <= 300


Without = Callable[[Experiment], Path]


@pytest.fixture(scope="module")
def without_it(tmp_path_factory: pytest.TempPathFactory) -> Without:
    """By experiment, the run whose client 1 gives no answer in round 1."""
    folders: dict[int, Path] = {}

    def fault(delivery: Delivery) -> Parcel | None:
        if (delivery.client, delivery.round) == (HOSTILE, 1):
            return None
        return delivery.reply()

    def directory(experiment: Experiment) -> Path:
        if experiment.rounds not in folders:
            folder = tmp_path_factory.mktemp("without")
            grid = FaultyGrid(experiment, folder / "sites", fault)
            run(experiment, folder / "run", toys.blobs(), grid=grid)
            folders[experiment.rounds] = folder / "run"
        return folders[experiment.rounds]

    return directory


RESUMED = ("a long name", "too few counts", "another round", "a long failure", "NaN")
"""Reports of several kinds after which the run has another round, and is stopped before it: a
refusal is kept like any other event.
"""


@pytest.mark.parametrize("name", ALL)
def test_a_crafted_report_is_refused_by_name_and_the_run_is_that_without_it(
    name: str, without_it: Without, tmp_path: Path
) -> None:
    attack, reason = ALL[name]
    folder = tmp_path / "run"
    sites = tmp_path / "sites"
    experiment = over_flower(replace(SHORT, rounds=1), retries=0)
    if name in RESUMED:
        experiment = over_flower(SHORT, retries=0)
    grid = FaultyGrid(experiment, sites, spoiled(attack))

    if name in RESUMED:
        with pytest.raises(Interrupted):
            run(experiment, folder, toys.blobs(), watch=StopAfter(1), grid=grid)
        resume(folder, toys.blobs(), grid=FaultyGrid(experiment, sites))
    else:
        run(experiment, folder, toys.blobs(), grid=grid)

    expected = without_it(experiment)
    events = journal(folder)
    (refusal,) = refusals(events)
    assert refusal["client"] == HOSTILE
    assert refusal["round"] == 1
    assert_reason(refusal, reason)
    assert_same_model(folder, expected)
    accepted = itertools.filterfalse(is_refusal, events)
    assert list(accepted) == list(itertools.filterfalse(is_refusal, journal(expected)))


def assert_same_model(folder: Path, expected: Path) -> None:
    """Check that the final models of two runs have the same bits."""
    model = (folder / "model.safetensors").read_bytes()
    assert model == (expected / "model.safetensors").read_bytes()


CENSUS = toys.toy(
    "toy_logits",
    rounds=1,
    data={"public": toys.PUBLIC},
    topology={"clients": CLIENTS},
    plan={"epochs": 1, "batch": 10},
)


@pytest.mark.parametrize(
    ("labels", "examples", "reason"),
    [
        ([-5, 20, 20, 20, 20], 10, "its census counts 75 examples, and it claims 10"),
        ([10**15] * C, 10, "its census counts 5e.15 examples"),
        ([2**62] * C, 10, "its census counts 2.30584e.19 examples"),
        ([1] * C, 50, "its census counts 5 examples, and it claims 50"),
    ],
)
def test_a_crafted_census_is_refused(
    labels: list[int], examples: int, reason: str, tmp_path: Path
) -> None:
    def fault(delivery: Delivery) -> Parcel:
        if (delivery.client, delivery.round) != (HOSTILE, 0):
            return delivery.reply()
        census = Payload(labels=torch.tensor(labels))
        return delivery.replaced(SiteReply(HOSTILE, 0, 0, census, examples))

    experiment = over_flower(CENSUS, retries=0)
    grid = FaultyGrid(experiment, tmp_path / "sites", fault)

    run(experiment, tmp_path / "run", toys.blobs(), grid=grid)

    first, *_ = refusals(journal(tmp_path / "run"))
    assert first["client"] == HOSTILE
    assert first["name"] == "census"
    assert_reason(first, reason)


MANY_TENSORS = {f"t{i}": torch.zeros(0) for i in range(6_000)}
LARGE: dict[str, tuple[Payload, str]] = {
    "many groups": (Payload({f"g{i}": 1 for i in range(10_001)}), "over the limit"),
    "many tensors in two groups": (Payload(a=MANY_TENSORS, b=MANY_TENSORS), "over the limit"),
    "long names": (Payload({"x" * 500: 1, "y" * 500: 1}), "groups differ"),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_reply_is_refused_by_a_short_reason(
    name: str, without_it: Without, tmp_path: Path
) -> None:
    content, reason = LARGE[name]

    def fault(delivery: Delivery) -> Parcel:
        if (delivery.client, delivery.round) != (HOSTILE, 1):
            return delivery.reply()
        return delivery.replaced(SiteReply(HOSTILE, 1, 0, content, 5))

    experiment = over_flower(replace(SHORT, rounds=1), retries=0)
    grid = FaultyGrid(experiment, tmp_path / "sites", fault)

    run(experiment, tmp_path / "run", toys.blobs(), grid=grid)

    (refusal,) = refusals(journal(tmp_path / "run"))
    assert_reason(refusal, reason)
    assert_same_model(tmp_path / "run", without_it(experiment))


def test_a_long_reason_of_flowers_or_of_an_app_that_raised_is_cut(tmp_path: Path) -> None:
    error_codes = {0: 4, HOSTILE: 2}

    def fault(delivery: Delivery) -> Parcel:
        if delivery.round != 1 or delivery.client not in error_codes:
            return delivery.reply()
        return delivery.error(error_codes[delivery.client], "no " * 10**6)

    one_round = replace(SHORT, rounds=1).with_values({"clients.quorum": 0.3}, "test")
    experiment = over_flower(one_round, retries=0)
    grid = FaultyGrid(experiment, tmp_path / "sites", fault)

    run(experiment, tmp_path / "run", toys.blobs(), grid=grid)

    reasons = [event["refused"] for event in refusals(journal(tmp_path / "run"))]
    assert [len(reason) for reason in reasons] == [300, 300]
    assert {reason[:16] for reason in reasons} == {"failed: no no no", "failed: Flower's"}


def test_an_honest_report_is_taken_with_all_its_fields(tmp_path: Path) -> None:
    """The table above would pass if every report were refused."""
    run(over_flower(SHORT), tmp_path / "flower", toys.blobs())
    run(replace(SHORT, engine="serial"), tmp_path / "serial", toys.blobs())
    events = journal(tmp_path / "flower")
    assert not refusals(events)
    assert events == journal(tmp_path / "serial")
    client_events = [event for event in events if event["event"] == "client"]
    assert client_events
    for event in client_events:
        for name in ("loss", "steps", "label_counts", "correct_by_class", "correct_by_epoch"):
            assert name in event
