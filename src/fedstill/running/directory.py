"""The directory of a run: its lock, the settings it began with, and overwriting it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedstill.config.experiment import OBJECT_TABLES, bind, from_tree
from fedstill.config.named_tables import NAME_KEYS
from fedstill.config.resolve import settle
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError, CorruptFile, NoRun, RunBusy, RunExists
from fedstill.core.files import RUN_TABLE, in_shell, is_leftover, read_toml, remove
from fedstill.core.method import Method
from fedstill.core.registry import LIVE, short_name

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
    written = refuse_foreign(folder)
    # from now on nobody can go on with it, and until the last file all can be deleted
    remove(folder / "config.toml")
    for name, path in sorted(written, key=lambda each: each[0] == "journal.jsonl"):
        if name not in KEPT:
            path.rmdir() if path.is_dir() else remove(path)


def refuse_foreign(folder: Path) -> list[tuple[str, Path]]:
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
                refuse_foreign(out)  # before there is a lock in it
                with locked(out):
                    clear(out)
            refuse_used(out)
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


def refuse_used(folder: Path) -> None:
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
