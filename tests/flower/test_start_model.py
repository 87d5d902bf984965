"""A run over Flower that starts from an earlier run's model: the sites get it from the server, each
once, and it is part of what they accept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import TooFewReplies
from fedstill.core.files import digest
from fedstill.core.records import Tensors
from fedstill.flower.engine import LoopbackGrid
from fedstill.flower.facts import accepted_text
from fedstill.flower.messages import PUBLIC_REASONS, Request, SiteReply
from fedstill.flower.site import START_MODEL, StageExecutor, prune_states
from fedstill.flower.site_settings import Site
from fedstill.models.building import sha256_of
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from flowers import executor_grid, needs_flower, over_flower, own_sites
from journals import refusals
from run_bits import model_bytes

pytestmark = [needs_flower, pytest.mark.usefixtures("with_threads")]

CLIENTS = 3


def experiment(method: str, **changes: Any) -> Experiment:
    """Three clients, two rounds."""
    values = {"topology": {"clients": CLIENTS}, "data": {}, "measure": (), "rounds": 2}
    return toys.toy(method, **{**values, **changes})


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the run whose model is the start."""
    folder = tmp_path_factory.mktemp("first") / "run"
    run(experiment("fedavg", seed=5), folder, toys.blobs())
    return folder


@dataclass
class Sites:
    """Sites on a loopback grid, and the requests that they received."""

    sites: list[Site]
    requests: list[Request] = field(default_factory=list)

    def answer(self, request: Request) -> SiteReply:
        """The reply of the requested client's site."""
        self.requests.append(request)
        return StageExecutor(self.sites[request.client], shows_reasons=True)(request)

    def grid(self) -> LoopbackGrid:
        """A grid of these sites."""
        return executor_grid({site.client: self.answer for site in self.sites})

    def run(self, experiment: Experiment, out: Path, **options: Any) -> None:
        """Run the experiment at these sites."""
        run(at_sites(experiment), out, toys.blobs(), grid=self.grid(), **options)


def at_sites(experiment: Experiment) -> Experiment:
    """The experiment at sites with data of their own."""
    return over_flower(experiment, data="sites", federation="/federation", test_every=0)


def sites_of(experiment: Experiment, folder: Path) -> Sites:
    """The clients of a simulation as sites."""
    settings = resolve(experiment.with_values({"data.name": "blobs"}, "test"))
    return Sites(own_sites(prepare(settings, toys.blobs()), folder))


STARTS: dict[str, Any] = {
    "a global model": {"method": "fedntd"},
    "models that stay at sites": {"method": "fedrep"},
    "entries that stay as they are": {"method": "fedavg", "train_only": ("head.",)},
    "label counts first": {"method": "fedlc"},
}


@pytest.mark.parametrize("case", STARTS)
@pytest.mark.parametrize("own_data", [True, False], ids=["own data", "trial"])
def test_sites_start_from_the_model_as_the_simulation_does(
    case: str, own_data: bool, first: Path, tmp_path: Path
) -> None:
    federation = experiment(**STARTS[case], start_from=str(first))
    run(replace(federation, engine="serial"), tmp_path / "serial", toys.blobs())

    if own_data:
        sites_of(federation, tmp_path / "sites").run(federation, tmp_path / "run")
    else:
        run(over_flower(federation), tmp_path / "run", toys.blobs())

    assert not refusals(tmp_path / "run")
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "serial")


def test_each_site_gets_the_model_once_and_again_after_a_failure(
    first: Path, tmp_path: Path
) -> None:
    """Client 0 loses the model after round 2, fails in round 3, and gets it again in round 4."""
    federation = experiment("fedavg", start_from=str(first), rounds=4)
    sites = sites_of(federation, tmp_path / "sites")

    def lose_disk(event: Any) -> None:
        if event["round"] == 2:
            (stored,) = sites.sites[0].memory.rglob(START_MODEL)
            stored.unlink()

    sites.run(federation, tmp_path / "run", on_round=lose_disk)

    with_model = [request for request in sites.requests if request.start]
    clients_by_round = sorted((request.stage.round, request.client) for request in with_model)
    assert clients_by_round == [(1, 0), (1, 1), (1, 2), (4, 0)]
    (refused,) = refusals(tmp_path / "run")
    assert refused["round"] == 3
    assert refused["client"] == 0


def interrupt(event: Any) -> None:
    """End the run after its first round."""
    raise KeyboardInterrupt


def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(first: Path, tmp_path: Path) -> None:
    federation = experiment("fedntd", start_from=str(first))
    run(replace(federation, engine="serial"), tmp_path / "serial", toys.blobs())
    sites = sites_of(federation, tmp_path / "sites")
    with pytest.raises(KeyboardInterrupt):
        sites.run(federation, tmp_path / "run", on_round=interrupt)

    resume(tmp_path / "run", toys.blobs(), grid=sites.grid())

    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "serial")


@pytest.fixture(scope="module")
def request_with_model(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Request:
    """A request to client 0, with a path in its config that its site does not have."""
    folder = tmp_path_factory.mktemp("request")
    federation = experiment("fedavg", start_from=str(first), rounds=1)
    sites = sites_of(federation, folder / "sites")
    sites.run(federation, folder / "run")
    (request,) = [request for request in sites.requests if request.client == 0]
    config = request.config.replace(str(first), "/only/at/the/server")
    return replace(request, config=config, sha=digest(config.encode()), run="another")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """The site of client 0."""
    return sites_of(experiment("fedavg"), tmp_path / "sites").sites[0]


def facts_with(model: Tensors, request: Request) -> dict[str, Any]:
    """The facts of a request that starts from this model."""
    return {**request.facts, "start": sha256_of(model)}


def moved(model: Tensors) -> dict[str, torch.Tensor]:
    """Another model."""
    return {name: value + 1 for name, value in model.items()}


def test_a_site_reads_no_file_and_needs_the_model_once(
    request_with_model: Request, site: Site
) -> None:
    without = replace(request_with_model, start={})

    assert PUBLIC_REASONS["start"] in StageExecutor(site)(without).failure
    assert not StageExecutor(site)(request_with_model).failure
    assert not StageExecutor(site)(without).failure
    assert PUBLIC_REASONS["start"] in StageExecutor(site)(replace(without, run="third")).failure


def test_a_site_takes_no_other_model_than_the_one_it_has_accepted(
    request_with_model: Request, site: Site
) -> None:
    text = accepted_text(request_with_model.config, request_with_model.facts)
    assert sha256_of(request_with_model.start) in text
    accepting = replace(site, accept=(digest(text.encode()),))
    assert not StageExecutor(accepting)(request_with_model).failure

    model = moved(request_with_model.start)
    swapped = replace(request_with_model, start=model)
    assert PUBLIC_REASONS["start"] in StageExecutor(accepting)(swapped).failure
    hostile = replace(swapped, facts=facts_with(model, swapped))
    assert PUBLIC_REASONS["accept"] in StageExecutor(accepting)(hostile).failure
    # A site that accepts all keeps the model with which the run began.
    assert PUBLIC_REASONS["request"] in StageExecutor(site)(hostile).failure
    assert not StageExecutor(accepting)(replace(request_with_model, start={})).failure


def short(model: Tensors) -> dict[str, torch.Tensor]:
    """The model without its first entry."""
    return dict(list(model.items())[1:])


def not_finite(model: Tensors) -> dict[str, torch.Tensor]:
    """The model with NaN in all entries."""
    return {name: value * float("nan") for name, value in model.items()}


def large(model: Tensors) -> dict[str, torch.Tensor]:
    """The model with a further, large entry."""
    return {**model, "further": torch.zeros(1000, 1000)}


@pytest.mark.parametrize("change", [short, not_finite, large])
def test_a_model_that_does_not_fit_is_refused_and_not_stored(
    change: Callable[[Tensors], Tensors], request_with_model: Request, site: Site
) -> None:
    model = change(request_with_model.start)
    hostile = replace(request_with_model, start=model, facts=facts_with(model, request_with_model))
    assert PUBLIC_REASONS["start"] in StageExecutor(site)(hostile).failure
    assert not list(site.memory.rglob(START_MODEL))


def test_facts_and_config_agree_on_whether_there_is_a_model(
    request_with_model: Request, site: Site
) -> None:
    facts = {name: value for name, value in request_with_model.facts.items() if name != "start"}
    without = replace(request_with_model, facts=facts, start={})
    assert PUBLIC_REASONS["config"] in StageExecutor(site)(without).failure
    unnamed = replace(without, facts=facts, start=request_with_model.start)
    assert PUBLIC_REASONS["config"] in StageExecutor(site)(unnamed).failure


def test_a_damaged_model_is_federation_for_again(request_with_model: Request, site: Site) -> None:
    assert not StageExecutor(site)(request_with_model).failure
    (stored,) = site.memory.rglob(START_MODEL)
    stored.write_bytes(stored.read_bytes()[:-4] + b"\0\0\0\0")
    without = replace(request_with_model, start={})
    assert PUBLIC_REASONS["start"] in StageExecutor(site)(without).failure
    assert not StageExecutor(site)(request_with_model).failure


def test_the_model_is_pruned_with_the_states(request_with_model: Request, site: Site) -> None:
    assert not StageExecutor(site)(request_with_model).failure
    for path in site.memory.rglob("*"):
        os.utime(path, (0, 0))
    prune_states(site.memory, 90)
    assert not list(site.memory.rglob(START_MODEL))


def test_sites_that_accept_another_model_stop_the_run(first: Path, tmp_path: Path) -> None:
    federation = experiment("fedavg", start_from=str(first))
    sites = sites_of(federation, tmp_path / "sites")
    sites.sites = [replace(site, accept=("0" * 64,)) for site in sites.sites]

    with pytest.raises(TooFewReplies):
        sites.run(federation, tmp_path / "run")

    for site in sites.sites:
        (offered,) = (site.memory / "offered").iterdir()
        assert "start = " in offered.read_text(encoding="utf-8")
