"""What a run's bits depend on beside its config: versions, the user's own files, the model that it
starts from.
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.config.client_models import words
from fedstill.config.experiment import fingerprint
from fedstill.config.settings import Settings
from fedstill.core.errors import CorruptFile
from fedstill.core.files import digest
from fedstill.core.records import State
from fedstill.core.registry import LIVE, files_of
from fedstill.core.reports import json_value
from fedstill.engines.precision import card_named
from fedstill.running.journal import Journal
from fedstill.running.start_weights import seal
from fedstill.running.world import RunWorld
from fedstill.version import VERSION

log = logging.getLogger("fedstill.resume")

SAME = {
    "classes": "the classes",
    "test_counts": "the labels of the test set",
    "inputs": "the inputs' mean or spread",
    "examples_sha256": "the examples themselves",
}
"""What of the event ``start`` tells whether the data are the same, and what it is called."""

FAMILY = {"cpu family": "family", "model": "model"}
"""What Linux calls the numbers of a processor's generation, and what they are called here."""

PILLOW = " (another version of Pillow may decode pictures otherwise)"


def software(device: str = "cpu") -> dict[str, str]:
    """The versions that a run's bits may depend on, and the card, where it trains on one."""
    there = {"card": card_named(device)} if device == "cuda" else {}
    return {
        "fedstill": VERSION,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        **there,
    }


def processor(described: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, its family and model, and the vector instructions that torch takes of
    it.

    ``described``: where Linux describes it. The name alone does not tell: two generations of one
    maker can share it.
    """
    try:
        lines = described.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in reversed(lines))
    }
    name = told.get("model name") or platform.processor() or platform.machine()
    generation = [f"{word} {told[key]}" for key, word in FAMILY.items() if key in told]
    return f"{name} ({', '.join([*generation, torch.backends.cpu.get_cpu_capability()])})"


def versions(settings: Settings, world: RunWorld) -> dict[str, Any]:
    """Fields of the event ``start``: versions, SHA-256 of files that the config names, and what was
    taken of a model that fits in parts only, of which there is a warning too.
    """
    seals = {key: seal(place) for key, place in _given_models(settings).items()}
    said: dict[str, Any] = {**software(settings.device), "sources": sources(settings), **seals}
    if settings.start_from_partial and (start := world.start):
        log.warning("start_from = %r: %s", settings.start_from, start)
        said |= {"start_from_new": list(start.new), "start_from_left_out": list(start.left_out)}
    return said


def sources(settings: Settings, beside: bool = True) -> dict[str, str]:
    """SHA-256 of each file of the user's own code that the config names, and of modules beside it,
    by path; and of what came from Python.
    """
    named = settings.named
    names = [named.method.name, named.model.name, named.partition.name, named.topology.name]
    names += [settings.data.public_from, *words(settings.of_clients.models), *settings.measure]
    names += [*words(named.model.values), *words(settings.data.features_of or {})]
    own = {Path(n.partition(":")[0]) for n in names if ".py" in n}
    paths = sorted({str(path) for file in own for path in (files_of(file) if beside else [file])})
    files = {path: digest(Path(path).read_bytes()) for path in paths}
    each = (named.method, named.model, named.partition)
    return files | {
        one.name: fingerprint(one.kind, one.name) for one in each if one.name in settings.lives
    }


def changed_files(settings: Settings, start: Mapping[str, Any]) -> list[str]:
    """Paths of files of the user's own code, modules beside them too, that are not as the event
    ``start`` has them.
    """
    named, before = sources(settings, beside=False), start["sources"]
    # an earlier version noted no modules beside a file
    return [
        p for p, sha in sources(settings).items() if before.get(p, "" if p in named else sha) != sha
    ]


def changed_models(settings: Settings, start: Mapping[str, Any]) -> list[str]:
    """Models to start from, or to take features of, that are not as the event ``start`` has them,
    as the config names them. Raises ConfigError where there is none.
    """
    return [
        place for key, place in _given_models(settings).items() if start.get(key) != seal(place)
    ]


def _given_models(settings: Settings) -> dict[str, str]:
    of = settings.data.features_of
    places = {"start_from": settings.start_from, "features_of": of["file"] if of else ""}
    return {key: place for key, place in places.items() if place}


def check_sources(settings: Settings, start: Mapping[str, Any]) -> None:
    """Raise CorruptFile for a file that is not the one that the run was started with, as its event
    ``start`` says.
    """
    for path in changed_files(settings, start):
        what = "the code" if path.startswith(LIVE) else "the file"
        text = (
            f"{path} is not {what} that the run was started with; restore the original to resume, "
            "or begin anew"
        )
        raise CorruptFile(f"{text} with overwrite=True", f"{text} with --overwrite")
    for place in changed_models(settings, start):
        raise CorruptFile(
            f"{place} holds another model than when the run was started; restore the original to "
            "resume"
        )


def check_same(settings: Settings, start: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Raise CorruptFile where the code, a model to start from, or the data are not those that the
    run was started with.

    start: its event ``start``; told: what such an event would say of the data now.
    """
    check_sources(settings, start)
    check_data(settings, start, told)


def check_data(settings: Settings, start: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Raise CorruptFile where classes, test labels or inputs are others than before; real sites see
    to theirs.
    """
    now = json_value(dict(told))
    for key, what in SAME.items() if not settings.on_sites else ():
        if key in start and not _alike(start[key], now.get(key)):
            text = (
                f"data {settings.data.name!r}: {what} differ from those that the run was started "
                "with"
            )
            text += PILLOW if key == "examples_sha256" and "kind" not in now["inputs"] else ""
            text += "; put the data back as they were to resume, or begin anew"
            raise CorruptFile(f"{text} with overwrite=True", f"{text} with --overwrite")


def _alike(before: Any, now: Any) -> bool:
    """Whether two values are the same, numbers but for rounding: another processor sums in another
    order.
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return before.keys() == now.keys() and all(_alike(before[k], now[k]) for k in before)
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)):
        return len(before) == len(now) and all(map(_alike, before, now))
    if isinstance(before, float) and isinstance(now, float):
        return math.isclose(before, now, rel_tol=1e-5, abs_tol=1e-9)
    return bool(before == now)


def note_versions(
    journal: Journal, events: Sequence[Mapping[str, Any]], state: State, device: str
) -> None:
    """Warn of a run that goes on with other versions or on another card, and write the event
    ``resumed``; else nothing.

    events: the journal's, which say the versions so far; one that they do not say is not
    compared. device: the run's.
    """
    known = dict(events[0])
    for event in events:
        if event["event"] == "resumed" and isinstance(event.get("versions"), Mapping):
            known.update(event["versions"])
    now = {
        name: version
        for name, version in software(device).items()
        if known.get(name, version) != version
    }
    if not now:
        return
    before = {name: str(known[name]) for name in now}
    log.warning(
        "%s was run with %s and goes on with %s: its bits may differ from those of a run that was "
        "not stopped",
        *(
            journal.path.parent,
            *(", ".join(f"{k} {v}" for k, v in each.items()) for each in (before, now)),
        ),
    )
    journal.write("resumed", round=state.round, stage=state.stage, before=before, versions=now)
