"""Imports users' Python files, and imports them again if they have changed.

A file can import modules from its folder, as a script can. A change in such a module counts as a
change of the file.

A run directory or a model file names the code that it needs, and may come from a stranger. While a
command uses such a file (``code_named_by``), it imports only code that the user trusts. Trust is
bound to the SHA-256 of the file that names the code, and to that of each file of code.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from platformdirs import user_state_dir

from fedstill.core.errors import (
    USER,
    ConfigError,
    DiskFull,
    FedstillError,
    UnknownName,
    UntrustedCode,
)
from fedstill.core.files import (
    check_windows_path,
    digest,
    make_folder,
    named_path,
    open_to_append,
    open_to_read,
    read_file,
)

log = logging.getLogger("fedstill.trust")


@dataclass(frozen=True)
class Neighbour:
    """A module that a user's file has imported from its own folder."""

    name: str
    sha: str
    """The SHA-256 of the module's file when it was imported."""


_neighbours: dict[Path, Neighbour] = {}
"""The modules that users' files have imported from their folders, by the modules' files."""


def module_of_file(path: Path) -> ModuleType:
    """The module of a user's Python file; raises ConfigError if it cannot be imported."""
    try:
        path = path.expanduser().resolve()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{str(path)[:80]!r} cannot be a file: {error}") from error
    if not is_file:
        raise ConfigError(f"there is no file {path}; paths are relative to the config's folder")
    _forget_changed(path.parent)
    name = _module_name(path)
    if name in sys.modules:
        _check_trusted(path, digest(read_file(path)))
        return sys.modules[name]
    loader = _SourceLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise ConfigError(f"{path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module

    def execute() -> ModuleType:
        with _importable(path.parent):
            loader.exec_module(module)
        return module

    try:
        return imported(str(path), execute)
    except BaseException:
        # After Ctrl-C, too, the module is incomplete.
        del sys.modules[name]
        raise


def module_of_name(module: str) -> ModuleType:
    """The installed module of this name. Raises ConfigError if it cannot be imported."""
    _check_trusted(module, _identity_of_installed(module))
    return imported(module, lambda: importlib.import_module(module))


def imported(source: str, load: Callable[[], ModuleType]) -> ModuleType:
    """A user's module. Any exception during the import becomes a ConfigError."""
    try:
        return load()
    except UntrustedCode:
        raise
    except FedstillError as error:
        raise ConfigError(f"{source}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{source} failed to import: {type(error).__name__}: {error}") from error


def is_library_module(name: str) -> bool:
    """Whether a module is part of fedstill, not a user's or another library's.

    >>> is_library_module("fedstill.core.method"), is_library_module("fedstill_user_method")
    (True, False)
    """
    return name.partition(".")[0] == "fedstill"


def files_of(path: Path) -> list[Path]:
    """A user's file, and all files that have been imported from its folder."""
    neighbours = {file for file in _neighbours if file.is_relative_to(path.parent)}
    return [path, *sorted(neighbours - {path})]


def is_neighbour(path: Path) -> bool:
    """Whether a user's file has imported this file from its folder."""
    return path in _neighbours


def class_identity(cls: type) -> list[str]:
    """The name of a class, and the SHA-256 of its file; empty for files of the library."""
    return [f"{cls.__module__}.{cls.__qualname__}", source_digest(cls)]


def source_digest(target: Any) -> str:
    """The SHA-256 of the user's file that defines a class or a function, and of the modules from
    its folder. Empty for files of the library, which are hashed together.
    """
    if is_library_module(str(target.__module__)):
        return ""
    try:
        paths = files_of(Path(inspect.getfile(target)))
        return digest(b"".join(read_file(path) for path in paths))
    except (TypeError, OSError):
        return ""


def _module_name(path: Path) -> str:
    # By path and content: a file that was edited, say during a notebook, is another module.
    sha = digest(str(path).encode() + read_file(path))
    return f"{USER}{path.stem}_{sha[:8]}"


def _forget_changed(folder: Path) -> None:
    """Forget the modules of this folder, and of each folder of users' files, in which one has
    changed.
    """
    changed = [path for path, neighbour in _neighbours.items() if _sha(path) != neighbour.sha]
    folders = {_file_of(name).parent for name in list(sys.modules) if name.startswith(USER)}
    for user_folder in {folder, *folders}:
        if any(path.is_relative_to(user_folder) for path in changed):
            _forget_modules(user_folder)


def _forget_modules(folder: Path) -> None:
    """Remove all modules of a folder in which one has changed, so that they are imported again: the
    others may have imported from it.
    """
    for path in [path for path in _neighbours if path.is_relative_to(folder)]:
        sys.modules.pop(_neighbours.pop(path).name, None)
    for name in [name for name in sys.modules if name.startswith(USER)]:
        if _file_of(name).is_relative_to(folder):
            del sys.modules[name]


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Make the modules of a folder importable within the block, as for a script.

    Modules that have the same name in another user's folder are imported again.
    """
    _drop_hidden(folder)
    loaded = set(sys.modules)
    entry = str(folder)
    finder = _FolderFinder(folder)
    sys.path.insert(0, entry)
    # Before the finder that searches sys.path, and behind that of built-in modules.
    sys.meta_path.insert(sys.meta_path.index(PathFinder), finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if entry in sys.path:
            sys.path.remove(entry)
        for name in set(sys.modules) - loaded:
            _add_neighbour(name, folder)


def _drop_hidden(folder: Path) -> None:
    """Remove modules of another folder that have the same name as a module of this folder."""
    for path, neighbour in _neighbours.items():
        package = folder / neighbour.name.partition(".")[0]
        is_in_folder = package.is_dir() or package.with_suffix(".py").is_file()
        if is_in_folder and not path.is_relative_to(folder):
            sys.modules.pop(neighbour.name, None)


def _add_neighbour(name: str, folder: Path) -> None:
    """Remember a new module, if it is a user's file in a folder."""
    path = _file_of(name)
    if _is_users(path, folder) and path.suffix == ".py":
        _neighbours[path] = Neighbour(name, _sha(path))


def _file_of(name: str) -> Path:
    """The file of an imported module; the root folder if it has none."""
    return Path(getattr(sys.modules[name], "__file__", None) or "/")


def _is_users(path: Path, folder: Path) -> bool:
    """Whether a file is a user's in a folder, and not an installed package's in an environment
    there.
    """
    return path.is_relative_to(folder) and "site-packages" not in path.relative_to(folder).parts


def _sha(path: Path) -> str:
    try:
        return digest(read_file(path))
    except OSError:
        return ""


class _SourceLoader(SourceFileLoader):
    """Loads a user's file if it is trusted, always from its source.

    A folder ``__pycache__`` may hold other code than the source that the user has read.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.get_filename(fullname))
        source = read_file(path)
        _check_trusted(path, digest(source))
        return self.source_to_code(source, str(path))


class _FolderFinder(MetaPathFinder):
    """Finds the modules of a folder, so that each is checked before it is imported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        file = Path(spec.origin)
        if not _is_users(file, self._folder):
            return None
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _SourceLoader(fullname, spec.origin)
        else:
            _check_trusted(file, digest(read_file(file)))
        return spec


# ---- trust in code that files of strangers name --------------------------------------------------


STATE = "FEDSTILL_STATE"
"""The variable of the environment with the folder for what fedstill notes about this user."""

TRUSTED = "trusted-code"
"""The file of SHA-256 digests in that folder: of trusted code, and of files that may name it."""

ADVICE = "read it, then trust it with trust_code=True"
ADVICE_FOR_COMMANDS = "read it, then trust it with --trust-code"


@dataclass(frozen=True)
class _Naming:
    """A file that names code."""

    path: Path
    sha: str
    """The SHA-256 of the part that names code."""
    is_trusted: bool
    """Whether the user trusts all code that the file names, which is noted for later."""


_naming: ContextVar[_Naming | None] = ContextVar("naming", default=None)
"""The file that names code at present; None if the user did, in a config or in Python."""

_trusted_names: set[str] = set()
"""The digests of files that name code, and that the user has trusted in this process."""

_used: set[str] = set()
"""The digests of all code that the user has named, or trusted, in this process."""


@contextmanager
def code_named_by(path: Path, content: bytes) -> Iterator[None]:
    """Within it, all code is named by a file, and is imported only if the user trusts it.

    ``content``: the part of the file that names code. A file that is used together with another
    one, such as a teacher's model in a query of a run, is trusted if the other one is.
    """
    outer = _naming.get()
    sha = digest(content)
    is_trusted = sha in _trusted_names or (outer is not None and outer.is_trusted)
    token = _naming.set(_Naming(path, sha, is_trusted))
    try:
        yield
    finally:
        _naming.reset(token)


def trust_code_of(content: bytes) -> None:
    """Trust all code that a file with this content names, now and, by its digests, later."""
    _trusted_names.add(digest(content))


def trust_content(content: bytes) -> None:
    """Note that a file with this content may name the code that was used in this process."""
    if _used:
        _note_trusted({digest(content), *_used})


def _check_trusted(code: Path | str, sha: str) -> None:
    """Raise UntrustedCode if a stranger's file names code with this SHA-256."""
    naming = _naming.get()
    if naming is None:
        _used.add(sha)
        return
    if naming.is_trusted:
        _used.add(sha)
        _note_trusted({naming.sha, sha})
        return
    trusted = _trusted()
    if {naming.sha, sha} <= trusted:
        return
    problem = f"{naming.path} names the code {code}, which you have not trusted on this machine"
    if naming.sha in trusted:
        problem = f"{code} has changed since you trusted {naming.path}; restore the original, or"
        raise UntrustedCode(f"{problem} {ADVICE}", f"{problem} {ADVICE_FOR_COMMANDS}")
    raise UntrustedCode(f"{problem}; {ADVICE}", f"{problem}; {ADVICE_FOR_COMMANDS}")


def _identity_of_installed(module: str) -> str:
    """The SHA-256 of a module's name and file; nothing is imported to find the file."""
    path: Sequence[str] | None = None
    source = b""
    parts = module.split(".")
    for number in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:number]), path)
        if spec is None:
            break
        path = spec.submodule_search_locations
        if number == len(parts) and spec.origin is not None and spec.has_location:
            source = read_file(Path(spec.origin))
    return digest(f"{module}\n{digest(source)}".encode())


def _trusted_file() -> Path:
    folder = os.environ.get(STATE) or user_state_dir("fedstill", appauthor=False)
    return named_path(folder) / TRUSTED


def _trusted() -> set[str]:
    """The digests that this user trusts; none if others can write the file."""
    try:
        with open_to_read(_trusted_file()) as file:
            status = os.fstat(file.fileno())
            is_private = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if status.st_uid == os.getuid() and is_private:
                return set(file.read().decode("ascii", "replace").split())
    except OSError:
        pass
    return set()


def _note_trusted(digests: Iterable[str]) -> None:
    """Add digests to the file of the user, which nobody else can read."""
    new = sorted(set(digests) - _trusted())
    if not new:
        return
    path = _trusted_file()
    try:
        make_folder(path.parent)
        with open_to_append(path, 0o600) as file:
            file.write("".join(f"{sha}\n" for sha in new).encode())
    except (OSError, DiskFull) as error:
        log.warning("%s; this run will need --trust-code later", error)


# ---- the class or function that a name means -----------------------------------------------------


@dataclass(frozen=True)
class ParsedName:
    """A name in two parts: what stands before the colon, and the attribute behind it."""

    path: str
    """A path, the name of a module, or a registered name."""
    suffix: str = ""
    """The colon and the attribute: ``:Name``; empty without one."""

    @property
    def attribute(self) -> str:
        """The name of a class or function; empty if the name has none."""
        return self.suffix.removeprefix(":")

    @property
    def is_file(self) -> bool:
        """Whether the name is that of a file of code."""
        return self.path.endswith(".py")

    @property
    def is_code(self) -> bool:
        """Whether the name is that of a file of code, or an import path."""
        return self.is_file or bool(self.attribute)


def split_name(name: str) -> ParsedName:
    """The parts of a name. A folder may have a colon in its name: only the one behind a Python
    file, or in an import path, separates an attribute.

    >>> split_name("/runs/10:30/mine.py:Net"), split_name("/runs/10:30/my.csv")
    (ParsedName(path='/runs/10:30/mine.py', suffix=':Net'), ParsedName(path='/runs/10:30/my.csv', \
suffix=''))
    >>> split_name("mylab.nets:Net")
    ParsedName(path='mylab.nets', suffix=':Net')
    """
    file_and_attribute = re.fullmatch(r"(.*?\.py)(:[^/]*)", name, re.DOTALL)
    if file_and_attribute:
        return ParsedName(*file_and_attribute.groups())
    if "/" in name or name.endswith(".py"):
        return ParsedName(name)
    module, colon, attribute = name.partition(":")
    return ParsedName(module, f"{colon}{attribute}")


def module_of(kind: str, name: str, base: Path) -> ModuleType:
    """The module of ``"mine.py"`` or ``"mine.py:Name"``, relative to ``base``, or of
    ``"package.module:Name"``.
    """
    check_windows_path(name, kind)  # it has a colon, too
    parsed = split_name(name)
    if parsed.is_file:
        return module_of_file(base / parsed.path)
    return module_of_name(parsed.path)


def chosen_target(
    kind: str, name: str, module: ModuleType, registered: Sequence[Callable[..., Any]]
) -> Callable[..., Any]:
    """The class or function that a name means in a module: the named attribute, or the only one of
    the kind that the module registers.

    Raises UnknownName for an unknown attribute, and ConfigError if the module registers several of
    the kind, or none.
    """
    parsed = split_name(name)
    file = Path(parsed.path).name
    if not parsed.attribute:
        if len(registered) == 1:
            return registered[0]
        raise ConfigError(_ambiguity(kind, file, module, registered))
    target = getattr(module, parsed.attribute, None)
    if not callable(target):
        defined = [n for n, value in vars(module).items() if _is_defined_in(value, module)]
        raise UnknownName(kind, parsed.attribute, defined, place=file)
    return target  # type: ignore[no-any-return]


def _ambiguity(
    kind: str, file: str, module: ModuleType, registered: Sequence[Callable[..., Any]]
) -> str:
    """A message for a file that registers several classes or functions of a kind, or none."""
    # An object of a user's class may be callable, too, but has no name.
    named = [value for value in vars(module).values() if hasattr(value, "__name__")]
    targets = registered or named
    choices = [f"{file}:{t.__name__}" for t in targets if _is_defined_in(t, module)]
    if not choices:
        return f"{kind} {file!r}: the file defines no class or function; define the {kind} there"
    count = f"no {kind}"
    if registered:
        count = f"{len(registered)} {kind}s"
    return (
        f"{kind} {file!r}: the file registers {count}; name the one to use: "
        f"{' or '.join(choices[:5])}"
    )


def _is_defined_in(value: Any, module: ModuleType) -> bool:
    return getattr(value, "__module__", "") == module.__name__


def check_fields(kind: str, target: Callable[..., Any]) -> None:
    """Raise ConfigError for a subclass of a dataclass that has fields but is not a dataclass
    itself. A config could not set its fields.
    """
    if not inspect.isclass(target):
        return
    is_below_dataclass = False
    for cls in reversed(target.__mro__):
        if "__dataclass_fields__" in vars(cls):
            is_below_dataclass = True
            continue
        hints = inspect.get_annotations(cls)
        fields = [name for name, hint in hints.items() if "ClassVar" not in str(hint)]
        if is_below_dataclass and fields:
            raise ConfigError(
                f"{kind} {cls.__name__}{_place(cls)} has fields ({', '.join(fields)}) that "
                "no config can set: write @dataclass(frozen=True) above its class"
            )


def _place(cls: type) -> str:
    """The file and line of a class, in brackets; empty if its source is unavailable."""
    try:
        file = Path(inspect.getfile(cls)).name
        line = inspect.getsourcelines(cls)[1]
    except (OSError, TypeError):
        return ""
    return f" ({file}, line {line})"
