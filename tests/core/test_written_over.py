"""What is there under a name that a person gives: written over where it is of the same kind,
refused elsewhere.
"""

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
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(toys.toy(rounds=1), tmp_path_factory.mktemp("done") / "run", toys.blobs()).directory


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


EXPORT = pytest.mark.uses("export")


@pytest.mark.parametrize(
    ("words", "name", "said"),
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
    words: str,
    name: str,
    said: str,
    done: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(CONFIG)
    assert call([w.replace("RUN", str(done)).replace("FILE", name) for w in words.split()]) == 2
    error = capsys.readouterr().err
    assert name in error
    assert said in error
    assert Path(name).read_bytes() == CONFIG
    assert not {"clients.parquet", "rounds.csv", "differences.csv"} & set(files_of(tmp_path))


@pytest.mark.uses("export")
def test_what_was_written_before_is_written_again(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.pt2").touch()
    page, tables = (
        f"report {done} --out page.html --tables tables",
        f"export {done} --csv csv --parquet parquet",
    )
    for _ in range(2):
        assert (
            call(page.split())
            == call(tables.split())
            == call(f"export {done} --pt2 m.pt2".split())
            == 0
        )


BYTES: dict[str, Callable[[Path], object]] = {
    "a symbolic link to nothing": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("make", BYTES)
@pytest.mark.parametrize("kind", [PAGE, ONNX, PROGRAM, MODEL])
def test_what_is_no_plain_file_is_not_written_over(make: str, kind: Kind, tmp_path: Path) -> None:
    BYTES[make](tmp_path / f"it{kind.ending}")
    with pytest.raises(ConfigError, match=f"it{kind.ending}"):
        check_may_overwrite(tmp_path / f"it{kind.ending}", kind)
