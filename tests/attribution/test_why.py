"""Why a class fell: moments, rounds gone through again, the counterfactual, and what the command
says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

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
from fedstill.running.journal import JOURNAL, LATER_LOOKS, add_looks, read_journal, with_later_looks
from fedstill.running.numbers import Look, RunNumbers
from fedstill.running.replay import Replay, Without
from fedstill.running.runs import read_run

CONFIG = """
rounds = 6
measure = {measure}
measure_every = 3
keep_checkpoints_every = {every}
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


def made(
    place: Path, method: str = "fedavg", every: int = 0, measure: str = '["contributions"]'
) -> Path:
    (place / "my.toml").write_text(CONFIG.format(method=method, every=every, measure=measure))
    fedstill.run(fedstill.load(place / "my.toml"), place / "run")
    return place / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("why"), every=2)


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def rows(folder: Path) -> dict[int, list[float | None]]:
    return {e["round"]: e["class_accuracy"] for e in events(folder) if e["event"] == "round"}


def looks_of(folder: Path) -> list[dict[str, Any]]:
    """The events of the measure ``contributions`` of a run."""
    events = read_journal(folder / JOURNAL)
    looks = [event for event in events if event.get("measure") == "contributions"]
    return with_later_looks(folder, looks, classes=0)


def looks_in(fields: list[dict[str, Any]]) -> list[Look]:
    """What the measure recorded, with these fields."""
    named = [{"event": "measure", "measure": "contributions", **look} for look in fields]
    return RunNumbers.of(named, classes=2).looks("contributions")


def quiet(round: int, last: int) -> None:
    pass


def test_moments_are_in_order_of_their_fall_and_the_untrained_model_comes_last() -> None:
    events: list[dict[str, Any]] = [
        {"event": "initial", "class_accuracy": [1.0, 0.0, None]},
        {"event": "round", "round": 1, "class_accuracy": [0.0, 0.8, None]},
        {"event": "client", "round": 2},
        {"event": "round", "round": 2, "class_accuracy": [0.5, 0.2, None]},
    ]
    changes = class_changes(RunNumbers.of(events, classes=3))
    assert [(m.round, m.label) for m in changes] == [(2, 1), (2, 0), (1, 0), (1, 1)]
    assert changes[0].change == pytest.approx(-0.6)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn", "fedadkd"])
def test_rounds_gone_through_again_have_the_same_bits(method: str, tmp_path: Path) -> None:
    folder = made(tmp_path, method, every=2, measure="[]")
    kept = Replay.of_round(folder, 5)
    assert kept.start == 5
    assert accuracies_by_round(kept, 5, 6, unchanged, quiet) == {
        r: a for r, a in rows(folder).items() if r > 4
    }
    shutil.rmtree(folder / "checkpoints")
    kept = Replay.of_round(folder, 5)
    assert kept.start == 1
    assert accuracies_by_round(kept, 1, 6, unchanged, quiet) == rows(folder)


def test_a_look_later_is_the_look_of_the_run(run: Path) -> None:
    (own,) = [look for look in looks_of(run) if look["round"] == 3]
    (again,) = measure_round(Replay.of_round(run, 3), 3, Contributions(), quiet)
    for key in ("clients", "before", "after", "parts", "classes", "values", "gap"):
        assert again[key] == own[key], key


def clients(stages: Sequence[Stage]) -> list[tuple[int, ...]]:
    return [stage.clients for stage in stages]


def test_a_client_is_left_out_for_good_or_once() -> None:
    stages = [Stage(4, 0, "train", (1, 2)), Stage(4, 1, "more", (2,))]
    two, seven = frozenset({2}), frozenset({7})
    assert Without(two, first=5)(stages) == stages
    assert clients(Without(two, first=4)(stages)) == [(1,)]
    assert Without(two, first=3, last=3)(stages) == stages
    assert Without(seven)(stages) == stages
    assert clients(Without(frozenset({1, 2}), first=4, last=4)(stages)) == []


def test_leaving_out_a_client_changes_the_rounds_from_there_on_alone(run: Path) -> None:
    replay = Replay.of_round(run, 3)
    was = rows(run)
    acted = frozenset(next(e["clients"][:1] for e in looks_of(run) if e["round"] == 3))
    without = accuracies_by_round(replay, replay.start, 4, Without(acted, 4), quiet)
    earlier = {number: row for number, row in without.items() if number < 4}
    assert earlier == {number: was[number] for number in earlier}
    assert accuracies_by_round(replay, 3, 4, Without(acted, 3), quiet)[3] != was[3]


def test_what_was_added_later_stands_in_place_of_the_journals(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(run, folder)
    before = looks_of(folder)
    kept = {"event", "measure", "stage", "before", "after"}
    look = {field: value for field, value in before[0].items() if field in kept}
    look.update(round=2, clients=[])
    add_looks(folder, [{**before[0], "game": "absent"}, {**look, "parts": {}}])
    add_looks(folder, [{**look, "parts": {"later": []}}])
    assert [(e["round"], e.get("game")) for e in looks_of(folder)] == [
        (2, None),
        (3, "absent"),
        (6, "idle"),
    ]
    (folder / LATER_LOOKS).write_text("{")
    with pytest.raises(CorruptFile, match=r"why\.jsonl"):
        looks_of(folder)


def test_what_is_told_sums_over_stages() -> None:
    moment = ClassChange(4, 1, 0.9, 0.4)
    links = [{"round": 4, "stage": s, "parts": {f"client {s}": [0.0, -0.25]}} for s in range(2)]
    told = attribute(moment, looks_in(links))
    assert told is not None
    assert (dict(told.parts), dict(told.clients)) == ({"client 0": -0.25, "client 1": -0.25}, {})
    look = {
        "round": 4,
        "stage": 0,
        "parts": {"averaging": [0, -0.5]},
        "game": "idle",
        "classes": [0],
        "clients": [3],
        "values": [[0.1]],
    }
    assert attribute(moment, looks_in([look])) is None, "nobody was asked about class 1"
    assert attribute(ClassChange(5, 1, 0.9, 0.4), looks_in(links)) is None


def test_beside_a_global_model_clients_own_models_are_no_part_of_its_change(tmp_path: Path) -> None:
    asked = toys.toy("ditto", **{**toys.suited("ditto"), "measure": ("contributions",)})
    fedstill.run(asked, tmp_path / "run", data=toys.blobs())
    written = {
        look["round"]: look for look in looks_of(tmp_path / "run") if look["name"] == "train"
    }
    looks = read_run(tmp_path / "run").numbers.looks("contributions")
    assert {(look.texts["name"], look.texts["model"]) for look in looks} == {
        ("personal", "own"),
        ("train", "global"),
    }
    for look in of_global_model(looks):
        assert look.texts["name"] == "train"
        assert look.classes
        for c in look.classes:
            told = attribute(ClassChange(look.round, c, 0.0, 0.0), looks)
            assert told is not None
            parts = written[look.round]["parts"]
            assert dict(told.parts) == {name: change[c] for name, change in parts.items()}


def test_without_a_global_model_the_stages_of_the_same_clients_are_told() -> None:
    looks: list[dict[str, Any]] = [
        {"round": 2, "stage": s, "model": "own", "clients": clients, "parts": {name: [0.25]}}
        for s, (name, clients) in enumerate(
            {"head": [0, 3], "train": [0, 3], "finetune": [0, 1, 2, 3]}.items()
        )
    ]
    told = attribute(ClassChange(2, 0, 0.0, 0.5), looks_in(looks))
    assert told is not None
    assert dict(told.parts) == {"head": 0.25, "train": 0.25}


def test_the_command_answers_in_a_sentence_a_table_and_a_hint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    folder = tmp_path / "copy"
    shutil.copytree(run, folder)
    assert call(["why", str(folder)]) == 0
    out, err = capsys.readouterr()
    moment = find_changes(folder, None, None)[0]
    assert f"Class '{moment.label}' fell from" in out
    assert "local training" in out
    assert "averaging" in out
    assert "contribution [points]" in out
    assert ("replaying" in err) == (moment.round not in (3, 6))
    assert call(["why", str(folder)]) == 0
    assert "replaying" not in capsys.readouterr().err, (
        "what was found out is kept beside the journal"
    )
    assert call(["why", str(folder), "--class", "3", "--round", "6", "--exact", "--quiet"]) == 0
    assert "Shapley values, all coalitions" in capsys.readouterr().out
    assert call(["why", str(folder), "--class", "3", "--round", "6", "--game", "absent", "-q"]) == 0
    out = capsys.readouterr().out
    assert "did not reply" in " ".join(out.split()), out
    assert {(look["game"], look.get("rule", "path")) for look in looks_of(folder)} == {
        ("idle", "path")
    }
    assert call(["why", str(folder), "--class", "3", "--round", "6", "-q"]) == 0
    assert "Aumann-Shapley values" in capsys.readouterr().out
    client = str(looks_of(folder)[-1]["clients"][0])
    assert call(["why", str(folder), "--without", client, "--from", "5", "--class", "3", "-q"]) == 0
    out = capsys.readouterr().out
    assert f"Class '3' without client {client} from round 5 on" in out
    assert out.count(" %") == 4
    assert call(["why", str(folder), "--worst", "3", "-q"]) == 0
    assert capsys.readouterr().out.count("Class ") == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--class", "12"], "this class"),
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
def test_what_cannot_be_asked_is_said_in_one_line(
    run: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["why", str(run), *arguments]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_the_best_round_can_be_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = toys.toy(rounds=3, data="digits", model="logistic", select_on="test")
    folder = tmp_path / "run"
    best = fedstill.run(experiment, folder).summary["best_round"]
    capsys.readouterr()
    assert call(["why", str(folder), "--round", "best", "-q"]) == 0
    by_name = capsys.readouterr().out
    assert call(["why", str(folder), "--round", str(best), "-q"]) == 0
    assert capsys.readouterr().out == by_name
    assert f"round {best}" in by_name.lower()


def test_all_coalitions_of_more_than_ten_clients_are_refused_before_a_round_is_gone_through(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fedstill.run(
        toys.toy(
            rounds=2, topology={"clients": 11, "sampled": 11}, data="digits", model="logistic"
        ),
        tmp_path / "run",
    )
    capsys.readouterr()
    assert call(["why", str(tmp_path / "run"), "--round", "2", "--exact"]) == 2
    err = capsys.readouterr().err
    assert "--exact: round 2 has 11 clients" in err
    assert err.count("\n") == 1


def test_a_folder_without_a_run_and_one_without_a_global_model_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["why", str(tmp_path)]) == 2
    assert "contains no run" in capsys.readouterr().err
    fedstill.run(
        toys.toy("local_only", **toys.suited("local_only")), tmp_path / "run", data=toys.blobs()
    )
    with pytest.raises(
        ConfigError,
        match="global model",
    ):
        find_changes(tmp_path / "run", None, None)


def test_over_tasks_it_says_which_task_and_what_clients_have_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CONFIG.format(method="fedavg", every=6, measure='["contributions"]')
    text = (
        text.replace("every = 3", "every = 1")
        .replace("alpha = 0.1", "alpha = 5.0")
        .replace("epochs = 2", "epochs = 8")
    )
    text = text.replace(
        'method = "fedavg"', 'method = "fedavg"\nmodel = { name = "mlp", hidden = [32] }'
    )  # six long looks
    (tmp_path / "my.toml").write_text(
        f'{text}[stream]\ntasks = 2\nkind = "classes"\norder = "given"\n'
    )
    fedstill.run(fedstill.load(tmp_path / "my.toml"), tmp_path / "run")
    kept = Replay.of_round(tmp_path / "run", 5).prepared
    for look in looks_of(tmp_path / "run"):
        task = 1 if look["round"] <= 3 else 2
        assert look["tasks"] == [task] * len(look["clients"])
        own = [kept.sites.label_counts(c, look["round"]).tolist() for c in look["clients"]]
        assert look["had"] == own
        assert all(sum(row[5:] if task == 1 else row[:5]) == 0 for row in own)
        every = (
            torch.stack([kept.sites.label_counts(c, look["round"]) for c in range(6)])
            .sum(0)
            .double()
        )
        acted = torch.tensor(own).sum(0).double()
        usual = (acted / acted.sum() / (every / every.sum())).tolist()
        assert look["drawn"] == pytest.approx([None if u != u else u for u in usual], abs=1e-6)
    falls = [
        e
        for e in class_changes(read_run(tmp_path / "run").numbers)
        if e.round == 4 and e.label < 5 and e.change < -0.05
    ]
    assert falls, "the first task is forgotten when the second begins"
    label = str(falls[0].label)
    assert call(["why", str(tmp_path / "run"), "--class", label, "--round", "4", "-q"]) == 0
    out = capsys.readouterr().out
    assert f"Class '{falls[0].label}' (of task 1) fell" in out
    assert "in round 4 (task 2 of 2" in out
    assert "(stream.past)" in out
    assert "in task" in out
