"""The seconds of whole processes: ``python -m benchmarks.startup``.

Each command runs once before it is timed, so that files and bytecode are cached.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.turns import seconds_of
from fedstill.cli import app
from fedstill.report import terminal

REPEATS = 5
"""The number of timed processes of each command."""

EMPTY_APP = """from cyclopts import App

app = App(name="fedstill", result_action="return_value")
for number in range(COMMANDS):
    app.command(f"nowhere:command{number}", name=f"command{number}", help="A line of help.")
app(["--help"])
"""
"""An app whose commands do nothing: the smallest possible cost of ``fedstill --help``."""

CONFIG = """rounds = 1
method = "fedntd"
measure = []
"""

COMMANDS: Mapping[str, Sequence[str]] = {
    "python, doing nothing": ["-c", ""],
    "import fedstill": ["-c", "import fedstill"],
    "--help of an empty app with as many lazy commands": ["empty.py"],
    "fedstill --help": ["-m", "fedstill", "--help"],
    "fedstill run, one round of the demo's setting": ["-m", "fedstill", "run", "one.toml", "-q"],
}
"""The arguments of Python, by the name in the table."""


def empty_app() -> str:
    """A program with as many lazy commands as fedstill."""
    commands = [name for name in app if not name.startswith("-")]
    return EMPTY_APP.replace("COMMANDS", str(len(commands)))


def run_python(arguments: Sequence[str], folder: Path) -> None:
    """Run Python in a folder; raises CalledProcessError if it fails."""
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=folder)


def main() -> None:
    """Time each command, and print the medians."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "one.toml").write_text(CONFIG, encoding="utf-8")
        (folder / "empty.py").write_text(empty_app(), encoding="utf-8")
        for label, arguments in COMMANDS.items():
            run_python(arguments, folder)
            command = partial(run_python, arguments, folder)
            seconds = [seconds_of(command) for _ in range(REPEATS)]
            median = statistics.median(seconds)
            rows.append([label, f"{median:.2f}", f"{min(seconds):.2f}–{max(seconds):.2f}"])
    head = ["whole process", "seconds, median", "min–max"]
    terminal.console().print(terminal.PlainTable(head, rows))


if __name__ == "__main__":
    main()
