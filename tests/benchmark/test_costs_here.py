"""What a suite takes: from timed rounds, by the steps and examples that its runs will have."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fedstill.benchmark import competing
from fedstill.benchmark.competing import RELATIVE_COST, START_SECONDS, UnitCosts
from fedstill.benchmark.entries import find_entries, read_entry
from fedstill.benchmark.suites import Suite, load_suite, suite_names
from fedstill.benchmark.tables import shipped_rows
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare

RESULTS = Path(__file__).parents[2] / "results" / "rank"

EACH = UnitCosts(step=0.5, example=0.01, round=0.25)


def test_minutes_are_the_arithmetic_of_all_runs(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even clients hold 30 examples: two clients' epoch in batches of 20 is 4 steps, joint's of 120
    is 6.
    """
    mean = RELATIVE_COST["space"]
    even, joint = (
        START_SECONDS + 2 * (mean * (s * 0.5 + n * 0.01) + 0.25) for s, n in ((4, 60), (6, 120))
    )
    rows = ("FedAvg", "FedNTD", "joint")
    assert [
        competing._run_seconds(suite, (row, "even"), EACH, {}) for row in rows
    ] == pytest.approx([even, even, joint])
    uneven = [competing._run_seconds(suite, (row, "uneven"), EACH, {}) for row in rows]
    monkeypatch.setattr(competing, "unit_costs", lambda tier: EACH)
    minutes = competing.estimate_core_minutes(suite)
    assert minutes is not None
    assert minutes.runs == pytest.approx(5 * (2 * even + joint + sum(uneven)) / 60)
    tried = [
        competing._run_seconds(suite, (row, "uneven"), EACH, suite.trial_settings(row))
        for row in rows[:2]
    ]
    assert all(one < whole for one, whole in zip(tried, uneven, strict=False)), "half the rounds"
    assert minutes.choosing == pytest.approx(3 * 2 * sum(tried) / 60), "two tries of each"
    both = replace(suite, choices_from=suite)
    assert competing.estimate_core_minutes(both) == replace(minutes, choosing=0)


def test_a_trial_of_a_row_with_rounds_of_its_own_is_as_long_as_its_runs() -> None:
    """In public local only has one round of 38 epochs; all others have half theirs. Trials hold
    images out.
    """
    suite = load_suite("digits-public")
    whole, tried = (
        {
            row: competing._run_seconds(
                suite,
                (row, suite.choosing_column),
                EACH,
                suite.trial_settings(row) if trial else {},
            )
            for row in ("local only", "joint")
        }
        for trial in (False, True)
    )
    assert tried["joint"] - START_SECONDS == pytest.approx((whole["joint"] - START_SECONDS) / 2)
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
    counted = sum(competing.training_size(ready, stage).steps for stage in stages)
    entries = (read_entry(place) for place in find_entries(RESULTS / f"{name}.runs.tar.xz"))
    entry = next(one for one in entries if one.row == row)
    events = read_journal(entry.run_folder(column, 0) / "journal.jsonl")
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
    base = "FedAvg" if "FedAvg" in suite.ranked_rows else suite.floor
    steps = {
        cell: competing._run_seconds(suite, cell, UnitCosts(step=1.0, example=0.0, round=0.0), {})
        - START_SECONDS
        for cell in suite.recipe.cells()
    }
    once = (
        sum(steps[base, column] for column in suite.columns_of(base)) / RELATIVE_COST[suite.track]
    )
    assert sum(steps.values()) / once == pytest.approx(sum(took.values()) / took[base], rel=0.2)


def test_a_timed_rounds_steps_and_examples_are_its_own(suite: Suite) -> None:
    """A batch as large as a client makes one step of it, and the examples are the same."""
    small, large = (competing._time_rounds(suite, batch) for batch in (1, 1000))
    assert small.size.steps == small.size.examples == large.size.examples, (
        "an epoch in steps of one example"
    )
    assert large.size.steps == 6, "two clients in each of three rounds"
    assert small.training > 0
    assert large.round > 0
    competing.unit_costs.cache_clear()
    costs = asdict(competing.unit_costs("digits"))
    assert all(math.isfinite(v) and v >= 0 for v in costs.values())
    competing.unit_costs.cache_clear()
