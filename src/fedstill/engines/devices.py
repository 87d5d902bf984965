"""The devices of runs: what a config may name, what this machine has, how products are rounded, and
how many runs fit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch

from fedstill.core.errors import ConfigError
from fedstill.core.process_settings import at_the_end, set_environment
from fedstill.engines.hardware import Precision, cores


def is_cuda(device: str) -> bool:
    """Whether a device is a GPU with CUDA.

    >>> is_cuda("cuda"), is_cuda("cuda:1"), is_cuda("cpu")
    (True, True, False)
    """
    return device.partition(":")[0] == "cuda"


def is_device(name: str) -> bool:
    """Whether a config may name this device.

    >>> [is_device(name) for name in ("cpu", "cuda", "cuda:1", "mps", "cuda:x", "gpu")]
    [True, True, True, True, False, False]
    """
    return re.fullmatch(r"cpu|mps|cuda(:(0|[1-9][0-9]{0,3}))?", name) is not None


def check_precision(precision: Precision, device: str) -> None:
    """Raise ConfigError for a precision that no device of this kind supports."""
    if precision == "tf32" and not is_cuda(device):
        raise ConfigError(
            "precision = 'tf32' needs a CUDA device; on the CPU, set precision = 'fp32' or 'bf16'"
        )


def check_machine(precisions: Mapping[str, Precision], device: str) -> None:
    """Raise ConfigError if this machine does not have the device, or would emulate a precision.

    ``precisions``: the precisions by config key.
    """
    _check_device(device)
    keys = [key for key, precision in precisions.items() if precision == "bf16"]
    if keys and not has_bfloat16(device):
        kind = "processor"
        if device != "cpu":
            kind = "device"
        raise ConfigError(
            f"{keys[0]} = 'bf16': this {kind} has no units for bfloat16 and would emulate it "
            "slowly; remove the key for a new run"
        )


def _check_device(device: str) -> None:
    """Raise ConfigError if torch does not see a device; the message lists those that it sees."""
    if device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(
            "device = 'mps': torch sees no MPS device on this machine; "
            "set device = 'cpu' for a new run"
        )
    if not is_cuda(device):
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device = {device!r}: torch sees no CUDA device on this machine; "
            "set device = 'cpu' for a new run, or install torch for CUDA"
        )
    count = torch.cuda.device_count()
    index = torch.device(device).index
    if index is not None and index >= count:
        names = [f"cuda:{number} ({torch.cuda.get_device_name(number)})" for number in range(count)]
        raise ConfigError(
            f"device = {device!r}: torch only sees {', '.join(names)}; choose one of them"
        )


def has_bfloat16(device: str) -> bool:
    """Whether a device has instructions for products in bfloat16; False for MPS (untested)."""
    if device == "mps":
        return False
    if is_cuda(device):
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return any(supported for name, supported in capabilities.items() if "bf16" in name)
    # Older versions of torch.
    return bool(torch.cpu._is_avx512_bf16_supported())


def card_named(device: str) -> str:
    """A CUDA device's name, with the versions of CUDA and cuDNN; empty for other devices."""
    if not is_cuda(device):
        return ""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"{torch.cuda.get_device_name(device)} (CUDA {torch.version.cuda}, cuDNN {cudnn})"


def make_deterministic(device: str) -> None:
    """Make a CUDA device compute the same bits each time, in float32, for the whole process. On
    other devices this does nothing.

    A device with a number becomes torch's current one, because recorded steps and generators are
    those of the current device. An operation without a deterministic version only warns.
    """
    if not is_cuda(device):
        return
    index = torch.device(device).index
    if index is not None:
        at_the_end(partial(torch.cuda.set_device, torch.cuda.current_device()))
        torch.cuda.set_device(index)
    # cuBLAS is deterministic only with a workspace of fixed size.
    if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        set_environment({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)
    # Deterministic algorithms would fill every new tensor, which takes time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    set_tf32(False)


def set_tf32(enabled: bool) -> None:
    """Switch TensorFloat-32 on or off."""
    torch.backends.cudnn.allow_tf32 = enabled
    torch.backends.cuda.matmul.allow_tf32 = enabled
    if not hasattr(torch.backends, "fp32_precision"):
        return
    # Newer versions of torch have further switches. If a program has set one of them, the old ones
    # above do not change it.
    precision = "tf32" if enabled else "ieee"
    for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn"):
        switch = attrgetter(name)(torch.backends)
        if (switch.fp32_precision == "tf32") != enabled:
            switch.fp32_precision = precision


@contextmanager
def tf32_if_chosen(precision: Precision, device: torch.device) -> Iterator[None]:
    """A context in which a CUDA device rounds products to TensorFloat-32, if that is the precision.
    On the CPU, it has no effect.

    Torch has one setting for the whole process. It is safe to change it, because clients on a GPU
    train one after another.
    """
    if device.type != "cuda":
        yield
        return
    try:
        set_tf32(precision == "tf32")
        yield
    finally:
        set_tf32(False)


# ---- several runs at once ------------------------------------------------------------------------

BYTES_A_RUN = 1.5e9
"""The memory that a run of typical size needs at most; it only limits the number of parallel runs.
"""

BYTES_ON_CARD = 3e9
"""The same for the memory of a GPU, of which each process needs half a gigabyte for itself."""

VISIBLE_CARDS = "CUDA_VISIBLE_DEVICES"
"""The environment variable with the GPUs that are visible to a process."""


@dataclass(frozen=True)
class Card:
    """A GPU: its name in ``CUDA_VISIBLE_DEVICES``, and its free memory in bytes."""

    name: str
    free: float

    @property
    def room(self) -> int:
        """The number of runs that fit into its memory, at least one."""
        return max(1, int(self.free / BYTES_ON_CARD))


@dataclass(frozen=True)
class Slots:
    """The number of parallel runs.

    ``cards``: the GPU of each of them, by its name in ``CUDA_VISIBLE_DEVICES``; empty if the runs
    see the same GPUs as this process.
    """

    jobs: int
    cards: tuple[str, ...] = ()


def jobs_that_fit(device: str = "cpu") -> int:
    """The number of parallel runs on a device: one for each core, or fewer if the memory of the
    machine or of its GPU is insufficient.
    """
    total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fit = min(cores(), int(total_memory / BYTES_A_RUN))
    if is_cuda(device) and torch.cuda.is_available():
        fit = min(fit, int(torch.cuda.mem_get_info(device)[0] / BYTES_ON_CARD))
    return max(1, fit)


def slots_for(devices: Set[str], jobs: int | None, numbers: Sequence[int] = ()) -> Slots:
    """The slots for parallel runs on these devices. Runs with ``device = "cuda"`` are distributed
    over the GPUs that torch sees.

    jobs: the number of parallel runs; None: as many as fit. numbers: the GPUs to use, with torch's
    indices; empty: all. Raises ConfigError for GPUs that do not exist or are not used.
    """
    check_numbers(numbers)
    if numbers:
        _check_use(devices)
    numbered = sorted(device for device in devices if device.startswith("cuda:"))
    if numbered:
        return Slots(jobs or min(map(jobs_that_fit, numbered)))
    if "cuda" not in devices or not torch.cuda.is_available():
        return Slots(jobs or jobs_that_fit())
    numbers = numbers or range(torch.cuda.device_count())
    if numbers == range(1):
        return Slots(jobs or jobs_that_fit("cuda"))
    names = distributed([_card(number) for number in numbers], jobs)
    return Slots(len(names), names)


def distributed(cards: Sequence[Card], jobs: int | None) -> tuple[str, ...]:
    """The GPU of each slot, in turn.

    By default, there are as many slots as the memory of the GPUs allows, at most one for each core,
    and at least one for each GPU. ``jobs`` overrides this number, regardless of memory.

    >>> distributed([Card("0", 24e9), Card("1", 6e9)], jobs=5)
    ('0', '1', '0', '1', '0')
    """
    most = jobs or max(len(cards), jobs_that_fit())
    rounds = most
    if jobs is None:
        rounds = max(card.room for card in cards)
    names = []
    for turn in range(rounds):
        names += [card.name for card in cards if jobs is not None or turn < card.room]
    return tuple(names[:most])


def check_numbers(numbers: Sequence[int]) -> None:
    """Raise ConfigError for ``--devices`` that torch does not see, or that are repeated."""
    if not numbers:
        return
    count = 0
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError("--devices: torch sees no CUDA device on this machine; remove the option")
    unseen = [number for number in numbers if number not in range(count)]
    if unseen:
        seen = ", ".join(map(str, range(count)))
        raise ConfigError(
            f"--devices: there is no CUDA device {unseen[0]} on this machine; torch sees {seen}"
        )
    if len(set(numbers)) != len(numbers):
        raise ConfigError(
            "--devices contains a device twice; list each device once, and set --jobs"
        )


def _check_use(devices: Set[str]) -> None:
    """Raise ConfigError if ``--devices`` has no effect on runs with these devices."""
    if "cuda" not in devices or any(device.startswith("cuda:") for device in devices):
        raise ConfigError(
            f"--devices distributes runs with device = 'cuda', but these have "
            f"{' and '.join(map(repr, sorted(devices)))}; set device = 'cuda'"
        )


def _card(number: int) -> Card:
    """The GPU with this number in torch."""
    name = str(number)
    visible = os.environ.get(VISIBLE_CARDS)
    if visible:
        name = visible.split(",")[number].strip()
    return Card(name, float(torch.cuda.mem_get_info(number)[0]))
