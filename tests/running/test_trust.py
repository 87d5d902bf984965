"""Code that a stranger's run directory or model file names runs only once the user trusts it."""

from __future__ import annotations

import importlib.util
import json
import py_compile
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import toys
from fedstill.attribution.class_changes import find_changes
from fedstill.cli import call
from fedstill.core import user_modules
from fedstill.core.errors import UntrustedCode
from fedstill.core.files import digest
from fedstill.export.loading import load_model
from fedstill.querying.answers import answer_query
from fedstill.running.directory import settings_of
from fedstill.running.model_files import read_model
from fedstill.running.replay import Replay
from fedstill.running.runner import resume, run
from fedstill.running.same_run import other_settings

PARTITION = """
from helper import stride

def mine(labels, clients):
    return [range(c, len(labels), stride(clients)) for c in range(clients)]
"""
HELPER = "def stride(clients):\n    return clients\n"
PAYLOAD = "__import__('pathlib').Path({!r}).write_text('ran')\n"
"""Hostile code, which writes a file."""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file that hostile code writes."""
    return tmp_path / "marker"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which fedstill records what the user trusts."""
    monkeypatch.setenv(user_modules.STATE, str(tmp_path / "state"))
    monkeypatch.setattr(user_modules, "_used", set())
    monkeypatch.setattr(user_modules, "_trusted_names", set())
    return tmp_path / "state"


@pytest.fixture
def own_run(tmp_path: Path, state: Path) -> Path:
    """A run of the user, whose split comes from their own file."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "mine.py").write_text(PARTITION)
    (code / "helper.py").write_text(HELPER)
    experiment = toys.toy(
        "local_only", rounds=1, topology={"clients": 2}, partition=f"{code}/mine.py:mine"
    )
    run(experiment, tmp_path / "run", data=toys.blobs())
    return tmp_path / "run"


def as_stranger(folder: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same run, as a stranger sends it: its code is hostile, and the user trusts none of it."""
    user_modules._used.clear()
    monkeypatch.setenv(user_modules.STATE, str(marker.with_name("another-state")))
    poison(folder.with_name("code") / "mine.py", marker)
    return folder


def poison(file: Path, marker: Path) -> None:
    """Put hostile code at the beginning of a file."""
    file.write_text(PAYLOAD.format(str(marker)) + file.read_text())


USES: dict[str, Callable[[Path], object]] = {
    "resume": lambda folder: resume(folder, data=toys.blobs()),
    "load_model": lambda folder: load_model(folder, client=0),
    "query": lambda folder: answer_query(folder, 0, [1], data=toys.blobs()),
    "replay": lambda folder: Replay.of_round(folder, 1, toys.blobs()),
    "why": lambda folder: find_changes(folder, None, None),
    "compare": lambda folder: other_settings(settings_of(folder), folder),
}


@pytest.mark.parametrize("use", USES)
def test_a_strangers_run_runs_no_code(
    use: str, own_run: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = as_stranger(own_run, marker, monkeypatch)
    with pytest.raises(UntrustedCode, match=r"config\.toml.*mine\.py.*trust_code"):
        USES[use](folder)
    assert not marker.exists()


COMMANDS = [
    ["resume"],
    ["export", "--folder", "out", "--client", "0"],
    ["why"],
    ["query", "--client", "0", "--classes", "1"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_commands_name_the_file_and_the_option(
    command: list[str],
    own_run: Path,
    marker: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = as_stranger(own_run, marker, monkeypatch)
    monkeypatch.chdir(folder.parent)
    assert call([command[0], str(folder), *command[1:]]) == 2

    text = " ".join(capsys.readouterr().err.split())
    assert "mine.py" in text
    assert "--trust-code" in text
    assert not marker.exists()


@pytest.mark.parametrize("name", ["os:system", "subprocess:run", "posix:system"])
@pytest.mark.parametrize("key", ["model", "partition", "method"])
def test_installed_modules_are_code_too(key: str, name: str, own_run: Path) -> None:
    config = own_run / "config.toml"
    pattern = {"partition": r'kind = ".*"'}.get(key, r'name = ".*"')
    start, _, table = config.read_text().partition(f"[{key}]\n")
    hostile_table = re.sub(pattern, f'{pattern[:4]} = "{name}"', table, count=1)
    config.write_text(f"{start}[{key}]\n{hostile_table}")

    with pytest.raises(UntrustedCode, match=rf"config\.toml.*{name.partition(':')[0]}"):
        settings_of(own_run)


def test_own_runs_are_trusted_until_a_file_changes(own_run: Path, marker: Path) -> None:
    """Also one that the file itself imports from its folder."""
    user_modules._used.clear()
    load_model(own_run, client=0)
    for name in ("helper.py", "mine.py"):
        file = own_run.with_name("code") / name
        source = file.read_text()
        poison(file, marker)
        with pytest.raises(UntrustedCode, match=name):
            load_model(own_run, client=0)
        assert not marker.exists()
        file.write_text(source)
    load_model(own_run, client=0)


def test_modules_of_a_folder_in_site_packages_are_checked_too(
    tmp_path: Path, state: Path, marker: Path
) -> None:
    """A stranger chooses the names of folders, and trusted code may import from its folder."""
    code = tmp_path / "site-packages" / "run"
    code.mkdir(parents=True)
    (code / "mine.py").write_text("import hostile_neighbour\n")
    (code / "hostile_neighbour.py").write_text(PAYLOAD.format(str(marker)))
    config = b"a config that names mine.py"
    user_modules._note_trusted({digest(config), digest((code / "mine.py").read_bytes())})

    with (
        user_modules.code_named_by(tmp_path / "config.toml", config),
        pytest.raises(UntrustedCode, match=r"hostile_neighbour\.py"),
    ):
        user_modules.module_of_file(code / "mine.py")
    assert not marker.exists()


def test_the_list_of_trusted_code_may_be_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FEDSTILL_STATE", "~/state")
    user_modules._note_trusted({"0" * 64})
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert user_modules._trusted() == {"0" * 64}


def test_trusted_code_of_another_config_is_not_trusted(own_run: Path) -> None:
    """A stranger may name the user's own file, with other arguments."""
    config = own_run / "config.toml"
    config.write_text(f"{config.read_text()}\n# by a stranger\n")
    with pytest.raises(UntrustedCode, match=r"mine\.py"):
        settings_of(own_run)


def test_trust_is_asked_for_once(
    own_run: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = as_stranger(own_run, marker, monkeypatch)
    load_model(folder, client=0, trust_code=True)
    assert marker.exists()
    monkeypatch.setattr(user_modules, "_trusted_names", set())
    load_model(folder, client=0)


def test_a_cached_module_does_not_replace_the_source(own_run: Path, marker: Path) -> None:
    """Its time and size say that it belongs to the source."""
    code = own_run.with_name("code")
    source = code / "helper.py"
    fake = code / "fake.py"
    fake.write_text(PAYLOAD.format(str(marker)))
    py_compile.compile(str(fake), importlib.util.cache_from_source(str(source)))
    cached = Path(importlib.util.cache_from_source(str(source)))
    status = source.stat()
    time_stamp = int(status.st_mtime).to_bytes(4, "little")
    size_stamp = status.st_size.to_bytes(4, "little")
    content = cached.read_bytes()
    cached.write_bytes(content[:8] + time_stamp + size_stamp + content[16:])
    for name in [name for name, module in sys.modules.items() if _is_below(module, code)]:
        del sys.modules[name]
    load_model(own_run, client=0)

    assert not marker.exists()


def _is_below(module: object, folder: Path) -> bool:
    """Whether the file of a module is below a folder."""
    return Path(getattr(module, "__file__", None) or "/").is_relative_to(folder)


def test_a_strangers_model_file_runs_no_code(tmp_path: Path, state: Path) -> None:
    spec = {"name": "os:system", "input_shape": [1, 2, 2], "classes": 2}
    path = tmp_path / "model.safetensors"
    tensors = {"weight": torch.zeros(1)}
    path.write_bytes(safetensors.torch.save(tensors, {"fedstill_model": json.dumps(spec)}))
    with pytest.raises(UntrustedCode, match=r"model\.safetensors"):
        read_model(path)


def test_only_the_user_can_read_and_write_the_file_of_trusted_code(
    own_run: Path, state: Path
) -> None:
    trusted = state / user_modules.TRUSTED
    assert stat.S_IMODE(trusted.stat().st_mode) == 0o600
    assert digest((own_run / "config.toml").read_bytes()) in trusted.read_text().split()
    trusted.chmod(0o666)
    with pytest.raises(UntrustedCode, match=r"mine\.py"):
        settings_of(own_run)


def test_a_run_without_code_notes_nothing(tmp_path: Path, state: Path) -> None:
    run(toys.toy("fedavg", rounds=1), tmp_path / "run", data=toys.blobs())
    assert not state.exists()
