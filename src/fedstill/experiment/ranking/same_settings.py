"""Whether the configs of an entry's runs are the suite's, but for what may be chosen."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedstill.experiment.config.earlier import as_it_began
from fedstill.experiment.config.experiment import from_tree
from fedstill.experiment.config.named_tables import fields_of
from fedstill.experiment.config.overrides import flat
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.config.settle import settle
from fedstill.experiment.ranking.entries import Entered, portable, run_place
from fedstill.experiment.ranking.suites import TEST_SEEDS, Suite
from fedstill.files import short_name


def places_of(entry: Entered, suite: Suite) -> list[str]:
    """Where in an entry the runs of all its columns and seeds are."""
    return [run_place(column, seed) for column in suite.columns(entry.row) for seed in TEST_SEEDS]


def unlike_suite(entry: Entered, suite: Suite) -> str:
    """The first setting of a run that is not the suite's, nor what was chosen; empty where there is
    none.
    """
    if entry.row not in suite.tries and entry.fields:
        return f"{entry.row} is a reference, and sets {next(iter(entry.fields))}"
    if entry.file and (why := _other_method(entry, suite)):
        return why
    for run in suite.recipe.variants(*_cells(entry, suite), _fields(entry), Path()):
        place = run_place(run.label.rpartition(" | ")[2], run.seed)
        told, suites = (
            (entry.folder / place / "config.toml").read_text(encoding="utf-8"),
            portable(run.settings.toml),
        )
        if told == suites:
            continue
        has, wants = (flat(_comparable(entry, tomllib.loads(text))) for text in (told, suites))
        has = {**_came_later(entry, has.keys()), **has}
        if other := sorted(k for k in has.keys() | wants.keys() if has.get(k) != wants.get(k)):
            first = other[0]
            return (
                f"{place}/config.toml has {first} = {has.get(first)!r}, and the suite "
                f"{wants.get(first)!r}"
            )
    return ""


def _other_method(entry: Entered, suite: Suite) -> str:
    """Of a method of its own file: all runs have that file, what was chosen of it, and the same
    other fields.
    """
    configs = {
        place: (entry.folder / place / "config.toml").read_text(encoding="utf-8")
        for place in places_of(entry, suite)
    }
    methods = {place: tomllib.loads(config)["method"] for place, config in configs.items()}
    first = next(iter(methods.values()))
    chosen = {
        k.removeprefix("method."): v for k, v in entry.fields.items() if k.startswith("method.")
    }
    for place, method in methods.items():
        if short_name(str(method["name"]).partition(":")[0]).rpartition("/")[2] != entry.file:
            return (
                f"{place}/config.toml has the method {method['name']!r}, and the entry's file is "
                f"{entry.file}"
            )
        if other := [k for k, v in chosen.items() if method.get(k) != v]:
            return (
                f"{place}/config.toml has method.{other[0]} = {method.get(other[0])!r}, and not "
                "what was chosen"
            )
        if method != first:
            return f"{place}/config.toml has another table [method] than the first run"
    return ""


def _came_later(entry: Entered, told: Collection[str]) -> dict[str, Any]:
    """Fields of the method that came after an entry was made, so that its config lacks them: what
    was done before.
    """
    fields = {} if entry.file else fields_of("method", entry.method, None)[1]
    defaults = {name: default for name, (_, default) in fields.items() if default is not ...}
    began = as_it_began({"method": {"name": entry.method}})["method"] if fields else {}
    given = {f"method.{name}": value for name, value in {**defaults, **began}.items()}
    return {
        key: json.loads(json.dumps(value))
        for key, value in given.items()
        if key not in told and value is not None
    }


def _cells(entry: Entered, suite: Suite) -> tuple[list[tuple[str, str]], tuple[int, ...]]:
    return [(entry.row, column) for column in suite.columns(entry.row)], TEST_SEEDS


def _fields(entry: Entered) -> dict[str, Any]:
    """What was chosen; of a method of its own file without the method's fields, which only its file
    can check.
    """
    return {k: v for k, v in entry.fields.items() if not (entry.file and k.startswith("method."))}


def _comparable(entry: Entered, tree: Mapping[str, Any]) -> dict[str, Any]:
    """A config without its engine, whose bits are one; of a method of its own file also without its
    name and fields.
    """
    whole = json.loads(json.dumps({k: v for k, v in tree.items() if k != "engine"}))
    if not entry.file:
        return dict(whole)
    stages = {json.dumps(plan, sort_keys=True) for plan in whole.pop("plan", {}).values()}
    return {**{k: v for k, v in whole.items() if k != "method"}, "plan": {"every": sorted(stages)}}


def settings_told(entry: Entered, place: str) -> Settings:
    """A run's settings; a method of its own file is FedAvg here, which draws the same and executes
    nothing of it.
    """
    tree = as_it_began(
        tomllib.loads((entry.folder / place / "config.toml").read_text(encoding="utf-8"))
    )
    if entry.file:
        tree = {**tree, "method": {"name": "fedavg"}, "plan": {}}
    return settle(from_tree(tree, {}, None), here=False)
