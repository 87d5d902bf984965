"""What a user's method declares of itself: a name that there is not, or another type, is refused in
one line.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import toys
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.capabilities import OF_NETWORKS, Addition, Need, Permit
from fedstill.core.errors import BadReturn, ConfigError
from fedstill.core.method import Method
from fedstill.measures.choice import NEEDS, measures
from fedstill.models.building import ADDED
from fedstill.running.network_checks import STRUCTURES
from fedstill.running.preparation import prepare
from newcomer import mine

MISSPELT = {
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
        resolve(mine(tmp_path, server=server)[0])
    assert "\n" not in str(caught.value)


def test_a_stage_of_the_methods_own_schedule_must_be_among_its_stages(tmp_path: Path) -> None:
    experiment, _ = mine(tmp_path, server="schedule = {'before': 'head'}")
    with pytest.raises(ConfigError, match="stage 'head'"):
        prepare(resolve(experiment), toys.blobs())


def test_everything_that_is_declared_rightly_passes(tmp_path: Path) -> None:
    server = """
    from fedstill import Addition, Need, Plan
    needs = Need.SAME_SHAPES | Need.FEATURES | Need.HEAD
    adds = Addition.OWN_HEAD
    personal = frozenset({"head", "fit"})
    schedule = {"before": "head", "task_end": ""}
    stages = frozenset({"head", "train"})
    plans = {"head": Plan(epochs=0), "train": Plan(epochs=1), "fit": Plan(epochs=1)}
    """
    resolve(mine(tmp_path, server=server)[0])


STRINGS = {
    "a set": ("needs", frozenset({"features"}), "write Need.FEATURES"),
    "several": ("needs", {"head", "same_shapes"}, "write Need.HEAD | Need.SAME_SHAPES"),
    "a text": ("needs", "head", "write Need.HEAD"),
    "a typo": ("needs", ("feetures",), "did you mean 'FEATURES'?"),
    "no need": ("needs", frozenset(), "Need.NOTHING"),
    "a former name": ("permits", frozenset({"linear_fold"}), "write Permit.LINEAR_AGGREGATE"),
    "flags of another kind": ("permits", Need.HEAD, "Permit.NOTHING"),
    "a tuple": ("adds", ("own_head",), "write Addition.OWN_HEAD"),
    "a number": ("adds", 1, "Addition.NOTHING"),
}


@pytest.mark.parametrize("case", STRINGS)
def test_flags_that_are_declared_as_anything_else_are_refused_with_the_class(case: str) -> None:
    name, value, remedy = STRINGS[case]
    with pytest.raises(ConfigError, match=rf"^Mine\.{name} = ") as caught:
        type("Mine", (Method,), {name: value})
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_users_file_with_strings_for_flags_is_named(tmp_path: Path) -> None:
    experiment, _ = mine(tmp_path, server="needs = frozenset({'features'})")
    with pytest.raises(ConfigError, match=r"mine\.py: .*\.needs = .*Need\.FEATURES"):
        resolve(experiment)


def test_requires_must_give_flags(tmp_path: Path) -> None:
    server = """
    def requires(self):
        return {"head"}
    """
    with pytest.raises(BadReturn, match=r"requires .*set.*flags"):
        resolve(mine(tmp_path, server=server)[0])


def test_the_words_of_flags_are_those_of_the_command_line() -> None:
    assert Need.NOTHING.words == []
    assert (Need.PUBLIC_DATA | Need.HEAD).words == ["head", "public_data"]
    assert (~Permit.PRIVATE_TRAINING).words == [
        "central_noise",
        "linear_aggregate",
        "noisy_logits",
        "robust_aggregate",
    ]


def test_every_need_of_a_network_has_a_remedy() -> None:
    assert set(STRUCTURES) == set(OF_NETWORKS)
    assert set(ADDED) == set((~Addition.NOTHING).words)


def test_the_needs_of_measures_are_known() -> None:
    for measure in measures(registry.names("measure")).values():
        assert measure.needs <= NEEDS


def test_a_measure_that_needs_what_there_is_not_is_refused(tmp_path: Path) -> None:
    text = """
from fedstill.measures.base import Measure
from fedstill.core.registry import register

@register("measure", "mine")
class Mine(Measure):
    needs = frozenset({"chian"})

    def look(self, seen, context):
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
