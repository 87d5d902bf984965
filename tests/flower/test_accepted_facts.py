"""What a site accepts binds what it trains on: the config, and the facts about data."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedstill.config.experiment import Experiment
from fedstill.core.errors import Refused, TooFewReplies
from fedstill.core.files import digest
from fedstill.flower.facts import Facts, accepted_text
from fedstill.flower.messages import PUBLIC_REASONS, Request, SiteReply
from fedstill.flower.site import MOST_OFFERED, OFFERED, StageExecutor
from fedstill.flower.site_settings import Site
from fedstill.running.runner import run
from flowers import executor_grid, needs_flower

pytestmark = [needs_flower, pytest.mark.usefixtures("with_threads")]

CLIENTS = 3
CLASSES = ["healthy", "ill"]
COLUMNS = ["age", "chol"]
SECRETS = ["income", "hiv"]


def hospital(place: Path, client: int) -> Site:
    """A site whose file has more columns than the run needs."""
    draw = np.random.default_rng(client)
    rows = pd.DataFrame({name: draw.normal(50, 9, 40).round(1) for name in (*COLUMNS, *SECRETS)})
    rows["label"] = np.array(CLASSES)[(rows["age"] > 50).astype(int)]
    folder = place / f"own{client}"
    folder.mkdir(parents=True)
    for split, part in (("train", rows[:30]), ("test", rows[30:])):
        part.to_csv(folder / f"{split}.csv", index=False)
    return Site(client, place / f"memory{client}", data=str(folder))


def experiment(**data: Any) -> Experiment:
    """One round at two sites with tables."""
    flower = {"deadline": 30, "poll": 1, "data": "sites", "federation": "/f", "classes": CLASSES}
    return Experiment(
        engine="flower",
        flower=flower,
        method={"name": "fedavg"},
        model={"name": "logistic"},
        rounds=1,
        plan={"epochs": 1, "batch": 8, "lr": 0.1},
        topology={"clients": CLIENTS},
        data={"name": "none", "columns": COLUMNS, **data},
        measure=(),
    )


def honest(place: Path, **data: Any) -> list[Request]:
    """The requests to client 0 in a run, whose sites accept everything."""
    sites = [hospital(place / "honest", client) for client in range(CLIENTS)]
    executors = [StageExecutor(site) for site in sites]
    requests: list[Request] = []

    def answer(request: Request) -> SiteReply:
        if request.client == 0:
            requests.append(request)
        return executors[request.client](request)

    grid = executor_grid(dict.fromkeys(range(CLIENTS), answer))
    run(experiment(**data), place / "run", grid=grid)
    return requests


DECLARED = {"mean": [50.0, 50.0], "std": [9.0, 9.0]}


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> Request:
    """A request to train, by declared mean and spread."""
    return honest(tmp_path_factory.mktemp("declared"), **DECLARED)[-1]


@pytest.fixture(scope="module")
def summed(tmp_path_factory: pytest.TempPathFactory) -> list[Request]:
    """A request for sums, and one to train by their mean and spread."""
    first, *_, last = honest(tmp_path_factory.mktemp("summed"), standardise="summed")
    return [first, last]


def accepted(request: Request) -> str:
    """The SHA-256 with which an operator accepts a request."""
    return digest(accepted_text(request.config, request.facts).encode())


def with_facts(request: Request, **changes: Any) -> Request:
    """The request with some other facts."""
    return replace(request, facts={**request.facts, **changes})


def other_columns(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"columns": tuple(SECRETS), "features": tuple(SECRETS)}


CHANGES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "columns": other_columns,
    "one column more": lambda f: {
        "columns": (*COLUMNS, "hiv"),
        "features": (*COLUMNS, "hiv"),
        "shape": (3,),
        "mean": (*f["mean"], 0.0),
        "std": (*f["std"], 1.0),
    },
    "the order of columns": lambda f: {"columns": COLUMNS[::-1], "features": COLUMNS[::-1]},
    "classes": lambda f: {"classes": ("ill", "healthy")},
    "mean": lambda f: {"mean": (0.0, 50.0)},
    "std": lambda f: {"std": (9.0, 1e9)},
    "marks": lambda f: {"marks": (0,)},
    "standardisation": lambda f: {"origin": "own", "mean": (), "std": ()},
    "summed": lambda f: {"origin": "summed"},
    "kind": lambda f: {"kind": "vector", "columns": (), "features": ()},
    "the public set": lambda f: {"public": "0" * 64},
    "no facts": lambda f: dict.fromkeys(f, ()) | {"kind": "image", "origin": "none"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_site_accepts_facts_with_the_config(
    change: str, declared: Request, tmp_path: Path
) -> None:
    site = replace(hospital(tmp_path, 0), accept=(accepted(declared),))
    assert not StageExecutor(site)(declared).failure
    hostile = with_facts(declared, **CHANGES[change](declared.facts))
    reply = StageExecutor(replace(site, memory=tmp_path / "new"))(hostile)
    assert PUBLIC_REASONS["accept"] in reply.failure or PUBLIC_REASONS["request"] in reply.failure
    assert not reply.content
    offered = list((tmp_path / "new" / OFFERED).glob("*.toml"))
    assert {digest(path.read_bytes()) for path in offered} == {path.stem for path in offered}


def test_the_config_alone_is_not_enough(declared: Request, tmp_path: Path) -> None:
    site = replace(hospital(tmp_path, 0), accept=(declared.sha,))
    for request in (declared, replace(declared, facts={})):
        reply = StageExecutor(site)(request)
        assert reply.failure
        assert not reply.content


@pytest.mark.parametrize("change", ["columns", "one column more", "classes", "kind"])
def test_facts_that_contradict_the_config_are_refused_by_a_site_that_accepts_all(
    change: str, declared: Request, tmp_path: Path
) -> None:
    hostile = with_facts(declared, **CHANGES[change](declared.facts))
    reply = StageExecutor(hospital(tmp_path, 0))(hostile)
    assert PUBLIC_REASONS["config"] in reply.failure
    assert not reply.content


@pytest.mark.parametrize(
    "hidden", [{"columns": SECRETS}, {"marks": [0]}, {"origin": "own"}, {"vocabulary": 5}]
)
def test_images_have_no_facts_that_nobody_accepts(hidden: dict[str, Any]) -> None:
    facts = {"classes": CLASSES, "shape": [1, 8, 8], "mean": [0.5], "std": [0.5]}
    assert Facts.of(facts).acceptable().keys() == facts.keys()
    with pytest.raises(Refused, match="images"):
        Facts.of({**facts, **hidden})


def test_what_is_not_accepted_is_written_for_the_operator(
    declared: Request, tmp_path: Path
) -> None:
    site = replace(hospital(tmp_path, 0), accept=())
    StageExecutor(site)(declared)
    (offered,) = (site.memory / OFFERED).iterdir()
    tree = tomllib.loads(offered.read_text(encoding="utf-8"))
    assert tree["data"]["columns"] == COLUMNS
    assert tree["facts"]["columns"] == COLUMNS
    assert tree["facts"]["mean"] == DECLARED["mean"]
    assert not StageExecutor(replace(site, accept=(offered.stem,)))(declared).failure


def test_a_site_has_the_file_that_it_names_however_many_configs_were_requested(
    declared: Request, tmp_path: Path
) -> None:
    site = replace(hospital(tmp_path, 0), accept=())
    folder = site.memory / OFFERED
    StageExecutor(site)(declared)
    (accepted,) = folder.iterdir()
    site = replace(site, accept=(accepted.stem,))
    for number in range(MOST_OFFERED + 5):
        request = with_facts(declared, mean=(float(number), 0.0))
        StageExecutor(site)(request)
        latest = digest(accepted_text(request.config, request.facts).encode())
        assert (folder / f"{latest}.toml").is_file()
    StageExecutor(site)(request)
    assert accepted.is_file()
    assert len(list(folder.iterdir())) == MOST_OFFERED + 1


def test_facts_do_not_change_within_a_run(declared: Request, tmp_path: Path) -> None:
    site = hospital(tmp_path, 0)
    assert not StageExecutor(site)(declared).failure
    reply = StageExecutor(site)(with_facts(declared, mean=(0.0, 50.0)))
    assert PUBLIC_REASONS["request"] in reply.failure
    assert not StageExecutor(site)(declared).failure
    another_run = replace(with_facts(declared, mean=(0.0, 50.0)), run="another")
    assert not StageExecutor(site)(another_run).failure


def test_one_acceptance_covers_the_sums_and_the_training_by_them(
    summed: list[Request], tmp_path: Path
) -> None:
    sums_request, training_request = summed
    assert not sums_request.facts["mean"]
    assert training_request.facts["mean"]
    assert accepted(sums_request) == accepted(training_request)

    site = replace(hospital(tmp_path, 0), accept=(accepted(sums_request),))
    assert not StageExecutor(site)(sums_request).failure
    assert not StageExecutor(site)(training_request).failure

    wrong_std = tuple(1e3 * value for value in training_request.facts["std"])
    refusal = StageExecutor(site)(with_facts(training_request, std=wrong_std))
    assert PUBLIC_REASONS["request"] in refusal.failure


def test_a_run_over_sites_that_have_accepted_another_stops(tmp_path: Path) -> None:
    executors = {
        client: StageExecutor(replace(hospital(tmp_path, client), accept=("0" * 64,)))
        for client in range(CLIENTS)
    }

    with pytest.raises(TooFewReplies):
        run(experiment(**DECLARED), tmp_path / "run", grid=executor_grid(executors))
