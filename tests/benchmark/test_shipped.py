"""Entries that ship, replayed: three rounds on every push; one with tasks over time, and whole
runs, by hand with -m slow.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import tiny_ranking
from fedstill.benchmark.entries import Entry, find_entries, read_entry, suite_of
from fedstill.benchmark.replays import draw_runs, replay_runs, worst_level
from fedstill.running.packs import unpack

ENTRIES = Path(__file__).parents[2] / "results" / "rank"


def shipped(row: str, suite: str) -> Entry:
    """The entry of a row."""
    return next(entry for entry in entries_of(suite) if entry.row == row)


def entries_of(suites: str) -> list[Entry]:
    """The entries that ship, of suites whose names match a pattern."""
    entries: list[Entry] = []
    for pack in sorted(ENTRIES.glob(f"{suites}.*")):
        entries += map(read_entry, find_entries(pack))
    return entries


def test_an_entry_beside_its_pack_is_found_once(tmp_path: Path) -> None:
    name = "digits-chain.runs.tar.xz"
    shutil.copy(ENTRIES / name, tmp_path / name)
    packed = find_entries(tmp_path)
    unpack(tmp_path / name)
    unpacked = find_entries(tmp_path)
    assert packed
    assert [place.name for place in unpacked] == [place.name for place in packed]


@pytest.mark.parametrize(
    ("suite", "row"),
    [
        pytest.param("digits-space", "FedAvg", marks=pytest.mark.slow),
        ("digits-space", "FedNTD"),
        pytest.param("digits-time", "replay", marks=pytest.mark.slow),
    ],
)
def test_the_first_rounds_of_an_entry_come_as_near_as_rounding_lets_them(
    suite: str, row: str
) -> None:
    """Three rounds; of a run with tasks over time, which share its rounds, all of them."""
    entry = shipped(row, suite)
    column = suite_of(entry).columns_of(row)[0]
    (replayed,) = replay_runs(entry, [(column, 0)], tiny_ranking.do, rounds=3)
    assert replayed.level != "disagrees", replayed.problems


@pytest.mark.slow
def test_whole_runs_of_five_entries_drawn_by_their_bytes() -> None:
    def first_digest(entry: Entry) -> str:
        return entry.digests[min(entry.digests)]

    for entry in sorted(entries_of("digits-*"), key=first_digest)[:5]:
        places = draw_runs(entry, suite_of(entry), 1)
        replayed = list(replay_runs(entry, places, tiny_ranking.do))
        assert worst_level(replayed) != "disagrees", (entry.row, replayed)
