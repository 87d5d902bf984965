"""Freed memory is kept where the C library can be asked to, and not where the user says
otherwise.
"""

import os
import subprocess
import sys

import pytest

WHERE = """
import ctypes, os
from fedstill.engines.hardware import KEEP_FREED, keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]


def tell():
    kept = keep_freed_memory()
    address = libc.malloc(16 * 2**20)
    for line in open("/proc/self/maps"):
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            print(kept, line.split()[-1] == "[heap]", flush=True)


for said in "10":  # each in a process that has been told nothing yet
    os.environ[KEEP_FREED] = said
    if (child := os.fork()) == 0:
        tell()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries have no such setting")
@pytest.mark.slow
def test_large_tensors_come_from_what_is_kept_unless_the_user_says_otherwise() -> None:
    command = [sys.executable, "-c", WHERE]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["True True", "False False"]
