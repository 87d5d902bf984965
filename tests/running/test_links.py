"""Nothing outside a folder is written, deleted or read through a link that a stranger put into
it.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

import fedstill
import toys
from fedstill.core import files
from fedstill.core.errors import ConfigError, CorruptFile, DiskFull, FedstillError
from fedstill.report.page import write_page
from fedstill.running.directory import claimed, locked
from fedstill.running.journal import Journal, read_journal
from fedstill.running.runner import resume
from forking import SETTINGS
from run_bits import StoppedCopy

SECRET = "the user's own"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of the user, outside the runs."""
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("thesis.txt", "client0-round1-stage0.safetensors", "0000001-0000000.json"):
        (folder / name).write_text(SECRET)
    return folder


def assert_untouched(home: Path) -> None:
    """Assert that the folder has the files that the fixture wrote, and no other."""
    assert len(list(home.iterdir())) == 3
    assert {path.read_text() for path in home.iterdir()} == {SECRET}


@pytest.fixture
def strange(stopped_copy: StoppedCopy) -> Path:
    """The directory of a run that can be resumed."""
    return stopped_copy("parallel")


@pytest.mark.parametrize("name", ["holder.json", "lock", "why.jsonl", "summary.json"])
def test_a_resumed_run_writes_through_no_link(name: str, strange: Path, home: Path) -> None:
    (strange / name).unlink(missing_ok=True)
    (strange / name).symlink_to(home / "thesis.txt")
    with pytest.raises(FedstillError, match=name):
        resume(strange, data=toys.blobs())
    assert_untouched(home)


@pytest.mark.parametrize(
    "name", ["memory", "updates", "checkpoints/objects", "measures", "sites", "tensorboard"]
)
def test_a_resumed_run_deletes_nothing_through_a_link(name: str, strange: Path, home: Path) -> None:
    if (strange / name).exists():
        (strange / name).rename(strange / "away")
    (strange / name).symlink_to(home)
    with pytest.raises(ConfigError, match=name):
        resume(strange, data=toys.blobs())
    assert_untouched(home)


@pytest.mark.parametrize("name", ["memory", "updates", "checkpoints", "checkpoints/objects"])
def test_a_run_writes_and_deletes_nothing_through_a_link_that_replaces_a_folder_meanwhile(
    name: str, tmp_path: Path, home: Path
) -> None:

    def plant(event: object) -> None:
        path = tmp_path / "run" / name
        path.rename(tmp_path / "away")
        path.symlink_to(home)

    with pytest.raises((CorruptFile, DiskFull), match=name):
        fedstill.run(SETTINGS["kept_updates"], tmp_path / "run", data=toys.blobs(), on_round=plant)
    assert_untouched(home)


@pytest.mark.parametrize("is_late", [False, True])
def test_files_are_deleted_in_a_real_folder_only(is_late: bool, tmp_path: Path, home: Path) -> None:
    """Also if the link comes after the folder was opened."""
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "thesis.txt").write_text("old")

    def plant() -> None:
        folder.rename(tmp_path / "away")
        folder.symlink_to(home)

    def is_unneeded(name: str) -> bool:
        if is_late:
            plant()
        return True

    if is_late:
        assert files.remove_files(folder, is_unneeded) == ["thesis.txt"]
        assert not list((tmp_path / "away").iterdir())
    else:
        plant()
        with pytest.raises(DiskFull, match="memory"):
            files.remove_files(folder, is_unneeded)

    assert_untouched(home)


@pytest.mark.parametrize("name", ["holder.json", "lock", "tables"])
def test_the_folder_of_a_comparison_has_no_links(name: str, tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "comparison"
    folder.mkdir()
    (folder / name).symlink_to(home / "thesis.txt")
    with pytest.raises(ConfigError, match=name), claimed(folder):
        pass
    assert_untouched(home)


def test_a_directory_may_be_a_link_itself(strange: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(strange)
    with locked(tmp_path / "alias"):
        pass


def test_a_file_is_not_written_through_links(tmp_path: Path, home: Path) -> None:
    """Neither under its name, nor under the one that it has while it is written."""
    target = home / "thesis.txt"
    for pid in (os.getpid(), "guess"):
        (tmp_path / f".report.html.{pid}.part").symlink_to(target)
    (tmp_path / "report.html").symlink_to(target)
    files.write_whole(tmp_path / "report.html", b"new")

    assert_untouched(home)
    assert not (tmp_path / "report.html").is_symlink()


def test_a_report_replaces_no_foreign_file(strange: Path, tmp_path: Path, home: Path) -> None:
    (tmp_path / "report.html").symlink_to(home / "thesis.txt")
    with pytest.raises(ConfigError, match=r"report\.html"):
        write_page([strange], tmp_path / "report.html")
    assert_untouched(home)


def test_a_name_that_is_taken_is_not_opened(tmp_path: Path, home: Path) -> None:
    link = tmp_path / "taken"
    link.symlink_to(home / "new")
    with pytest.raises(FileExistsError):
        files.create_file(link)
    with pytest.raises(DiskFull, match="taken"):
        Journal(link)
    assert_untouched(home)


def test_pipes_and_devices_are_neither_read_nor_written(tmp_path: Path) -> None:
    pipe = tmp_path / "journal.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(CorruptFile, match=r"journal\.jsonl"):
        read_journal(pipe)
    with pytest.raises(DiskFull, match=r"journal\.jsonl"):
        Journal(pipe)
    with pytest.raises(OSError, match="regular"):
        files.read_file(Path("/dev/zero"))


def test_a_pipe_as_a_config_is_an_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=r"config\.toml"):
        fedstill.load(tmp_path / "config.toml")
    os.mkfifo(tmp_path / "journal.jsonl")
    with pytest.raises(CorruptFile, match=r"config\.toml"):
        resume(tmp_path)


@pytest.mark.parametrize("text", ["a{}=1", "[a{}]", "x.'a'{}=1"])
def test_a_config_that_would_take_minutes_to_parse_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(text.format(".a" * 50_000))
    with pytest.raises(ConfigError, match=r"config\.toml"):
        fedstill.load(tmp_path / "config.toml")


WRITING = {"write_text", "write_bytes", "rmtree", "unlink", "symlink_to", "copytree", "copyfile"}
WRITING_MODE = re.compile("(?=.*[wax+])[rwaxbt+]+")
"""A mode of ``open`` that may change a file."""

ELSEWHERE = {("running/packs.py", "copytree")}
"""Calls whose target is in a new temporary folder."""


def test_only_one_module_writes_and_deletes() -> None:
    """The other modules use ``core/files.py``, which follows no link."""
    package = Path(fedstill.__file__).parent
    calls = set()
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        if name == "core/files.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _writes(node):
                calls.add((name, getattr(node.func, "attr", "open")))

    assert calls == ELSEWHERE


def _writes(call: ast.Call) -> bool:
    """Whether a call changes files: by its name, or because it opens a file in such a mode."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name != "open":
        return name in WRITING
    texts = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    return any(WRITING_MODE.fullmatch(str(text)) for text in texts)
