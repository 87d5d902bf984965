"""Paths as people name them: ``~`` is the home folder, an empty one is refused, a directory without
a run is named.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedstill
import toys
from fedstill.cli import call
from fedstill.core.errors import ConfigError, NoRun, RunExists
from fedstill.core.files import named_path
from fedstill.running.runner import resume, run

CONFIG = (
    "rounds = 1\nmeasure = []\npartition = 'iid'\ntopology = { clients = 2 }\nmodel = 'logistic'\n"
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, beside an empty working directory."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def test_python_takes_a_path_from_the_home_folder_everywhere(home: Path) -> None:
    assert run(toys.toy(rounds=1), "~/runs/x", toys.blobs()).directory == home / "runs/x"
    assert (
        resume("~/runs/x").directory == fedstill.Result.of("~/runs/x").directory == home / "runs/x"
    )
    assert fedstill.load_model("~/runs/x").classes
    assert len(fedstill.Comparison.of("~/runs").groups) == 1
    (home / "my.toml").write_text(CONFIG)
    assert fedstill.load("~/my.toml").rounds == 1
    assert not list(Path().iterdir())


def test_a_command_takes_one_too(home: Path) -> None:
    (home / "my.toml").write_text(CONFIG)
    words = ["-s", "data.train_size=50", "-s", "data.test_size=50", "-q"]
    assert call(["run", "~/my.toml", "--out=~/x", *words]) == 0
    assert call(["report", "~/x", "--out=~/page.html"]) == 0
    assert (home / "x/summary.json").is_file()
    assert (home / "page.html").is_file()
    assert not list(Path().iterdir())


def test_a_home_folder_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="~nobody-of-that-name/x"):
        named_path("~nobody-of-that-name/x")


def test_a_result_in_place_of_its_directory_is_an_error(home: Path) -> None:
    result = run(toys.toy(rounds=1), "~/x", toys.blobs())
    for read in (fedstill.load_runs, fedstill.resume):
        with pytest.raises(ConfigError, match=r"not a Result; .*result\.directory"):
            read(result)
    with pytest.raises(ConfigError, match="not a list; pass one path"):
        fedstill.Comparison.of([result.directory])  # type: ignore[arg-type]


@pytest.mark.parametrize("words", [["--out", ""], ["--out="]])
def test_an_empty_option_is_no_directory(
    words: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "my.toml").write_text(CONFIG)
    assert call(["run", str(home / "my.toml"), *words, "-q"]) == 2
    assert (
        capsys.readouterr().err == "fedstill: --out has an empty value; give one, or leave it out\n"
    )


@pytest.mark.parametrize(
    "what", ["resume", pytest.param("load_model", marks=pytest.mark.uses("export"))]
)
def test_where_there_is_no_run_the_error_says_so(what: str, home: Path) -> None:
    with pytest.raises(NoRun, match="nix"):
        getattr(fedstill, what)("nix")
    folder = run(toys.toy(rounds=1), "all/toy/seed0", toys.blobs()).directory
    with pytest.raises(
        NoRun,
        match=rf"{folder}.*--out all",
    ):
        getattr(fedstill, what)("all")
    with pytest.raises(RunExists, match=r"^all "):
        run(toys.toy(rounds=1), "all", toys.blobs())
    with pytest.raises(RunExists, match="comparison"):
        run(toys.toy(rounds=1), "all", toys.blobs(), overwrite=True)


def test_a_folder_of_other_files_is_left_as_it_is(home: Path) -> None:
    (home / "thesis.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(RunExists, match=re.escape(str(home))) as caught:
            run(toys.toy(rounds=1), home, toys.blobs(), overwrite=overwrite)
        assert "resume" not in str(caught.value)
    assert [path.name for path in home.iterdir()] == ["thesis.txt"]
