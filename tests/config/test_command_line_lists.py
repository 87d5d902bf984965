"""Lists and tables that are typed on a command line: with commas, and with or without quotes."""

from __future__ import annotations

from typing import Any

import pytest

from fedstill.config.experiment import load
from fedstill.config.named_tables import schema_of_name
from fedstill.config.overrides import parse_grid, parse_overrides
from fedstill.config.resolve import resolve
from fedstill.config.settings import Settings
from fedstill.config.validation import WrongConfig, split_at_commas, validated
from fedstill.core.errors import ConfigError
from fedstill.running.tuning import parse_space


def settings(*overrides: str) -> Settings:
    return resolve(load(None, overrides))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a,b", ["a", "b"]),
        ("[a,b],[c,d]", ["[a,b]", "[c,d]"]),
        ("{a=[1,2],b=3},{a=4}", ["{a=[1,2],b=3}", "{a=4}"]),
        ("\"a, b\",'c, d'", ['"a, b"', "'c, d'"]),
        ('"a]",b', ['"a]"', "b"]),
        ("it's,ours", ["it's", "ours"]),
        ("", [""]),
    ],
)
def test_commas_in_brackets_and_quotes_separate_nothing(text: str, parts: list[str]) -> None:
    assert split_at_commas(text) == parts


@pytest.mark.parametrize("text", ["[a,b],[c", "a],b", "[a}", "{a=[b},c]"])
def test_a_bracket_without_its_counterpart_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        split_at_commas(text)
    with pytest.raises(ConfigError):
        parse_grid([f"data.columns={text}"])
    with pytest.raises(WrongConfig) as caught:
        settings(f"data.columns={text}")
    assert caught.value.problems[0].key == "data.columns"


def test_a_grid_of_lists_without_quotes() -> None:
    (values,) = parse_grid(["data.columns=[age,ward],[age]"]).values()
    columns = [settings(f"data.columns={value}").data.columns for value in values]
    assert columns == [("age", "ward"), ("age",)]
    assert len(parse_space(["data.columns=[age,ward],[age]"])[0].choices) == 2


@pytest.mark.parametrize(
    ("override", "table", "key", "value"),
    [
        ('data.columns=["a, b",c]', "data", "columns", ("a, b", "c")),
        ("data.columns=1,2", "data", "columns", ("1", "2")),
        ("data.categorical={ward=[A,B]}", "data", "categorical", {"ward": ("A", "B")}),
        ("data.categorical.ward=A,B", "data", "categorical", {"ward": ("A", "B")}),
        ("data.categorical.ward=A,1", "data", "categorical", {"ward": ("A", 1)}),
        ("data.limits.age=0,100", "data", "limits", {"age": (0, 100)}),
        ("data.missing_values=NA,99", "data", "missing_values", ("NA", 99)),
    ],
)
def test_a_list_or_a_table_without_quotes(override: str, table: str, key: str, value: Any) -> None:
    assert getattr(getattr(settings(override), table), key) == value


def test_a_list_in_the_table_of_an_outer_package() -> None:
    assert settings("query.classes.0=1,2").packages["query"].table["classes"] == {"0": (1, 2)}


def test_dates_are_texts() -> None:
    table = parse_overrides(["cuts=2020-01-01,2021-01-01"])
    values = validated(schema_of_name("stream", "sites", None), table, "stream")
    assert values["cuts"] == ("2020-01-01", "2021-01-01")


def test_a_table_with_a_name() -> None:
    method = settings("method={name=fedprox,mu=0.5}").named.method
    assert method.label == "fedprox"
    assert method.values["mu"] == 0.5


@pytest.mark.parametrize(
    ("override", "key"),
    [("data.limits.age=0,x", "data.limits.age"), ("data.augment=crop,flop", "data.augment")],
)
def test_a_wrong_item_of_a_list_is_named(override: str, key: str) -> None:
    with pytest.raises(WrongConfig) as caught:
        settings(override)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert override[-1] in problem.reason
    assert "write a list" not in problem.hint
