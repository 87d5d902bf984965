"""The estimated cost of a suite, from timed rounds and the steps and examples of its runs."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fedstill.benchmark import competing
from fedstill.benchmark.competing import RELATIVE_COST, START_SECONDS, UnitCosts
from fedstill.benchmark.entries import find_entries, read_entry
from fedstill.benchmark.suites import Suite, load_suite, suite_names
from fedstill.benchmark.tables import shipped_rows
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare

RESULTS = Path(__file__).parents[2] / "results" / "rank"

UNITS = UnitCosts(step=0.5, example=0.01, round=0.25)
RELATIVE = RELATIVE_COST["space"]


def seconds(suite: Suite, row: str, column: str, changes: dict[str, Any] | None = None) -> float:
    """The estimated seconds of one run at these unit costs."""
    return competing._run_seconds(suite, (row, column), UNITS, changes or {})


def seconds_by_hand(*, steps: int, examples: int, rounds: int) -> float:
    """The same from the steps and examples of a round."""
    training = RELATIVE * (steps * UNITS.step + examples * UNITS.example)
    return START_SECONDS + rounds * (training + UNITS.round)


def test_minutes_are_the_arithmetic_of_all_runs(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even clients hold 30 examples: two clients' epoch in batches of 20 is 4 steps, joint's of 120
    is 6.
    """
    even = seconds_by_hand(steps=4, examples=60, rounds=2)
    joint = seconds_by_hand(steps=6, examples=120, rounds=2)
    for row, expected in (("FedAvg", even), ("FedNTD", even), ("joint", joint)):
        assert seconds(suite, row, "even") == pytest.approx(expected)
    uneven = {row: seconds(suite, row, "uneven") for row in ("FedAvg", "FedNTD", "joint")}
    trials = {}
    for row in ("FedAvg", "FedNTD"):
        trials[row] = seconds(suite, row, "uneven", suite.trial_settings(row))
        assert trials[row] < uneven[row], "half the rounds"
    monkeypatch.setattr(competing, "unit_costs", lambda tier: UNITS)

    minutes = competing.estimate_core_minutes(suite)

    assert minutes is not None
    all_columns = even + even + joint + sum(uneven.values())
    assert minutes.runs == pytest.approx(5 * all_columns / 60), "five seeds"
    assert minutes.choosing == pytest.approx(3 * 2 * sum(trials.values()) / 60), (
        "two tries of three seeds for each row"
    )
    chosen_elsewhere = replace(suite, choices_from=suite)
    assert competing.estimate_core_minutes(chosen_elsewhere) == replace(minutes, choosing=0)


def test_a_trial_of_a_row_with_rounds_of_its_own_is_as_long_as_its_runs() -> None:
    """In public local only has one round of 38 epochs; all others have half theirs. Trials hold
    images out.
    """
    suite = load_suite("digits-public")
    column = suite.choosing_column

    joint_run = seconds(suite, "joint", column) - START_SECONDS
    joint_trial = seconds(suite, "joint", column, suite.trial_settings("joint")) - START_SECONDS
    assert joint_trial == pytest.approx(joint_run / 2)

    local_run = seconds(suite, "local only", column)
    local_trial = seconds(suite, "local only", column, suite.trial_settings("local only"))
    assert 0.75 < local_trial / local_run < 0.9


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
    counted = 0
    for round in range(1, variant.settings.rounds + 1):
        for stage in ready.settings.schedule(round, ready.world):
            counted += competing.training_size(ready, stage).steps
    entries = map(read_entry, find_entries(RESULTS / f"{name}.runs.tar.xz"))
    entry = next(entry for entry in entries if entry.row == row)
    journal = read_journal(entry.run_folder(column, 0) / "journal.jsonl")
    client_events = [event for event in journal if event["event"] == "client"]
    assert counted == sum(event.get("steps", 0) for event in client_events)


@pytest.mark.parametrize("name", suite_names("digits"))
def test_estimated_costs_relative_to_fedavg_are_those_of_the_entries_that_ship(name: str) -> None:
    """Machines differ by four times from suite to suite: only within one can seconds be
    compared.
    """
    suite = load_suite(name)
    base = suite.floor
    if "FedAvg" in suite.ranked_rows:
        base = "FedAvg"
    seconds_of_rows = {}
    for row in shipped_rows()[name]:
        seconds_of_rows[row.name] = sum(score.seconds_cpu for score in row.scores.values())
    steps_alone = UnitCosts(step=1.0, example=0.0, round=0.0)
    estimates = {}
    for cell in suite.recipe.cells():
        estimates[cell] = competing._run_seconds(suite, cell, steps_alone, {}) - START_SECONDS

    base_estimate = sum(estimates[base, column] for column in suite.columns_of(base))
    estimated = sum(estimates.values()) * RELATIVE_COST[suite.track] / base_estimate
    measured = sum(seconds_of_rows.values()) / seconds_of_rows[base]
    assert estimated == pytest.approx(measured, rel=0.2)


def test_a_timed_round_counts_its_steps_and_examples(suite: Suite) -> None:
    """A batch as large as a client makes one step of it, and the examples are the same."""
    small = competing._time_rounds(suite, 1)
    large = competing._time_rounds(suite, 1000)
    assert small.size.steps == small.size.examples == large.size.examples, (
        "an epoch in steps of one example"
    )
    assert large.size.steps == 6, "two clients in each of three rounds"
    assert small.training > 0
    assert large.round > 0
    competing.unit_costs.cache_clear()
    costs = asdict(competing.unit_costs("digits"))
    for cost in costs.values():
        assert math.isfinite(cost)
        assert cost >= 0
    competing.unit_costs.cache_clear()
