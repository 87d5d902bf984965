"""A hook whose name has a typo, in a user's own file: refused before round 1, and helpers of one's own are not."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import toys
from fedstill import registry
from fedstill.errors import ConfigError
from fedstill.experiment.config.settle import settle
from fedstill.experiment.measures.choose import measures
from fedstill.experiment.preparing.prepared import prepare
from fedstill.hooks import refuse_uncalled
from fedstill.method import Method
from fedstill.work import ClientWork
from newcomer import mine

FOLD = "def {}(self, state, replies, stage, world):\n    return state  # HERE"
TERMS = "def {}(self, step, carry):\n    return {{'ce': cross_entropy(step.logits(), step.y)}}"

MISSPELT = {
    "fould": ({"server": FOLD.format("fould")}, "did you mean 'fold'?"),
    "need": ({"server": "need = frozenset({'queries'})"}, "did you mean 'needs'?"),
    "predictor": (
        {"server": "@staticmethod\ndef predictor(state, world):\n    return {}"},
        "did you mean 'predictors'?",
    ),
    "term": ({"client": TERMS.format("term")}, "did you mean 'terms'?"),
    "look_ahead": ({"client": "def look_ahead(self, params, grads, carry):\n    return params"}, "'lookahead'?"),
    "terms": ({"server": TERMS.format("terms")}, "it belongs in the ClientWork"),
    "fold": ({"client": FOLD.format("fold")}, "it belongs in the Method"),
}

HOOKS_OF_THE_SERVER = "setup, open, down, work, expects, fold, idle, predictors"
HOOKS_OF_A_CLIENT = "begin, terms, end, answer, report, ascend, lookahead, adjust, settle, score, trainable"

NO_HOOKS = {
    "aggregate": ({"server": FOLD.format("aggregate")}, HOOKS_OF_THE_SERVER),
    "select_clients": (
        {"server": "@classmethod\ndef select_clients(cls):\n    raise RuntimeError"},
        HOOKS_OF_THE_SERVER,
    ),
    "loss": ({"client": TERMS.format("loss")}, HOOKS_OF_A_CLIENT),
    "train": ({"client": "def train(self, params, data):\n    return super().train(params, data)"}, HOOKS_OF_A_CLIENT),
    "compute_loss": ({"client": "@staticmethod\ndef compute_loss(out, y):\n    return out"}, HOOKS_OF_A_CLIENT),
    "local_train": ({"client": "@property\ndef local_train(self):\n    return 3"}, HOOKS_OF_A_CLIENT),
}

HELPERS = {
    "called": "def term(self, step):\n    return step.y\n\ndef terms(self, step, carry):\n"
    "    return {'ce': cross_entropy(step.logits(), self.term(step))}",
    "called within a comprehension": "def ends(self, p):\n    return p\n\n"
    "def end(self, params, carry, ran, view, world):\n"
    "    return Payload(params={k: self.ends(v) for k, v in params.items()}), NOTHING",
    "private": "def _term(self, step):\n    return step.y",
    "called by its text": "def halve(self):\n    return 2\n\ndef report(self, params, carry, view, world):\n"
    "    return {'two': getattr(self, 'halve')()}",
    "a field": "terms_of: int = 3",
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_hook_is_refused_before_round_1(name: str, tmp_path: Path) -> None:
    bodies, remedy = MISSPELT[name]
    experiment, _ = mine(tmp_path, **bodies)
    with pytest.raises(ConfigError) as said:
        prepare(settle(experiment), toys.blobs())
    text = str(said.value)
    assert text.startswith(f"method mine.py: nothing calls {name} (")
    assert remedy in text
    assert "\n" not in text


def test_it_is_said_where_the_hook_is_written(tmp_path: Path) -> None:
    experiment, line = mine(tmp_path, server=FOLD.format("fould"))
    with pytest.raises(ConfigError, match=rf"nothing calls fould \(mine.py, line {line - 1}, in fould\)"):
        settle(experiment)


@pytest.mark.parametrize("name", NO_HOOKS)
def test_a_function_of_another_name_that_nothing_calls_is_refused_with_the_hooks(name: str, tmp_path: Path) -> None:
    bodies, hooks = NO_HOOKS[name]
    experiment, _ = mine(tmp_path, **bodies)
    with pytest.raises(ConfigError) as said:
        prepare(settle(experiment), toys.blobs())
    text = str(said.value)
    assert text.startswith(f"method mine.py: nothing calls {name} (mine.py, line ")
    assert hooks in text
    assert text.endswith(f"a name of your own for it begins with an underscore: _{name}")


@pytest.mark.parametrize("name", HELPERS)
def test_what_a_method_calls_itself_is_its_own(name: str, tmp_path: Path) -> None:
    prepare(settle(mine(tmp_path, client=HELPERS[name])[0]), toys.blobs())


def test_a_method_handed_over_from_python_is_checked_as_well() -> None:
    with pytest.raises(ConfigError, match="did you mean 'setup'"):
        settle(toys.toy(Settled))


@dataclass(frozen=True)
class Settled(Method):
    def set_up(self, world):  # type: ignore[no-untyped-def]
        return None


def test_a_helper_may_stand_in_one_file_and_be_called_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = "from fedstill.work import ClientWork\n\nclass Base(ClientWork):\n    def ends(self):\n        return 3\n"
    base += "    def pull(self):\n        return 4\n"
    below = "from base_of_it import Base\n\nclass Below(Base):\n    def _more(self):\n        return self.ends()\n"
    (tmp_path / "base_of_it.py").write_text(base)
    (tmp_path / "below_it.py").write_text(below)
    monkeypatch.syspath_prepend(tmp_path)
    refuse_uncalled("method", importlib.import_module("below_it").Below())  # which has no use for pull, either
    with pytest.raises(ConfigError, match="nothing calls ends"):
        refuse_uncalled("method", importlib.import_module("base_of_it").Base())


def test_everything_of_the_library_passes() -> None:
    for name in registry.names("method"):
        entry = registry.lookup("method", name)
        if entry.target.__module__.startswith("fedstill."):
            refuse_uncalled(name, entry.build(), ClientWork)


MEASURE = """
from fedstill.experiment.measures.base import Measure
from fedstill.registry import register

@register("measure", "mine")
class Mine(Measure):
    {}
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def lok(self, seen, room):\n        return {}", "nothing calls lok .*did you mean 'look'"),
        (
            "def measure(self, seen, room):\n        return {}",
            "nothing calls measure .* is look, at_client",
        ),
        ("need = frozenset({'chain'})\n    def look(self, seen, room):\n        return {}", "did you mean 'needs'"),
        ("def of_round(self, seen):\n        return {}", "measures nothing: give it look or at_client"),
    ],
)
def test_a_measure_that_measures_nothing_is_refused(body: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "measure.py").write_text(MEASURE.format(body))
    with pytest.raises(ConfigError, match=f"measure measure.py.*{said}"):
        measures([str(tmp_path / "measure.py")])
    experiment = replace(toys.toy(), base=tmp_path, measure=("measure.py",))
    with pytest.raises(ConfigError, match=said):
        prepare(settle(experiment), toys.blobs())
