"""What the C library does with memory that was freed: kept for the next batch, not returned and
requested again.

A batch's activations and gradients are allocated and freed in every step. Handed back, their pages
must be found, cleared and mapped again the next time. What that is worth here,
``python -m benchmarks.allocator`` prints.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

KEEP = "FEDSTILL_KEEP_FREED"
"""The environment variable that, at 0, leaves the C library as it is, with less memory held between
stages.
"""

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt's names for them
LARGEST = 32 * 2**20  # the largest that the library takes for what is mapped on its own


@functools.cache
def keep_freed() -> bool:
    """Have this process keep what is freed, once; whether it does: only glibc can be asked."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or os.environ.get(KEEP) == "0":
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST) and mallopt(TRIM_THRESHOLD, 2**31 - 1))
