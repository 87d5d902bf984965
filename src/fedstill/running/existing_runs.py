"""Runs that are already in the folder of a comparison: the same run, or another one."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.config.earlier import unsaid
from fedstill.config.overrides import flat
from fedstill.config.settings import Settings
from fedstill.config.tables import DataTable
from fedstill.core.errors import ConfigError, CorruptFile, RunExists
from fedstill.data.dataset import Dataset, examples_digest
from fedstill.data.sources.catalog import KNOWN
from fedstill.running.client_data import scale_data, split_data
from fedstill.running.directory import clear, locked, refuse_changed, settings_of
from fedstill.running.preparation import read_data, reading_options, with_pixels
from fedstill.running.provenance import changed_files, changed_models
from fedstill.running.public_data import NOISE, TRAIN
from fedstill.running.variants import Variant

# Whether data are still those with which finished runs began, where others are to be done beside
# them.


class DataNow:
    """The data of runs that are left to do, as they are by now; each set is read once, when it is
    first asked for.
    """

    def __init__(self, left: Sequence[Settings]) -> None:
        self._named = {_name(settings) for settings in left}
        self._read: dict[str, tuple[Dataset, dict[str, str]]] = {}

    def differ(self, settings: Settings, start: Mapping[str, Any]) -> bool:
        """Whether a finished run has the same data set as one that is left, and began with other
        examples than it has now, as its event ``start`` says.

        Never of data that cannot be read, which the run that is left will say; nor where the event
        has no SHA-256 of
        examples: of real sites' own, of features that a backbone gives, and of runs of earlier
        versions.
        """
        began = start.get("examples_sha256")
        if not isinstance(began, Mapping) or _name(settings) not in self._named:
            return False
        try:
            return any(began.get(split) != now for split, now in self._seals(settings).items())
        except ConfigError:
            return False

    def _seals(self, settings: Settings) -> dict[str, str]:
        """The SHA-256 of examples by split; of public ones, too, where they come from other
        data.
        """
        if (name := _name(settings)) not in self._read:
            data = read_data(settings)
            splits = {"train": data.train, "test": data.test}
            self._read[name] = (
                data,
                {split: examples_digest(each) for split, each in splits.items()},
            )
        data, seals = self._read[name]
        if settings.data.public_from in (TRAIN, NOISE):
            return seals
        data = with_pixels(data, settings.data)
        public = scale_data(settings, data, split_data(settings, data)).public
        return seals if public is None else {**seals, "public": examples_digest(public)}


def _name(settings: Settings) -> str:
    return repr((settings.data.name, reading_options(settings)))


# What stands in the folder of a comparison's run: the same run, to go on with; or another one,
# which is in the way.


SAME_BITS = ("serial", "pooled")
"""Engines that give one and the same run."""


def make_way(variants: Sequence[Variant], overwrite: bool) -> None:
    """Delete the runs in variants' folders that are not the variants', if that may be; raises
    RunExists if it may not.

    A run is another one if its settings are, if files of the user's own code or a model that it was
    given have changed since it began, if the run that it starts from is begun anew, or if its data
    are not those of runs that are left to do. variants: each after the one that it starts from.
    """
    anew = set[Path]()
    for variant in variants:
        after = variant.after is not None and variant.after.folder in anew
        if why := in_the_way(variant) or (
            "holds a run that started from one that is begun anew" if after else ""
        ):
            _clear(variant, why, overwrite)
            anew.add(variant.folder)
    if left := [v for v in variants if not _is_finished(v)]:
        now = DataNow([v.settings for v in left])
        for variant in filter(_is_finished, variants):
            if now.differ(variant.settings, _start(variant)):
                _clear(
                    variant,
                    f"holds a run that began before data {variant.settings.data.name!r} changed",
                    overwrite,
                )


def _clear(variant: Variant, why: str, overwrite: bool) -> None:
    if not overwrite:
        raise RunExists(
            f"{variant.folder} {why}; choose another --out, or begin it anew with --overwrite"
        )
    with locked(variant.folder):
        clear(variant.folder)


def _is_finished(variant: Variant) -> bool:
    return (variant.folder / "summary.json").is_file()


def other_settings(variant: Variant) -> list[str]:
    """The dotted keys of which the run in a variant's folder has other values; none where there is
    no run.
    """
    config = variant.folder / "config.toml"
    if not config.is_file():
        return []
    wanted = flat(_defining(variant.settings, variant.settings))
    there = flat(_defining(settings_of(variant.folder), variant.settings))
    other = {k for k in {*wanted, *there} if wanted.get(k) != there.get(k)}
    if _is_finished(variant) and _same_wherever(variant.settings.data):
        other.discard("data.folder")
    return sorted(other - unsaid(tomllib.loads(config.read_text(encoding="utf-8"))))


def _same_wherever(data: DataTable) -> bool:
    """Whether a data set's name says which examples it has: its checksums are known, so other data
    are refused.
    """
    known = KNOWN.get(data.name)
    as_known = not (data.image_column or data.label_column or data.size or data.form)
    return (
        as_known and known is not None and bool(known.sums) and data.public_from in (TRAIN, NOISE)
    )


def as_settled(folder: Path) -> dict[str, Any]:
    """Every value of an existing run by dotted key, but those of which its config says nothing."""
    unknown = unsaid(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")))
    return {k: v for k, v in flat(settings_of(folder).tree).items() if k not in unknown}


def other_files(variant: Variant) -> list[str]:
    """The user's own files, by name, and models that are not those with which the run in a
    variant's folder began.
    """
    start = _start(variant)
    try:
        names = [Path(path).name for path in changed_files(variant.settings, start)]
    except (OSError, KeyError, TypeError, AttributeError):
        names = []  # it has not begun, or is damaged, which whoever goes on with it will say
    try:
        return sorted(names + changed_models(variant.settings, start)) if start else names
    except (ConfigError, OSError):
        return sorted(names)  # the model is not there yet


def _start(variant: Variant) -> Mapping[str, Any]:
    """The event ``start`` of the run in a variant's folder; empty where it has not begun, or is
    damaged.
    """
    try:
        with (variant.folder / "journal.jsonl").open("rb") as journal:
            start = json.loads(journal.readline())
    except (OSError, ValueError, RecursionError):
        return {}
    return start if isinstance(start, Mapping) else {}


def in_the_way(variant: Variant) -> str:
    """Why the run in a variant's folder is not the variant's; empty if it is, or there is none."""
    try:
        if other := other_settings(variant):
            return f"holds a run with other settings ({', '.join(other)})"
        refuse_changed(variant.folder)
    except CorruptFile as error:
        return f"holds a damaged run ({error})"
    if files := other_files(variant):
        return f"holds a run that began before {', '.join(files)} changed"
    return ""


def _defining(settings: Settings, wanted: Settings) -> Mapping[str, Any]:
    """The settings that identify a run: all but an engine with the serial engine's bits, or one
    that ``auto`` chose.
    """
    same = settings.engine in SAME_BITS or wanted.engine == "auto"
    return {**settings.tree, "engine": "serial"} if same else settings.tree
