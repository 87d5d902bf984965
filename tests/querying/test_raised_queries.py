"""Queries that clients raise in a run: from held-out data alone, with the same bits on each engine,
and again in later rounds.
"""

from __future__ import annotations

from collections.abc import Callable
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
from fedstill.core.records import Examples, Payload, Reply, Stage, State, Tensors
from fedstill.engines.passes import ModelPasses
from fedstill.querying.hooks import ASKS, QueriesAtClient, QueriesAtServer, query_raised
from fedstill.querying.queries import QueryRule
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.journal import without_times
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run
from flowers import needs_flower, over_flower
from journals import journal_events

pytestmark = pytest.mark.usefixtures("with_threads")

PLAN = {"epochs": 3, "batch": 10, "lr": 0.05}


def by_accuracy(method: object = "qkt", **changes: Any) -> Experiment:
    """One round in which clients query the classes with an accuracy below 0.9."""
    query = {"draw": "all", "by": "accuracy", "accuracy_under": 0.9, **changes.pop("query", {})}
    values = {"rounds": 1, "plan": PLAN, "topology": {"clients": 6}, **changes}
    return toys.toy(method, query=query, **values)


EXPERIMENTS = {"once": by_accuracy(), "again": toys.asking_again()}


@pytest.fixture(scope="module")
def serial_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directories of the runs of ``EXPERIMENTS`` with the serial engine."""
    folders = {}
    for name, experiment in EXPERIMENTS.items():
        folders[name] = tmp_path_factory.mktemp("serial") / name
        run(replace(experiment, engine="serial"), folders[name], toys.blobs())
    return folders


def ready(experiment: Experiment) -> Prepared:
    """A prepared run on blobs."""
    return prepare(resolve(experiment.with_values({"data.name": "blobs"}, "test")), toys.blobs())


def events(folder: Path, **values: Any) -> list[dict[str, Any]]:
    """The events of a run that have these values, without their times."""
    return [without_times(event) for event in journal_events(folder, **values)]


def queries_raised(folder: Path) -> dict[int, list[int]]:
    """The query of each client of a run with one round."""
    return {event["client"]: event["query"] for event in events(folder, name="fit")}


def state_of(folder: Path) -> State:
    """The server's state at the end of a run."""
    config_digest = digest((folder / "config.toml").read_bytes())
    restored = Checkpoints(folder / "checkpoints", config_digest, None).latest()
    assert restored is not None
    return restored.state


def measured_accuracies(prepared: Prepared, client: int, params: Tensors) -> dict[str, Any]:
    """By class, the accuracy of a client's model on its held-out examples, and their number."""
    view = prepared.sites.view(client, Stage(1, 0, "fit", (client,)))
    held_out = view.validation
    assert isinstance(held_out, Examples)
    logits = ModelPasses(view.model, prepared.sites.inputs).logits(params, held_out)
    is_correct = logits.argmax(1) == held_out.labels

    accuracies = {}
    for c in range(toys.CLASSES):
        of_class = is_correct[held_out.labels == c].tolist()
        if of_class:
            accuracy = round(sum(of_class) / len(of_class), 4)
            accuracies[str(c)] = {"accuracy": accuracy, "held_out": len(of_class)}
    return accuracies


def test_a_client_queries_the_classes_that_its_model_gets_wrong_on_held_out_examples(
    serial_runs: dict[str, Path],
) -> None:
    """Of these classes, it queries those that another client has."""
    prepared = ready(by_accuracy())
    models = state_of(serial_runs["once"]).extra.many("model")
    label_counts = torch.stack([prepared.sites.label_counts(client) for client in range(6)])

    fits = events(serial_runs["once"], name="fit")
    assert [event["client"] for event in fits] == list(range(6))
    assert any(event["query"] for event in fits)
    for event in fits:
        client = event["client"]
        accuracies = measured_accuracies(prepared, client, models[client])
        low = {c: measured for c, measured in accuracies.items() if measured["accuracy"] < 0.9}
        assert event["why_asked"] == low

        peer_counts = label_counts.sum(0) - label_counts[client]
        assert event["query"] == [c for c in sorted(map(int, low)) if peer_counts[c] > 0]


def without_reasons(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers without the reasons for their queries."""
    return [{key: answer[key] for key in answer if key != "why_asked"} for answer in answers]


def test_a_raised_query_is_learned_and_measured_like_the_same_query_in_a_config(
    serial_runs: dict[str, Path], tmp_path: Path
) -> None:
    raised = serial_runs["once"]
    queries = {str(client): query for client, query in queries_raised(raised).items() if query}
    written = replace(by_accuracy(), query={"classes": queries, "fewer_than": 1000})
    run(written, tmp_path / "written", toys.blobs())

    students = state_of(raised).extra.many("student")
    for client, expected in state_of(tmp_path / "written").extra.many("student").items():
        for name, tensor in expected.items():
            assert torch.equal(students[client][name], tensor)

    answers = events(raised)[-1]["answers"]
    assert without_reasons(answers) == events(tmp_path / "written")[-1]["answers"]
    for answer in answers:
        assert set(answer["why_asked"]) == {str(c) for c in answer["query"]}


def test_the_test_set_has_no_part_in_a_query(serial_runs: dict[str, Path], tmp_path: Path) -> None:
    data = toys.blobs()
    wrong_labels = (data.test.labels + 1) % toys.CLASSES
    run(
        by_accuracy(),
        tmp_path / "wrong",
        replace(data, test=replace(data.test, labels=wrong_labels)),
    )

    with_wrong_labels = events(tmp_path / "wrong", name="fit")
    expected = events(serial_runs["once"], name="fit")
    assert len(with_wrong_labels) == len(expected)
    for event, expected_event in zip(with_wrong_labels, expected, strict=True):
        for key in ("client", "query", "why_asked"):
            assert event[key] == expected_event[key]


@pytest.mark.parametrize(
    "on_engine",
    [
        pytest.param(lambda experiment: replace(experiment, engine="pooled"), id="pooled"),
        pytest.param(over_flower, id="flower", marks=needs_flower),
    ],
)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_other_engines_give_the_serial_engines_bits(
    name: str,
    on_engine: Callable[[Experiment], Experiment],
    serial_runs: dict[str, Path],
    tmp_path: Path,
) -> None:
    run(on_engine(EXPERIMENTS[name]), tmp_path / "run", toys.blobs())

    assert events(tmp_path / "run") == events(serial_runs[name])
    extra = state_of(tmp_path / "run").extra
    expected = state_of(serial_runs[name]).extra
    assert list(extra) == list(expected)
    assert extra.nbytes == expected.nbytes
    for group in ("model", "student"):
        params_by_client = extra.many(group)
        for client, expected_params in expected.many(group).items():
            for key, tensor in expected_params.items():
                assert torch.equal(params_by_client[client][key], tensor)


def queries_by_client(answers: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The query of each answer, by the client that raised it."""
    return {answer["client"]: answer["query"] for answer in answers}


def test_a_client_raises_another_query_when_it_has_more_data(
    serial_runs: dict[str, Path],
) -> None:
    fits = events(serial_runs["again"], name="fit")
    examples = {(event["round"], event["client"]): event["examples"] for event in fits}
    for client in range(6):
        assert examples[2, client] > examples[1, client]

    first_round, second_round = events(serial_runs["again"], event="round")
    for round_event in (first_round, second_round):
        of_round = [event for event in fits if event["round"] == round_event["round"]]
        raised = {event["client"]: event["query"] for event in of_round if event["query"]}
        assert queries_by_client(round_event["answers"]) == raised
        gains = [answer["gain"] for answer in round_event["answers"]]
        assert None not in gains, "every round measures the gains"
    assert queries_by_client(first_round["answers"]) != queries_by_client(second_round["answers"])


def test_in_a_later_round_a_client_lacks_classes_by_its_label_counts_of_that_round(
    serial_runs: dict[str, Path],
) -> None:
    sites = ready(toys.asking_again()).sites
    last_round = events(serial_runs["again"], event="round")[-1]
    for answer in last_round["answers"]:
        label_counts = sites.label_counts(answer["client"], 2)
        few_examples = {str(c) for c in answer["query"] if label_counts[c] < 3}
        reasons = answer["why_asked"]
        assert {c for c in reasons if "lack" in reasons[c]} == few_examples


def filled(params: Tensors, value: float) -> dict[str, torch.Tensor]:
    """Parameters of these shapes that all have one value."""
    return {name: torch.full_like(tensor, value) for name, tensor in params.items()}


def test_a_client_trains_on_from_its_last_model() -> None:
    """That is its student after a query, its local model after a round without one, and the initial
    model if it has never trained.
    """
    prepared = ready(toys.asking_again())
    method = prepared.settings.method
    world = prepared.world
    ones = filled(world.initial(0), 1.0)
    twos = filled(world.initial(0), 2.0)
    extra = {"model.0": ones, "student.0": twos, "model.1": ones, "size.0": 3, "size.1": 3}
    state = State({}, Payload(extra))
    fit = Stage(2, 0, "fit", (0, 1, 2))

    for client, expected in enumerate([twos, ones, world.initial(2)]):
        payload = method.payload_for_client(state, client, fit, world)
        assert payload is not None
        assert all(torch.equal(payload.params[name], expected[name]) for name in expected)

    next_state = method.aggregate(state, [Reply(0, Payload(params=ones), 5)], fit, world)
    assert "student.0" not in next_state.extra, "the student of the previous query"


def test_a_method_of_many_rounds_asks_after_its_stage_fit(
    serial_runs: dict[str, Path], tmp_path: Path
) -> None:
    experiment = by_accuracy(
        "fedavg",
        rounds=2,
        topology={"clients": 6, "first": "fit"},
        plan={"fit": PLAN, **PLAN},
    )
    run(experiment, tmp_path / "fedavg", toys.blobs())

    queries = queries_raised(tmp_path / "fedavg")
    assert queries == queries_raised(serial_runs["once"]), "methods share the queries"
    answered = [query for query in queries.values() if query]
    rounds = events(tmp_path / "fedavg", event="round")
    assert len(rounds) == 2
    for event in rounds:
        assert [answer["query"] for answer in event["answers"]] == answered
    assert not any("query" in event for event in events(tmp_path / "fedavg", name="train"))


def test_a_run_in_which_no_client_has_a_reason_to_ask_goes_on(tmp_path: Path) -> None:
    query = {"draw": "all", "by": "lack", "fewer_than": 1, "again": "mixed"}
    run(toys.asking_again(query=query, partition="iid"), tmp_path / "run", toys.blobs())

    assert "answers" not in events(tmp_path / "run")[-1]
    assert all(event["idle"] for event in events(tmp_path / "run", name="transfer"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"plan": {**PLAN, "validation": 0.0}},
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
def test_a_run_in_which_a_query_cannot_be_raised_is_refused_before_round_1(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    experiment = by_accuracy(**changes)
    with pytest.raises(error, match=message) as caught:
        ready(experiment)
    assert "\n" not in str(caught.value)


def test_the_server_expects_raised_queries_in_the_stage_fit_and_reads_any_numbers() -> None:
    prepared = ready(by_accuracy())
    world = prepared.world
    rule = world.get(QueryRule)
    server = QueriesAtServer(rule)
    fit = Stage(1, 0, "fit", (0,))
    transfer = Stage(1, 1, "transfer", (0,))

    reply = prepared.settings.method.expected_reply(0, fit, world)
    assert set(server.extend_expected(reply, 0, fit, world)) == {"params", ASKS}
    assert set(server.extend_expected(reply, 0, transfer, world)) == {"params"}

    negative_numbers = torch.full((toys.CLASSES,), -3, dtype=torch.int8)
    query = query_raised(rule, 0, Payload({ASKS: negative_numbers}), fit)
    assert query
    assert set(query) <= set(range(toys.CLASSES))


def test_a_client_reads_the_query_that_it_is_to_answer_and_refuses_another_shape() -> None:
    prepared = ready(by_accuracy())
    client = QueriesAtClient(prepared.world.get(QueryRule))
    transfer = Stage(1, 1, "transfer", (0,))
    view = prepared.sites.view(0, transfer)
    query = torch.tensor([0, 1, 0, 0, 1], dtype=torch.int8)

    assert client.extend_view(view, Payload(query=query), transfer).query == (1, 4)
    assert client.extend_view(view, Payload(), transfer) is view
    with pytest.raises(BadPayload, match=r"a query of shape \(2,\) for 5 classes"):
        client.extend_view(view, Payload(query=query[:2]), transfer)
