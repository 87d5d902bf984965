"""The nearest cell of a map, and the lines about it, on made-up maps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedstill.benchmark.maps import (
    LABEL_UNIT,
    MethodMap,
    Setting,
    distances,
    map_lines,
    nearest_cell,
)
from made_up_scores import made_up_cell

CELL_VALUES = [(0.1, 1), (0.1, 10), (0.5, 1)]
"""Alpha and epochs of three cells."""

CELL_SETTINGS = [
    Setting(0.4, 0.05, 0.25),
    Setting(0.4, 0.5, 0.25),
    Setting(0.2, 0.05, 0.25),
]


def made_up_map(row: str, *gains: tuple[float, ...], has_settings: bool = True) -> MethodMap:
    """A map with the gains by seed of each of the three cells."""
    cells = []
    for (alpha, epochs), setting, cell_gains in zip(CELL_VALUES, CELL_SETTINGS, gains, strict=True):
        cell = made_up_cell({"partition.alpha": alpha, "plan.epochs": epochs}, cell_gains)
        if has_settings:
            cell = replace(cell, settings=dict.fromkeys(range(len(cell_gains)), setting))
        cells.append(cell)
    return MethodMap(row, {"partition.alpha": (0.1, 0.5), "plan.epochs": (1, 10)}, cells)


FEDNTD = made_up_map("FedNTD", (0.1, 0.2, 0.3), (-0.1, -0.2, -0.3), (0.1, -0.1, 0.3))
FEDLC = made_up_map("FedLC", (0.3, 0.3, 0.3), (-0.1, 0.1, 0.1), (-0.1, -0.1, -0.1))
MAPS = {"fedntd": FEDNTD, "fedlc": FEDLC}


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        (Setting(0.4, 0.05, 0.25), (0.1, 1)),
        (Setting(0.31, 0.05, 0.25), (0.1, 1)),
        (Setting(0.29, 0.05, 0.25), (0.5, 1)),
        (Setting(0.4, 0.09, 0.4), (0.1, 1)),
        (Setting(0.4, 0.3, 0.25), (0.1, 10)),
        (Setting(0.4, 0.16, 0.25), None),  # more than twice 0.05, less than half 0.5
        (Setting(0.4, 0.05, 0.51), None),
        (Setting(0.4, 0.05, 0.1), None),
        (Setting(0.51, 0.05, 0.25), None),
        (Setting(0.09, 0.05, 0.25), None),
        (Setting(0.4, 0.0, 0.25), None),
    ],
)
def test_the_nearest_cell_and_none_that_is_too_far(
    setting: Setting, values: tuple[float, int] | None
) -> None:
    cell = nearest_cell(FEDNTD, setting)
    if values is None:
        assert cell is None
    else:
        assert cell is not None
        assert tuple(cell.values.values()) == values


def test_units_are_a_label_distance_and_factors_of_two() -> None:
    setting = Setting(0.4 + LABEL_UNIT, 0.05 / 4, 0.5)
    assert distances(FEDNTD.cells[0], setting) == pytest.approx((1, 2, 1))


def test_the_lines_about_a_method_with_a_map_are_its_own_gains() -> None:
    cell_line, gain_line = map_lines(MAPS, "fedntd", Setting(0.38, 0.06, 0.2))
    for part in ("alpha 0.1, epochs 1", "0.40", "0.38", "0.05", "0.06", "25 %", "20 %", "50.0 %"):
        assert part in cell_line
    for part in ("FedNTD", "+20.0", "+10.0 to +30.0", "helped"):
        assert part in gain_line

    _, gain_line = map_lines(MAPS, "fedntd", Setting(0.4, 0.5, 0.25))
    assert "hurt" in gain_line

    _, gain_line = map_lines(MAPS, "fedntd", Setting(0.2, 0.05, 0.25))
    assert "-10.0 to +30.0" in gain_line
    assert "helped" not in gain_line
    assert "hurt" not in gain_line


def test_the_lines_about_another_method_name_the_best_methods() -> None:
    gain_lines = []
    for setting in CELL_SETTINGS:
        _, gain_line = map_lines(MAPS, "fedavg", setting)
        gain_lines.append(gain_line)

    first, *further_lines = gain_lines
    assert "FedLC +30.0, FedNTD +20.0" in first
    assert all("none of FedNTD, FedLC" in line for line in further_lines)


def test_there_are_no_lines_without_a_map_a_near_cell_or_a_setting() -> None:
    setting = Setting(0.4, 0.05, 0.25)
    assert list(map_lines({}, "fedntd", setting)) == []
    assert list(map_lines(MAPS, "fedntd", Setting(0.69, 5.0, 1.0))) == []
    without_settings = made_up_map("X", (0.1,), (0.1,), (0.1,), has_settings=False)
    assert list(map_lines({"x": without_settings}, "x", setting)) == []
