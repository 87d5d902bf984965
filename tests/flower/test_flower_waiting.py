"""How often a program asks while there is work, and while there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fedstill.flower.fleet import SHORTEST_PAUSE, pause_after
from flowers import needs_flower


def test_it_asks_often_at_first_and_more_and_more_rarely_after_it() -> None:
    elapsed = 0.0
    waits = []
    for _ in range(300):
        waits.append(pause_after(elapsed, 3.0))
        elapsed += waits[-1]
    assert waits[0] == SHORTEST_PAUSE
    assert waits == sorted(waits)
    assert waits[-1] == 3.0
    assert pause_after(0.0, 0.01) == 0.01, "never longer than asked for"


@needs_flower
@pytest.mark.slow
def test_what_messages_need_is_imported_without_a_thread() -> None:
    code = "from fedstill.flower.deployment.node import preloaded; import importlib, threading;"
    code += "[importlib.import_module(name) for name in preloaded()];"
    code += "print(threading.active_count())"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "1"


@needs_flower
def test_the_programs_that_do_not_compute_import_no_torch() -> None:
    names = ("commands", "deployment.node", "deployment.superlink", "deployment.tasks")
    code = "import sys, " + ", ".join(f"fedstill.flower.{name}" for name in names)
    code += "; print('torch' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "False"


@needs_flower
def test_the_server_imports_no_database() -> None:
    code = "import sys; from fedstill.flower.deployment import superlink;"
    code += "superlink.leave_out_database(); import flwr.superlink.main;"
    code += "print({'sqlalchemy', 'alembic'} & set(sys.modules))"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "set()"
