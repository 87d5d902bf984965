"""The directory of a run: a new one for each, and one process at a time in it; so for the folder of
a comparison.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedstill.errors import ConfigError, NoRun, RunBusy, RunExists
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.run_directory.overwriting import clear, holds_run, refuse_foreign
from fedstill.files import in_shell, is_leftover, short_name

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
