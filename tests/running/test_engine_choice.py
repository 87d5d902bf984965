"""``engine = "auto"``: arithmetic decides, the run's config.toml names what it came to, and a
resume keeps it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import toys
from fedstill import Experiment
from fedstill.cli.explain import run_estimate
from fedstill.config.resolve import resolve
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    ModelSpec,
    Payload,
    Plan,
    Stage,
    Step,
    TrainingStart,
    View,
    World,
)
from fedstill.core.registry import register
from fedstill.engines import vectorised
from fedstill.engines.passes import forward_flops
from fedstill.engines.vectorised import StageWork, suited_engine
from fedstill.methods.fedavg import FedAvg
from fedstill.models import contract
from fedstill.running import world
from fedstill.running.compare import clear_other_runs, variants
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import resume, run
from fedstill.running.runs import groups
from run_bits import model_bytes, stopped

MLP = contract.spec_for("mlp", (1, 4, 4), 5, {"hidden": (8,)})


def test_products_are_counted() -> None:
    assert forward_flops(MLP) == 2 * (16 * 8 + 8 * 5)
    conv = contract.spec_for("digits_cnn", (1, 8, 8), 10, {})
    convolutions = 64 * 16 * 9 + 16 * 32 * 16 * 9
    dense_layers = 128 * 64 + 64 * 10
    assert forward_flops(conv) == 2 * (convolutions + dense_layers)


def test_small_steps_of_many_clients_are_stacked() -> None:
    few = StageWork(Plan(batch=10), 10, {MLP}, examples=7.0)
    assert few.flops == 3 * 7 * forward_flops(MLP), "a batch is no larger than a client's data"
    assert suited_engine([few], "cpu").engine == "vectorised"

    lone = StageWork(Plan(batch=10), 1, {MLP}, 20.0)
    fewer_than_a_stack = replace(lone, clients=vectorised.FEWEST - 1)
    stops_early = StageWork(Plan(validation=0.5, patience=2), 10, {MLP}, 20.0)
    for work in (lone, fewer_than_a_stack, stops_early):
        assert suited_engine([work], "cpu").engine == "pooled"

    on_mps = suited_engine([few], "mps")
    assert on_mps.engine == "pooled"
    assert "mps" in on_mps.reason


def test_a_gpu_stacks_larger_steps_than_a_processor() -> None:
    """The network of the papers is stacked on a GPU only, and a residual network on neither."""
    few = StageWork(Plan(batch=10), 10, {MLP}, examples=7.0)
    papers = contract.spec_for("cnn", (3, 32, 32), 10, {})
    residual = contract.spec_for("resnet18", (3, 32, 32), 10, {"norm": "group"})

    def engine(network: ModelSpec, device: str) -> str:
        larger = StageWork(Plan(batch=50), 10, {network}, 500.0)
        choice = suited_engine([few, larger], device)
        assert "MFLOP" in choice.reason
        return choice.engine

    assert engine(papers, "cpu") == "pooled"
    assert engine(papers, "cuda:1") == "vectorised"
    assert engine(residual, "cpu") == "pooled"
    assert engine(residual, "cuda:1") == "pooled"


def auto(**changes: object) -> Experiment:
    """A run of FedNTD for which arithmetic chooses the engine."""
    return toys.toy("fedntd", **{"engine": "auto", **changes})


def test_the_choice_is_written_to_the_config_and_a_resume_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(auto(), tmp_path / "whole", data=toys.blobs())
    half = stopped(auto(), tmp_path / "half", stages=1)
    assert tomllib.loads((half / "config.toml").read_text())["engine"] == "vectorised"
    monkeypatch.setitem(vectorised.CROSSOVER, "cpu", 0.0)
    resume(half, data=toys.blobs())
    assert model_bytes(half) == model_bytes(tmp_path / "whole")

    run(auto(), tmp_path / "other", data=toys.blobs())
    assert tomllib.loads((tmp_path / "other/config.toml").read_text())["engine"] == "pooled"


def test_explain_gives_the_choice_and_its_reason() -> None:
    def engine_line(experiment: Experiment) -> str:
        estimate = run_estimate(prepare(resolve(experiment), toys.blobs()))
        return dict(estimate.lines())["engine"]

    line = engine_line(auto())

    assert line.startswith("vectorised (")
    assert "MFLOP in a client's step" in line
    assert engine_line(auto(engine="serial")).startswith("serial (auto would choose vectorised")


def test_a_comparison_keeps_a_run_whose_engine_was_chosen(tmp_path: Path) -> None:
    (variant,) = variants(auto(), tmp_path, seeds=[7])
    run(variant.experiment, variant.folder, data=toys.blobs())
    experiment = variant.experiment.with_values({"data.name": "blobs"}, "test")
    (again,) = variants(experiment, tmp_path, seeds=[7])
    clear_other_runs([again], overwrite=False)
    assert (variant.folder / "summary.json").is_file()


class LooksAtNumbers(ClientWork):
    """Its loss depends on the value of a tensor, which ``torch.func.vmap`` does not know."""

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        terms = super().terms(step, start)
        if float(terms["ce"].detach().sum()) < 0:
            raise ValueError("a negative loss")
        return terms


class Draws(ClientWork):
    """Its loss draws random numbers."""

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        terms = super().terms(step, start)
        return {"ce": terms["ce"] * torch.rand(len(step.y))}


class DrawsAtBegin(ClientWork):
    """Its start has random noise."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        start = super().begin(payload, client_state, view, world)
        noised = {name: v + 0.1 * torch.randn_like(v) for name, v in start.params.items()}
        return replace(start, params=noised)


@dataclass(frozen=True)
class Custom(FedAvg):
    """FedAvg with a client's part of these tests."""

    work_type: ClassVar[type[ClientWork]]

    def work(self, stage: Stage) -> ClientWork:
        return self.work_type()


@register("method", "toy_looks_at_numbers")
class CustomThatLooks(Custom):
    """Cannot be stacked."""

    work_type = LooksAtNumbers


@register("method", "toy_draws")
class CustomThatDraws(Custom):
    """Cannot be stacked, because clients of a stack would share what is drawn."""

    work_type = Draws


@register("method", "toy_draws_at_begin")
class CustomThatDrawsAtBegin(Custom):
    """Cannot be stacked, for the same reason."""

    work_type = DrawsAtBegin


def chosen(method: object = "fedavg", **changes: object) -> Prepared:
    """A prepared run for which arithmetic has chosen the engine."""
    return prepare(resolve(toys.toy(method, **{"engine": "auto", **changes})), toys.blobs())


def test_auto_is_the_default() -> None:
    assert Experiment().engine == "auto"


@pytest.mark.parametrize(
    ("method", "word"),
    [
        ("toy_looks_at_numbers", "LooksAtNumbers"),
        ("toy_draws", "Draws"),
        ("toy_draws_at_begin", "DrawsAtBegin"),
    ],
)
def test_a_method_that_cannot_be_stacked_is_pooled(method: str, word: str, tmp_path: Path) -> None:
    prepared = chosen(method)
    assert prepared.settings.engine == "pooled"
    assert word in prepared.settings.engine_reason
    result = run(toys.toy(method, engine="auto"), tmp_path / "run", data=toys.blobs())
    pooled = run(toys.toy(method), tmp_path / "named", data=toys.blobs())
    assert all(torch.equal(result.model[name], pooled.model[name]) for name in pooled.model)


def test_a_mistake_of_a_method_is_an_error_of_the_run_not_of_its_preparation() -> None:
    class Broken(FedAvg):
        def payload_for_client(self, *args: object) -> Payload:
            raise ValueError("broken")

    assert chosen(Broken()).settings.engine == "vectorised"


@pytest.mark.uses("privacy")
def test_private_training_is_pooled() -> None:
    privacy = {"gradient_clip": 0.5, "gradient_noise": 1.0}
    prepared = chosen(privacy=privacy, measure=())
    assert prepared.settings.engine == "pooled"
    assert "Private" in prepared.settings.engine_reason


def test_models_that_other_runs_may_reuse_are_not_stacked() -> None:
    lone = {"topology": {"clients": 6}, "rounds": 1, "partition": {"kind": "iid"}}
    lone["plan"] = {"epochs": 1, "patience": 0, "keep": "last", "validation": 0.0}
    assert chosen("local_only", **lone).settings.engine == "vectorised"
    prepared = chosen("local_only", reuse=True, **lone)
    assert prepared.settings.engine == "pooled"
    assert "reuse" in prepared.settings.engine_reason


def test_clients_of_unequal_size_are_stacked_only_if_their_steps_are_small() -> None:
    equal = StageWork(Plan(batch=10), 10, {MLP}, examples=100.0)
    limit = vectorised.CROSSOVER["cpu"]
    assert equal.crossover("cpu") == limit

    unequal = replace(equal, padding=2.0)
    assert unequal.crossover("cpu") == limit / 8

    largest_batch = int(limit / (3 * forward_flops(MLP)))
    large = replace(equal, plan=Plan(batch=largest_batch // 2), examples=1e9)
    assert suited_engine([large], "cpu").engine == "vectorised"

    large_and_unequal = suited_engine([replace(large, padding=2.0)], "cpu")
    assert large_and_unequal.engine == "pooled"
    assert "unequal" in large_and_unequal.reason


def test_the_padding_is_that_of_the_split() -> None:
    def padding(prepared: Prepared) -> float:
        work = world.work_of_stages(prepared.settings, prepared.world, prepared.sites)
        (stage,) = work
        return stage.padding

    assert padding(chosen(partition={"kind": "iid"})) == pytest.approx(1.0, abs=0.02)
    assert padding(chosen()) > 1.1, "the split is uneven"
    assert padding(chosen(plan={"steps": 3})) == 1.0, "clients train for equally many steps"


def test_seeds_for_which_auto_chooses_differently_are_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(auto(seed=1), tmp_path / "first", data=toys.blobs())
    monkeypatch.setitem(vectorised.CROSSOVER, "cpu", 0.0)
    run(auto(seed=2), tmp_path / "second", data=toys.blobs())
    run(auto(seed=1, engine="serial"), tmp_path / "named", data=toys.blobs())
    chosen_by_auto, chosen_by_name = groups([tmp_path])

    assert chosen_by_auto.seeds == [1, 2]
    assert {run.settings["engine"] for run in chosen_by_auto.runs} == {"vectorised", "pooled"}
    assert chosen_by_name.seeds == [1]
