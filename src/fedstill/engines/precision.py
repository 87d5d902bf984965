"""Arithmetic of training: float32, or less of it where a processor or a card has units for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from fedstill.errors import ConfigError

Precision = Literal["fp32", "bf16", "tf32"]
"""``fp32``; ``bf16``: forward passes of students and teachers, and their backward, in bfloat16, but parameters, losses
and the optimiser in float32; ``tf32``: float32 whose products a CUDA device rounds to ten bits."""

P = ParamSpec("P")
T = TypeVar("T")


def check_precision(precision: Precision, device: str) -> None:
    """Raise ConfigError for a precision that no device of this kind has."""
    if precision == "tf32" and device != "cuda":
        raise ConfigError("precision = 'tf32' works on CUDA devices only; on the CPU set precision = 'fp32' or 'bf16'")


def check_machine(precision: Precision, device: str) -> None:
    """Raise ConfigError where this machine has no such device, or has no units for a precision and would imitate it."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device = 'cuda': torch sees no CUDA device here; "
            "set device = 'cpu' for a new run, or install torch for CUDA"
        )
    if precision == "bf16" and not has_bfloat16(device):
        what = "CUDA device" if device == "cuda" else "processor"
        raise ConfigError(
            f"precision = 'bf16': this {what} has no units for bfloat16, and would imitate it slowly; "
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


def set_products(precision: Precision) -> None:
    """Let a CUDA device round products to TensorFloat-32, or forbid it; process-wide, like torch's setting."""
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def _floats(value: T) -> T:
    if isinstance(value, Tensor):
        return value.float() if value.dtype == torch.bfloat16 else value  # type: ignore[return-value]
    return tuple(_floats(v) for v in value) if isinstance(value, tuple) else value  # type: ignore[return-value]
