"""Models of a config's tables: strict, made from signatures, and without a change of the values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from annotated_types import Interval
from pydantic import Field
from torch import nn

from fedstill.config.experiment import Experiment
from fedstill.config.named_tables import NAMED, schema_of_name
from fedstill.config.resolve import resolve
from fedstill.config.tables import DataTable, PackageTable, TopKeys, record_tables
from fedstill.config.validation import (
    MISSING_KEY,
    UNKNOWN_KEY,
    CommandLineText,
    WrongConfig,
    defaults_of,
    key_descriptions,
    keys_of,
    schema_of,
    schema_of_record,
    validated,
)
from fedstill.core import registry
from fedstill.core.errors import ConfigError

NOTED = Annotated[float, {"unit": "seconds"}, Interval(gt=0)]
"""Metadata that cannot be hashed, as another library may write it."""


class Waits(PackageTable):
    """A table of a package."""

    wait: NOTED = Field(default=1.0, description="How long to wait.")
    columns: Mapping[str, tuple[str, ...]] | tuple[str, ...] | None = None


def problems(call: Any, *args: Any) -> dict[str, str]:
    """The codes of what is wrong, by key."""
    with pytest.raises(WrongConfig) as caught:
        call(*args)
    return {problem.key: problem.code for problem in caught.value.problems}


@pytest.mark.parametrize("kind", NAMED)
def test_every_registered_thing_has_a_model_that_is_made_once(kind: str) -> None:
    for name in registry.names(kind):
        model = schema_of_name(kind, name, None)
        assert set(keys_of(model)) >= set(defaults_of(model))
        assert schema_of_name(kind, name, None) is model
        assert problems(validated, model, {"no such key": 1}, kind)[f"{kind}.no such key"]


def test_values_are_kept_as_they_are_written() -> None:
    assert Waits.read({"wait": 2}, "waits").table == {"wait": 2, "columns": None}
    assert isinstance(Waits.read({"wait": 2}, "waits").wait, int)
    plans = resolve(Experiment(plan={"lr": 1}, method={"name": "fedntd", "beta": 2}))
    assert "lr = 1\n" in plans.toml
    assert "beta = 2\n" in plans.toml


def test_all_that_is_wrong_in_a_table_is_a_record() -> None:
    model = schema_of("mine", {"wait": (NOTED, 1.0), "name": (str, ...)})
    wrong = problems(validated, model, {"wait": -1.0, "wiat": 2}, "mine")
    assert wrong == {
        "mine.wait": "greater_than",
        "mine.wiat": UNKNOWN_KEY,
        "mine.name": MISSING_KEY,
    }


def test_a_changed_table_is_checked() -> None:
    table = DataTable.read({"name": "digits", "std": [1]}, "data")
    assert table.changed(size=8).std == (1,)
    with pytest.raises(WrongConfig, match="size"):
        table.changed(size=-8)
    with pytest.raises(WrongConfig, match="sise"):
        table.changed(sise=8)


@pytest.mark.parametrize("key", ["copy", "model_config", "json", "_private", "a b"])
def test_a_key_may_be_called_as_an_attribute_of_pydantic(key: str) -> None:
    model = schema_of("mine", {key: (int, 3)})
    assert validated(model, {}, "mine") == {key: 3}
    assert validated(model, {key: 4}, "mine") == {key: 4}
    assert problems(validated, model, {key: "x"}, "mine") == {f"mine.{key}": "int_type"}


def test_a_type_that_no_config_can_hold_is_named() -> None:
    @dataclass(frozen=True)
    class Mine:
        network: nn.Module | None = None

    with pytest.raises(ConfigError, match=r"Mine\.network"):
        schema_of_record(Mine)


def test_texts_of_a_command_line_are_lists_where_only_a_list_is_legal() -> None:
    read = Waits.read({"columns": CommandLineText("a, b")}, "waits")
    assert read.columns == ("a", "b")
    assert DataTable.read({"name": CommandLineText("a,b")}, "data").name == "a,b"
    with pytest.raises(WrongConfig) as caught:
        Waits.read({"columns": "ward"}, "waits")
    assert "['ward']" in caught.value.problems[0].hint


@pytest.mark.parametrize(
    ("hint", "value", "legal"),
    [
        (tuple[tuple[int, ...], ...], [[1, 2], [3]], ((1, 2), (3,))),
        (dict[str, tuple[int, ...]], {"a": [1, 2]}, {"a": (1, 2)}),
        (list[int], [1, 2], [1, 2]),
        (list[str], CommandLineText("a,b"), ["a", "b"]),
        (list[list[int]], [[1, 2], [3]], [[1, 2], [3]]),
        (dict[str, list[int]], {"a": [1, 2]}, {"a": [1, 2]}),
    ],
)
def test_lists_have_the_type_of_the_annotation(hint: Any, value: Any, legal: Any) -> None:
    schema = schema_of("toy", {"sizes": (hint, ...)})
    assert validated(schema, {"sizes": value}, "toy") == {"sizes": legal}


@pytest.mark.parametrize(
    ("value", "hint"), [("2", "2"), (".5", "0.5"), ([2.5], "2.5"), ("x", ""), (True, "")]
)
def test_a_value_of_another_type_is_answered_with_the_legal_one(value: Any, hint: str) -> None:
    with pytest.raises(WrongConfig) as caught:
        Waits.read({"wait": value}, "waits")
    assert caught.value.problems[0].hint == (f"write {hint}" if hint else "")


def test_a_value_that_would_be_wrong_in_a_list_gets_no_advice_to_write_one() -> None:
    schema = schema_of_record(TopKeys)
    with pytest.raises(WrongConfig) as caught:
        validated(schema, {"threads": "two", "measure": "local"}, "")
    by_key = {problem.key: problem for problem in caught.value.problems}
    assert by_key["threads"].code == "int_type"
    assert by_key["measure"].hint == "write a list, ['local']"


def test_every_key_is_described() -> None:
    for table in record_tables().values():
        for key, description in key_descriptions(table).items():
            assert description.endswith("."), key
