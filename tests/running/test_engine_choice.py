"""``engine = "auto"``: arithmetic decides, the run's config.toml names what it came to, and a
resume keeps it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import toys
from fedstill.config.resolve import settle
from fedstill.core.records import Plan
from fedstill.engines.passes import forward_flops
from fedstill.models import contract
from fedstill.running import world
from fedstill.running.compare import make_way, variants
from fedstill.running.explain import run_estimate
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from fedstill.running.world import StageWork, suited_engine
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
        suited_engine([StageWork(Plan(batch=10), world.FEWEST - 1, {MLP}, 20.0)], "cpu").engine
        == "pooled"
    )
    assert (
        suited_engine([StageWork(Plan(validation=0.5, patience=2), 10, {MLP}, 20.0)], "cpu").engine
        == "pooled"
    )
    kind, why = suited_engine([few], "cuda")
    assert kind == "pooled"
    assert "cuda" in why
    large = contract.spec_for("cnn", (3, 32, 32), 10, {})
    kind, why = suited_engine([few, StageWork(Plan(batch=50), 10, {large}, 500.0)], "cpu")
    assert kind == "pooled"
    assert "MFLOP" in why


def auto(**changes: object):  # type: ignore[no-untyped-def]
    return toys.toy("fedntd", **{"engine": "auto", **changes})


def test_the_choice_stands_in_the_config_and_a_resume_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(auto(), tmp_path / "whole", data=toys.blobs())
    half = stopped(auto(), tmp_path / "half", stages=1)
    assert tomllib.loads((half / "config.toml").read_text())["engine"] == "vectorised"
    monkeypatch.setitem(world.CROSSOVER, "cpu", 0.0)
    resume(half, data=toys.blobs())
    assert (half / "model.safetensors").read_bytes() == (
        tmp_path / "whole/model.safetensors"
    ).read_bytes()
    run(auto(), tmp_path / "other", data=toys.blobs())
    assert tomllib.loads((tmp_path / "other/config.toml").read_text())["engine"] == "pooled"


def test_explain_says_what_was_chosen_and_why() -> None:
    said = dict(run_estimate(prepare(settle(auto()), toys.blobs())).lines())["engine"]
    assert said.startswith("vectorised (")
    assert "MFLOP in a client's step" in said
    said = dict(run_estimate(prepare(settle(auto(engine="serial")), toys.blobs())).lines())[
        "engine"
    ]
    assert said.startswith("serial (auto would take vectorised")


def test_a_comparison_goes_on_with_what_was_chosen(tmp_path: Path) -> None:
    (variant,) = variants(auto(), tmp_path, seeds=[7])
    run(variant.experiment, variant.folder, data=toys.blobs())
    wanted = variant.experiment.with_values({"data.name": "blobs"}, "test")
    (again,) = variants(wanted, tmp_path, seeds=[7])
    make_way([again], overwrite=False)
    assert (variant.folder / "summary.json").is_file()
