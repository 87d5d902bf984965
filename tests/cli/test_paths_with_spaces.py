"""A command that a message names can be pasted into a shell, whatever the path is called."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fedstill.cli import call


def test_a_run_in_a_folder_with_a_space_names_a_command_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my runs" / "first one"
    (tmp_path / "a.toml").write_text("")
    run = [
        "run",
        str(tmp_path / "a.toml"),
        "-s",
        "rounds=1",
        "-s",
        "topology.clients=2",
        "--out",
        str(folder),
    ]
    assert call(run) == 0
    capsys.readouterr()
    assert call(run) == 2
    said = re.search(r"`(fedstill resume .*?)`", capsys.readouterr().err.replace("\n", " "))
    assert said is not None
    program, *words = shlex.split(said[1])
    assert program == "fedstill"
    assert words == ["resume", str(folder)]
    assert call(words) == 0
