"""The rate of this machine's kernels: matrix products, and the convolutions of W1's network, with
one thread per core on all cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedstill.engines.hardware import cores

SECONDS = 0.6
"""How long each kernel runs in one try."""

TRIES = 3

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The number types that are measured, by name."""


@dataclass(frozen=True)
class Kernel:
    """A kernel with its inputs, and its floating-point operations per call."""

    run: Callable[[], Tensor]
    operations: float


def rates() -> dict[str, float]:
    """Floating-point operations per second by kernel and number type, summed over all cores: the
    best of several tries.
    """
    measured = {}
    for name, dtype in TYPES.items():
        makers: dict[str, Callable[[torch.dtype], Kernel]] = {
            "matrix product": _product,
            "convolution 3 to 32": lambda dtype: _convolution(3, 32, 32, dtype),
            "convolution 32 to 64": lambda dtype: _convolution(32, 64, 16, dtype),
        }
        for kernel, make in makers.items():
            tries = [_rate(partial(make, dtype)) for _ in range(TRIES)]
            measured[f"{kernel}, {name}"] = max(tries)
    return measured


def limit(measured: dict[str, float], name: str) -> float:
    """The limit of a number type: the rate of its fastest kernel.

    On some processors, convolutions are much faster than matrix products.
    """
    return max(rate for kernel, rate in measured.items() if kernel.endswith(f", {name}"))


def _product(dtype: torch.dtype) -> Kernel:
    a = torch.randn(1024, 1024).to(dtype)
    b = torch.randn(1024, 1024).to(dtype)
    return Kernel(lambda: a @ b, 2 * 1024**3)


def _convolution(inside: int, out: int, side: int, dtype: torch.dtype) -> Kernel:
    x = torch.randn(50, inside, side, side).to(dtype, memory_format=torch.channels_last)
    w = torch.randn(out, inside, 5, 5).to(dtype, memory_format=torch.channels_last)
    operations = 2 * 50 * side * side * out * inside * 25
    return Kernel(lambda: torch.nn.functional.conv2d(x, w, padding=2), operations)


def _rate(make: Callable[[], Kernel]) -> float:
    """Operations per second of a kernel on all cores."""

    def on_one_core(_: int) -> float:
        torch.set_num_threads(1)
        kernel = make()
        kernel.run()
        calls = 0
        began = time.perf_counter()
        while (seconds := time.perf_counter() - began) < SECONDS:
            kernel.run()
            calls += 1
        return calls * kernel.operations / seconds

    with torch.inference_mode(), ThreadPoolExecutor(cores()) as pool:
        return sum(pool.map(on_one_core, range(cores())))
