"""Is this the same run? One answer for resume, compare, report, ranking and loading.

The numbers of a run depend on

- its settings: every value of config.toml, except that engines with the same bits count as one;
- code and models of the user's that the settings name, known by their SHA-256;
- its data: classes, test labels, what makes inputs of examples, and the examples;
- the versions of software, and a graphics card.

The journal's first event, ``start``, notes all of these but the settings. Two runs are the same if
settings, code, models and data agree. A run may go on with other versions: it gets a warning and an
event ``resumed``, since its bits may then differ.
"""

from __future__ import annotations

import contextlib
import logging
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.config.experiment import fingerprint
from fedstill.config.named_tables import texts_in
from fedstill.config.settings import Settings
from fedstill.config.tables import DataTable
from fedstill.core.errors import ConfigError, CorruptFile, UntrustedCode
from fedstill.core.files import digest, flat, open_to_read, read_file
from fedstill.core.records import State
from fedstill.core.reports import json_value
from fedstill.core.user_code import is_users_file
from fedstill.core.user_modules import files_of, split_name
from fedstill.data.sources.catalog import KNOWN
from fedstill.engines.devices import card_named, is_cuda
from fedstill.running.client_data import NOISE, TRAIN
from fedstill.running.directory import settings_of
from fedstill.running.journal import (
    CONFIG,
    JOURNAL,
    VERSIONS,
    Event,
    Journal,
    check_config,
    is_finished,
    start_of_journal,
    without_times,
)
from fedstill.running.model_files import model_sha256
from fedstill.running.world import RunWorld
from fedstill.version import VERSION

log = logging.getLogger("fedstill.resume")

# What a run depends on besides its config: versions, the user's code, the models that it is given.


PROCESSOR_NUMBERS = {"cpu family": "family", "model": "model"}
"""What Linux calls the numbers of a processor's generation, and what they are called here."""


def software(device: str = "cpu") -> dict[str, str]:
    """The versions that a run's bits may depend on, and the card if it trains on one."""
    versions = {
        "fedstill": VERSION,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    if is_cuda(device):
        versions["card"] = card_named(device)
    return versions


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, its family and model, and the vector instructions that torch uses.

    cpuinfo: where Linux describes the processor. The name alone is not enough: two generations of
    one maker can share it.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    described = {}
    for line in reversed(lines):  # so that the first processor's values remain
        key, _, value = line.partition(":")
        described[key.strip()] = value.strip()
    name = described.get("model name") or platform.processor() or platform.machine()
    details = [
        f"{word} {described[key]}" for key, word in PROCESSOR_NUMBERS.items() if key in described
    ]
    details.append(torch.backends.cpu.get_cpu_capability())
    return f"{name} ({', '.join(details)})"


def code_digests(settings: Settings, *, modules: bool = True) -> dict[str, str]:
    """The SHA-256 of each of the user's files that the config names, by path, and of what came from
    Python, by name.

    modules: whether modules count, too: those beside these files, since the files may import them,
    and those of the user's that an import path names.
    """
    named = settings.named
    names = [named.method.name, named.model.name, named.partition.name, named.topology.name]
    names.append(named.stream.name)
    names += [settings.data.public_from, *settings.measure]
    # A field of a network can name another network, and so can a table of a client's network.
    backbone = dict(settings.data.features_of or {})
    backbone.pop("file", None)  # the directory of a run, or a model file
    for part in (settings.clients_table.models, named.model.values, backbone):
        names += texts_in(part)
    code_names = [name for name in map(split_name, names) if name.is_file]
    # A text can look like a file: a note, or a name that needs no file here.
    paths = {Path(name.path) for name in code_names if Path(name.path).is_file()}
    if modules:
        paths = {path for file in paths for path in files_of(file)}
        paths |= _imported_files(names)
    digests = {str(path): digest(read_file(path)) for path in sorted(paths, key=str)}
    for live in settings.live_objects:
        digests[live.name] = fingerprint(live.kind, live.name)
    return digests


def _imported_files(names: Sequence[str]) -> set[Path]:
    """The user's files that were imported because a name is an import path, "mylab.nets:Net"."""
    paths = set()
    for name in map(split_name, names):
        if name.is_file or not name.is_code:
            continue
        file = getattr(sys.modules.get(name.path), "__file__", None)
        if file is not None and is_users_file(file) and Path(file).is_file():
            paths.add(Path(file))
    return paths


def start_fields(settings: Settings, world: RunWorld) -> dict[str, Any]:
    """The fields of the event ``start`` about software and models: versions and SHA-256.

    If the start model fits only in part, they list the missing and the unused entries, and a
    warning is logged.
    """
    fields: dict[str, Any] = {**software(settings.device), "sources": code_digests(settings)}
    for key, source in _model_sources(settings).items():
        fields[key] = model_sha256(source)
    start = world.start
    if settings.start_from_partial and start is not None:
        log.warning("start_from = %r: %s", settings.start_from, start)
        fields["start_from_new"] = list(start.new)
        fields["start_from_left_out"] = list(start.left_out)
    return fields


def _model_sources(settings: Settings) -> dict[str, str]:
    """The models that the run is given, by config key: to start from, or to take features of."""
    sources = {}
    if settings.start_from:
        sources["start_from"] = settings.start_from
    if settings.data.features_of:
        sources["features_of"] = settings.data.features_of["file"]
    return sources


# The identity of a run, and the differences of the present code and data from it.


MODEL_KEYS = ("start_from", "features_of")
"""The config keys that name a model; the event ``start`` has its SHA-256 by the same name."""

DATA_FIELDS = {
    "classes": "the classes",
    "test_counts": "the labels of the test set",
    "inputs": "the inputs' mean or standard deviation",
    "examples_sha256": "the examples themselves",
}
"""The fields of the event ``start`` that identify the data, with their names in messages."""


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run, apart from its settings, as its event ``start`` notes it.

    code: as ``code_digests``. models: SHA-256 by config key. data: the ``DATA_FIELDS`` that the
    event has. Empty for a run that has not begun, or is damaged.
    """

    code: Mapping[str, str]
    models: Mapping[str, str]
    data: Mapping[str, Any]

    @staticmethod
    def noted_in(start: Mapping[str, Any]) -> RunIdentity:
        """The identity in an event ``start``."""
        code = start.get("sources")
        if not isinstance(code, Mapping):
            code = {}
        models = {key: start[key] for key in MODEL_KEYS if key in start}
        data = {key: start[key] for key in DATA_FIELDS if key in start}
        return RunIdentity(code, models, data)

    def changed_code(self, settings: Settings) -> list[str]:
        """The paths of the user's files that have changed since the run started."""
        digests = code_digests(settings)
        # A module that was put beside these files later is no part of the run. Earlier versions did
        # not note the modules of import paths.
        named = code_digests(settings, modules=False)
        return [
            path
            for path, sha in digests.items()
            if self.code.get(path) != sha and (path in self.code or path in named)
        ]

    def changed_models(self, settings: Settings) -> list[str]:
        """The models, as the config names them, that are not what they were when the run began.

        Raises ConfigError where there is no model.
        """
        sources = _model_sources(settings)
        return [
            source
            for key, source in sources.items()
            if self.models.get(key) != model_sha256(source)
        ]

    def changed_data(self, start_now: Mapping[str, Any]) -> list[str]:
        """The ``DATA_FIELDS`` that are not what they were when the run began.

        start_now: the event ``start`` that a run on today's data would write.
        """
        current = json_value(dict(start_now))
        return [key for key, value in self.data.items() if not _is_equal(value, current.get(key))]

    def has_other_examples(self, digests: Mapping[str, str]) -> bool:
        """Whether the examples, given by the SHA-256 of each split, are not what they were.

        Never where the run noted none: of real sites, and of features that a backbone gives.
        """
        examples = self.data.get("examples_sha256")
        if not isinstance(examples, Mapping):
            return False
        return any(examples.get(split) != sha for split, sha in digests.items())


def _is_equal(first: Any, second: Any) -> bool:
    """Whether two values are equal, numbers up to rounding, since another processor sums in another
    order.
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if first.keys() != second.keys():
            return False
        return all(_is_equal(value, second[key]) for key, value in first.items())
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_is_equal, first, second))
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-5, abs_tol=1e-9)
    return bool(first == second)


def name_for_clients(folder: Path) -> str:
    """The identifier of a run for its clients: unique, and unchanged by a resume.

    It is a digest of the journal's first line, which has the time at which the run began.
    """
    with open_to_read(folder / JOURNAL) as journal:
        return digest(journal.readline())[:16]


def comparable_start(start: Event) -> Event:
    """An event ``start`` without times, versions and the source of the code.

    Two runs of one config on different machines agree in it. The SHA-256 of the examples is left
    out, since not every run notes it.
    """
    left_out = {*VERSIONS, "sources", "examples_sha256"}
    return {key: value for key, value in without_times(start).items() if key not in left_out}


# Resume: code, models and data must be unchanged.


def check_same(settings: Settings, start: Mapping[str, Any], start_now: Mapping[str, Any]) -> None:
    """Raise CorruptFile if code, models or data are not those that the run was started with.

    start: the run's event ``start``. start_now: the one that a run on today's data would write;
    real sites check their data themselves.
    """
    identity = RunIdentity.noted_in(start)
    for path in identity.changed_code(settings):
        kind = "the code"
        if path.endswith(".py"):
            kind = "the file"
        raise _not_same(
            f"{path} is not {kind} that the run was started with; restore the original to resume"
        )
    for source in identity.changed_models(settings):
        raise CorruptFile(
            f"{source} holds another model than when the run was started; restore the original to "
            "resume"
        )
    if settings.on_sites:
        return
    for key in identity.changed_data(start_now):
        cause = ""
        if key == "examples_sha256" and "kind" not in start_now["inputs"]:
            cause = " (another version of Pillow may decode pictures otherwise)"
        raise _not_same(
            f"data {settings.data.name!r}: {DATA_FIELDS[key]} differ from those that the run was "
            f"started with{cause}; put the data back as they were to resume"
        )


def _not_same(text: str) -> CorruptFile:
    """The error for a run that is not the same, with the way to start again, in Python and as a
    command.
    """
    return CorruptFile(
        f"{text}, or start again with overwrite=True", f"{text}, or start again with --overwrite"
    )


def note_versions(
    journal: Journal, events: Sequence[Mapping[str, Any]], state: State, device: str
) -> None:
    """Warn of a run that goes on with other versions or on another card, and write the event
    ``resumed``.

    events: the journal's; a version that they do not name is not compared. device: the run's.
    """
    recorded = dict(events[0])
    for event in events:
        if event["event"] == "resumed" and isinstance(event.get("versions"), Mapping):
            recorded.update(event["versions"])
    versions = {
        name: version
        for name, version in software(device).items()
        if recorded.get(name, version) != version
    }
    if not versions:
        return
    earlier = {name: str(recorded[name]) for name in versions}
    log.warning(
        "%s was run with %s and goes on with %s: its bits may differ from those of a run that was "
        "not stopped",
        journal.path.parent,
        _listed(earlier),
        _listed(versions),
    )
    journal.write(
        "resumed", round=state.round, stage=state.stage, before=earlier, versions=versions
    )


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


# Comparisons: whether the run in a folder is the one that a comparison wants there.


SAME_BITS = ("serial", "pooled")
"""Engines that give the same bits, so that runs by them are the same."""


def why_not_same(settings: Settings, folder: Path) -> str:
    """Why the run in a folder is not the run with these settings; empty if it is, or if there is no
    run.
    """
    try:
        keys = other_settings(settings, folder)
        if keys:
            return f"holds a run with other settings ({', '.join(keys)})"
        check_config(folder)
    except CorruptFile as error:
        return f"holds a damaged run ({error})"
    except UntrustedCode as error:
        # Code that has changed is not trusted either, and then the change is the reason.
        return _changed_files(settings, folder) or f"holds a run of somebody else ({error})"
    return _changed_files(settings, folder)


def _changed_files(settings: Settings, folder: Path) -> str:
    """Why a run with changed files is another run; empty if none has changed."""
    files = other_files(settings, folder)
    if not files:
        return ""
    return f"holds a run that began before {', '.join(files)} changed"


def other_settings(settings: Settings, folder: Path) -> list[str]:
    """The dotted keys whose values differ in the run of a folder; none if there is no run."""
    config = folder / CONFIG
    if not config.is_file() or read_file(config) == settings.toml.encode():
        return []
    values = flat(_identifying(settings, settings))
    stored_values = flat(_identifying(settings_of(folder), settings))
    different = {
        key
        for key in values.keys() | stored_values.keys()
        if values.get(key) != stored_values.get(key)
    }
    if is_finished(folder) and _has_known_examples(settings.data):
        different.discard("data.folder")
    return sorted(different)


def other_files(settings: Settings, folder: Path) -> list[str]:
    """The user's files, by name, and the models that have changed since the run in a folder
    started.
    """
    start = start_of_journal(folder)
    if not start:
        return []  # it has not begun, or is damaged, which whoever goes on with it will say
    identity = RunIdentity.noted_in(start)
    files = []
    # A file or a model may be missing, which whoever goes on with the run will say.
    with contextlib.suppress(OSError):
        files += [Path(path).name for path in identity.changed_code(settings)]
    with contextlib.suppress(ConfigError, OSError):
        files += identity.changed_models(settings)
    return sorted(files)


def settings_by_key(folder: Path) -> dict[str, Any]:
    """Every value of an existing run, by dotted key."""
    return flat(settings_of(folder).tree)


def _identifying(settings: Settings, expected: Settings) -> Mapping[str, Any]:
    """The settings that identify a run: all but the reason for an engine, and an engine with the
    serial engine's bits, or one that ``auto`` chose.
    """
    identifying = dict(settings.tree)
    identifying.pop("engine_reason", None)
    if settings.engine in SAME_BITS or expected.engine == "auto":
        identifying["engine"] = "serial"
    return identifying


def _has_known_examples(data: DataTable) -> bool:
    """Whether the name of a data set determines its examples: its checksums are known, so other
    data are refused.
    """
    data_set = KNOWN.get(data.name)
    if data_set is None or not data_set.digests:
        return False
    if data.image_column or data.label_column or data.images or data.form:
        return False
    return data.public_from in (TRAIN, NOISE)
