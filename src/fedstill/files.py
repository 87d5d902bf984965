"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shlex
from pathlib import Path, PurePath

from fedstill.errors import DiskFull

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PART = ".part"


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write to another name, fsync, rename, fsync the folder; raises DiskFull if it cannot be done.

    ``mode``: who may read and write it, less what the process takes away from all files.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}{_PART}")
    try:
        with open(aside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            aside.unlink(missing_ok=True)
        raise as_named(error, path) from error


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read."""
    write_whole(path, data, 0o600)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, each with a durable name; raises DiskFull if it cannot be made."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise as_named(error, path) from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_leftover(path: Path) -> bool:
    """Whether a file is what a killed process was writing, before it was renamed."""
    return path.name.startswith(".") and path.name.endswith(_PART)


def sweep(folder: Path) -> None:
    """Delete what killed processes left half written, in a folder that no other process writes."""
    for path in folder.rglob(f".*{_PART}"):
        remove(path)


def remove(path: Path) -> None:
    """Delete a file that is no longer needed, if it is there; raises DiskFull if it cannot be deleted."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise as_named(error, path) from error


def short_name(name: str) -> str:
    """A name as people read it: of a file by its whole path, the file.

    >>> short_name("/home/me/mine.py:Mine"), short_name("owner/name")
    ('mine.py:Mine', 'owner/name')
    """
    return PurePath(name).name if PurePath(name).is_absolute() else name


def in_shell(path: Path | str) -> str:
    """A path as it is typed in a shell: in quotes if it needs them.

    >>> in_shell("my runs/1"), in_shell("runs/1")
    ("'my runs/1'", 'runs/1')
    """
    return shlex.quote(str(path))


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def as_named(error: OSError, path: Path) -> DiskFull:
    """An error while writing as DiskFull, with what to do about it."""
    if error.errno in FULL:
        return DiskFull(f"no room to write {path}: {error.strerror}; free some space, then `fedstill resume` the run")
    return DiskFull(f"cannot write {path}: {error.strerror}; put that right, then `fedstill resume` the run")
