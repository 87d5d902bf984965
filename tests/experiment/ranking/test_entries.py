"""Entries: whole ones pass, forged ones are refused by name, and a replay gives the same bits."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_ranking
from fedstill.experiment.ranking.checking import checked_entry
from fedstill.experiment.ranking.entries import LARGEST, Entered
from fedstill.experiment.ranking.nearness import compared
from fedstill.experiment.ranking.replaying import _size, drawn_places, reached, replayed
from fedstill.experiment.ranking.suites import Suite, load_suite
from fedstill.files import digest
from forged_entries import refusals, told

RUN = "uneven/seed3"


def rewritten(entry: Entered, name: str, old: str, new: str, sealed: bool = True) -> None:
    """Change a file of the entry, and its digest with it: a forger can do both."""
    path = entry.folder / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    if sealed:
        told(entry, lambda tree: tree["digests"].__setitem__(name, digest(path.read_bytes())))


def test_a_whole_entry_passes_every_check(entry: Entered, suite: Suite) -> None:
    lines = list(checked_entry(entry))
    assert [line.wrong for line in lines if line.wrong] == []
    assert len(lines) == 8
    assert entry.fields == {"plan.lr": 0.1}
    assert len(list(entry.folder.rglob("journal.jsonl"))) == 2 * 5


def test_it_holds_no_times_but_the_processors(entry: Entered) -> None:
    lines = (entry.run("uneven", 0) / "journal.jsonl").read_text().splitlines()
    keys = {key for line in lines for key in json.loads(line) if key.startswith("seconds")}
    assert keys == {"seconds_cpu"}
    assert {p.name for p in entry.folder.rglob("*.safetensors")} == {"split.safetensors"}


def test_a_changed_key_is_refused(entry: Entered) -> None:
    rewritten(entry, f"{RUN}/config.toml", "epochs = 1", "epochs = 2")
    (wrong,) = refusals(entry.folder)
    assert (
        wrong
        == f"settings are the suite's: {RUN}/config.toml has plan.train.epochs = 2, and the suite 1"
    )


def test_a_field_that_came_after_an_entry_was_made_has_its_default_there(entry: Entered) -> None:
    text = (entry.folder / RUN / "config.toml").read_text()
    field = re.search(r"^\[method\]\nname = .*\n(.+ = .+\n)", text, re.MULTILINE)
    assert field is not None
    for path in entry.folder.rglob("config.toml"):
        rewritten(entry, path.relative_to(entry.folder).as_posix(), field[1], "")
    assert refusals(entry.folder) == []


def test_another_learning_rate_than_the_chosen_one_is_refused(entry: Entered) -> None:
    rewritten(entry, f"{RUN}/config.toml", "lr = 0.1", "lr = 0.2")
    assert "plan.train.lr = 0.2, and the suite 0.1" in refusals(entry.folder)[0]


def test_a_missing_seed_is_refused(entry: Entered) -> None:
    for path in (entry.folder / RUN).iterdir():
        path.unlink()
    (wrong,) = refusals(entry.folder)
    assert wrong == f"seeds and columns are complete: {RUN}/config.toml is missing (4 files in all)"


def test_a_seed_more_is_refused(entry: Entered) -> None:
    other = entry.folder / "uneven" / "seed7"
    other.mkdir()
    (other / "config.toml").write_bytes((entry.folder / RUN / "config.toml").read_bytes())
    assert refusals(entry.folder) == [
        "seeds and columns are complete: uneven/seed7/config.toml belongs to no run of the suite"
    ]


def test_an_edited_number_is_refused_by_its_digest_and_by_what_follows_from_it(
    entry: Entered,
) -> None:
    path = entry.folder / RUN / "journal.jsonl"
    last = json.loads(path.read_text().splitlines()[-1])
    old, new = f'"accuracy":{last["accuracy"]}', '"accuracy":0.99'
    before = path.read_text()
    path.write_text(
        before[: before.rindex(old)] + before[before.rindex(old) :].replace(old, new, 1)
    )
    assert refusals(entry.folder)[0].startswith(
        f"files are those of entry.toml: {RUN}/journal.jsonl is not the file"
    )
    told(
        entry,
        lambda tree: tree["digests"].__setitem__(f"{RUN}/journal.jsonl", digest(path.read_bytes())),
    )
    assert "accuracy 0.99, and its classes have" in refusals(entry.folder)[0]


def test_a_summary_that_does_not_follow_from_its_journal_is_refused(entry: Entered) -> None:
    accuracy = json.loads((entry.folder / RUN / "summary.json").read_text())["accuracy"]
    rewritten(entry, f"{RUN}/summary.json", f'"accuracy": {accuracy}', '"accuracy": 0.99')
    assert refusals(entry.folder)[0].startswith(
        f"summaries follow from the journals: {RUN}/summary.json has accuracy = 0.99"
    )


def test_an_accuracy_that_its_classes_do_not_have_is_refused(entry: Entered) -> None:
    """Journal, summary and digests are forged alike; the accuracy of the classes gives another
    number.
    """
    path, summary = entry.folder / RUN / "journal.jsonl", entry.folder / RUN / "summary.json"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["accuracy"] = 0.99
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    accuracies = [e["accuracy"] for e in lines if e["event"] == "round"]
    sums = json.loads(summary.read_text()) | {
        "accuracy": 0.99,
        "best_accuracy": max(accuracies),
        "mean_accuracy_last_10": sum(accuracies) / len(accuracies),
    }
    summary.write_text(json.dumps(sums))
    sealed = {f"{RUN}/{path.name}": digest(path.read_bytes()) for path in (path, summary)}
    told(entry, lambda tree: tree["digests"].update(sealed))
    assert any("its classes" in wrong for wrong in refusals(entry.folder))


def test_a_swapped_choice_is_refused(entry: Entered) -> None:
    told(
        entry, lambda tree: tree["choice"].__setitem__("scores", [[0.9, 0.9, 0.9], [0.1, 0.1, 0.1]])
    )
    assert any("try 1 is the best" in wrong for wrong in refusals(entry.folder))


def test_tries_that_the_suite_does_not_have_are_refused(entry: Entered) -> None:
    told(entry, lambda tree: tree["choice"]["tries"].__setitem__(0, {"plan.lr": 0.3}))
    assert refusals(entry.folder) == [
        "the fields follow from the tries: its tries are not those of digits-space"
    ]


def test_another_split_than_the_one_that_is_drawn_here_is_refused(entry: Entered) -> None:
    text = (entry.folder / RUN / "journal.jsonl").read_text()
    sha = json.loads(text.splitlines()[0])["split"]["sha256"]
    rewritten(entry, f"{RUN}/journal.jsonl", sha, "0" * 64)
    assert (
        f"{RUN}/split.safetensors is not the split that the journal names"
        in refusals(entry.folder)[0]
    )
    other = (entry.folder / "uneven" / "seed4" / "split.safetensors").read_bytes()
    (entry.folder / RUN / "split.safetensors").write_bytes(other)
    told(entry, lambda tree: tree["digests"].__setitem__(f"{RUN}/split.safetensors", digest(other)))
    rewritten(entry, f"{RUN}/journal.jsonl", "0" * 64, digest(other))
    assert refusals(entry.folder)[0].startswith(
        "splits, tasks and clients of rounds are what is drawn here: " + RUN
    )


def test_a_client_that_was_not_drawn_is_refused(entry: Entered) -> None:
    lines = (entry.folder / RUN / "journal.jsonl").read_text().splitlines()
    event = next(line for line in lines if '"event":"client"' in line)
    client = json.loads(event)["client"]
    drawn = {json.loads(line)["client"] for line in lines if '"event":"client","round":1,' in line}
    other = next(c for c in range(4) if c not in drawn)
    rewritten(
        entry,
        f"{RUN}/journal.jsonl",
        event,
        event.replace(f'"client":{client},', f'"client":{other},', 1),
    )
    assert "in round 1 clients" in refusals(entry.folder)[0]


def test_a_version_that_is_not_here_and_another_method_are_refused(entry: Entered) -> None:
    told(entry, lambda tree: tree.__setitem__("version", 2))
    assert "is of version 2 of digits-space; this fedstill has 1" in refusals(entry.folder)[0]
    told(entry, lambda tree: tree.update(version=1, method="fedprox"))
    assert "FedAvg is the method fedavg in digits-space" in refusals(entry.folder)[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tree: tree.__setitem__("row", 3), "row is a int, not a str"),
        (lambda tree: tree.pop("digests"), "'digests'"),
        (lambda tree: tree["choice"].__setitem__("scores", [["x"]]), "cannot be read"),
        (
            lambda tree: tree.__setitem__("file", "../../evil.py"),
            "its file '../../evil.py' is not in it",
        ),
        (
            lambda tree: tree.update(row="mine", method="os:system"),
            "'os:system' is no method of the package",
        ),
    ],
)
def test_what_entry_toml_must_not_say(
    entry: Entered, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    told(entry, change)
    assert said in refusals(entry.folder)[0]


def test_links_strange_and_large_files_are_refused_before_anything_is_read(entry: Entered) -> None:
    link = entry.folder / "config.toml"
    link.symlink_to("/etc/hostname")
    assert "config.toml is a link" in refusals(entry.folder)[0]
    link.unlink()
    (entry.folder / "model.safetensors").write_bytes(b"x")
    assert "model.safetensors is no file of an entry" in refusals(entry.folder)[0]
    (entry.folder / "model.safetensors").unlink()
    with (entry.folder / RUN / "journal.jsonl").open("ab") as file:
        os.truncate(file.fileno(), LARGEST + 1)
    assert "larger than 32 MB" in refusals(entry.folder)[0]


def test_a_replay_gives_the_same_bits_and_its_runs_are_drawn_by_the_entry(
    entry: Entered, suite: Suite
) -> None:
    places = drawn_places(entry, suite, 2)
    assert places == drawn_places(entry, suite, 2)
    assert len(set(places)) == 2
    assert len(drawn_places(entry, suite, 99)) == 10
    assert [one.level for one in replayed(entry, places, tiny_ranking.do)] == ["bits", "bits"]
    assert [one.level for one in replayed(entry, places[:1], tiny_ranking.do, rounds=1)] == ["bits"]


def test_all_seeds_of_a_column_are_compared_by_their_means_too(entry: Entered) -> None:
    places = [("even", seed) for seed in range(5)]
    levels = [(one.place, one.level) for one in replayed(entry, places, tiny_ranking.do)]
    assert levels[-1] == ("even", "bits")
    assert len(levels) == 6


def test_a_run_is_shortened_where_its_first_rounds_stay_what_they_are(suite: Suite) -> None:
    assert _size(1, suite, "FedAvg") == {"rounds": 1}
    assert _size(0, suite, "FedAvg") == _size(2, suite, "FedAvg") == {}, "all of its two rounds"
    public, time = load_suite("digits-public"), load_suite("digits-time")
    assert _size(3, public, "FedMD") == {}, "a stage follows its last round"
    assert _size(3, public, "local only") == {}, "it has a number of its own"
    assert _size(3, time, "replay") == {}, "tasks share the rounds"
    assert _size(3, public, "HiPer-FedKD") == {"rounds": 3}


def test_what_rounding_does_is_within_tolerance_and_what_it_does_not_disagrees(
    entry: Entered,
) -> None:
    """The loss of one client's first round is another in its last digits; then in its third."""
    path = entry.run("even", 0) / "journal.jsonl"
    event = next(
        json.loads(line) for line in path.read_text().splitlines() if '"event":"client"' in line
    )
    loss = event["loss"]["ce"]
    near = [("even", 0)]
    path.write_text(path.read_text().replace(repr(loss), repr(loss + 1e-6), 1))
    (one,) = replayed(entry, near, tiny_ranking.do)
    assert one.level == "tolerance"
    path.write_text(path.read_text().replace(repr(loss + 1e-6), repr(loss + 0.5), 1))
    (one,) = replayed(entry, near, tiny_ranking.do)
    assert one.level == "disagrees"
    assert f"the loss ce of client {event['client']} in round 1" in one.beyond
    assert reached([one]) == "disagrees"


@pytest.mark.parametrize(
    ("steps", "number", "level"), [(20, 3, "disagrees"), (36, 2, "tolerance"), (70, 1, "disagrees")]
)
def test_rounding_grows_with_the_steps_that_a_client_has_done(
    steps: int, number: int, level: str, tmp_path: Path
) -> None:
    """Two journals of three rounds that differ in one loss by 0.06: too much within seventy
    steps.
    """
    for name, more in (("theirs", 0.0), ("ours", 0.06)):
        lines = [{"event": "start", "classes": ["a", "b"], "test_counts": [50, 50]}]
        for round in (1, 2, 3):
            loss = {"ce": 0.4 + more * (round == number)}
            lines.append(
                {"event": "client", "round": round, "client": 0, "steps": steps, "loss": loss}
            )
            lines.append({"event": "round", "round": round, "accuracy": 0.5})
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    assert compared("x", tmp_path / "theirs", tmp_path / "ours").level == level


@pytest.mark.parametrize(
    ("strays", "clients", "accuracy", "level"),
    [
        (1, 5, 0.5, "tolerance"),
        (2, 5, 0.5, "disagrees"),
        (1, 4, 0.5, "disagrees"),
        (4, 20, 0.5, "tolerance"),
        (1, 5, 0.6, "tolerance"),
        (0, 5, 0.6, "disagrees"),
    ],
)
def test_the_losses_of_few_clients_may_be_further_apart(
    strays: int, clients: int, accuracy: float, level: str, tmp_path: Path
) -> None:
    """Training of single clients can be unstable; what follows is then as another seed's."""
    for name, more, last in (("theirs", 0.0, 0.5), ("ours", 0.06, accuracy)):
        lines: list[dict[str, Any]] = [
            {"event": "start", "classes": ["a", "b"], "test_counts": [50, 50]}
        ]
        for c in range(clients):
            loss = {"ce": 0.4 + more * (c < strays)}
            lines.append({"event": "client", "round": 1, "client": c, "steps": 20, "loss": loss})
        lines.append({"event": "round", "round": 1, "accuracy": last})
        lines.append({"event": "round", "round": 2, "accuracy": last})
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    assert compared("x", tmp_path / "theirs", tmp_path / "ours").level == level


def test_the_score_of_a_whole_run_is_as_far_away_as_another_seed_at_most(entry: Entered) -> None:
    """Other last digits in round 1 make it a run of another machine; what its rounds say of classes
    is edited.
    """
    path = entry.run("even", 0) / "journal.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    next(e for e in events if e["event"] == "client")["loss"]["ce"] += 1e-6
    for event in events:
        if event["event"] == "round" and event["round"] > 0:
            event["class_accuracy"] = [1.0 for _ in event["class_accuracy"]]
    path.write_text("".join(json.dumps(e) + "\n" for e in events))
    (one,) = replayed(entry, [("even", 0)], tiny_ranking.do)
    assert one.level == "disagrees"
    assert "further apart than two seeds are" in one.beyond
    (one,) = replayed(entry, [("even", 0)], tiny_ranking.do, rounds=1)
    assert one.level == "tolerance"
