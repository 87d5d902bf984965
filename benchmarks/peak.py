"""The rates of kernels on this machine: of matrix products, and of the convolutions of W1's
network, on all cores with one thread per core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from fedstill.engines.hardware import cores

SECONDS = 0.6
"""The seconds that a kernel runs in one try."""

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
    first = torch.randn(1024, 1024).to(dtype)
    second = torch.randn(1024, 1024).to(dtype)
    return Kernel(lambda: first @ second, 2 * 1024**3)


def _convolution(channels: int, features: int, side: int, dtype: torch.dtype) -> Kernel:
    images = torch.randn(50, channels, side, side)
    images = images.to(dtype, memory_format=torch.channels_last)
    weights = torch.randn(features, channels, 5, 5)
    weights = weights.to(dtype, memory_format=torch.channels_last)
    operations = 2 * images.shape[0] * side * side * weights.numel()
    return Kernel(lambda: conv2d(images, weights, padding=2), operations)


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
