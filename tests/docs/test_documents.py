"""What the documents show is executed: the walk through a new method, the configs, the examples."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fedstill.cli import call
from fedstill.config.experiment import load
from fedstill.config.resolve import resolve
from fedstill.running.journal import read_journal

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r'```(\w+)(?: title="([^"]+)")?\n(.*?)```', re.DOTALL)


def blocks(page: str) -> list[tuple[str, str, str]]:
    return BLOCK.findall((ROOT / "docs" / page).read_text())


def follow(
    page: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    fewer: int = 0,
    smaller: tuple[str, str] = ("", ""),
) -> None:
    """Write the files that a page shows, and run its commands; one that fails says the error that
    the page shows.

    A page names its files without the folder that they are in. ``fewer``: how many images its runs
    train on, with a quarter as many to test on; 0 for all. ``smaller``: a setting of the page's
    files, and what is tested in its place.
    """
    setting, tested = smaller
    shown = blocks(page)
    assert any(title and setting in text for _, title, text in shown)
    for _, title, text in shown:
        if title:
            (folder / title).write_text(text.replace(setting, tested) if setting else text)
    commands = [
        line[2:] for kind, _, text in shown if kind == "console" for line in text.splitlines()
    ]
    errors = [text for kind, _, text in shown if kind == "text" and text.startswith("fedstill: ")]
    assert commands
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "fedstill"
        if fewer and arguments[0] in ("run", "compare"):
            arguments += ["-s", f"data.train_size={fewer}", "-s", f"data.test_size={fewer // 4}"]
        capsys.readouterr()
        if call(arguments):
            assert capsys.readouterr().err.replace(f"{folder}/", "") == errors.pop(0), command
    assert not errors, "each error that is shown has come"


def execute(
    page: str, space: dict[str, object], apart: bool = False, smaller: tuple[str, str] = ("", "")
) -> None:
    """Execute a page's blocks of Python without a title, in one space, or each in one of its
    own.

    ``smaller``: a setting of the page, and what is tested in its place.
    """
    setting, tested = smaller
    assert setting in (ROOT / "docs" / page).read_text()
    for kind, title, text in blocks(page):
        if kind == "python" and not title:
            code = text.replace(setting, tested) if setting else text
            exec(compile(code, page, "exec"), {} if apart else space)


class Passed:
    """Counts the tests that a pytest passes."""

    def __init__(self) -> None:
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.when == "call" and report.passed


def passing(path: Path) -> int:
    """How many tests of a file that a page shows there are; all must pass.

    In this process: another one would begin by importing everything.
    """
    passed = Passed()
    said = pytest.main(
        ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={path.parent}", str(path)],
        [passed],
    )
    assert said == 0
    return passed.count


def test_a_beginner_follows_the_start_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first, *others = [
        text for kind, title, text in blocks("start.md") if kind == "python" and not title
    ]
    exec(compile(first, "start.md", "exec"), {})
    follow("start.md", tmp_path, capsys, smaller=("rounds = 20", "rounds = 2"))
    for text in others:
        exec(compile(text, "start.md", "exec"), {})
    assert "calm.py" in capsys.readouterr().out
    assert (tmp_path / "tables" / "differences.csv").is_file()


def test_a_method_is_added_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    follow("add_a_method.md", tmp_path, capsys, fewer=400)
    assert (tmp_path / "sweep" / "report.html").is_file()
    assert passing(tmp_path / "test_fedgap.py") == 1


def test_a_prototype_method_is_added_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    follow("add_a_prototype_method.md", tmp_path, capsys, fewer=400)
    models = [read_journal(tmp_path / run / "journal.jsonl")[-1] for run in ("first", "stacked")]
    assert models[0]["personal_accuracy"] == pytest.approx(models[1]["personal_accuracy"], abs=0.02)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert passing(tmp_path / "test_prototypes.py") == 3
    del sys.modules["prototypes"]


def test_a_clustered_method_is_added_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    smaller = ("rounds = 10", "rounds = 2")
    follow("add_a_clustered_method.md", tmp_path, capsys, fewer=400, smaller=smaller)
    last = read_journal(tmp_path / "first" / "journal.jsonl")[-1]
    assert set(last["client_predictors"].values()) <= {"cluster 0", "cluster 1"}
    assert last["personal_clients"] == 10
    assert passing(tmp_path / "test_ifca.py") == 2


def test_a_server_stage_is_added_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    smaller = ("rounds = 5", "rounds = 1")
    follow("add_a_server_stage.md", tmp_path, capsys, smaller=smaller)
    events = read_journal(tmp_path / "first" / "journal.jsonl")
    stages = [e["name"] for e in events if e["event"] == "client"]
    assert stages == ["train"] * 5 + ["distil"]
    assert passing(tmp_path / "test_distilled.py") == 1


def test_a_model_is_added_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    follow("add_a_model.md", tmp_path, capsys, fewer=400)
    assert sys.path == path
    start = read_journal(tmp_path / "first" / "journal.jsonl")[0]
    assert sorted(Path(name).name for name in start["sources"]) == ["layers.py", "nets.py"]
    assert passing(tmp_path / "test_nets.py") == 2


def test_a_partition_is_added_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    follow("add_a_partition.md", tmp_path, capsys, fewer=400)
    assert "Effect of uneven data" in (tmp_path / "sweep" / "report.html").read_text()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert passing(tmp_path / "test_hospitals.py") == 4
    del sys.modules["hospitals"]


def test_a_stream_is_added_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    follow("tasks.md", tmp_path, capsys)
    drawn = capsys.readouterr().out
    assert [f"task {t}, rounds" in drawn for t in (1, 2, 3, 4)] == [True, True, True, False]


def test_a_callback_is_added_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    clients = 'topology={"clients": 6}'
    execute("add_a_callback.md", {}, smaller=(clients, f'{clients}, data={{"train_size": 900}}'))
    said = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in said[:5]] == [f"round {i}:" for i in range(1, 6)]
    assert said[5].startswith("stopped after round ")


@pytest.mark.uses("export")
def test_the_best_round_is_kept_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    follow("keep_the_best_round.md", tmp_path, capsys)
    execute("keep_the_best_round.md", {})
    card = (tmp_path / "best" / "README.md").read_text()
    best = read_journal(tmp_path / "run" / "journal.jsonl")[-1]["best_round"]
    assert f"after round {best} of 100" in card


def test_a_metric_is_chosen_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    follow("choose_a_metric.md", tmp_path, capsys)
    execute("choose_a_metric.md", {})
    text = (tmp_path / "both" / "tables" / "results.csv").read_text()
    assert text.index("margin=4.0") < text.index("margin=0.0")


def test_measures_of_both_kinds_are_added_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    follow("add_a_measure.md", tmp_path, capsys, fewer=400)
    clients = [
        e
        for e in read_journal(tmp_path / "run" / "journal.jsonl")
        if e["event"] == "client" and e["round"] == 4
    ]
    assert len(clients) == 5
    assert all("sureness" in e and "seconds_sureness.py" in e for e in clients)
    assert passing(tmp_path / "test_my_measures.py") == 3


def add_package(page: str, folder: Path) -> int:
    """Write the package that a page shows, and run its tests and its commands in a child process.

    Returns how many tests passed; none may fail.
    """
    commands = []
    for kind, title, text in blocks(page):
        if kind == "console":
            commands += [line.removeprefix("$ fedstill ") for line in text.splitlines()]
        elif title:
            path = folder / title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    program = Path(__file__).with_name("with_page_package.py")
    done = subprocess.run(
        [sys.executable, str(program), str(folder), *commands],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    return int(passed[1])


def test_an_observer_is_added_as_the_page_says(tmp_path: Path) -> None:
    assert add_package("add_an_observer.md", tmp_path) == 2


@pytest.mark.uses("flower")
def test_a_client_hook_is_added_as_the_page_says(tmp_path: Path) -> None:
    assert add_package("add_a_client_hook.md", tmp_path) == 4
    events = read_journal(tmp_path / "rounded" / "journal.jsonl")
    errors = [event["rounding_error"] for event in events if event["event"] == "client"]
    assert len(errors) == 8
    assert all(error > 0 for error in errors)


def test_a_data_set_is_added_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, title, text in blocks("add_a_data_set.md"):
        if kind == "csv":
            (tmp_path / title).write_text(text)
        if kind == "python" and not title:
            exec(compile(text, "add_a_data_set.md", "exec"), {})
    in_memory = read_journal(tmp_path / "runs" / "hospitals" / "journal.jsonl")[0]
    assert in_memory["client_names"] == ["harbour", "hill", "north"]
    follow("add_a_data_set.md", tmp_path, capsys)
    starts = [
        read_journal(tmp_path / "runs" / run / "journal.jsonl")[0]
        for run in ("patients", "news", "waves", "stations", "tones")
    ]
    assert [start["inputs"]["kind"] for start in starts] == [
        "table",
        "text",
        "series",
        "table",
        "series",
    ]
    assert starts[4]["inputs"]["shape"] == [65, 129]
    assert starts[0]["client_names"] == ["harbour", "hill", "north"]
    monkeypatch.syspath_prepend(str(tmp_path))
    assert passing(tmp_path / "test_mine.py") == 2
    del sys.modules["mine"]


@pytest.mark.skipif(
    not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))),
    reason="the extra onnx is not installed: pip install 'fedstill[onnx]', as make test does",
)
@pytest.mark.uses("export")
def test_a_model_is_used_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    follow("use_the_model.md", tmp_path, capsys)
    space: dict[str, object] = {}
    try:
        execute("use_the_model.md", space)
    finally:
        sys.modules.pop("model", None)
    said = capsys.readouterr().out
    assert "<Result: fedntd on digits, seed 1: accuracy" in said
    assert "accuracy, last [%]" in said


@pytest.mark.uses("attribution", "querying")
def test_who_made_the_model_forget_is_asked_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    follow("why.md", tmp_path, capsys, fewer=300, smaller=("rounds = 20", "rounds = 8"))
    assert (tmp_path / "forgets" / "why.jsonl").is_file(), (
        "round 4 is not one that the config measures"
    )


@pytest.mark.uses("unlearning")
def test_a_hospital_leaves_as_the_tutorial_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = "tutorials/a_hospital_leaves.md"
    execute(page, {})
    follow(page, tmp_path, capsys, smaller=("rounds = 10", "rounds = 2"))
    new = tmp_path / "runs" / "hospitals-without-client2-retraining"
    assert (new / "certificate.json").is_file()
    assert 'id="unlearning"' in (tmp_path / "unlearning.html").read_text()


@pytest.mark.uses("unlearning")
def test_a_backdoor_is_planted_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    execute("unlearning.md", names, smaller=("rounds=10", "rounds=2"))
    planted_labels = names["planted"].train.labels[:100]
    assert set(planted_labels.tolist()) == {0}
    assert set(names["result"].certificate["measurements"]["backdoor"]) == {"original", "unlearned"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    not all(map(find_spec, ("tensorboard", "mlflow"))),
    reason="the extras tensorboard and mlflow are not installed: pip install "
    "'fedstill[tensorboard,mlflow]'",
)
@pytest.mark.slow
def test_runs_are_tracked_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri := f"sqlite:///{tmp_path / 'mlflow.db'}")
    follow("track.md", tmp_path, capsys, fewer=400)
    there = mlflow.MlflowClient(tracking_uri=uri)
    runs = there.search_runs([there.get_experiment_by_name("fedstill").experiment_id])
    assert {r.info.run_name for r in runs} == {"run", "fedavg, seed 1"}
    assert all(
        (tmp_path / "both" / m / f"seed{s}" / "tensorboard").is_dir()
        for m in ("fedavg", "fedntd")
        for s in (1, 2)
    )
    execute("track.md", {})
    said = capsys.readouterr().out
    assert "printed seed 1" in said
    assert said.endswith("finished\n")


@pytest.mark.parametrize("page", ["../README.md", "start.md"])
def test_the_first_config_of_the_front_pages_is_the_one_that_their_commands_take(
    page: str, tmp_path: Path
) -> None:
    text = next(text for kind, _, text in blocks(page) if kind == "toml")
    (tmp_path / "my.toml").write_text(text)
    what = load(tmp_path / "my.toml")
    resolve(what)
    named = re.findall(r"runs/(\w+)-(\w+)-seed(\d+)-1", (ROOT / "docs" / page).read_text())
    assert set(named) <= {
        (what.table("method")["name"], what.table("data")["name"], str(what.seed))
    }


WITH_CONFIGS = (
    "configuration.md",
    "hostile_clients.md",
    "learning_rates.md",
    "networks_that_differ.md",
    "queries.md",
    "your_own_data.md",
)
"""The pages whose blocks of TOML are whole configs, or parts of one."""


@pytest.mark.parametrize("page", WITH_CONFIGS)
def test_the_configs_shown_resolve(page: str, tmp_path: Path) -> None:
    shown = [text for kind, _, text in blocks(page) if kind == "toml"]
    assert shown
    for i, text in enumerate(shown):
        path = tmp_path / f"{i}.toml"
        path.write_text(text)
        resolve(load(path))


def test_the_python_shown_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    execute("from_python.md", {}, apart=True)
