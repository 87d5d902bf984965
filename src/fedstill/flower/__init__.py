"""Rounds over Flower: messages, the server's engine, sites with their own data, and deployments.

This module imports neither torch nor Flower, so that programs of a federation that do not compute
need little memory.
"""

from __future__ import annotations

import time

from fedstill.core.errors import ConfigError
from fedstill.core.files import neutral

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Environment variables for Flower and Ray: they send no usage reports, and install nothing at run
time.
"""

MAX_REQUEST_BYTES = 4 << 30
"""The largest request that a site accepts, in bytes."""


def check_flower_installed() -> None:
    """Raise ConfigError if Flower cannot be imported."""
    try:
        import flwr.app  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"engine = 'flower' needs Flower: pip install 'fedstill[flower]' ({error})"
        ) from error


def say(text: str) -> None:
    """Print a line with the time, without control characters; the text may come from a server."""
    line = neutral(" ".join(text.splitlines()), "terminal")
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)
