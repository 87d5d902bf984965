"""No file that fedstill reads can run code: none is a pickle, by the source and by watching a run
made and resumed.
"""

from __future__ import annotations

from scorecard.what_runs import unpickled


def test_no_module_names_a_pickle_and_a_run_that_is_watched_meets_none() -> None:
    measured = unpickled(10_000)
    assert measured.remarks == ()
    assert measured.passed == measured.trials > 200
