"""The numbers of runs in one frame: each is a number of the journal, with the round, stage, client
and class that it is about.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import fedstill
import toys
from fedstill import manifest
from fedstill.core.errors import ConfigError, UnknownName
from fedstill.measures import list_forms
from fedstill.measures.features import STEPS
from fedstill.metrics.membership import GRID, RATES
from fedstill.running.journal import read_journal
from fedstill.running.numbers import Look, RunNumbers
from fedstill.running.packs import pack
from fedstill.running.runner import run
from fedstill.running.runs import read_run
from run_bits import stopped

COLUMNS = [
    "run",
    "group",
    "seed",
    "stage",
    "round",
    "epoch",
    "task",
    "client",
    "class",
    "point",
    "metric",
    "value",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, one of them with two seeds and a measure."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        experiment = toys.toy(seed=seed, measure=["divergence", "epochs"])
        run(experiment, folder / f"avg{seed}", toys.blobs())
    run(toys.toy("fedntd", seed=1), folder / "ntd", toys.blobs())
    return folder


def chosen(frame: pandas.DataFrame, name: str, metric: str) -> pandas.DataFrame:
    """The rows of a metric of the run in a folder of this name."""
    return frame[frame["run"].str.endswith(name) & (frame["metric"] == metric)]


def test_the_frame_has_a_row_for_each_number_of_the_journal(runs: Path) -> None:
    frame = fedstill.load_runs(runs)
    assert list(frame.columns) == COLUMNS
    assert {str(frame[name].dtype) for name in ("run", "group", "class", "metric")} == {"category"}
    assert len(set(frame["group"])) == 2

    events = read_journal(runs / "avg2/journal.jsonl")
    rounds = [event for event in events if event["event"] == "round"]
    accuracy = chosen(frame, "avg2", "accuracy")
    assert set(accuracy["seed"]) == {2}
    after_training = accuracy[accuracy["round"] > 0]
    assert list(after_training["value"]) == [event["accuracy"] for event in rounds]
    assert accuracy[["stage", "client", "class", "task", "epoch"]].isna().all(axis=None)

    by_class = chosen(frame, "avg2", "class_accuracy")
    last = by_class[by_class["round"] == rounds[-1]["round"]]
    assert list(last["value"]) == rounds[-1]["class_accuracy"]
    assert list(last["class"]) == events[0]["classes"]


def test_a_client_has_rows_of_its_own_and_the_round_the_mean_over_clients(runs: Path) -> None:
    frame = fedstill.load_runs(runs / "ntd", metrics=["loss", "examples"])
    clients = [e for e in read_journal(runs / "ntd/journal.jsonl") if e["event"] == "client"]
    for term in ("ce", "not_true"):
        rows = chosen(frame, "ntd", f"loss/{term}")
        of_clients = rows[rows["client"].notna()]
        assert list(of_clients["value"]) == [event["loss"][term] for event in clients]
        assert list(of_clients["client"]) == [event["client"] for event in clients]
        assert list(of_clients["stage"]) == [event["stage"] for event in clients]
        of_round = rows[rows["client"].isna()].set_index("round")["value"]
        first = [event for event in clients if event["round"] == 1]
        mean = np.average(
            [event["loss"][term] for event in first],
            weights=[event["examples"] for event in first],
        )
        assert of_round[1] == pytest.approx(mean, rel=1e-12)


def test_measures_epochs_and_a_whole_run_have_rows(runs: Path) -> None:
    frame = fedstill.load_runs(runs)
    events = read_journal(runs / "avg1/journal.jsonl")
    rounds = [event for event in events if event["event"] == "round"]
    looks = [event for event in events if event.get("measure") == "divergence"]
    divergences = chosen(frame, "avg1", "divergence/mean_l2")
    after_stages = divergences[divergences["stage"].notna()]
    assert list(after_stages["value"]) == [look["mean_l2"] for look in looks]

    (stage,) = rounds[-1]["by_epoch"]
    by_epoch = chosen(frame, "avg1", f"by_epoch/{stage}/in_local_accuracy")
    last = by_epoch[by_epoch["round"] == rounds[-1]["round"]]
    assert list(last["value"]) == rounds[-1]["by_epoch"][stage]["in_local_accuracy"]
    assert list(last["epoch"]) == list(range(len(last)))

    (best,) = chosen(frame, "avg1", "summary/best_accuracy").to_dict("records")
    assert best["value"] == max(event["accuracy"] for event in rounds)
    assert pandas.isna(best["round"])
    (bytes_up,) = chosen(frame, "avg1", "summary/bytes_up")["value"]
    assert bytes_up == sum(event["bytes_up"] for event in rounds)


def test_numbers_by_client_leave_out_clients_without_one() -> None:
    events = [
        {"event": "round", "round": 2, "own_test_by_client": {"3": 0.5, "0": None}},
        {"event": "round", "round": 4, "own_test_by_client": {"0": 1.0}},
    ]
    assert RunNumbers.of(events).by_client("own_test_by_client") == {2: {3: 0.5}, 4: {0: 1.0}}


def test_numbers_by_epoch_are_those_of_the_journal(runs: Path) -> None:
    numbers = read_run(runs / "avg1").numbers.by_epoch()
    events = [e for e in read_journal(runs / "avg1/journal.jsonl") if "by_epoch" in e]
    assert [of_epoch.round for of_epoch in numbers] == [event["round"] for event in events]
    for of_epoch, event in zip(numbers, events, strict=True):
        assert event["by_epoch"][of_epoch.stage].items() >= of_epoch.by_key.items()
        assert "in_local_accuracy" in of_epoch.by_key


def look_of(measure: str, **fields: Any) -> Look:
    """The look of a measure with these fields, in a run of three classes."""
    event = {"event": "measure", "measure": measure, "round": 2, "stage": 1, **fields}
    (look,) = RunNumbers.of([event], classes=3).looks(measure)
    return look


def test_lists_of_a_measure_are_about_clients_and_classes() -> None:
    look = look_of(
        "contributions",
        clients=[4, 1],
        before=[0.5, None, 0.25],
        parts={"averaging": [0.0, None, -0.5]},
        classes=[2, 0],
        values=[[0.1, -0.2], [0.3, None]],
        gap=[0.01, [0.02, 0.03]],
        game="idle",
    )

    assert look.by_class("before") == [0.5, None, 0.25]
    assert look.number_of_class("parts/averaging", 2) == -0.5
    assert look.of_class("values", 2) == {4: 0.1, 1: -0.2}
    assert look.of_client("values", 1) == {2: -0.2}
    assert look.number_of_class("gap", 2) == 0.01
    assert look.of_class("gap", 0) == {4: 0.02, 1: 0.03}
    assert look.texts["game"] == "idle"
    assert look.clients == [4, 1]


def test_curves_and_matrices_of_a_measure_have_points() -> None:
    look = look_of("units", models=["received", "client 3"], classes=[[0, 2], [1, 1]])
    assert look.names("classes") == ["received", "client 3"]
    assert look.points("classes/client 3") == [1, 1]

    of_user = look_of("mine.py", curve=[1.0, None, 3.0], matrix=[[1, 2], [3, 4]], names=["a", "b"])
    assert of_user.points("curve") == [1.0, None, 3.0]
    assert of_user.points("curve", length=5) == [1.0, None, 3.0, None, None]
    assert of_user.rows("matrix") == [[1, 2], [3, 4]]
    assert of_user.number("curve") is None
    assert of_user.texts["names"] == ["a", "b"]


def test_lists_of_a_measure_are_in_the_frame_and_not_in_the_summary(runs: Path) -> None:
    frame = fedstill.load_runs(runs / "avg1", metrics=["divergence/l2", "summary"])
    looks = [
        e for e in read_journal(runs / "avg1/journal.jsonl") if e.get("measure") == "divergence"
    ]
    by_client = frame[frame["metric"] == "divergence/l2"]

    assert list(by_client["value"]) == [value for look in looks for value in look["l2"]]
    assert list(by_client["client"]) == [client for look in looks for client in look["clients"]]
    assert by_client["point"].isna().all()
    assert "summary/divergence/mean_l2" in set(frame["metric"])
    assert "summary/divergence/l2" not in set(frame["metric"])


def test_teachers_and_queried_classes_are_counted() -> None:
    event = {"event": "client", "round": 1, "stage": 0, "name": "train", "client": 2}
    with_two_teachers = event | {"teachers": [3, "server"]}
    with_queries = event | {"teachers": [], "query": [1, 4]}
    numbers = RunNumbers.of([with_two_teachers, with_queries], classes=5)
    assert [report.values for report in numbers.client_reports("teachers")] == [[2.0], [0.0]]
    assert [report.values for report in numbers.client_reports("query")] == [[2.0]]


@pytest.mark.uses("privacy")
def test_the_forms_of_lists_have_the_sizes_that_measures_write() -> None:
    forms = manifest.list_forms()["leakage"]
    assert forms["*/*/roc"].axes == (len(GRID),)
    assert {f"*/*/tpr_at_{rate}" for rate in RATES} <= forms.keys()
    assert list_forms("boundaries")["plane"].axes == (STEPS, STEPS)


def test_only_the_metrics_that_are_asked_for_are_loaded(runs: Path) -> None:
    all_rows = fedstill.load_runs(runs)
    frame = fedstill.load_runs([runs / "avg1", runs / "ntd"], metrics=["accuracy", "loss"])
    assert set(frame["metric"]) == {"accuracy", "loss/ce", "loss/not_true"}

    same = all_rows[all_rows["metric"].isin(list(frame["metric"].cat.categories))]
    assert len(same[~same["run"].str.endswith("avg2")]) == len(frame)
    assert set(fedstill.load_runs(runs, "forgetting")["metric"]) == {"forgetting"}
    generated = fedstill.load_runs(runs, iter(["accuracy", "forgetting"]))  # type: ignore[arg-type]
    assert generated.equals(fedstill.load_runs(runs, ["accuracy", "forgetting"]))
    with pytest.raises(UnknownName, match="acuracy"):
        fedstill.load_runs(runs, ["acuracy"])
    with pytest.raises(ConfigError, match="nowhere"):
        fedstill.load_runs(runs / "nowhere")


def test_stopped_and_packed_runs_have_the_same_rows(tmp_path: Path) -> None:
    stopped(toys.toy(), tmp_path / "runs/half", 2)
    unpacked = fedstill.load_runs(tmp_path / "runs")
    assert set(unpacked[unpacked["metric"] == "accuracy"]["round"]) == {0, 1}

    pack(tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs")
    packed = fedstill.load_runs(tmp_path / "runs.runs.tar.xz")

    pandas.testing.assert_frame_equal(unpacked, packed)


def test_numbers_of_a_client_and_unknown_fields_are_metrics(tmp_path: Path) -> None:
    result = run(toys.toy(), tmp_path / "run", toys.blobs())
    journal = result.directory / "journal.jsonl"
    (result.directory / "summary.json").unlink()
    shutil.rmtree(result.directory / "checkpoints")
    lines = journal.read_text().splitlines()
    further = '"auc":0.75,"auc_by_client":{"0":0.5,"3":1.0},"named":{"deep":{"er":2}},"text":"no"'
    lines = [line.replace('"accuracy":', f'{further},"accuracy":') for line in lines]
    journal.write_text("\n".join(lines) + "\n")
    frame = fedstill.load_runs(result.directory)
    rounds = frame[frame["round"] == 2]

    assert list(rounds[rounds["metric"] == "auc"]["value"]) == [0.75]

    by_client = rounds[rounds["metric"] == "auc_by_client"]
    assert dict(zip(by_client["client"], by_client["value"], strict=True)) == {0: 0.5, 3: 1.0}
    assert list(rounds[rounds["metric"] == "named/deep/er"]["value"]) == [2.0]
    assert "text" not in set(frame["metric"])


def test_pandas_is_not_imported_by_commands_that_do_not_need_it() -> None:
    code = (
        "import sys, fedstill; from fedstill.cli import call; call(['--help']); "
        "fedstill.run, fedstill.load_runs; sys.exit('pandas' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert process.returncode == 0, process.stderr


def test_loading_does_not_import_torch(runs: Path) -> None:
    program = (
        "import sys, fedstill\n"
        "frame = fedstill.load_runs(sys.argv[1])\n"
        "print(len(frame) > 0, 'torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(runs)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert output.split() == ["True", "False"]


def test_numbers_of_users_measures_are_not_summed() -> None:
    start = {"event": "start", "classes": ["a"]}
    rounds = [
        {"event": "round", "round": number, "refused_share": 0.5, "refused": 1} for number in (1, 2)
    ]

    summary = RunNumbers.of([start, *rounds]).summary

    assert summary["refused_share"] == 0.5
    assert summary["refused"] == 2
