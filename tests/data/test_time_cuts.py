"""A time column cut into tasks: the dates, and what is held out of each task, against plain
derivations.
"""

from __future__ import annotations

import io
from datetime import date, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fedstill.core.errors import ConfigError, DataError
from fedstill.core.stream import cut_times, tasks_of_times
from fedstill.data.sources import load, load_dataset

CUTS = ("2022-01-01", "2023-01-01")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))


def rows(size: int = 120) -> pd.DataFrame:
    draw = np.random.default_rng(4)
    days = pd.to_datetime("2021-01-01") + pd.to_timedelta(draw.integers(0, 3 * 365, size), unit="D")
    return pd.DataFrame(
        {
            "a": draw.normal(size=size),
            "b": draw.normal(size=size),
            "label": draw.integers(0, 3, size),
            "taken": days,
        }
    )


def in_task(frame: pd.DataFrame, task: int) -> pd.DataFrame:
    years = frame["taken"].dt.year.to_numpy()
    return frame[years == 2021 + task]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("kind", ["day", "text", "moment"])
def test_what_is_held_out_of_a_task_is_what_is_held_out_of_it_alone(
    suffix: str, kind: str, tmp_path: Path
) -> None:
    """So later rows change nothing: each task is as it would be in a file of its own."""
    frame = rows()
    said = {
        "day": frame["taken"].dt.date,
        "text": frame["taken"].dt.strftime("%Y-%m-%d"),
        "moment": frame["taken"],
    }[kind]
    whole = frame.assign(taken=said)
    path = tmp_path / f"whole.{suffix}"
    whole.to_csv(path, index=False) if suffix == "csv" else whole.to_parquet(path)
    cut = load_dataset(str(path), owner="taken", cuts=CUTS)
    for task in range(3):
        some = tmp_path / f"task{task}.csv"
        in_task(frame, task).drop(columns="taken").to_csv(some, index=False)
        alone = load_dataset(str(some))
        for split in ("train", "test"):
            got, want = getattr(cut, split), getattr(alone, split)
            tasks = np.array(tasks_of_times("rows", "taken", cut.about.owners, CUTS))[
                got.owners.numpy()
            ]
            assert np.array_equal(got.values[tasks == task], want.values)
            assert np.array_equal(got.labels[tasks == task], want.labels)


def test_images_in_a_parquet_file_have_times_too(tmp_path: Path) -> None:
    def png(value: int) -> bytes:
        out = io.BytesIO()
        Image.fromarray(np.full((4, 4), value, dtype=np.uint8)).save(out, "png")
        return out.getvalue()

    size = 20
    years = np.arange(size) % 3
    frame = pd.DataFrame({"image": [png(i) for i in range(size)], "label": np.arange(size) % 2})
    frame["image"] = [{"bytes": one, "path": None} for one in frame["image"]]
    frame["acquired"] = [f"{2021 + y}-05-01" for y in years]
    frame.to_parquet(tmp_path / "scans.parquet")
    data = load_dataset(str(tmp_path / "scans.parquet"), owner="acquired", cuts=CUTS)
    for split in (data.train, data.test):
        of_pixel = years[split.values[:, 0, 0, 0].numpy()]
        assert split.owners is not None
        assert np.array_equal(
            np.array(tasks_of_times("", "", data.about.owners, CUTS))[split.owners], of_pixel
        )
    with pytest.raises(
        DataError,
        match=r"'taken' .*time_column in site",
    ):
        load_dataset(str(tmp_path / "scans.parquet"), owner="taken", cuts=CUTS)


def test_a_fifth_of_each_task_is_held_out_of_data_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in hub: the library is given the file that the hub would give it."""
    import datasets

    path = tmp_path / "mine.parquet"
    frame = rows()
    frame.assign(taken=frame["taken"].dt.strftime("%Y-%m-%d")).to_parquet(path)
    read = datasets.load_dataset
    monkeypatch.setattr(load, "_check_hub_has", lambda name, remedy: None)
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, streaming: read("parquet", data_files=str(path), streaming=streaming),
    )
    on_hub = load_dataset("somebody/data", owner="taken", cuts=CUTS)
    in_file = load_dataset(str(path), owner="taken", cuts=CUTS)
    assert np.array_equal(on_hub.test.values, in_file.test.values)
    assert np.array_equal(on_hub.train.values, in_file.train.values)


def test_a_moment_belongs_to_the_task_that_begins_with_it() -> None:
    values = [
        "2021-12-31",
        "2022-01-01",
        "2022-12-31 23:59:59",
        "2023-01-01T00:00",
        "2022-12-31T23:30-01:00",
    ]
    assert tasks_of_times("rows", "taken", values, CUTS) == [0, 1, 1, 2, 2]
    assert tasks_of_times(
        "rows", "taken", [str(datetime(2022, 1, 1)), str(date(2030, 1, 1))], CUTS
    ) == [1, 2]


def test_a_column_that_holds_no_dates_is_refused_in_one_line(tmp_path: Path) -> None:
    rows().assign(ward=7).to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(DataError, match="column 'ward' has '7'"):
        load_dataset(str(tmp_path / "rows.csv"), owner="ward", columns=("a", "b"), cuts=CUTS)


@pytest.mark.parametrize(
    ("cuts", "why"),
    [
        (["1.2.2023"], "has '1.2.2023'"),
        (
            ["2023-01-01", "2023-01-01"],
            r"stream\.cuts.*2023-01-01",
        ),
    ],
)
def test_cuts_are_dates_in_order(cuts: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        cut_times(cuts)
