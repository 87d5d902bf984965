"""Arithmetic of training: float32, or less of it where a processor or a card has units for that."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, ParamSpec, TypeVar

import torch
import torch.utils.deterministic
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.core.process_settings import set_environment

Precision = Literal["fp32", "bf16", "tf32"]
"""``fp32``; ``bf16``: forward passes of students and teachers, and their backward, in bfloat16, but
parameters, losses and the optimiser in float32; ``tf32``: float32 whose products a CUDA device
rounds to ten bits.
"""

P = ParamSpec("P")
T = TypeVar("T")


def check_precision(precision: Precision, device: str) -> None:
    """Raise ConfigError for a precision that no device of this kind has."""
    if precision == "tf32" and device != "cuda":
        raise ConfigError(
            "precision = 'tf32' works on CUDA devices only; on the CPU set precision = 'fp32' or "
            "'bf16'"
        )


def check_machine(precision: Precision, device: str) -> None:
    """Raise ConfigError where this machine has no such device, or has no units for a precision and
    would imitate it.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device = 'cuda': torch sees no CUDA device here; "
            "set device = 'cpu' for a new run, or install torch for CUDA"
        )
    if precision == "bf16" and not has_bfloat16(device):
        what = "CUDA device" if device == "cuda" else "processor"
        raise ConfigError(
            f"precision = 'bf16': this {what} has no units for bfloat16, and would imitate it "
            "slowly; "
            "set 'fp32' for a new run"
        )


def has_bfloat16(device: str) -> bool:
    """Whether a device multiplies bfloat16 itself."""
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if hasattr(torch.cpu, "get_capabilities"):
        return any(there for name, there in torch.cpu.get_capabilities().items() if "bf16" in name)
    return bool(torch.cpu._is_avx512_bf16_supported())


def lowered(run: Callable[P, T], precision: Precision, device: torch.device) -> Callable[P, T]:
    """A forward pass at a precision; what it gives is float32 again, so that losses are."""
    if precision != "bf16":
        return run

    def in_bfloat16(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            return _floats(run(*args, **kwargs))

    return in_bfloat16


@contextmanager
def products(precision: Precision, device: torch.device) -> Iterator[None]:
    """Meanwhile a CUDA device rounds products to TensorFloat-32, if that is the precision; before
    and after, not.

    The setting is the process's, like torch's: on a card clients train one after another. For the
    CPU it is left alone.
    """
    if device.type != "cuda":
        yield
        return
    try:
        _round_products(precision == "tf32")
        yield
    finally:
        _round_products(False)


def steady(device: str) -> None:
    """Have a CUDA device compute the same bits each time, in float32; process-wide. Of the CPU
    nothing is changed.

    An operation that torch has in one way alone, whose bits are not the same each time, warns.
    """
    if device != "cuda":
        return
    if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        set_environment({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    if not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _round_products(False)


def card_named(device: str) -> str:
    """A CUDA device's name, with the versions of what computes on it; empty for the CPU."""
    if device != "cuda":
        return ""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"{torch.cuda.get_device_name()} (CUDA {torch.version.cuda}, cuDNN {cudnn})"


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Meanwhile torch's own kernels take the place of cuDNN's; its other settings are left
    alone.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def _round_products(on: bool) -> None:
    """Set torch's older switches; then the newer ones, where a process has used them and they say
    something else.
    """
    torch.backends.cudnn.allow_tf32 = on
    torch.backends.cuda.matmul.allow_tf32 = on
    for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn"):
        switch = (
            operator.attrgetter(name)(torch.backends)
            if hasattr(torch.backends, "fp32_precision")
            else None
        )
        if switch is not None and (switch.fp32_precision == "tf32") != on:
            switch.fp32_precision = "tf32" if on else "ieee"


def _floats(value: T) -> T:
    if isinstance(value, Tensor):
        return value.float() if value.dtype == torch.bfloat16 else value  # type: ignore[return-value]
    if not isinstance(value, tuple):
        return value
    parts = [_floats(part) for part in value]
    if hasattr(value, "_make"):  # a NamedTuple
        return value._make(parts)  # type: ignore[no-any-return]
    return tuple(parts)  # type: ignore[return-value]
