"""Reading, writing and deleting files, checks before one is overwritten, TOML files, paths, and
texts that are safe to write.

All other modules write and delete through these functions. They never follow a link that somebody
planted in a folder: a new file gets a random name, must not exist, and then replaces the old entry.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import hashlib
import os
import platform
import re
import secrets
import shlex
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal

from fedstill.core.errors import ConfigError, DiskFull
from fedstill.core.fields import kind_text

# ---- opening -------------------------------------------------------------------------------------


_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def read_file(path: Path) -> bytes:
    """Return the content of a regular file, or of one that a link leads to.

    Raises OSError if it cannot be read, and for a pipe or a device, which might never end.
    """
    with open_to_read(path) as file:
        return file.read()


def open_to_read(path: Path) -> IO[bytes]:
    """Open a regular file; raises OSError as ``read_file``."""
    return open(path, "rb", opener=_open_regular)


def create_file(path: Path, mode: int = 0o666) -> IO[bytes]:
    """Create a file and open it for writing, unbuffered.

    Raises FileExistsError if the name is taken, also by a link.
    """
    return open(path, "xb", 0, opener=partial(_open_regular, mode=mode))


def open_to_append(path: Path, mode: int = 0o666) -> IO[bytes]:
    """Open a file for appending, unbuffered; raises OSError for a link, a pipe or a device."""
    return open(path, "ab", 0, opener=partial(_open_regular, mode=mode))


def _open_regular(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a regular file; to write, only one that is no link."""
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= _NO_FOLLOW
    try:
        # Without O_NONBLOCK, opening a pipe waits for a process at its other end.
        handle = os.open(path, flags | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", path) from error
        raise
    kind = os.fstat(handle).st_mode
    # Python itself refuses a directory.
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return handle


# ---- atomic writing ------------------------------------------------------------------------------


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""The errors of a full disk."""

_PART = ".part"
"""The suffix of files that are being written."""

Content = bytes | Sequence[bytes | memoryview]
"""The content of a file, or its parts, in their order."""

MOST_AT_ONCE = 32
"""How many files are open and wait for the disk at the same time, each in a thread."""


def write_whole(path: Path, data: Content, mode: int = 0o666) -> None:
    """Write a file under a temporary name, make it durable, and rename it.

    A link of this name is replaced; the file that it leads to does not change.

    ``mode``: the permissions, before the process's umask. Raises DiskFull if it cannot be written.
    """
    write_together([(path, data)], mode)


def write_note(path: Path, data: bytes) -> None:
    """Write a small file that may be lost or torn in a crash; raises OSError or DiskFull."""
    if os.path.lexists(path):
        remove(path)
    with create_file(path) as file:
        _write_all(file, data)


def write_together(
    files: Iterable[tuple[Path, Content]],
    mode: int = 0o666,
    beside: Callable[[], object] | None = None,
) -> None:
    """Write several files as ``write_whole`` does. It takes about as long as for one file, because
    all wait for the disk at the same time.

    ``beside``: a function that waits at the same time, for example for a file that is open. When
    all contents are durable and this function has returned, the files get their names, in order.
    After a loss of power, any of the names may be missing. Raises DiskFull for the first file that
    cannot be written.
    """
    remaining = iter(files)
    temporary: dict[Path, Path] = {}
    waits: list[Callable[[], object]] = []
    if beside is not None:
        waits.append(beside)
    try:
        # A few at a time, because each of them is open until it is durable.
        for first in remaining:
            batch = chain([first], islice(remaining, MOST_AT_ONCE - 1))
            _write_temporary(batch, mode, temporary, waits)
            waits = []
        _side_by_side(waits)  # ``beside`` has not been called if there are no files
        for path, written in temporary.items():
            with _disk_errors(path):
                written.replace(path)
        # A file of each folder, for error messages.
        by_folder = {path.parent: path for path in temporary}
        _side_by_side([partial(_sync_names, path) for path in by_folder.values()])
    except BaseException:
        for written in temporary.values():
            with contextlib.suppress(OSError):  # the first error is the one to report
                written.unlink(missing_ok=True)
        raise


def _write_temporary(
    files: Iterable[tuple[Path, Content]],
    mode: int,
    temporary: dict[Path, Path],
    waits: Sequence[Callable[[], object]],
) -> None:
    """Write contents durably under temporary names, and call ``waits`` at the same time.

    ``temporary``: gets the temporary path of each file before it is opened, so that the caller can
    delete it after an error.
    """
    with contextlib.ExitStack() as open_files:
        syncs: list[Callable[[], object]] = []
        for path, data in files:
            temporary[path] = _temporary_name(path)
            with _disk_errors(path):
                file = open_files.enter_context(create_file(temporary[path], mode))
                _write_all(file, data)
            syncs.append(partial(_sync_content, path, file))
        _side_by_side([*waits, *syncs])


def _temporary_name(path: Path) -> Path:
    """Return a name beside a file that nobody can guess, and that ``is_leftover`` recognises."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}{_PART}")


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a new empty file beside ``path``, which replaces ``path`` at the end.

    For libraries that write to a file by its name. An error leaves ``path`` as it is. Raises
    OSError if the file cannot be created or renamed.
    """
    temporary = _temporary_name(path)
    create_file(temporary).close()
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replaced_folder(folder: Path, mode: int = 0o777) -> Iterator[Path]:
    """Yield a new empty folder beside ``folder``, which replaces ``folder`` at the end.

    An error leaves ``folder`` as it is. A link of this name is not replaced.

    ``mode``: the permissions, before the process's umask. Raises OSError if the new folder cannot
    be created or renamed.
    """
    temporary = _hidden_name(folder)
    old = _hidden_name(folder)
    temporary.mkdir(mode)
    try:
        yield temporary
        if folder.is_dir() and not folder.is_symlink():
            folder.rename(old)
        temporary.rename(folder)
    except BaseException:
        if old.is_dir() and not folder.exists():
            old.rename(folder)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _hidden_name(folder: Path) -> Path:
    """Return a name beside a folder that nobody can guess."""
    return folder.with_name(f".{folder.name}-{secrets.token_hex(6)}")


def _write_all(file: IO[bytes], data: Content) -> None:
    """Write to an unbuffered file, which may accept only a part at a time."""
    parts: Sequence[bytes | memoryview] = [data] if isinstance(data, bytes) else data
    for part in parts:
        unwritten = memoryview(part)
        while unwritten:
            count = file.write(unwritten)
            unwritten = unwritten[count:]


def _sync_content(path: Path, file: IO[bytes]) -> None:
    with _disk_errors(path):
        os.fsync(file.fileno())


def _sync_names(path: Path) -> None:
    with _disk_errors(path):
        sync_folder(path.parent)


def _side_by_side(waits: Sequence[Callable[[], object]]) -> None:
    """Call functions at the same time: the first in this thread, all others in further threads.

    Raises the first error in the order of the functions.
    """
    if not waits:
        return
    first, *further = waits
    if not further:
        first()
        return
    with ThreadPoolExecutor(min(len(further), MOST_AT_ONCE), "disk") as pool:
        futures = [pool.submit(wait) for wait in further]
        first()
        for future in futures:
            future.result()


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn an error of the disk into DiskFull, with the file and a remedy."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path) from error


def write_secret(path: Path, data: Content) -> None:
    """Write a file that only its owner can read."""
    write_whole(path, data, 0o600)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, with durable names; raises DiskFull if this fails."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise disk_error(error, path) from error


def make_real_folder(path: Path) -> None:
    """Create a folder as ``make_folder`` does; raises DiskFull, too, if there is a link instead.

    For folders in a run's directory. Somebody may put a link there while the run is under way.
    """
    make_folder(path)
    if path.is_symlink():
        raise disk_error(OSError(errno.ELOOP, "it is a link"), path)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_leftover(path: Path) -> bool:
    """Whether a file is a temporary file of a killed process."""
    return path.name.startswith(".") and path.name.endswith(_PART)


def sweep(folder: Path) -> None:
    """Delete the temporary files of killed processes. No other process may be writing."""
    for path in folder.rglob(f".*{_PART}"):
        remove(path)


def remove(path: Path) -> None:
    """Delete a file if it exists; a link is deleted itself. Raises DiskFull if this fails."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(error, path) from error


def remove_folder(path: Path) -> None:
    """Delete a folder with its content if it exists; a link is deleted itself. Raises DiskFull if
    this fails.
    """
    if path.is_symlink():
        remove(path)
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise disk_error(error, path) from error


def remove_files(folder: Path, is_unneeded: Callable[[str], bool]) -> list[str]:
    """Delete the files of a folder whose names a function picks, and return the deleted names.

    The folder is opened once, so that nothing elsewhere is deleted if somebody puts a link in its
    place during a run. Raises DiskFull for a link, and if a file cannot be deleted.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _NO_FOLLOW)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise disk_error(error, folder) from error
    try:
        with os.scandir(handle) as entries:
            names = [entry.name for entry in entries if is_unneeded(entry.name)]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=handle)
    except OSError as error:
        raise disk_error(error, folder) from error
    finally:
        os.close(handle)
    return names


# ---- paths ---------------------------------------------------------------------------------------


def named_path(path: Path | str) -> Path:
    """The path that a user named; ``~`` is the home folder. Raises ConfigError for an unknown home
    folder, for a Windows path, and for an object that is no path, such as the result of a run.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(
            f"expected a path, not {kind_text(path)}; pass one path at a time, and "
            "result.directory for a result"
        )
    check_windows_path(path)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"the home folder of {path} is unknown; give the full path") from error


CACHE = "FEDSTILL_CACHE"
"""The environment variable that names the cache folder."""


def cache_folder() -> Path:
    """The folder of decoded data, slow partitions, features of a backbone and replies of clients:
    ``FEDSTILL_CACHE``, or the user's cache folder.

    It may not exist yet, and it can be deleted at any time. If it is not writable, nothing is
    cached. Raises ConfigError if ``FEDSTILL_CACHE`` names a file.
    """
    from platformdirs import user_cache_dir  # lazy, because most commands need no cache

    folder = named_path(os.environ.get(CACHE) or user_cache_dir("fedstill"))
    with contextlib.suppress(PermissionError):
        if folder.is_file():
            raise ConfigError(
                f"{CACHE} = {str(folder)!r} is a file; name a folder, which need not exist"
            )
    return folder


WINDOWS_PATH = re.compile(r"([A-Za-z]):([\\/\b\f\n\r\t].*)", re.DOTALL)
"""An absolute Windows path. In TOML's double quotes, the "\\n" of "C:\\new" is a newline."""

ESCAPES = {"\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
"""Characters that TOML reads in such a path, as they were written."""


def check_windows_path(path: Path | str, key: str = "") -> None:
    """Raise ConfigError for an absolute Windows path; ``key``: the config key that has this value.

    >>> check_windows_path("data.csv")
    """
    text = str(path)
    match = WINDOWS_PATH.fullmatch(text)
    if match is None or os.path.lexists(text):
        return
    written = "".join(ESCAPES.get(character, character) for character in text)
    subject = written
    if key:
        subject = f"{key} = '{written}'"
    raise ConfigError(f"{subject} is a Windows path; {_on_this_machine(written)}")


def _on_this_machine(path: str) -> str:
    """What to write instead of a Windows path."""
    folder = path[2:].replace("\\", "/")
    in_wsl = f"in WSL it is /mnt/{path[0].lower()}{folder}"
    if "microsoft" in platform.release().lower():
        return in_wsl
    return f"give the file's path on this machine ({in_wsl})"


def in_shell(path: Path | str) -> str:
    """A path for a shell, in quotes if necessary.

    >>> in_shell("my runs/1"), in_shell("runs/1")
    ("'my runs/1'", 'runs/1')
    """
    return shlex.quote(str(path))


def digest(*parts: bytes | memoryview) -> str:
    """SHA-256 of some bytes, given as one or more parts, in hexadecimal."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part)
    return sha.hexdigest()


def disk_error(error: OSError, path: Path) -> DiskFull:
    """The DiskFull error for a file that cannot be written, with a remedy."""
    run = _resumable_run(path)
    retry = "run the same command again"
    if run is not None:
        retry = f"`fedstill resume {in_shell(run)}`"
    if error.errno in FULL:
        return DiskFull(f"no room to write {path}: {error.strerror}; free some space, then {retry}")
    return DiskFull(f"cannot write {path}: {error.strerror}; correct this, then {retry}")


def _resumable_run(path: Path) -> Path | None:
    """The directory of the run to which a file belongs, if the run can be resumed."""
    with contextlib.suppress(OSError):
        for folder in path.parents[:3]:
            has_started = all((folder / name).is_file() for name in ("config.toml", "lock"))
            if has_started and not (folder / "summary.json").is_file():
                return folder
    return None


# ---- TOML ----------------------------------------------------------------------------------------


MARKS_OF_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
LINE_OF_ERROR = re.compile(r"\(at line (\d+), ")
DEEP_KEY = re.compile(rb"""(?<![\w-])(?:([\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){100}""")
"""A dotted key whose parsing would take minutes: the time grows with the square of its parts.

The search begins at whole parts only and never goes back inside one, so that its own time does not
grow with the square of a part's length.
"""

QUOTED_WINDOWS_PATH = re.compile(r'"([A-Za-z]:\\[^"]*)"')


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; raises OSError, and ValueError as ``parse_toml`` does."""
    return parse_toml(read_file(path))


def parse_toml(data: bytes) -> dict[str, Any]:
    """The tables in the bytes of a TOML file: UTF-8, with or without a byte order mark.

    Raises ValueError for anything else, with a remedy for Windows paths.
    """
    if data.startswith(MARKS_OF_UTF_16):
        raise ValueError("its encoding is UTF-16; save it as UTF-8")
    if DEEP_KEY.search(data):
        raise ValueError("it has a key of more than 100 parts")
    text = data.decode("utf-8-sig")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{error}{_advice_on_path(text, str(error))}") from error
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a tree of settings, by dotted key.

    >>> flat({"seed": 1, "plan": {"train": {"lr": 0.1}}})
    {'seed': 1, 'plan.train.lr': 0.1}
    """
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def _advice_on_path(text: str, error: str) -> str:
    """The remedy if the line of the error has a Windows path in double quotes, where a backslash
    begins an escape; empty otherwise.
    """
    place = LINE_OF_ERROR.search(error)
    if place is None:
        return ""
    path = QUOTED_WINDOWS_PATH.search(text.split("\n")[int(place[1]) - 1])
    if path is None:
        return ""
    return (
        "; in double quotes a backslash begins an escape: use single quotes or forward slashes; "
        f"for a Windows path, {_on_this_machine(path[1])}"
    )


# ---- overwriting ---------------------------------------------------------------------------------
#
# A file that a user names for output is only overwritten if it is of the same kind. So a mistake in
# a name destroys no other file.


@dataclass(frozen=True)
class Kind:
    """A kind of files.

    ``words``: for messages. ``ending``: of the names; empty if it does not matter. ``mark``: occurs
    in the bytes of every such file.
    """

    words: str
    ending: str
    mark: re.Pattern[bytes]


PAGE = Kind("a page that fedstill made", "", re.compile(rb"Made by fedstill"))
ONNX = Kind("an ONNX model", ".onnx", re.compile(rb"\A\x08"))
PROGRAM = Kind("a program of torch.export", ".pt2", re.compile(rb"\APK"))
MODEL = Kind(
    "a model that `fedstill query` wrote",
    ".safetensors",
    re.compile(rb"\A.{8}\{.*fedstill_model", re.DOTALL),
)

RUN_TABLE = Kind(
    "a run's table",
    "",
    re.compile(rb'\A(\s*\Z|(round,|PAR1).*(seconds_training|"columns": \[\]))', re.DOTALL),
)
CSV = Kind("a table that fedstill wrote", "", re.compile(rb"\A(label,note|compared,with,number)"))
MARKDOWN = Kind("a table that fedstill wrote", "", re.compile(rb"\A\|  \|"))
LATEX = Kind(
    "a table that fedstill wrote", "", re.compile(rb"\A\\begin\{tabular\}\{lr+\}\n\\toprule\n & ")
)
TABLE_KINDS = {".csv": CSV, ".md": MARKDOWN, ".tex": LATEX}
"""The kinds of a comparison's tables by suffix."""


def check_may_overwrite(path: Path | None, kind: Kind) -> None:
    """Raise ConfigError if a path has a file of another kind.

    An empty file may be overwritten. None is no path. For a directory, writing raises a clearer
    error.
    """
    if path is None or path.is_dir() or not (path.exists() or path.is_symlink()):
        return
    if path.is_file():
        if not path.stat().st_size:
            return
        try:
            content = read_file(path)
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}, which would be overwritten: {error.strerror}"
            ) from error
        if path.name.endswith(kind.ending) and kind.mark.search(content):
            return
    raise ConfigError(
        f"{path} exists and is not {kind.words}, so it is not overwritten; name another file"
    )


def may_overwrite(path: Path, kind: Kind) -> bool:
    """Whether ``check_may_overwrite`` accepts a path."""
    try:
        check_may_overwrite(path, kind)
    except ConfigError:
        return False
    return True


def replace_file(path: Path, data: bytes, kind: Kind) -> None:
    """Write a file as ``write_whole`` does; raises ConfigError over a file of another kind."""
    check_may_overwrite(path, kind)
    write_whole(path, data)


# ---- texts that are safe to write ----------------------------------------------------------------
#
# Names of classes and runs, for example, may come from a stranger. They are written to tables,
# reports and the terminal.

UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]"
)
"""Characters that command a terminal, change the direction of a text, or have no width, so that two
names look alike. Tab and newline are not among them, nor are the joiners that some scripts need.
"""

FORMULA = re.compile(r"[=+\-@\t]")
"""The first character of a cell that a spreadsheet executes."""

_NUMBER = r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|inf|nan)"

NUMERIC_CELL = re.compile(rf"{_NUMBER}(?: (?:to|±) {_NUMBER})?", re.IGNORECASE)
"""A number, an interval, or a mean and its spread: no formula, even if it begins with a sign."""

IN_MARKDOWN = {"|": "\\|", "<": "&lt;", ">": "&gt;", "](": "]\\("}
"""Markdown's signs for the end of a cell, HTML and links, and how to write them as text."""

IN_LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\^{}",
}
"""LaTeX's special characters, and how to write them as text."""

Target = Literal["terminal", "html", "csv", "markdown", "latex"]


def neutral(text: str, target: Target) -> str:
    """Return a text without commands for the program that will show it.

    Control characters become "�", also those that change the direction of a text. For CSV, a
    formula gets a quote before it. For Markdown and LaTeX, special signs are escaped, and the text
    becomes one line. HTML may have markup, which templates have made.

    >>> neutral("=cmd()", "csv"), neutral("-0.5", "csv")
    ("'=cmd()", '-0.5')
    >>> neutral("+1.5 to +2", "csv"), neutral("+1.5|cmd", "csv")
    ('+1.5 to +2', "'+1.5|cmd")
    >>> neutral("<img src=x> a|b", "markdown"), neutral("a_b", "latex")
    ('&lt;img src=x&gt; a\\\\|b', 'a\\\\_b')
    """
    text = UNPRINTABLE.sub("\ufffd", text)
    if target == "csv":
        if FORMULA.match(text) and not NUMERIC_CELL.fullmatch(text):
            return f"'{text}"
        return text
    if target == "markdown":
        return _replaced(text, IN_MARKDOWN)
    if target == "latex":
        return _replaced(text, IN_LATEX)
    return text


def _replaced(text: str, signs: Mapping[str, str]) -> str:
    """Return a text on one line in which some signs are replaced."""
    line = re.sub(r"[\t\n]", " ", text)
    pattern = "|".join(map(re.escape, signs))
    return re.sub(pattern, lambda match: signs[match[0]], line)


# ---- counts, lists and times as text -------------------------------------------------------------


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun.

    plural: of an irregular noun.

    >>> counted(1, "example"), counted(1200, "example"), counted(2, "class", "classes")
    ('1 example', '1,200 examples', '2 classes')
    """
    if count != 1:
        noun = plural or f"{noun}s"
    return f"{count:,} {noun}"


def shortened_list(names: Sequence[str], most: int = 12) -> str:
    """Names for a message: the first ones, and the number of the others.

    >>> shortened_list(["a", "b"], 2), shortened_list(["a", "b", "c"], 2)
    ('a, b', 'a, b and 1 more')
    """
    listed = ", ".join(names[:most])
    if len(names) > most:
        listed += f" and {len(names) - most:,} more"
    return listed


def duration(seconds: float) -> str:
    """A time in the two largest units that it has.

    >>> duration(9.6), duration(200), duration(7500)
    ('10 s', '3 min 20 s', '2 h 5 min')
    """
    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, remaining_minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {remaining_minutes} min"
    if minutes:
        return f"{minutes} min {remaining_seconds} s"
    return f"{remaining_seconds} s"
