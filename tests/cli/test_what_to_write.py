"""What the command line says of words that it does not take: what to write in their place."""

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

WHY = pytest.mark.uses("attribution")
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
    ("words", "said"),
    [
        ("compare --methods fedavg fedntd", "--methods fedavg,fedntd"),
        ("compare small.toml --methods fedavg fedntd", "--methods fedavg,fedntd"),
        ("compare small.toml --methods fedavg, fedntd", "--methods fedavg,fedntd"),
        ("compare small.toml --seeds ,", "--seeds"),
        ("compare small.toml --methods , -q", "--methods"),
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
        ("run small.toml --seed 3", "-s seed=3"),
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
        pytest.param("why runs --from 2", "--without", marks=WHY),
        pytest.param("why runs --rounds 3 --once", "--without", marks=WHY),
        ("run small.toml more.toml", "'more.toml'"),
        ("list methodes", "'method'?"),
        ("list recipes", "dataset, measure, method, model, partition, stream, topology"),
    ],
)
def test_the_line_says_what_to_write(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedstill: ")
    assert said in line


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
    lists, repeated = set[str](), set[str]()
    commands = "run compare demo tune reproduce query explain report forgetting"
    for name in commands.split():
        for argument in app[name].assemble_argument_collection():
            if argument.hint in (tuple[str, ...], tuple[int, ...], tuple[float, ...]):
                options = {n for n in argument.names if n.startswith("-")}
                (lists if argument.parameter.n_tokens == 1 else repeated).update(options)
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
    want = capsys.readouterr().out
    assert call(["list", plural]) == 0
    assert capsys.readouterr().out == want


def test_the_option_takes_every_engine_that_the_key_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert get_args(Engine) == get_args(get_type_hints(TopKeys)["engine"])
    assert call(["run", "small.toml", "--engine", "vectorised", "--out", "one", "-q"]) == 0
    assert 'engine = "vectorised"' in Path("one/config.toml").read_text()
    assert call(["run", "small.toml", "--engine", "vector", "--out", "two", "-q"]) == 2
    assert '"serial", "pooled", "vectorised", "auto", "flower"' in capsys.readouterr().err


@pytest.mark.parametrize("split", [[], ["--no-split"]])
def test_explain_checks_what_a_run_would_check(
    split: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["explain", "small.toml", "-s", "method=fedmd", *split]) == 2
    said = capsys.readouterr()
    assert "data.public" in said.err
    assert "method.name" in said.out, "what is asked for can be read all the same"
    assert call(["explain", "small.toml", *split]) == 0
    said = capsys.readouterr()
    assert "optimiser steps a round" in said.out
    assert ("each mark is a class" in said.out) == (not split)


def test_forgetting_below_zero_is_explained_where_it_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    learns = [
        f"-s{v}"
        for v in (
            "rounds=2",
            "data.train_size=1000",
            "partition=iid",
            "plan.epochs=2",
            "plan.lr=0.1",
        )
    ]
    learns.append("-q")
    why = "negative forgetting"
    assert call(["run", "small.toml", "--out", "one", *learns]) == 0
    said = capsys.readouterr().out
    assert why in said
    assert " -" in next(line for line in said.splitlines() if line.startswith("forgetting "))
    assert call(["compare", "small.toml", "--out", "all", *learns]) == 0
    assert why in capsys.readouterr().out
    assert "negative" in Path("all/report.html").read_text()
    assert call(["run", "small.toml", "--out", "two", "-q"]) == 0
    assert why not in capsys.readouterr().out, "a single round forgets nothing and gains nothing"


OWN = """
from dataclasses import dataclass
import fedstill

@dataclass(frozen=True)
class Mine(fedstill.Method):
    '''Averaging.'''

@dataclass(frozen=True)
class Other(fedstill.Method):
    '''Averaging, too.'''
"""


def test_what_is_ones_own_is_called_by_its_file_and_not_by_a_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.py").write_text(OWN)
    assert call(["run", "small.toml", "-s", "method=own.py:Mine", "--out", "one"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("own.py:Mine ")
    assert said.err.startswith("own.py:Mine: ")
    words = [
        "compare",
        "small.toml",
        "--methods",
        "own.py:Mine,own.py:Other",
        "--seeds",
        "1",
        "--out",
        "all",
    ]
    assert call(words) == 0, "two methods of one file are two"
    said = capsys.readouterr()
    for name in ("own.py:Mine", "own.py:Other"):
        assert f"\n{name} " in said.out
        assert f"{name}, seed 1: finished" in said.err
    for text in (said.out, said.err, Path("one/summary.json").read_text()):
        assert str(tmp_path) not in text
    assert len(list(Path("all").glob("*/seed1/summary.json"))) == 2


@pytest.mark.parametrize("words", ["a,b", "[a,b]", '["a","b"]', "a, b"])
def test_a_list_with_commas_is_a_list_where_one_is_wanted(words: str) -> None:
    settings = resolve(
        load(
            "small.toml",
            (f"data.columns={words}", "measure=local,personal", "data.label_column=x,y"),
        )
    )
    assert settings.data.columns == ("a", "b")
    assert settings.measure == ("local", "personal")
    assert settings.data.label_column == "x,y"
    assert 'columns = [\n    "a",\n    "b",\n]' in settings.toml


def test_what_was_typed_for_a_table_is_not_said_of_its_other_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = resolve(load("small.toml", ("data=digits", "partition=iid")))
    origins = {value.key: value.origin for value in resolved_values(settings)}
    assert (origins["data.name"], origins["data.kind"], origins["partition.kind"]) == (
        "command line",
        "default",
        "command line",
    )


@pytest.mark.uses("benchmark")
def test_the_maps_of_digits_say_nothing_of_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("t.csv").write_text("a,b,label\n" + "".join(f"{n},{n % 7},{n % 2}\n" for n in range(60)))
    monkeypatch.setattr(
        "fedstill.benchmark.maps.map_lines",
        lambda maps, method, here: [f"here {here}"],
    )
    for data, has_lines in (("t.csv", False), ("digits", True)):
        settings = ["-s", f"data={data}", "-s", "data.train_size=0", "-s", "partition=iid"]
        assert call(["explain", "small.toml", *settings]) == 0
        assert ("here Setting(" in capsys.readouterr().out) == has_lines


@pytest.mark.parametrize("words", [["resume", "run"], ["demo"], ["rank", "run", "digits"]])
def test_a_command_without_settings_says_what_to_do(
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
        pytest.param("why nothing", "e.g. runs/NAME", marks=WHY),
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
