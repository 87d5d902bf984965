"""TOML files as editors on Windows write them, paths of Windows, and errors that name the path that
was read.
"""

from __future__ import annotations

import ast
import codecs
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import fedstill
import tiny_ranking
import toys
from fedstill.benchmark.competing import CHOICES_FILE, with_stored_choices
from fedstill.benchmark.suites import read_suite
from fedstill.cli import call
from fedstill.config.experiment import load
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, DataAbsent
from fedstill.core.files import parse_toml, read_toml
from fedstill.data.sources import load_dataset
from fedstill.flower.deployment import folder as federations
from fedstill.flower.site_settings import load_site
from fedstill.running.directory import settings_of
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

IN_MEMORY = {
    "benchmark/entries.py": "configs of an entry, whose digests are compared first",
    "benchmark/recipes.py": "files of the package",
    "benchmark/replays.py": "settings of a run, as text",
    "config/overrides.py": "lines of a file that has been read",
    "config/validation.py": "values of the command line",
    "core/files.py": "the one function for files",
}
"""The modules that may call tomllib."""


def with_mark(path: Path) -> None:
    """Begin a file with a byte order mark, as Notepad does."""
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())


def test_one_function_reads_toml_files() -> None:
    package = Path(fedstill.__file__).parent
    callers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_import = isinstance(node, ast.Import) and node.names[0].name == "tomllib"
            if is_import or (isinstance(node, ast.ImportFrom) and node.module == "tomllib"):
                callers.add(path.relative_to(package).as_posix())
    assert callers == set(IN_MEMORY)


def a_config(folder: Path) -> Path:
    path = folder / "my.toml"
    path.write_text("seed = 5\n", encoding="utf-8")
    return path


def a_site(folder: Path) -> Path:
    path = folder / "site.toml"
    path.write_text('client = 0\nmemory = "memory"\n', encoding="utf-8")
    return path


def a_suite(folder: Path) -> Path:
    path = folder / "clinics.toml"
    path.write_text(tiny_ranking.TINY, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("write", "read"),
    [(a_config, load), (a_site, load_site), (a_suite, read_suite)],
    ids=["config", "site.toml", "suite"],
)
def test_a_mark_at_the_beginning_is_no_content(
    write: Callable[[Path], Path], read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = write(tmp_path)
    expected = read(path)
    with_mark(path)
    assert read(path) == expected


def test_a_federation_whose_files_were_edited_on_windows(tmp_path: Path) -> None:
    made = federations.init(
        tmp_path / "fed", 1, ["localhost"], listen="127.0.0.1", port=8443, version="0"
    )
    member = federations.membership(made.client(0))
    for path in made.folder.rglob("*.toml"):
        with_mark(path)
    assert federations.load_federation(made.folder) == made
    assert federations.membership(made.client(0)) == member
    assert load_site(made.client(0) / "site.toml").client == 0


def test_a_run_whose_config_was_saved_on_windows(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(toys.toy(rounds=1), folder, toys.blobs())
    with_mark(folder / "config.toml")
    assert settings_of(folder).rounds == 1


def test_what_was_chosen_for_a_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = replace(tiny_ranking.install(monkeypatch), choices={})
    path = tmp_path / suite.name / CHOICES_FILE
    path.parent.mkdir()
    path.write_text(
        "version = 1\n[FedAvg]\nscores = [[0.5, 0.5, 0.5], [0.9, 0.9, 0.9]]\nsent = [1, 1]\n"
        'fields = { "plan.lr" = 0.1 }\n'
    )
    with_mark(path)
    assert with_stored_choices(suite, tmp_path).choices["FedAvg"].scores[1] == (0.9, 0.9, 0.9)

    path.write_text("[FedAvg\n")
    with pytest.raises(ConfigError, match=CHOICES_FILE):
        with_stored_choices(suite, tmp_path)


def test_another_encoding_is_named() -> None:
    with pytest.raises(ValueError, match="UTF-16"):
        parse_toml("seed = 5\n".encode("utf-16"))


WINDOWS = r"C:\Users\me\data.csv"


@pytest.fixture
def wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: "5.15.153.1-microsoft-standard-WSL2")


@pytest.mark.usefixtures("wsl")
@pytest.mark.parametrize("quoted", [f'"{WINDOWS}"', r'"C:\data\x.csv"'])
def test_a_windows_path_in_double_quotes(quoted: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(f"# a comment\n[data]\nname = {quoted}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 3.*single quotes.*/mnt/c/") as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_other_wrong_lines_get_no_advice_on_paths(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('seed = \n[data]\nname = "C:/data.csv"\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1") as caught:
        read_toml(path)
    assert "quotes" not in str(caught.value)


@pytest.mark.usefixtures("wsl")
@pytest.mark.parametrize(
    ("line", "key", "in_wsl"),
    [
        (f"data = {{name = '{WINDOWS}'}}", "data.name", "/mnt/c/Users/me/data.csv"),
        ('data = {name = "C:/me/x.csv"}', "data.name", "/mnt/c/me/x.csv"),
        # In double quotes these two backslashes begin the end of a line and a tab.
        (r'data = {name = "D:\new\table.csv"}', "data.name", "/mnt/d/new/table.csv"),
        (r"data = {folder = 'C:\me'}", "data.folder", "/mnt/c/me"),
        (r"start_from = 'C:\me\run'", "start_from", "/mnt/c/me/run"),
        (r"method = 'C:\me\mine.py'", "method", "/mnt/c/me/mine.py"),
        (r"model = {name = 'C:\me\mine.py:Net'}", "model", "/mnt/c/me/mine.py:Net"),
    ],
)
def test_a_windows_path_is_no_import_path(line: str, key: str, in_wsl: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ConfigError, match=key) as caught:
        resolve(load(path))
    assert in_wsl in str(caught.value)


@pytest.mark.usefixtures("wsl")
def test_a_windows_path_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", r"C:\me\my.toml"]) == 2
    assert "/mnt/c/me/my.toml" in capsys.readouterr().err


@pytest.mark.usefixtures("wsl")
@pytest.mark.parametrize("key", ["data", "public", "tokenizer", "memory"])
def test_a_windows_path_at_a_site(key: str, tmp_path: Path) -> None:
    values = {"client": "0", "memory": "'memory'", key: f"'{WINDOWS}'"}
    path = tmp_path / "site.toml"
    path.write_text("\n".join(f"{k} = {v}" for k, v in values.items()), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{key} = .*/mnt/c/Users/me/data.csv"):
        load_site(path)


@pytest.mark.parametrize(
    "name", ["dta.csv", "./dta", "a/b/dta.parquet", "../dta.npz", "my.py:data"]
)
def test_an_absent_file_is_named_beside_the_config(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    home = tmp_path / "configs"
    home.mkdir()
    monkeypatch.chdir(elsewhere)
    (home / "my.toml").write_text(f'data = "{name}"\n', encoding="utf-8")
    place = (home / name.partition(":")[0]).resolve()
    with pytest.raises((DataAbsent, ConfigError), match=str(place)):
        prepare(resolve(load(home / "my.toml")))

    (home / "site.toml").write_text(f'client = 0\nmemory = "m"\ndata = "{name}"\n')
    with pytest.raises((DataAbsent, ConfigError), match=str(place)):
        load_dataset(load_site(home / "site.toml").data)


def test_a_folder_of_data_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets" / "odd.csv").mkdir(parents=True)
    path = tmp_path / "my.toml"
    for name in ("owner/name", "odd.csv"):
        path.write_text(f'data = {{name = "{name}", folder = "sets"}}\n', encoding="utf-8")
        assert resolve(load(path)).data.name == name
