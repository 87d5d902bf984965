"""Entries forged in journals, summaries and digests alike: a replay rejects them, and says what it
cannot show.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import forged_entries
import tiny_ranking
from fedstill.benchmark import replays
from fedstill.benchmark.competing import enter_rows
from fedstill.benchmark.entries import Entry, read_entry
from fedstill.benchmark.replays import ReplayRequest, draw_runs, recorded_levels, verdict
from fedstill.benchmark.scoring import Execute
from fedstill.benchmark.suites import Suite
from forged_entries import (
    Events,
    forged,
    made_on,
    refusals,
    rounds,
    shipped_copy,
    told,
    with_accuracy,
    with_digests,
    with_losses,
)

Forgery = Callable[[Entry, Path], None]


@pytest.fixture(params=["this processor", "another processor"])
def processor(request: pytest.FixtureRequest) -> str:
    """Where an entry says that it was made: there bits are compared, and here tolerances."""
    return str(request.param)


def replay(entry: Entry, do: Execute, processor: str) -> tuple[bool, str]:
    """Whether one replayed run of an entry passes, and what is printed."""
    if processor == "another processor":
        made_on(entry, "AMD EPYC")
    lines = list(verdict(entry.folder, do, ReplayRequest(runs=1, number=7)))
    return all(line.passed for line in lines), "\n".join(line.text for line in lines)


def by_events(change: Callable[[Events], Events | None]) -> Forgery:
    """A forgery of all runs that changes their events."""
    return lambda entry, tiny_entries: forged(entry, change)


def scaled(events: Events) -> None:
    """All accuracies are 1.3 times as high, in shares of the 60 test examples."""
    for event in rounds(events):
        counts = [round(1.3 * share * 60) for share in event["class_accuracy"]]
        event["class_accuracy"] = [min(1.0, count / 60) for count in counts]
        event["accuracy"] = min(1.0, 1.3 * event["accuracy"])


def only_the_last_round(events: Events) -> None:
    """The last of two rounds is better."""
    with_accuracy(events, 0.912, first=2)


def only_the_losses(events: Events) -> None:
    """All losses are lower."""
    with_losses(events, 0.9)


def half_the_bytes(events: Events) -> None:
    """Half as many bytes are sent."""
    for event in events:
        for key in ("bytes_up", "bytes_down"):
            if key in event:
                event[key] //= 2


def another_client(events: Events) -> None:
    """Another client than the drawn one acts in round 1."""
    of_clients = [event for event in events if event["event"] == "client"]
    of_first_round = [event for event in of_clients if event["round"] == 1]
    drawn = {event["client"] for event in of_first_round}
    of_first_round[0]["client"] = min({0, 1, 2, 3} - drawn)


def without_losses(events: Events) -> None:
    """No client has a loss."""
    for event in events:
        event.pop("loss", None)


def swapped_seeds(entry: Entry, tiny_entries: Path) -> None:
    """Each seed has the next one's run."""
    for column in ("even", "uneven"):
        for seed in range(5):
            next_run = tiny_entries / f"fedntd/{column}/seed{(seed + 1) % 5}"
            for name in ("journal.jsonl", "split.safetensors", "summary.json"):
                shutil.copy(next_run / name, entry.folder / f"{column}/seed{seed}")
    with_digests(entry)


def another_methods_journals(entry: Entry, tiny_entries: Path) -> None:
    """Each run has the journal and the summary of FedAvg's."""
    for path in entry.folder.rglob("journal.jsonl"):
        run = path.parent
        fedavgs_run = tiny_entries / "fedavg" / run.relative_to(entry.folder)
        for name in ("journal.jsonl", "summary.json"):
            shutil.copy(fedavgs_run / name, run)
    with_digests(entry)


def losses_without_a_value(events: Events) -> None:
    for event in events:
        if "loss" in event:
            event["loss"] = dict.fromkeys(event["loss"])


FORGERIES: dict[str, Forgery] = {
    "losses and accuracies": by_events(forged_entries.invented),
    "accuracies, and an outlier in round 1": by_events(forged_entries.invented_with_outlier),
    "the spread over seeds": by_events(forged_entries.with_spread),
    "a scaled curve": by_events(scaled),
    "only the last round": by_events(only_the_last_round),
    "only the losses": by_events(only_the_losses),
    "no losses": by_events(without_losses),
    "losses that are no numbers": by_events(losses_without_a_value),
    "bytes": by_events(half_the_bytes),
    "a client": by_events(another_client),
    "swapped seeds": swapped_seeds,
    "another method": another_methods_journals,
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_replay_rejects_what_was_invented_on_either_processor(
    forgery: str, processor: str, fedntd: Entry, tiny_entries: Path, do: Execute
) -> None:
    """All checks that run nothing pass; one replayed run is enough."""
    FORGERIES[forgery](fedntd, tiny_entries)
    assert refusals(fedntd.folder) == []
    good, printed = replay(fedntd, do, processor)
    assert not good
    assert "disagrees" in printed


def test_an_honest_entry_has_the_same_bits_and_the_rest_is_said_to_be_unproven(
    fedntd: Entry, do: Execute
) -> None:
    good, printed = replay(fedntd, do, "this processor")
    assert good
    assert "replayed here: bits" in printed
    assert "9 of 10 runs" in printed


def rounded(events: Events) -> None:
    for event in events:
        if "loss" in event:
            event["loss"] = {term: round(value, 6) for term, value in event["loss"].items()}


def test_last_digits_are_rejected_where_an_entry_was_made_and_within_tolerance_elsewhere(
    fedntd: Entry, do: Execute
) -> None:
    forged(fedntd, rounded)
    assert not replay(fedntd, do, "this processor")[0]
    good, printed = replay(fedntd, do, "another processor")
    assert good
    assert "replayed here: tolerance" in printed


def test_a_run_that_nobody_replays_may_be_invented_and_the_verdict_says_so(
    fedntd: Entry, do: Execute
) -> None:
    """The last round of a replay that is cut short, too."""
    forged(fedntd, only_the_last_round)
    lines = list(verdict(fedntd.folder, do, ReplayRequest(runs=1, rounds=1, number=7)))
    assert all(line.passed for line in lines)
    assert any("rounds after 1" in line.text for line in lines)
    unproven = list(verdict(fedntd.folder, do, ReplayRequest()))
    assert any("not replayed" in line.text for line in unproven)


def test_a_replay_of_all_rounds_is_recorded_whatever_number_was_asked_for(
    fedntd: Entry, do: Execute, tmp_path: Path
) -> None:
    """It has two rounds, so it cannot be limited to its first five."""
    request = ReplayRequest(runs=1, rounds=5, number=7, note=tmp_path / "levels")
    lines = list(verdict(fedntd.folder, do, request))
    assert not any("rounds after" in line.text for line in lines)
    assert list(recorded_levels(tmp_path / "levels").values()) == ["bits"]


def test_one_outlier_lowers_the_level_and_hides_no_other_number(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Four clients in a round have eight losses of FedNTD: one of these may be an outlier."""
    monkeypatch.setattr(
        tiny_ranking, "TINY", tiny_ranking.TINY.replace("sampled = 2", "sampled = 4")
    )
    everybody = tiny_ranking.install(monkeypatch)
    (entry,) = enter_rows(everybody, ["FedNTD"], tmp_path, tiny_ranking.do)
    forged(entry, forged_entries.with_outlier)
    good, printed = replay(entry, tiny_ranking.do, "another processor")
    assert good
    assert "replayed here: outliers" in printed
    forged(entry, only_the_last_round)
    (verdict,) = replays.replay_runs(read_entry(entry.folder), [("even", 0)], tiny_ranking.do)
    assert verdict.level == "disagrees"
    assert any(line.startswith("round 2: accuracy is ") for line in verdict.problems)
    assert any(line.startswith("the score: accuracy is ") for line in verdict.problems)


@dataclass(frozen=True)
class ShippedRun:
    """A run of an entry that ships, and how many of its rounds stand for a replay."""

    suite: str
    row: str
    place: str
    rounds: int


def compared_with(entry: Entry, honest: Path, run: ShippedRun) -> replays.ReplayedRun:
    """The comparison of a run of an entry with an honest one in the place of its repetitions."""
    entered = replays.comparable_events(entry.folder / run.place, run.rounds)
    replayed = replays.comparable_events(honest / run.place, run.rounds)
    return replays.compare_events(run.place, entered, [replayed], run.rounds)


def right_at_task_ends(events: Events) -> None:
    for event in events:
        if event["event"] == "task" and event["task"]:
            event["correct"] = [list(totals) for totals in event["totals"]]
            event["row"] = [1.0] * len(event["row"])


def better_answers(events: Events) -> None:
    for answer in rounds(events)[-1]["answers"]:
        answer |= {"average_accuracy": 1.0, "average_accuracy_before": 1.0}


@pytest.mark.parametrize(
    ("run", "change"),
    [
        (ShippedRun("digits-time", "FedAvg", "10-permuted-tasks/seed0", 20), right_at_task_ends),
        (ShippedRun("digits-peers", "local only", "three-classes/seed0", 1), better_answers),
    ],
    ids=["task ends", "answers"],
)
def test_task_ends_and_answers_are_compared_too(
    run: ShippedRun, change: Callable[[Events], None], tmp_path: Path
) -> None:
    """The entry that ships stands for the replay."""
    entry = shipped_copy(run.suite, run.row, tmp_path / "entry")
    honest = Path(shutil.copytree(entry.folder, tmp_path / "honest"))
    assert compared_with(entry, honest, run).level == "tolerance"
    forged(entry, change)
    verdict = compared_with(entry, honest, run)
    assert verdict.level == "disagrees"
    assert any(line.startswith("the score: accuracy") for line in verdict.problems)


def test_answers_of_peers_may_be_rounded_otherwise_and_their_counts_may_not(tmp_path: Path) -> None:
    """An answer has counts and accuracies side by side."""
    entry = shipped_copy("digits-peers", "local only", tmp_path / "entry")
    honest = Path(shutil.copytree(entry.folder, tmp_path / "honest"))
    run = ShippedRun("digits-peers", "local only", "three-classes/seed0", 1)

    def rounded_answers(events: Events) -> None:
        for answer in rounds(events)[-1]["answers"]:
            answer["average_accuracy"] += 1e-7

    def another_count(events: Events) -> None:
        rounds(events)[-1]["answers"][0]["client"] += 1

    forged(entry, rounded_answers)
    assert compared_with(entry, honest, run).level == "tolerance"
    forged(entry, another_count)
    assert compared_with(entry, honest, run).level == "disagrees"


def test_task_ends_in_another_order_have_other_bits(tmp_path: Path) -> None:
    """Then the last row of the matrix would be that of an earlier, easier task."""
    entry = shipped_copy("digits-time", "FedAvg", tmp_path / "entry")
    run = entry.folder / "10-permuted-tasks/seed0"
    honest = replays.comparable_events(run, 20)

    def task_ends_last(events: Events) -> Events:
        return sorted(events, key=lambda event: event["event"] == "task")

    forged(entry, task_ends_last)
    assert replays.comparable_events(run, 20) != honest


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda e: rounds(e)[-1].update(class_accuracy=[2.0] * 10), "class_accuracy"),
        (lambda e: rounds(e)[-1].update(class_accuracy=["1.0"] * 10), "class_accuracy"),
        (lambda e: rounds(e)[-1].pop("class_accuracy"), "class_accuracy"),
        (lambda e: rounds(e)[-1].update(accuracy="0.5"), "accuracy"),
        (lambda e: rounds(e)[-1].update(bytes_up=-1), "bytes_up"),
        (lambda e: rounds(e)[0].update(round=2), "round 2"),
    ],
)
def test_a_journal_has_the_types_that_a_score_needs(
    change: Callable[[Events], object], field: str, entry: Entry
) -> None:
    path = entry.folder / "even/seed0/journal.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    change(events)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    with_digests(entry)
    (problem,) = refusals(entry.folder)
    assert "even/seed0" in problem
    assert field in problem


def cut(entry: Entry, place: str, last_round: int) -> None:
    """Say that a run diverged in the round after this one, and leave out all later events."""

    def is_earlier(event: dict[str, Any]) -> bool:
        if event["event"] == "client":
            return event["round"] <= last_round + 1
        return event.get("round", 0) <= last_round

    path = entry.folder / place / "journal.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps(event, separators=(",", ":")) for event in filter(is_earlier, events)]
    path.write_text("\n".join([*lines, ""]))
    (entry.folder / place / "summary.json").unlink()
    diverged = {place: "its parameters' norm is too large"}
    told(entry, lambda tree: tree.update(diverged=diverged))
    with_digests(entry)


def test_a_run_that_is_cut_where_it_was_best_disagrees_in_a_replay(
    entry: Entry, tmp_path: Path, do: Execute
) -> None:
    honest = Path(shutil.copytree(entry.folder, tmp_path / "honest"))
    cut(entry, "even/seed0", 1)
    assert refusals(entry.folder) == [], "a run that diverged looks like this"
    for processor in ("AMD EPYC", entry.made_with["processor"]):
        made_on(entry, processor)
        (verdict,) = replays.replay_runs(read_entry(entry.folder), [("even", 0)], do)
        assert verdict.level == "disagrees"

    path = entry.folder / "even/seed0/journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"event":"client","round":2,' not in line))
    with_digests(entry)
    assert "even/seed0" in refusals(entry.folder)[0]

    told(entry, lambda tree: tree.update(diverged={"even/seed1": "never"}))
    shutil.copytree(honest / "even", entry.folder / "even", dirs_exist_ok=True)
    (entry.folder / "even/seed1/summary.json").unlink()
    with_digests(entry)
    assert "even/seed1" in refusals(entry.folder)[0]


@pytest.mark.usefixtures("suite")
def test_a_reference_sets_no_fields(tiny_entries: Path, tmp_path: Path) -> None:
    entry = read_entry(Path(shutil.copytree(tiny_entries / "joint", tmp_path / "joint")))
    assert refusals(entry.folder) == []
    told(entry, lambda tree: tree.update(fields={"plan.lr": 0.0001}))
    (problem,) = refusals(entry.folder)
    assert "plan.lr" in problem


def mine(entry: Entry, *, name: str = "mine.py", beta: float = 1.0) -> None:
    """Turn an entry into that of a method in a file of its own, with a table ``[method]`` of its
    runs.
    """
    (entry.folder / "mine.py").write_text("raise SystemExit")
    for path in entry.folder.rglob("config.toml"):
        method_table = f'[method]\nname = "{name}"\nbeta = {beta}\n\n['
        text = re.sub(r"\[method\]\n.*?\n\[", method_table, path.read_text(), flags=re.DOTALL)
        path.write_text(text)

    fields = {"method.beta": 1.0, "plan.lr": 0.1}
    choice = {"tries": [fields, {}], "scores": [[0.9] * 3, [0.1] * 3], "sent": [1, 1]}
    told(
        entry,
        lambda tree: tree.update(
            row="Mine", method="mine.py", file="mine.py", fields=fields, choice=choice
        ),
    )
    with_digests(entry)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"name": "other.py"}, "method.name = 'other.py'"), ({"beta": 2.0}, "method.beta = 2.0")],
)
def test_all_runs_of_a_file_of_its_own_have_the_chosen_fields(
    values: dict[str, Any], message: str, entry: Entry
) -> None:
    mine(entry, **values)
    assert message in refusals(entry.folder)[0]


@pytest.mark.parametrize(
    "choice",
    [
        {"scores": [[7.0], [0.1]]},
        {"scores": [[7.0] * 3, [0.1] * 3]},
        {"scores": [[float("nan")] * 3, [0.1] * 3]},
        {"sent": [-1, 1]},
    ],
)
def test_scores_of_choosing_are_shares_of_three_seeds(choice: dict[str, Any], entry: Entry) -> None:
    mine(entry)
    assert refusals(entry.folder) == []
    told(entry, lambda tree: tree["choice"].update(choice))
    (problem,) = refusals(entry.folder)
    assert "scores" in problem


def test_more_rounds_than_memory_holds_are_refused_first(entry: Entry) -> None:
    for path in entry.folder.rglob("config.toml"):
        path.write_text(path.read_text().replace("rounds = 2", "rounds = 1000000000000"))
    with_digests(entry)
    (wrong,) = refusals(entry.folder)
    assert "rounds = 1000000000000" in wrong


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "a | b", "a\nb", "`a`", "\\input{a}"]
)
def test_names_that_mean_something_in_a_table_are_refused(name: str, entry: Entry) -> None:
    told(entry, lambda tree: tree["made"].update(processor=name))
    assert repr(name) in refusals(entry.folder)[0]


def test_whoever_checks_draws_other_runs_by_another_number(entry: Entry, suite: Suite) -> None:
    draws = {tuple(draw_runs(entry, suite, 2, number)) for number in range(20)}
    assert len(draws) > 5
    assert draw_runs(entry, suite, 2, 7) == draw_runs(entry, suite, 2, 7)
