"""A key in a table that lacks it: the message names the key that was probably meant, or the mistake
in a user's class.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstill.config.experiment import load
from fedstill.config.resolve import resolve
from fedstill.config.validation import WrongConfig
from fedstill.core.errors import ConfigError


def problem(text: str, folder: Path, *overrides: str) -> str:
    """The one line that says what is wrong with a config."""
    (folder / "config.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(load(folder / "config.toml", overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clients = 4", "clients = 4 must be a table, [clients]; did you mean 'topology.clients'?"),
        ("lr = 0.1", "unknown key 'lr'; did you mean 'plan.lr'?"),
        ("sampled = 3", "unknown key 'sampled'; did you mean 'topology.sampled'?"),
        (
            "beta = 1.0\nmethod = 'fedntd'",
            "unknown key 'beta'; did you mean 'method.beta'?",
        ),
        ("learning_rate = 0.1", "unknown key 'learning_rate'; did you mean 'plan.lr'?"),
        ("dataset = 'digits'", "unknown key 'dataset'; did you mean 'data.name'?"),
        (
            "[plan]\nrounds = 3",
            "unknown key 'plan.rounds'; did you mean 'rounds' (before all tables)?",
        ),
        pytest.param(
            "[plan.train]\nseed = 3",
            "did you mean 'seed' (before all tables), 'query.seed' or 'partition.seed'?",
            marks=pytest.mark.uses("querying"),
        ),
        (
            "[plan]\nlocal_epochs = 3",
            "unknown key 'plan.local_epochs'; did you mean 'plan.epochs'?",
        ),
        (
            "[plan]\nclients = 3",
            "unknown key 'plan.clients'; did you mean 'topology.clients'?",
        ),
        (
            "[topology]\nclient = 5",
            "unknown key 'topology.client'; did you mean 'topology.clients'?",
        ),
        (
            "[partition]\nclient = 5",
            "unknown key 'partition.client'; did you mean 'partition.clients'?",
        ),
        ("[data]\nalpha = 0.3", "unknown key 'data.alpha'; did you mean 'partition.alpha'?"),
        ("[data]\nquorum = 0.3", "unknown key 'data.quorum'; did you mean 'clients.quorum'?"),
        ("[data]\nmethod = 'fedavg'", "unknown key 'data.method'; did you mean 'method.name'?"),
        (
            "[clients]\nclients = 4",
            "unknown key 'clients.clients'; did you mean 'topology.clients'?",
        ),
        (
            "[clients]\nlr = 1.0\nquorum = 7.0",
            "unknown key 'clients.lr'; did you mean 'plan.lr'?",
        ),
        ("[method]\nepochs = 3", "unknown key 'method.epochs'; did you mean 'plan.epochs'?"),
        pytest.param(
            "[method]\nname = 'fedprox'\nclip = 3",
            "unknown key 'method.clip'; did you mean 'privacy.clip'?",
            marks=pytest.mark.uses("privacy"),
        ),
        (
            "[model]\nhiddn = [3]\nname = 'mlp'",
            "unknown key 'model.hiddn'; did you mean 'model.hidden'?",
        ),
        ("[partition]\nlr = 0.1", "unknown key 'partition.lr'; did you mean 'plan.lr'?"),
        ("[topology]\nmodel = 'cnn'", "unknown key 'topology.model'; did you mean 'model.name'?"),
        ("[flower]\nsampled = 3", "unknown key 'flower.sampled'; did you mean 'topology.sampled'?"),
        pytest.param(
            "[privacy]\ndraw = 'single'",
            "unknown key 'privacy.draw'; did you mean 'query.draw'?",
            marks=pytest.mark.uses("privacy", "querying"),
        ),
        ("[partition]\ncolumn = 'x'", "partition.kind"),
        (
            "[partition]\nname = 'iid'",
            "unknown key 'partition.name'; did you mean 'partition.kind'?",
        ),
        ("[topology]\ndata = 'x'", "unknown key 'topology.data'; did you mean 'data.name'?"),
        (
            "data = 2024",
            'data = 2024 must be a table, [data]; a name is a text: write data = "2024"',
        ),
        ("[train]\nlr = 1", "unknown key 'train'; did you mean the table [plan]?"),
        (
            "[model]\nhidden = [3]",
            "unknown key 'model.hidden'; it is a field of bag, logistic, mlp and 2 more",
        ),
        ("[data]\nzzz = 1", "unknown key 'data.zzz'; choose one of "),
    ],
)
def test_the_key_of_another_table_is_named(text: str, message: str, tmp_path: Path) -> None:
    assert message in problem(text, tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr=0.1", "unknown key 'train'; did you mean the table [plan]?"),
        ("lr=0.1", "unknown key 'lr'; did you mean 'plan.lr'?"),
        ("clients=4", "clients = 4 must be a table, [clients]; did you mean 'topology.clients'?"),
        ("data.rounds=4", "unknown key 'data.rounds'; did you mean 'rounds' (before all tables)?"),
    ],
)
def test_the_key_of_another_table_is_named_for_an_override_too(
    override: str, message: str, tmp_path: Path
) -> None:
    assert message in problem("", tmp_path, override)


@pytest.mark.parametrize("override", ["model.hiden=[3]", "plan=3", "plan.train=3", "stop=3"])
def test_there_is_advice_even_if_no_other_key_is_likely(override: str) -> None:
    with pytest.raises(WrongConfig) as caught:
        resolve(load(None, (override,)))
    (found,) = caught.value.problems
    assert found.key == override.partition("=")[0]
    assert found.hint
    assert found.hint == found.hint.strip()
    assert "device" not in found.hint, "a key before all tables is no key of this table"


METHOD = """
from dataclasses import dataclass
from typing import ClassVar
import fedstill
{above}
class Mine(fedstill.Method):
    '''Averaging.'''
    topology: ClassVar[str] = "parallel"
    beta{annotation} = 0.5

class Heir(Mine):
    '''The same.'''
"""


def write_method(folder: Path, above: str, annotation: str) -> None:
    """Write a user's method, with a line above its class and an annotation of its field."""
    (folder / "mine.py").write_text(METHOD.format(above=above, annotation=annotation))


@pytest.mark.parametrize("name", ["Mine", "Heir"])
@pytest.mark.parametrize("value", ["beta = 0.3", ""])
def test_a_method_that_is_no_dataclass_is_refused_with_advice(
    name: str, value: str, tmp_path: Path
) -> None:
    write_method(tmp_path, above="", annotation=": float")
    message = (
        "method Mine (mine.py, line 6) has fields (beta) that no config can set: "
        "write @dataclass(frozen=True) above its class"
    )
    assert problem(f"[method]\nname = 'mine.py:{name}'\n{value}", tmp_path) == message


def test_a_field_without_a_type_is_refused_with_advice(tmp_path: Path) -> None:
    write_method(tmp_path, above="@dataclass(frozen=True)", annotation="")
    message = (
        "unknown key 'method.beta'; class Mine sets it without a type annotation; write "
        "beta: float = 0.5"
    )
    assert problem("[method]\nname = 'mine.py:Mine'\nbeta = 0.3", tmp_path).endswith(message)


def test_a_subclass_of_a_valid_method_has_its_fields(tmp_path: Path) -> None:
    write_method(tmp_path, above="@dataclass(frozen=True)", annotation=": float")
    (tmp_path / "right.toml").write_text("[method]\nname = 'mine.py:Heir'\nbeta = 0.3")
    assert resolve(load(tmp_path / "right.toml")).named.method.values == {"beta": 0.3}


def test_a_parameter_of_a_users_data_function_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def data(stations=6): ...")
    config = "[data]\nname = 'mine.py:data'"
    message = problem(config, tmp_path, "data.stations=3")
    assert "a config cannot set 'stations' of mine.py:data" in message
    assert "choose one of" in problem(config, tmp_path, "data.station=3")
