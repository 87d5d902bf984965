"""The directory of a run: its lock, the settings it began with, and overwriting it."""

from __future__ import annotations

import contextlib
import io
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
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from filelock import FileLock, Timeout

from fedstill.config.experiment import OBJECT_TABLES, bind, from_tree
from fedstill.config.named_tables import NAME_KEYS
from fedstill.config.resolve import settle
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError, CorruptFile, NoRun, RunBusy, RunExists
from fedstill.core.files import (
    RUN_TABLE,
    digest,
    in_shell,
    is_leftover,
    make_folder,
    read_toml,
    remove,
    write_whole,
)
from fedstill.core.method import Method
from fedstill.core.registry import LIVE, short_name
from fedstill.data.cache import cache_folder
from fedstill.running.split_file import SPLIT

# A run that has begun: its settings, as its directory says them.


def settings_of(folder: Path, **live: Any) -> Settings:
    """The settings of an existing run; raises NoRun where there is none, CorruptFile for one that
    is damaged.

    ``live``: what was handed over from Python when the run began, by table (``method``, ``model``,
    ``partition``). Raises ConfigError for another table, and for one that the run finds itself.
    """
    path = folder / "config.toml"
    try:
        tree = read_toml(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoRun(f"{folder} holds no run: {_instead(folder)}") from error
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{path} cannot be read: {error}") from error
    for table, thing in live.items():
        if table not in OBJECT_TABLES:
            raise ConfigError(f"resume takes no {table}: what a run is stands in {path}")
        name = tree.get(table, {}).get(NAME_KEYS[table], "")
        if not name.startswith(LIVE):
            raise ConfigError(f"{folder} finds its {table} {name!r} itself; leave {table} out")
        bind(table, name, type(thing) if isinstance(thing, Method) else thing)
    return settle(from_tree(tree, {}, folder), check_device=False)


def runs_below(folder: Path) -> list[Path]:
    """The directories of the runs in the folder of a comparison, which has one folder for each of
    its groups.
    """
    return sorted(path.parent for path in folder.glob("*/seed*/config.toml"))


def _instead(folder: Path) -> str:
    """What a directory is that holds no run, and what to do."""
    if runs := runs_below(folder):
        return (
            f"it is the folder of a comparison of {len(runs)} runs; the same `fedstill compare` "
            "with --out "
            f"{in_shell(folder)} goes on with all, or name one run, e.g. {in_shell(runs[0])}"
        )
    if folder.is_file():
        begin = (
            f"; `fedstill run {in_shell(folder)}` begins one" if folder.suffix == ".toml" else ""
        )
        return f"it is a file; name a run's directory{begin}"
    return "there is no config.toml in it" if folder.is_dir() else "there is no such directory"


# Beginning a run anew in a directory that holds one: what fedstill wrote there is deleted, and
# nothing else.


HEX, MEMORY = "[0-9a-f]{64}", r"client-?\d+-round\d+-stage\d+\.safetensors"

WRITTEN = re.compile(
    r"config\.toml|(journal|why)\.jsonl|(summary|trackers)\.json|(model|split)\.safetensors|report\.html|holder\.json|lock|sums-name|sum-left\.json"
    rf"|checkpoints/(\d{{7}}-\d{{7}}\.json|LATEST|objects(/{HEX}\.safetensors)?)|memory/{MEMORY}"
    rf"|updates(/{MEMORY})?|measures/[^/]+\.safetensors|checkpoints|memory|measures|tensorboard(/events\.out\.tfevents\.[^/]+)?"
    rf"|sites(/\w+(/client\d+(/({MEMORY}"
    rf"|\d{{7}}-\d{{7}}\.reply|noised|secure-sums?|tasks|\.lock))?)?)?"
)
"""The paths that a run writes, its report and the looks of `fedstill why`, relative to its
directory.
"""

TABLES_OF_A_RUN = ("rounds.csv", "clients.csv", "rounds.parquet", "clients.parquet")
"""The tables of a run's numbers, which may be in any folder below it."""

KEPT = ("lock", "holder.json")
"""Files that are in use while the directory is cleared."""

TABLES = {"data", "partition", "topology", "model", "method", "clients", "plan"}
"""Tables that the config.toml of a run always has; one that a person wrote has what differs from
the defaults.
"""


def clear(folder: Path) -> None:
    """Delete what fedstill wrote in a run's directory, which this process has locked.

    Raises RunExists, and deletes nothing, if it holds anything else, or files of these names that
    are no run's.
    """
    written = check_foreign(folder)
    # from now on nobody can go on with it, and until the last file all can be deleted
    remove(folder / "config.toml")
    for name, path in sorted(written, key=lambda each: each[0] == "journal.jsonl"):
        if name not in KEPT:
            path.rmdir() if path.is_dir() else remove(path)


def check_foreign(folder: Path) -> list[tuple[str, Path]]:
    """What is in a directory, if fedstill wrote it as a run's; raises RunExists if it holds
    anything else.
    """
    written, begun = list(_below(folder, folder)), holds_run(folder)
    if not begun and (several := runs_below(folder)):
        raise RunExists(
            f"{folder} holds {len(several)} runs of a comparison, which a run does not overwrite; "
            "choose another folder"
        )
    tables = [path for _, path in written if begun and _is_table(path)]
    with_tables = {parent for path in tables for parent in path.parents}
    foreign = [
        name
        for name, path in written
        if not _is_ours(name, path, begun) and path not in (*tables, *with_tables)
    ]
    if foreign:
        listed = ", ".join(sorted(foreign)[:5]) + (
            f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        )
        raise RunExists(
            f"{folder} holds what a run did not write there, so nothing is overwritten: {listed}; "
            "move it away first"
        )
    return written


def _below(folder: Path, top: Path) -> Iterator[tuple[str, Path]]:
    """What is in a directory, folders after what is in them, by path relative to the top; links are
    not followed.
    """
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _below(path, top)
        yield path.relative_to(top).as_posix(), path


def _is_ours(name: str, path: Path, begun: bool) -> bool:
    if path.is_symlink():
        return False
    if is_leftover(path) or name in KEPT:
        return True
    if name == "report.html" and b"Made by fedstill" not in path.read_bytes():
        return False
    return begun and WRITTEN.fullmatch(name) is not None


def _is_table(path: Path) -> bool:
    """Whether a file is one of those that `fedstill export` writes of a run's numbers."""
    if path.is_symlink() or path.name not in TABLES_OF_A_RUN or not path.is_file():
        return False
    return RUN_TABLE.mark.search(path.read_bytes()) is not None


def holds_run(folder: Path) -> bool:
    """Whether a run has begun there: by its journal, or where that was not written yet, by its
    whole config.
    """
    try:
        with (folder / "journal.jsonl").open("rb") as journal:
            if journal.readline().startswith(b'{"event":"start"'):
                return True
    except OSError:
        pass
    try:
        return set(read_toml(folder / "config.toml")) >= TABLES
    except (OSError, ValueError):
        return False


# The directory of a run: a new one for each, and one process at a time in it; so for the folder of
# a comparison.


LOCK, HOLDER = "lock", "holder.json"
"""The file that is locked, and the one that says by whom. The second is there while somebody writes
in the folder.
"""

OTHER = ("choose another directory with out=", "choose another --out")
"""What to do about a directory that cannot be used: in Python, and for who typed a command."""


def new_directory(settings: Settings, out: Path | None, overwrite: bool = False) -> Path:
    """A directory for a new run; raises RunExists if it holds anything already, other than a run to
    ``overwrite``.

    Raises ConfigError if it cannot be made, or for ``overwrite`` without ``out``.
    """
    if overwrite and out is None:
        raise ConfigError(
            "overwrite=True needs out=, the run's directory", "--overwrite needs --out"
        )
    name = settings.named.method.name.rpartition("/")[2].replace(":", "-")
    data = short_name(settings.data.name).replace("/", "-").replace(":", "-")
    base = Path("runs") / f"{name}-{data}-seed{settings.seed}"
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            if overwrite:
                check_foreign(out)  # before there is a lock in it
                with locked(out):
                    clear(out)
            check_used(out)
            return out
        base.parent.mkdir(parents=True, exist_ok=True)
        return next(
            p for i in range(1, 100_000) if _is_made(p := base.with_name(f"{base.name}-{i}"))
        )
    except FileExistsError as error:
        raise RunExists(*(f"{out} is a file; {todo}" for todo in OTHER)) from error
    except OSError as error:
        text = f"cannot make the run's directory {out or base}: {error.strerror}"
        raise ConfigError(*(f"{text}; {todo}" for todo in OTHER)) from error


def check_used(folder: Path) -> None:
    """Raise RunExists if a directory holds anything; what a killed process left of its first write
    does not count.
    """
    if any(p.name not in (LOCK, HOLDER) and not is_leftover(p) for p in folder.iterdir()):
        if not holds_run(folder):
            raise RunExists(
                *(f"{folder} is not empty, and what it holds is no run; {todo}" for todo in OTHER)
            )
        raise RunExists(
            f"{folder} is not empty; {OTHER[0]}, go on with fedstill.resume({str(folder)!r}), or "
            "begin it anew with "
            "overwrite=True",
            f"{folder} is not empty; {OTHER[1]}, go on with `fedstill resume {in_shell(folder)}`, "
            "or begin it anew "
            "with --overwrite",
        )


def _is_made(folder: Path) -> bool:
    """Make a new directory; another process may be choosing one at the same time."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's directory against other processes; the lock ends with this process, however it
    ends.

    Raises NoRun without the directory, RunBusy if another process holds it, ConfigError if it
    cannot be written.
    """
    if not folder.is_dir():
        raise NoRun(f"there is no directory {folder}")
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise RunBusy(
            f"{folder} is being written by another process{_holder(folder)}; wait for it, or end it"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot write in {folder}: {error.strerror}; make it writable"
        ) from error
    try:
        with contextlib.suppress(OSError):  # it only helps who is refused
            (folder / HOLDER).write_text(json.dumps(_ourselves()), encoding="utf-8")
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make the folder of several runs, if it is not there, and lock it against other comparisons.

    Raises RunExists for a file of that name, ConfigError if the folder cannot be made or written,
    RunBusy if another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise RunExists(*(f"{folder} is a file; {todo}" for todo in OTHER)) from error
    except OSError as error:
        text = f"cannot make the folder {folder}: {error.strerror}"
        raise ConfigError(*(f"{text}; {todo}" for todo in OTHER)) from error
    with locked(folder):
        yield


def _ourselves() -> dict[str, str | int]:
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _holder(folder: Path) -> str:
    """Which process writes in a folder, if it says so."""
    try:
        said = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
        return (
            f", {int(said['process'])} on {str(said['host'])[:100]} since {str(said['since'])[:30]}"
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


# Finished runs as evidence: a folder of them in one compressed file, which is read like the


log = logging.getLogger("fedstill.pack")

EVIDENCE = frozenset({"config.toml", "journal.jsonl", "summary.json", SPLIT, "entry.toml"})
"""The files that are packed: what was asked for, what happened, the numbers at the end, who had
which data, and what an entry of the ranking says of its runs.

Models and pages are not.
"""

SUFFIX = ".runs.tar.xz"

MOST = 2 << 30
"""Bytes that a pack may unpack to."""


def pack(folder: Path) -> Path:
    """Write the evidence of all runs below a folder to FOLDER.runs.tar.xz; the same runs give the
    same bytes.

    Warns of runs that are not finished: nobody can go on with them from the file. Raises
    ConfigError if there is no run, RunExists if the file exists with other runs.
    """
    files = sorted(_evidence(folder)) if folder.is_dir() else []
    if not files:
        raise ConfigError(f"{folder} holds no run; name a folder of runs")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path in files:
            data = path.read_bytes()
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size, entry.mtime = len(data), int(path.stat().st_mtime)
            archive.format = _format_of(entry)
            archive.addfile(entry, io.BytesIO(data))
    packed = pack_of(folder)
    data = lzma.compress(out.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    if packed.exists() and _names(packed) - {p.relative_to(folder).as_posix() for p in files}:
        raise RunExists(
            f"{packed} holds runs that {folder} does not; unpack it first: fedstill unpack "
            f"{in_shell(packed)}"
        )
    write_whole(packed, data)
    _warn_of_unfinished(files)
    return packed


def _warn_of_unfinished(files: Sequence[Path]) -> None:
    """Name, at most five, the runs that nobody can go on with from what is packed."""
    finished = {path.parent for path in files if path.name == "summary.json"}
    if begun := [
        str(p.parent) for p in files if p.name == "config.toml" and p.parent not in finished
    ]:
        more = f" and {len(begun) - 5} more" if len(begun) > 5 else ""
        text = "not finished: %s%s; the pack has no checkpoints: keep the directory to go on"
        log.warning(text, ", ".join(begun[:5]), more)


def _format_of(entry: tarfile.TarInfo) -> Literal[0, 1, 2]:
    """The plainest format that a file's name and time fit in."""
    try:
        entry.tobuf(tarfile.USTAR_FORMAT)
    except ValueError:
        return tarfile.PAX_FORMAT
    return tarfile.USTAR_FORMAT


def pack_of(folder: Path) -> Path:
    """The file that a folder is packed to: NAME.runs.tar.xz beside NAME."""
    return folder.with_name(folder.name + SUFFIX)


def folder_of(path: Path) -> Path:
    """The folder that a pack was made of; any other path as it is."""
    return path.with_name(path.name.removesuffix(SUFFIX)) if path.name.endswith(SUFFIX) else path


def readable(path: Path) -> Path:
    """A folder to read runs from: the path itself, or, for a pack, its files in the cache.

    A path that does not exist stands for the pack of that name, or for a folder in the pack of a
    folder above it; a folder without runs, such as one that holds a report alone, for the pack of
    its name.
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
    return _unpacked(packed, cache_folder() / "evidence" / digest(packed.read_bytes())[:20])


def packs_below(folder: Path) -> Iterator[Path]:
    """The packs in a folder, and in those below it, whose runs are not there unpacked as well."""
    for packed in sorted(folder.rglob(f"*{SUFFIX}")):
        if _is_packed(folder_of(packed)):
            yield packed


def _is_packed(folder: Path) -> bool:
    """Whether a folder's runs are in its pack alone."""
    return bool(folder.name) and pack_of(folder).is_file() and not _holds_runs(folder)


def _holds_runs(folder: Path) -> bool:
    return next(_evidence(folder), None) is not None


def unpack(packed: Path) -> Path:
    """Write a pack's files to the folder that was packed, beside what it holds.

    Raises ConfigError if there is no such pack, RunExists if the folder holds runs, CorruptFile for
    a damaged pack.
    """
    if not packed.name.endswith(SUFFIX) or not packed.is_file():
        raise ConfigError(f"there is no pack {packed}; name a file NAME{SUFFIX}")
    folder = folder_of(packed)
    if folder.exists() and (not folder.is_dir() or _holds_runs(folder)):
        raise RunExists(f"{folder} is there already; move it away first")
    if not folder.exists():
        return _unpacked(packed, folder)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
        made = _unpacked(packed, Path(place) / "runs")
        for own in folder.rglob("*"):
            there = made / own.relative_to(folder)
            if there.exists() and (own.is_file() or there.is_file()):
                raise RunExists(f"{own} is where {packed} has runs; move it away first")
        shutil.copytree(folder, made, dirs_exist_ok=True)
        folder.rename(Path(place) / "before")
        made.rename(folder)
    return folder


def restored(folder: Path) -> bool:
    """Unpack a folder's pack if its runs are in that alone, so that they can go on; whether that
    was done.
    """
    if not _is_packed(folder):
        return False
    unpack(pack_of(folder))
    return True


def _unpacked(packed: Path, folder: Path) -> Path:
    """The folder, whole or not there."""
    if folder.is_dir():
        return folder
    make_folder(folder.parent)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
        making = Path(place) / "runs"
        making.mkdir()
        try:
            with tarfile.open(packed, mode="r:xz") as archive:
                _check(packed, archive.getmembers())
                archive.extractall(making, filter="data")
        except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
            raise CorruptFile(f"{packed} cannot be unpacked: {error}") from error
        try:
            making.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process has unpacked the same file meanwhile
                raise
    return folder


def _check(packed: Path, members: list[tarfile.TarInfo]) -> None:
    """Raises CorruptFile unless all members are files of evidence, and not too large."""
    strange = [
        m.name for m in members if not m.isfile() or not _stays_inside(PurePosixPath(m.name))
    ]
    if strange:
        raise CorruptFile(f"{packed} is no pack of runs: it holds {strange[0][:80]!r}")
    if sum(m.size for m in members) > MOST:
        raise CorruptFile(f"{packed} says that it unpacks to more than {MOST >> 30} GB")


def _stays_inside(path: PurePosixPath) -> bool:
    return path.name in EVIDENCE and not path.is_absolute() and ".." not in path.parts


def _names(packed: Path) -> set[str]:
    try:
        with tarfile.open(packed, mode="r:xz") as archive:
            return set(archive.getnames())
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        raise CorruptFile(f"{packed} cannot be read: {error}") from error


def _evidence(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.name in EVIDENCE and path.is_file():
            yield path
