"""The comparison of two source trees: every difference is found, and every intended one is used."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tools import golden, golden_cells, public_api

JOURNAL = [
    {"event": "start", "seed": 1},
    {"event": "client", "client": 0, "loss": 0.5},
    {"event": "client", "client": 1, "loss": 0.25},
]
CELL = {
    "outcome": "finished",
    "model": "ab",
    "config": {"seed": 1},
    "journal": JOURNAL,
    "seconds": 1.0,
}


def changed(*path: Any, value: Any) -> dict[str, Any]:
    """A result of which one value is another."""
    results = {"a": copy.deepcopy(CELL)}
    inner: Any = results
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return results


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("a", "outcome"), "Diverged", "outcome"),
        (("a", "model"), "cd", "model"),
        (("a", "config", "seed"), 2, "config.seed"),
        (("a", "journal", 2, "loss"), 0.26, "journal.client.loss"),
        (("a", "journal", 0, "more"), 1, "journal.start.more"),
        (("a", "journal"), JOURNAL[:2], "journal.events"),
        (("b",), CELL, "cell"),
    ],
)
def test_a_difference_is_named_by_cell_and_field(path: Any, value: Any, field: str) -> None:
    differences = list(golden.compared({"a": CELL}, changed(*path, value=value)))
    assert [d.field for d in differences] == [field]


def test_times_are_no_difference() -> None:
    assert not list(golden.compared({"a": CELL}, changed("a", "seconds", value=9.0)))
    event = {"event": "round", "seconds": 1.0, "own": {"seconds_cpu": 2.0, "loss": 1.0}}
    assert golden_cells.plain_event(event, Path("x")) == {"event": "round", "own": {"loss": 1.0}}


@pytest.mark.parametrize(
    ("listed", "code"),
    [
        ([("a", "model")], 0),
        ([("?", "model")], 0),
        ([], 1),
        ([("b*", "model")], 1),
        ([("a", "model"), ("a", "config.seed")], 1),
    ],
)
def test_only_listed_differences_pass_and_only_lines_that_match(
    listed: list[tuple[str, str]], code: int
) -> None:
    results = changed("a", "model", value="cd")
    differences = list(golden.compared({"a": CELL}, results))
    entries = [golden.Intended(cell, field, "a reason") for cell, field in listed]
    assert golden.report(results, differences, entries, quick=False) == code


def test_public_names_that_are_gone_new_or_have_another_signature_are_found() -> None:
    before = {"fedstill.a.f": "(x)", "fedstill.a.g": "(x)", "fedstill.b.h": "(x)"}
    now = {"fedstill.a.f": "(x, y)", "fedstill.c.h": "(x)", "fedstill.a.new": "()"}
    moved = public_api.moved(before, {"fedstill.b": "fedstill.c"})
    changes = {(c.name, c.kind) for c in public_api.compared(moved, now)}
    assert changes == {
        ("fedstill.a.f", "signature"),
        ("fedstill.a.g", "removed"),
        ("fedstill.a.new", "added"),
    }
