"""Scores of journals written by hand; fields are chosen, and rows entered and resumed, on a tiny
suite.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_ranking
from fedstill.benchmark import competing
from fedstill.benchmark.competing import (
    CHOICES_FILE,
    add_method,
    choice_of,
    choose_fields,
    enter_rows,
    rehearse,
    store_choices,
    with_stored_choices,
)
from fedstill.benchmark.entries import Entry, read_entry
from fedstill.benchmark.replays import replay_runs
from fedstill.benchmark.scoring import accuracy_matrix, score_of, scored_runs
from fedstill.benchmark.suites import Choice, Suite
from fedstill.config.experiment import from_tree
from fedstill.core.errors import (
    ConfigError,
    CorruptFile,
    Diverged,
    FedstillError,
    Interrupted,
    RunsFailed,
    UntrustedCode,
)
from fedstill.core.files import digest
from fedstill.running.compare import Outcome, Variant, carry_out_runs, variants
from fedstill.running.journal import read_journal, without_times
from forged_entries import refusals

Events = list[dict[str, Any]]
ClassAccuracies = tuple[float, float]


def journal(folder: Path, events: Events) -> Path:
    """The folder of a run, with a journal of these events."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(event) + "\n" for event in events]
    (folder / "journal.jsonl").write_text("".join(lines))
    return folder


def rounds(accuracies: Sequence[ClassAccuracies], **fields: Any) -> Events:
    """The events of a run with these class accuracies in its rounds, and further fields of
    rounds.
    """
    events: Events = [
        {"event": "start", "classes": ["a", "b"]},
        {"event": "initial", "accuracy": 0.0, "class_accuracy": [0.0, 0.0]},
    ]
    for round, class_accuracy in enumerate(accuracies, 1):
        event = {
            "event": "round",
            "round": round,
            "accuracy": float(np.mean(class_accuracy)),
            "class_accuracy": list(class_accuracy),
            "forgetting": 0.25,
            "bytes_up": 10,
            "bytes_down": 20,
            "seconds_cpu": 0.5,
        }
        events.append({**event, **fields})
    return events


def test_learned_times_kept_is_the_accuracy(tmp_path: Path) -> None:
    """Ten rounds, two rows: class 0 goes from .8 to .4, class 1 from .2 to .6; best .8 and .6, last
    .4 and .6.
    """
    score = score_of(journal(tmp_path, rounds([(0.8, 0.2)] * 5 + [(0.4, 0.6)] * 5)), 10)
    assert score.learned == pytest.approx(0.7, abs=1e-12)
    assert score.accuracy == pytest.approx(0.5, abs=1e-12)
    assert score.kept == pytest.approx(0.5 / 0.7, abs=1e-12)
    assert score.learned * score.kept == pytest.approx(score.accuracy, abs=1e-12)
    assert score.bytes_up == 100
    assert score.bytes_down == 200
    assert score.sent == 300
    assert score.seconds_cpu == 5.0
    assert score.rounds == 10
    assert math.isnan(score.average_forgetting)


def test_rows_are_means_of_five_successive_rounds_the_last_of_the_last_five(tmp_path: Path) -> None:
    seven_rounds = [(step / 10, 0.0) for step in range(7)]
    first_class = accuracy_matrix(rounds(seven_rounds), 7)[:, 0]
    assert first_class == pytest.approx([np.mean([0.2, 0.3, 0.4, 0.5, 0.6])], abs=1e-12)

    twelve_rounds = [(step / 20, 0.0) for step in range(12)]
    first_class = accuracy_matrix(rounds(twelve_rounds), 12)[:, 0]
    expected = [np.mean(np.arange(2, 7)) / 20, np.mean(np.arange(7, 12)) / 20]
    assert first_class == pytest.approx(expected, abs=1e-12)

    assert len(accuracy_matrix(rounds(seven_rounds[:3]), 3)) == 1


@pytest.mark.parametrize(
    ("count", "share"), [(1, 1.0), (2, math.nan), (9, math.nan), (10, (0.4 * 5) / (0.8 + 0.4 * 4))]
)
def test_the_share_kept_of_one_row_is_unknown_except_in_one_round(
    count: int, share: float, tmp_path: Path
) -> None:
    """Half is lost in the second round; means of five successive rounds show it from ten rounds
    on.
    """
    accuracies = [(0.8, 0.8), *[(0.4, 0.4)] * 9]
    score = score_of(journal(tmp_path, rounds(accuracies[:count])), count)
    assert score.kept == pytest.approx(share, nan_ok=True)


def test_a_run_that_diverged_counts_as_its_last_good_round(tmp_path: Path) -> None:
    score = score_of(journal(tmp_path, rounds([(0.8, 0.2)] * 5 + [(0.4, 0.6)])), 15)
    assert score.accuracy == pytest.approx(0.5)
    assert score.rounds == 6

    without_rounds = score_of(journal(tmp_path, rounds([])), 10)
    assert without_rounds.accuracy == 0.0
    assert without_rounds.kept == 0.0
    assert without_rounds.rounds == 0


def task_end(task: int, correct: list[int]) -> dict[str, Any]:
    """The event of a task's end, after as many rounds, with ten test examples of each class."""
    return {
        "event": "task",
        "task": task,
        "round": task,
        "correct": [correct],
        "totals": [[10, 10]],
        "row": [count / 10 for count in correct],
    }


def test_tasks_are_scored_by_class_at_their_ends(tmp_path: Path) -> None:
    """Two tasks of one class: class 0 has 8 of 10 right, then 2; class 1 none, then 6."""
    events = rounds([(0.8, 0.0), (0.2, 0.6)])
    events[0]["stream"] = {"classes": [[0], [1]], "first_rounds": [1, 2]}
    events += [task_end(0, [0, 0]), task_end(1, [8, 0]), task_end(2, [2, 6])]

    score = score_of(journal(tmp_path, events), 2)

    assert score.learned == pytest.approx(0.7)
    assert score.accuracy == pytest.approx(0.4)
    assert score.average_forgetting == pytest.approx(0.6)
    assert score.backward_transfer == pytest.approx(-0.6)


def answer(client: int, accuracy_before: float | None, accuracy: float) -> dict[str, Any]:
    """The result of a client that asks for the other class."""
    return {
        "client": client,
        "query": [1 - client],
        "average_accuracy_before": accuracy_before,
        "average_accuracy": accuracy,
    }


def round_with_answers(*answers: dict[str, Any], has_queries: bool = True) -> Events:
    """A run of one round among peers, whose first event says whether there are queries."""
    events = rounds([(0.1, 0.1)], answers=list(answers))
    if has_queries:
        events[0]["queries"] = {"0": [1], "1": [0]}
    return events


def test_peers_are_scored_by_client_before_and_after(tmp_path: Path) -> None:
    events = round_with_answers(answer(0, 0.5, 0.7), answer(1, 0.6, 0.4))
    score = score_of(journal(tmp_path, events), 1)
    assert score.learned == pytest.approx(0.65)
    assert score.accuracy == pytest.approx(0.55)

    without_a_past = answer(0, None, 0.7)
    score = score_of(journal(tmp_path, round_with_answers(without_a_past)), 1)
    assert score.kept == 1

    without_queries = round_with_answers(without_a_past, has_queries=False)
    score = score_of(journal(tmp_path, without_queries), 1)
    assert score.accuracy == pytest.approx(0.1)


def test_a_journal_that_cannot_be_scored_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match=r"journal\.jsonl"):
        score_of(journal(tmp_path, [{"event": "start"}, {"event": "round", "round": 1}]), 1)


def test_the_suites_fedavg_is_that_of_compare_to_the_bit(
    suite: Suite, tiny_entries: Path, tmp_path: Path
) -> None:
    recipe = suite.recipe
    tree = {**recipe.common, **recipe.columns["uneven"], "method": "fedavg"}
    tree["plan"] = {**tree["plan"], "lr": 0.1}
    (plain_run,) = variants(from_tree(tree, {}, None), tmp_path, seeds=(2,))
    tiny_ranking.do([plain_run])

    journal_of_plain_run = read_journal(plain_run.folder / "journal.jsonl")
    entered_run = tiny_entries / "fedavg" / "uneven" / "seed2"
    journal_of_entry = read_journal(entered_run / "journal.jsonl")
    assert list(map(without_times, journal_of_plain_run)) == list(
        map(without_times, journal_of_entry)
    )


def test_fields_are_chosen_and_the_same_call_does_nothing_anew(
    suite: Suite, tmp_path: Path
) -> None:
    executed: list[Path] = []

    def counting(runs: Sequence[Variant]) -> list[Outcome]:
        folders = [run.folder for run in runs]
        executed.extend(folder for folder in folders if not (folder / "summary.json").is_file())
        return tiny_ranking.do(runs)

    bare = replace(suite, choices={})
    with pytest.raises(ConfigError, match="FedAvg"):
        bare.chosen_fields("FedAvg")
    chosen = choose_fields(bare, ["FedAvg"], tmp_path, counting)
    assert len(executed) == 2 * 3
    choice = chosen.choices["FedAvg"]
    trials = bare.trials("FedAvg", tmp_path / suite.name / "choosing")
    for runs, scores in zip(trials, choice.scores, strict=True):
        assert list(scores) == [score_of(run.folder, 1).accuracy for run in runs]

    assert choose_fields(bare, ["FedAvg"], tmp_path, counting).choices == chosen.choices
    assert len(executed) == 2 * 3, "all runs exist already"
    assert with_stored_choices(bare, tmp_path).choices["FedAvg"] == choice, "it is stored"


RATES = [{"plan.lr": 0.01}, {"plan.lr": 0.1}, {"plan.lr": 1.0}]
BEST_RATE = Choice(((0.1, 0.1, 0.1), (0.2, 0.2, 0.2), (0.9, 0.9, 0.9)), (10, 10, 10))
"""Scores of ``RATES``, of which the last is the best."""


@pytest.fixture
def rated(suite: Suite, tmp_path: Path) -> Suite:
    """A suite that tries ``RATES`` for FedAvg, with their stored scores."""
    rated = replace(suite, choices={}, tries={**suite.tries, "FedAvg": RATES})
    chosen = replace(rated, choices={"FedAvg": BEST_RATE})
    store_choices(chosen, tmp_path / suite.name / CHOICES_FILE)
    assert with_stored_choices(rated, tmp_path).choices == chosen.choices
    return rated


@pytest.mark.parametrize("version", [1, 2])
def test_stored_scores_are_not_those_of_other_tries(
    version: int, rated: Suite, tmp_path: Path
) -> None:
    changed_rates = [*RATES[1:], {"plan.lr": 10.0}]
    tries = {**rated.tries, "FedAvg": changed_rates}
    changed = replace(rated, version=version, tries=tries)
    cause = {1: r"FedAvg: .* other tries", 2: "another version"}[version]
    with pytest.raises(ConfigError, match=f"{cause}.*`fedstill rank choose"):
        with_stored_choices(changed, tmp_path)

    chosen = choose_fields(changed, ["FedNTD"], tmp_path, tiny_ranking.do)
    assert list(chosen.choices) == ["FedNTD"], "the scores of other tries are left out"
    assert with_stored_choices(changed, tmp_path).choices == chosen.choices


def test_another_learning_rate_makes_the_choices_of_other_rows_invalid(
    rated: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_rate = replace(rated, rate_row="FedAvg", choices={"FedAvg": BEST_RATE})
    chosen = choose_fields(by_rate, ["FedNTD"], tmp_path, tiny_ranking.do)
    assert list(chosen.choices) == ["FedAvg", "FedNTD"]

    monkeypatch.setattr(competing, "choice_of", lambda *_: BEST_RATE)
    same = choose_fields(by_rate, ["FedAvg"], tmp_path, tiny_ranking.do)
    assert same.choices == chosen.choices
    first_is_best = replace(BEST_RATE, scores=BEST_RATE.scores[::-1])
    monkeypatch.setattr(competing, "choice_of", lambda *_: first_is_best)
    again = choose_fields(by_rate, ["FedAvg"], tmp_path, tiny_ranking.do)
    assert again.choices == {"FedAvg": first_is_best}


def test_what_ships_is_never_combined_with_another_learning_rate(
    rated: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores of FedNTD belong to the learning rate that ships."""
    ships = {"FedAvg": BEST_RATE, "FedNTD": tiny_ranking.SCORES["FedNTD"]}
    by_rate = replace(rated, rate_row="FedAvg", choices=ships)
    first_is_best = replace(BEST_RATE, scores=BEST_RATE.scores[::-1])
    monkeypatch.setattr(competing, "choice_of", lambda *_: first_is_best)
    again = choose_fields(by_rate, ["FedAvg"], tmp_path, tiny_ranking.do)
    assert again.choices == {"FedAvg": first_is_best}
    assert with_stored_choices(by_rate, tmp_path).choices == ships
    assert choose_fields(by_rate, [], tmp_path, tiny_ranking.do).choices == ships


def test_the_row_whose_learning_rate_all_have_is_chosen_first(suite: Suite, tmp_path: Path) -> None:
    bare = replace(suite, choices={}, rate_row="FedAvg")
    chosen = choose_fields(bare, ["FedNTD", "FedAvg"], tmp_path, tiny_ranking.do)
    assert list(chosen.choices) == ["FedAvg", "FedNTD"]
    rate = chosen.chosen_fields("FedAvg").get("plan.lr", 0.05)
    for run in itertools.chain.from_iterable(chosen.trials("FedNTD", tmp_path)):
        assert {plan.lr for plan in run.settings.plans.values()} == {rate}


def failed(runs: Sequence[Variant], error: Exception) -> list[Outcome]:
    """The outcomes of runs that all ended with an error."""
    kind = type(error)
    trace = f"Traceback\n{kind.__module__}.{kind.__name__}: {error}"
    return [Outcome(run, 2, state="failed", problem=str(error), trace=trace) for run in runs]


def stopped(runs: Sequence[Variant]) -> list[Outcome]:
    """The outcomes of runs that were all stopped."""
    return [Outcome(run, 2, state="stopped") for run in runs]


def test_only_runs_that_diverged_count_without_an_end(suite: Suite, tmp_path: Path) -> None:
    runs = suite.trials("FedAvg", tmp_path)[0]
    tiny_ranking.do(runs)
    diverged = Diverged("round 1: not finite")
    scored = scored_runs(runs, lambda runs: failed(runs, diverged))
    assert {run.diverged for run in scored} == {"round 1: not finite"}
    assert choice_of(scored, 1).scores == ((0.0, 0.0, 0.0),)

    with pytest.raises(RunsFailed, match=r"3 of 3 failed; .*boom"):
        scored_runs(runs, lambda runs: failed(runs, FedstillError("boom")))
    with pytest.raises(Interrupted, match="3 of 3"):
        scored_runs(runs, stopped)


def test_a_run_that_really_diverges_is_told_by_its_error(suite: Suite, tmp_path: Path) -> None:
    """A process of the comparison executes it, and returns the error."""
    huge = suite.recipe.variants([("FedAvg", "uneven")], (0,), {"plan.lr": 1e8}, tmp_path)
    (scored,) = scored_runs(huge, lambda runs: carry_out_runs(runs, 1, lambda _: None))
    assert "not finite" in scored.diverged or "norm" in scored.diverged
    assert scored.score.rounds < 2


NEWCOMER = """
from dataclasses import dataclass
from typing import ClassVar

from fedstill.core.fields import NonNegative
from fedstill.methods.fedprox import FedProx
from fedstill.core.registry import method


@method("mine")
@dataclass(frozen=True)
class Mine(FedProx):
    \"\"\"FedProx by another name.\"\"\"

    mu: NonNegative = 0.2
    tries: ClassVar = ({"mu": 0.2}, {"mu": 2.0})
"""


def test_a_newcomers_method_is_entered_and_checked_without_its_file_being_executed(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(NEWCOMER)
    added = add_method(suite, file)
    assert added.name == "Mine"
    assert added.suite.tries["Mine"] == [{"method.mu": 0.2}, {"method.mu": 2.0}]
    rehearse(added.suite, "Mine", tiny_ranking.do)
    chosen = choose_fields(added.suite, ["Mine"], tmp_path / "out", tiny_ranking.do)
    (entry,) = enter_rows(chosen, ["Mine"], tmp_path / "out", tiny_ranking.do, file)
    assert isinstance(entry, Entry)

    ends_if_executed = "raise SystemExit('executed')\n" + NEWCOMER
    (entry.folder / "mine.py").write_text(ends_if_executed)
    (problem,) = refusals(entry.folder)
    assert "mine.py" in problem

    entry_file = entry.folder / "entry.toml"
    new_digest = digest(ends_if_executed.encode())
    entry_file.write_text(entry_file.read_text().replace(entry.digests["mine.py"], new_digest))
    assert refusals(entry.folder) == []
    assert not list(entry.folder.rglob("__pycache__"))
    with pytest.raises(UntrustedCode, match=r"entry\.toml"):
        list(replay_runs(read_entry(entry.folder), [("even", 0)], tiny_ranking.do))


def test_a_newcomer_without_tries_gets_fedavgs_and_wrong_ones_are_refused(
    suite: Suite, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(NEWCOMER.replace("    tries:", "    other:"))
    added = add_method(suite, file, "Mine again")
    assert added.name == "Mine again"
    assert added.suite.tries["Mine again"] == [{}, {"plan.lr": 0.1}]
    with pytest.raises(ConfigError, match="'FedAvg'"):
        add_method(suite, file, "fedavg")
    with pytest.raises(ConfigError, match="share a folder"):
        add_method(added.suite, file, "Mine_again")

    for wrong_tries in ('{"mu": 0.2}', "3"):
        file.write_text(NEWCOMER.replace('({"mu": 0.2}, {"mu": 2.0})', wrong_tries))
        with pytest.raises(ConfigError, match="tries"):
            add_method(suite, file)
    with pytest.raises(ConfigError, match=r"none\.py"):
        add_method(suite, tmp_path / "none.py")
    file.write_text(NEWCOMER)
    with pytest.raises(ConfigError, match="Gäp"):
        add_method(suite, file, "Gäp")
    accented = file.rename(tmp_path / "gäp.py")
    with pytest.raises(ConfigError, match="gäp"):
        add_method(suite, accented, "Gap")


def test_a_method_that_does_not_repeat_itself_is_refused(suite: Suite, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    random = """
    def work(self, stage):
        import os

        return type(super().work(stage))(int.from_bytes(os.urandom(2)) / 1e6)
"""
    file.write_text(NEWCOMER + random)
    added = add_method(suite, file)
    with pytest.raises(FedstillError, match="by key"):
        rehearse(added.suite, added.name, tiny_ranking.do)


def test_a_method_that_the_track_has_no_data_or_topology_for_names_the_track_to_enter(
    suite: Suite, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    public = "    needs: ClassVar = Need.SAME_SHAPES | Need.PUBLIC_DATA\n"
    chain = '    topology: ClassVar = "sequential"\n'
    head = NEWCOMER.replace("\n@method", "\nfrom fedstill import Need\n\n\n@method", 1)
    for line, track in ((public, "--track public"), (chain, "--track chain")):
        file.write_text(head.rstrip("\n") + "\n" + line)
        with pytest.raises(ConfigError, match=track):
            add_method(suite, file)


def test_an_entrant_has_its_stages_and_as_many_clients_as_all_rows(suite: Suite) -> None:
    entered = suite.with_row("mine", "fedavg", [{}], {"server": "distil"})
    topology = entered.recipe.rows["mine"]["topology"]
    assert topology == {**suite.recipe.common["topology"], "server": "distil"}
    assert entered.added_topology("mine") == {"server": "distil"}
    with pytest.raises(ConfigError, match=r"topology\.sampled"):
        suite.with_row("mine", "fedavg", [{}], {"sampled": 4})
