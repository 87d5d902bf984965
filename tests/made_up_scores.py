"""Made-up scores of the ranking, and cells of maps with them."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any

from fedstill.benchmark.maps import MapCell
from fedstill.benchmark.scoring import Score


def made_up_score(accuracy: float, *, learned: float = 0.9, seconds_cpu: float = 1.5) -> Score:
    """A score whose other numbers are plausible."""
    return Score(
        accuracy=accuracy,
        learned=learned,
        kept=accuracy / learned,
        forgetting=0.1,
        average_forgetting=nan,
        backward_transfer=nan,
        bytes_up=10**6,
        bytes_down=10**6,
        seconds_cpu=seconds_cpu,
        rounds=30,
    )


def made_up_cell(values: dict[str, Any], gains: Sequence[float]) -> MapCell:
    """A cell whose seeds gain so much over a floor of one half."""
    return MapCell(
        values,
        {seed: made_up_score(0.5 + gain) for seed, gain in enumerate(gains)},
        {seed: made_up_score(0.5) for seed in range(len(gains))},
    )
