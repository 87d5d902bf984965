"""ModelSpec as JSON: whatever a spec has comes back, and anything else is refused."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.records import ModelSpec, as_pairs

NUMBERS = st.integers() | st.floats(allow_nan=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.lists(st.text(), max_size=3).map(tuple)
COUNTS = st.lists(st.integers(min_value=0), max_size=3).map(tuple)
OPTIONS = st.dictionaries(st.text(), VALUES, max_size=3).map(as_pairs)

STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "name": st.text(),
    "input_shape": COUNTS,
    "classes": st.integers(min_value=0),
    "fields": OPTIONS,
    "widths": COUNTS,
    "vocabulary": st.integers(min_value=0),
    "trains": NAMES,
    "held": st.text(),
    "adds": NAMES,
}


def test_every_field_is_drawn() -> None:
    assert STRATEGIES.keys() == {f.name for f in fields(ModelSpec)}


@settings(deadline=None)
@given(st.builds(ModelSpec, **STRATEGIES))
def test_a_spec_comes_back_from_json_as_it_was(spec: ModelSpec) -> None:
    written = json.dumps(spec.to_dict())
    restored = ModelSpec.from_dict(json.loads(written))
    assert restored == spec
    assert hash(restored) == hash(spec)
    assert ModelSpec.from_dict(spec.to_dict()) == spec


GOOD = ModelSpec("mlp", (1, 8, 8), 10, (("hidden", (8,)),)).to_dict()


def without(*names: str) -> dict[str, Any]:
    """The fields of a spec as JSON, some of them left out."""
    return {name: value for name, value in GOOD.items() if name not in names}


@pytest.mark.parametrize(
    "entries",
    [
        None,
        [1],
        {**GOOD, "classes": "10"},
        {**GOOD, "input_shape": 8},
        {**GOOD, "fields": [1]},
        {**GOOD, "name": None},
        {**GOOD, "unknown": 1},
        without("name"),
    ],
)
def test_anything_else_is_refused(entries: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        ModelSpec.from_dict(entries)


def test_a_field_that_is_not_there_has_its_default() -> None:
    entries = without("widths", "trains", "held", "adds")
    assert ModelSpec.from_dict(entries) == ModelSpec.from_dict(GOOD)
