"""What stands in the folder of a comparison's run: the same run, to go on with; or another one, which is in the way."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill.errors import CorruptFile, RunExists
from fedstill.experiment.comparing.variants import Variant
from fedstill.experiment.config.earlier import unsaid
from fedstill.experiment.config.overrides import flat
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.run_directory.begun import settings_of
from fedstill.experiment.run_directory.claim import locked
from fedstill.experiment.run_directory.overwriting import clear
from fedstill.experiment.running.provenance import sources

SAME_BITS = ("serial", "pooled")
"""Engines that give one and the same run."""


def make_way(variant: Variant, overwrite: bool) -> None:
    """Delete the run in a variant's folder that is not the variant's, if that may be; raises RunExists if it may not.

    The run is another one if its settings are, or if files of the user's own code have changed since it began.
    """
    if not (why := _in_the_way(variant)):
        return
    if not overwrite:
        raise RunExists(f"{variant.folder} {why}; choose another --out, or begin it anew with --overwrite")
    with locked(variant.folder):
        clear(variant.folder)


def other_settings(variant: Variant) -> list[str]:
    """The dotted keys of which the run in a variant's folder has other values; none where there is no run."""
    config = variant.folder / "config.toml"
    if not config.is_file():
        return []
    wanted = flat(_defining(variant.settings, variant.settings))
    there = flat(_defining(settings_of(variant.folder), variant.settings))
    other = {k for k in {*wanted, *there} if wanted.get(k) != there.get(k)}
    return sorted(other - unsaid(tomllib.loads(config.read_text(encoding="utf-8"))))


def as_settled(folder: Path) -> dict[str, Any]:
    """Every value of an existing run by dotted key, but those of which its config says nothing."""
    unknown = unsaid(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")))
    return {k: v for k, v in flat(settings_of(folder).tree).items() if k not in unknown}


def other_files(variant: Variant) -> list[str]:
    """The names of the user's own files that are not those with which the run in a variant's folder began."""
    try:
        with (variant.folder / "journal.jsonl").open("rb") as journal:
            began = json.loads(journal.readline())["sources"]
        return sorted(Path(path).name for path, sha in sources(variant.settings).items() if began.get(path) != sha)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []  # it has not begun, or is damaged, which whoever goes on with it will say


def _in_the_way(variant: Variant) -> str:
    try:
        if other := other_settings(variant):
            return f"holds a run with other settings ({', '.join(other)})"
    except CorruptFile as error:
        return f"holds a damaged run ({error})"
    if files := other_files(variant):
        return f"holds a run that began before {', '.join(files)} changed"
    return ""


def _defining(settings: Settings, wanted: Settings) -> Mapping[str, Any]:
    """The settings that identify a run: all but an engine with the serial engine's bits, or one that ``auto`` chose."""
    same = settings.engine in SAME_BITS or wanted.engine == "auto"
    return {**settings.tree, "engine": "serial"} if same else settings.tree
