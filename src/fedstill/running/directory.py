"""The directory of a run: its settings, overwriting, creating, locking and packing it.

A pack is a compressed file with the small files of all runs in a folder. Commands that read runs
accept it in place of the folder.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import io
import itertools
import json
import logging
import lzma
import os
import re
import shutil
import socket
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Literal

from filelock import FileLock, Timeout

from fedstill.core.errors import ConfigError, CorruptFile, DiskFull, NoRun, RunBusy, RunExists
from fedstill.core.files import (
    RUN_TABLE,
    cache_folder,
    create_file,
    in_shell,
    is_leftover,
    make_folder,
    open_to_read,
    read_file,
    read_toml,
    remove,
    write_note,
    write_whole,
)
from fedstill.core.registry import LIVE, short_name
from fedstill.core.user_modules import code_named_by, trust_code_of, trust_content
from fedstill.running.journal import CONFIG, JOURNAL, SUMMARY
from fedstill.running.split_file import SPLIT

if TYPE_CHECKING:
    from fedstill.config.settings import Settings

log = logging.getLogger("fedstill.pack")


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
            "it is the folder of a comparison; name one of its runs, e.g. "
            f"{in_shell(runs[0])}, or continue all with the same `fedstill compare` and --out "
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
                f"{folder} holds {len(runs)} runs of a comparison, which a run does not overwrite; "
                "choose another folder"
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
            f"{_first_five(foreign)}; move it away first"
        )
    return entries


def _first_five(names: Sequence[str]) -> str:
    """List the first five names, and count the rest."""
    listed = ", ".join(names[:5])
    if len(names) > 5:
        listed += f" and {len(names) - 5} more"
    return listed


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

    Raises RunExists if it is a file, ConfigError if it cannot be created or written, RunBusy if
    another process has locked it.
    """
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


# Packs: the evidence of all runs in a folder, in one compressed file beside it.


EVIDENCE = frozenset({CONFIG, JOURNAL, SUMMARY, "certificate.json", SPLIT, "entry.toml"})
"""Names of the files in a pack.

They are the configuration, the journal, the final numbers, the certificate of an unlearning, the
split of the data, and the description of an entry of the ranking. Models and reports are left out.
"""

SUFFIX = ".runs.tar.xz"
"""The end of a pack's name: the pack of ``NAME`` is ``NAME.runs.tar.xz``."""

MAX_UNPACKED_BYTES = 2 << 30
"""A pack whose files have more bytes than this is not unpacked: a small file can expand to many."""

MAX_MEMBERS = 100_000
"""The most files in a pack; a run has at most six."""

MAX_HEADER_BYTES = 16 << 10
"""The most bytes of a header with a long name, which is read before its file."""

MAX_DECODER_BYTES = 256 << 20
"""The most memory for decompressing; the packs that fedstill writes need 65 MB."""

MAX_SECONDS = 600.0
"""The most time that reading a pack may take."""

MAX_NAME_LENGTH = 1000
"""The most characters of a path in a pack."""

_READ_BYTES = 1 << 20
"""How many bytes are read or decompressed at once."""


def pack(folder: Path) -> Path:
    """Write the evidence of all runs below a folder to FOLDER.runs.tar.xz.

    The same files, with the same times of change, give the same bytes. Warns of unfinished runs,
    which cannot be resumed from the pack.

    Raises ConfigError if there is no run, RunExists if the pack exists and has files that the
    folder does not have.
    """
    files: list[Path] = []
    if folder.is_dir():
        files = sorted(_evidence_below(folder))
    if not files:
        raise ConfigError(f"{folder} contains no run; name a folder of runs")

    packed = pack_of(folder)
    names = {path.relative_to(folder).as_posix() for path in files}
    if packed.exists() and not _names_in(packed) <= names:
        raise RunExists(
            f"{packed} holds runs that {folder} does not; unpack it first: fedstill unpack "
            f"{in_shell(packed)}"
        )
    archive = _archive(folder, files)
    write_whole(packed, lzma.compress(archive, preset=9 | lzma.PRESET_EXTREME))
    _warn_of_unfinished(files)
    return packed


def _archive(folder: Path, files: Sequence[Path]) -> bytes:
    """An uncompressed archive of files, with their paths relative to the folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in files:
            data = read_file(path)
            # Of a file's properties only these are stored: owner and mode depend on the machine.
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size = len(data)
            entry.mtime = int(path.stat().st_mtime)
            archive.format = _format_of(entry)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _warn_of_unfinished(files: Sequence[Path]) -> None:
    """Warn of runs without a summary, since a pack has no checkpoints to resume them from."""
    finished = {path.parent for path in files if path.name == SUMMARY}
    runs = [path.parent for path in files if path.name == CONFIG]
    unfinished = [str(run) for run in runs if run not in finished]
    if unfinished:
        log.warning(
            "not finished: %s; the pack has no checkpoints: keep the directory to go on",
            _first_five(unfinished),
        )


def _format_of(entry: tarfile.TarInfo) -> Literal[0, 1, 2]:
    """The archive format: ustar, or pax if the file's name is too long for ustar."""
    try:
        entry.tobuf(tarfile.USTAR_FORMAT)
    except ValueError:
        return tarfile.PAX_FORMAT
    return tarfile.USTAR_FORMAT


def pack_of(folder: Path) -> Path:
    """The pack of a folder: NAME.runs.tar.xz beside NAME."""
    return folder.with_name(folder.name + SUFFIX)


def folder_of(path: Path) -> Path:
    """The folder of which a path is the pack; any other path as it is."""
    if not path.name.endswith(SUFFIX):
        return path
    return path.with_name(path.name.removesuffix(SUFFIX))


def readable(path: Path) -> Path:
    """A folder to read runs from: ``path`` itself or, for a pack, its files in the cache.

    A path that does not exist stands for its pack (``NAME.runs.tar.xz``), or for a folder in the
    pack of a parent folder. So does a folder without runs, for example one with only a report.
    """
    if path.name.endswith(SUFFIX) and path.is_file():
        return _cached(path)
    if path.is_dir() and not _is_packed(path):
        return path
    for folder in (path, *path.parents):
        if folder.name and pack_of(folder).is_file():
            return _cached(pack_of(folder)) / path.relative_to(folder)
    return path


def _cached(packed: Path) -> Path:
    """The folder of a pack's files in the cache; they are unpacked once."""
    with packed.open("rb") as file:
        key = hashlib.file_digest(file, "sha256").hexdigest()[:20]
    return _unpack_to(packed, cache_folder() / "evidence" / key)


def packs_below(folder: Path) -> Iterator[Path]:
    """The packs in a folder and its subfolders, except those that are unpacked beside it."""
    for packed in sorted(folder.rglob(f"*{SUFFIX}")):
        if _is_packed(folder_of(packed)):
            yield packed


def _is_packed(folder: Path) -> bool:
    """Whether the runs of a folder are only in its pack."""
    return bool(folder.name) and pack_of(folder).is_file() and not _holds_runs(folder)


def _holds_runs(folder: Path) -> bool:
    return next(_evidence_below(folder), None) is not None


def unpack(packed: Path) -> Path:
    """Write the files of a pack to the folder that was packed.

    Other files in the folder, such as a report, stay.

    Raises ConfigError if there is no such pack, RunExists if the folder holds runs or has a file
    where the pack has one, CorruptFile if the pack is damaged.
    """
    if not packed.name.endswith(SUFFIX) or not packed.is_file():
        raise ConfigError(f"there is no pack {packed}; name a file NAME{SUFFIX}")
    folder = folder_of(packed)
    if folder.exists() and (not folder.is_dir() or _holds_runs(folder)):
        raise RunExists(f"{folder} is there already; move it away first")
    if not folder.exists():
        return _unpack_to(packed, folder)
    # The folder is completed in a temporary place, so that it is never seen half unpacked.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        unpacked = _unpack_to(packed, Path(temporary) / "runs")
        _check_no_overlap(packed, folder, unpacked)
        shutil.copytree(folder, unpacked, symlinks=True, dirs_exist_ok=True)
        before = Path(temporary) / "before"
        try:
            folder.rename(before)
            unpacked.rename(folder)
        except BaseException:
            # The temporary folder is deleted with everything in it.
            if before.exists() and not folder.exists():
                before.rename(folder)
            raise
    return folder


def _check_no_overlap(packed: Path, folder: Path, unpacked: Path) -> None:
    """Raise RunExists if a file of the folder is where the pack has a file or folder."""
    for path in folder.rglob("*"):
        target = unpacked / path.relative_to(folder)
        if target.exists() and (path.is_file() or target.is_file()):
            raise RunExists(f"{path} is where {packed} has runs; move it away first")


def unpack_if_packed(folder: Path) -> bool:
    """Unpack a folder's pack if the runs are only in it, so that they can be resumed.

    Returns whether it was unpacked.
    """
    if not _is_packed(folder):
        return False
    unpack(pack_of(folder))
    return True


def _unpack_to(packed: Path, folder: Path) -> Path:
    """Unpack to a folder, unless it exists already; a failure leaves no folder.

    Raises CorruptFile if the pack is damaged, or has anything but evidence of runs.
    """
    if folder.is_dir():
        return folder
    make_folder(folder.parent)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        unpacked = Path(temporary) / "runs"
        unpacked.mkdir()
        with _pack_errors(packed):
            for member in _members(packed):
                _write_member(member, unpacked / member.name)
        try:
            unpacked.rename(folder)
        except OSError:
            # Another process may have unpacked the same file in the meantime, which is as good.
            if not folder.is_dir():
                raise
    return folder


@contextmanager
def _pack_errors(packed: Path) -> Iterator[None]:
    """Convert the errors of a damaged or hostile pack to CorruptFile."""
    try:
        yield
    except (
        tarfile.TarError,
        lzma.LZMAError,
        EOFError,
        OSError,
        ValueError,
        OverflowError,
    ) as error:
        raise CorruptFile(f"{packed} is no pack of runs, or is damaged: {error}") from error


@dataclass(frozen=True)
class _Member:
    """A file in a pack."""

    name: str
    modified: float
    """The time of its last change, in seconds since 1970."""
    content: Iterator[bytes]
    """Its content, in parts that are decompressed when they are needed."""


def _write_member(member: _Member, path: Path) -> None:
    """Write a file of a pack, with the time of its last change."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with create_file(path) as file:
        for part in member.content:
            file.write(part)
    os.utime(path, (member.modified, member.modified))


def _members(packed: Path) -> Iterator[_Member]:
    """The files in a pack, which may come from a stranger.

    It is read as a stream, so that nothing is stored before its size has been checked. Raises
    ValueError if the pack has anything but evidence of runs, or exceeds a limit.
    """
    end = time.monotonic() + MAX_SECONDS
    with open_to_read(packed) as file:
        stream = _Decompressed(file)
        for count in itertools.count(1):
            header = _read_header(stream)
            if header is None:
                stream.skip_rest()
                return
            if count > MAX_MEMBERS:
                raise ValueError(f"it has more than {MAX_MEMBERS:,} files")
            if time.monotonic() > end:
                raise ValueError(f"reading it takes more than {MAX_SECONDS:.0f} seconds")
            if not header.isreg() or not _stays_inside(PurePosixPath(header.name)):
                raise ValueError(f"it holds {header.name[:80]!r}")
            content = stream.parts(header.size)
            yield _Member(header.name, header.mtime, content)
            # What was not read is skipped, and so are the zeros that fill the last block.
            collections.deque(content, maxlen=0)
            stream.read(-header.size % tarfile.BLOCKSIZE)


def _read_header(stream: _Decompressed) -> tarfile.TarInfo | None:
    """Read the header of the next file, or None at the end of the archive.

    A long name is in a header of its own, which stands before the file's.
    """
    block = stream.read(tarfile.BLOCKSIZE)
    if not block.strip(b"\0"):
        return None
    header = _parse_header(block)
    if header.type != tarfile.XHDTYPE:
        return header
    if header.size > MAX_HEADER_BYTES:
        raise ValueError(f"it has a header of more than {MAX_HEADER_BYTES:,} bytes")
    long_name = stream.read(header.size + -header.size % tarfile.BLOCKSIZE)
    return _parse_header(block + long_name + stream.read(tarfile.BLOCKSIZE))


def _parse_header(blocks: bytes) -> tarfile.TarInfo:
    """Parse a header of one block, or one with a long name before it."""
    if len(blocks) == tarfile.BLOCKSIZE:
        header: tarfile.TarInfo | None = tarfile.TarInfo.frombuf(blocks, "utf-8", "surrogateescape")
    else:
        with tarfile.open(fileobj=io.BytesIO(blocks), mode="r:") as archive:
            header = archive.next()
    if header is None or not 0 <= header.size <= MAX_UNPACKED_BYTES:
        raise ValueError("it has a file of an impossible size")
    return header


class _Decompressed:
    """The decompressed content of a pack, of which at most ``MAX_UNPACKED_BYTES`` are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_DECODER_BYTES)
        self._count = 0

    def read(self, size: int) -> bytes:
        """The next ``size`` bytes; raises EOFError if there are fewer."""
        return b"".join(self.parts(size))

    def parts(self, size: int) -> Iterator[bytes]:
        """The next ``size`` bytes in parts; raises EOFError if there are fewer."""
        while size > 0:
            part = self._next_part(min(size, _READ_BYTES))
            size -= len(part)
            yield part

    def skip_rest(self) -> None:
        """Read to the end, where a checksum is; raises LZMAError if it does not match."""
        while not self._decoder.eof:
            self._next_part(_READ_BYTES)

    def _next_part(self, most: int) -> bytes:
        """Some of the next bytes, at most ``most``."""
        compressed = b""
        if self._decoder.needs_input:
            compressed = self._file.read(_READ_BYTES)
            if not compressed:
                raise EOFError("it is cut off")
        part = self._decoder.decompress(compressed, most)
        self._count += len(part)
        if self._count > MAX_UNPACKED_BYTES:
            raise ValueError(f"it unpacks to more than {MAX_UNPACKED_BYTES:,} bytes")
        return part


def _stays_inside(path: PurePosixPath) -> bool:
    """Whether a path in a pack is that of a file of evidence, and leads to no other folder."""
    is_evidence = path.name in EVIDENCE and len(str(path)) <= MAX_NAME_LENGTH
    return is_evidence and not path.is_absolute() and ".." not in path.parts


def _names_in(packed: Path) -> set[str]:
    """The paths of the files in a pack; raises CorruptFile if it cannot be read."""
    with _pack_errors(packed):
        return {member.name for member in _members(packed)}


def _evidence_below(folder: Path) -> Iterator[Path]:
    """The files below a folder that are packed.

    Raises ConfigError for a link: a pack must not contain a file from elsewhere.
    """
    for path in folder.rglob("*"):
        if path.name not in EVIDENCE:
            continue
        if path.is_symlink():
            raise ConfigError(f"{path} is a link; replace it by the file that it leads to")
        if path.is_file():
            yield path
