"""How often a program asks while there is work, and while there is none."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from fedstill.flower.fleet import SHORTEST_PAUSE, Pace
from flowers import needs_flower


def test_it_asks_often_while_there_is_work_and_more_and_more_rarely_after_it() -> None:
    now = SimpleNamespace(t=100.0)
    pace = Pace(lambda: now.t)
    assert pace.wait(3.0) == 3.0, "there was no work yet"
    pace.worked()
    waits = []
    for _ in range(300):
        waits.append(pace.wait(3.0))
        now.t += waits[-1]
    assert waits[0] == SHORTEST_PAUSE
    assert waits == sorted(waits)
    assert waits[-1] == 3.0
    pace.worked()
    assert pace.wait(3.0) == SHORTEST_PAUSE
    assert pace.wait(0.01) == 0.01, "never longer than asked for"


@needs_flower
@pytest.mark.slow
def test_what_messages_need_is_imported_without_a_thread() -> None:
    code = "from fedstill.flower.deployment.node import preloaded; import importlib, threading;"
    code += "[importlib.import_module(name) for name in preloaded()];"
    code += "print(threading.active_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@needs_flower
def test_the_programs_that_do_not_compute_import_no_torch() -> None:
    names = ("commands", "deployment.node", "deployment.superlink", "deployment.tasks")
    code = "import sys, " + ", ".join(f"fedstill.flower.{name}" for name in names)
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@needs_flower
def test_the_server_imports_no_database() -> None:
    code = "import sys; from fedstill.flower.deployment import superlink;"
    code += "superlink.leave_out_database(); import flwr.superlink.main;"
    code += "print({'sqlalchemy', 'alembic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
