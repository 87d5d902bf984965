"""Packs: the evidence of all runs in a folder, in one compressed file beside it.

Commands that read runs accept a pack in place of the folder.
"""

from __future__ import annotations

import collections
import hashlib
import io
import itertools
import logging
import lzma
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from fedstill.core.errors import ConfigError, CorruptFile, RunExists
from fedstill.core.files import (
    cache_folder,
    create_file,
    in_shell,
    make_folder,
    open_to_read,
    read_file,
    shortened_list,
    write_whole,
)
from fedstill.running.journal import CONFIG, JOURNAL, SUMMARY
from fedstill.running.split_file import SPLIT

log = logging.getLogger("fedstill.pack")

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
            shortened_list(unfinished, most=5),
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
    if folder.name in ("", ".."):
        folder = folder.resolve()
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
