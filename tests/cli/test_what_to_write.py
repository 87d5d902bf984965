"""The command line refuses words in one line that contains the words to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from fedstill.cli import LISTS, REPEATED, app, call
from fedstill.cli.app import Engine
from fedstill.cli.explain import resolved_values
from fedstill.config.experiment import load
from fedstill.config.resolve import resolve
from fedstill.config.tables import TopKeys

ATTRIBUTION = pytest.mark.uses("attribution")
"""The mark of cases with the command ``why``."""

CONFIG = (
    "rounds = 1\nmeasure = []\ntopology = { clients = 2 }\n[data]\ntrain_size = 100\n[plan]\n"
    "epochs = 1\n"
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(CONFIG)
    Path("runs").mkdir()
    Path("a.safetensors").touch()
    Path("b.safetensors").touch()


@pytest.mark.parametrize(
    ("words", "correction"),
    [
        ("compare --methods fedavg fedntd", "--methods fedavg,fedntd"),
        ("compare small.toml --methods fedavg fedntd", "--methods fedavg,fedntd"),
        ("compare small.toml --methods fedavg, fedntd", "--methods fedavg,fedntd"),
        ("compare small.toml --seeds ,", "--seeds"),
        ("tune small.toml --seeds 1,2,1", "--seeds names 1"),
        ("compare small.toml --methods , -q", "--methods"),
        ("compare small.toml --jobs 99999999999", "--jobs"),
        ("compare --methods=fedavg fedntd -q", "--methods fedavg,fedntd"),
        ("compare --methods a.py b.py:Mine", "--methods a.py,b.py:Mine"),
        ("compare small.toml --seeds 1 2 3", "--seeds 1,2,3"),
        ("compare --seeds 1 2 small.toml", "--seeds 1,2"),
        ("demo --seeds 1 2", "--seeds 1,2"),
        ("reproduce fedntd/table1 --cells A:B C:D", "--cells A:B,C:D"),
        ("query runs --client 1 --classes 7 9", "--classes 7,9"),
        pytest.param(
            "query runs --client 1 --classes 7 --teachers a.safetensors b.safetensors",
            "--teachers a.safetensors,b.safetensors",
            marks=pytest.mark.uses("querying"),
        ),
        ("run small.toml -s rounds=1 seed=2", "-s rounds=1 -s seed=2"),
        ("run small.toml -s plan.lr = 0.1", ": -s plan.lr=0.1"),
        ("run small.toml -s plan.lr= 0.1 -q", ": -s plan.lr=0.1"),
        ("run small.toml plan.lr = 0.1", ": -s plan.lr=0.1"),
        ("compare small.toml --grid plan.lr = 0.1,1", ": --grid plan.lr=0.1,1"),
        ("compare small.toml --methods fedavg , fedntd", "--methods fedavg,fedntd"),
        ("compare small.toml --grid plan.lr=1 seed=2", "--grid plan.lr=1 --grid seed=2"),
        ("compare --methods fedavg absent.toml", "absent.toml"),
        ("compare small.toml --grid plan.lr=1 2", "--grid plan.lr=1,2"),
        (
            "tune small.toml --space plan.lr=1..2 seed=1,2",
            "--space plan.lr=1..2 --space seed=1,2",
        ),
        ("run small.toml plan.lr=1", "-s plan.lr=1"),
        ("run small.toml -s data.mean=[a,b]", "'a': input should be a valid number"),
        ("run", "fedstill run my.toml"),
        ("resume -q", "fedstill resume runs/"),
        pytest.param("unlearn", "fedstill unlearn runs/", marks=pytest.mark.uses("unlearning")),
        ("run small.toml --seed 3", "-s seed=3"),
        ("run small.toml --plan.lr=0.3", "-s plan.lr=0.3"),
        ("run small.toml --device=cuda", "-s device=cuda"),
        ("run small.toml --batch-size 32", "-s plan.batch=32"),
        ("explain small.toml --method fedntd", "-s method=fedntd"),
        ("compare small.toml --seed 3", "--seeds"),
        ("run small.toml --nothing 3", "--nothing"),
        (
            "compare small.toml --methods fedavg,fedadkd --grid method.tckd=target,binary",
            "'method.tckd'",
        ),
        ("compare small.toml --grid method.zzz=1,2", "'method.zzz'"),
        ("run small.toml -s data.mean=0.5", "[0.5]"),
        ("run small.toml -s plan.lr=.5", "write 0.5"),
        ("run small.toml -s plan.lr=1.", "write 1.0"),
        ("run small.toml -s rounds=03", "write 3"),
        ("run small.toml -s plan.shuffle=False", "write false"),
        pytest.param("why runs --from 2", "--without", marks=ATTRIBUTION),
        pytest.param("why runs --rounds 3 --once", "--without", marks=ATTRIBUTION),
        ("run small.toml more.toml", "'more.toml'"),
        ("list methodes", "'method'?"),
        ("list recipes", "dataset, measure, method, model, partition, stream, topology"),
    ],
)
def test_wrong_words_are_refused_with_a_correction(
    words: str, correction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedstill: ")
    assert correction in line


@pytest.mark.parametrize(
    "words", ["--methods fedavg small.toml", "--seeds 1,2 small.toml", "small.toml --seeds 1"]
)
def test_a_list_of_one_word_before_the_config_is_taken(words: str) -> None:
    assert call(["compare", *words.split(), "--out", "all", "-q", "--jobs", "1"]) == 0


@pytest.mark.uses("benchmark")
@pytest.mark.parametrize(
    ("words", "unknown"),
    [
        ("run --track other digits", "other"),
        ("run --methods other digits", "other"),
        ("run --methods fedavg other --track space", "other"),
        ("run digits --track space time", "time"),
        ("choose --methods other digits", "other"),
        ("enter --tier digits --track space absent.py", "absent.py"),
        ("map --devices 0 other", "other"),
    ],
)
def test_an_argument_after_an_option_is_no_part_of_its_list(
    words: str, unknown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is read as it stands, and the answer is on its unknown word."""
    assert call(["rank", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert unknown in line
    assert "commas" not in line


@pytest.mark.uses("benchmark", "querying")
def test_every_option_that_takes_a_list_or_may_be_repeated_is_known() -> None:
    """A list is one word with commas. An option of another sequence may be repeated."""
    lists = set[str]()
    repeated = set[str]()
    commands = "run compare demo tune reproduce query explain report forgetting"
    for name in commands.split():
        for argument in app[name].assemble_argument_collection():
            if argument.hint not in (tuple[str, ...], tuple[int, ...], tuple[float, ...]):
                continue
            options = {word for word in argument.names if word.startswith("-")}
            if argument.parameter.n_tokens == 1:
                lists |= options
            else:
                repeated |= options

    assert lists == LISTS
    assert repeated - {"--directories"} == REPEATED - {"--host", "--suite"}


@pytest.mark.parametrize(
    ("plural", "kind"),
    [
        ("methods", "method"),
        ("datasets", "dataset"),
        ("partitions", "partition"),
        ("models", "model"),
        ("topologies", "topology"),
        ("measures", "measure"),
    ],
)
def test_list_takes_the_plural_too(
    plural: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["list", kind]) == 0
    expected = capsys.readouterr().out
    assert call(["list", plural]) == 0
    assert capsys.readouterr().out == expected


def test_the_option_takes_every_engine_that_the_key_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert get_args(Engine) == get_args(get_type_hints(TopKeys)["engine"])
    assert call(["run", "small.toml", "--engine", "vectorised", "--out", "one", "-q"]) == 0
    assert 'engine = "vectorised"' in Path("one/config.toml").read_text()
    assert call(["run", "small.toml", "--engine", "vector", "--out", "two", "-q"]) == 2
    assert '"serial", "pooled", "vectorised", "auto", "flower"' in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--no-split"]])
def test_explain_prints_settings_that_a_run_would_refuse(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["explain", "small.toml", "-s", "method=fedmd", *options]) == 2
    printed = capsys.readouterr()
    assert "data.public" in printed.err
    assert "method.name" in printed.out


@pytest.mark.parametrize(("options", "has_split"), [([], True), (["--no-split"], False)])
def test_explain_prints_the_split_unless_an_option_forbids_it(
    options: list[str], has_split: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["explain", "small.toml", *options]) == 0
    printed = capsys.readouterr().out
    assert "optimiser steps a round" in printed
    assert ("each mark is a class" in printed) == has_split


LEARNING = [
    "-srounds=2",
    "-sdata.train_size=1000",
    "-spartition=iid",
    "-splan.epochs=2",
    "-splan.lr=0.1",
    "-q",
]
"""Options with which the second round raises the accuracy of all classes."""


def test_a_run_with_negative_forgetting_explains_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "small.toml", "--out", "one", *LEARNING]) == 0
    printed = capsys.readouterr().out
    assert "negative forgetting" in printed
    (forgetting,) = [line for line in printed.splitlines() if line.startswith("forgetting ")]
    assert " -" in forgetting


def test_a_comparison_with_negative_forgetting_explains_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(["compare", "small.toml", "--out", "all", *LEARNING]) == 0
    assert "negative forgetting" in capsys.readouterr().out
    assert "negative" in Path("all/report.html").read_text()


def test_a_single_round_has_no_negative_forgetting_to_explain(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(["run", "small.toml", "--out", "two", "-q"]) == 0
    assert "negative forgetting" not in capsys.readouterr().out


TWO_METHODS = """
from dataclasses import dataclass
import fedstill

@dataclass(frozen=True)
class Mine(fedstill.Method):
    '''Averaging.'''

@dataclass(frozen=True)
class Other(fedstill.Method):
    '''Averaging, too.'''
"""


def test_a_users_method_is_named_by_its_file_without_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.py").write_text(TWO_METHODS)
    assert call(["run", "small.toml", "-s", "method=own.py:Mine", "--out", "one"]) == 0

    printed = capsys.readouterr()
    assert printed.out.startswith("own.py:Mine ")
    assert printed.err.startswith("own.py:Mine: ")
    summary = Path("one/summary.json").read_text()
    for text in (printed.out, printed.err, summary):
        assert str(tmp_path) not in text


def test_two_methods_of_a_file_are_two_methods_of_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.py").write_text(TWO_METHODS)
    methods = ["own.py:Mine", "own.py:Other"]
    options = ["--methods", ",".join(methods), "--seeds", "1", "--out", "all"]
    assert call(["compare", "small.toml", *options]) == 0

    printed = capsys.readouterr()
    for name in methods:
        assert f"\n{name} " in printed.out
        assert f"{name}, seed 1: finished" in printed.err
    assert str(tmp_path) not in printed.out
    assert str(tmp_path) not in printed.err
    assert len(list(Path("all").glob("*/seed1/summary.json"))) == 2


@pytest.mark.parametrize("words", ["a,b", "[a,b]", '["a","b"]', "a, b"])
def test_words_with_commas_are_a_list_only_for_a_key_that_holds_a_list(words: str) -> None:
    overrides = (f"data.columns={words}", "measure=local,personal", "data.label_column=x,y")
    settings = resolve(load("small.toml", overrides))
    assert settings.data.columns == ("a", "b")
    assert settings.measure == ("local", "personal")
    assert settings.data.label_column == "x,y"
    assert 'columns = [\n    "a",\n    "b",\n]' in settings.toml


def test_a_name_for_a_table_is_the_origin_of_no_other_key_of_it() -> None:
    settings = resolve(load("small.toml", ("data=digits", "partition=iid")))
    origins = {value.key: value.origin for value in resolved_values(settings)}
    assert origins["data.name"] == "command line"
    assert origins["data.kind"] == "default"
    assert origins["partition.kind"] == "command line"


@pytest.mark.uses("benchmark")
@pytest.mark.parametrize(("data", "has_map"), [("t.csv", False), ("digits", True)])
def test_the_maps_of_digits_are_not_shown_for_tables(
    data: str,
    has_map: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = "".join(f"{row},{row % 7},{row % 2}\n" for row in range(60))
    Path("t.csv").write_text("a,b,label\n" + rows)
    monkeypatch.setattr(
        "fedstill.benchmark.maps.map_lines",
        lambda maps, method, here: [f"here {here}"],
    )
    settings = ["-s", f"data={data}", "-s", "data.train_size=0", "-s", "partition=iid"]
    assert call(["explain", "small.toml", *settings]) == 0
    assert ("here Setting(" in capsys.readouterr().out) == has_map


@pytest.mark.parametrize("words", [["resume", "run"], ["demo"], ["rank", "run", "digits"]])
def test_a_command_without_settings_names_the_command_that_takes_them(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([*words, "-s", "rounds=3"]) == 2
    assert "fedstill " in capsys.readouterr().err.removeprefix("fedstill: ")


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("explain nothing.toml", "name a TOML file"),
        ("explain runs", "name a TOML file"),
        ("compare nothing.toml", "name a TOML file"),
        ("tune nothing.toml --space plan.lr=0.1..1", "name a TOML file"),
        ("resume nothing", "e.g. runs/NAME"),
        ("resume runs", "e.g. runs/NAME"),
        ("report runs", "e.g. runs/"),
        pytest.param("why nothing", "e.g. runs/NAME", marks=ATTRIBUTION),
        pytest.param("rank nothing", "--help", marks=pytest.mark.uses("benchmark")),
        pytest.param(
            "reproduce fedntd/table99", "did you mean", marks=pytest.mark.uses("benchmark")
        ),
    ],
)
def test_a_path_or_name_that_does_not_exist_gets_a_next_step(
    words: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(words.split()) == 2
    message = capsys.readouterr().err
    assert advice in message
    assert message.count("\n") == 1
