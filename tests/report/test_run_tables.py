"""The tables of a run's rounds and clients as files, for other programs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas
import pytest
from pandas.testing import assert_frame_equal

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
    method = {"name": "toy_failing", "who": 1, "how": "nan"}
    experiment = toys.toy(method, measure=["local"], clients=toys.TOLERANT)
    result = run(experiment, tmp_path / "run", toys.blobs())
    tables = tmp_path / "tables"
    files = ["--parquet", str(tables), "--csv", str(tables)]

    assert call(["export", str(tmp_path / "run"), *files]) == 0

    assert f"{tables / 'rounds.parquet'}: 3 rows, " in capsys.readouterr().out
    for name, frame in {"rounds": result.rounds(), "clients": result.clients()}.items():
        parquet = pandas.read_parquet(tables / f"{name}.parquet")
        assert_frame_equal(parquet, frame, check_dtype=False)
        csv = pandas.read_csv(tables / f"{name}.csv", keep_default_na=True)
        assert list(csv.columns) == list(frame.columns)
        numbers = frame.select_dtypes("number")
        csv_numbers = csv[numbers.columns]
        assert_frame_equal(csv_numbers, numbers, check_dtype=False, rtol=0, atol=1e-15)


def test_runs_that_were_stopped_or_packed_have_tables_too(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    stopped(toys.toy(), folder, 2)
    tables = write_run_tables(folder, "csv", tmp_path / "of_folder")
    rounds, clients = tables
    assert rounds.rows == 1
    assert clients.rows == 8

    pack(tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs")
    packed_tables = write_run_tables(folder, "csv", tmp_path / "of_pack")
    for packed, table in zip(packed_tables, tables, strict=True):
        assert packed.rows == table.rows
        assert packed.columns == table.columns


@pytest.mark.uses("export")
def test_an_impossible_export_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(toys.toy(), tmp_path / "run", toys.blobs())
    (tmp_path / "file").write_text("")
    assert call(["export", str(tmp_path / "run"), "--csv", str(tmp_path / "file")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err

    assert call(["export", str(tmp_path / "nowhere"), "--csv", str(tmp_path / "out")]) == 2
    assert "there is no such directory" in capsys.readouterr().err

    several = tmp_path / "several"
    shutil.copytree(tmp_path / "run", several / "fedavg" / "seed1")
    assert call(["export", str(several), "--csv", str(tmp_path / "out")]) == 2
    assert str(several / "fedavg" / "seed1") in capsys.readouterr().err
