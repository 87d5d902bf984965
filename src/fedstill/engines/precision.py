"""The arithmetic of training: float32, or a lower precision that the processor or card supports."""

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
    try:
        _round_products(precision == "tf32")
        yield
    finally:
        _round_products(False)


def steady(device: str) -> None:
    """Make a CUDA device compute the same bits each time, in float32, for the whole process. On the
    CPU this does nothing.

    An operation without a deterministic version only warns.
    """
    if device != "cuda":
        return
    # cuBLAS is deterministic only with a workspace of fixed size.
    from fedstill.core.process_settings import set_environment  # for cards alone

    if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        set_environment({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)
    # Deterministic algorithms would fill every new tensor, which takes time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _round_products(False)


def card_named(device: str) -> str:
    """A CUDA device's name, with the versions of CUDA and cuDNN; empty for the CPU."""
    if device != "cuda":
        return ""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"{torch.cuda.get_device_name()} (CUDA {torch.version.cuda}, cuDNN {cudnn})"


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Use torch's own kernels instead of cuDNN's."""
    # torch.backends.cudnn.flags() would reset cuDNN's other settings.
    was_enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = was_enabled


def _round_products(on: bool) -> None:
    """Switch TensorFloat-32 on or off."""
    torch.backends.cudnn.allow_tf32 = on
    torch.backends.cuda.matmul.allow_tf32 = on
    if not hasattr(torch.backends, "fp32_precision"):
        return
    # Newer versions of torch have further switches. If a program has set one of them, the old ones
    # above do not change it.
    precision = "tf32" if on else "ieee"
    for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn"):
        switch = operator.attrgetter(name)(torch.backends)
        if (switch.fp32_precision == "tf32") != on:
            switch.fp32_precision = precision


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
