"""Commands overwrite only files of the kind that they write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import toys
from fedstill.cli import call
from fedstill.core.errors import ConfigError
from fedstill.core.files import MODEL, ONNX, PAGE, PROGRAM, Kind, check_may_overwrite
from fedstill.running.runner import run

CONFIG = b"rounds = 1\n"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one round."""
    folder = tmp_path_factory.mktemp("done") / "run"
    return run(toys.toy(rounds=1), folder, toys.blobs()).directory


EXPORT = pytest.mark.uses("export")


@pytest.mark.parametrize(
    ("command", "name", "kind"),
    [
        ("report RUN --out FILE", "copy.toml", "a page that fedstill made"),
        ("report RUN --out page.html --tables .", "results.csv", "a table that fedstill wrote"),
        ("report RUN --out page.html --tables .", "results.md", "a table that fedstill wrote"),
        ("report RUN --out page.html --tables .", "differences.tex", "a table that fedstill wrote"),
        pytest.param("export RUN --csv .", "clients.csv", "a run's table", marks=EXPORT),
        pytest.param("export RUN --parquet .", "rounds.parquet", "a run's table", marks=EXPORT),
        pytest.param("export RUN --onnx FILE", "data.csv", "an ONNX model", marks=EXPORT),
        pytest.param(
            "export RUN --pt2 FILE", "data.csv", "a program of torch.export", marks=EXPORT
        ),
        pytest.param(
            "query RUN --client 1 --classes 1 --out FILE",
            "weights.safetensors",
            "a model that `fedstill query` wrote",
            marks=pytest.mark.uses("querying"),
        ),
    ],
)
def test_a_file_of_another_kind_stays_as_it_is(
    command: str,
    name: str,
    kind: str,
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(CONFIG)
    values = {"RUN": str(finished_run), "FILE": name}
    arguments = [values.get(word, word) for word in command.split()]

    assert call(arguments) == 2

    error = capsys.readouterr().err
    assert name in error
    assert kind in error
    assert Path(name).read_bytes() == CONFIG
    for other_file in ("clients.parquet", "rounds.csv", "differences.csv"):
        assert not list(tmp_path.rglob(other_file))


@pytest.mark.uses("export")
def test_files_that_a_command_has_written_are_written_again(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.pt2").touch()
    run_name = str(finished_run)
    for _ in range(2):
        assert call(["report", run_name, "--out", "page.html", "--tables", "tables"]) == 0
        assert call(["export", run_name, "--csv", "csv", "--parquet", "parquet"]) == 0
        assert call(["export", run_name, "--pt2", "m.pt2"]) == 0


SPECIAL_FILES: dict[str, Callable[[Path], object]] = {
    "a symbolic link to nothing": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("special", SPECIAL_FILES)
@pytest.mark.parametrize("kind", [PAGE, ONNX, PROGRAM, MODEL])
def test_special_files_are_not_overwritten(special: str, kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / f"it{kind.ending}"
    SPECIAL_FILES[special](path)
    with pytest.raises(ConfigError, match=path.name):
        check_may_overwrite(path, kind)
