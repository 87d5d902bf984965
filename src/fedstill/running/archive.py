"""Finished runs as evidence: a folder of them in one compressed file, which is read like the
folder.
"""

from __future__ import annotations

import io
import logging
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

from fedstill.core.errors import ConfigError, CorruptFile, RunExists
from fedstill.core.files import digest, in_shell, make_folder, write_whole
from fedstill.data.cache import cache_folder
from fedstill.running.split_file import SPLIT

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
