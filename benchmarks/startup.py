"""Seconds until something happens: ``python -m benchmarks.startup``. Whole processes, the second
call and on.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedstill.cli import app
from fedstill.report import terminal

TIMES = 5
EMPTY_APP = """from cyclopts import App

app = App(name="fedstill", result_action="return_value")
for number in range(COMMANDS):
    app.command(f"nowhere:command{number}", name=f"command{number}", help="A line of help.")
app(["--help"])
"""
"""An app whose commands do nothing: the least that ``fedstill --help`` can cost."""

CONFIG = """rounds = 1
method = "fedntd"
measure = []
"""


def empty_app() -> str:
    """A program with as many lazy commands as fedstill has."""
    commands = [name for name in app if not name.startswith("-")]
    return EMPTY_APP.replace("COMMANDS", str(len(commands)))


def seconds(command: list[str], folder: Path) -> float:
    """How long a command takes from start to end; raises CalledProcessError if it fails."""
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return time.perf_counter() - began


def main() -> None:
    """Time each command, and print the medians."""
    python = [sys.executable]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "one.toml").write_text(CONFIG, encoding="utf-8")
        (folder / "empty.py").write_text(empty_app(), encoding="utf-8")
        commands = {
            "python, doing nothing": [*python, "-c", ""],
            "import fedstill": [*python, "-c", "import fedstill"],
            "--help of an empty app with as many lazy commands": [*python, "empty.py"],
            "fedstill --help": [*python, "-m", "fedstill", "--help"],
            "fedstill run, one round of the demo's setting": [
                *python,
                "-m",
                "fedstill",
                "run",
                "one.toml",
                "-q",
            ],
        }
        rows = []
        for what, command in commands.items():
            runs = [seconds(command, folder) for _ in range(1 + TIMES)][1:]
            rows.append(
                (what, f"{statistics.median(runs):.2f}", f"{min(runs):.2f}–{max(runs):.2f}")
            )
    terminal.console().print(
        terminal.PlainTable(["whole process", "seconds, median", "min–max"], rows)
    )


if __name__ == "__main__":
    main()
