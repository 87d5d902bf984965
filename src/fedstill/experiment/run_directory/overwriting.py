"""Beginning a run anew in a directory that holds one: what fedstill wrote there is deleted, and
nothing else.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from fedstill.errors import RunExists
from fedstill.experiment.run_directory.begun import runs_below
from fedstill.files import is_leftover, remove
from fedstill.written_over import RUN_TABLE

HEX, MEMORY = "[0-9a-f]{64}", r"client-?\d+-round\d+-stage\d+\.safetensors"

WRITTEN = re.compile(
    r"config\.toml|(journal|why)\.jsonl|(summary|trackers)\.json|(model|split)\.safetensors|report\.html|holder\.json|lock|sums-name|sum-left\.json"
    rf"|checkpoints/(\d{{7}}-\d{{7}}\.json|LATEST|objects(/{HEX}\.safetensors)?)|memory/{MEMORY}"
    rf"|measures/[^/]+\.safetensors|checkpoints|memory|measures|tensorboard(/events\.out\.tfevents\.[^/]+)?"
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
        return set(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))) >= TABLES
    except (OSError, ValueError, RecursionError):
        return False
