"""The rows of the grid: how they are selected, their lines in the table, and the names of failing
tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import grid

TESTS = """
def test_good():
    pass

def test_bad():
    raise ValueError("no good")
"""


def test_rows_are_selected_by_the_beginnings_of_their_names() -> None:
    assert grid.selected_rows("") == list(grid.ROWS)
    names = [row.name for row in grid.selected_rows("threads,avx2")]
    assert names == ["avx2", "threads-1", "threads-2", "threads-4"]
    with pytest.raises(SystemExit, match="'sse'"):
        grid.selected_rows("avx2,sse")


def test_a_line_of_the_table_has_the_difference_and_the_counts() -> None:
    (row,) = grid.selected_rows("onednn-avx2")
    counts = {"passed": 7, "failed": 1, "error": 2}

    result = grid.RowResult("Python 3.11.7", counts, failing=["a", "b", "c"], seconds=12.3)

    expected = "| onednn-avx2 | ONEDNN_MAX_CPU_ISA=AVX2 | Python 3.11.7 | 7 | 3 | 0 | 12 |\n"
    assert result.table_line(row) == expected


def test_a_row_that_this_machine_cannot_run_has_a_reason() -> None:
    with pytest.raises(grid.NotOnThisMachine, match="no amiga"):
        grid.row_result(grid.Row("other", flag="amiga"), Path(), (), ())


def grid_process(folder: Path, rows: str) -> subprocess.CompletedProcess[str]:
    """Run some rows with the tests in a folder."""
    command = [sys.executable, grid.__file__, "--rows", rows, "--folder", str(folder), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_failing_tests_are_named_and_the_table_is_kept(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(TESTS)
    assert "'python-9'" in grid_process(tmp_path, "as-it-is,python-9").stderr

    process = grid_process(tmp_path, "as-it-is,default")

    assert process.returncode == 1, process.stderr
    assert process.stdout.count("| 1 | 1 | 0 |") == 2
    assert "Python" in process.stdout
    assert "DEFAULT" in process.stdout, "the instructions that torch uses"
    assert process.stdout.count("test_two.py::test_bad") == 2
    assert (tmp_path / "table.md").read_text() == process.stdout
    assert "no good" in (tmp_path / "default.log").read_text()
