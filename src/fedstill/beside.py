"""Modules beside a user's file: it can import them, and what was imported is known, so that an edit
is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedstill.files import digest

_imported: dict[Path, tuple[str, str]] = {}
"""What users' files imported from their own folders, by file: the module's name, and the file's
SHA-256 then.
"""


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Within it the modules of a folder can be imported, as beside a script; ``sys.path`` is as
    before afterwards.

    Modules of that name from another user's folder, and ones whose file has changed, are imported
    anew.
    """
    for path, (name, sha) in _imported.items():
        top = folder / name.partition(".")[0]
        hidden = not path.is_relative_to(folder) and (
            top.is_dir() or top.with_suffix(".py").is_file()
        )
        if hidden or _sha(path) != sha:
            sys.modules.pop(name, None)
    before, place = set(sys.modules), str(folder)
    sys.path.insert(0, place)
    try:
        yield
    finally:
        if place in sys.path:
            sys.path.remove(place)
        for name in set(sys.modules) - before:
            path = Path(getattr(sys.modules[name], "__file__", None) or "/")
            if (
                path.suffix == ".py"
                and path.is_relative_to(folder)
                and "site-packages" not in path.parts
            ):
                _imported[path] = name, _sha(path)


def files_of(path: Path) -> list[Path]:
    """A user's file, and the files of all modules that files of its folder have imported from
    there.
    """
    return [
        path,
        *sorted({other for other in _imported if other.is_relative_to(path.parent)} - {path}),
    ]


def stale(folder: Path) -> bool:
    """Whether a module that a file of a folder has imported from there has another file now."""
    return any(
        path.is_relative_to(folder) and _sha(path) != sha for path, (_, sha) in _imported.items()
    )


def _sha(path: Path) -> str:
    try:
        return digest(path.read_bytes())
    except OSError:
        return ""
