"""Every measure with methods of every kind: it is refused at the start, or records numbers of
existing models.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.errors import FedstillError, IncompatibleMethod
from fedstill.core.extensions import StageResult
from fedstill.data.dataset import Dataset
from fedstill.measures.base import EvaluationContext, Measure, Numbers
from fedstill.models import contract
from fedstill.running import observers
from fedstill.running.preparation import prepare
from fedstill.running.runner import run
from journals import journal_events

MEASURES = [name for name in registry.names("measure") if not name.startswith("toy_")]
CLIENT_FIELDS = {
    "local": "correct_by_class",
    "epochs": "correct_by_epoch",
    "personal": "trained_right",
    "private_public": "private",
}
"""By measure that clients take, a field of their events."""

MATCHED = {"name": "pfnm", "gamma": (1.0,), "variance": (1.0,), "prior_variance": (1.0,)}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {},
    "afl": {},
    "fedavg, then ridge": {"method": "fedavg", "topology": {"clients": 4, "last": "ridge"}},
    "local_only": {},
    "naive_kd": {},
    "qkt": {},
    "fd": {},
    "fd, after a fit": {"method": "fd", "topology": {"clients": 4, "first": "fit"}},
    "fedproto, after a fit": {"method": "fedproto", "topology": {"clients": 4, "first": "fit"}},
    "feddf": {},
    "pfnm": {"method": MATCHED},
    "pfnm, over tasks": {"method": MATCHED, "stream": {"kind": "classes", "tasks": 2}, "query": {}},
    "analytic": {"method": {"name": "analytic", "width": 20}},
    "metafed": {"topology": {"clients": 4}},
    "sfedkd": {"topology": {"kind": "sequential", "clients": 4}},
}
ONE_ROUND = {"local_only", "naive_kd", "qkt", "pfnm"}
"""Methods of one round, or of one for each task."""

METHODS_WITHOUT_GLOBAL_MODEL = {"local_only", "naive_kd", "qkt", "fd", "fedproto"}
CASES_WITHOUT_GLOBAL_MODEL = [
    case for case in METHODS if case.split(",")[0] in METHODS_WITHOUT_GLOBAL_MODEL
]
COMPARE = ["alignment", "divergence", "diversity", "landscape", "sphere", "tsne", "units"]
"""Measures that compare local models with the server's."""


def toy(case: str, *measures: str, **changes: Any) -> Experiment:
    """Two rounds of a method, with a network of two features, of which every picture can be
    drawn.
    """
    method = case.split(",")[0]
    rounds = 2
    if method in ONE_ROUND and "stream" not in METHODS[case]:
        rounds = 1
    values = {
        **toys.suited(method),
        "rounds": rounds,
        "measure": measures,
        "measure_every": 1,
        "model": {"name": "mlp", "hidden": (2,)},
        "topology": {"clients": 4},
        "plan": {"epochs": 1, "batch": 20, "lr": 0.1, "validation": 0.2},
        **METHODS[case],
        **changes,
    }
    return toys.toy(values.pop("method", method), **values)


def small_blobs() -> Dataset:
    """100 training images and 40 test images."""
    data = toys.blobs(size=100)
    return replace(data, test=data.test.take(torch.arange(40)))


def refusal(case: str, measure: str) -> str:
    """Why a measure is refused; empty if it is not."""
    try:
        prepare(resolve(toy(case, measure)), small_blobs())
    except IncompatibleMethod as error:
        if not str(error).startswith(f"measure {measure}: "):
            raise
        return str(error)
    return ""


def numbers(value: Any) -> Iterator[float]:
    """All numbers in nested mappings and lists."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        yield from chain.from_iterable(map(numbers, value))
    elif isinstance(value, int | float):
        yield float(value)


@pytest.fixture
def without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that are run with parameters have weights of their own, which no measure may use:
    here they are NaN.
    """
    plain_look = observers.look

    def look(
        name: str, measure: Measure, result: StageResult, context: EvaluationContext
    ) -> Numbers | None:
        specs = {context.spec}
        for state in (result.before, result.after):
            specs.add(state.model or context.spec)
        for spec in specs:
            module = contract.module(spec, "frozen")
            with torch.no_grad():
                for value in (*module.parameters(), *module.buffers()):
                    value.fill_(math.nan)
        return plain_look(name, measure, result, context)

    monkeypatch.setattr(contract, "thread_modules", functools.cache(threading.local))
    monkeypatch.setattr(observers, "look", look)


def recorded_numbers(folder: Path, measure: str) -> list[float]:
    """The numbers of a measure in a journal."""
    values: list[Any] = journal_events(folder, event="measure", measure=measure)
    if measure in CLIENT_FIELDS:
        events = journal_events(folder, event="client")
        values = [event.get(CLIENT_FIELDS[measure]) for event in events]
    return list(numbers(values))


@pytest.mark.usefixtures("without_weights")
@pytest.mark.parametrize("case", METHODS)
def test_a_measure_is_refused_or_records_numbers_of_existing_models(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A measure without numbers warns that it has none."""
    refusals = {name: refusal(case, name) for name in MEASURES}
    accepted = [name for name, reason in refusals.items() if not reason]

    run(toy(case, *accepted), tmp_path / "run", data=small_blobs())

    assert not any("\n" in reason for reason in refusals.values())
    for name in accepted:
        found = recorded_numbers(tmp_path / "run", name)
        if not found:
            looks_once = f"measure {name} looks once, in round" in caplog.text
            without_clients = f"measure {name}: in the last round no client" in caplog.text
            assert looks_once or without_clients, f"{name} is silent"
        assert all(map(math.isfinite, found)), name


@pytest.mark.parametrize("case", CASES_WITHOUT_GLOBAL_MODEL)
@pytest.mark.parametrize("name", COMPARE)
def test_comparisons_with_the_servers_model_are_refused_if_it_has_none(
    case: str, name: str
) -> None:
    method = case.split(",")[0]

    with pytest.raises(IncompatibleMethod, match=rf"measure {name}: .* method {method} "):
        prepare(resolve(toy(case, name)), small_blobs())


@pytest.mark.parametrize(
    "topology", [{"kind": "sequential", "clients": 4}, {"clients": 4, "sampled": 1}]
)
def test_gradients_of_one_client_do_not_differ(topology: Mapping[str, Any]) -> None:
    problem = (
        r"measure diversity: it needs two clients .*; set topology\.kind = 'parallel' and "
        r".*sampled"
    )

    with pytest.raises(IncompatibleMethod, match=problem):
        prepare(resolve(toy("fedavg", "diversity", topology=topology)), small_blobs())


@pytest.mark.parametrize("case", ["feddf", "fedavg, then ridge", "metafed"])
def test_pictures_of_the_end_are_of_the_last_stage_that_sends_models(
    case: str, tmp_path: Path
) -> None:
    run(toy(case, "units"), tmp_path / "run", data=small_blobs())

    (look,) = journal_events(tmp_path / "run", event="measure")
    trained = journal_events(tmp_path / "run", event="client", round=2, name="train")
    assert look["round"] == 2
    assert look["name"] == "train"
    assert look["stage"] == max(event["stage"] for event in trained)


def test_a_picture_of_the_end_is_refused_if_models_are_sent_only_earlier() -> None:
    """A run of one round is accepted, because the fit in this round sends models."""
    two_rounds = toys.toy(
        "toy_logits",
        data={"public": toys.PUBLIC},
        topology={"clients": 4, "first": "fit"},
        measure=("units",),
    )
    one_round = two_rounds.with_values({"rounds": 1}, "test")

    with pytest.raises(IncompatibleMethod, match="measure units"):
        prepare(resolve(two_rounds), toys.blobs())
    prepare(resolve(one_round), toys.blobs())


def test_a_picture_of_the_end_without_content_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over tasks the analytic method trains in the first round only, and sends no models in the
    last one.
    """
    experiment = toy("analytic", "units", stream={"kind": "classes", "tasks": 2})

    run(experiment, tmp_path / "run", data=small_blobs())

    assert "measure units" in caplog.text


def test_measures_without_a_client_that_has_a_model_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """AFL's clients send sums of features, and have no model of their own."""
    run(toy("afl", "local", "personal"), tmp_path / "afl", data=small_blobs())
    for name in ("local", "personal"):
        assert f"measure {name}: in the last round no client had a model to measure" in caplog.text

    caplog.clear()
    run(toy("fedavg", "local", "personal"), tmp_path / "fedavg", data=small_blobs())
    assert "measure" not in caplog.text


def test_a_plane_is_of_the_body_for_every_kind_of_head() -> None:
    """The head of FedETF's network is a simplex, without weights that show the number of
    features.
    """
    experiment = toys.toy("fedetf", model=toys.on_simplex(), measure=("sphere",))

    with pytest.raises(IncompatibleMethod, match=r"measure sphere: model etf\(.*\) has 8 features"):
        prepare(resolve(experiment), small_blobs())


def test_a_model_that_lacks_an_entry_is_refused() -> None:
    """Another model's entry must not take its place. Features do not need the head."""
    ready = prepare(resolve(toy("fedavg")), small_blobs())
    context = ready.evaluation_context(None, None)
    assert context is not None
    passes = context.passes()
    incomplete = dict(ready.world.initial(0))
    del incomplete["head.bias"]
    head_only = {name: value for name, value in incomplete.items() if "head" in name}

    problem = r"mlp\(.*\) that lacks head\.bias"
    with pytest.raises(FedstillError, match=problem):
        context.predictor(incomplete)
    with pytest.raises(FedstillError, match=problem):
        context.accuracy_by_class(incomplete, context.test)
    with pytest.raises(FedstillError, match=problem):
        passes.logits(incomplete, context.test)
    with pytest.raises(FedstillError, match=r"body\.1\.weight"):
        passes.features(head_only, context.test)
    assert passes.features(incomplete, context.test).shape == (40, 2)
