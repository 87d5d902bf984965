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
from fedstill.config.settings import Settings
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Plan, Stage, Step, TrainingStart
from fedstill.core.registry import register
from fedstill.data.views import SiteViews
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
from fedstill.running.world import RunWorld
from run_bits import stopped

MLP = contract.spec_for("mlp", (1, 4, 4), 5, {"hidden": (8,)})


def test_products_are_counted() -> None:
    assert forward_flops(MLP) == 2 * (16 * 8 + 8 * 5)
    conv = contract.spec_for("digits_cnn", (1, 8, 8), 10, {})
    assert forward_flops(conv) == 2 * (64 * 16 * 9 + 16 * 32 * 16 * 9 + 128 * 64 + 64 * 10)


def test_small_steps_of_many_clients_are_stacked() -> None:
    few = StageWork(Plan(batch=10), 10, {MLP}, examples=7.0)
    assert few.flops == 3 * 7 * forward_flops(MLP), "a batch is no larger than a client's data"
    assert suited_engine([few], "cpu").engine == "vectorised"
    assert suited_engine([StageWork(Plan(batch=10), 1, {MLP}, 20.0)], "cpu").engine == "pooled"
    assert (
        suited_engine([StageWork(Plan(batch=10), vectorised.FEWEST - 1, {MLP}, 20.0)], "cpu").engine
        == "pooled"
    )
    assert (
        suited_engine([StageWork(Plan(validation=0.5, patience=2), 10, {MLP}, 20.0)], "cpu").engine
        == "pooled"
    )
    kind, why = suited_engine([few], "mps")
    assert kind == "pooled"
    assert "mps" in why


def test_a_gpu_stacks_larger_steps_than_a_processor() -> None:
    few = StageWork(Plan(batch=10), 10, {MLP}, examples=7.0)
    papers = contract.spec_for("cnn", (3, 32, 32), 10, {})
    residual = contract.spec_for("resnet18", (3, 32, 32), 10, {"norm": "group"})
    engines = {}
    for name, spec in (("papers", papers), ("residual", residual)):
        for device in ("cpu", "cuda:1"):
            choice = suited_engine([few, StageWork(Plan(batch=50), 10, {spec}, 500.0)], device)
            assert "MFLOP" in choice.reason
            engines[name, device] = choice.engine
    assert engines == {
        ("papers", "cpu"): "pooled",
        ("papers", "cuda:1"): "vectorised",
        ("residual", "cpu"): "pooled",
        ("residual", "cuda:1"): "pooled",
    }


def auto(**changes: object):  # type: ignore[no-untyped-def]
    return toys.toy("fedntd", **{"engine": "auto", **changes})


def test_the_choice_stands_in_the_config_and_a_resume_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(auto(), tmp_path / "whole", data=toys.blobs())
    half = stopped(auto(), tmp_path / "half", stages=1)
    assert tomllib.loads((half / "config.toml").read_text())["engine"] == "vectorised"
    monkeypatch.setitem(vectorised.CROSSOVER, "cpu", 0.0)
    resume(half, data=toys.blobs())
    assert (half / "model.safetensors").read_bytes() == (
        tmp_path / "whole/model.safetensors"
    ).read_bytes()
    run(auto(), tmp_path / "other", data=toys.blobs())
    assert tomllib.loads((tmp_path / "other/config.toml").read_text())["engine"] == "pooled"


def test_explain_says_what_was_chosen_and_why() -> None:
    said = dict(run_estimate(prepare(resolve(auto()), toys.blobs())).lines())["engine"]
    assert said.startswith("vectorised (")
    assert "MFLOP in a client's step" in said
    said = dict(run_estimate(prepare(resolve(auto(engine="serial")), toys.blobs())).lines())[
        "engine"
    ]
    assert said.startswith("serial (auto would choose vectorised")


def test_a_comparison_goes_on_with_what_was_chosen(tmp_path: Path) -> None:
    (variant,) = variants(auto(), tmp_path, seeds=[7])
    run(variant.experiment, variant.folder, data=toys.blobs())
    wanted = variant.experiment.with_values({"data.name": "blobs"}, "test")
    (again,) = variants(wanted, tmp_path, seeds=[7])
    clear_other_runs([again], overwrite=False)
    assert (variant.folder / "summary.json").is_file()


class LooksAtNumbers(ClientWork):
    """Its loss depends on a number that ``torch.func.vmap`` does not have."""

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


def chosen(method: object = "fedavg", **changes: object) -> Prepared:
    return prepare(resolve(toys.toy(method, **{"engine": "auto", **changes})), toys.blobs())


def test_it_is_the_default() -> None:
    assert Experiment().engine == "auto"


@pytest.mark.parametrize(
    ("method", "word"),
    [("toy_looks_at_numbers", "LooksAtNumbers"), ("toy_draws", "Draws")],
)
def test_a_method_that_cannot_be_stacked_is_pooled(method: str, word: str, tmp_path: Path) -> None:
    prepared = chosen(method)
    assert prepared.settings.engine == "pooled"
    assert word in prepared.settings.engine_reason
    result = run(toys.toy(method, engine="auto"), tmp_path / "run", data=toys.blobs())
    named = run(toys.toy(method), tmp_path / "named", data=toys.blobs())
    assert all(torch.equal(result.model[name], named.model[name]) for name in named.model)


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
    large = replace(equal, plan=Plan(batch=int(limit / (3 * forward_flops(MLP)) / 2)), examples=1e9)
    assert suited_engine([large], "cpu").engine == "vectorised"
    kind, why = suited_engine([replace(large, padding=2.0)], "cpu")
    assert kind == "pooled"
    assert "unequal" in why


def test_the_padding_is_that_of_the_split() -> None:
    (even,) = world.work_of_stages(*_parts(chosen(partition={"kind": "iid"})))
    assert even.padding == pytest.approx(1.0, abs=0.02)
    (uneven,) = world.work_of_stages(*_parts(chosen()))
    assert uneven.padding > 1.1
    (by_steps,) = world.work_of_stages(*_parts(chosen(plan={"steps": 3})))
    assert by_steps.padding == 1.0


def _parts(prepared: Prepared) -> tuple[Settings, RunWorld, SiteViews]:
    return prepared.settings, prepared.world, prepared.sites


def test_seeds_for_which_auto_chooses_differently_are_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(auto(seed=1), tmp_path / "first", data=toys.blobs())
    monkeypatch.setitem(vectorised.CROSSOVER, "cpu", 0.0)
    run(auto(seed=2), tmp_path / "second", data=toys.blobs())
    run(auto(seed=1, engine="serial"), tmp_path / "named", data=toys.blobs())
    chosen_by_auto, named = groups([tmp_path])
    assert chosen_by_auto.seeds == [1, 2]
    assert {run.settings["engine"] for run in chosen_by_auto.runs} == {"vectorised", "pooled"}
    assert named.seeds == [1]
