"""On a machine whose texts and terminal are not in UTF-8, as clusters have it with
``LANG=en_US``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
CONFIG = """
rounds = 1
[data]
name = "obst.csv"
columns = ["größe", "gewicht"]
label_column = "sorte"
[partition]
kind = "dirichlet"
alpha = 1.0
min_size = 1
[topology]
clients = 3
[model]
name = "mlp"
"""


def python(folder: Path, *arguments: str, **environment: str) -> str:
    """The output of Python in a folder, with additional environment variables."""
    variables = {**os.environ, **environment}
    completed = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=variables, capture_output=True, check=False
    )
    assert completed.returncode == 0, completed.stderr.decode(errors="replace")
    return completed.stdout.decode("latin-1")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a table of fruits, whose columns and classes have umlauts, and its config."""
    rows = [f"{i % 7}.5,{i % 5},{('Äpfel', 'Süßkirschen')[i % 2]}" for i in range(60)]
    (tmp_path / "obst.csv").write_text("\n".join(["größe,gewicht,sorte", *rows]), encoding="utf-8")
    (tmp_path / "obst.toml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


PROGRAM = """
import sys
from fedstill.cli import call, main

for command in (["run", "obst.toml", "--out", "one", "-q"], ["report", "one"]):
    assert call(command) == 0
sys.argv = ["fedstill", "explain", "obst.toml"]
main()
"""
"""In one process: the start of another would take longer than all commands."""


@pytest.mark.slow
def test_a_run_its_report_and_the_terminal_where_texts_are_ascii(place: Path) -> None:
    """The page is in UTF-8 nevertheless. The terminal prints similar characters for those that it
    lacks.
    """
    printed = python(place, "-c", PROGRAM, **ASCII, PYTHONIOENCODING="ascii")
    page = (place / "one" / "report.html").read_text(encoding="utf-8")
    assert "größe" in page
    assert "Ã" not in page
    assert "gr??e" in printed
    assert "##" in printed  # the darkest shade of the drawn split
