"""What a suite takes: from timed rounds, by the steps and examples that its runs will have."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fedstill.benchmark import competing
from fedstill.benchmark.competing import MEAN_METHOD, START, Seconds
from fedstill.benchmark.entries import entries_below, read_entry
from fedstill.benchmark.suites import Suite, load_suite, suite_names
from fedstill.benchmark.terminal import shipped_rows
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare

RESULTS = Path(__file__).parents[2] / "results" / "rank"

EACH = Seconds(step=0.5, example=0.01, rest=0.25)


def test_minutes_are_the_arithmetic_of_all_runs(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even clients hold 30 examples: two clients' epoch in batches of 20 is 4 steps, joint's of 120
    is 6.
    """
    mean = MEAN_METHOD["space"]
    even, joint = (START + 2 * (mean * (s * 0.5 + n * 0.01) + 0.25) for s, n in ((4, 60), (6, 120)))
    rows = ("FedAvg", "FedNTD", "joint")
    assert [competing._of_run(suite, (row, "even"), EACH) for row in rows] == pytest.approx(
        [even, even, joint]
    )
    uneven = [competing._of_run(suite, (row, "uneven"), EACH) for row in rows]
    monkeypatch.setattr(competing, "seconds_here", lambda tier: EACH)
    test, choose = competing.core_minutes(suite)
    assert test == pytest.approx(5 * (2 * even + joint + sum(uneven)) / 60)
    tried = [competing._of_run(suite, (row, "uneven"), EACH, True) for row in rows[:2]]
    assert all(one < whole for one, whole in zip(tried, uneven, strict=False)), "half the rounds"
    assert choose == pytest.approx(3 * 2 * sum(tried) / 60), "two tries of each"
    both = replace(suite, there=suite)
    assert competing.core_minutes(both) == (test, 0), "another suite chooses"


def test_a_trial_of_a_row_with_rounds_of_its_own_is_as_long_as_its_runs() -> None:
    """In public local only has one round of 38 epochs; all others have half theirs. Trials hold
    images out.
    """
    suite = load_suite("digits-public")
    whole, tried = (
        {
            row: competing._of_run(suite, (row, suite.column), EACH, trial)
            for row in ("local only", "joint")
        }
        for trial in (False, True)
    )
    assert tried["joint"] - START == pytest.approx((whole["joint"] - START) / 2)
    assert 0.75 < tried["local only"] / whole["local only"] < 0.9


@pytest.mark.parametrize(
    ("name", "row", "column"),
    [
        ("digits-public", "FedMD", "Dirichlet .1"),
        ("digits-public", "FedDF", "Dirichlet .1"),
        ("digits-peers", "QKT", "three classes"),
        ("digits-peers", "FT-FedAvg", "three classes"),
        ("digits-peers", "PFNM", "three classes"),
        ("digits-time", "FOT", "10 permuted tasks"),
        ("digits-time", "past kept", "5 class tasks"),
        ("digits-chain", "SFedKD", "ExDir 2/.5"),
        ("digits-both", "joint", "5 class tasks"),
    ],
)
def test_steps_are_those_of_the_journals_that_ship(name: str, row: str, column: str) -> None:
    """Stages on public data and at the server, of the first and the last round, of peers, and of a
    task's end.
    """
    suite = load_suite(name)
    (variant,) = suite.recipe.variants([(row, column)], (0,), {}, Path())
    ready = prepare(variant.settings)
    rounds = range(1, variant.settings.rounds + 1)
    stages = [stage for number in rounds for stage in ready.settings.schedule(number, ready.world)]
    counted = sum(competing.trained_in(ready, stage)[0] for stage in stages)
    entries = (read_entry(place) for place in entries_below(RESULTS / f"{name}.runs.tar.xz"))
    entry = next(one for one in entries if one.row == row)
    events = read_journal(entry.run(column, 0) / "journal.jsonl")
    assert counted == sum(event.get("steps", 0) for event in events if event["event"] == "client")


@pytest.mark.parametrize("name", suite_names("digits"))
def test_a_suite_takes_what_its_entries_took_as_fast_as_their_fedavg(name: str) -> None:
    """Machines differ by four times from suite to suite: only within one can seconds be
    compared.
    """
    suite = load_suite(name)
    took = {
        row.name: sum(score.seconds_cpu for score in row.scores.values())
        for row in shipped_rows()[name]
    }
    base = "FedAvg" if "FedAvg" in suite.competing else suite.floor
    steps = {
        cell: competing._of_run(suite, cell, Seconds(1.0, 0.0, 0.0)) - START
        for cell in suite.recipe.cells()
    }
    once = sum(steps[base, column] for column in suite.columns(base)) / MEAN_METHOD[suite.track]
    assert sum(steps.values()) / once == pytest.approx(sum(took.values()) / took[base], rel=0.2)


def test_a_timed_rounds_steps_and_examples_are_its_own(suite: Suite) -> None:
    """A batch as large as a client makes one step of it, and the examples are the same."""
    small, large = (competing._timed(suite, batch) for batch in (1, 1000))
    assert small.steps == small.examples == large.examples, "an epoch in steps of one example"
    assert large.steps == 6, "two clients in each of three rounds"
    assert small.training > 0
    assert large.rest > 0
    competing.seconds_here.cache_clear()
    assert all(math.isfinite(v) and v >= 0 for v in competing.seconds_here("digits"))
    competing.seconds_here.cache_clear()
