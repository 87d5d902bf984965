"""The grid's rows: how they are chosen, what the table says of one, and that a failing test is
named.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import grid


def test_rows_are_chosen_by_how_their_names_begin() -> None:
    assert grid.chosen("") == list(grid.ROWS)
    assert [row.name for row in grid.chosen("threads,avx2")] == [
        "avx2",
        "threads-1",
        "threads-2",
        "threads-4",
    ]
    with pytest.raises(SystemExit, match="'sse'"):
        grid.chosen("avx2,sse")


def test_the_table_says_what_differed_and_how_it_went() -> None:
    (row,) = grid.chosen("onednn-avx2")
    came = grid.Came("Python 3.11.7", {"passed": 7, "failed": 1, "error": 2}, ["a", "b", "c"], 12.3)
    assert grid.in_the_table(row, came) == (
        "| onednn-avx2 | ONEDNN_MAX_CPU_ISA=AVX2 | Python 3.11.7 | 7 | 3 | 0 | 12 |\n"
    )


def test_what_a_row_needs_and_this_machine_has_not_is_said() -> None:
    with pytest.raises(grid.NotHere, match="no amiga"):
        grid.carried_out(grid.Row("other", flag="amiga"), Path(), (), ())


@pytest.mark.slow
def test_a_failing_test_is_named_and_the_table_kept(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(
        "def test_good(): pass\ndef test_bad(): raise ValueError('no good')\n"
    )
    command = [
        sys.executable,
        grid.__file__,
        "--rows",
        "as-it-is,python-9",
        "--folder",
        str(tmp_path),
        str(tmp_path),
    ]
    assert (
        "'python-9'" in subprocess.run(command, capture_output=True, text=True, check=False).stderr
    )
    command[3] = "as-it-is,default"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("| 1 | 1 | 0 |") == 2
    assert "Python" in done.stdout
    assert "DEFAULT" in done.stdout, "the processor that torch took it for"
    assert done.stdout.count("test_two.py::test_bad") == 2
    assert (tmp_path / "table.md").read_text() == done.stdout
    assert "no good" in (tmp_path / "default.log").read_text()
