"""Where decoded data and slow splits are kept: ``FEDSTILL_CACHE``, or the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_dir


def cache_folder() -> Path:
    """The cache folder; it may not exist yet, and deleting it loses nothing but time."""
    return Path(os.environ.get("FEDSTILL_CACHE") or user_cache_dir("fedstill"))
