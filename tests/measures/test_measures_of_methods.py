"""Every measure with methods of every kind: it is refused at the start, or writes numbers of models
that are there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from fedstill.measures.base import EvaluationContext, Measure, Numbers
from fedstill.models import contract
from fedstill.running import observers
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

MEASURES = [n for n in registry.names("measure") if not n.startswith("toy_")]
BY_CLIENTS = {
    "local": "correct_by_class",
    "epochs": "correct_by_epoch",
    "personal": "trained_right",
}
BY_CLIENTS |= {"private_public": "private"}
"""Measures that clients take, and a field of theirs."""

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
PEERS = {"local_only", "naive_kd", "qkt", "pfnm"}
"""They meet once, or once a task."""
WITHOUT_A_GLOBAL_MODEL = [
    m for m in METHODS if m.split(",")[0] in ("local_only", "naive_kd", "qkt", "fd", "fedproto")
]
COMPARE = ["alignment", "divergence", "diversity", "landscape", "sphere", "tsne", "units"]
"""Measures that compare local models with the server's."""


def toy(case: str, *names: str, **changes: Any) -> Experiment:
    """Two rounds of a method, whose features are two numbers, so that every picture can be drawn of
    them.
    """
    method = case.split(",")[0]
    values = {
        **toys.suited(method),
        "rounds": 1 if method in PEERS and "stream" not in METHODS[case] else 2,
        "measure": names,
        "measure_every": 1,
        "model": {"name": "mlp", "hidden": (2,)},
        "topology": {"clients": 4},
        "plan": {"epochs": 1, "batch": 20, "lr": 0.1, "validation": 0.2},
        **METHODS[case],
        **changes,
    }
    return toys.toy(values.pop("method", method), **values)


def small() -> Any:
    data = toys.blobs(size=100)
    return replace(data, test=data.test.take(torch.arange(40)))


def refused(case: str, name: str) -> str:
    """Why a measure is refused, in one line; empty if it is not."""
    try:
        prepare(resolve(toy(case, name)), small())
    except IncompatibleMethod as error:
        if not str(error).startswith(f"measure {name}: "):
            raise
        return str(error)
    return ""


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, (int, float)):
        yield float(value)


@pytest.fixture
def without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that parameters run in have weights of their own, which no measure may use: here
    these are no numbers.
    """
    plain = observers.look

    def looked(
        name: str, measure: Measure, seen: StageResult, context: EvaluationContext
    ) -> Numbers | None:
        for spec in {
            context.spec,
            seen.before.model or context.spec,
            seen.after.model or context.spec,
        }:
            made = contract.module(spec, "frozen")
            with torch.no_grad():
                for value in (*made.parameters(), *made.buffers()):
                    value.fill_(math.nan)
        return plain(name, measure, seen, context)

    monkeypatch.setattr(contract, "_modules", type(contract._modules)())
    monkeypatch.setattr(observers, "look", looked)


@pytest.mark.parametrize("case", METHODS)
def test_it_is_refused_or_it_writes_numbers_of_models_that_there_are(
    case: str, tmp_path: Path, without_weights: None, caplog: pytest.LogCaptureFixture
) -> None:
    why = {name: refused(case, name) for name in MEASURES}
    assert not any("\n" in said for said in why.values())
    taken = [name for name, said in why.items() if not said]
    run(toy(case, *taken), tmp_path / "run", data=small())
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()
    ]
    for name in taken:
        if name in BY_CLIENTS:
            own = [
                e[BY_CLIENTS[name]]
                for e in lines
                if e["event"] == "client" and BY_CLIENTS[name] in e
            ]
        else:
            own = [e for e in lines if e["event"] == "measure" and e["measure"] == name]
        found = [n for event in own for n in numbers(event)]
        silent = (
            f"measure {name} looks once, in round",
            f"measure {name}: in the last round no client",
        )
        assert found or any(said in caplog.text for said in silent), f"{name} is silent"
        assert all(map(math.isfinite, found)), name


@pytest.mark.parametrize("case", WITHOUT_A_GLOBAL_MODEL)
@pytest.mark.parametrize("name", COMPARE)
def test_there_is_nothing_to_compare_with_where_the_server_has_no_model(
    case: str, name: str
) -> None:
    method = case.split(",")[0]
    with pytest.raises(IncompatibleMethod, match=rf"measure {name}: .* method {method} "):
        prepare(resolve(toy(case, name)), small())


@pytest.mark.parametrize(
    "topology", [{"kind": "sequential", "clients": 4}, {"clients": 4, "sampled": 1}]
)
def test_gradients_of_one_client_do_not_differ(topology: Mapping[str, Any]) -> None:
    says = (
        r"measure diversity: it needs two clients .*; set topology\.kind = 'parallel' and "
        r".*sampled"
    )
    with pytest.raises(IncompatibleMethod, match=says):
        prepare(resolve(toy("fedavg", "diversity", topology=topology)), small())


def test_pictures_of_the_end_are_of_the_last_stage_that_sends_models(tmp_path: Path) -> None:
    for case, stage in (("feddf", "train"), ("fedavg, then ridge", "train"), ("metafed", "train")):
        run(toy(case, "units"), tmp_path / case, data=small())
        lines = [
            json.loads(line)
            for line in (tmp_path / case / "journal.jsonl").read_text().splitlines()
        ]
        looks = [(e["round"], e["name"], e["stage"]) for e in lines if e["event"] == "measure"]
        last = max(
            e["stage"]
            for e in lines
            if e["event"] == "client" and (e["round"], e["name"]) == (2, stage)
        )
        assert looks == [(2, stage, last)]


def test_a_picture_of_the_end_is_refused_where_models_are_sent_only_before() -> None:
    topology = {"clients": 4, "first": "fit"}
    what = toys.toy(
        "toy_logits", data={"public": toys.PUBLIC}, topology=topology, measure=("units",)
    )
    with pytest.raises(IncompatibleMethod, match="measure units"):
        prepare(resolve(what), toys.blobs())
    prepare(resolve(what.with_values({"rounds": 1}, "test")), toys.blobs())


def test_it_is_said_where_a_picture_of_the_end_shows_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over tasks the analytic method trains in the first alone, and so sends no models in the last
    round.
    """
    what = toy("analytic", "units", stream={"kind": "classes", "tasks": 2})
    run(what, tmp_path / "run", data=small())
    assert "measure units" in caplog.text


def test_it_is_said_where_no_client_has_a_model_to_measure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """AFL's clients send sums of features, and have no model of their own."""
    run(toy("afl", "local", "personal"), tmp_path / "run", data=small())
    for name in ("local", "personal"):
        assert f"measure {name}: in the last round no client had a model to measure" in caplog.text
    caplog.clear()
    run(toy("fedavg", "local", "personal"), tmp_path / "other", data=small())
    assert "measure" not in caplog.text


def test_a_plane_is_of_the_body_whatever_the_head_is() -> None:
    """The head of fedetf's network is a simplex, without weights to tell the number of features
    by.
    """
    with pytest.raises(IncompatibleMethod, match=r"measure sphere: model etf\(.*\) has 8 features"):
        prepare(resolve(toys.toy("fedetf", model=toys.on_simplex(), measure=("sphere",))), small())


def test_a_model_that_lacks_an_entry_is_not_run_with_another_in_its_place() -> None:
    ready = prepare(resolve(toy("fedavg")), small())
    context = ready.evaluation_context(None, None)
    assert context is not None
    some = {k: v for k, v in ready.world.initial(0).items() if k != "head.bias"}
    says = r"mlp\(.*\) that lacks head\.bias"
    for act in (context.predictor, lambda p: context.accuracy_by_class(p, context.test)):
        with pytest.raises(FedstillError, match=says):
            act(some)
    with pytest.raises(FedstillError, match=says):
        context.passes().logits(some, context.test)
    with pytest.raises(FedstillError, match=r"body\.1\.weight"):
        context.passes().features({k: v for k, v in some.items() if "head" in k}, context.test)
    assert context.passes().features(some, context.test).shape == (40, 2), (
        "the head has no part in it"
    )
