"""The nearest cell of a map, and what is said of it, on maps made by hand."""

from __future__ import annotations

from math import nan

import pytest

from fedstill.benchmark.maps import (
    LABEL_UNIT,
    MapCell,
    MethodMap,
    Setting,
    distances,
    map_lines,
    nearest_cell,
)
from fedstill.benchmark.scoring import Score

PLACES = {
    (0.1, 1): Setting(0.4, 0.05, 0.25),
    (0.1, 10): Setting(0.4, 0.5, 0.25),
    (0.5, 1): Setting(0.2, 0.05, 0.25),
}


def score(accuracy: float) -> Score:
    return Score(accuracy, 0.9, accuracy / 0.9, 0, nan, nan, 1, 1, 1.0, 2)


def made(row: str, *gains: tuple[float, ...], placed: bool = True) -> MethodMap:
    """A map with the gains by seed of each of the three cells."""
    cells = [
        MapCell(
            {"partition.alpha": alpha, "plan.epochs": epochs},
            {s: score(0.5 + g) for s, g in enumerate(own)},
            {s: score(0.5) for s in range(len(own))},
            dict.fromkeys(range(len(own)), where) if placed else {},
        )
        for ((alpha, epochs), where), own in zip(PLACES.items(), gains, strict=True)
    ]
    return MethodMap(row, {"partition.alpha": (0.1, 0.5), "plan.epochs": (1, 10)}, cells)


FEDNTD = made("FedNTD", (0.1, 0.2, 0.3), (-0.1, -0.2, -0.3), (0.1, -0.1, 0.3))
FEDLC = made("FedLC", (0.3, 0.3, 0.3), (-0.1, 0.1, 0.1), (-0.1, -0.1, -0.1))
MAPS = {"fedntd": FEDNTD, "fedlc": FEDLC}


@pytest.mark.parametrize(
    ("here", "values"),
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
    here: Setting, values: tuple[float, int] | None
) -> None:
    cell = nearest_cell(FEDNTD, here)
    assert (cell and tuple(cell.values.values())) == values


def test_units_are_a_label_distance_and_factors_of_two() -> None:
    here = Setting(0.4 + LABEL_UNIT, 0.05 / 4, 0.5)
    assert distances(FEDNTD.cells[0], here) == pytest.approx((1, 2, 1))


def test_a_method_with_a_map_is_said_of_itself() -> None:
    near, own = map_lines(MAPS, "fedntd", Setting(0.38, 0.06, 0.2))
    distances = ("0.40", "0.38", "0.05", "0.06", "25 %", "20 %")
    assert all(part in near for part in ("alpha 0.1, epochs 1", *distances, "50.0 %"))
    assert all(part in own for part in ("FedNTD", "+20.0", "+10.0 to +30.0", "helped"))
    assert "hurt" in list(map_lines(MAPS, "fedntd", Setting(0.4, 0.5, 0.25)))[1]
    mixed = list(map_lines(MAPS, "fedntd", Setting(0.2, 0.05, 0.25)))[1]
    assert "-10.0 to +30.0" in mixed
    assert "helped" not in mixed
    assert "hurt" not in mixed


def test_of_another_method_the_best_are_said() -> None:
    said = [list(map_lines(MAPS, "fedavg", where))[1] for where in PLACES.values()]
    assert "FedLC +30.0, FedNTD +20.0" in said[0]
    assert all("none of FedNTD, FedLC" in line for line in said[1:])


def test_nothing_is_said_without_a_map_a_near_cell_or_a_setting() -> None:
    at = Setting(0.4, 0.05, 0.25)
    assert list(map_lines({}, "fedntd", at)) == []
    assert list(map_lines(MAPS, "fedntd", Setting(0.69, 5.0, 1.0))) == []
    assert list(map_lines({"x": made("X", (0.1,), (0.1,), (0.1,), placed=False)}, "x", at)) == []
