"""Entries that ship, replayed: three rounds on every push; whole runs by hand, with -m slow."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_ranking
from fedstill.experiment.ranking.checking import suite_of
from fedstill.experiment.ranking.entries import Entered, entries_below, read_entry
from fedstill.experiment.ranking.replaying import drawn_places, reached, replayed

ENTRIES = Path(__file__).parents[3] / "results" / "rank"


def shipped(row: str, suite: str = "digits-space") -> Entered:
    entries = [read_entry(place) for place in entries_below(ENTRIES)]
    return next(e for e in entries if (e.suite, e.row) == (suite, row))


@pytest.mark.parametrize("row", ["FedAvg", "FedNTD", "FedProx"])
def test_three_rounds_of_an_entry_come_as_near_as_rounding_lets_them(row: str) -> None:
    entry = shipped(row)
    done = list(replayed(entry, [("Dirichlet .1", 0)], tiny_ranking.do, rounds=3))
    assert [(one.beyond, one.level != "disagrees") for one in done] == [("", True)]


@pytest.mark.slow
def test_whole_runs_of_five_entries_drawn_by_their_bytes() -> None:
    entries = [read_entry(place) for place in entries_below(ENTRIES)]
    for entry in sorted(entries, key=lambda e: e.digests[min(e.digests)])[:5]:
        done = list(replayed(entry, drawn_places(entry, suite_of(entry), 1), tiny_ranking.do))
        assert reached(done) != "disagrees", (entry.row, done)
