"""Sites with a time column, on a loopback grid: the bits of sites with folders; and what is refused
in one line.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_flower_other_kinds import CLASSES, CLIENTS, SUMMED, at_sites, patients

from fedstill.core.errors import ConfigError, TooFewReplies
from fedstill.flower.site_settings import Site, load_site
from fedstill.running.journal import read_journal
from fedstill.running.runner import run
from flowers import needs_flower, site_grid
from journals import journal_events
from run_bits import model_bytes

pytestmark = needs_flower

CUTS = ["2022-01-01", "2023-01-01"]


FEDERATION = at_sites(
    SUMMED,
    rounds=3,
    stream={"kind": "sites", "cuts": [date(2022, 1, 1), "2023-01-01"]},
    method={"name": "replay", "size": 20},
)
"""A run over three years."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the test's data and runs, with a cache of its own."""
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    return tmp_path


def dated_patients(client: int) -> pd.DataFrame:
    """120 rows of three years, in no order."""
    rows = patients(client, 120)
    dates = [f"{2021 + row % 3}-0{1 + row % 7}-15" for row in range(len(rows))]
    return rows.assign(acquired=dates)


def sites_with_time_column(place: Path, column: str = "acquired") -> list[Site]:
    """Three sites with one table each, of which a column says to which task a row belongs."""
    sites = []
    for client in range(CLIENTS):
        path = place / f"rows{client}.csv"
        dated_patients(client).to_csv(path, index=False)
        sites.append(Site(client, place / f"memory{client}", data=str(path), time_column=column))
    return sites


def sites_with_folders(place: Path) -> list[Site]:
    """Three sites with a folder for each task."""
    sites = []
    for client in range(CLIENTS):
        data = place / f"own{client}"
        rows = dated_patients(client)
        for task in range(3):
            folder = data / f"task{task + 1}"
            folder.mkdir(parents=True)
            is_in_year = rows["acquired"].str.startswith(str(2021 + task))
            rows[is_in_year].to_csv(folder / "rows.csv", index=False)
        memory = place / f"memory-of-folders{client}"
        sites.append(Site(client, memory, data=str(data), tasks="folders"))
    return sites


def test_a_time_column_and_a_folder_for_each_task_are_the_same_run(place: Path) -> None:
    run(FEDERATION, place / "times", grid=site_grid(sites_with_time_column(place)))
    run(FEDERATION, place / "folders", grid=site_grid(sites_with_folders(place)))

    assert model_bytes(place / "times") == model_bytes(place / "folders")
    tasks = journal_events(place / "times", event="task")
    expected = journal_events(place / "folders", event="task")
    assert [event["row"] for event in tasks] == [event["row"] for event in expected]
    assert [event["clients"] for event in tasks] == [event["clients"] for event in expected]

    first_row, second_row, third_row = [event["row"] for event in tasks]
    assert [accuracy is None for accuracy in first_row] == [False, True, True]
    assert [accuracy is None for accuracy in second_row] == [False, False, True]
    assert None not in third_row
    assert len(third_row) == 3
    start = read_journal(place / "times" / "journal.jsonl")[0]
    assert start["stream"] == {
        "kind": "sites",
        "classes": [[0, 1]] * 3,
        "names": [CLASSES] * 3,
        "first_rounds": [1, 2, 3],
    }


def test_rows_of_a_later_task_may_come_at_any_time(place: Path) -> None:
    """A file that grows: the rows of earlier tasks do not change."""
    rows = dated_patients(0)
    sites = sites_with_time_column(place)
    path = Path(sites[0].data)
    rows[rows["acquired"] < CUTS[0]].to_csv(path, index=False)

    def grow(event: Any) -> None:
        visible = rows
        if event["round"] == 1:
            visible = rows[rows["acquired"] < CUTS[1]]
        visible.to_csv(path, index=False)

    run(FEDERATION, place / "grown", grid=site_grid(sites), on_round=grow)

    complete_site = Site(0, place / "memory", data=str(path), time_column="acquired")
    run(FEDERATION, place / "complete", grid=site_grid([complete_site, *sites[1:]]))
    assert model_bytes(place / "grown") == model_bytes(place / "complete")


@pytest.mark.parametrize(
    ("column", "stream", "reason"),
    [
        ("taken", {}, "has no column 'taken' among .*; correct time_column in site.toml"),
        ("ward", {}, r"column 'ward' has '\d'"),
        (
            "acquired",
            {"cuts": [], "tasks": 3},
            "divided by time_column, but the run's stream.cuts has no dates for it",
        ),
    ],
)
def test_a_column_that_cannot_be_cut_is_refused(
    column: str, stream: dict[str, Any], reason: str, place: Path
) -> None:
    federation = replace(FEDERATION, stream={**FEDERATION.stream, **stream})
    sites = sites_with_time_column(place, column)

    with pytest.raises(TooFewReplies, match=reason):
        run(federation, place / "run", grid=site_grid(sites))


def test_a_file_of_settings_defines_tasks_in_one_way(place: Path) -> None:
    path = place / "site.toml"
    path.write_text('client = 1\nmemory = "memory"\ntime_column = "acquired"\n')
    assert load_site(path) == Site(1, place / "memory", time_column="acquired")

    path.write_text('client = 1\nmemory = "memory"\ntasks = "folders"\ntime_column = "acquired"\n')
    with pytest.raises(ConfigError, match="tasks and time_column"):
        load_site(path)

    path.write_text('client = 1\nmemory = "memory"\ntasks = "files"\n')
    with pytest.raises(ConfigError, match=r"site\.toml.tasks"):
        load_site(path)
