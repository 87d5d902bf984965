"""Why the accuracy of a class fell: its changes, replayed rounds, rounds without a client, and the
answers of the command.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from announcements import no_announcement

import fedstill
import toys
from fedstill.attribution.class_changes import (
    ClassChange,
    attribute,
    class_changes,
    find_changes,
    of_global_model,
)
from fedstill.attribution.replays import accuracies_by_round, measure_round
from fedstill.cli import call
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.records import Stage
from fedstill.core.rounds import unchanged
from fedstill.measures.contributions import Contributions
from fedstill.running.journal import LATER_LOOKS, add_looks, with_later_looks
from fedstill.running.numbers import Look, RunNumbers
from fedstill.running.replay import Replay, Without
from fedstill.running.runs import read_run
from journals import journal_events

CONFIG = """
rounds = 6
measure = {measure}
measure_every = 3
keep_checkpoints_every = 2
method = "{method}"
plan = {{ epochs = 2, batch = 20, lr = 0.05 }}
[data]
name = "digits"
train_size = 200
test_size = 100
[partition]
alpha = 0.1
min_size = 2
[topology]
clients = 6
sampled = 3
"""

TASKS_CONFIG = """
rounds = 6
measure = ["contributions"]
measure_every = 1
keep_checkpoints_every = 6
method = "fedavg"
model = { name = "mlp", hidden = [32] }
plan = { epochs = 8, batch = 20, lr = 0.05 }
[data]
name = "digits"
train_size = 200
test_size = 100
[partition]
alpha = 5.0
min_size = 2
[topology]
clients = 6
sampled = 3
[stream]
tasks = 2
kind = "classes"
order = "given"
"""


def trained(folder: Path, config: str) -> Path:
    """The directory of a run with this config."""
    path = folder / "my.toml"
    path.write_text(config)
    fedstill.run(fedstill.load(path), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that measured contributions in rounds 3 and 6; tests do not change it."""
    config = CONFIG.format(method="fedavg", measure='["contributions"]')
    return trained(tmp_path_factory.mktemp("why"), config)


@pytest.fixture
def run_copy(run: Path, tmp_path: Path) -> Path:
    """A copy of this run, to which the command may add results."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def accuracies_of(folder: Path) -> dict[int, list[float | None]]:
    """The accuracy of each class of a run, by round."""
    rounds = journal_events(folder, event="round")
    return {event["round"]: event["class_accuracy"] for event in rounds}


def contributions_of(folder: Path) -> list[dict[str, Any]]:
    """The events of the measure ``contributions`` of a run, with those added later."""
    measured = journal_events(folder, measure="contributions")
    return with_later_looks(folder, measured, classes=0)


def looks_in(fields: list[dict[str, Any]]) -> list[Look]:
    """Looks of the measure ``contributions`` with these fields."""
    measured = [{"event": "measure", "measure": "contributions", **look} for look in fields]
    return RunNumbers.of(measured, classes=2).looks("contributions")


def test_changes_are_in_order_of_the_fall_and_those_of_the_initial_model_come_last() -> None:
    journal: list[dict[str, Any]] = [
        {"event": "initial", "class_accuracy": [1.0, 0.0, None]},
        {"event": "round", "round": 1, "class_accuracy": [0.0, 0.8, None]},
        {"event": "client", "round": 2},
        {"event": "round", "round": 2, "class_accuracy": [0.5, 0.2, None]},
    ]
    changes = class_changes(RunNumbers.of(journal, classes=3))
    assert [(change.round, change.label) for change in changes] == [(2, 1), (2, 0), (1, 0), (1, 1)]
    assert changes[0].change == pytest.approx(-0.6)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn", "fedadkd"])
def test_replayed_rounds_have_the_same_bits(method: str, tmp_path: Path) -> None:
    folder = trained(tmp_path, CONFIG.format(method=method, measure="[]"))
    accuracies = accuracies_of(folder)

    replay = Replay.of_round(folder, 5)
    assert replay.start == 5
    replayed = accuracies_by_round(replay, 5, 6, unchanged, no_announcement)
    assert replayed == {5: accuracies[5], 6: accuracies[6]}

    shutil.rmtree(folder / "checkpoints")
    replay = Replay.of_round(folder, 5)
    assert replay.start == 1
    assert accuracies_by_round(replay, 1, 6, unchanged, no_announcement) == accuracies


def test_a_replayed_round_has_the_contributions_that_the_run_measured(run: Path) -> None:
    (measured,) = [event for event in contributions_of(run) if event["round"] == 3]
    replay = Replay.of_round(run, 3)
    (replayed,) = measure_round(replay, 3, Contributions(), no_announcement)
    for key in ("clients", "before", "after", "parts", "classes", "values", "gap"):
        assert replayed[key] == measured[key], key


def clients(stages: Sequence[Stage]) -> list[tuple[int, ...]]:
    """The clients of each stage."""
    return [stage.clients for stage in stages]


def test_a_client_is_left_out_of_some_rounds_or_of_all_from_a_round_on() -> None:
    stages = [Stage(4, 0, "train", (1, 2)), Stage(4, 1, "more", (2,))]
    client = frozenset({2})
    absent_client = frozenset({7})
    all_clients = frozenset({1, 2})

    assert Without(client, first=5)(stages) == stages
    assert Without(client, first=3, last=3)(stages) == stages
    assert Without(absent_client)(stages) == stages
    assert clients(Without(client, first=4)(stages)) == [(1,)]
    assert clients(Without(all_clients, first=4, last=4)(stages)) == []


def test_leaving_out_a_client_changes_only_later_rounds(run: Path) -> None:
    accuracies = accuracies_of(run)
    (measured,) = [event for event in contributions_of(run) if event["round"] == 3]
    client = frozenset(measured["clients"][:1])
    replay = Replay.of_round(run, 3)

    absent_later = accuracies_by_round(replay, 3, 3, Without(client, 4), no_announcement)
    assert absent_later == {3: accuracies[3]}
    absent = accuracies_by_round(replay, 3, 3, Without(client, 3), no_announcement)
    assert absent[3] != accuracies[3]


def test_contributions_added_later_replace_those_of_the_journal(run_copy: Path) -> None:
    third = contributions_of(run_copy)[0]
    assert third["round"] == 3
    fields = ("event", "measure", "stage", "before", "after")
    second = {field: third[field] for field in fields}
    second.update(round=2, clients=[])

    add_looks(run_copy, [{**third, "game": "absent"}, {**second, "parts": {}}])
    add_looks(run_copy, [{**second, "parts": {"later": []}}])

    games = [(event["round"], event.get("game")) for event in contributions_of(run_copy)]
    assert games == [(2, None), (3, "absent"), (6, "idle")]
    (run_copy / LATER_LOOKS).write_text("{")
    with pytest.raises(CorruptFile, match=r"why\.jsonl"):
        contributions_of(run_copy)


def test_an_attribution_sums_over_the_stages_of_a_round() -> None:
    links = [
        {"round": 4, "stage": 0, "parts": {"client 0": [0.0, -0.25]}},
        {"round": 4, "stage": 1, "parts": {"client 1": [0.0, -0.25]}},
    ]
    attribution = attribute(ClassChange(4, 1, 0.9, 0.4), looks_in(links))
    assert attribution is not None
    assert dict(attribution.parts) == {"client 0": -0.25, "client 1": -0.25}
    assert dict(attribution.clients) == {}
    assert attribute(ClassChange(5, 1, 0.9, 0.4), looks_in(links)) is None


def test_a_class_whose_values_were_not_computed_has_no_attribution() -> None:
    look = {
        "round": 4,
        "stage": 0,
        "parts": {"averaging": [0, -0.5]},
        "game": "idle",
        "classes": [0],
        "clients": [3],
        "values": [[0.1]],
    }
    assert attribute(ClassChange(4, 1, 0.9, 0.4), looks_in([look])) is None


def test_a_change_of_the_global_model_has_no_part_of_the_clients_own_models(
    tmp_path: Path,
) -> None:
    values = {**toys.suited("ditto"), "measure": ("contributions",)}
    fedstill.run(toys.toy("ditto", **values), tmp_path / "run", data=toys.blobs())
    measured = [event for event in contributions_of(tmp_path / "run") if event["name"] == "train"]
    parts_by_round = {event["round"]: event["parts"] for event in measured}

    looks = read_run(tmp_path / "run").numbers.looks("contributions")

    models = {(look.texts["name"], look.texts["model"]) for look in looks}
    assert models == {("personal", "own"), ("train", "global")}
    for look in of_global_model(looks):
        assert look.texts["name"] == "train"
        assert look.classes
        for label in look.classes:
            attribution = attribute(ClassChange(look.round, label, 0.0, 0.0), looks)
            assert attribution is not None
            parts = parts_by_round[look.round]
            parts_of_class = {name: part[label] for name, part in parts.items()}
            assert dict(attribution.parts) == parts_of_class


def test_without_a_global_model_the_stages_of_the_same_clients_are_attributed() -> None:
    """The last stage has further clients, and is no part of the change."""
    looks: list[dict[str, Any]] = [
        {"stage": 0, "clients": [0, 3], "parts": {"head": [0.25]}},
        {"stage": 1, "clients": [0, 3], "parts": {"train": [0.25]}},
        {"stage": 2, "clients": [0, 1, 2, 3], "parts": {"finetune": [0.25]}},
    ]
    for look in looks:
        look.update(round=2, model="own")

    attribution = attribute(ClassChange(2, 0, 0.0, 0.5), looks_in(looks))

    assert attribution is not None
    assert dict(attribution.parts) == {"head": 0.25, "train": 0.25}


WhyCommand = Callable[..., Any]
"""``fedstill why`` with some arguments: the captured output, ``out`` and ``err``."""


@pytest.fixture
def ask(
    run_copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> WhyCommand:
    """``fedstill why`` on a copy of the run, in a wide terminal."""
    monkeypatch.setenv("COLUMNS", "300")

    def command(*arguments: str) -> Any:
        assert call(["why", str(run_copy), *arguments]) == 0
        return capsys.readouterr()

    return command


def test_the_command_prints_a_sentence_and_a_table_and_keeps_replayed_rounds(
    ask: WhyCommand, run_copy: Path
) -> None:
    largest_fall = find_changes(run_copy, None, None)[0]

    printed = ask()
    assert f"Class '{largest_fall.label}' fell from" in printed.out
    assert "local training" in printed.out
    assert "averaging" in printed.out
    assert "contribution [points]" in printed.out
    is_measured = largest_fall.round in (3, 6)
    assert ("replaying" in printed.err) != is_measured

    assert "replaying" not in ask().err, "the results are kept beside the journal"
    assert ask("--worst", "3", "-q").out.count("Class ") == 3


def test_the_command_computes_contributions_in_the_way_of_its_options(
    ask: WhyCommand, run_copy: Path
) -> None:
    question = ("--class", "3", "--round", "6", "--quiet")
    assert "Shapley values, all coalitions" in ask(*question, "--exact").out

    absent = ask(*question, "--game", "absent").out
    assert "did not reply" in " ".join(absent.split()), absent
    recorded = contributions_of(run_copy)
    assert {look["game"] for look in recorded} == {"idle"}
    assert {look.get("rule", "path") for look in recorded} == {"path"}
    assert "Aumann-Shapley values" in ask(*question).out


def test_the_command_prints_the_accuracies_without_a_client(
    ask: WhyCommand, run_copy: Path
) -> None:
    client = str(contributions_of(run_copy)[-1]["clients"][0])
    printed = ask("--without", client, "--from", "5", "--class", "3", "-q").out
    assert f"Class '3' without client {client} from round 5 on" in printed
    assert printed.count(" %") == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--class", "12"], "the run has classes 0 to 9"),
        (["--class", "twelve"], "twelve"),
        (["--round", "7"], "it has rounds 1 to 6"),
        (["--round", "0"], "--round"),
        (["--round", "last"], "--round"),
        (["--round", "best"], "select_on"),
        (["--without", "6"], "the run has clients 0 to 5"),
        (["--without", "1", "--from", "7"], "the run has rounds 1 to 6"),
        (["--client", "1", "--class", "3"], "--class"),
        (["--client", "1", "--exact"], "--exact"),
        (["--without", "1", "--worst", "3"], "--worst"),
        (["--without", "1", "--draws", "3"], "--draws"),
        (["--draws", "3", "--game", "absent"], "--game"),
        (["--from", "3"], "--from"),
    ],
)
def test_an_impossible_question_is_refused_in_one_line(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["why", str(run), *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_the_best_round_can_be_named_in_a_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = toys.toy(rounds=3, data="digits", model="logistic", select_on="test")
    folder = tmp_path / "run"
    best = fedstill.run(experiment, folder).summary["best_round"]
    capsys.readouterr()

    assert call(["why", str(folder), "--round", "best", "-q"]) == 0
    by_name = capsys.readouterr().out
    assert call(["why", str(folder), "--round", str(best), "-q"]) == 0
    by_number = capsys.readouterr().out

    assert by_name == by_number
    assert f"round {best}" in by_name.lower()


def test_all_coalitions_of_more_than_ten_clients_are_refused_before_a_round_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = {"clients": 11, "sampled": 11}
    experiment = toys.toy(rounds=2, topology=topology, data="digits", model="logistic")
    fedstill.run(experiment, tmp_path / "run")
    capsys.readouterr()

    assert call(["why", str(tmp_path / "run"), "--round", "2", "--exact"]) == 2
    err = capsys.readouterr().err
    assert "--exact: round 2 has 11 clients" in err
    assert err.count("\n") == 1


def test_a_folder_without_a_run_and_a_run_without_a_global_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["why", str(tmp_path)]) == 2
    assert "contains no run" in capsys.readouterr().err

    experiment = toys.toy("local_only", **toys.suited("local_only"))
    fedstill.run(experiment, tmp_path / "run", data=toys.blobs())
    with pytest.raises(ConfigError, match="global model"):
        find_changes(tmp_path / "run", None, None)


@pytest.fixture(scope="module")
def run_over_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over two tasks of five classes that measures contributions in every round."""
    return trained(tmp_path_factory.mktemp("tasks"), TASKS_CONFIG)


def relative_shares(acting: torch.Tensor, total: torch.Tensor) -> list[float | None]:
    """The share of each class at the clients that acted, relative to its share at all clients.

    acting, total: the number of examples of each class. None for a class without examples.
    """
    shares = acting.double() / acting.sum()
    expected_shares = total.double() / total.sum()
    relative = (shares / expected_shares).tolist()
    for label in (total == 0).nonzero().flatten().tolist():
        relative[label] = None
    return relative


def test_over_tasks_contributions_record_the_task_and_the_clients_examples_of_it(
    run_over_tasks: Path,
) -> None:
    sites = Replay.of_round(run_over_tasks, 5).prepared.sites
    for look in contributions_of(run_over_tasks):
        task = 1
        other_classes = slice(5, 10)
        if look["round"] > 3:
            task = 2
            other_classes = slice(0, 5)

        assert look["tasks"] == [task] * len(look["clients"])
        counts = [sites.label_counts(client, look["round"]) for client in range(6)]
        acting = torch.stack([counts[client] for client in look["clients"]])
        assert look["had"] == acting.tolist()
        assert acting[:, other_classes].sum() == 0
        shares = relative_shares(acting.sum(0), torch.stack(counts).sum(0))
        assert look["drawn"] == pytest.approx(shares, abs=1e-6)


def test_over_tasks_the_command_names_the_task(
    run_over_tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = class_changes(read_run(run_over_tasks).numbers)
    second_task_begins = [change for change in changes if change.round == 4]
    falls = [change for change in second_task_begins if change.label < 5 and change.change < -0.05]
    assert falls, "the first task is forgotten when the second begins"
    label = falls[0].label

    assert call(["why", str(run_over_tasks), "--class", str(label), "--round", "4", "-q"]) == 0

    printed = capsys.readouterr().out
    assert f"Class '{label}' (of task 1) fell" in printed
    assert "in round 4 (task 2 of 2" in printed
    assert "(stream.past)" in printed
    assert "in task" in printed
