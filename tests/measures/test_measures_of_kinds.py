"""Measures on tables, series and texts: each gives numbers, and bfloat16 trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import toys
from fedstill.config.experiment import Experiment
from fedstill.engines import devices
from fedstill.measures.landscape import filter_normalised
from fedstill.models import contract
from fedstill.running.journal import read_journal
from fedstill.running.runner import run
from kinds import CLASSES, NETWORKS, SHAPES, small_data

MEASURED = {
    "landscape": {"axis", "models"},
    "tsne": {"labels", "x", "y"},
    "sphere": {"counts"},
    "leakage": {"seen", "global"},
    "boundaries": {"plane", "x"},
    "alignment": set[str](),
    "units": set[str](),
}
"""Measures that look at features, logits or weights, and fields that they write."""

ON_A_PLANE = {"table": "sphere_mlp", "series": "sphere_mlp", "text": {"name": "bag", "width": 2}}
QUERIED = {"rounds": 1, "topology": {"clients": 4}, "query": {"draw": "single", "fewer_than": 5}}


def experiment(kind: str, method: str, measures: tuple[str, ...], **changes: object) -> Experiment:
    values: dict[str, object] = {
        "rounds": 1,
        "model": NETWORKS[kind],
        "measure": measures,
        "measure_every": 1,
        "plan": {"epochs": 1, "batch": 10, "lr": 0.05},
        "topology": {"clients": 4},
    }
    return toys.toy(method, **{**values, **changes})


def measured(folder: Path, kind: str, name: str) -> dict[str, object]:
    """What a measure writes of a run on a kind."""
    method, changes = "fedavg", {}
    if name == "boundaries":
        method, changes = "qkt", QUERIED
    if name == "sphere":
        changes = {"model": ON_A_PLANE[kind]}
    run(experiment(kind, method, (name,), **changes), folder, data=small_data(kind))
    events = [e for e in read_journal(folder / "journal.jsonl") if e["event"] == "measure"]
    assert events
    return {**events[-1]}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", MEASURED)
def test_a_measure_gives_numbers_for_every_kind(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstill.measures.landscape.PRODUCTS", 3)
    event = measured(tmp_path / "run", kind, name)
    assert MEASURED[name] <= event.keys()
    text = json.dumps(event)
    assert "NaN" not in text
    assert "Infinity" not in text


@pytest.mark.parametrize("kind", SHAPES)
def test_bfloat16_trains_on_every_kind(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token ids stay whole numbers; torch imitates bfloat16 where a processor has none."""
    monkeypatch.setattr(devices, "has_bfloat16", lambda device: True)
    results = {}
    for how in ("fp32", "bf16"):
        done = run(
            experiment(kind, "fedntd", (), precision=how), tmp_path / how, data=small_data(kind)
        )
        results[how] = done.model
    assert all(
        v.dtype == torch.float32 and bool(v.isfinite().all()) for v in results["bf16"].values()
    )
    assert any(not torch.equal(v, results["bf16"][k]) for k, v in results["fp32"].items())
    far = max(float((v - results["bf16"][k]).abs().max()) for k, v in results["fp32"].items())
    assert far < 0.05


def test_the_row_of_padding_gets_no_direction() -> None:
    """Its norm is 0: so it stays where it is, and nothing is divided by it."""
    spec = contract.spec_for("bag", (12,), CLASSES, {}, 30)
    params = contract.initial(spec, 0)
    (key,) = [k for k in params if k.endswith("tokens.weight")]
    towards = filter_normalised(params, [key], torch.Generator().manual_seed(0))[key]
    assert float(towards[0].abs().sum()) == 0
    torch.testing.assert_close(towards.norm(dim=1), params[key].norm(dim=1))
