"""What this machine can do: matrix products and the very convolutions of a workload, one thread a
core, all cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fedstill.engines.hardware import cores

SECONDS = 0.6
"""How long each kernel is run."""


def rates() -> dict[str, float]:
    """Floating-point operations a second of each kernel, summed over all cores, the best of three
    tries.
    """
    kernels: dict[str, Callable[[], tuple[Callable[[], Tensor], float]]] = {
        "matrix product, float32": lambda: _product(torch.float32),
        "matrix product, bfloat16": lambda: _product(torch.bfloat16),
        "convolution 3 to 32, float32": lambda: _convolution(3, 32, 32),
        "convolution 32 to 64, float32": lambda: _convolution(32, 64, 16),
    }
    return {name: max(_rate(make) for _ in range(3)) for name, make in kernels.items()}


def _product(kind: torch.dtype) -> tuple[Callable[[], Tensor], float]:
    a, b = (torch.randn(1024, 1024).to(kind) for _ in range(2))
    return lambda: a @ b, 2 * 1024**3


def _convolution(inside: int, out: int, side: int) -> tuple[Callable[[], Tensor], float]:
    x = torch.randn(50, inside, side, side).contiguous(memory_format=torch.channels_last)
    w = torch.randn(out, inside, 5, 5).contiguous(memory_format=torch.channels_last)
    return lambda: torch.nn.functional.conv2d(
        x, w, padding=2
    ), 2 * 50 * side * side * out * inside * 25


def _rate(make: Callable[[], tuple[Callable[[], Tensor], float]]) -> float:
    def one(_: int) -> float:
        torch.set_num_threads(1)
        kernel, work = make()
        kernel()
        done, began = 0, time.perf_counter()
        while (seconds := time.perf_counter() - began) < SECONDS:
            kernel()
            done += 1
        return done * work / seconds

    with torch.inference_mode(), ThreadPoolExecutor(cores()) as pool:
        return sum(pool.map(one, range(cores())))
