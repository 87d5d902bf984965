"""The memory of a process."""

from __future__ import annotations

import resource
import sys


def peak_memory() -> int:
    """The most bytes of memory (resident set) that this process has used so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux KiB.
    if sys.platform == "darwin":
        return peak
    return 1024 * peak
