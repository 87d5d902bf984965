"""What `list` and `explain` say of methods and their fields: defaults, ranges, sentences, state and
memory.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
from cyclopts import App

from fedstill.cli import app, call
from fedstill.cli.explain import key_description, resolved_values
from fedstill.config.experiment import Experiment, load
from fedstill.config.resolve import resolve
from fedstill.config.settings import as_toml
from fedstill.core import descriptions, registry

WIDTHS = [80, 100, 160]


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert call(words) == 0
    return capsys.readouterr().out


def joined(text: str) -> str:
    """Without the breaks of lines."""
    return " ".join(text.split())


def test_list_of_methods_has_a_line_for_each_field(capsys: pytest.CaptureFixture[str]) -> None:
    """Each begins a line; into a file or a pipe, too, sentences go on in the next one."""
    text = said(["list", "method"], capsys)
    lines, whole = [joined(line) for line in text.splitlines()], joined(text)
    entries = [registry.lookup("method", name) for name in registry.names("method")]
    for entry in (e for e in entries if e.target.__module__.startswith("fedstill.")):
        assert joined(f"{entry.name} {descriptions.summary(entry)}") in whole
        at = next(i for i, line in enumerate(text.splitlines()) if line.split(" ")[0] == entry.name)
        for field in descriptions.fields(entry):
            at = next(i for i in range(at + 1, len(lines)) if lines[i].startswith(f"{field} = "))
            assert joined(descriptions.plain_sentences(entry.target)[field]) in whole
    assert re.search(r"mix = 0\.0 [^()]*\(lambda\)\. \(number in \[0, 1\]\)", whole)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "words", [["method"], ["partition"], ["method", "fedadkd"], ["method", "pfnm"]]
)
def test_nothing_is_cut_however_wide_the_terminal(
    words: list[str],
    width: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = said(["list", *words], capsys)
    assert max(map(len, text.splitlines())) <= width
    entries = [registry.lookup(words[0], name) for name in words[1:] or registry.names(words[0])]
    for entry in entries:
        sentences = descriptions.plain_sentences(entry.target)
        for field in descriptions.fields(entry):
            sentence = sentences.get(field, "")
            rest = iter(text.split())
            assert all(word in rest for word in sentence.split()), sentence


def test_a_methods_card_says_all_that_is_declared_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    card = joined(said(["list", "method", "fedadkd"], capsys))
    for part in (
        "method fedadkd",
        "source Jang & Chou",
        "symbols alpha, beta",
        "state the global parameters",
        "gini = ",
        "memory nothing.",
        "topology parallel",
        "needs same_shapes",
        "permits robust_aggregate",
        'plan train epochs = 5, batch = 50, optimiser = "sgd", lr = 0.01, lr_decay = 0.99, '
        "momentum = 0.9",
        "code fedstill.methods.fedadkd.FedADKD",
        "delta = 1.0",
        "(number in (0, 1e9])",
        'phi_timing = "stale"',
        '("stale" | "exact")',
    ):
        assert part in card, part
    peers = joined(said(["list", "method", "qkt_light_server"], capsys))
    assert 'topology peer_to_peer, server = "transfer_server", transfer = false' in peers
    assert "plan transfer_server epochs = 25" in peers
    assert "needs head, public_data, queries, same_shapes" in peers
    assert "needs label_counts, public_data" in joined(
        said(["list", "method", "hiper_fedkd"], capsys)
    )
    assert "shared = the model of phase 1" in peers


def test_a_name_that_is_a_setting_of_another_has_its_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "mix = 0.0 " in joined(said(["list", "method", "kd"], capsys))
    assert "mix = 0.5 " in joined(said(["list", "method", "kd_ntd"], capsys))


def test_other_kinds_and_a_users_file_have_cards_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "source FedADKD" in joined(said(["list", "partition", "hybrid"], capsys))
    assert "measure local" in said(["list", "measure", "local"], capsys)
    Path("mine.py").write_text(
        textwrap.dedent('''
        """Mine.

        Source: nobody's paper.
        State: the global parameters; h = a sum.
        """
        from dataclasses import dataclass
        from fedstill.methods.fedavg import FedAvg

        @dataclass(frozen=True)
        class Mine(FedAvg):
            """FedAvg with nothing added."""

            beta: float = 1.0
            """Weight of nothing."""
        ''')
    )
    card = joined(said(["list", "method", "mine.py:Mine"], capsys))
    assert "source nobody's paper. state the global parameters h = a sum. topology parallel" in card
    assert "beta = 1.0 Weight of nothing. (number)" in card


def test_a_name_needs_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["list", "--name", "fedntd"]) == 2
    assert "fedstill list method fedntd" in capsys.readouterr().err


def test_an_unknown_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["list", "method", "fedntx"]) == 2
    assert "did you mean 'fedntd'" in capsys.readouterr().err


@pytest.mark.uses("privacy", "querying")
def test_explain_says_what_each_value_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        'method = "fedadkd"\nengine = "flower"\n[partition]\nkind = "hybrid"\niid_share = 0.5\n'
        '[model]\nname = "mlp"\n'
        '[clients.models]\n1 = "mlp"\n[query.classes]\n3 = [1]\n'
    )
    settings = resolve(load(config))
    text = joined(said(["explain", str(config), "--no-split"], capsys))
    for key in (value.key for value in resolved_values(settings)):
        assert key_description(settings, key).endswith("."), key
        assert key_description(settings, key) in text, key
    assert "partition.iid_share 0.5 file c.toml" in text
    assert "privacy.clip 0.0 default" in text
    assert "privacy.delta 1e-05 default" in text
    assert "plan.train.lr 0.01 default" in text


SPLIT = [
    "explain",
    "-s",
    "method=qkt",
    "-s",
    "rounds=1",
    "-s",
    "topology.clients=3",
    "-s",
    "data.train_size=90",
]


@pytest.mark.uses("querying")
@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"draw": "all", "fewer_than": 2}, "has 1 example"),
        ({"draw": "all", "by": "need", "needs": {"1": [4]}}, "4: will need it"),
        ({"classes": {"1": [4]}, "fewer_than": 99}, "listed in the config"),
        (
            {
                "draw": "single",
                "by": ["accuracy", "need"],
                "accuracy_under": 0.5,
                "needs": {"0": [1]},
            },
            "after the stage 'fit', for one class on which the accuracy of their model is below",
        ),
    ],
)
def test_explain_says_who_asks_for_what_and_why(
    query: dict[str, object], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text(as_toml({"query": query, "partition": "iid"}))
    text = joined(said([SPLIT[0], str(config), *SPLIT[1:]], capsys))
    assert says in text


@pytest.mark.uses("querying")
def test_explain_says_with_how_much_data_clients_ask_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    several = ["rounds=4" if word == "rounds=1" else word for word in SPLIT]
    tokens = [*several, "-s", "query.draw=all", "-s", "query.again=mixed"]
    assert "round 1 with 25 %" in joined(said(tokens, capsys))


@pytest.mark.uses("benchmark")
def test_what_is_no_terminal_gets_no_spaces_at_the_end_of_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (
        ["list"],
        ["list", "method"],
        ["list", "method", "fedadkd"],
        ["explain"],
        ["reproduce"],
    ):
        lines = said(words, capsys).splitlines()
        assert len(lines) > 10
        assert [line for line in lines if line != line.rstrip()] == [], words
        assert max(map(len, lines)) <= 100, words


def commands(group: App, above: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Every command, with the groups that it is in."""
    for name in (n for n in group if not n.startswith("-")):
        if list(group[name])[:1] and group[name].default_command is None:
            yield from commands(group[name], (*above, name))
        else:
            yield [*above, name]


COMMANDS = list(commands(app))


@pytest.mark.uses("benchmark", "flower")
def test_all_commands_are_looked_at() -> None:
    every = {" ".join(words) for words in COMMANDS}
    assert every >= {
        "run",
        "resume",
        "compare",
        "demo",
        "reproduce",
        "pack",
        "unpack",
        "deploy admit",
        "deploy key",
    }


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_says_what_each_parameter_is(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = functools.reduce(lambda group, word: group[word], words, app).default_command
    assert command is not None
    sentences = dict(re.findall(r"^    (\w+): (.*)$", inspect.getdoc(command) or "", re.MULTILINE))
    parameters = inspect.signature(command).parameters
    assert set(sentences) == set(parameters)
    shown = joined(said([*words, "--help"], capsys).replace("│", " "))
    types = get_type_hints(command)
    for name, text in sentences.items():
        # A record of options has a line of help for each of its fields instead.
        assert is_dataclass(types.get(name)) or text.replace("`", "") in shown, name


@pytest.mark.parametrize("width", WIDTHS)
def test_explain_cuts_no_sentence(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = said(["explain", "-s", "method=fedmd", "-s", "data.public=50", "--no-split"], capsys)
    assert max(map(len, text.splitlines())) <= width
    settings = resolve(Experiment(method="fedmd", data={"public": 50}))
    for key in (value.key for value in resolved_values(settings)):
        rest = iter(text[text.index(f"\n{key} ") :].split())
        sentence = key_description(settings, key)
        assert all(word in rest for word in sentence.split()), sentence


def test_a_users_data_function_shows_no_fields_that_a_config_cannot_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def stations(n: int = 400):\n    '''Stations.'''\n")
    monkeypatch.chdir(tmp_path)
    assert call(["list", "dataset", "mine.py:stations"]) == 0
    out = capsys.readouterr().out
    assert "Stations" in out
    assert "400" not in out
