"""Contestants that take turns, so that other programs on the machine disturb all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def seconds_of(run: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def seconds_in_turns(
    contestants: Mapping[str, Callable[[], object]], turns: int
) -> dict[str, list[float]]:
    """The seconds of each contestant in each turn.

    All contestants run once before the first turn, to warm up.
    """
    for run in contestants.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(turns):
        for name, run in contestants.items():
            seconds[name].append(seconds_of(run))
    return seconds


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratios of two contestants' seconds, turn by turn."""
    pairs = zip(numerators, denominators, strict=True)
    return [numerator / denominator for numerator, denominator in pairs]


def spread(values: Sequence[float]) -> str:
    """The median, with the smallest and the largest value in brackets."""
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"
