"""Entries forged in journals, summaries and digests alike: each is refused, or a replay says that
it disagrees.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny_ranking
from fedstill.experiment.ranking.entries import Entered, read_entry
from fedstill.experiment.ranking.nearness import Replayed, compared
from fedstill.experiment.ranking.replaying import _like_a_seed, drawn_places, replayed
from fedstill.experiment.ranking.suites import Suite
from forged_entries import Events, forged, refusals, rounds, sealed, shipped_copy, told

NO_MODEL = [None] * 10
NO_ANSWER = {"class_accuracy": NO_MODEL, "accuracy": None, "forgetting": None, "consistency": None}


def last(events: Events, **values: Any) -> None:
    rounds(events)[-1].update(values)


def every(events: Events, kind: str, **values: Any) -> None:
    for event in events:
        if event["event"] == kind:
            event.update(values)


def everybody(events: Events) -> Events:
    """All clients take part in each round."""
    out: Events = []
    for event in events:
        if event["event"] == "client":
            mine = event
            continue
        if event["event"] == "round":
            out += [{**mine, "round": event["round"], "client": c} for c in range(4)]
            event |= {key: 4 * mine[key] for key in ("bytes_up", "bytes_down")} | {"replies": 4}
        out.append(event)
    return out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda e: last(e, answers=[{"average_accuracy_before": 1.0, "average_accuracy": 1.0}]),
            "answers to queries, but the run has no queries",
        ),
        (
            lambda e: every(e, "round", class_accuracy=[1.0] * 90),
            "accuracies of 90 classes, and there are 10",
        ),
        (
            lambda e: every(e, "round", class_accuracy=[1.0] * 9 + [None]),
            "accuracies of 9 classes, and 10 have test",
        ),
        (
            lambda e: every(e, "round", class_accuracy=NO_MODEL),
            "accuracies of 0 classes, and 10 have test examples",
        ),
        (
            lambda e: every(e, "round", **NO_ANSWER, personal_class_accuracy=[1.0] * 10),
            "personal_class_accuracy, which does not follow from its clients' events",
        ),
        (
            lambda e: every(e, "round", personal_class_accuracy=[2.0] * 10),
            "must be one number from 0 to 1 per class",
        ),
        (
            lambda e: every(e, "round", personal_class_accuracy=[float("nan")] * 10),
            "a number that is not finite",
        ),
        (lambda e: every(e, "round", bytes_down=0), "0 bytes down, and its clients' events have"),
        (lambda e: every(e, "round", forgetting=-1.0), "forgetting = -1.0, and"),
        (lambda e: every(e, "round", helped=1.0), "helped, which does not follow"),
        (
            lambda e: [x for x in e if x["event"] != "client" or x["round"] < 2],
            "round 2: no client took part in it",
        ),
        (everybody, "in round 1 clients [0, 1, 2, 3] took part in stage 0, and here"),
    ],
)
def test_what_a_score_is_taken_from_follows_from_the_rest(
    change: Callable[[Events], Events | None], said: str, entry: Entered
) -> None:
    forged(entry, change)
    assert any(said in wrong for wrong in refusals(entry.folder)), refusals(entry.folder)


def right_at_task_ends(events: Events) -> None:
    for event in events:
        if event["event"] == "task" and event["task"]:
            event["correct"] = [list(of) for of in event["totals"]]
            event["row"] = [1.0] * len(event["row"])


def more_than_there_are(events: Events) -> None:
    next(e for e in events if e["event"] == "task" and e["task"])["correct"][0][0] += 1000


def nobodys(events: Events) -> None:
    every([e for e in events if e["event"] != "task" or e["task"]], "task", clients={})


def no_task_end(events: Events) -> Events:
    return [e for e in events if e["event"] != "task" or e["task"] < 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (right_at_task_ends, "the task's end after round"),
        (more_than_there_are, "right answers of a class, more than there are"),
        (no_task_end, "it has task ends after rounds [0, "),
        (nobodys, "clients = {}, and"),
    ],
)
def test_task_ends_follow_from_right_answers_and_their_rounds(
    change: Callable[[Events], Events | None], said: str, tmp_path: Path
) -> None:
    entry = shipped_copy("digits-both", "FedAvg", tmp_path / "entry")
    forged(entry, change)
    assert any(said in wrong for wrong in refusals(entry.folder)), refusals(entry.folder)


def test_task_ends_that_agree_with_themselves_disagree_in_a_replay(tmp_path: Path) -> None:
    """On permuted pixels each task has a test set of its own, which no round's accuracy tells
    of.
    """
    entry = shipped_copy("digits-time", "FedAvg", tmp_path / "entry")
    honest, place = (
        Path(shutil.copytree(entry.folder, tmp_path / "honest")),
        "10-permuted-tasks/seed0",
    )
    forged(entry, right_at_task_ends)
    one = compared(place, entry.folder / place, honest / place)
    assert one.level == "tolerance", "its first rounds are what they were, and it has not the bits"
    run: Any = SimpleNamespace(folder=honest / place, settings=SimpleNamespace(rounds=20))
    one = _like_a_seed(one, entry, ("10 permuted tasks", 0), run)
    assert (one.level, "further apart than two seeds" in one.beyond) == ("disagrees", True)


def test_answers_to_queries_follow_from_what_clients_say_of_themselves(tmp_path: Path) -> None:
    entry = shipped_copy("digits-peers", "local only", tmp_path / "entry")
    assert refusals(entry.folder) == []

    def better(events: Events) -> None:
        for answer in rounds(events)[-1]["answers"]:
            answer |= {"average_accuracy": 1.0, "average_accuracy_before": 1.0}

    forged(entry, better)
    assert any("answers = [" in wrong and "follows" in wrong for wrong in refusals(entry.folder))


def cut(entry: Entered, place: str, done: int) -> None:
    """Say that a run diverged, and leave out what came after a round."""
    path = entry.folder / place / "journal.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [
        e
        for e in events
        if e.get("round", 0) <= done or (e["event"] == "client" and e["round"] == done + 1)
    ]
    path.write_text("".join(json.dumps(e, separators=(",", ":")) + "\n" for e in kept))
    (entry.folder / place / "summary.json").unlink()
    told(
        entry,
        lambda tree: tree.__setitem__("diverged", {place: "its parameters' norm is too large"}),
    )
    sealed(entry)


def test_a_run_that_is_cut_where_it_was_best_disagrees_in_a_replay(
    entry: Entered, tmp_path: Path
) -> None:
    honest = Path(shutil.copytree(entry.folder, tmp_path / "honest"))
    cut(entry, "even/seed0", 1)
    assert refusals(entry.folder) == [], "a run that diverged looks like this"
    (one,) = replayed(read_entry(entry.folder), [("even", 0)], tiny_ranking.do)
    assert one == Replayed(
        "even/seed0", "disagrees", "after round 1 it goes on otherwise, with the same bits before"
    )
    path = entry.folder / "even/seed0/journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"event":"client","round":2,' not in line))
    sealed(entry)
    assert "does not end in a round that diverged" in refusals(entry.folder)[0]
    told(entry, lambda tree: tree.__setitem__("diverged", {"even/seed1": "never"}))
    shutil.copytree(honest / "even", entry.folder / "even", dirs_exist_ok=True)
    (entry.folder / "even/seed1/summary.json").unlink()
    sealed(entry)
    assert (
        "even/seed1/journal.jsonl does not end in a round that diverged"
        in refusals(entry.folder)[0]
    )


def test_seeds_that_are_forged_alike_are_not_within_what_seeds_differ_by(entry: Entered) -> None:
    """All rounds of all seeds are right everywhere; one loss is strange, as single clients' may be
    elsewhere.
    """

    def right(events: Events) -> None:
        for event in rounds(events):
            event |= {"accuracy": 1.0, "class_accuracy": [1.0] * 10}
        first = next(e for e in events if e["event"] == "client")
        first["loss"] = {k: v + 1e-6 for k, v in first["loss"].items()}

    forged(entry, right)
    (one,) = replayed(entry, [("even", 0)], tiny_ranking.do, rounds=0)
    assert one.level == "disagrees"


def test_half_the_bytes_disagree_in_a_replay(entry: Entered) -> None:
    """Bytes of clients and of rounds are forged alike."""

    def half(events: Events) -> None:
        for event in events:
            event.update(
                {key: event[key] // 2 for key in ("bytes_up", "bytes_down") if key in event}
            )

    forged(entry, half)
    assert refusals(entry.folder) == []
    (one,) = replayed(entry, [("even", 0)], tiny_ranking.do)
    assert (one.level, " has bytes_up " in one.beyond) == ("disagrees", True)


@pytest.mark.usefixtures("suite")
def test_a_reference_sets_no_fields(made: Path, tmp_path: Path) -> None:
    entry = read_entry(Path(shutil.copytree(made / "joint", tmp_path / "joint")))
    assert refusals(entry.folder) == []
    told(entry, lambda tree: tree.__setitem__("fields", {"plan.lr": 0.0001}))
    assert refusals(entry.folder) == [
        "settings are the suite's: joint is a reference, and sets plan.lr"
    ]


def mine(entry: Entered, of: Callable[[int], str], **values: Any) -> None:
    """The entry as that of a method of its own file, with a table ``[method]`` for each run."""
    (entry.folder / "mine.py").write_text("raise SystemExit")
    for number, path in enumerate(sorted(entry.folder.rglob("config.toml"))):
        before, _, rest = path.read_text().partition("[method]\n")
        path.write_text(f"{before}[method]\n{of(number)}\n\n[{rest.partition(chr(10) + '[')[2]}")
    fields = {"method.beta": 1.0, "plan.lr": 0.1}
    choice = {"tries": [fields, {}], "scores": [[0.9] * 3, [0.1] * 3], "sent": [1, 1]}
    new = {
        "row": "Mine",
        "method": "mine.py",
        "file": "mine.py",
        "fields": fields,
        "choice": choice,
    }
    told(entry, lambda tree: tree.update(new | values))
    sealed(entry)


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (
            lambda n: 'name = "other.py"\nbeta = 1.0',
            "has the method 'other.py', and the entry's file is mine.py",
        ),
        (
            lambda n: 'name = "mine.py"\nbeta = 2.0',
            "has method.beta = 2.0, and not what was chosen",
        ),
        (
            lambda n: f'name = "mine.py"\nbeta = 1.0\nmore = {n}',
            "uneven/seed1/config.toml has another table [method]",
        ),
        (
            lambda n: 'name = "mine.py"\nbeta = 1.0' + "\nmore = 1" * (n > 4),
            "has another table [method] than the first run",
        ),
    ],
)
def test_all_runs_of_a_file_of_its_own_have_what_was_chosen(
    of: Callable[[int], str], said: str, entry: Entered
) -> None:
    mine(entry, of)
    assert said in refusals(entry.folder)[0]


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"scores": [[7.0], [0.1]]}, "its tries need 3 scores each"),
        ({"scores": [[7.0] * 3, [0.1] * 3]}, "from 0 to 1"),
        ({"scores": [[float("nan")] * 3, [0.1] * 3]}, "from 0 to 1"),
        ({"sent": [-1, 1]}, "has a negative number of bytes"),
    ],
)
def test_scores_of_choosing_are_shares_of_three_seeds(
    choice: dict[str, Any], said: str, entry: Entered
) -> None:
    mine(entry, lambda n: 'name = "mine.py"\nbeta = 1.0')
    told(entry, lambda tree: tree["choice"].update(choice))
    assert [said in wrong for wrong in refusals(entry.folder)] == [True]


def test_an_entry_with_a_file_of_its_own_passes_and_what_it_answers_follows_too(
    entry: Entered,
) -> None:
    mine(entry, lambda n: 'name = "mine.py"\nbeta = 1.0')
    assert refusals(entry.folder) == []
    forged(entry, lambda e: every(e, "round", **NO_ANSWER, personal_class_accuracy=[1.0] * 10))
    assert any(
        "personal_class_accuracy, which does not follow" in wrong
        for wrong in refusals(entry.folder)
    )


def test_more_rounds_than_memory_holds_are_refused_first(entry: Entered) -> None:
    for path in entry.folder.rglob("config.toml"):
        path.write_text(path.read_text().replace("rounds = 2", "rounds = 1000000000000"))
    sealed(entry)
    (wrong,) = refusals(entry.folder)
    assert "has rounds = 1000000000000, and the suite 2" in wrong


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "a | b", "a\nb", "`a`", "\\input{a}"]
)
def test_names_that_mean_something_in_a_table_are_refused(name: str, entry: Entered) -> None:
    told(entry, lambda tree: tree["made"].__setitem__("processor", name))
    assert "contains a character that tables cannot show" in refusals(entry.folder)[0]


def test_whoever_checks_draws_other_runs_by_another_number(entry: Entered, suite: Suite) -> None:
    draws = {tuple(drawn_places(entry, suite, 2, number)) for number in range(20)}
    assert len(draws) > 5
    assert drawn_places(entry, suite, 2, 7) == drawn_places(entry, suite, 2, 7)
