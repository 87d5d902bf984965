"""Reasons that leave a site are constants: no class name, text, count or path of a site is in them.
The number of refusals is limited.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import pytest

import fedstill
import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.config.settings import Settings
from fedstill.core.errors import (
    BadPayload,
    ConfigError,
    CorruptFile,
    DataError,
    FedstillError,
    Refused,
    Topic,
)
from fedstill.core.files import digest
from fedstill.core.records import Payload, Stage
from fedstill.flower import site as site_module
from fedstill.flower.facts import Facts
from fedstill.flower.messages import PUBLIC_REASONS, Request, SiteReply, public_reason
from fedstill.flower.site import REFUSED, Refusals, StageExecutor, client_app
from fedstill.flower.site_settings import Site
from fedstill.running.preparation import prepare
from flowers import needs_flower

pytestmark = [needs_flower, pytest.mark.usefixtures("with_threads")]

SECRET = "Ann_Abel_4711"
STAGE = Stage(1, 0, "train", (0,))
EMPTY_REQUEST = Request("v", config="c", sha="s", run="run1", client=0, stage=STAGE)
ALL_REASONS = {public_reason(topic) for topic in get_args(Topic)}


def test_every_topic_has_a_public_reason() -> None:
    assert set(PUBLIC_REASONS) == set(get_args(Topic))


# Any error that a site can meet: its text never leaves.

ERRORS: list[Exception] = [
    *(Refused(SECRET, topic) for topic in get_args(Topic)),
    *(kind(SECRET) for kind in (FedstillError, ConfigError, DataError, CorruptFile, BadPayload)),
    *(kind(SECRET) for kind in (ValueError, KeyError, RuntimeError, MemoryError)),
    OSError(2, SECRET, f"/home/{SECRET}/data.csv"),
    UnicodeDecodeError("utf-8", SECRET.encode(), 0, 4, SECRET),
    type(SECRET, (Exception,), {})(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_no_text_of_an_error_leaves_a_site(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(executor: StageExecutor, request: Request) -> SiteReply:
        raise error

    monkeypatch.setattr(StageExecutor, "_answer", fail)
    site = Site(0, tmp_path / SECRET, data=f"/data/{SECRET}")
    with caplog.at_level(logging.WARNING, "fedstill.site"):
        answer = StageExecutor(site)(EMPTY_REQUEST)
    assert answer.failure in ALL_REASONS
    assert SECRET not in answer.header()
    assert SECRET in caplog.text, "the site's log has the details"


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_no_text_of_an_error_leaves_a_node_that_has_no_clerk(error: Exception) -> None:
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

    def fail(context: Any) -> Any:
        raise error

    app = client_app(fail, 1 << 20)
    for kind in ("train.stage", "query.whoami"):
        message = Message(RecordDict({"ask": ConfigRecord()}), 7, kind)
        message.metadata.__dict__["_message_id"] = "1"
        answer = app(message, Context(1, 7, {}, RecordDict(), {}))
        assert answer.error.reason in ALL_REASONS


def test_a_failure_that_the_work_reports_does_not_leave_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = SiteReply(0, 1, 0, failure=f"RuntimeError: {SECRET}")
    monkeypatch.setattr(StageExecutor, "_answer", lambda executor, request: failed)
    answer = StageExecutor(Site(0, tmp_path))(EMPTY_REQUEST)
    assert answer.failure == public_reason("work")


# A site's own data that do not fit the run: each problem names values in the site's log only.

TABLE = {"name": "none", "columns": ["age", "chol"], "standardise": "own"}


def patients(**changes: Any) -> pd.DataFrame:
    """40 rows of a hospital, with some columns changed."""
    rows = pd.DataFrame({"age": range(30, 70), "chol": range(180, 220)})
    rows["label"] = ["ill" if age % 3 else "well" for age in rows["age"]]
    return rows.assign(**changes)


def settings_of(data: dict[str, Any], **changes: Any) -> Settings:
    """Settings of a run at one site with these data."""
    flower = {"data": "sites", "federation": "/federation", "classes": ["ill", "well"]}
    flower |= changes.pop("flower", {})
    values = {
        "engine": "flower",
        "flower": flower,
        "method": {"name": "fedavg"},
        "model": {"name": "logistic"},
        "topology": {"clients": 1},
        "measure": (),
        "rounds": 2,
        "data": data,
    }
    return resolve(Experiment(**{**values, **changes}))


def request_of(settings: Settings, **changes: Any) -> Request:
    """The request to train in round 1."""
    facts = {
        "classes": ["ill", "well"],
        "shape": [2],
        "kind": "table",
        "columns": ["age", "chol"],
        "features": ["age", "chol"],
        "origin": "own",
    }
    request = Request(
        version=fedstill.__version__,
        config=settings.toml,
        sha=digest(settings.toml.encode()),
        run="run1",
        client=0,
        stage=STAGE,
        facts=facts,
        payload=Payload(),
    )
    return replace(request, **changes)


def site_with(folder: Path, rows: pd.DataFrame, **keys: Any) -> Site:
    """A site with these rows, in a folder whose name is secret."""
    place = folder / SECRET
    place.mkdir()
    for split in ("train", "test"):
        rows.to_csv(place / f"{split}.csv", index=False)
    return Site(0, folder / "memory", **{"data": str(place), **keys})


Case = tuple[Callable[[Path], Site], Callable[[], Request], Topic]


def asked(**changes: Any) -> Callable[[], Request]:
    """A request for tables, made when it is needed."""
    return lambda: request_of(settings_of(TABLE), **changes)


def has(**changes: Any) -> Callable[[Path], Site]:
    """A site with changed rows, made when it is needed."""
    return lambda folder: site_with(folder, patients(**changes))


def folders_of_tasks(folder: Path) -> Site:
    """A site whose folders are no tasks."""
    return replace(site_with(folder, patients()), data=str(folder), tasks="folders")


TASKS = {"stream": {"kind": "sites", "tasks": 2, "order": [[0], [1]]}}

CASES: dict[str, Case] = {
    "a class": (has(label=SECRET), asked(), "classes"),
    "a text among numbers": (has(age=[SECRET] * 40), asked(), "data"),
    "a missing column": (
        lambda folder: site_with(folder, patients().rename(columns={"chol": SECRET})),
        asked(),
        "data",
    ),
    "no folder": (
        lambda folder: Site(0, folder / "memory", data=f"/data/{SECRET}"),
        asked(),
        "data",
    ),
    "a category": (
        has(chol=[SECRET] * 40),
        lambda: request_of(settings_of({**TABLE, "categorical": {"chol": ["low", "high"]}})),
        "data",
    ),
    "tasks": (
        folders_of_tasks,
        lambda: request_of(settings_of(TABLE, **TASKS)),
        "tasks",
    ),
    "no tasks": (
        folders_of_tasks,
        asked(),
        "tasks",
    ),
    "a lost state": (
        has(),
        asked(memory=("client0-round1-stage0.safetensors", "a" * 64)),
        "state",
    ),
    "a stage": (has(), asked(stage=replace(STAGE, name=SECRET)), "stage"),
    "a config": (has(), asked(config=SECRET), "request"),
}


@pytest.mark.parametrize("case", CASES)
def test_no_value_of_a_sites_data_is_in_a_refusal(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site, request, topic = CASES[case]
    with caplog.at_level(logging.WARNING, "fedstill.site"):
        answer = StageExecutor(site(tmp_path))(request())
    assert answer.failure == public_reason(topic), caplog.text
    assert SECRET not in answer.header()
    assert str(tmp_path) not in answer.header()


def test_the_traceback_of_a_failure_is_in_the_sites_log_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(TABLE, method={"name": "toys:Failing"})
    site = site_with(tmp_path, patients(), imports=("toys:Failing",))
    model = Payload(params=prepare(settings).world.initial(0))
    executor = StageExecutor(site)
    first = executor(request_of(settings, payload=model))
    assert first.failure == ""

    second = replace(STAGE, round=2)
    with caplog.at_level(logging.WARNING, "fedstill.site"):
        answer = executor(request_of(settings, payload=model, stage=second, memory=first.memory))
    assert answer.failure == public_reason("work")
    assert "(toys.py, line" in caplog.text
    assert "Traceback" in caplog.text


def test_the_server_cannot_check_guesses_about_a_sites_state(tmp_path: Path) -> None:
    """A state never leaves. Its digest is keyed, and the key stays at the site."""
    settings = settings_of(TABLE, method={"name": "moon"})
    site = site_with(tmp_path, patients())
    model = Payload(params=prepare(settings).world.initial(0))
    answer = StageExecutor(site)(request_of(settings, payload=model))
    assert answer.failure == ""
    assert answer.memory is not None
    name, identifier = answer.memory
    (state,) = site.memory.rglob(name)
    assert identifier != digest(state.read_bytes())
    second = replace(STAGE, round=2)
    later = request_of(settings, payload=model, stage=second, memory=answer.memory)
    assert StageExecutor(site)(later).failure == ""


# A server that asks again and again.


@pytest.fixture
def config_names_no_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the server has data: then the classes are in the requests only."""
    monkeypatch.setattr(Facts, "check_config", lambda facts, settings: None)


@pytest.mark.usefixtures("config_names_no_classes")
def test_a_server_cannot_list_a_sites_classes_by_its_refusals(tmp_path: Path) -> None:
    """The attack: each request lists the classes that earlier refusals named."""
    names = [f"Patient {number}" for number in range(40)]
    executor = StageExecutor(site_with(tmp_path, patients(label=names)))
    settings = settings_of(TABLE)
    facts = request_of(settings).facts
    reasons = []
    for number in range(31):
        guessed_facts = {**facts, "classes": names[:number] or ["x"]}
        reasons.append(
            executor(request_of(settings, facts=guessed_facts, run=f"run{number}")).failure
        )
    assert reasons[0] == public_reason("classes")
    assert set(reasons) == {public_reason("classes"), public_reason("limit")}
    assert reasons.count(public_reason("classes")) == site_module.MOST_REFUSALS
    assert not any("Patient" in reason for reason in reasons)


@pytest.mark.usefixtures("config_names_no_classes")
def test_the_same_question_counts_once_and_an_operator_can_lift_the_limit(tmp_path: Path) -> None:
    site = site_with(tmp_path, patients(label=SECRET))
    request = request_of(settings_of(TABLE))
    for _ in range(2 * site_module.MOST_REFUSALS):
        assert StageExecutor(site)(request).failure == public_reason("classes")

    for number in range(2 * site_module.MOST_REFUSALS):
        changed_facts = {**request.facts, "classes": [str(number), "x"]}
        last = StageExecutor(site)(replace(request, facts=changed_facts)).failure
    assert last == public_reason("limit")
    assert StageExecutor(site)(request).failure == public_reason("classes"), "an old question"
    (site.memory / REFUSED).unlink()
    assert StageExecutor(site)(replace(request, facts=changed_facts)).failure == public_reason(
        "classes"
    )


def test_refusals_of_different_configs_are_limited_by_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_module, "MOST_REFUSALS_A_DAY", 5)
    site = site_with(tmp_path, patients(label=SECRET))
    reasons = [
        StageExecutor(site)(request_of(settings_of(TABLE, seed=seed), run=f"run{seed}")).failure
        for seed in range(8)
    ]
    assert reasons == [public_reason("classes")] * 5 + [public_reason("limit")] * 3
    later = site_module.time.time() + 2 * site_module.DAY
    monkeypatch.setattr(site_module.time, "time", lambda: later)
    request = request_of(settings_of(TABLE, seed=9), run="run9")
    assert StageExecutor(site)(request).failure == public_reason("classes")


def test_failures_of_work_are_limited_by_day_also_after_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same config was refused once, for example because the data were not mounted yet."""
    monkeypatch.setattr(site_module, "MOST_REFUSALS_A_DAY", 5)
    refusals = Refusals(tmp_path)
    settings = settings_of(TABLE)
    refusals.add(request_of(settings), "data")
    requests = [request_of(settings, stage=replace(STAGE, round=round)) for round in range(1, 7)]
    for request in requests[:5]:
        refusals.check(request)
        refusals.add(request, "work")
    with pytest.raises(Refused):
        refusals.check(requests[5])
    refusals.check(requests[0])

    later = site_module.time.time() + 2 * site_module.DAY
    monkeypatch.setattr(site_module.time, "time", lambda: later)
    refusals.check(requests[5])


def test_a_simulation_shows_its_reasons(tmp_path: Path) -> None:
    executor = StageExecutor(Site(0, tmp_path), toys.blobs(), shows_reasons=True)
    assert "fedstill 0" in executor(request_of(settings_of(TABLE), version="0")).failure
