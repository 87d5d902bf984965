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
from fedstill.core.records import Examples
from fedstill.core.stream import cut_times, tasks_of_times
from fedstill.data.sources import load, load_dataset

CUTS = ("2022-01-01", "2023-01-01")


pytestmark = pytest.mark.usefixtures("empty_cache")


def rows(size: int = 120) -> pd.DataFrame:
    """Rows of three years with a time column."""
    draw = np.random.default_rng(4)
    offsets = pd.to_timedelta(draw.integers(0, 3 * 365, size), unit="D")
    days = pd.to_datetime("2021-01-01") + offsets
    return pd.DataFrame(
        {
            "a": draw.normal(size=size),
            "b": draw.normal(size=size),
            "label": draw.integers(0, 3, size),
            "taken": days,
        }
    )


def task_of_each(examples: Examples, owners: tuple[str, ...]) -> np.ndarray:
    """The task of each example, from the times that are its owner."""
    assert examples.owners is not None
    tasks = np.array(tasks_of_times("rows", "taken", owners, CUTS))
    return tasks[examples.owners.numpy()]


def in_task(frame: pd.DataFrame, task: int) -> pd.DataFrame:
    """The rows of one year, each of which is a task."""
    years = frame["taken"].dt.year.to_numpy()
    return frame[years == 2021 + task]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("kind", ["day", "text", "moment"])
def test_what_is_held_out_of_a_task_is_what_is_held_out_of_it_alone(
    suffix: str, kind: str, tmp_path: Path
) -> None:
    """So later rows change nothing: each task is as it would be in a file of its own."""
    frame = rows()
    times = {
        "day": frame["taken"].dt.date,
        "text": frame["taken"].dt.strftime("%Y-%m-%d"),
        "moment": frame["taken"],
    }
    dated = frame.assign(taken=times[kind])
    path = tmp_path / f"all_tasks.{suffix}"
    if suffix == "csv":
        dated.to_csv(path, index=False)
    else:
        dated.to_parquet(path)

    cut = load_dataset(str(path), owner="taken", cuts=CUTS)

    for task in range(3):
        task_file = tmp_path / f"task{task}.csv"
        in_task(frame, task).drop(columns="taken").to_csv(task_file, index=False)
        alone = load_dataset(str(task_file))
        for examples, expected in ((cut.train, alone.train), (cut.test, alone.test)):
            is_in_task = task_of_each(examples, cut.about.owners) == task
            assert np.array_equal(examples.values[is_in_task], expected.values)
            assert np.array_equal(examples.labels[is_in_task], expected.labels)


def png(shade: int) -> bytes:
    """A file with an image of one shade."""
    out = io.BytesIO()
    Image.new("L", (4, 4), shade).save(out, "png")
    return out.getvalue()


def test_images_in_a_parquet_file_have_times_too(tmp_path: Path) -> None:
    """The shade of an image is its row, so that examples show which time they must have."""
    size = 20
    task_of_row = np.arange(size) % 3
    frame = pd.DataFrame({"label": np.arange(size) % 2})
    frame["image"] = [{"bytes": png(row), "path": None} for row in range(size)]
    frame["acquired"] = [f"{2021 + task}-05-01" for task in task_of_row]
    path = str(tmp_path / "scans.parquet")
    frame.to_parquet(path)

    data = load_dataset(path, owner="acquired", cuts=CUTS)

    for examples in (data.train, data.test):
        row_of_each = examples.values[:, 0, 0, 0].numpy()
        tasks = task_of_each(examples, data.about.owners)
        assert np.array_equal(tasks, task_of_row[row_of_each])
    with pytest.raises(DataError, match=r"'taken' .*time_column in site"):
        load_dataset(path, owner="taken", cuts=CUTS)


def test_a_fifth_of_each_task_is_held_out_of_data_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in hub: the library is given the file that the hub would give it."""
    import datasets

    path = tmp_path / "mine.parquet"
    frame = rows()
    frame.assign(taken=frame["taken"].dt.strftime("%Y-%m-%d")).to_parquet(path)
    real_load = datasets.load_dataset

    def load_from_hub(name: str, streaming: bool) -> object:
        return real_load("parquet", data_files=str(path), streaming=streaming)

    monkeypatch.setattr(load, "_check_hub_has", lambda name, remedy: None)
    monkeypatch.setattr(datasets, "load_dataset", load_from_hub)

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
    texts_of_pandas = [str(datetime(2022, 1, 1)), str(date(2030, 1, 1))]
    assert tasks_of_times("rows", "taken", texts_of_pandas, CUTS) == [1, 2]


def test_a_column_that_holds_no_dates_is_refused_in_one_line(tmp_path: Path) -> None:
    rows().assign(ward=7).to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(DataError, match="column 'ward' has '7'"):
        load_dataset(str(tmp_path / "rows.csv"), owner="ward", columns=("a", "b"), cuts=CUTS)


@pytest.mark.parametrize(
    ("cuts", "reason"),
    [
        (["1.2.2023"], "has '1.2.2023'"),
        (["2023-01-01", "2023-01-01"], r"stream\.cuts.*2023-01-01"),
    ],
)
def test_cuts_are_dates_in_order(cuts: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        cut_times(cuts)
