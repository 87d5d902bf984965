"""The commands, files, configs and Python of the documents are executed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedstill.cli import call
from fedstill.config.experiment import load
from fedstill.config.resolve import resolve
from fedstill.running.journal import read_journal
from journals import journal_events

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r'```(\w+)(?: title="([^"]+)")?\n(.*?)```', re.DOTALL)


class Block(NamedTuple):
    """A block of code on a page: its language, the name of the file if it is one, and the text."""

    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    """The blocks of a page below ``docs/``."""
    matches = BLOCK.findall((ROOT / "docs" / page).read_text())
    return [Block(*match) for match in matches]


def files_on(page: str) -> list[Block]:
    """The blocks that are files."""
    return [block for block in blocks(page) if block.title]


def untitled(page: str, language: str) -> list[str]:
    """The texts of a page's blocks in a language that are not files."""
    return [block.text for block in blocks(page) if block.language == language and not block.title]


def commands_on(page: str) -> list[str]:
    """The commands of a page's consoles, without the prompt."""
    commands = []
    for block in blocks(page):
        if block.language == "console":
            commands += [line.removeprefix("$ ") for line in block.text.splitlines()]
    return commands


def errors_on(page: str) -> list[str]:
    """The errors of commands that a page shows, in their order."""
    return [text for text in untitled(page, "text") if text.startswith("fedstill: ")]


@dataclass(frozen=True)
class Smaller:
    """A setting of a page, and the setting that is tested instead because it takes less time."""

    setting: str
    tested: str

    def apply(self, text: str) -> str:
        """The text with the setting that is tested."""
        return text.replace(self.setting, self.tested)


UNCHANGED = Smaller("", "")


@dataclass(frozen=True)
class Reader:
    """Follows pages in a folder, which is the working directory."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    def journal(self, run: str) -> list[dict[str, Any]]:
        """The journal of a run in the folder."""
        return read_journal(self.folder / run / "journal.jsonl")

    def printed(self) -> str:
        """The standard output since the last call."""
        return self.capsys.readouterr().out

    def write_files(self, page: str, smaller: Smaller) -> None:
        """Write the files of a page, which names them without the folder that they are in."""
        files = files_on(page)
        assert any(smaller.setting in file.text for file in files)
        for file in files:
            (self.folder / file.title).write_text(smaller.apply(file.text))

    def follow(self, page: str, train_size: int = 0, smaller: Smaller = UNCHANGED) -> None:
        """Write the files of a page, and call its commands; the page shows the error of a command
        that fails.

        ``train_size``: how many images the runs of the page train on, with a quarter as many to
        test on; 0 for all.
        """
        self.write_files(page, smaller)
        commands = commands_on(page)
        errors = errors_on(page)
        assert commands
        for command in commands:
            program, *arguments = shlex.split(command)
            assert program == "fedstill"
            if train_size and arguments[0] in ("run", "compare"):
                arguments += ["-s", f"data.train_size={train_size}"]
                arguments += ["-s", f"data.test_size={train_size // 4}"]
            self.capsys.readouterr()
            if call(arguments):
                error = self.capsys.readouterr().err.replace(f"{self.folder}/", "")
                assert error == errors.pop(0), command
        assert not errors, "a command that fails on the page has not failed"

    def passing_tests(self, name: str) -> int:
        """How many tests are in a file that a page shows; all must pass.

        They run in this process, because another one would begin by importing everything.
        """
        counter = PassedTests()
        path = self.folder / name
        options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={self.folder}"]
        assert pytest.main([*options, str(path)], [counter]) == 0
        return counter.count


class PassedTests:
    """Counts the tests that a pytest passes."""

    def __init__(self) -> None:
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.when == "call" and report.passed


@pytest.fixture
def reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Reader:
    """A reader in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return Reader(tmp_path, capsys)


@contextmanager
def importable(folder: Path, module: str) -> Generator[None, None, None]:
    """Python finds the module in this folder, and forgets it in the end."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        del sys.modules[module]


def execute_text(text: str, page: str, namespace: dict[str, Any]) -> None:
    """Execute a block of Python of a page."""
    exec(compile(text, page, "exec"), namespace)


def execute(page: str, smaller: Smaller = UNCHANGED) -> dict[str, Any]:
    """The names that a page's blocks of Python define; the blocks without a title are executed in
    one namespace.
    """
    texts = untitled(page, "python")
    assert any(smaller.setting in text for text in texts)
    namespace: dict[str, Any] = {}
    for text in texts:
        execute_text(smaller.apply(text), page, namespace)
    return namespace


def test_a_beginner_follows_the_start_page(reader: Reader) -> None:
    first, *further = untitled("start.md", "python")
    execute_text(first, "start.md", {})
    reader.follow("start.md", smaller=Smaller("rounds = 20", "rounds = 2"))
    for text in further:
        execute_text(text, "start.md", {})
    assert "calm.py" in reader.printed()
    assert (reader.folder / "tables" / "differences.csv").is_file()


def test_a_method_is_added_as_the_page_says(reader: Reader) -> None:
    reader.follow("add_a_method.md", train_size=400)
    assert (reader.folder / "sweep" / "report.html").is_file()
    assert reader.passing_tests("test_fedgap.py") == 1


def test_a_prototype_method_is_added_as_the_page_says(reader: Reader) -> None:
    reader.follow("add_a_prototype_method.md", train_size=400)
    accuracy = reader.journal("first")[-1]["personal_accuracy"]
    stacked_accuracy = reader.journal("stacked")[-1]["personal_accuracy"]
    assert accuracy == pytest.approx(stacked_accuracy, abs=0.02)
    with importable(reader.folder, "prototypes"):
        assert reader.passing_tests("test_prototypes.py") == 3


def test_a_clustered_method_is_added_as_the_page_says(reader: Reader) -> None:
    smaller = Smaller("rounds = 10", "rounds = 2")
    reader.follow("add_a_clustered_method.md", train_size=400, smaller=smaller)
    last = reader.journal("first")[-1]
    assert set(last["client_predictors"].values()) <= {"cluster 0", "cluster 1"}
    assert last["personal_clients"] == 10
    assert reader.passing_tests("test_ifca.py") == 2


def test_a_server_stage_is_added_as_the_page_says(reader: Reader) -> None:
    smaller = Smaller("rounds = 5", "rounds = 1")
    reader.follow("add_a_server_stage.md", smaller=smaller)
    clients = [event for event in reader.journal("first") if event["event"] == "client"]
    stages = [event["name"] for event in clients]
    assert stages == ["train"] * 5 + ["distil"]
    assert reader.passing_tests("test_distilled.py") == 1


def test_a_model_is_added_as_the_page_says(reader: Reader) -> None:
    path = list(sys.path)
    reader.follow("add_a_model.md", train_size=400)
    assert sys.path == path
    start = reader.journal("first")[0]
    assert sorted(Path(name).name for name in start["sources"]) == ["layers.py", "nets.py"]
    assert reader.passing_tests("test_nets.py") == 2


def test_a_partition_is_added_as_the_page_says(reader: Reader) -> None:
    reader.follow("add_a_partition.md", train_size=400)
    assert "Effect of uneven data" in (reader.folder / "sweep" / "report.html").read_text()
    with importable(reader.folder, "hospitals"):
        assert reader.passing_tests("test_hospitals.py") == 4


def test_a_stream_is_added_as_the_page_says(reader: Reader) -> None:
    reader.follow("tasks.md")
    printed = reader.printed()
    tasks = [task for task in (1, 2, 3, 4) if f"task {task}, rounds" in printed]
    assert tasks == [1, 2, 3]


def test_a_callback_is_added_as_the_page_says(reader: Reader) -> None:
    clients = 'topology={"clients": 6}'
    smaller = Smaller(clients, f'{clients}, data={{"train_size": 900}}')

    execute("add_a_callback.md", smaller)

    *rounds, stop = reader.printed().splitlines()[:6]
    assert [line[:8] for line in rounds] == [f"round {number}:" for number in range(1, 6)]
    assert stop.startswith("stopped after round ")


@pytest.mark.uses("export")
def test_the_best_round_is_kept_as_the_page_says(reader: Reader) -> None:
    reader.follow("keep_the_best_round.md")
    execute("keep_the_best_round.md")
    card = (reader.folder / "best" / "README.md").read_text()
    best = reader.journal("run")[-1]["best_round"]
    assert f"after round {best} of 100" in card


def test_a_metric_is_chosen_as_the_page_says(reader: Reader) -> None:
    reader.follow("choose_a_metric.md")
    execute("choose_a_metric.md")
    text = (reader.folder / "both" / "tables" / "results.csv").read_text()
    assert text.index("margin=4.0") < text.index("margin=0.0")


def test_measures_of_both_kinds_are_added_as_the_page_says(reader: Reader) -> None:
    reader.follow("add_a_measure.md", train_size=400)
    journal = reader.journal("run")
    clients = [event for event in journal if event["event"] == "client" and event["round"] == 4]
    assert len(clients) == 5
    for event in clients:
        assert "sureness" in event
        assert "seconds_sureness.py" in event
    assert reader.passing_tests("test_my_measures.py") == 3


def add_package(page: str, folder: Path) -> int:
    """Write the package that a page shows, and run its tests and its commands in a child process.

    Returns how many tests passed; none may fail.
    """
    for file in files_on(page):
        path = folder / file.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text, encoding="utf-8")

    program = Path(__file__).with_name("with_page_package.py")
    commands = [command.removeprefix("fedstill ") for command in commands_on(page)]
    process = subprocess.run(
        [sys.executable, str(program), str(folder), *commands],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    passed = re.search(r"(\d+) passed", process.stdout)
    assert passed is not None
    return int(passed[1])


def test_an_observer_is_added_as_the_page_says(tmp_path: Path) -> None:
    assert add_package("add_an_observer.md", tmp_path) == 2


@pytest.mark.uses("flower")
def test_a_client_hook_is_added_as_the_page_says(tmp_path: Path) -> None:
    assert add_package("add_a_client_hook.md", tmp_path) == 4
    clients = journal_events(tmp_path / "rounded", event="client")
    errors = [event["rounding_error"] for event in clients]
    assert len(errors) == 8
    assert all(error > 0 for error in errors)


def test_a_data_set_is_added_as_the_page_says(reader: Reader) -> None:
    page = "add_a_data_set.md"
    for file in files_on(page):
        if file.language == "csv":
            (reader.folder / file.title).write_text(file.text)
    for text in untitled(page, "python"):
        execute_text(text, page, {})
    in_memory = reader.journal("runs/hospitals")[0]
    assert in_memory["client_names"] == ["harbour", "hill", "north"]

    reader.follow(page)

    patients, news, waves, stations, tones = [
        reader.journal(f"runs/{run}")[0]
        for run in ("patients", "news", "waves", "stations", "tones")
    ]
    starts = (patients, news, waves, stations, tones)
    kinds = [start["inputs"]["kind"] for start in starts]
    assert kinds == ["table", "text", "series", "table", "series"]
    assert tones["inputs"]["shape"] == [65, 129]
    assert patients["client_names"] == ["harbour", "hill", "north"]
    with importable(reader.folder, "mine"):
        assert reader.passing_tests("test_mine.py") == 2


@pytest.mark.skipif(
    not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))),
    reason="the extra onnx is not installed: pip install 'fedstill[onnx]', as make test does",
)
@pytest.mark.uses("export")
def test_a_model_is_used_as_the_page_says(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    reader.follow("use_the_model.md")
    try:
        execute("use_the_model.md")
    finally:
        sys.modules.pop("model", None)

    printed = reader.printed()
    assert "<Result: fedntd on digits, seed 1: accuracy" in printed
    assert "accuracy, last [%]" in printed


@pytest.mark.uses("attribution", "querying")
def test_the_cause_of_forgetting_is_found_as_the_page_says(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    reader.follow("why.md", train_size=300, smaller=Smaller("rounds = 20", "rounds = 8"))
    looks = reader.folder / "forgets" / "why.jsonl"
    assert looks.is_file(), "the config does not measure round 4"


@pytest.mark.uses("unlearning")
def test_a_hospital_leaves_as_the_tutorial_says(reader: Reader) -> None:
    page = "tutorials/a_hospital_leaves.md"
    execute(page)
    reader.follow(page, smaller=Smaller("rounds = 10", "rounds = 2"))
    retrained = reader.folder / "runs" / "hospitals-without-client2-retraining"
    assert (retrained / "certificate.json").is_file()
    assert 'id="unlearning"' in (reader.folder / "unlearning.html").read_text()


@pytest.mark.uses("unlearning")
@pytest.mark.usefixtures("reader")
def test_a_backdoor_is_planted_as_the_page_says() -> None:
    names = execute("unlearning.md", Smaller("rounds=10", "rounds=2"))
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
def test_runs_are_tracked_as_the_page_says(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    uri = f"sqlite:///{reader.folder / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)

    reader.follow("track.md", train_size=400)

    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("fedstill")
    runs = client.search_runs([experiment.experiment_id])
    assert {tracked.info.run_name for tracked in runs} == {"run", "fedavg, seed 1"}
    for method, seed in product(("fedavg", "fedntd"), (1, 2)):
        run = reader.folder / "both" / method / f"seed{seed}"
        assert (run / "tensorboard").is_dir()

    execute("track.md")
    printed = reader.printed()
    assert "printed seed 1" in printed
    assert printed.endswith("finished\n")


@pytest.mark.parametrize("page", ["../README.md", "start.md"])
def test_the_commands_of_the_front_pages_are_on_runs_of_their_first_config(
    page: str, tmp_path: Path
) -> None:
    path = tmp_path / "my.toml"
    path.write_text(toml_on(page)[0])
    experiment = load(path)
    resolve(experiment)
    method = experiment.table("method")["name"]
    data = experiment.table("data")["name"]

    text = (ROOT / "docs" / page).read_text()
    folders = re.findall(r"runs/\w+-\w+-seed\d+-1", text)
    assert set(folders) <= {f"runs/{method}-{data}-seed{experiment.seed}-1"}


def toml_on(page: str) -> list[str]:
    """The blocks of TOML of a page."""
    return [block.text for block in blocks(page) if block.language == "toml"]


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
    configs = toml_on(page)
    assert configs
    for number, text in enumerate(configs):
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        resolve(load(path))


@pytest.mark.usefixtures("reader")
def test_the_python_shown_runs() -> None:
    """The blocks of this page do not share names."""
    for text in untitled("from_python.md", "python"):
        execute_text(text, "from_python.md", {})
