"""Queries that clients raise in a run: from held-out data alone, on each engine with the same bits,
and again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import BadPayload, ConfigError, IncompatibleMethod
from fedstill.core.files import digest
from fedstill.core.records import Payload, Reply, Stage, State
from fedstill.engines.passes import ModelPasses
from fedstill.querying.hooks import ASKS, QueriesAtClient, QueriesAtServer, query_raised
from fedstill.querying.queries import QueryRule
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.journal import read_journal, without_times
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run
from flowers import needs_flower, over_flower

pytestmark = pytest.mark.usefixtures("with_threads")

ONCE: dict[str, Any] = {"rounds": 1, "plan": {"epochs": 3, "batch": 10, "lr": 0.05}}


def by_accuracy(method: object = "qkt", under: float = 0.9, **changes: Any) -> Experiment:
    query = {"draw": "all", "by": "accuracy", "accuracy_under": under, **changes.pop("query", {})}
    return toys.toy(method, **{**ONCE, "topology": {"clients": 6}, "query": query, **changes})


def ready(experiment: Experiment) -> Prepared:
    return prepare(resolve(experiment.with_values({"data.name": "blobs"}, "test")), toys.blobs())


def events(folder: Path, name: str = "") -> list[dict[str, Any]]:
    every = [without_times(e) for e in read_journal(folder / "journal.jsonl")]
    return [e for e in every if not name or e.get("name") == name]


def state_of(folder: Path) -> State:
    restored = Checkpoints(
        folder / "checkpoints", digest((folder / "config.toml").read_bytes()), None
    ).latest()
    assert restored is not None
    return restored.state


def test_a_client_asks_for_the_classes_that_its_model_gets_wrong_on_what_it_holds_out(
    tmp_path: Path,
) -> None:
    run(by_accuracy(), tmp_path / "run", toys.blobs())
    prepared, models = ready(by_accuracy()), state_of(tmp_path / "run").extra.many("model")
    asked = {e["client"]: e["query"] for e in events(tmp_path / "run", "fit")}
    whys = {e["client"]: e["why_asked"] for e in events(tmp_path / "run", "fit")}
    assert any(asked.values())
    for client, classes in asked.items():
        view = prepared.sites.view(client, Stage(1, 0, "fit", (client,)))
        held = view.validation
        assert held is not None
        answer = (
            ModelPasses(view.model, prepared.sites.inputs).logits(models[client], held).argmax(1)
        )
        for c in range(toys.CLASSES):
            own = [int(a) == c for a, y in zip(answer, held.labels, strict=True) if int(y) == c]
            wanted = bool(own) and sum(own) / len(own) < 0.9
            assert (str(c) in whys[client]) == wanted
            if wanted:
                assert whys[client][str(c)] == {
                    "accuracy": round(sum(own) / len(own), 4),
                    "held_out": len(own),
                }
        others = prepared.sites.label_counts(client) * 0 + sum(
            prepared.sites.label_counts(o) for o in asked if o != client
        )
        assert classes == [c for c in map(int, whys[client]) if others[c] > 0]


def test_a_raised_query_is_learned_and_measured_as_if_it_had_been_written(tmp_path: Path) -> None:
    run(by_accuracy(), tmp_path / "raised", toys.blobs())
    told = {str(e["client"]): e["query"] for e in events(tmp_path / "raised", "fit") if e["query"]}
    written = replace(by_accuracy(), query={"classes": told, "fewer_than": 1000})
    run(written, tmp_path / "written", toys.blobs())
    one, other = (state_of(tmp_path / name).extra for name in ("raised", "written"))
    for client, params in other.many("student").items():
        assert all(torch.equal(one.many("student")[client][k], v) for k, v in params.items())
    ours, theirs = (events(tmp_path / name)[-1]["answers"] for name in ("raised", "written"))
    assert [{k: v for k, v in a.items() if k != "why_asked"} for a in ours] == theirs
    assert all(set(a["why_asked"]) == {str(c) for c in a["query"]} for a in ours)


def test_the_test_set_has_no_part_in_a_query(tmp_path: Path) -> None:
    data = toys.blobs()
    other = replace(data, test=replace(data.test, labels=(data.test.labels + 1) % toys.CLASSES))
    run(by_accuracy(), tmp_path / "one", data)
    run(by_accuracy(), tmp_path / "other", other)
    one, two = (
        [(e["client"], e["query"], e["why_asked"]) for e in events(tmp_path / name, "fit")]
        for name in ("one", "other")
    )
    assert one == two


@pytest.mark.parametrize("experiment", [by_accuracy(), toys.asking_again()], ids=["once", "again"])
def test_the_pooled_engine_and_flower_give_the_serial_engines_bits(
    experiment: Experiment, tmp_path: Path
) -> None:
    run(replace(experiment, engine="serial"), tmp_path / "serial", toys.blobs())
    run(replace(experiment, engine="pooled"), tmp_path / "pooled", toys.blobs())
    assert events(tmp_path / "serial") == events(tmp_path / "pooled")
    assert same(state_of(tmp_path / "serial"), state_of(tmp_path / "pooled"))


@needs_flower
@pytest.mark.parametrize("experiment", [by_accuracy(), toys.asking_again()], ids=["once", "again"])
def test_clients_on_flower_raise_the_same_queries(experiment: Experiment, tmp_path: Path) -> None:
    run(replace(experiment, engine="serial"), tmp_path / "serial", toys.blobs())
    run(over_flower(experiment), tmp_path / "flower", toys.blobs())
    assert events(tmp_path / "serial") == events(tmp_path / "flower")
    assert same(state_of(tmp_path / "serial"), state_of(tmp_path / "flower"))


def same(a: State, b: State) -> bool:
    return (
        list(a.extra) == list(b.extra)
        and Payload(a.extra).nbytes == b.extra.nbytes
        and all(
            torch.equal(a.extra.many(name)[c][k], v)
            for name in ("model", "student")
            for c, params in b.extra.many(name).items()
            for k, v in params.items()
        )
    )


def test_a_client_asks_again_with_more_data_and_goes_on_from_its_model(tmp_path: Path) -> None:
    run(toys.asking_again(), tmp_path / "run", toys.blobs())
    fits = events(tmp_path / "run", "fit")
    examples = {(e["round"], e["client"]): e["examples"] for e in fits}
    assert all(examples[2, c] > examples[1, c] for c in range(6))
    rounds = [e for e in events(tmp_path / "run") if e["event"] == "round"]
    for number, event in enumerate(rounds, 1):
        asked = {e["client"]: e["query"] for e in fits if e["round"] == number and e["query"]}
        assert {a["client"]: a["query"] for a in event["answers"]} == asked
        assert all(a["gain"] is not None for a in event["answers"]), "measured in every round"
    prepared = ready(toys.asking_again())
    first = {a["client"]: a for a in rounds[0]["answers"]}
    for answer in rounds[1]["answers"]:
        own = prepared.sites.label_counts(answer["client"], 2)
        lacks = {c for c, why in answer["why_asked"].items() if "lack" in why}
        assert lacks == {str(c) for c in answer["query"] if own[c] < 3}
    assert {a["client"]: a["query"] for a in rounds[1]["answers"]} != {
        c: a["query"] for c, a in first.items()
    }


def test_a_client_that_does_not_ask_again_goes_on_from_what_it_trained_alone(
    tmp_path: Path,
) -> None:
    prepared = ready(toys.asking_again())
    method, world = prepared.settings.method, prepared.world
    ones, twos = (
        {k: torch.full_like(v, n) for k, v in world.initial(0).items()} for n in (1.0, 2.0)
    )
    state = State(
        {}, Payload({"model.0": ones, "student.0": twos, "model.1": ones, "size.0": 3, "size.1": 3})
    )
    fit = Stage(2, 0, "fit", (0, 1, 2))
    sent = [method.payload_for_client(state, c, fit, world) for c in (0, 1, 2)]
    assert [next(iter(s.params.values())).flatten()[0].item() for s in sent[:2] if s] == [2.0, 1.0]
    assert sent[2] is not None
    assert all(torch.equal(sent[2].params[k], v) for k, v in world.initial(2).items())
    folded = method.aggregate(state, [Reply(0, Payload(params=ones), 5)], fit, world)
    assert "student.0" not in folded.extra, "the answer to the query before"


def test_a_method_of_many_rounds_asks_after_its_stage_fit(tmp_path: Path) -> None:
    fed = by_accuracy(
        "fedavg",
        rounds=2,
        topology={"clients": 6, "first": "fit"},
        plan={"fit": ONCE["plan"], **ONCE["plan"]},
    )
    run(fed, tmp_path / "fedavg", toys.blobs())
    run(by_accuracy(), tmp_path / "qkt", toys.blobs())
    one, other = (
        {e["client"]: e["query"] for e in events(tmp_path / name, "fit")}
        for name in ("fedavg", "qkt")
    )
    assert one == other, "methods are compared on the same queries"
    answers = [e["answers"] for e in events(tmp_path / "fedavg") if e["event"] == "round"]
    assert [[a["query"] for a in each] for each in answers] == 2 * [[q for q in one.values() if q]]
    assert not any("query" in e for e in events(tmp_path / "fedavg", "train"))


def test_nobody_may_have_reason_to_ask(tmp_path: Path) -> None:
    query = {"draw": "all", "by": "lack", "fewer_than": 1, "again": "mixed"}
    run(toys.asking_again(query=query, partition="iid"), tmp_path / "run", toys.blobs())
    last = events(tmp_path / "run")[-1]
    assert "answers" not in last
    assert all(e["idle"] for e in events(tmp_path / "run", "transfer"))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"plan": {**ONCE["plan"], "validation": 0.0}},
            ConfigError,
            "plan.fit.keep = 'best' scores each epoch on held-out data, .*: set "
            "plan.fit.validation, for example to 0.1",
        ),
        (
            {"method": "fedavg", "rounds": 2},
            IncompatibleMethod,
            "topology.first = 'fit'",
        ),
        ({"method": "toy_peers"}, IncompatibleMethod, "its work must be fedstill.methods.fit.Fit"),
        (
            {
                "partition": {"kind": "dirichlet", "alpha": 1.0, "min_size": 1},
                "data": {"train_size": 10},
            },
            ConfigError,
            r"client \d has a single example",
        ),
        (
            {"method": "clue"},
            IncompatibleMethod,
            "answers queries for one class; set query.draw = 'single'",
        ),
        (
            {"rounds": 2, "query": {"again": "mixed"}},
            ConfigError,
            r"stage 'refine' .*plan.refine.validation = 0.1",
        ),
        (
            {"rounds": 2},
            ConfigError,
            "set rounds = 1, or query.again = 'mixed'",
        ),
        (
            {"rounds": 2, "query": {"again": "mixed"}, "method": "pfnm"},
            ConfigError,
            "pfnm counts labels once",
        ),
        (
            {"rounds": 2, "query": {"again": "mixed"}, "method": "fedavg"},
            ConfigError,
            "query.again",
        ),
        (
            {"query": {"by": "need", "accuracy_under": None, "needs": {"9": [1]}}},
            ConfigError,
            "there is no client 9",
        ),
        (
            {"query": {"by": "need", "accuracy_under": None, "needs": {"0": [7]}}},
            ConfigError,
            "there is no class 7",
        ),
    ],
)
def test_what_cannot_raise_a_query_is_refused_before_round_1(
    changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        ready(by_accuracy(changes.pop("method", "qkt"), **changes))
    assert "\n" not in str(caught.value)


def test_what_a_client_says_is_checked_and_what_it_is_sent_too() -> None:
    prepared = ready(by_accuracy())
    world, fit, later = prepared.world, Stage(1, 0, "fit", (0,)), Stage(1, 1, "transfer", (0,))
    asking = world.get(QueryRule)
    server, client = QueriesAtServer(asking), QueriesAtClient(asking)
    expected = prepared.settings.method.expected_reply(0, fit, world)
    assert set(server.extend_expected(expected, 0, fit, world)) == {"params", ASKS}
    assert set(server.extend_expected(expected, 0, later, world)) == {"params"}
    content = Payload({ASKS: torch.full((toys.CLASSES,), -3, dtype=torch.int8)})
    asked = query_raised(asking, 0, content, fit)
    assert asked
    assert set(asked) <= set(range(toys.CLASSES)), "whatever the numbers, they are classes"
    view = prepared.sites.view(0, later)
    query = torch.tensor([0, 1, 0, 0, 1], dtype=torch.int8)
    assert client.extend_view(view, Payload(query=query), later).query == (1, 4)
    assert client.extend_view(view, Payload(), later) is view
    with pytest.raises(BadPayload, match=r"a query of shape \(2,\) for 5 classes"):
        client.extend_view(view, Payload(query=query[:2]), later)
