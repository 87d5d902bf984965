"""What a suite takes: from timed rounds, by the steps and examples that its runs will have."""

from __future__ import annotations

import math

import pytest

from fedstill.experiment.ranking import costs_here
from fedstill.experiment.ranking.costs_here import MEAN_METHOD, START, Seconds
from fedstill.experiment.ranking.suites import Suite

EACH = Seconds(step=0.5, example=0.01, rest=0.25)


def test_minutes_are_the_arithmetic_of_all_runs(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even clients hold 30 examples: two clients' epoch in batches of 20 is 4 steps, joint's of 120 is 6."""
    even, joint = (START + 2 * (MEAN_METHOD * (s * 0.5 + n * 0.01) + 0.25) for s, n in ((4, 60), (6, 120)))
    rows = ("FedAvg", "FedNTD", "joint")
    assert [costs_here._of_run(suite, (row, "even"), EACH) for row in rows] == pytest.approx([even, even, joint])
    uneven = [costs_here._of_run(suite, (row, "uneven"), EACH) for row in rows]
    monkeypatch.setattr(costs_here, "seconds_here", lambda tier: EACH)
    test, choose = costs_here.core_minutes(suite)
    assert test == pytest.approx(5 * (2 * even + joint + sum(uneven)) / 60)
    assert choose == pytest.approx(3 * 2 * 0.5 * sum(uneven[:2]) / 60), "two tries of each, half the rounds"


def test_a_timed_rounds_steps_and_examples_are_its_own(suite: Suite) -> None:
    """A batch as large as a client makes one step of it, and the examples are the same."""
    small, large = (costs_here._timed(suite, batch) for batch in (1, 1000))
    assert small.steps == small.examples == large.examples, "an epoch in steps of one example"
    assert large.steps == 6, "two clients in each of three rounds"
    assert small.training > 0
    assert large.rest > 0
    costs_here.seconds_here.cache_clear()
    assert all(math.isfinite(v) and v >= 0 for v in costs_here.seconds_here("digits"))
    costs_here.seconds_here.cache_clear()
