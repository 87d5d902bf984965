"""Rounds over Flower: messages, the server's engine, sites with their own data, and deployments.

This module imports neither torch nor Flower: the programs of a federation that do not compute are
small.
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
"""Flower and Ray as fedstill runs them: they send no reports, and install nothing while they
run.
"""


def check_flower_installed() -> None:
    """Raise ConfigError if Flower cannot be imported."""
    try:
        import flwr.app  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"engine = 'flower' needs Flower: pip install 'fedstill[flower]' ({error})"
        ) from error


def say(text: str) -> None:
    """Print a line with the time, as a site's process does; the text may come from a server."""
    line = neutral(" ".join(text.splitlines()), "terminal")
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)
