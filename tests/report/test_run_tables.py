"""A run's rounds and clients as files: what its result says, for programs that do not know
fedstill.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas
import pytest

import toys
from fedstill.cli import call
from fedstill.report.table_files import write_run_tables
from fedstill.running.packs import pack
from fedstill.running.runner import run
from run_bits import stopped


@pytest.mark.uses("export")
def test_the_tables_are_those_of_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = toys.toy(
        {"name": "toy_failing", "who": 1, "how": "nan"}, measure=["local"], clients=toys.TOLERANT
    )
    result = run(failing, tmp_path / "run", toys.blobs())
    tables = tmp_path / "tables"
    assert (
        call(["export", str(tmp_path / "run"), "--parquet", str(tables), "--csv", str(tables)]) == 0
    )
    assert f"{tables / 'rounds.parquet'}: 3 rows, " in capsys.readouterr().out
    for name, frame in (("rounds", result.rounds()), ("clients", result.clients())):
        read = pandas.read_parquet(tables / f"{name}.parquet")
        pandas.testing.assert_frame_equal(read, frame, check_dtype=False)
        text = pandas.read_csv(tables / f"{name}.csv", keep_default_na=True)
        assert list(text.columns) == list(frame.columns)
        numbers = frame.select_dtypes("number")
        pandas.testing.assert_frame_equal(
            text[numbers.columns], numbers, check_dtype=False, rtol=0, atol=1e-15
        )


def test_runs_that_were_stopped_or_packed_have_tables_too(tmp_path: Path) -> None:
    stopped(toys.toy(), tmp_path / "runs/run", 2)
    rounds, clients = write_run_tables(tmp_path / "runs/run", "csv", tmp_path / "here")
    assert (rounds.rows, clients.rows) == (1, 8)
    pack(tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs")
    again = write_run_tables(tmp_path / "runs/run", "csv", tmp_path / "there")
    sizes = [(table.rows, table.columns) for table in again]
    assert sizes == [(table.rows, table.columns) for table in (rounds, clients)]


@pytest.mark.uses("export")
def test_what_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(toys.toy(), tmp_path / "run", toys.blobs())
    (tmp_path / "file").write_text("")
    assert call(["export", str(tmp_path / "run"), "--csv", str(tmp_path / "file")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err
    assert call(["export", str(tmp_path / "nowhere"), "--csv", str(tmp_path / "out")]) != 0
    assert "journal" in capsys.readouterr().err
