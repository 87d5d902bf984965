"""Runs with a stream of tasks: a single task changes nothing, tasks divide the data, the accuracy
matrix, and resumes at every change of task.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, Interrupted
from fedstill.core.records import Examples, Reply, Stage, State, World
from fedstill.core.registry import method
from fedstill.methods.fedavg import FedAvg
from fedstill.metrics import tasks as over
from fedstill.models.predictors import Predictor, predictor
from fedstill.report.accuracy_matrix import run_matrices
from fedstill.running.journal import read_journal
from fedstill.running.numbers import RunNumbers
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import resume, run
from run_bits import StopAfter, assert_same_bits, bits, stopped

pytestmark = pytest.mark.usefixtures("with_threads")

IID = {"kind": "iid"}
TWO_TASKS = {"kind": "classes", "tasks": 2, "order": [[0, 1, 4], [2, 3]]}

FIELDS_OF_TASKS = {"stream", "task", "accuracy_seen", "measured_in"}
"""Fields of events that only runs with a stream have."""

NUMBERS_OF_TASKS = {
    "final_accuracy",
    "incremental_accuracy",
    "average_forgetting",
    "backward_transfer",
    "learned",
    "kept",
}
"""Numbers of the summary that only runs with a stream have."""


def ready(changes: dict[str, Any] | None = None, **stream: Any) -> Prepared:
    """A prepared run of six rounds with this stream."""
    values = {"rounds": 6, "partition": IID, **(changes or {})}
    return prepare(resolve(toys.toy(stream=stream, **values)), toys.blobs())


def values_of_client(prepared: Prepared, client: int, round: int) -> torch.Tensor:
    """The examples that a client trains on in a round."""
    return prepared.sites.view(client, Stage(round, 0, "train", (client,))).data.values.flatten(1)


def task_events(folder: Path) -> list[dict[str, Any]]:
    """The events of a journal at the ends of tasks."""
    events = read_journal(folder / "journal.jsonl")
    return [event for event in events if event["event"] == "task"]


def without_keys(table: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    """A table without some of its keys."""
    return {key: value for key, value in table.items() if key not in keys}


def without_tasks(bits_of_run: dict[str, Any]) -> dict[str, Any]:
    """The bits of a run without all that only runs with a stream have.

    Checkpoints and sites refer to the config, and so differ.
    """
    remaining = {}
    for path, content in bits_of_run.items():
        if path == "journal.jsonl":
            events = [event for event in content if event["event"] != "task"]
            remaining[path] = [without_keys(event, FIELDS_OF_TASKS) for event in events]
        elif path == "summary.json":
            remaining[path] = without_keys(content, NUMBERS_OF_TASKS)
        elif path == "config.toml" or path.startswith("sites/"):
            continue
        elif not (path.startswith("checkpoints/") and path.endswith(".json")):
            remaining[path] = content
    return remaining


@pytest.mark.parametrize("engine", ["serial", "pooled", "vectorised", "flower"])
@pytest.mark.parametrize(
    "stream",
    [
        {"kind": "classes", "head": "seen", "past": "kept"},
        {"kind": "domains", "transform": "permute", "compose": "clients_first", "head": "task"},
        {"kind": "drift", "path": "return", "join": 0.5, "lag": 2, "stay": 0.5},
    ],
    ids=lambda s: s["kind"],
)
def test_one_task_is_a_run_without_a_stream_to_the_bit(
    engine: str, stream: dict[str, Any], tmp_path: Path
) -> None:
    method = "fedntd"
    if engine == "serial":
        method = "fednova"
    plain = toys.toy(method, engine=engine, rounds=2, measure=("local",))
    run(plain, tmp_path / "none", toys.blobs())
    run(replace(plain, stream={**stream, "tasks": 1}), tmp_path / "one", toys.blobs())

    bits_of_one_task = bits(tmp_path / "one")
    assert "stream" in bits_of_one_task["journal.jsonl"][0]
    assert_same_bits(without_tasks(bits_of_one_task), without_tasks(bits(tmp_path / "none")))


@pytest.mark.parametrize("compose", ["tasks_first", "clients_first"])
@pytest.mark.parametrize(
    "kind", [{"kind": "classes"}, {"kind": "drift"}, {"kind": "domains", "transform": "permute"}]
)
def test_tasks_and_clients_divide_the_training_set(kind: dict[str, str], compose: str) -> None:
    """If clients are divided first, their parts are those of a run without tasks."""
    prepared = ready(**kind, tasks=3, compose=compose)
    tasks = prepared.sites.tasks
    assert tasks is not None
    pieces = []
    for part in prepared.sites.split.tensors():
        pieces += [part[tasks.of_task(part, task)] for task in range(3)]
    examples = len(prepared.sites.train)
    assert torch.cat(pieces).sort().values.tolist() == list(range(examples))

    if compose == "clients_first" and kind["kind"] != "drift":
        plain = prepare(resolve(toys.toy(rounds=6, partition=IID)), toys.blobs())
        plain_parts = plain.sites.split.tensors()
        for part, plain_part in zip(prepared.sites.split.tensors(), plain_parts, strict=True):
            assert torch.equal(part, plain_part)


@pytest.mark.parametrize(("round", "classes"), [(0, {0, 1, 4}), (3, {0, 1, 4}), (4, {2, 3})])
def test_a_client_trains_on_its_task_whose_labels_are_counted(
    round: int, classes: set[int]
) -> None:
    prepared = ready(**TWO_TASKS)
    view = prepared.sites.view(2, Stage(round, 0, "train", (2,)))
    assert set(view.data.labels.tolist()) == classes
    assert set(view.counts.nonzero().flatten().tolist()) == classes
    assert torch.equal(prepared.sites.label_counts(2, round), view.counts)


def test_examples_of_earlier_tasks_follow_those_of_the_task() -> None:
    without_past = ready(kind="classes", tasks=3, past="gone")
    first, second, third = (values_of_client(without_past, 1, r) for r in (1, 3, 5))
    with_past = ready(kind="classes", tasks=3, past="kept")
    assert torch.equal(values_of_client(with_past, 1, 2), first)
    assert torch.equal(values_of_client(with_past, 1, 5), torch.cat([third, first, second]))


def test_a_client_keeps_the_examples_of_its_earlier_tasks_only() -> None:
    prepared = ready(kind="classes", tasks=3, past="kept", stay=0.5)
    stream = prepared.world.stream
    tasks = prepared.sites.tasks
    assert tasks is not None
    tasks_of_clients = [[stream.task(round, client) for round in (1, 3, 5)] for client in range(6)]
    client_without_task_1 = tasks_of_clients.index([0, 0, 2])

    part = prepared.sites.positions(client_without_task_1)
    positions = torch.cat([part[tasks.of_task(part, 2)], part[tasks.of_task(part, 0)]])
    values = values_of_client(prepared, client_without_task_1, 5)
    assert torch.equal(values, prepared.sites.train.values[positions].flatten(1))
    counts = prepared.sites.label_counts(client_without_task_1, 5)
    assert int(counts.sum()) == len(positions)


def test_held_out_data_are_a_share_of_the_task() -> None:
    plan = {"epochs": 1, "validation": 0.25}
    prepared = ready({"plan": plan}, kind="classes", tasks=3)
    for round_index in (1, 3, 5):
        view = prepared.sites.view(0, Stage(round_index, 0, "train", (0,)))
        assert view.validation is not None
        assert len(view.validation) == max(1, round(0.25 * int(view.counts.sum())))
        classes_of_task = set(view.counts.nonzero().flatten().tolist())
        assert set(view.validation.labels.tolist()) <= classes_of_task


def test_drift_leads_from_one_split_to_another() -> None:
    """The first task has the classes of a run without a stream, and the middle one the mean of the
    first and the last, up to sampling.
    """
    data = toys.blobs(size=6000)
    skewed = {"kind": "dirichlet", "alpha": 0.3, "min_size": 4}
    drift = toys.toy(rounds=5, partition=skewed, stream={"kind": "drift", "tasks": 5})
    prepared = prepare(resolve(drift), data)
    plain = prepare(resolve(toys.toy(rounds=5, partition=skewed)), data)
    tasks = prepared.sites.tasks
    assert tasks is not None

    shares = [_class_shares(prepared, tasks.task_of == task) for task in range(5)]
    np.testing.assert_allclose(shares[0], _class_shares(plain, tasks.task_of == 0), atol=1e-12)
    mean_of_ends = (shares[0] + shares[4]) / 2
    assert np.abs(shares[2] - mean_of_ends).max() < 4 * np.sqrt(0.25 / 1200) + 0.02


def _class_shares(prepared: Prepared, is_in_task: torch.Tensor) -> np.ndarray:
    """The shares of a task's examples that clients have of classes (clients, C)."""
    counts = []
    for part in prepared.sites.split.tensors():
        labels = prepared.sites.train.labels[part[is_in_task[part]]]
        counts.append(np.bincount(labels.numpy(), minlength=5))
    return np.array(counts) / np.array(counts).sum()


def test_the_rows_of_the_matrix_are_mean_accuracies_over_the_classes_of_tasks(
    tmp_path: Path,
) -> None:
    experiment = toys.toy(rounds=4, partition=IID, stream=TWO_TASKS)
    result = run(experiment, tmp_path / "run", toys.blobs())
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    ends = task_events(tmp_path / "run")
    assert [end["task"] for end in ends] == [0, 1, 2]
    assert [end["round"] for end in ends] == [0, 2, 4]

    rounds = {event["round"]: event for event in events if event["event"] == "round"}
    assert [rounds[round_index]["task"] for round_index in (1, 2, 3, 4)] == [1, 1, 2, 2]
    class_accuracy = np.array(rounds[4]["class_accuracy"])
    first_task = class_accuracy[[0, 1, 4]].mean()
    second_task = class_accuracy[[2, 3]].mean()
    assert ends[2]["row"] == pytest.approx([first_task, second_task])
    assert rounds[4]["accuracy_seen"] == pytest.approx(rounds[4]["accuracy"])
    assert rounds[2]["accuracy_seen"] == pytest.approx(ends[1]["row"][0])
    assert ends[1]["row"][0] > rounds[2]["accuracy"], "later classes are not yet predicted"

    rows = [end["row"] for end in ends[1:]]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["average_forgetting"] == pytest.approx(over.average_forgetting(rows))
    assert summary["learned"] * summary["kept"] == pytest.approx(summary["final_accuracy"])
    assert result.summary["backward_transfer"] == -summary["average_forgetting"]
    assert len(ends[1]["clients"]) == 6
    assert events[0]["stream"]["first_rounds"] == [1, 3]


def test_a_round_passes_over_the_test_set_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pass is used for the accuracies and for the row of a task."""
    sizes: list[int] = []
    call = Predictor.__call__

    def counted(self: Predictor, x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return call(self, x)

    monkeypatch.setattr(Predictor, "__call__", counted)
    blobs = toys.blobs()
    experiment = toys.toy(rounds=4, partition=IID, stream=TWO_TASKS, measure=())
    run(experiment, tmp_path / "run", blobs)

    assert sizes.count(len(blobs.test)) == 1 + 4


def test_a_domain_has_a_test_set_of_its_own(tmp_path: Path) -> None:
    stream = {"kind": "domains", "tasks": 2, "transform": "invert"}
    plan = {"epochs": 4, "batch": 20, "lr": 0.2}
    experiment = toys.toy(rounds=2, partition=IID, stream=stream, plan=plan)
    run(experiment, tmp_path / "run", toys.blobs())

    _, first_task, _ = task_events(tmp_path / "run")
    assert np.shape(first_task["correct"]) == np.shape(first_task["totals"]) == (2, 5)
    plain, inverted = first_task["row"]
    assert plain > inverted + 0.3, "no client has trained on inverted images"


def with_hospitals(examples: Examples) -> Examples:
    """The examples, of which every third is from the second hospital."""
    owners = (torch.arange(len(examples)) % 3 == 0).long()
    return replace(examples, owners=owners)


def test_domains_of_a_column_have_their_own_training_and_test_examples(tmp_path: Path) -> None:
    plain = toys.blobs()
    data = replace(
        plain,
        train=with_hospitals(plain.train),
        test=with_hospitals(plain.test),
        about=replace(plain.about, owners=("athens", "berlin")),
    )
    stream = {"kind": "domains", "column": "hospital", "tasks": 2}
    experiment = toys.toy(rounds=2, partition=IID, stream=stream)
    prepared = prepare(resolve(experiment), data)
    for client in range(6):
        owners = prepared.sites.view(client, Stage(2, 0, "train", (client,))).data.owners
        assert owners is not None
        assert (owners == 1).all()

    run(experiment, tmp_path / "run", data)
    _, _, second_task = task_events(tmp_path / "run")
    assert [sum(row) for row in second_task["totals"]] == [66, 34]


STREAMS = {
    "fedavg": {"kind": "classes", "tasks": 3, "head": "seen"},
    "sfedkd": {"kind": "classes", "tasks": 3, "past": "kept", "join": 0.5},
    "cwc": {"kind": "classes", "tasks": 3, "head": "task"},
    "hiper_fedkd": {"kind": "domains", "transform": "rotate90", "tasks": 3, "stay": 0.4, "lag": 1},
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_run_stopped_after_every_stage_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    data = {}
    if name == "hiper_fedkd":
        data = {"public": 40}
    topology = {"clients": 4, "sampled": 2}
    experiment = toys.toy(name, partition=IID, topology=topology, data=data, stream=STREAMS[name])
    run(experiment, tmp_path / "whole", toys.blobs())
    folder = stopped(experiment, tmp_path / "run", 1)
    while True:
        try:
            resume(folder, toys.blobs(), watch=StopAfter(1))
            break
        except Interrupted:
            pass

    assert_same_bits(bits(folder), bits(tmp_path / "whole"))


def test_labels_are_counted_again_whenever_tasks_change(tmp_path: Path) -> None:
    experiment = toys.toy("sfedkd", partition=IID, stream={"kind": "classes", "tasks": 3})
    run(experiment, tmp_path / "run", toys.blobs())
    positions = set()
    for event in read_journal(tmp_path / "run" / "journal.jsonl"):
        if event["event"] == "client" and event["name"] == "census":
            positions.add((event["round"], event["stage"]))

    assert positions == {(0, 0), (2, 0), (3, 0)}


def test_engines_agree_under_a_mask(tmp_path: Path) -> None:
    stream = {"kind": "classes", "tasks": 3, "head": "task"}
    for engine in ("serial", "pooled", "vectorised", "flower"):
        experiment = toys.toy("fedntd", partition=IID, stream=stream, engine=engine)
        run(experiment, tmp_path / engine, toys.blobs())

    serial_model = bits(tmp_path / "serial")["model.safetensors"]
    assert bits(tmp_path / "pooled")["model.safetensors"] == serial_model
    assert bits(tmp_path / "flower")["model.safetensors"] == serial_model
    serial_rows = [event["row"] for event in task_events(tmp_path / "serial")]
    stacked_rows = [event["row"] for event in task_events(tmp_path / "vectorised")]
    np.testing.assert_allclose(stacked_rows, serial_rows, atol=0.03)


def test_the_head_changes_the_model(tmp_path: Path) -> None:
    stream = {"kind": "classes", "tasks": 2, "first": 4, "rounds": [1, 2]}
    models = set()
    for head in ("seen", "task", "all"):
        experiment = toys.toy(partition=IID, stream={**stream, "head": head})
        run(experiment, tmp_path / head, toys.blobs())
        models.add(bits(tmp_path / head)["model.safetensors"])

    assert len(models) == 3


HALVES = """
import numpy as np
from fedstill.core.stream import Cut

def halves(labels, tasks, classes, late: int = 2):
    '''The second half comes later.'''
    everything = tuple(range(classes))
    task = (np.arange(len(labels)) >= len(labels) // late).astype(int)
    return Cut(task, (everything,) * tasks)
"""


def test_a_users_stream_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HALVES)
    stream = {"kind": f"{tmp_path / 'mine.py'}:halves", "tasks": 2}
    prepared = prepare(resolve(toys.toy(rounds=4, partition=IID, stream=stream)), toys.blobs())
    assert prepared.sites.tasks is not None
    assert prepared.sites.tasks.task_of is not None
    task_of_examples = prepared.sites.tasks.task_of.tolist()
    assert task_of_examples == [0] * 150 + [1] * 150

    three_tasks = toys.toy(rounds=3, partition=IID, stream={**stream, "tasks": 3})
    with pytest.raises(ConfigError, match="task 3"):
        prepare(resolve(three_tasks), toys.blobs())


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("local_only", []),
        ("fedavg_once", [0, 1, 2, 3]),
        ("ensemble", [1, 2, 3]),
        ("pfnm", [0, 1, 2, 3]),
    ],
)
def test_peers_have_one_exchange_in_a_task(name: str, tasks: list[int], tmp_path: Path) -> None:
    """While the server has no model, a task has no row."""
    experiment = toys.toy(
        name, partition=IID, topology={"clients": 4}, stream={"kind": "classes", "tasks": 3}
    )
    run(experiment, tmp_path / "run", toys.blobs())
    assert [event["task"] for event in task_events(tmp_path / "run")] == tasks
    if tasks:
        assert len(run_matrices(tmp_path)[0].percent) == 3

    with pytest.raises(ConfigError, match="rounds = 3"):
        resolve(replace(experiment, rounds=6))


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ({"kind": "classes"}, r"rounds = 6 .*stream.tasks = 5"),
        (
            {"kind": "classes", "tasks": 2, "rounds": [1, 2]},
            r"stream.rounds has 3 rounds .* rounds = 6",
        ),
        (
            {"kind": "classes", "tasks": 3, "rounds": [3, 3]},
            r"rounds of 2 tasks, .*stream.tasks = 3",
        ),
        ({"kind": "clases"}, r"did you mean 'classes'"),
        ({"kind": "classes", "taks": 3}, r"unknown key 'stream.taks'; did you mean 'stream.tasks'"),
        ({"kind": "classes", "tasks": 3, "path": "line"}, r"unknown key 'stream.path'"),
        ({"tasks": 3}, r"stream.tasks has no effect without tasks; set stream.kind"),
        ({"kind": "classes", "tasks": 6}, r"5 classes"),
        (
            {"kind": "classes", "tasks": 2, "order": [[0, 1], [2, 3]]},
            r"each class from 0 to 4",
        ),
        ({"kind": "domains", "tasks": 6, "transform": "rotate90"}, r"4 tasks"),
        ({"kind": "domains", "tasks": 2, "column": "site"}, r"no such column"),
        ({"kind": "classes", "tasks": 2, "join": 0.0}, r"stream.join = 0"),
        ({"kind": "classes", "tasks": 2, "head": "none"}, r"stream.head"),
    ],
)
def test_a_faulty_stream_is_an_error_of_one_line(stream: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        ready(**stream)
    assert "\n" not in str(error.value)


def test_the_error_for_a_task_that_cannot_be_partitioned_advises_a_key() -> None:
    skewed = {"kind": "dirichlet", "alpha": 0.05, "min_size": 20}
    with pytest.raises(ConfigError, match=r"task 1: .*stream.compose = 'clients_first'"):
        ready({"rounds": 5, "partition": skewed}, kind="classes", tasks=5)


@method("toy_one_by_one")
@dataclass(frozen=True)
class OneByOne(FedAvg):
    """The model of a client is that of its last round; it is tested when all clients have one."""

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        models = {f"model.{reply.client}": reply.content.params for reply in replies}
        return super().aggregate(state, replies, stage, world).next(groups=models)

    def predictors(self, state: State, world: World) -> dict[str, Any]:
        predictors = {}
        for client in range(world.clients):
            params = state.extra.get(f"model.{client}")
            if params is not None:
                predictors[f"client {client}"] = predictor(world.model(client), params)
        return predictors


def test_a_task_without_a_tested_model_leaves_its_row_empty(tmp_path: Path) -> None:
    stream = {"kind": "classes", "tasks": 3}
    topology = {"clients": 6, "sampled": 5}
    experiment = toys.toy("toy_one_by_one", stream=stream, partition=IID, topology=topology)
    result = run(experiment, tmp_path / "run", toys.blobs())

    ends = [event for event in task_events(tmp_path / "run") if event["task"] > 0]
    assert [end["task"] for end in ends] == [2, 3]
    rows = RunNumbers.of(read_journal(tmp_path / "run" / "journal.jsonl")).task_rows
    assert np.isnan(rows[0]).all()
    recorded_rows = np.array([end["row"] for end in ends], float)
    np.testing.assert_array_equal(rows[1:], recorded_rows)
    assert result.summary["final_accuracy"] == pytest.approx(over.final_accuracy(rows))
    (matrix,) = run_matrices(tmp_path / "run")
    assert len(matrix.percent) == 3
    assert np.isnan(matrix.percent[0]).all()
