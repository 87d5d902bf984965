"""Stopping a comparison: the first Ctrl-C lets running stages end, the second ends at once; workers
end with it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Lock, Thread
from types import FrameType
from typing import Any, ClassVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deaf() -> Iterator[None]:
    """Processes that start here hear no Ctrl-C, until they say that they do; this one hears it
    afterwards.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class Asked:
    """Whether Ctrl-C was pressed or the process was ended; the workers are told. The second time it
    ends at once.
    """

    def __init__(self, event: Event) -> None:
        self.event, self.stop = event, False

    def __enter__(self) -> Asked:
        self._old = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        self.event.set()


class StopsWhenAsked:
    """A worker's watch: no display; a stop after the stage in which a signal came, or the
    comparison was ended.
    """

    event: ClassVar[Event]
    working: ClassVar[Lock] = Lock()

    def __init__(self) -> None:
        self.asked = 0

    @classmethod
    def listen(cls, event: Event) -> None:
        """Stop when this is set, too; end when the process that gives work has ended."""
        cls.event = event
        cls.idle()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        Thread(target=cls._end_with_parent, daemon=True).start()

    @staticmethod
    def idle() -> None:
        """Between runs Ctrl-C is not for this process, and SIGTERM ends it at once."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @classmethod
    def _end_with_parent(cls) -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        with cls.working:
            os._exit(1)

    @contextmanager
    def hearing(self) -> Iterator[StopsWhenAsked]:
        """While a run is carried out, signals are for it."""
        for number in SIGNALS:
            signal.signal(number, self.ask)
        try:
            with self.working:
                yield self
        finally:
            self.idle()

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Take a signal; the second ends the process."""
        self.asked += 1
        if self.asked > 1:
            os._exit(1)

    def started(self, folder: Path, round: int) -> None:
        """Nothing."""

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """Nothing."""

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Nothing."""

    def stop(self) -> bool:
        """Whether a signal came, here or in the process that started the comparison, or that
        process has ended.
        """
        parent = multiprocessing.parent_process()
        return self.asked > 0 or self.event.is_set() or not (parent and parent.is_alive())
