"""The arithmetic of training: float32, or a lower precision that the processor or card supports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from fedstill.core.errors import ConfigError

Precision = Literal["fp32", "bf16", "tf32"]
"""``fp32``: everything in float32.

``bf16``: forward and backward passes of students and teachers in bfloat16; parameters, losses and
the optimiser in float32.

``tf32``: float32, but a CUDA device rounds products to ten bits.
"""

P = ParamSpec("P")
T = TypeVar("T")


def check_precision(precision: Precision, device: str) -> None:
    """Raise ConfigError for a precision that no device of this kind supports."""
    if precision == "tf32" and device != "cuda":
        raise ConfigError(
            "precision = 'tf32' works on CUDA devices only; on the CPU set precision = 'fp32' or "
            "'bf16'"
        )


def check_machine(precision: Precision, device: str) -> None:
    """Raise ConfigError if this machine has no such device, or would emulate the precision."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device = 'cuda': torch sees no CUDA device here; "
            "set device = 'cpu' for a new run, or install torch for CUDA"
        )
    if precision == "bf16" and not has_bfloat16(device):
        kind = "processor"
        if device == "cuda":
            kind = "CUDA device"
        raise ConfigError(
            f"precision = 'bf16': this {kind} has no units for bfloat16, and would imitate it "
            "slowly; set 'fp32' for a new run"
        )


def has_bfloat16(device: str) -> bool:
    """Whether a device has instructions for products in bfloat16."""
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return any(supported for name, supported in capabilities.items() if "bf16" in name)
    # Older versions of torch.
    return bool(torch.cpu._is_avx512_bf16_supported())


def lowered(run: Callable[P, T], precision: Precision, device: torch.device) -> Callable[P, T]:
    """A forward pass at a precision. Its outputs are float32 again, so that losses are, too."""
    if precision != "bf16":
        return run

    def in_bfloat16(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            return _floats(run(*args, **kwargs))

    return in_bfloat16


@contextmanager
def products(precision: Precision, device: torch.device) -> Iterator[None]:
    """Let a CUDA device round products to TensorFloat-32 if that is the precision. On the CPU this
    does nothing.

    Torch has one setting for the whole process. It is safe to change, because on a card clients
    train one after another.
    """
    if device.type != "cuda":
        yield
        return
    from fedstill.core.process_settings import round_products  # for cards alone

    try:
        round_products(precision == "tf32")
        yield
    finally:
        round_products(False)


def _floats(value: T) -> T:
    """The outputs of a pass, with float32 in place of bfloat16."""
    if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
        return value.float()  # type: ignore[return-value]
    if not isinstance(value, tuple):
        return value
    parts = [_floats(part) for part in value]
    if hasattr(value, "_make"):  # a NamedTuple
        return value._make(parts)  # type: ignore[no-any-return]
    return tuple(parts)  # type: ignore[return-value]


# ---- recorded steps --------------------------------------------------------------------------

REPLAY = "FEDSTILL_REPLAY"
"""The environment variable that turns recording off if it is 0."""


def may_record_steps(device: torch.device) -> bool:
    """Whether steps on a device may be recorded."""
    return device.type == "cuda" and os.environ.get(REPLAY, "1") != "0"
