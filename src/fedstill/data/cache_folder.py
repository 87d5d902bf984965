"""Where decoded data, slow splits and replies are kept: ``FEDSTILL_CACHE``, or the user's cache
folder.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from platformdirs import user_cache_dir

from fedstill.errors import ConfigError

CACHE = "FEDSTILL_CACHE"
"""The environment variable that names the cache folder."""


def cache_folder() -> Path:
    """The cache folder; it may not exist yet, and deleting it loses nothing but time.

    Raises ConfigError if ``FEDSTILL_CACHE`` names a file. A folder in which nothing can be written
    is done without.
    """
    folder = Path(os.environ.get(CACHE) or user_cache_dir("fedstill"))
    with contextlib.suppress(PermissionError):
        if folder.is_file():
            raise ConfigError(
                f"{CACHE} = {str(folder)!r} is a file; name a folder, which may be one to be made"
            )
    return folder


REUSE_GB = "FEDSTILL_REUSE_GB"
"""The environment variable that says how many gigabytes of replies are kept for other runs."""


def reuse_bytes() -> int:
    """How many bytes of replies may be kept: 10 GB, or what ``FEDSTILL_REUSE_GB`` says; 0 keeps
    none.

    Raises ConfigError if that is no number of at least 0.
    """
    said = os.environ.get(REUSE_GB) or "10"
    try:
        gigabytes = float(said)
    except ValueError:
        gigabytes = math.nan
    if not 0 <= gigabytes < math.inf:
        raise ConfigError(f"{REUSE_GB} = {said!r} must be a number of gigabytes, at least 0")
    return int(gigabytes * 1e9)
