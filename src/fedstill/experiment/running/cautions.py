"""What a method does not do on a run, said when one begins."""

from __future__ import annotations

import functools
import logging

from fedstill.experiment.preparing.prepared import Prepared

log = logging.getLogger("fedstill.run")


def say_caution(prepared: Prepared) -> None:
    """Say what of a run's method does nothing there (``Method.caution``), if anything does."""
    if caution := prepared.settings.method.caution(prepared.world):
        say_once(f"method {prepared.settings.named.method.label}: {caution}")


@functools.cache
def say_once(caution: str) -> None:
    """Once a process: the runs of a comparison are alike."""
    log.warning("%s", caution)
