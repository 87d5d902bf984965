"""Sites with data of their own by task, on a loopback grid: the simulation's bits, and clear
refusals.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from fedstill.flower.site_settings import Site
from fedstill.metrics import tasks as over_time
from fedstill.models.predictors import predictor
from fedstill.report.accuracy_matrix import run_matrices
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.result import Result
from fedstill.running.runner import resume, run
from flowers import at_sites, needs_flower, saved_data, site_grid
from journals import journal_events, refusals
from run_bits import StopAfter, model_bytes

pytestmark = needs_flower

CLIENTS = 3
ROUNDS = 4
ORDER = [[0, 1, 4], [2, 3]]
CLASSES = [0, 1, 2, 3, 4]
SITES = {"kind": "sites", "tasks": 2, "order": ORDER}
STREAM = {"kind": "classes", "tasks": 2, "order": ORDER}


def experiment(method: Any = "fedavg", **changes: Any) -> Experiment:
    """A simulation of three clients that all act in every round, with two tasks."""
    values: dict[str, Any] = {
        "rounds": ROUNDS,
        "topology": {"clients": CLIENTS},
        "partition": {"kind": "iid"},
        "stream": STREAM,
        "measure": (),
    }
    return toys.toy(method, **{**values, **changes})


def prepared(simulation: Experiment) -> Prepared:
    """The simulation on blobs."""
    return prepare(resolve(simulation.with_values({"data.name": "blobs"}, "test")), toys.blobs())


def site_test_sets(simulated: Prepared, task: int) -> list[Examples]:
    """The test examples of a task's classes, dealt to the sites in turn."""
    test = simulated.dataset.test
    of_task = torch.isin(test.labels, torch.tensor(ORDER[task])).nonzero().flatten()
    return [test.take(of_task[client::CLIENTS]) for client in range(CLIENTS)]


def task_sites(simulation: Experiment, place: Path) -> list[Site]:
    """Every client of a simulation as a site with a folder for each task."""
    simulated = prepared(simulation)
    tasks = simulated.sites.tasks
    assert tasks is not None
    test_sets = [site_test_sets(simulated, task) for task in range(len(ORDER))]

    sites = []
    for client, part in enumerate(simulated.sites.split.tensors()):
        data = place / f"own{client}"
        for task in range(len(ORDER)):
            train = simulated.sites.train.take(part[tasks.of_task(part, task)])
            saved_data(data / f"task{task + 1}", train, test_sets[task][client])
        sites.append(Site(client, place / f"memory{client}", data=str(data), tasks="folders"))
    return sites


def at_task_sites(simulation: Experiment, **stream: Any) -> Experiment:
    """The same over sites, which have the tasks."""
    keys = ("head", "past", "lag", "stay", "join")
    common_stream = {key: simulation.stream[key] for key in keys if key in simulation.stream}
    return replace(at_sites(simulation), stream={**SITES, **common_stream, **stream})


def run_at_sites(
    simulation: Experiment, sites: Sequence[Site], out: Path, **options: Any
) -> Result:
    """Run the experiment with these sites on a loopback grid."""
    return run(at_task_sites(simulation), out, toys.blobs(), grid=site_grid(sites), **options)


def client_events(folder: Path) -> list[dict[str, Any]]:
    """The events of clients, without those of the stage that tests tasks."""
    events = journal_events(folder, event="client")
    return [event for event in events if event["name"] != "task_test"]


RUNS = {
    "finetuning": experiment("fedavg"),
    "outputs of the task": experiment(stream={**STREAM, "head": "task"}),
    "the past kept": experiment(stream={**STREAM, "past": "kept", "head": "seen"}),
    "held-out data": experiment(plan={"epochs": 2, "batch": 10, "lr": 0.1, "validation": 0.2}),
    "label counts anew": experiment("fedadkd"),
    "replay": experiment({"name": "replay", "size": 12, "alpha": 0.5}),
    "an old model": experiment("fedlwf"),
    "importance": experiment("fedewc"),
    "sums": experiment("analytic"),
    "a chain": experiment("fedseq"),
    "late and staying": experiment(stream={**STREAM, "lag": 1, "stay": 0.4}),
}
FINETUNING = RUNS["finetuning"]


@dataclass(frozen=True)
class ClientWork:
    """What an event of a client says about its work."""

    stage: str
    client: int
    loss: Any
    is_idle: bool

    @classmethod
    def of(cls, event: dict[str, Any]) -> ClientWork:
        """The work of an event."""
        return cls(
            stage=event["name"],
            client=event["client"],
            loss=event.get("loss"),
            is_idle="idle" in event,
        )


@pytest.mark.parametrize("name", RUNS)
def test_sites_with_a_folder_for_each_task_give_the_bits_of_the_simulation(
    name: str, tmp_path: Path
) -> None:
    simulation = RUNS[name]
    run(replace(simulation, engine="serial"), tmp_path / "serial", toys.blobs())

    run_at_sites(simulation, task_sites(simulation, tmp_path), tmp_path / "run")

    events = client_events(tmp_path / "run")
    expected = journal_events(tmp_path / "serial", event="client")
    assert not any("refused" in event for event in events)
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "serial")
    assert [ClientWork.of(event) for event in events] == [
        ClientWork.of(event) for event in expected
    ]
    assert accuracy_rows(tmp_path / "run") == accuracy_rows(tmp_path / "serial"), (
        "the server's own test set says by its classes what belongs to a task"
    )
    assert not any("label_counts" in event for event in events), "they stay at the site"


def accuracy_rows(folder: Path) -> list[list[float | None]]:
    """After each task, the accuracy on every task."""
    return [event["row"] for event in journal_events(folder, event="task")]


def test_sites_with_tasks_start_from_the_model_of_an_earlier_run(tmp_path: Path) -> None:
    run(replace(experiment(), seed=5), tmp_path / "first", toys.blobs())
    late = experiment(start_from=str(tmp_path / "first"), stream={**STREAM, "lag": 1})
    run(replace(late, engine="serial"), tmp_path / "serial", toys.blobs())

    run_at_sites(late, task_sites(late, tmp_path), tmp_path / "run")

    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "serial")
    assert model_bytes(tmp_path / "run") != model_bytes(tmp_path / "first")
    assert not refusals(tmp_path / "run")


def accuracy(model: Any, simulated: Prepared, examples: Examples) -> float:
    """The accuracy of a model, in a pass of its own."""
    predict = predictor(simulated.world.model(SERVER), model)
    logits = predict(simulated.sites.inputs.plain(examples.values))
    return float((logits.argmax(1) == examples.labels).double().mean())


def site_rows(folder: Path) -> list[dict[str, list[float | None]]]:
    """After each task, the accuracy on every task at each site."""
    return [event["clients"] for event in journal_events(folder, event="task") if event["task"]]


def test_each_site_tests_the_global_model_on_its_own_tasks(tmp_path: Path) -> None:
    """The rows of the events are those of the final model; a server without data reports their
    means.
    """
    sites = task_sites(FINETUNING, tmp_path)
    result = run_at_sites(FINETUNING, sites, tmp_path / "run")

    simulated = prepared(FINETUNING)
    first_rows, second_rows = site_rows(tmp_path / "run")
    for client in range(CLIENTS):
        assert first_rows[str(client)][1] is None, "the data of task 2 had not come"
        for task in range(len(ORDER)):
            examples = site_test_sets(simulated, task)[client]
            expected = accuracy(result.model, simulated, examples)
            assert second_rows[str(client)][task] == pytest.approx(expected, abs=1e-12)

    alone = at_task_sites(FINETUNING)
    classes = [f"class {label}" for label in CLASSES]
    flower = {**alone.flower, "classes": classes, "shape": [1, 4, 4]}
    alone = replace(alone, data={"name": "none"}, flower=flower)
    run(alone, tmp_path / "alone", grid=site_grid(sites))

    assert site_rows(tmp_path / "alone") == [first_rows, second_rows]
    mean_of_task_1 = np.mean([row[0] for row in first_rows.values()])
    means = [[mean_of_task_1, None], np.mean(list(second_rows.values()), 0).tolist()]
    assert accuracy_rows(tmp_path / "alone") == means
    (matrix,) = run_matrices(tmp_path / "alone")
    np.testing.assert_allclose(matrix.percent, 100 * np.array(means, dtype=float))
    summary = read_summary(tmp_path / "alone")
    assert summary["final_accuracy"] == pytest.approx(over_time.final_accuracy(means))
    assert summary["average_forgetting"] == pytest.approx(over_time.average_forgetting(means))


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run."""
    return json.loads((folder / "summary.json").read_text())


def test_a_site_without_data_in_a_task_is_idle_and_that_is_no_failure(tmp_path: Path) -> None:
    """It still tests the model on the task that it had."""
    simulation = replace(RUNS["replay"], clients={"quorum": 1.0})
    sites = task_sites(simulation, tmp_path)
    shutil.rmtree(Path(sites[1].data) / "task2")

    run_at_sites(simulation, sites, tmp_path / "run")

    events = [event for event in client_events(tmp_path / "run") if event["client"] == 1]
    of_task_2 = [event for event in events if event["round"] > 2]
    assert ["idle" in event for event in of_task_2] == [True] * 3
    assert ["refused" in event for event in of_task_2] == [False] * 3
    tests = journal_events(tmp_path / "run", name="task_test", client=1)
    assert [event["site_by_task"][1] for event in tests] == [None, None]
    assert all(event["site_by_task"][0] is not None for event in tests)
    assert "refusals" not in read_summary(tmp_path / "run")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By name, the directory of a run that does not stop."""

    @functools.cache
    def directory(name: str) -> Path:
        place = tmp_path_factory.mktemp("uninterrupted")
        run_at_sites(RUNS[name], task_sites(RUNS[name], place), place / "run")
        return place / "run"

    return directory


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", ["replay", "label counts anew"])
def test_a_run_that_stops_near_a_task_change_is_resumed_to_the_same_bits(
    name: str, stages: int, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = uninterrupted(name)
    sites = task_sites(RUNS[name], tmp_path)
    with pytest.raises(Interrupted):
        run_at_sites(RUNS[name], sites, tmp_path / "stopped", watch=StopAfter(stages))

    resume(tmp_path / "stopped", toys.blobs(), grid=site_grid(sites))

    assert model_bytes(tmp_path / "stopped") == model_bytes(expected)
    assert accuracy_rows(tmp_path / "stopped") == accuracy_rows(expected)
    assert site_rows(tmp_path / "stopped") == site_rows(expected)


def relabel_test_example(folder: Path) -> None:
    """Change the label of the first test example."""
    arrays = dict(np.load(folder / "data.npz"))
    arrays["test_labels"][0] = 1 - arrays["test_labels"][0]
    np.savez(folder / "data.npz", **arrays)


def add_third_task(data: Path) -> None:
    (data / "task3").mkdir()


def add_notes(data: Path) -> None:
    (data / "notes").mkdir()


def remove_first_task(data: Path) -> None:
    shutil.rmtree(data / "task1")


def remove_both_tasks(data: Path) -> None:
    shutil.rmtree(data / "task1")
    shutil.rmtree(data / "task2")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (add_third_task, "own2/task3"),
        (add_notes, "own2/notes"),
        (remove_first_task, "own2 has task2, but no task1"),
        (remove_both_tasks, "own2 has no folder task1, task2"),
    ],
)
def test_folders_that_are_not_the_tasks_of_the_run_are_refused_in_one_line(
    spoil: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    simulation = replace(FINETUNING, clients=toys.TOLERANT)
    sites = task_sites(simulation, tmp_path)
    spoil(Path(sites[2].data))

    run_at_sites(simulation, sites, tmp_path / "run")

    refused = refusals(tmp_path / "run")
    assert {event["client"] for event in refused} == {2}
    assert all(reason in event["refused"] for event in refused), refused[0]["refused"]


def test_an_empty_folder_declares_a_task_without_data(tmp_path: Path) -> None:
    sites = task_sites(FINETUNING, tmp_path)
    data = Path(sites[2].data)
    remove_first_task(data)
    (data / "task1").mkdir()

    run_at_sites(FINETUNING, sites, tmp_path / "run")

    events = journal_events(tmp_path / "run", event="client", client=2)
    assert [event["name"] for event in events if "idle" in event] == ["train", "train", "task_test"]
    tests = [event["site_by_task"] for event in events if "site_by_task" in event]
    assert [row[0] for row in tests] == [None] * 3


def test_data_that_change_after_their_task_began_are_refused_by_name(tmp_path: Path) -> None:
    """The site is refused until the data are as they were; the run continues meanwhile."""
    simulation = replace(FINETUNING, clients=toys.TOLERANT)
    sites = task_sites(simulation, tmp_path)
    first_task = Path(sites[0].data) / "task1"
    shutil.copytree(first_task, tmp_path / "copy")
    with pytest.raises(Interrupted):
        run_at_sites(simulation, sites, tmp_path / "run", watch=StopAfter(1))
    (record,) = next((tmp_path / "memory0").rglob("tasks")).read_text().splitlines()
    task, sha256 = record.split()
    assert task == "1", "the run has not used the data of task 2"
    assert len(sha256) == 64

    relabel_test_example(first_task)
    with pytest.raises(Interrupted):
        resume(tmp_path / "run", toys.blobs(), watch=StopAfter(1), grid=site_grid(sites))

    (refused,) = refusals(tmp_path / "run")
    assert refused["refused"] == (
        "failed: task 1 at this site has other data than when this run first used it: restore the "
        "data, or start a new run"
    )

    shutil.rmtree(first_task)
    shutil.copytree(tmp_path / "copy", first_task)
    resume(tmp_path / "run", toys.blobs(), grid=site_grid(sites))

    assert refusals(tmp_path / "run") == [refused]


def test_data_that_come_after_their_task_began_are_refused_by_name(tmp_path: Path) -> None:
    simulation = replace(FINETUNING, clients=toys.TOLERANT)
    sites = task_sites(simulation, tmp_path)
    second_task = Path(sites[0].data) / "task2"
    shutil.move(second_task, tmp_path / "late")
    with pytest.raises(Interrupted):
        run_at_sites(simulation, sites, tmp_path / "run", watch=StopAfter(4))

    shutil.move(tmp_path / "late", second_task)
    resume(tmp_path / "run", toys.blobs(), grid=site_grid(sites))

    first_refusal = refusals(tmp_path / "run")[0]
    assert first_refusal["refused"].startswith(
        "failed: task 2 at this site has data now, but had none when this run first used it"
    )


@pytest.mark.parametrize(
    ("stream", "problem"),
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
    stream: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    federation = replace(at_task_sites(experiment()), stream=stream)

    with pytest.raises(ConfigError, match=problem):
        run(federation, tmp_path / "run", toys.blobs(), grid=site_grid([]))

    assert not (tmp_path / "run").exists()


def test_explain_leaves_out_what_only_sites_know() -> None:
    federation = prepared(replace(at_task_sites(experiment("fedewc")), measure=("landscape",)))

    one_round = explain.run_estimate(federation)

    lines = dict(one_round.lines())
    assert lines["training data"] == "known to the sites only"
    assert "examples a round" not in lines
    assert lines["engine"] == "flower"
    assert one_round.work.bytes_up > 0
    (cost,) = explain.measure_costs(federation, one_round)
    assert cost.row[-1] == "–"


def test_a_simulation_has_no_tasks_of_sites(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="flower"):
        run(experiment(stream=SITES), tmp_path / "run", toys.blobs())


def test_a_site_must_define_its_tasks(tmp_path: Path) -> None:
    sites = [replace(site, tasks="") for site in task_sites(FINETUNING, tmp_path)]

    with pytest.raises(TooFewReplies, match="tasks = 'folders', or time_column"):
        run_at_sites(FINETUNING, sites, tmp_path / "run")


def test_a_run_without_tasks_refuses_folders_of_tasks(tmp_path: Path) -> None:
    federation = replace(at_task_sites(experiment()), stream={})
    sites = task_sites(FINETUNING, tmp_path)

    with pytest.raises(TooFewReplies, match="stream"):
        run(federation, tmp_path / "run", toys.blobs(), grid=site_grid(sites))
