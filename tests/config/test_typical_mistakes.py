"""Fifty mistakes that are easily made in a config: each is one line with the key or the file and a
next step.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedstill.config.experiment import load
from fedstill.config.overrides import line_of
from fedstill.config.resolve import resolve
from fedstill.config.validation import WrongConfig
from fedstill.core.errors import ConfigError

NEXT_STEP = re.compile(
    r"[;,] (did you mean|write|set|put|leave|choose|correct|remove|complete|make|save|give|e\.g\."
    r"|`fedstill list|it is a field)"  # advice
    r"|: input should |must be ",  # what is legal
)
"""What a message ends with: advice, or what is legal."""


@dataclass(frozen=True)
class Mistake:
    """A config, and what its message names: a key, or else the file."""

    text: str
    names: str = "my.toml"
    overrides: tuple[str, ...] = ()


MISTAKES = {
    "a number as a text": Mistake('rounds = "20"', "rounds"),
    "a number with a decimal point": Mistake("rounds = 20.0", "rounds"),
    "a decimal comma": Mistake("[plan]\nlr = 0,1"),
    "a number without digits before the point": Mistake("[plan]\nlr = .1"),
    "a unit": Mistake("[plan]\nlr = 10 %"),
    "a text without quotes": Mistake("method = fedavg"),
    "a text with one quote": Mistake('method = "fedavg'),
    "typographic quotes": Mistake("method = “fedavg”"),
    "a capital truth value": Mistake("reuse = True"),
    "a truth value as a text": Mistake('reuse = "yes"', "reuse"),
    "a truth value as a number": Mistake("reuse = 1", "reuse"),
    "none as in Python": Mistake("[data]\nsize = None"),
    "a date for a seed": Mistake("seed = 2024-01-31", "seed"),
    "a list for a number": Mistake("[plan]\nepochs = [5]", "plan.epochs"),
    "a number for a list": Mistake("[model]\nname = 'mlp'\nhidden = 64", "model.hidden"),
    "a text for a list": Mistake("measure = 'local'", "measure"),
    "a list of another type": Mistake("measure = [1]", "measure"),
    "a table for a number": Mistake("rounds = { max = 3 }", "rounds"),
    "a number for a table": Mistake("clients = 10", "clients"),
    "a number for a name": Mistake("method = 3", "method"),
    "a list of names": Mistake("method = ['fedavg', 'fedntd']", "method"),
    "a negative count": Mistake("[topology]\nclients = -1", "topology.clients"),
    "no clients": Mistake("[topology]\nclients = 0", "topology.clients"),
    "a share above one": Mistake("[clients]\nquorum = 50", "clients.quorum"),
    "infinity": Mistake("[plan]\nlr = inf", "plan.lr"),
    "a number beyond all bounds": Mistake("seed = 99999999999999999999", "seed"),
    "a misspelt key": Mistake("roundz = 3", "roundz"),
    "a misspelt table": Mistake("[metod]\nname = 'fedavg'", "metod"),
    "a misspelt key in a table": Mistake("[data]\nnmae = 'digits'", "data.nmae"),
    "a misspelt stage": Mistake("[plan.trian]\nlr = 0.1", "plan.trian"),
    "a misspelt key of a stage": Mistake("[plan.train]\nlrr = 0.1", "plan.train.lrr"),
    "a misspelt choice": Mistake("engine = 'paralell'", "engine"),
    "a key of a table outside all tables": Mistake("lr = 0.1", "lr"),
    "a key of no table in a table": Mistake("[data]\nseed = 1", "data.seed"),
    "a key of another table": Mistake("[method]\nlr = 0.1", "method.lr"),
    "a field of another method": Mistake("[method]\nname = 'fedavg'\nbeta = 1.0", "method.beta"),
    "the word of another library": Mistake("learning_rate = 0.1", "learning_rate"),
    "an unknown table": Mistake("[optimizer]\nlr = 0.1", "optimizer"),
    "an unknown method": Mistake("method = 'fedbn'", "method"),
    "an unknown model": Mistake("model = 'vgg19'", "model"),
    "an unknown partition": Mistake("partition = 'dirichelet'", "partition"),
    "an unknown topology": Mistake("topology = 'ring'", "topology"),
    "an unknown measure": Mistake("measure = ['acuracy']", "measure"),
    "a name twice": Mistake("method = 'fedavg'\n[method]\nmu = 1"),
    "a key twice": Mistake("rounds = 1\nrounds = 2"),
    "a table twice": Mistake("[data]\nname = 'digits'\n[data]\nsize = 28"),
    "a key without a value": Mistake("rounds ="),
    "a key without an equals sign": Mistake("rounds 3"),
    "a colon for an equals sign": Mistake("rounds: 3"),
    "two keys on a line": Mistake("rounds = 3 seed = 1"),
    "a table without its end": Mistake("[data\nname = 'digits'"),
    "a list without its end": Mistake("measure = ['local'"),
    "a path of Windows": Mistake('[data]\nname = "C:\\Users\\me\\scans"'),
    "nested too deeply": Mistake("x = " + "[" * 5000),
    "binary data": Mistake("\x00\x01"),
    "an empty name": Mistake("[data]\nname = ''", "data.name"),
    "a pool without tasks": Mistake("[stream]\ntasks = 3", "stream.tasks"),
    "rounds that peers lack": Mistake("rounds = 9\nmethod = 'qkt'", "rounds"),
    "two numbers of clients": Mistake(
        "[topology]\nclients = 3\n[partition]\nclients = 4", "topology.clients"
    ),
    "an override without a value": Mistake("", "seed", ("seed",)),
    "an override of a misspelt key": Mistake("", "sede", ("sede=3",)),
    "an override of a value as a table": Mistake("seed = 1", "seed.x", ("seed.x=3",)),
}


def message(mistake: Mistake, folder: Path) -> str:
    """What is said of a config."""
    path = folder / "my.toml"
    path.write_text(mistake.text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        resolve(load(path, mistake.overrides))
    return str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_a_key_or_a_file_and_a_next_step(
    name: str, tmp_path: Path
) -> None:
    mistake = MISTAKES[name]
    said = message(mistake, tmp_path)
    assert said.isprintable()
    assert mistake.names in said
    assert NEXT_STEP.search(said)


HOSTILE = {
    "many unknown keys": "\n".join(f"key{i} = 1" for i in range(50_000)),
    "many unknown keys of a table": "[plan]\n" + "\n".join(f"key{i} = 1" for i in range(50_000)),
    "a long key": "k" * 1_000_000 + " = 1",
    "a long table": "[data." + "k" * 1_000_000 + "]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_config_is_refused_at_once_and_in_a_short_message(
    name: str, tmp_path: Path
) -> None:
    """A site reads the configs of its server; the time must not grow with the square of a size."""
    start = time.process_time()
    printed = message(Mistake(HOSTILE[name]), tmp_path)
    assert time.process_time() - start < 10
    assert len(printed) < 20_000


@pytest.mark.parametrize(
    "data",
    [b"", b"\xef\xbb\xbf", b"\xef\xbb\xbfrounds = 20\n", b"# nothing\r\n", b"rounds = 20\r\n"],
)
def test_an_empty_file_a_mark_and_other_line_ends_are_no_mistakes(
    data: bytes, tmp_path: Path
) -> None:
    (tmp_path / "my.toml").write_bytes(data)
    assert resolve(load(tmp_path / "my.toml")).rounds == 20


def test_all_mistakes_of_a_config_are_records_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(
        "seed = -1\nroundz = 3\n[data]\npublic = -1\n[plan]\nepochs = 'x'\n[plan.train]\n"
        "batch = 0\n[clients]\nquorum = 2\n[topology]\nsampled = 0\n"
    )
    with pytest.raises(WrongConfig) as caught:
        resolve(load(path, ("privacy.clip=-1",)))
    places = {problem.key: problem.place for problem in caught.value.problems}
    assert places == {
        "seed": "my.toml, line 1",
        "roundz": "my.toml, line 2",
        "data.public": "my.toml, line 4",
        "plan.epochs": "my.toml, line 6",
        "plan.train.batch": "my.toml, line 8",
        "clients.quorum": "my.toml, line 10",
        "topology.sampled": "my.toml, line 12",
        "privacy.clip": "command line",
    }
    hints = {problem.key: problem.hint for problem in caught.value.problems}
    assert "'rounds'" in hints["roundz"]


def test_the_line_of_a_key_is_that_on_which_its_value_begins() -> None:
    text = '# lr = 1\nnote = """\nlr = 2\n"""\n[plan]\nlist = [\n  1,\n  2,\n]\n"lr" = 3\n'
    assert line_of("plan.list", text) == 6
    assert line_of("plan.lr", text) == 10
    assert line_of("note", text) == 2
    assert line_of("lr", text) == 0


@pytest.mark.parametrize(
    ("text", "suggested", "not_suggested"),
    [
        ("[plan]\nlearning_rate = 0.1", "'plan.lr'", "plan.train.lr"),
        ("[plan]\nlearning_rate = 0.1\n[plan.train]\nlr = 0.2", "'plan.train.lr'", "'plan.lr'"),
        ("lr = 0.1\n[plan.train]\nlr = 0.2", "'plan.train.lr'", "'plan.lr'"),
        ("tasks = 3", "choose one of", "'stream.tasks'"),
        ("tasks = 3\n[stream]\nkind = 'classes'\nhead = 'all'\n", "'stream.tasks'", "choose"),
    ],
)
def test_a_key_is_suggested_only_where_the_config_is_accepted_with_it(
    text: str, suggested: str, not_suggested: str, tmp_path: Path
) -> None:
    (tmp_path / "my.toml").write_text(text)
    with pytest.raises(WrongConfig) as caught:
        resolve(load(tmp_path / "my.toml"))
    (problem,) = caught.value.problems
    assert suggested in problem.hint
    assert not_suggested not in problem.hint


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("fedbn", ""),  # a method of others, and one letter from fedbe
        ("fedper", ""),
        ("fedvg", "fedavg"),
        ("fedtnd", "fedntd"),
        ("FedNTD", "fedntd"),
        ("scafold", "scaffold"),
    ],
)
def test_a_method_is_suggested_only_for_a_misspelling(
    name: str, suggested: str, tmp_path: Path
) -> None:
    said = message(Mistake(f"method = '{name}'"), tmp_path)
    assert ("did you mean" in said) == bool(suggested)
    assert suggested in said
    assert suggested or "fedstill list method" in said
