"""What the ranking takes from a journal, by hand; choosing, entering and resuming on a tiny
suite.
"""

from __future__ import annotations

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


def journal(folder: Path, events: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return folder


def rounds(accuracies: Sequence[Sequence[float]], **more: Any) -> list[dict[str, Any]]:
    """A journal of so many rounds with these class accuracies."""
    start: list[dict[str, Any]] = [
        {"event": "start", "classes": ["a", "b"]},
        {"event": "initial", "accuracy": 0.0, "class_accuracy": [0.0, 0.0]},
    ]
    shared = {
        "event": "round",
        "forgetting": 0.25,
        "bytes_up": 10,
        "bytes_down": 20,
        "seconds_cpu": 0.5,
    }
    return start + [
        {**shared, "round": i + 1, "accuracy": float(np.mean(a)), "class_accuracy": list(a), **more}
        for i, a in enumerate(accuracies)
    ]


def test_learned_times_kept_is_the_accuracy(tmp_path: Path) -> None:
    """Ten rounds, two rows: class 0 goes from .8 to .4, class 1 from .2 to .6; best .8 and .6, last
    .4 and .6.
    """
    own = score_of(journal(tmp_path, rounds([(0.8, 0.2)] * 5 + [(0.4, 0.6)] * 5)), 10)
    assert own.learned == pytest.approx(0.7, abs=1e-12)
    assert own.accuracy == pytest.approx(0.5, abs=1e-12)
    assert own.kept == pytest.approx(0.5 / 0.7, abs=1e-12)
    assert own.learned * own.kept == pytest.approx(own.accuracy, abs=1e-12)
    assert (own.bytes_up, own.bytes_down, own.sent, own.seconds_cpu, own.rounds) == (
        100,
        200,
        300,
        5.0,
        10,
    )
    assert math.isnan(own.average_forgetting)


def test_rows_are_means_of_five_successive_rounds_the_last_of_the_last_five(tmp_path: Path) -> None:
    steps = [(i / 10, 0.0) for i in range(7)]
    rows = accuracy_matrix(rounds(steps), 7)
    assert rows[:, 0] == pytest.approx([np.mean([0.2, 0.3, 0.4, 0.5, 0.6])], abs=1e-12)
    rows = accuracy_matrix(rounds([(i / 20, 0.0) for i in range(12)]), 12)
    assert rows[:, 0] == pytest.approx(
        [np.mean(np.arange(2, 7)) / 20, np.mean(np.arange(7, 12)) / 20], abs=1e-12
    )
    assert len(accuracy_matrix(rounds(steps[:3]), 3)) == 1


@pytest.mark.parametrize(("asked", "known"), [(1, True), (2, False), (9, False), (10, True)])
def test_what_was_kept_of_one_row_is_not_known_but_of_one_round(
    asked: int, known: bool, tmp_path: Path
) -> None:
    """Half is lost in the second round; means of five successive rounds show it from ten rounds
    on.
    """
    own = score_of(journal(tmp_path, rounds([(0.8, 0.8), *[(0.4, 0.4)] * 9][:asked])), asked)
    assert math.isnan(own.kept) is not known
    assert asked == 1 or not known or own.kept < 1


def test_a_run_that_diverged_counts_as_its_last_good_round(tmp_path: Path) -> None:
    own = score_of(journal(tmp_path, rounds([(0.8, 0.2)] * 5 + [(0.4, 0.6)])), 15)
    assert (own.accuracy, own.rounds) == (pytest.approx(0.5), 6)
    nothing = score_of(journal(tmp_path, rounds([])), 10)
    assert (nothing.accuracy, nothing.kept, nothing.rounds) == (0.0, 0.0, 0)


def test_tasks_are_scored_by_class_at_their_ends(tmp_path: Path) -> None:
    """Two tasks of one class: class 0 has 8 of 10 right, then 2; class 1 none, then 6."""
    stream = {"stream": {"classes": [[0], [1]], "first_rounds": [1, 2]}}
    ends = [
        {
            "event": "task",
            "task": 0,
            "round": 0,
            "correct": [[0, 0]],
            "totals": [[10, 10]],
            "row": [0, 0],
        },
        {
            "event": "task",
            "task": 1,
            "round": 1,
            "correct": [[8, 0]],
            "totals": [[10, 10]],
            "row": [0.8, 0],
        },
        {
            "event": "task",
            "task": 2,
            "round": 2,
            "correct": [[2, 6]],
            "totals": [[10, 10]],
            "row": [0.2, 0.6],
        },
    ]
    events = rounds([(0.8, 0.0), (0.2, 0.6)])
    own = score_of(journal(tmp_path, [{**events[0], **stream}, *events[1:], *ends]), 2)
    assert (own.learned, own.accuracy) == (pytest.approx(0.7), pytest.approx(0.4))
    assert (own.average_forgetting, own.backward_transfer) == (
        pytest.approx(0.6),
        pytest.approx(-0.6),
    )


def test_peers_are_scored_by_client_before_and_after(tmp_path: Path) -> None:
    answers = [
        {"client": 0, "query": [1], "average_accuracy_before": 0.5, "average_accuracy": 0.7},
        {"client": 1, "query": [0], "average_accuracy_before": 0.6, "average_accuracy": 0.4},
    ]
    own = score_of(journal(tmp_path, asked(rounds([(0.1, 0.1)], answers=answers))), 1)
    assert (own.learned, own.accuracy) == (pytest.approx(0.65), pytest.approx(0.55))
    lone = {"client": 0, "query": [1], "average_accuracy_before": None, "average_accuracy": 0.7}
    answers = [lone]
    assert score_of(journal(tmp_path, asked(rounds([(0.1, 0.1)], answers=answers))), 1).kept == 1
    assert score_of(
        journal(tmp_path, rounds([(0.1, 0.1)], answers=answers)), 1
    ).accuracy == pytest.approx(0.1)


def asked(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of a run in which clients ask, which its first event says."""
    return [{**events[0], "queries": {"0": [1], "1": [0]}}, *events[1:]]


def test_a_journal_that_cannot_be_scored_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match=r"journal\.jsonl"):
        score_of(journal(tmp_path, [{"event": "start"}, {"event": "round", "round": 1}]), 1)


def test_the_suites_fedavg_is_that_of_compare_to_the_bit(
    suite: Suite, made: Path, tmp_path: Path
) -> None:
    recipe = suite.recipe
    tree = {**recipe.common, **recipe.columns["uneven"], "method": "fedavg"}
    tree["plan"] = {**tree["plan"], "lr": 0.1}
    (ours,) = variants(from_tree(tree, {}, None), tmp_path, seeds=(2,))
    tiny_ranking.do([ours])
    here = [without_times(e) for e in read_journal(ours.folder / "journal.jsonl")]
    entered = [
        without_times(e)
        for e in read_journal(made / "fedavg" / "uneven" / "seed2" / "journal.jsonl")
    ]
    assert here == entered


def test_fields_are_chosen_and_the_same_call_does_nothing_anew(
    suite: Suite, tmp_path: Path
) -> None:
    done: list[Path] = []

    def counting(runs: Sequence[Variant]) -> list[Outcome]:
        done.extend(run.folder for run in runs if not (run.folder / "summary.json").is_file())
        return tiny_ranking.do(runs)

    bare = replace(suite, choices={})
    with pytest.raises(ConfigError, match="FedAvg"):
        bare.chosen_fields("FedAvg")
    chosen = choose_fields(bare, ["FedAvg"], tmp_path, counting)
    assert len(done) == 2 * 3
    choice = chosen.choices["FedAvg"]
    trials = bare.trials("FedAvg", tmp_path / suite.name / "choosing")
    scores = [[score_of(run.folder, 1).accuracy for run in runs] for runs in trials]
    assert [list(own) for own in choice.scores] == scores
    assert choose_fields(bare, ["FedAvg"], tmp_path, counting).choices == chosen.choices
    assert len(done) == 2 * 3, "all runs were there"
    assert with_stored_choices(bare, tmp_path).choices["FedAvg"] == choice, "it was kept"


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
    both = choose_fields(by_rate, ["FedNTD"], tmp_path, tiny_ranking.do)
    assert list(both.choices) == ["FedAvg", "FedNTD"]

    monkeypatch.setattr(competing, "choice_of", lambda *_: BEST_RATE)
    same = choose_fields(by_rate, ["FedAvg"], tmp_path, tiny_ranking.do)
    assert same.choices == both.choices
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
    tried = {
        own.lr
        for runs in chosen.trials("FedNTD", tmp_path)
        for run in runs
        for own in run.settings.plans.values()
    }
    assert tried == {rate}


def outcomes(runs: Sequence[Variant], state: str, error: Exception | None = None) -> list[Outcome]:
    kind = type(error)
    trace = f"Traceback\n{kind.__module__}.{kind.__name__}: {error}" if error else ""
    return [Outcome(run, 2, state=state, problem=str(error or ""), trace=trace) for run in runs]


def test_only_runs_that_diverged_count_without_an_end(suite: Suite, tmp_path: Path) -> None:
    runs = suite.trials("FedAvg", tmp_path)[0]
    tiny_ranking.do(runs)
    diverged = Diverged("round 1: not finite")
    own = scored_runs(runs, lambda r: outcomes(r, "failed", diverged))
    assert {one.diverged for one in own} == {"round 1: not finite"}
    assert choice_of(own, 1).scores == ((0.0, 0.0, 0.0),)
    with pytest.raises(RunsFailed, match=r"3 of 3 failed; .*boom"):
        scored_runs(runs, lambda r: outcomes(r, "failed", FedstillError("boom")))
    with pytest.raises(Interrupted, match="3 of 3"):
        scored_runs(runs, lambda r: outcomes(r, "stopped"))


def test_a_run_that_really_diverges_is_told_by_its_error(suite: Suite, tmp_path: Path) -> None:
    """The comparison's own processes carry it out, and hand back what was raised."""
    huge = suite.recipe.variants([("FedAvg", "uneven")], (0,), {"plan.lr": 1e8}, tmp_path)
    (one,) = scored_runs(huge, lambda runs: carry_out_runs(runs, 1, lambda _: None))
    assert "not finite" in one.diverged or "norm" in one.diverged
    assert one.score.rounds < 2


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
    with_it, row = added.suite, added.name
    assert (row, with_it.tries[row]) == ("Mine", [{"method.mu": 0.2}, {"method.mu": 2.0}])
    rehearse(with_it, row, tiny_ranking.do)
    chosen = choose_fields(with_it, [row], tmp_path / "out", tiny_ranking.do)
    (entry,) = enter_rows(chosen, [row], tmp_path / "out", tiny_ranking.do, file)
    assert isinstance(entry, Entry)
    (entry.folder / "mine.py").write_text("raise SystemExit('executed')\n" + NEWCOMER)
    (problem,) = refusals(entry.folder)
    assert "mine.py" in problem
    executed = "raise SystemExit('executed')\n" + NEWCOMER
    told = (
        (entry.folder / "entry.toml")
        .read_text()
        .replace(entry.digests["mine.py"], digest(executed.encode()))
    )
    (entry.folder / "entry.toml").write_text(told)
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
    with_it, row = added.suite, added.name
    assert (row, with_it.tries[row]) == ("Mine again", [{}, {"plan.lr": 0.1}])
    with pytest.raises(ConfigError, match="'FedAvg'"):
        add_method(suite, file, "fedavg")
    file.write_text(NEWCOMER.replace('({"mu": 0.2}, {"mu": 2.0})', '{"mu": 0.2}'))
    with pytest.raises(ConfigError, match="tries"):
        add_method(suite, file)
    file.write_text(NEWCOMER.replace('({"mu": 0.2}, {"mu": 2.0})', "3"))
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
    with_it, row = added.suite, added.name
    with pytest.raises(FedstillError, match="by key"):
        rehearse(with_it, row, tiny_ranking.do)


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
