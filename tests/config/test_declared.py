"""What a user's method declares of itself: a name that there is not, or another type, is refused in
one line.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import toys
from fedstill.config.resolve import NAMES, settle
from fedstill.core import registry
from fedstill.core.errors import ConfigError
from fedstill.measures.choice import NEEDS, measures
from fedstill.running.compatibility import ASKED_OF_MODELS
from fedstill.running.preparation import prepare
from newcomer import mine

MISSPELT = {
    "needs": (
        "needs = frozenset({'feetures'})",
        "method mine.py, needs: unknown name 'feetures'; did you mean 'f",
    ),
    "permits": (
        "permits = frozenset({'linear'})",
        "method mine.py, permits: unknown name 'linear'; did you mean 'line",
    ),
    "adds": (
        "adds = ('own_haed',)",
        "method mine.py, adds: unknown name 'own_haed'; did you mean 'own_head'?",
    ),
    "personal": (
        "personal = frozenset({'trian'})",
        "method mine.py, personal: unknown stage 'trian'; did you mean 't",
    ),
    "labelled": ("labelled = {'tarin'}", "method mine.py, labelled: unknown stage 'tarin'"),
    "reusable": ("reusable = {'x'}", "method mine.py, reusable: unknown stage 'x'; choose one of "),
    "plans": (
        "plans = {'trian': 3}",
        "method mine.py, plans: unknown stage 'trian'; did you mean 'train'?",
    ),
    "no plan": (
        "plans = {'train': None}",
        "method mine.py: plans['train'] = None must be a Plan, such as Plan(epochs=1)",
    ),
    "option": (
        "schedule = {'befor': 'x'}",
        "method mine.py, schedule of topology parallel: unknown option 'befor'; did you mean "
        "'before'?",
    ),
    "a tuple": (
        "stages = ('fit', 'train')",
        "method mine.py: stages = ['fit', 'train'] must be a frozenset of names",
    ),
    "a text": (
        "personal = 'train'",
        "method mine.py: personal = 'train' must be a frozenset of names",
    ),
    "a text for stages": (
        "stages = frozenset('train')",
        "method mine.py: none of its stages has a plan: give it one",
    ),
    "a set": (
        "plans = {'train'}",
        "method mine.py: plans = {'train'} must be a dict of stages to plans, such as",
    ),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_declaration_that_says_nothing_is_refused(name: str, tmp_path: Path) -> None:
    server, said = MISSPELT[name]
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}") as caught:
        settle(mine(tmp_path, server=server)[0])
    assert "\n" not in str(caught.value)


def test_a_stage_of_the_methods_own_schedule_must_be_among_its_stages(tmp_path: Path) -> None:
    experiment, _ = mine(tmp_path, server="schedule = {'before': 'head'}")
    with pytest.raises(ConfigError, match="stage 'head'"):
        prepare(settle(experiment), toys.blobs())


def test_everything_that_is_declared_rightly_passes(tmp_path: Path) -> None:
    server = """
    from fedstill import Plan
    needs = {"same_shapes", "features", "head"}
    adds = ("own_head",)
    personal = frozenset({"head", "fit"})
    schedule = {"before": "head", "task_end": ""}
    stages = frozenset({"head", "train"})
    plans = {"head": Plan(epochs=0), "train": Plan(epochs=1), "fit": Plan(epochs=1)}
    """
    settle(mine(tmp_path, server=server)[0])


def test_the_names_are_those_of_the_library() -> None:
    assert ASKED_OF_MODELS.keys() <= set(NAMES["needs"])
    for name in registry.names("method"):
        method = registry.lookup("method", name).build()
        assert method.requires() <= set(NAMES["needs"])
        assert method.permits <= set(NAMES["permits"])
    for measure in measures(registry.names("measure")).values():
        assert measure.needs <= NEEDS


def test_a_measure_that_needs_what_there_is_not_is_refused(tmp_path: Path) -> None:
    text = """
from fedstill.measures.base import Measure
from fedstill.core.registry import register

@register("measure", "mine")
class Mine(Measure):
    needs = frozenset({"chian"})

    def look(self, seen, room):
        return {}
"""
    (tmp_path / "measure.py").write_text(text)
    with pytest.raises(
        ConfigError,
        match=r"measure\.py.*'chian'.*'chain'",
    ):
        measures([str(tmp_path / "measure.py")])
    (tmp_path / "other.py").write_text(text.replace('frozenset({"chian"})', '"chain"'))
    with pytest.raises(ConfigError, match=r"other\.py: needs = 'chain'"):
        measures([str(tmp_path / "other.py")])
