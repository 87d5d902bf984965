"""Sites with a time column, on a loopback grid: the bits of sites with folders; and what is refused
in one line.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_flower_other_kinds import CLASSES, CLIENTS, TABLE, experiment, grid, patients

from fedstill.config.experiment import Experiment
from fedstill.core.errors import TooFewReplies
from fedstill.flower.site_settings import Site, load_site
from fedstill.running.journal import read_journal
from fedstill.running.runner import run
from flowers import needs_flower

pytestmark = needs_flower

CUTS = ["2022-01-01", "2023-01-01"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    return tmp_path


def years(client: int) -> pd.DataFrame:
    """120 rows of three years, in no order."""
    rows = patients(client, 120)
    return rows.assign(acquired=[f"{2021 + k % 3}-0{1 + k % 7}-15" for k in range(len(rows))])


def over_years(**stream: Any) -> Experiment:
    data = {"name": "none", "standardise": "summed", **TABLE}
    said = {"kind": "sites", "cuts": [date(2022, 1, 1), "2023-01-01"], **stream}
    return experiment(data, {}, rounds=3, stream=said, method={"name": "replay", "size": 20})


def by_time(place: Path, column: str = "acquired") -> list[Site]:
    made = []
    for client in range(CLIENTS):
        path = place / f"rows{client}.csv"
        years(client).to_csv(path, index=False)
        made.append(Site(client, place / f"memory{client}", data=str(path), time_column=column))
    return made


def by_folder(place: Path) -> list[Site]:
    made = []
    for client in range(CLIENTS):
        own = place / f"own{client}"
        for t in range(3):
            (own / f"task{t + 1}").mkdir(parents=True)
            rows = years(client)
            rows[rows["acquired"].str.startswith(str(2021 + t))].to_csv(
                own / f"task{t + 1}" / "rows.csv", index=False
            )
        made.append(
            Site(client, place / f"memory-of-folders{client}", data=str(own), tasks="folders")
        )
    return made


def test_a_time_column_and_a_folder_for_each_task_are_the_same_run(place: Path) -> None:
    run(over_years(), place / "times", grid=grid(by_time(place)))
    run(over_years(), place / "folders", grid=grid(by_folder(place)))
    model = "model.safetensors"
    assert (place / "times" / model).read_bytes() == (place / "folders" / model).read_bytes()
    both = [
        [e for e in read_journal(place / k / "journal.jsonl") if e["event"] == "task"]
        for k in ("times", "folders")
    ]
    assert [(e["row"], e["clients"]) for e in both[0]] == [
        (e["row"], e["clients"]) for e in both[1]
    ]
    rows = [e["row"] for e in both[0]]
    assert [[v is None for v in row] for row in rows] == [
        [False, True, True],
        [False, False, True],
        [False] * 3,
    ]
    start = read_journal(place / "times/journal.jsonl")[0]
    assert start["stream"] == {
        "kind": "sites",
        "classes": [[0, 1]] * 3,
        "names": [CLASSES] * 3,
        "first_rounds": [1, 2, 3],
    }


def test_rows_of_a_later_task_may_come_at_any_time(place: Path) -> None:
    """A file that grows: the tasks before are as they were."""
    whole, there = years(0), by_time(place)
    path = Path(there[0].data)
    whole[whole["acquired"] < CUTS[0]].to_csv(path, index=False)

    def grow(event: Any) -> None:
        until = [*CUTS, "9999"][min(event["round"], 2)]
        whole[whole["acquired"] < until].to_csv(path, index=False)

    run(over_years(), place / "grown", grid=grid(there), on_round=grow)
    run(
        over_years(),
        place / "whole",
        grid=grid([Site(0, place / "m", data=str(path), time_column="acquired"), *there[1:]]),
    )
    model = "model.safetensors"
    assert (place / "grown" / model).read_bytes() == (place / "whole" / model).read_bytes()


@pytest.mark.parametrize(
    ("column", "stream", "why"),
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
    column: str, stream: dict[str, Any], why: str, place: Path
) -> None:
    with pytest.raises(TooFewReplies, match=why):
        run(over_years(**stream), place / "run", grid=grid(by_time(place, column)))


def test_a_file_of_settings_says_what_a_task_is(place: Path) -> None:
    path = place / "site.toml"
    path.write_text('client = 1\nmemory = "memory"\ntime_column = "acquired"\n')
    assert load_site(path) == Site(1, place / "memory", time_column="acquired")
    path.write_text('client = 1\nmemory = "memory"\ntasks = "folders"\ntime_column = "acquired"\n')
    with pytest.raises(Exception, match="tasks and time_column"):
        load_site(path)
    path.write_text('client = 1\nmemory = "memory"\ntasks = "files"\n')
    with pytest.raises(Exception, match=r"site\.toml.tasks"):
        load_site(path)
