"""Standard settings of the process while fedstill computes in it.

torch, NumPy and the environment have settings that change the bits of a computation, or make it
fail: the default number type and device, the number of threads, the precision of products. A run
must depend on its config alone. So every public function that computes does so within
``process_settings``: meanwhile the settings are those of a new process with one torch thread, and
afterwards the caller's settings are restored.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic

SET_BY_IMPORTS = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "GRPC_VERBOSITY")
"""Environment variables that libraries set when fedstill imports them: scikit-learn and Flower."""


@contextmanager
def process_settings() -> Iterator[None]:
    """Give this thread and its process fedstill's standard settings for the block.

    Blocks may be nested, and several threads may be inside one. The settings of the process are
    restored when the last thread leaves.
    """
    _process.enter()
    try:
        with ExitStack() as thread:
            thread.enter_context(_on_cpu_by_default())
            thread.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            thread.enter_context(_small_numbers())
            for setting in _as_without_blocks():
                thread.enter_context(setting)
            numpy_errors = np.errstate(divide="warn", over="warn", under="ignore", invalid="warn")
            thread.enter_context(numpy_errors)
            yield
    finally:
        _process.leave()


def is_settled() -> bool:
    """Whether any thread is within ``process_settings``."""
    return _process.users > 0


def at_the_end(undo: Callable[[], object]) -> None:
    """Call a function when the last thread leaves ``process_settings``; never if none is inside."""
    _process.at_the_end(undo)


def set_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables, until the last thread leaves ``process_settings``."""
    for name, value in variables.items():
        at_the_end(partial(_restore_variable, name, os.environ.get(name)))
        os.environ[name] = value


@dataclass(frozen=True)
class _Setting:
    """A setting of the whole process.

    ``standard``: the legal values; another value is replaced by the first. Empty: every value is
    legal at first, and fedstill may change the setting later.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    standard: tuple[Any, ...] = ()

    def standardise(self, undo: ExitStack) -> None:
        """Set a standard value; ``undo`` restores the current one."""
        try:
            value = self.read()
        except (AttributeError, RuntimeError):
            # This version of torch has no such setting. Or the process has set both the older and
            # the newer form of the setting, and torch cannot tell which of them is valid.
            return
        undo.callback(self.write, value)
        if self.standard and value not in self.standard:
            self.write(self.standard[0])


class _Process:
    """The settings of the process, which all its threads share."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.users = 0
        self._undo = ExitStack()
        self._caller_freezes = False

    def enter(self) -> None:
        """Standardise the settings, unless another thread has done so."""
        with self._lock:
            self.users += 1
            if self.users == 1:
                self._standardise()

    def leave(self) -> None:
        """Restore the settings, unless another thread still needs them."""
        with self._lock:
            self.users -= 1
            if self.users == 0:
                self._undo.close()

    def at_the_end(self, undo: Callable[[], object]) -> None:
        """Call a function when the settings are restored."""
        with self._lock:
            if self.users > 0:
                self._undo.callback(undo)

    def _standardise(self) -> None:
        for name in _imported_variables():
            self._undo.callback(_restore_variable, name, os.environ.get(name))
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._undo.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        for setting in _settings():
            setting.standardise(self._undo)
        self._freeze_objects()

    def _freeze_objects(self) -> None:
        """Exclude the objects that exist now from Python's search for circular references, until
        the settings are restored.

        Importing torch creates so many objects that a single search takes longer than a small
        round. A caller who has frozen objects would lose this with ``unfreeze``, so that nothing
        changes then.
        """
        # Python counts frozen objects one by one, which takes as long as a search: count them once.
        if not self._caller_freezes:
            self._caller_freezes = gc.get_freeze_count() > 0
        if not self._caller_freezes:
            gc.freeze()
            self._undo.callback(gc.unfreeze)


_process = _Process()


def _settings() -> list[_Setting]:
    """The settings of the process, in the order in which they are standardised."""
    settings = [
        _Setting(torch.get_default_dtype, torch.set_default_dtype, (torch.float32,)),
        # A caller may want an error where torch has no deterministic kernel.
        _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
        _attribute(torch.backends, "mkldnn.enabled", True),
    ]
    if hasattr(torch.backends, "fp32_precision"):
        for products in ("matmul", "conv", "rnn"):
            name = f"mkldnn.{products}.fp32_precision"
            settings.append(_attribute(torch.backends, name, "ieee", "none"))
    else:
        settings.append(
            _Setting(
                read=torch.get_float32_matmul_precision,
                write=torch.set_float32_matmul_precision,
                standard=("highest",),
            )
        )
    if torch.cuda.is_available():
        settings += _cuda_settings()
    return settings


def _cuda_settings() -> list[_Setting]:
    """The settings that ``make_deterministic`` changes or needs on a CUDA device."""
    # Settings are restored in reverse order. So the newer form of a setting is restored last: it
    # has more values than the older one.
    newer = [
        _attribute(torch.backends, f"{products}.fp32_precision")
        for products in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")
    ]
    older = [
        _quiet(_attribute(torch.backends, f"{library}.allow_tf32"))
        for library in ("cuda.matmul", "cudnn")
    ]
    return [
        _attribute(torch.backends, "cudnn.enabled", True),
        _attribute(torch.backends, "cudnn.deterministic"),
        _attribute(torch.backends, "cudnn.benchmark"),
        *newer,
        *older,
    ]


def _attribute(module: Any, name: str, *standard: Any) -> _Setting:
    """An attribute of a module of torch, by its dotted name."""
    path, _, attribute = name.rpartition(".")

    def owner() -> Any:
        return attrgetter(path)(module) if path else module

    def read() -> Any:
        return getattr(owner(), attribute)

    def write(value: Any) -> None:
        setattr(owner(), attribute, value)

    return _Setting(read, write, standard)


def _quiet(setting: _Setting) -> _Setting:
    """The older form of a setting: torch warns of it, even if it is only read."""

    def read() -> Any:
        with warnings.catch_warnings(action="ignore"):
            return setting.read()

    def write(value: Any) -> None:
        with warnings.catch_warnings(action="ignore"):
            setting.write(value)

    return _Setting(read, write, setting.standard)


def _imported_variables() -> Sequence[str]:
    """The environment variables to restore."""
    if sys.platform == "darwin":
        # scikit-learn's variable allows a second OpenMP library. Without the variable, loading that
        # library later would abort the process.
        return ()
    return SET_BY_IMPORTS


def _restore_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _on_cpu_by_default() -> AbstractContextManager[object]:
    """A context in which new tensors are on the CPU, unless their code names another device."""
    if torch.get_default_device().type == "cpu":
        return nullcontext()  # the context of a device would slow down every call of torch
    return torch.device("cpu")


def _as_without_blocks() -> list[AbstractContextManager[object]]:
    """Contexts of gradients and full precision, whatever contexts the caller has entered."""
    blocks: list[AbstractContextManager[object]] = [
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ]
    if torch.cuda.is_available():
        blocks.append(torch.autocast("cuda", enabled=False))
    return blocks


@contextmanager
def _small_numbers() -> Iterator[None]:
    """Do not flush denormal numbers to zero within the block."""
    # NumPy obeys the same flag of the processor as torch, and its calls are not traced.
    smallest = np.finfo(np.float32).smallest_normal
    is_flushed = smallest / np.float32(2) == 0
    if not is_flushed:
        yield
        return
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(True)
