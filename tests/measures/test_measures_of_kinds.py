"""Measures on tables, series and texts: each returns numbers, and bfloat16 trains."""

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
from fedstill.running.runner import run
from journals import journal_events
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
    """One round of four clients with data of a kind."""
    values: dict[str, object] = {
        "rounds": 1,
        "model": NETWORKS[kind],
        "measure": measures,
        "measure_every": 1,
        "plan": {"epochs": 1, "batch": 10, "lr": 0.05},
        "topology": {"clients": 4},
    }
    return toys.toy(method, **{**values, **changes})


def measured(kind: str, name: str) -> Experiment:
    """A run on a kind with a measure, with the method or the network that it needs."""
    match name:
        case "boundaries":
            return experiment(kind, "qkt", (name,), **QUERIED)
        case "sphere":
            return experiment(kind, "fedavg", (name,), model=ON_A_PLANE[kind])
    return experiment(kind, "fedavg", (name,))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", MEASURED)
def test_a_measure_has_numbers_for_every_kind(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstill.measures.landscape.PRODUCTS", 3)

    run(measured(kind, name), tmp_path / "run", data=small_data(kind))

    event = journal_events(tmp_path / "run", event="measure")[-1]
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
    data = small_data(kind)

    fp32 = run(experiment(kind, "fedntd", (), precision="fp32"), tmp_path / "fp32", data).model
    bf16 = run(experiment(kind, "fedntd", (), precision="bf16"), tmp_path / "bf16", data).model

    differences = [float((fp32[name] - value).abs().max()) for name, value in bf16.items()]
    for value in bf16.values():
        assert value.dtype == torch.float32
        assert bool(value.isfinite().all())
    assert 0 < max(differences) < 0.05


def test_the_embedding_of_padding_gets_no_direction() -> None:
    """Its norm is 0: so it stays as it is, and nothing is divided by it."""
    spec = contract.spec_for("bag", (12,), CLASSES, {}, 30)
    params = contract.initial(spec, 0)
    (tokens,) = [name for name in params if name.endswith("tokens.weight")]

    directions = filter_normalised(params, [tokens], torch.Generator().manual_seed(0))

    assert not directions[tokens][0].any()
    torch.testing.assert_close(directions[tokens].norm(dim=1), params[tokens].norm(dim=1))
