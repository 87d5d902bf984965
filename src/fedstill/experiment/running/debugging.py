"""Whether the first client that fails ends a run, so that the author of its method sees the traceback."""

from __future__ import annotations

import os

from fedstill.errors import ConfigError


def debugged(asked: bool | None, engine: str) -> bool:
    """What ``debug`` comes to: as asked; by default only under pytest, in a run with ``engine = "serial"``.

    Raises ConfigError for a run on Flower: what a client raised stays at its site, but for one line.
    """
    if asked and engine == "flower":
        raise ConfigError("debug: clients on Flower keep their tracebacks; debug a run with engine = 'serial'")
    return engine == "serial" and "PYTEST_CURRENT_TEST" in os.environ if asked is None else asked
