"""The directory of a run: its settings, overwriting, creating and locking it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from fedstill.core.errors import ConfigError, CorruptFile, DiskFull, NoRun, RunBusy, RunExists
from fedstill.core.files import (
    RUN_TABLE,
    counted,
    in_shell,
    is_leftover,
    open_to_read,
    read_file,
    read_toml,
    remove,
    shortened_list,
    write_note,
    write_whole,
)
from fedstill.core.registry import LIVE, short_name
from fedstill.core.user_modules import code_named_by, trust_code_of, trust_content
from fedstill.running.journal import CONFIG, JOURNAL

if TYPE_CHECKING:
    from fedstill.config.settings import Settings


# Reading the settings of an existing run.


@contextmanager
def code_of_run(folder: Path) -> Iterator[None]:
    """Within it, code that the run in a directory names is imported only if the user trusts it.

    The user trusts runs that they made on this machine, and those of ``trust_run``.
    """
    with code_named_by(folder / CONFIG, _config_bytes(folder)):
        yield


def trust_run(folder: Path) -> None:
    """Trust all code that the run in a directory names."""
    trust_code_of(_config_bytes(folder))


def _config_bytes(folder: Path) -> bytes:
    """The content of config.toml; empty if it cannot be read, which its readers report."""
    try:
        return read_file(folder / CONFIG)
    except OSError:
        return b""


def settings_of(folder: Path, **live: Any) -> Settings:
    """The settings of an existing run, from its config.toml.

    ``live``: the objects that the run got from Python, by table (``method``, ``model``,
    ``partition``).

    Raises NoRun if the directory contains no run, CorruptFile if config.toml is damaged,
    ConfigError for an object of another table, and for one that the run finds by its name.
    """
    # Lazy, because readers of journals need no settings, and torch takes long to import.
    from fedstill.config.experiment import OBJECT_TABLES, bind, from_tree
    from fedstill.config.named_tables import NAME_KEYS
    from fedstill.config.resolve import resolve
    from fedstill.core.method import Method

    path = folder / CONFIG
    try:
        tree = read_toml(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoRun(f"{folder} contains no run: {hint_without_run(folder)}") from error
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{path} cannot be read: {error}") from error

    for table, live_object in live.items():
        if table not in OBJECT_TABLES:
            raise ConfigError(f"resume accepts no {table}: the run's settings are in {path}")
        name = tree.get(table, {}).get(NAME_KEYS[table], "")
        if not name.startswith(LIVE):
            raise ConfigError(
                f"the run in {folder} imports its {table} {name!r} by name; leave out {table}="
            )
        # An instance of a method has the state of its run, so that a resumed run needs a new one.
        target = live_object
        if isinstance(live_object, Method):
            target = type(live_object)
        bind(table, name, target)
    with code_of_run(folder):
        return resolve(from_tree(tree, {}, folder), check_device=False)


def write_config(folder: Path, settings: Settings) -> None:
    """Write the settings of a run to its config.toml, and trust the code that they name."""
    config = settings.toml.encode()
    write_whole(folder / CONFIG, config)
    trust_content(config)


def runs_below(folder: Path) -> list[Path]:
    """The directories of the runs in the folder of a comparison, GROUP/seedN each."""
    return sorted(path.parent for path in folder.glob("*/seed*/config.toml"))


def hint_without_run(folder: Path) -> str:
    """Describe a path that is not the directory of a run, and what to do, for an error message."""
    runs = runs_below(folder)
    if runs:
        return (
            "it is the folder of several runs; name one of them, e.g. "
            f"{in_shell(runs[0])}, or continue all: repeat the command that began them, with --out "
            f"{in_shell(folder)}"
        )
    runs = sorted(path.parent for path in folder.glob("*/config.toml"))
    if runs:
        return f"it contains folders of runs; name one of them, e.g. {in_shell(runs[0])}"
    if folder.is_file():
        hint = "it is a file; name a run's directory"
        if folder.suffix == ".toml":
            hint += f"; `fedstill run {in_shell(folder)}` begins one"
        return hint
    problem = "there is no such directory"
    if (folder / CONFIG).is_file():
        problem = "it has no journal.jsonl"
    elif folder.is_dir():
        problem = "there is no config.toml in it"
    return f"{problem}; name the directory of a run, e.g. runs/NAME"


# Overwriting a run: only files that fedstill wrote are deleted.


_SHA256 = "[0-9a-f]{64}"
_CLIENT_STATE = r"client-?\d+-round\d+-stage\d+\.safetensors"
_SITE_FILE = rf"{_CLIENT_STATE}|\d{{7}}-\d{{7}}\.reply|noised|secure-sums?|tasks|\.lock"

RUN_FILES = re.compile(
    "|".join(
        [
            r"config\.toml",
            r"(journal|why)\.jsonl",
            r"(summary|trackers|sum-left|certificate)\.json",
            r"sums-name",
            r"(model|split)\.safetensors",
            r"report\.html",
            r"holder\.json|lock",
            rf"checkpoints(/(\d{{7}}-\d{{7}}\.json|LATEST|objects(/{_SHA256}\.safetensors)?))?",
            rf"(memory|updates)(/{_CLIENT_STATE})?",
            r"measures(/[^/]+\.safetensors)?",
            r"tensorboard(/events\.out\.tfevents\.[^/]+)?",
            rf"sites(/\w+(/client\d+(/({_SITE_FILE}))?)?)?",
        ]
    )
)
"""Paths, relative to a run's directory, of everything that a run, its report and ``fedstill why``
write there.
"""

EXPORTED_TABLES = ("rounds.csv", "clients.csv", "rounds.parquet", "clients.parquet")
"""Names of the tables that ``fedstill export`` writes, to any folder below a run's directory."""

CONFIG_TABLES = {"data", "partition", "topology", "model", "method", "clients", "plan"}
"""Tables that the config.toml of a run always contains, since it has every value.

One that a user wrote has only the values that differ from the defaults.
"""

LOCK_FILE = "lock"
"""The file that a process locks while it writes in a directory."""

HOLDER_FILE = "holder.json"
"""The file that names the process that holds the lock; deleted when the lock is released."""

FOLDERS_OF_TABLES = ("tables",)
"""Folders that fedstill writes in the folder of a comparison, besides its runs."""

IN_USE = (LOCK_FILE, HOLDER_FILE)
"""Files that are in use while a directory is cleared."""


@dataclass(frozen=True)
class DirectoryEntry:
    """A file or folder below the directory of a run."""

    name: str
    """Its path relative to the directory, with slashes."""
    path: Path


def clear(folder: Path) -> None:
    """Delete what fedstill wrote in a run's directory, which this process has locked.

    Raises RunExists, and deletes nothing, if the directory contains anything else, including files
    of the same names that are not a run's.
    """
    entries = _check_foreign(folder)
    # Without its config, nobody can resume the run. The journal is deleted last: it shows that the
    # directory is a run's, so that a clearing that was interrupted can be repeated.
    remove(folder / CONFIG)
    for entry in sorted(entries, key=lambda entry: entry.name == JOURNAL):
        if entry.name in IN_USE:
            continue
        if entry.path.is_dir():
            entry.path.rmdir()
        else:
            remove(entry.path)


def _check_foreign(folder: Path) -> list[DirectoryEntry]:
    """The entries of a run's directory, files before the folder that they are in.

    Raises RunExists if there is one that fedstill did not write.
    """
    entries = list(_entries_below(folder, folder))
    is_run = holds_run(folder)
    if not is_run:
        runs = runs_below(folder)
        if runs:
            raise RunExists(
                f"{folder} holds {counted(len(runs), 'run')} of a comparison, which a run does not "
                "overwrite; choose another folder"
            )

    allowed: set[Path] = set()
    if is_run:
        for entry in entries:
            if _is_exported_table(entry.path):
                allowed.update((entry.path, *entry.path.parents))
    foreign = sorted(
        entry.name
        for entry in entries
        if entry.path not in allowed and not _is_run_file(entry, is_run)
    )
    if foreign:
        raise RunExists(
            f"{folder} holds files that no run wrote, so nothing is overwritten: "
            f"{shortened_list(foreign, most=5)}; move it away first"
        )
    return entries


def _entries_below(folder: Path, top: Path) -> Iterator[DirectoryEntry]:
    """All files and folders in a folder, each folder after its content.

    Links are not followed. Names are relative to ``top``.
    """
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _entries_below(path, top)
        yield DirectoryEntry(path.relative_to(top).as_posix(), path)


def _is_run_file(entry: DirectoryEntry, is_run: bool) -> bool:
    """Whether fedstill wrote an entry; ``is_run``: whether it is in the directory of a run."""
    path = entry.path
    if path.is_symlink():
        return False
    if is_leftover(path) or entry.name in IN_USE:
        return True
    # A user may have saved a page of their own under this name.
    if entry.name == "report.html" and b"Made by fedstill" not in read_file(path):
        return False
    return is_run and RUN_FILES.fullmatch(entry.name) is not None


def _is_exported_table(path: Path) -> bool:
    """Whether ``fedstill export`` wrote this file: such tables contain a mark of fedstill."""
    if path.is_symlink() or path.name not in EXPORTED_TABLES or not path.is_file():
        return False
    return RUN_TABLE.mark.search(read_file(path)) is not None


def holds_run(folder: Path) -> bool:
    """Whether a run has started in a directory.

    Its journal shows this or, if the run has not written its journal yet, a complete config.toml.
    """
    try:
        with open_to_read(folder / JOURNAL) as journal:
            if journal.readline().startswith(b'{"event":"start"'):
                return True
    except OSError:
        pass
    try:
        return set(read_toml(folder / CONFIG)) >= CONFIG_TABLES
    except (OSError, ValueError):
        return False


# Creating and locking the directory of a run, or the folder of a comparison: one process at a time
# writes in it.


ANOTHER_DIRECTORY = "choose another directory with out="
"""Advice about a directory that cannot be used, in Python."""

ANOTHER_OUT = "choose another --out"
"""The same advice on the command line."""


def _messages(problem: str) -> tuple[str, str]:
    """The two texts of an error about a directory: for Python and for the command line."""
    return f"{problem}; {ANOTHER_DIRECTORY}", f"{problem}; {ANOTHER_OUT}"


def new_directory(settings: Settings, out: Path | None, overwrite: bool = False) -> Path:
    """Create the directory of a new run: ``out``, or a new one in ``runs``.

    Raises RunExists if ``out`` is not empty, unless it holds a run and ``overwrite`` is set;
    ConfigError if the directory cannot be created, and for ``overwrite`` without ``out``.
    """
    if overwrite and out is None:
        raise ConfigError(
            "overwrite=True needs out=, the run's directory", "--overwrite needs --out"
        )
    base = Path("runs") / _base_name(settings)
    try:
        if out is None:
            return _make_numbered(base)
        _make_empty(out, overwrite)
    except FileExistsError as error:
        raise RunExists(*_messages(f"{out or base.parent} is a file")) from error
    except OSError as error:
        problem = f"cannot make the run's directory {out or base}: {error.strerror}"
        raise ConfigError(*_messages(problem)) from error
    return out


def _base_name(settings: Settings) -> str:
    """The name of a run's directory without its number: method, data and seed."""
    # A method or a data set from a user's file is called PATH:NAME. Neither "/" nor ":" may be in
    # the name of a directory on all systems.
    method = settings.named.method.name.rpartition("/")[2].replace(":", "-")
    data = short_name(settings.data.name).replace("/", "-").replace(":", "-")
    return f"{method}-{data}-seed{settings.seed}"


def _make_numbered(base: Path) -> Path:
    """Create the first of BASE-1, BASE-2, … that does not exist."""
    base.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = base.with_name(f"{base.name}-{number}")
        # Other processes may choose a directory at the same time: only one of them can create it.
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _make_empty(folder: Path, overwrite: bool) -> None:
    """Create a directory, or clear it for ``overwrite``; raises RunExists if it is not empty."""
    folder.mkdir(parents=True, exist_ok=True)
    if overwrite:
        # Checked before the lock is made, so that a directory of other files remains unchanged.
        _check_foreign(folder)
        with locked(folder):
            clear(folder)
    check_used(folder)


def check_used(folder: Path) -> None:
    """Raise RunExists if a directory is not empty.

    The files of the lock do not count, and neither do temporary files of a killed process.
    """
    is_empty = all(path.name in IN_USE or is_leftover(path) for path in folder.iterdir())
    if is_empty:
        return
    if not holds_run(folder):
        raise RunExists(*_messages(f"{folder} is not empty and contains no run"))
    raise RunExists(
        f"{folder} is not empty; {ANOTHER_DIRECTORY}, continue with "
        f"fedstill.resume({str(folder)!r}), or start again with overwrite=True",
        f"{folder} is not empty; {ANOTHER_OUT}, continue with "
        f"`fedstill resume {in_shell(folder)}`, or start again with --overwrite",
    )


def check_no_links(folder: Path) -> None:
    """Raise ConfigError for a link, a pipe or a device among the files that fedstill writes.

    A stranger may have put a link there, so that fedstill would write or delete files elsewhere.
    The directory itself may be a link.
    """
    for entry in _written_entries(folder, folder):
        if entry.path.is_symlink() or not (entry.path.is_file() or entry.path.is_dir()):
            raise ConfigError(
                f"{entry.path} is a link, a pipe or a device, so nothing is written in {folder}; "
                "replace it by a real file or folder"
            )


def _written_entries(folder: Path, top: Path) -> Iterator[DirectoryEntry]:
    """The entries below a folder that have the names of files or folders of fedstill."""
    for path in folder.iterdir():
        name = path.relative_to(top).as_posix()
        is_written = RUN_FILES.fullmatch(name) is not None or name in FOLDERS_OF_TABLES
        if is_written or is_leftover(path):
            yield DirectoryEntry(name, path)
            if path.is_dir() and not path.is_symlink():
                yield from _written_entries(path, top)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's directory against other processes.

    The operating system releases the lock if this process is killed.

    Raises NoRun if there is no such directory, RunBusy if another process has locked it,
    ConfigError if it cannot be written, or if it has a link where fedstill writes.
    """
    if not folder.is_dir():
        raise NoRun(f"there is no directory {folder}")
    check_no_links(folder)
    lock = FileLock(folder / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise RunBusy(
            f"{folder} is being written by another process{_holder_text(folder)}; wait for it, or "
            "end it"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot write in {folder}: {error.strerror}; make it writable"
        ) from error
    try:
        # The lock holds without this file, which only makes the message of RunBusy clearer.
        with contextlib.suppress(OSError, DiskFull):
            write_note(folder / HOLDER_FILE, json.dumps(_this_process()).encode())
        yield
    finally:
        with contextlib.suppress(DiskFull):
            remove(folder / HOLDER_FILE)
        lock.release()


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Create the folder of a comparison, if it does not exist, and lock it against other processes.

    Raises RunExists if it is a file or the directory of a run, ConfigError if it cannot be created
    or written, RunBusy if another process has locked it.
    """
    if holds_run(folder):
        raise RunExists(*_messages(f"{folder} is the directory of a single run"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise RunExists(*_messages(f"{folder} is a file")) from error
    except OSError as error:
        problem = f"cannot make the folder {folder}: {error.strerror}"
        raise ConfigError(*_messages(problem)) from error
    with locked(folder):
        yield


def _this_process() -> dict[str, str | int]:
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _holder_text(folder: Path) -> str:
    """Describe the process that locked a folder; empty if the file that names it is missing."""
    try:
        holder = json.loads(read_file(folder / HOLDER_FILE))
        process = int(holder["process"])
        # Shortened, since a file of another program may have this name.
        host = str(holder["host"])[:100]
        since = str(holder["since"])[:30]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return f", {process} on {host} since {since}"
