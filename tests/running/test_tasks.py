"""Runs with a stream: one task is a run without; tasks cut the data; the matrix; resume at every
change.
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
from fedstill.core.records import Reply, Stage, State, World
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

NEW = ("stream", "task", "accuracy_seen", "measured_in")
IID = {"kind": "iid"}


def ready(**stream: Any) -> Prepared:
    changes = {"rounds": 6, "partition": IID} | stream.pop("also", {})
    return prepare(resolve(toys.toy(stream=stream, **changes)), toys.blobs())


def seen_by(prepared: Prepared, client: int, round: int) -> torch.Tensor:
    return prepared.sites.view(client, Stage(round, 0, "train", (client,))).data.values.flatten(1)


def without_tasks(whole: dict[str, Any]) -> dict[str, Any]:
    """The bits of a run without what only runs with a stream have."""
    out = {k: v for k, v in whole.items() if k != "config.toml"}
    out["journal.jsonl"] = [
        {k: v for k, v in event.items() if k not in NEW}
        for event in out["journal.jsonl"]
        if event["event"] != "task"
    ]
    numbers = (
        "final_accuracy",
        "incremental_accuracy",
        "average_forgetting",
        "backward_transfer",
        "learned",
        "kept",
    )
    out["summary.json"] = {k: v for k, v in out["summary.json"].items() if k not in numbers}
    manifests = [k for k in out if k.startswith("checkpoints/") and k.endswith(".json")]
    return {k: v for k, v in out.items() if k not in manifests and not k.startswith("sites/")}


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
    method = {"name": "fedntd"} if engine != "serial" else {"name": "fednova"}
    what = {"method": method, "engine": engine, "rounds": 2, "measure": ("local",)}
    run(toys.toy(**what), tmp_path / "none", toys.blobs())
    run(toys.toy(**what, stream={**stream, "tasks": 1}), tmp_path / "one", toys.blobs())
    got, want = bits(tmp_path / "one"), bits(tmp_path / "none")
    starts = got["journal.jsonl"][0], want["journal.jsonl"][0]
    assert "stream" in starts[0]
    assert_same_bits(without_tasks(got), without_tasks(want))


@pytest.mark.parametrize("compose", ["tasks_first", "clients_first"])
@pytest.mark.parametrize(
    "kind", [{"kind": "classes"}, {"kind": "drift"}, {"kind": "domains", "transform": "permute"}]
)
def test_tasks_and_clients_cut_the_training_set(kind: dict[str, str], compose: str) -> None:
    prepared = ready(**kind, tasks=3, compose=compose)
    tasks, train = prepared.sites.tasks, prepared.sites.train
    assert tasks is not None
    pieces = [p[tasks.of_task(p, t)] for p in prepared.sites.split.tensors() for t in range(3)]
    assert torch.cat(pieces).sort().values.tolist() == list(range(len(train)))
    if compose == "clients_first" and kind["kind"] != "drift":
        plain = prepare(resolve(toys.toy(rounds=6, partition=IID)), toys.blobs())
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                prepared.sites.split.tensors(), plain.sites.split.tensors(), strict=True
            )
        )


def test_a_client_sees_its_task_and_its_labels_are_counted_there() -> None:
    prepared = ready(kind="classes", tasks=2, order=[[0, 1, 4], [2, 3]])
    for round, classes in ((0, {0, 1, 4}), (3, {0, 1, 4}), (4, {2, 3})):
        view = prepared.sites.view(2, Stage(round, 0, "train", (2,)))
        assert set(view.data.labels.tolist()) == classes
        assert set(view.counts.nonzero().flatten().tolist()) == classes
        assert torch.equal(prepared.sites.label_counts(2, round), view.counts)


def test_the_past_is_kept_behind_the_present() -> None:
    gone, kept = (ready(kind="classes", tasks=3, past=past) for past in ("gone", "kept"))
    now = [seen_by(gone, 1, r) for r in (1, 3, 5)]
    assert torch.equal(seen_by(kept, 1, 5), torch.cat([now[2], now[0], now[1]]))
    assert torch.equal(seen_by(kept, 1, 2), now[0])


def test_of_the_past_a_client_has_only_the_tasks_that_it_was_in() -> None:
    prepared = ready(kind="classes", tasks=3, past="kept", stay=0.5)
    stream, tasks = prepared.world.stream, prepared.sites.tasks
    assert tasks is not None
    client = next(c for c in range(6) if [stream.task(r, c) for r in (1, 3, 5)] == [0, 0, 2])
    part = prepared.sites.positions(client)
    own = torch.cat([part[tasks.of_task(part, task)] for task in (2, 0)])
    assert torch.equal(seen_by(prepared, client, 5), prepared.sites.train.values[own].flatten(1))
    assert int(prepared.sites.label_counts(client, 5).sum()) == len(own)


def test_held_out_data_are_a_share_of_the_task() -> None:
    prepared = ready(kind="classes", tasks=3, also={"plan": {"epochs": 1, "validation": 0.25}})
    for round in (1, 3, 5):
        view = prepared.sites.view(0, Stage(round, 0, "train", (0,)))
        assert view.validation is not None
        assert len(view.validation) == round_half(0.25 * int(view.counts.sum()))
        assert set(view.validation.labels.tolist()) <= set(view.counts.nonzero().flatten().tolist())


def round_half(value: float) -> int:
    return max(1, round(value))


def test_drift_goes_from_one_split_to_another() -> None:
    labels = np.arange(6000) % 5
    data = toys.blobs(size=6000)
    skewed = {"kind": "dirichlet", "alpha": 0.3, "min_size": 4}
    what = toys.toy(rounds=5, partition=skewed, stream={"kind": "drift", "tasks": 5})
    prepared = prepare(resolve(what), data)
    plain = prepare(resolve(toys.toy(rounds=5, partition=skewed)), data)
    tasks = prepared.sites.tasks
    assert tasks is not None
    mixes = np.array([_shares(prepared, t, labels) for t in range(5)])
    np.testing.assert_allclose(
        mixes[0], _shares(plain, None, labels, tasks.task_of == 0), atol=1e-12
    )
    middle, ends = mixes[2], (mixes[0] + mixes[4]) / 2
    assert np.abs(middle - ends).max() < 4 * np.sqrt(0.25 / 1200) + 0.02


def _shares(prepared: Prepared, task: int | None, labels: Any, only: Any = None) -> Any:
    """What share of a task's examples each client has of each class (clients, C)."""
    rows = []
    for part in prepared.sites.split.tensors():
        tasks = prepared.sites.tasks
        own = part[only[part]] if tasks is None or task is None else part[tasks.of_task(part, task)]
        rows.append(np.bincount(labels[own.numpy()], minlength=5))
    return np.array(rows) / np.array(rows).sum()


def test_the_matrix_of_a_run_and_its_numbers(tmp_path: Path) -> None:
    stream = {"kind": "classes", "tasks": 2, "order": [[0, 1, 4], [2, 3]]}
    result = run(toys.toy(rounds=4, partition=IID, stream=stream), tmp_path / "run", toys.blobs())
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    ends = [e for e in events if e["event"] == "task"]
    assert [(e["task"], e["round"]) for e in ends] == [(0, 0), (1, 2), (2, 4)]
    rounds = {e["round"]: e for e in events if e["event"] == "round"}
    assert [rounds[r]["task"] for r in (1, 2, 3, 4)] == [1, 1, 2, 2]
    by_class = rounds[4]["class_accuracy"]
    assert ends[2]["row"] == pytest.approx(
        [np.mean([by_class[c] for c in own]) for own in stream["order"]]
    )
    assert rounds[4]["accuracy_seen"] == pytest.approx(rounds[4]["accuracy"])
    assert rounds[2]["accuracy_seen"] == pytest.approx(ends[1]["row"][0])
    assert ends[1]["row"][0] > rounds[2]["accuracy"]  # classes to come are no answers yet
    rows = [e["row"] for e in ends[1:]]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["average_forgetting"] == pytest.approx(over.average_forgetting(rows))
    assert summary["learned"] * summary["kept"] == pytest.approx(summary["final_accuracy"])
    assert result.summary["backward_transfer"] == -summary["average_forgetting"]
    assert len(ends[1]["clients"]) == 6
    assert events[0]["stream"]["first_rounds"] == [1, 3]


def test_a_round_passes_over_the_test_set_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, call, blobs = [], Predictor.__call__, toys.blobs()

    def counted(self: Predictor, x: torch.Tensor) -> torch.Tensor:
        passed.append(len(x))
        return call(self, x)

    monkeypatch.setattr(Predictor, "__call__", counted)
    stream = {"kind": "classes", "tasks": 2, "order": [[0, 1, 4], [2, 3]]}
    run(toys.toy(rounds=4, partition=IID, stream=stream, measure=()), tmp_path / "run", blobs)
    assert passed.count(len(blobs.test)) == 1 + 4, (
        "one pass serves the accuracies, and the row of a task"
    )


def test_domains_have_a_test_set_each(tmp_path: Path) -> None:
    stream = {"kind": "domains", "tasks": 2, "transform": "invert"}
    plan = {"epochs": 4, "batch": 20, "lr": 0.2}
    run(toys.toy(rounds=2, partition=IID, stream=stream, plan=plan), tmp_path / "run", toys.blobs())
    end = [e for e in read_journal(tmp_path / "run" / "journal.jsonl") if e["event"] == "task"][1]
    assert np.shape(end["correct"]) == np.shape(end["totals"]) == (2, 5)
    assert end["row"][0] > end["row"][1] + 0.3  # the negative of an image was never shown


def test_domains_of_a_column_have_their_own_training_and_test_examples(tmp_path: Path) -> None:
    plain = toys.blobs()
    train, test = (
        replace(some, owners=(torch.arange(len(some)) % 3 == 0).long())
        for some in (plain.train, plain.test)
    )
    data = replace(
        plain, train=train, test=test, about=replace(plain.about, owners=("athens", "berlin"))
    )
    what = toys.toy(
        rounds=2, partition=IID, stream={"kind": "domains", "column": "hospital", "tasks": 2}
    )
    prepared = prepare(resolve(what), data)
    seen = [prepared.sites.view(c, Stage(2, 0, "train", (c,))).data.owners for c in range(6)]
    assert all(own is not None and (own == 1).all() for own in seen)
    run(what, tmp_path / "run", data)
    end = [e for e in read_journal(tmp_path / "run" / "journal.jsonl") if e["event"] == "task"][2]
    assert [sum(row) for row in end["totals"]] == [66, 34]


STREAMS = {
    "fedavg": {"kind": "classes", "tasks": 3, "head": "seen"},
    "sfedkd": {"kind": "classes", "tasks": 3, "past": "kept", "join": 0.5},
    "cwc": {"kind": "classes", "tasks": 3, "head": "task"},
    "hiper_fedkd": {"kind": "domains", "transform": "rotate90", "tasks": 3, "stay": 0.4, "lag": 1},
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_run_stopped_after_every_stage_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    data = {"public": 40} if name == "hiper_fedkd" else {}
    what = toys.toy(
        name, partition=IID, topology={"clients": 4, "sampled": 2}, data=data, stream=STREAMS[name]
    )
    run(what, tmp_path / "whole", toys.blobs())
    folder = stopped(what, tmp_path / "run", 1)
    while True:
        try:
            resume(folder, toys.blobs(), watch=StopAfter(1))
            break
        except Interrupted:
            pass
    assert_same_bits(bits(folder), bits(tmp_path / "whole"))


def test_labels_are_counted_again_where_tasks_change(tmp_path: Path) -> None:
    run(
        toys.toy("sfedkd", partition=IID, stream={"kind": "classes", "tasks": 3}),
        tmp_path / "run",
        toys.blobs(),
    )
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    census = [
        (e["round"], e["stage"]) for e in events if e["event"] == "client" and e["name"] == "census"
    ]
    assert sorted(set(census)) == [(0, 0), (2, 0), (3, 0)]


def test_engines_agree_under_a_mask(tmp_path: Path) -> None:
    stream = {"kind": "classes", "tasks": 3, "head": "task"}
    for engine in ("serial", "pooled", "vectorised", "flower"):
        what = toys.toy("fedntd", partition=IID, stream=stream, engine=engine)
        run(what, tmp_path / engine, toys.blobs())
    want = bits(tmp_path / "serial")["model.safetensors"]
    assert bits(tmp_path / "pooled")["model.safetensors"] == want
    assert bits(tmp_path / "flower")["model.safetensors"] == want
    alone, stacked = (_rows(tmp_path / engine) for engine in ("serial", "vectorised"))
    np.testing.assert_allclose(alone, stacked, atol=0.03)


def _rows(folder: Path) -> Any:
    return [e["row"] for e in read_journal(folder / "journal.jsonl") if e["event"] == "task"]


def test_the_head_changes_what_is_learned(tmp_path: Path) -> None:
    stream = {"kind": "classes", "tasks": 2, "first": 4, "rounds": [1, 2]}
    for head in ("seen", "task", "all"):
        run(toys.toy(partition=IID, stream={**stream, "head": head}), tmp_path / head, toys.blobs())
    models = {h: bits(tmp_path / h)["model.safetensors"] for h in ("seen", "task", "all")}
    assert len(set(models.values())) == 3


def test_a_stream_of_ones_own_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "from fedstill.core.stream import Cut\n"
        "def halves(labels, tasks, classes, late: int = 2):\n"
        "    '''The second half comes later.'''\n"
        "    everything = tuple(range(classes))\n"
        "    task = (np.arange(len(labels)) >= len(labels) // late).astype(int)\n"
        "    return Cut(task, (everything,) * tasks)\n"
    )
    what = {"kind": f"{tmp_path / 'mine.py'}:halves", "tasks": 2}
    prepared = prepare(resolve(toys.toy(rounds=4, partition=IID, stream=what)), toys.blobs())
    assert prepared.sites.tasks is not None
    assert prepared.sites.tasks.task_of is not None
    assert prepared.sites.tasks.task_of.tolist() == [0] * 150 + [1] * 150
    with pytest.raises(ConfigError, match="task 3"):
        prepare(
            resolve(toys.toy(rounds=3, partition=IID, stream={**what, "tasks": 3})), toys.blobs()
        )


@pytest.mark.parametrize("name", ["local_only", "fedavg_once", "ensemble", "pfnm"])
def test_peers_have_one_exchange_a_task(name: str, tmp_path: Path) -> None:
    what = toys.toy(
        name, partition=IID, topology={"clients": 4}, stream={"kind": "classes", "tasks": 3}
    )
    run(what, tmp_path / "run", toys.blobs())
    ends = [
        e["task"] for e in read_journal(tmp_path / "run" / "journal.jsonl") if e["event"] == "task"
    ]
    # without a model of the server there is no row
    wanted = {"local_only": [], "ensemble": [1, 2, 3]}
    assert ends == wanted.get(name, [0, 1, 2, 3])
    assert len(run_matrices(tmp_path)[0].percent) == 3 if ends else name == "local_only"
    with pytest.raises(ConfigError, match="rounds = 3"):
        resolve(
            toys.toy(
                name, rounds=6, topology={"clients": 4}, stream={"kind": "classes", "tasks": 3}
            )
        )


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (
            {"kind": "classes"},
            r"rounds = 6 .*stream.tasks = 5",
        ),
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
def test_what_is_wrong_is_one_line(stream: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        ready(**stream)
    assert "\n" not in str(error.value)


def test_a_split_that_a_task_cannot_give_names_the_way_out() -> None:
    skewed = {"kind": "dirichlet", "alpha": 0.05, "min_size": 20}
    with pytest.raises(ConfigError, match=r"task 1: .*stream.compose = 'clients_first'"):
        ready(kind="classes", tasks=5, also={"rounds": 5, "partition": skewed})


@method("toy_one_by_one")
@dataclass(frozen=True)
class OneByOne(FedAvg):
    """A client has a model once it has taken part; without one of each, nothing is tested."""

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        models = {f"model.{reply.client}": reply.content.params for reply in replies}
        return super().aggregate(state, replies, stage, world).next(groups=models)

    def predictors(self, state: State, world: World) -> dict[str, Any]:
        own = {client: state.extra.get(f"model.{client}") for client in range(world.clients)}
        return {
            f"client {client}": predictor(world.model(client), params)
            for client, params in own.items()
            if params is not None
        }


def test_a_task_without_a_tested_model_leaves_its_row_empty(tmp_path: Path) -> None:
    stream = {"kind": "classes", "tasks": 3}
    topology = {"clients": 6, "sampled": 5}
    experiment = toys.toy("toy_one_by_one", stream=stream, partition=IID, topology=topology)
    result = run(experiment, tmp_path / "run", toys.blobs())
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    ends = [event for event in events if event["event"] == "task"]
    assert [end["task"] for end in ends if end["task"] > 0] == [2, 3]
    rows = RunNumbers.of(events).task_rows
    assert np.isnan(rows[0]).all()
    np.testing.assert_array_equal(rows[1:], np.array([end["row"] for end in ends[-2:]], float))
    assert result.summary["final_accuracy"] == pytest.approx(over.final_accuracy(rows))
    (matrix,) = run_matrices(tmp_path / "run")
    assert len(matrix.percent) == 3
    assert np.isnan(matrix.percent[0]).all()
