"""A hook whose name has a typo is an error when its class is defined; helpers of one's own are
not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import toys
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.errors import ConfigError
from fedstill.core.method import ClientWork, Method
from fedstill.core.user_code import (
    FORMER_NAMES,
    check_declarations,
    reject_misspelt_hooks,
    resembled,
)
from fedstill.measures.base import Measure
from fedstill.measures.choice import measures
from fedstill.running.preparation import prepare
from newcomer import mine

AGGREGATE = "def {}(self, state, replies, stage, world):\n    return state  # HERE"
TERMS = "def {}(self, step, start):\n    return {{'ce': cross_entropy(step.logits(), step.y)}}"

MISSPELT = {
    "agregate": ({"server": AGGREGATE.format("agregate")}, "aggregate"),
    "need": ({"server": "need = frozenset({'queries'})"}, "needs"),
    "predictor": (
        {"server": "@staticmethod\ndef predictor(state, world):\n    return {}"},
        "predictors",
    ),
    "term": ({"client": TERMS.format("term")}, "terms"),
    "pertrub": (
        {"client": "def pertrub(self, params, grads, start):\n    return params"},
        "perturb",
    ),
    "Begin": ({"client": "@classmethod\ndef Begin(cls):\n    return None"}, "begin"),
    "trainables": ({"client": "@property\ndef trainables(self):\n    return True"}, "trainable"),
    "terms": ({"server": TERMS.format("terms")}, "ClientWork"),
    "aggregate": ({"client": AGGREGATE.format("aggregate")}, "Method"),
}

HELPERS = {
    "of another name": "def compute_loss(self, out, y):\n    return cross_entropy(out, y)",
    "called": "def halve(self, x):\n    return x / 2\n\ndef terms(self, step, start):\n"
    "    return {'ce': cross_entropy(self.halve(step.logits()), step.y)}",
    "private": "def _term(self, step):\n    return step.y",
    "a field": "term: int = 3",
    "a class variable": "temperature = 3.0",
    "a class": "class Term:\n    pass",
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_hook_is_an_error(name: str, tmp_path: Path) -> None:
    bodies, remedy = MISSPELT[name]
    experiment, _ = mine(tmp_path, **bodies)
    with pytest.raises(ConfigError) as raised:
        resolve(experiment)
    text = str(raised.value)
    assert name in text
    assert remedy in text.split(name, 1)[1]
    assert f"_{name}" in text
    assert "\n" not in text


def test_it_names_the_file_and_the_line(tmp_path: Path) -> None:
    experiment, line = mine(tmp_path, server=AGGREGATE.format("agregate"))
    with pytest.raises(
        ConfigError, match=rf"mine.py: Mine.agregate \(mine.py, line {line - 1}, in agregate\)"
    ):
        resolve(experiment)


@pytest.mark.parametrize("name", HELPERS)
def test_a_helper_is_no_error(name: str, tmp_path: Path) -> None:
    prepare(resolve(mine(tmp_path, client=HELPERS[name])[0]), toys.blobs())


@pytest.mark.parametrize("base", [Method, ClientWork, Measure])
def test_a_class_defined_in_python_is_checked_as_well(base: type[object]) -> None:
    hooks: dict[type[object], str] = {
        Method: "initial_stat",
        ClientWork: "adjust_gradient",
        Measure: "lok",
    }
    with pytest.raises(ConfigError, match=hooks[base]):
        type("Mine", (base,), {hooks[base]: lambda self: None})
    type("Mine", (base,), {f"_{hooks[base]}": lambda self: None})


@pytest.mark.parametrize("base", [Method, ClientWork])
def test_a_former_name_of_a_hook_is_rejected_with_its_successor(base: type[object]) -> None:
    renamed = {old: new for old, new in FORMER_NAMES.items() if hasattr(base, new)}
    assert renamed
    for old, new in renamed.items():
        with pytest.raises(ConfigError, match=rf"\b{new}\b"):
            type("Mine", (base,), {old: lambda self: None})


def test_a_helper_of_a_base_class_may_be_overridden() -> None:
    @dataclass(frozen=True)
    class Base(Method):
        def weights(self) -> float:
            return 1.0

    class Derived(Base):
        def weights(self) -> float:
            return 2.0

        def weight(self) -> float:
            return 3.0

    assert Derived().weights() == 2.0


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("aggregate", "aggregate"),
        ("aggregates", "aggregate"),
        ("agregate", "aggregate"),
        ("aggregtae", "aggregate"),
        ("AGGREGATE", "aggregate"),
        ("at_clients", "at_client"),
        ("congregate", ""),
        ("blend", ""),
        ("combine", ""),
        ("train", ""),
        ("teacher_logits", ""),
    ],
)
def test_what_resembles_a_hook(name: str, hook: str) -> None:
    assert resembled(name, ["begin_round", "aggregate", "end", "at_client", "trainable"]) == hook


MEASURE = """
from fedstill.measures.base import Measure
from fedstill.core.registry import register

@register("measure", "mine")
class Mine(Measure):
    {}
"""


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ("def lok(self, seen, context):\n        return {}", "lok.*look"),
        (
            "need = frozenset({'chain'})\n    def look(self, seen, context):\n        return {}",
            "need.*needs",
        ),
        ("def measure(self, seen, context):\n        return {}", "at_client"),
        ("def of_round(self, seen):\n        return {}", "at_client"),
    ],
)
def test_a_measure_that_measures_nothing_is_an_error(body: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "measure.py").write_text(MEASURE.format(body))
    with pytest.raises(ConfigError, match=rf"measure\.py.*{key}"):
        measures([str(tmp_path / "measure.py")])
    experiment = replace(toys.toy(), base=tmp_path, measure=("measure.py",))
    with pytest.raises(ConfigError, match=key):
        prepare(resolve(experiment), toys.blobs())


def subclasses(base: type) -> list[type]:
    """All classes below a class that this process has imported."""
    classes = []
    for child in base.__subclasses__():
        classes += [child, *subclasses(child)]
    return classes


def test_the_librarys_own_classes_have_no_such_mistakes() -> None:
    registry.names("method")  # imports all methods
    classes = [*subclasses(Method), *subclasses(ClientWork)]
    library = [cls for cls in classes if cls.__module__.startswith("fedstill.")]
    assert len(library) > 100
    for cls in library:
        reject_misspelt_hooks(cls)
        check_declarations(cls)
