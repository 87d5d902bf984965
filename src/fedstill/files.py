"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

from fedstill.errors import DiskFull

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_whole(path: Path, data: bytes) -> None:
    """Write a file aside, fsync it, rename it into place, and fsync its folder; raises DiskFull if there is no room."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise as_named(error, path) from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def as_named(error: OSError, path: Path) -> Exception:
    """The error as DiskFull, if that is what it is; otherwise as it was."""
    if error.errno in FULL:
        return DiskFull(f"no room to write {path}: {error.strerror}; free some space, then `fedstill resume` the run")
    return error
