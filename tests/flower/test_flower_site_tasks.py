"""Sites with data of their own by task, on a loopback grid: the simulation's bits, and clear
refusals.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import toys
from fedstill.cli import explain
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, Interrupted, TooFewReplies
from fedstill.core.records import SERVER, Examples
from fedstill.flower.engine import LoopbackGrid
from fedstill.flower.site import StageExecutor, client_app
from fedstill.flower.site_settings import Site
from fedstill.metrics import tasks as over_time
from fedstill.models.predictors import predictor
from fedstill.report.accuracy_matrix import run_matrices
from fedstill.running.journal import read_journal
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.result import Result
from fedstill.running.runner import resume, run
from flowers import needs_flower, saved_data
from run_bits import StopAfter

pytestmark = needs_flower

CLIENTS, ROUNDS = 3, 4
ORDER = [[0, 1, 4], [2, 3]]
SITES = {"kind": "sites", "tasks": 2, "order": ORDER}


def what(method: Any = "fedavg", **changes: Any) -> Experiment:
    """A simulation of three clients that all act in every round, with two tasks."""
    values: dict[str, Any] = {
        "rounds": ROUNDS,
        "topology": {"clients": CLIENTS},
        "partition": {"kind": "iid"},
        "stream": {"kind": "classes", "tasks": 2, "order": ORDER},
        "measure": (),
    }
    return toys.toy(method, **{**values, **changes})


def ready(of: Experiment) -> Prepared:
    return prepare(resolve(of.with_values({"data.name": "blobs"}, "test")), toys.blobs())


def folders(of: Experiment, place: Path) -> list[Site]:
    """Every client of a simulation as a site with a folder for each task; the tests are those of
    the task's classes.
    """
    simulated, made = ready(of), []
    tasks, train, test = simulated.sites.tasks, simulated.sites.train, simulated.dataset.test
    assert tasks is not None
    for client, part in enumerate(simulated.sites.split.tensors()):
        for t in range(tasks.stream.tasks):
            own = torch.isin(test.labels, torch.tensor(tasks.stream.classes(t))).nonzero().flatten()
            mine = train.take(part[tasks.of_task(part, t)])
            saved_data(
                place / f"own{client}" / f"task{t + 1}", mine, test.take(own[client::CLIENTS])
            )
        made.append(
            Site(
                client, place / f"memory{client}", data=str(place / f"own{client}"), tasks="folders"
            )
        )
    return made


def grid(there: Sequence[Site]) -> LoopbackGrid:
    executors = {site.client: StageExecutor(site, shows_reasons=True) for site in there}
    app = client_app(
        lambda c: (c.node_config["partition-id"], executors[c.node_config["partition-id"]]), 1 << 30
    )
    return LoopbackGrid(app, range(CLIENTS))


def at_sites(of: Experiment, **stream: Any) -> Experiment:
    """The same with sites, which have the tasks."""
    said = {k: v for k, v in of.stream.items() if k in ("head", "past", "lag", "stay", "join")}
    flower = {"deadline": 30, "poll": 1, "data": "sites", "federation": "/federation"}
    flower["test_every"] = int(bool(of.metrics))  # a simulation has no stage of tests
    return replace(of, engine="flower", flower=flower, stream={**SITES, **said, **stream})


def over(of: Experiment, there: Sequence[Site], out: Path, **more: Any) -> Result:
    return run(at_sites(of), out, toys.blobs(), grid=grid(there), **more)


def journal(out: Path, event: str) -> list[dict[str, Any]]:
    return [e for e in read_journal(out / "journal.jsonl") if e["event"] == event]


RUNS = {
    "finetuning": what("fedavg"),
    "outputs of the task": what(stream={**what().stream, "head": "task"}),
    "the past kept": what(stream={**what().stream, "past": "kept", "head": "seen"}),
    "held-out data": what(plan={"epochs": 2, "batch": 10, "lr": 0.1, "validation": 0.2}),
    "label counts anew": what("fedadkd"),
    "replay": what({"name": "replay", "size": 12, "alpha": 0.5}),
    "an old model": what("fedlwf"),
    "importance": what("fedewc"),
    "sums": what("analytic"),
    "a chain": what("fedseq"),
    "late and staying": what(stream={**what().stream, "lag": 1, "stay": 0.4}),
}


@pytest.mark.parametrize("name", RUNS)
def test_sites_with_a_folder_for_each_task_give_the_bits_of_the_simulation(
    name: str, tmp_path: Path
) -> None:
    run(replace(RUNS[name], engine="serial"), tmp_path / "serial", toys.blobs())
    over(RUNS[name], folders(RUNS[name], tmp_path), tmp_path / "run")
    events = [e for e in journal(tmp_path / "run", "client") if e["name"] != "task_test"]
    assert not [e for e in events if "refused" in e]
    assert (tmp_path / "run/model.safetensors").read_bytes() == (
        tmp_path / "serial/model.safetensors"
    ).read_bytes()
    assert [(e["name"], e["client"], e.get("loss"), "idle" in e) for e in events] == [
        (e["name"], e["client"], e.get("loss"), "idle" in e)
        for e in journal(tmp_path / "serial", "client")
    ]
    assert [e["row"] for e in journal(tmp_path / "run", "task")] == [
        e["row"] for e in journal(tmp_path / "serial", "task")
    ], "the server's own test set says by its classes what belongs to a task"
    assert not any("label_counts" in e for e in events), "they stay at the site"


def test_sites_with_tasks_start_from_the_model_of_an_earlier_run(tmp_path: Path) -> None:
    run(replace(what(), seed=5), tmp_path / "first", toys.blobs())
    late = what(start_from=str(tmp_path / "first"), stream={**what().stream, "lag": 1})
    run(replace(late, engine="serial"), tmp_path / "serial", toys.blobs())
    over(late, folders(late, tmp_path), tmp_path / "run")
    models = [tmp_path / name / "model.safetensors" for name in ("first", "serial", "run")]
    first, serial, at_the_sites = [model.read_bytes() for model in models]
    assert at_the_sites == serial != first
    assert not [e for e in journal(tmp_path / "run", "client") if "refused" in e]


def plain(model: Any, prepared: Prepared, own: Examples, among: list[int]) -> float:
    """The share of examples whose likeliest class, of some, is their own."""
    logits = predictor(prepared.world.model(SERVER), model)(prepared.sites.inputs.plain(own.values))
    return float((torch.tensor(among)[logits[:, among].argmax(1)] == own.labels).double().mean())


def test_each_site_tests_the_global_model_on_its_own_tasks(tmp_path: Path) -> None:
    """The rows of the event, against the models of the checkpoints; the same with a server that has
    no data.
    """
    of, there = RUNS["finetuning"], folders(RUNS["finetuning"], tmp_path)
    result = over(replace(of, keep_checkpoints_every=1), there, tmp_path / "run")
    prepared, ends = ready(of), journal(tmp_path / "run", "task")
    test = prepared.dataset.test
    for client in range(CLIENTS):
        rows = [end["clients"].get(str(client)) for end in ends if end["task"]]
        assert rows[0][1] is None, "the data of task 2 had not come"
        for t, classes in enumerate(ORDER):
            own = test.take(
                torch.isin(test.labels, torch.tensor(classes)).nonzero().flatten()[client::CLIENTS]
            )
            assert rows[1][t] == pytest.approx(
                plain(result.model, prepared, own, [0, 1, 2, 3, 4]), abs=1e-12
            )
    none = {"name": "none"}
    flower = {"classes": [f"class {c}" for c in range(5)], "shape": [1, 4, 4]}
    alone = at_sites(of)
    alone = replace(alone, data=none, flower={**alone.flower, **flower})
    run(alone, tmp_path / "alone", grid=grid(there))
    rows = [end["row"] for end in journal(tmp_path / "alone", "task")]
    by_site = [end["clients"] for end in journal(tmp_path / "alone", "task")]
    assert by_site == [end["clients"] for end in ends if end["task"]]
    assert rows == [
        [np.mean([row[0] for row in by_site[0].values()]), None],
        np.mean([*by_site[1].values()], 0).tolist(),
    ]
    (matrix,) = run_matrices(tmp_path / "alone")
    np.testing.assert_allclose(matrix.percent, 100 * np.array(rows, dtype=float))
    summary = json.loads((tmp_path / "alone/summary.json").read_text())
    assert summary["final_accuracy"] == pytest.approx(over_time.final_accuracy(rows))
    assert summary["average_forgetting"] == pytest.approx(over_time.average_forgetting(rows))


def test_a_site_without_data_in_a_task_is_idle_and_that_is_no_failure(tmp_path: Path) -> None:
    """As if the client had not been there: the bits of the simulation in which it is passed
    over.
    """
    of, there = RUNS["replay"], folders(RUNS["replay"], tmp_path)
    own = Path(there[1].data)
    shutil.rmtree(own / "task2")
    over(replace(of, clients={"quorum": 1.0}), there, tmp_path / "run")
    events = [e for e in journal(tmp_path / "run", "client") if e["client"] == 1]
    assert [
        ("idle" in e, "refused" in e) for e in events if e["round"] > 2 and e["name"] != "task_test"
    ] == [(True, False)] * 3
    tested = [e for e in events if e["name"] == "task_test"]
    assert [e["site_by_task"][1] for e in tested] == [None, None], "it still tests on what it had"
    assert all(e["site_by_task"][0] is not None for e in tested)
    assert "refusals" not in json.loads((tmp_path / "run/summary.json").read_text())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By name, the directory of a run that does not stop."""

    @functools.cache
    def directory(name: str) -> Path:
        place = tmp_path_factory.mktemp("uninterrupted")
        over(RUNS[name], folders(RUNS[name], place), place / "run")
        return place / "run"

    return directory


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", ["replay", "label counts anew"])
def test_a_run_that_stops_at_a_task_change_goes_on_to_the_same_bits(
    name: str, stages: int, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = uninterrupted(name)
    there = folders(RUNS[name], tmp_path)
    with pytest.raises(Interrupted):
        over(RUNS[name], there, tmp_path / "stopped", watch=StopAfter(stages))
    resume(tmp_path / "stopped", toys.blobs(), grid=grid(there))
    model = "model.safetensors"
    assert (whole / model).read_bytes() == (tmp_path / "stopped" / model).read_bytes()
    rows = [[end["row"], end["clients"]] for end in journal(whole, "task") if end["task"]]
    assert rows == [
        [end["row"], end["clients"]] for end in journal(tmp_path / "stopped", "task") if end["task"]
    ]


def changed(folder: Path) -> None:
    archive = dict(np.load(folder / "data.npz"))
    archive["test_labels"][0] = 1 - archive["test_labels"][0]
    np.savez(folder / "data.npz", **archive)


def strange(own: Path) -> None:
    (own / "task3").mkdir()


def mistaken(own: Path) -> None:
    (own / "notes").mkdir()


def gap(own: Path) -> None:
    shutil.rmtree(own / "task1")


def nothing(own: Path) -> None:
    shutil.rmtree(own / "task1")
    shutil.rmtree(own / "task2")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (
            strange,
            "own2/task3",
        ),
        (mistaken, "own2/notes"),
        (gap, "own2 has task2, but no task1"),
        (nothing, "own2 has no folder task1, task2"),
    ],
)
def test_folders_that_are_not_the_tasks_of_the_run_are_refused_in_one_line(
    spoil: Any, why: str, tmp_path: Path
) -> None:
    there = folders(RUNS["finetuning"], tmp_path)
    spoil(Path(there[2].data))
    over(replace(RUNS["finetuning"], clients=toys.TOLERANT), there, tmp_path / "run")
    refused = [e for e in journal(tmp_path / "run", "client") if "refused" in e]
    assert {e["client"] for e in refused} == {2}
    assert all(why in e["refused"] for e in refused), refused[0]["refused"]


def test_an_empty_folder_says_that_there_is_nothing(tmp_path: Path) -> None:
    there = folders(RUNS["finetuning"], tmp_path)
    gap(Path(there[2].data))
    (Path(there[2].data) / "task1").mkdir()
    over(RUNS["finetuning"], there, tmp_path / "run")
    events = [e for e in journal(tmp_path / "run", "client") if e["client"] == 2]
    assert [e["name"] for e in events if "idle" in e] == ["train", "train", "task_test"]
    assert [e["site_by_task"][0] for e in events if "site_by_task" in e] == [None] * 3


def test_data_that_change_after_their_task_began_are_refused_by_name(tmp_path: Path) -> None:
    """A run goes on; its site is refused until the data are as they were."""
    of, there = (
        replace(RUNS["finetuning"], clients=toys.TOLERANT),
        folders(RUNS["finetuning"], tmp_path),
    )
    with pytest.raises(Interrupted):
        over(of, there, tmp_path / "run", watch=StopAfter(1))
    notes = [
        line.split()
        for line in next((tmp_path / "memory0").rglob("tasks")).read_text().splitlines()
    ]
    assert [task for task, _ in notes] == ["1"], "the second task's data were not asked for yet"
    assert len(notes[0][1]) == 64
    own = Path(there[0].data)
    shutil.copytree(own / "task1", tmp_path / "kept")
    changed(own / "task1")
    with pytest.raises(Interrupted):
        resume(tmp_path / "run", toys.blobs(), watch=StopAfter(1), grid=grid(there))
    (said,) = [e["refused"] for e in journal(tmp_path / "run", "client") if "refused" in e]
    assert said == (
        "failed: task 1 at this site has other data than when this run first used it: restore the "
        "data, or start a new run"
    )
    shutil.rmtree(own / "task1")
    shutil.copytree(tmp_path / "kept", own / "task1")
    resume(tmp_path / "run", toys.blobs(), grid=grid(there))
    assert len([e for e in journal(tmp_path / "run", "client") if "refused" in e]) == 1


def test_data_that_come_after_their_task_began_are_refused_by_name(tmp_path: Path) -> None:
    of, there = (
        replace(RUNS["finetuning"], clients=toys.TOLERANT),
        folders(RUNS["finetuning"], tmp_path),
    )
    own = Path(there[0].data)
    shutil.move(own / "task2", tmp_path / "late")
    with pytest.raises(Interrupted):
        over(of, there, tmp_path / "run", watch=StopAfter(4))
    shutil.move(tmp_path / "late", own / "task2")
    resume(tmp_path / "run", toys.blobs(), grid=grid(there))
    (said, *_) = [e["refused"] for e in journal(tmp_path / "run", "client") if "refused" in e]
    assert said.startswith(
        "failed: task 2 at this site has data now, but had none when this run first used it"
    )


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (
            {"kind": "classes", "tasks": 2},
            "stream.kind",
        ),
        ({**SITES, "compose": "clients_first"}, "stream.compose"),
        (
            {"kind": "sites", "cuts": ["2023-01-01", "soon"]},
            "stream.cuts has 'soon'",
        ),
        (
            {"kind": "sites", "cuts": ["2023-01-01", "2022-01-01"]},
            r"stream\.cuts.*2022-01-01",
        ),
        (
            {"kind": "sites", "cuts": ["2023-01-01"], "tasks": 3},
            r"stream.tasks = 3, and the 1 dates of stream.cuts make 2 tasks",
        ),
        (
            {"kind": "sites", "tasks": 2, "order": [[0, 1]]},
            "stream.order .* 1 tasks",
        ),
        (
            {"kind": "sites", "tasks": 2, "order": [[0, 1], [7]]},
            "must name classes from 0 to 4 in each task",
        ),
    ],
)
def test_a_stream_that_sites_cannot_have_is_refused_before_anything(
    stream: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        run(replace(at_sites(what()), stream=stream), tmp_path / "run", toys.blobs(), grid=grid([]))
    assert not (tmp_path / "run").exists()


def test_what_explain_says_leaves_out_what_sites_alone_know() -> None:
    prepared = ready(replace(at_sites(what("fedewc")), measure=("landscape",)))
    one_round = explain.run_estimate(prepared)
    told = dict(one_round.lines())
    assert told["training data"] == "known to the sites only"
    assert "examples a round" not in told
    assert told["engine"] == "flower"
    assert one_round.work.bytes_up > 0
    assert [cost.row[-1] for cost in explain.measure_costs(prepared, one_round)] == ["–"]


def test_a_simulation_has_no_tasks_of_sites(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="flower"):
        run(what(stream=SITES), tmp_path / "run", toys.blobs())


def test_a_site_must_say_what_a_task_is(tmp_path: Path) -> None:
    there = [replace(site, tasks="") for site in folders(RUNS["finetuning"], tmp_path)]
    with pytest.raises(TooFewReplies, match="tasks = 'folders', or time_column"):
        over(RUNS["finetuning"], there, tmp_path / "run")


def test_a_run_without_tasks_has_no_folders_of_them(tmp_path: Path) -> None:
    there = folders(RUNS["finetuning"], tmp_path)
    with pytest.raises(TooFewReplies, match="stream"):
        run(replace(at_sites(what()), stream={}), tmp_path / "run", toys.blobs(), grid=grid(there))
