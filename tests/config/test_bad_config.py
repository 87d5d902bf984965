"""Configs with a mistake are refused in one line: the wrong key, its value, and what to write
instead.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.config.experiment import Experiment, load
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, DataError, InfeasiblePartition, UnknownName
from fedstill.running.preparation import prepare
from fedstill.running.runner import run


def problem(text: str, folder: Path, *overrides: str) -> str:
    """The one line that says what is wrong with a config."""
    path = folder / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(load(path, overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("roundz = 3", "roundz", "rounds"),
        ("[metod]\nname = 'x'", "metod", "method"),
        ("[data]\nnam = 'digits'", "data.nam", "name"),
        ("[clients]\nquorom = 1.0", "clients.quorom", "quorum"),
        ("[plan]\nepoch = 1", "epoch", "epochs"),
        ("[plan.train]\nbatsh = 1", "plan.train.batsh", "batch"),
        ("[plan.trane]\nbatch = 1", "trane", "train"),
        ("[method]\nname = 'fedntb'", "fedntb", "fedntd"),
        ("[method]\nname = 'fedntd'\nbetta = 1.0", "betta", "beta"),
        ("[model]\nname = 'lenet'", "lenet", "lenet5"),
        ("[model]\nname = 'mlp'\nhiden = [3]", "hiden", "hidden"),
        ("[partition]\nkind = 'dirichle'", "dirichle", "dirichlet"),
        ("[partition]\nkind = 'dirichlet'\nalfa = 1.0", "alfa", "alpha"),
        ("[topology]\nkind = 'paralel'", "paralel", "parallel"),
        ("[topology]\nsampeld = 3", "sampeld", "sampled"),
        ("measure = ['locale']", "locale", "local"),
        ("[clients]\nmodels = ['mpl']", "mpl", "mlp"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_legal_name(
    text: str, key: str, nearest: str, tmp_path: Path
) -> None:
    message = problem(text, tmp_path)
    assert f"{key}'" in message
    assert re.search(rf"did you mean '([\w.]+\.)?{nearest}'", message)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds = '3'", "rounds = '3'"),
        ("rounds = 3.0", r"rounds = 3\.0"),
        ("rounds = true", "rounds = True"),
        ("rounds = 0", "rounds = 0"),
        ("rounds = -4", "rounds = -4"),
        ("rounds = 99999999999", "rounds = 99999999999"),
        ("seed = -1", "seed = -1"),
        ("seed = 9223372036854775808", "seed"),
        ("seed = 1979-05-27", "seed = "),
        ("seed = 0x" + "f" * 9999, "seed = a huge int"),
        ("threads = 0", "threads"),
        ("threads = [1]", "threads"),
        ("threads = 'many'", "threads"),
        ("engine = 'warp'", "engine = 'warp'"),
        ("measure = 'local'", "measure = 'local'"),
        ("measure = [3]", "measure"),
        ("data = 3", "data = 3 must be a table"),
        ("plan = 'x'", r"plan = 'x' must be a table, \[plan\]"),
        ("method = 3", "method = 3 must be a table"),
        ("method = []", r"method = \[\] must be a table"),
        ("[plan]\ntrain = 3", r"plan\.train = 3 must be a table"),
        ("[plan]\nlr = nan", r"plan\.lr = nan"),
        ("[plan]\nlr = inf", r"plan\.lr = inf"),
        ("[plan]\nlr = 0.0", r"plan\.lr = 0\.0"),
        ("[plan]\nlr = -1", r"plan\.lr = -1"),
        ("[plan]\nbatch = 0", r"plan\.batch = 0"),
        ("[plan]\nmomentum = 1.0", r"plan\.momentum = 1\.0"),
        ("[plan]\noptimiser = 'sgdd'", r"plan\.optimiser = 'sgdd'"),
        ("[plan]\nshuffle = 1", r"plan\.shuffle = 1"),
        ("[method]\nname = 'fedntd'\nbeta = -1.0", "beta = -1"),
        ("[method]\nname = 'fedntd'\nbeta = nan", "beta = nan"),
        ("[method]\nname = 'fedntd'\nbeta = 'x'", "beta = 'x'"),
        ("[method]\nname = ['fedntd']", r"method\.name = \['fedntd'\]"),
        ("[partition]\nalpha = 0", "alpha = 0"),
        ("[topology]\nclients = 0", r"topology\.clients = 0"),
        ("[data]\nname = ''", r"data\.name is empty"),
        ("[data]\npublic_from = ''", r"data\.public_from is empty"),
        ('[data]\npublic_from = "a\\u0000"', r"data\.public_from = .* cannot be a path"),
        ("[topology]\nclients = [1]", r"topology\.clients = \[1\]"),
        ("[partition]\nclients = {}", r"partition\.clients = \{\}"),
        (
            "[topology]\nclients = 3\n[partition]\nclients = 4",
            r"topology\.clients = 3.*partition\.clients = 4",
        ),
        ("[topology]\nsampled = 0", "sampled = 0"),
        ("[clients]\nquorum = 1.5", r"clients\.quorum = 1\.5"),
        ("[clients]\nnorm_limit = inf", r"clients\.norm_limit = inf"),
        ("[data]\npublic = -1", r"data\.public = -1"),
        ("[data]\naugment = ['spin']", r"data\.augment"),
        ("[data]\nname = '~nobody-here/x'", r"data\.name = '~nobody-here/x' cannot be a path"),
        (f"[data]\nname = '{'x' * 5000}'", r"data\.name = 'x+… \(5002 characters\)"),
        ("[privacy]\nepsilon = 1.0", r"privacy\.epsilon"),
        ("rounds = 2\n[topology]\nkind = 'peer_to_peer'", "rounds = 2: peer_to_peer"),
        ("rounds = ", "not valid TOML"),
        ("rounds = 1\nrounds = 2", "not valid TOML"),
        ("x = " + "[" * 5000, "not valid TOML"),
        ("seed = " + "9" * 5000, "not valid TOML"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_with_its_key(
    text: str, words: str, tmp_path: Path
) -> None:
    assert re.search(words, problem(text, tmp_path))


def test_all_mistakes_of_a_table_are_reported_together(tmp_path: Path) -> None:
    message = problem("[plan]\nlr = -1.0\nbatch = 0\nepoch = 3", tmp_path)
    assert "plan.lr = -1.0" in message
    assert "plan.batch = 0" in message
    assert "unknown key" in message
    assert "threads" not in message


def test_a_mistake_is_reported_once(tmp_path: Path) -> None:
    assert problem("threads = 'x'", tmp_path).count("threads = ") == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("method.beta", "is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("metod.beta=3", "unknown key 'metod'; did you mean"),
        ("seed.x=1", "seed is a value, not a table"),
        ("plan.train.x.y=1", "plan"),
        ("method.=1", "unknown key|must be"),
        (".=1", "unknown key"),
    ],
)
def test_a_wrong_override_is_named(override: str, words: str, tmp_path: Path) -> None:
    message = problem("seed = 3\n[method]\nname = 'fedntd'", tmp_path, override)
    assert re.search(words, message)


def test_a_missing_file_a_folder_and_a_binary_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="cannot read the config"):
        load(tmp_path)
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"c\.toml"):
        load(tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"topology": {"clients": 6, "sampled": 7}},
            ConfigError,
            r"topology\.sampled = 7",
        ),
        (
            {"topology": {"clients": 6, "first": "fitt"}},
            UnknownName,
            r"^topology\.first, with method .*: unknown stage 'fitt'; did you mean 'fit'\?$",
        ),
        (
            {"topology": {"clients": 6, "after": "x" * 999}},
            UnknownName,
            r"topology\.after.*'x{79}…'",
        ),
        ({"topology": {"clients": 301}}, InfeasiblePartition, "dirichlet"),
        ({"partition": {"kind": "sharding", "shards": 200}}, InfeasiblePartition, "shard"),
        (
            {"partition": {"kind": "dirichlet", "alpha": 1.0, "min_size": 51}},
            InfeasiblePartition,
            "51|min_size",
        ),
        ({"data": {"public": 300}}, ConfigError, r"data\.public = 300 leaves nothing of 300"),
        (
            {"data": {"train_size": 301}},
            ConfigError,
            r"data\.train_size = 301, but there are only 300",
        ),
        (
            {"data": {"test_size": 101}},
            ConfigError,
            r"data\.test_size = 101, but there are only 100",
        ),
        ({"model": "lenet5"}, ConfigError, "lenet5"),
        (
            {"method": "toy_peers", "topology": {"clients": 6, "students": [9]}},
            ConfigError,
            r"topology\.students names 9",
        ),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused_before_training(
    changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    experiment = toys.toy(**{"rounds": 1, **changes})
    with pytest.raises(error, match=words) as caught:
        run(experiment, tmp_path / "run", data=toys.blobs())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_dataset_that_does_not_exist_is_named() -> None:
    with pytest.raises((UnknownName, DataError), match="digitz"):
        prepare(resolve(Experiment(data="digitz")))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[plan]\nlr = .1", "lr = 0.1"),
        ("[plan]\nlr = 0,1", "lr = 0.1"),
        ("[data]\nname = “digits”", 'name = "digits"'),
        ("rounds: 3", "rounds = 3"),
        ("reuse = True", "reuse = true"),
        ("[method\nname = 'fedntd'", "[method]"),
    ],
)
def test_a_line_that_cannot_be_parsed_is_answered_with_one_that_is_right(
    text: str, line: str, tmp_path: Path
) -> None:
    assert problem(text, tmp_path).endswith(f"write {line}")
    number = 1 + ("\n" in text and not text.startswith("[method\n"))
    lines = text.split("\n")
    lines[number - 1] = line
    (tmp_path / "right.toml").write_text("\n".join(lines))
    resolve(load(tmp_path / "right.toml"))


@pytest.mark.parametrize(
    "text", ["rounds =", "measure = ['local'\nrounds = 3", "rounds = 3 seed = 1", "rounds = 3 // x"]
)
def test_no_line_is_suggested_where_none_is_right(text: str, tmp_path: Path) -> None:
    message = problem(text, tmp_path)
    assert "line" in message
    assert "write rounds" not in message


def test_an_item_of_a_list_has_the_line_of_the_list(tmp_path: Path) -> None:
    text = "rounds = 3\n[clients]\nmodels = ['mlp', 'mpl']"
    assert "line 3: clients.models[1]" in problem(text, tmp_path)
