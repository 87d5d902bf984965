"""A run that has begun: its settings, as its directory says them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from fedstill.errors import ConfigError, CorruptFile, NoRun
from fedstill.experiment.config.earlier import as_it_began
from fedstill.experiment.config.experiment import LIVING, from_tree
from fedstill.experiment.config.named_tables import NAMED
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.config.settle import settle
from fedstill.experiment.run_directory.journal import CONFIG_SEAL, read_journal
from fedstill.files import digest, in_shell
from fedstill.live_code import bind
from fedstill.method import Method
from fedstill.registry import LIVE


def settings_of(folder: Path, **live: Any) -> Settings:
    """The settings of an existing run; raises NoRun where there is none, CorruptFile for one that
    is damaged.

    ``live``: what was handed over from Python when the run began, by table (``method``, ``model``,
    ``partition``). Raises ConfigError for another table, and for one that the run finds itself.
    """
    path = folder / "config.toml"
    try:
        tree = tomllib.loads(path.read_bytes().decode())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoRun(f"{folder} holds no run: {_instead(folder)}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} cannot be read: {error}") from error
    for table, thing in live.items():
        if table not in LIVING:
            raise ConfigError(f"resume takes no {table}: what a run is stands in {path}")
        name = tree.get(table, {}).get(NAMED[table][0], "")
        if not name.startswith(LIVE):
            raise ConfigError(f"{folder} finds its {table} {name!r} itself; leave {table} out")
        bind(table, name, type(thing) if isinstance(thing, Method) else thing)
    return settle(from_tree(as_it_began(tree), {}, folder), here=False)


def refuse_changed(folder: Path) -> None:
    """Raise CorruptFile for a config.toml that is not the one with which the run began.

    That one's SHA-256 is in the journal's first event; of runs of earlier versions, in the newest
    checkpoint.
    """
    path = folder / "config.toml"
    try:
        began = _config_of(folder)
        same = not began or began == digest(path.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, RecursionError, CorruptFile):
        return  # it has not begun, or is damaged, which whoever reads it will say
    if not same:
        new = in_shell(path.resolve())
        raise CorruptFile(
            f"{path} has changed since the run began, and a run goes on with its own settings "
            "alone: put it back; with "
            "others, more rounds for example, a new run may start from this one's model: fedstill "
            f"run {new} --out NEW "
            f"-s start_from={in_shell(folder.resolve())}"
        )


def _config_of(folder: Path) -> str:
    """The SHA-256 of the config.toml with which a run began; empty where nothing says it."""
    journal = folder / "journal.jsonl"
    if journal.is_file() and (start := read_journal(journal, 1)) and CONFIG_SEAL in start[0]:
        return str(start[0][CONFIG_SEAL])
    if newest := max((folder / "checkpoints").glob("*.json"), default=None):
        return str(json.loads(newest.read_bytes())["manifest"]["config"])
    return ""


def refuse_lost(folder: Path) -> None:
    """Raise CorruptFile for an unfinished run with rounds in its journal and no checkpoint: it
    would begin anew.
    """
    journal = folder / "journal.jsonl"
    if (
        (folder / "summary.json").is_file()
        or any((folder / "checkpoints").glob("*.json"))
        or not journal.is_file()
    ):
        return
    if done := max((e.get("round") or 0 for e in read_journal(journal)), default=0):
        text = (
            f"{folder} has come to round {done}, and has no checkpoint to go on from (a pack keeps "
            "none): put its "
            "folder checkpoints back, or begin it anew with"
        )
        raise CorruptFile(f"{text} fedstill.run(..., overwrite=True)", f"{text} --overwrite")


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
