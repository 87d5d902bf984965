"""The split of a run in a file beside its journal: whose examples are where, and their labels; the
journal seals it.

Reading: earlier versions wrote the label counts of all clients into the journal's first line; that
is read, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from fedstill.core.errors import CorruptFile
from fedstill.core.files import digest, write_whole
from fedstill.data.client_split import DealtOut, FlatParts, LabelCounts
from fedstill.running.journal import read_journal

if TYPE_CHECKING:
    from fedstill.core.records import ModelSpec
    from fedstill.data.views import SiteViews

SPLIT = "split.safetensors"
"""The file's name in a run's directory."""

AGAIN = (
    "restore it, or delete it, and summary.json too if the run is finished, and `fedstill resume` "
    "the run: then the "
    "split is drawn again"
)


def write_split(folder: Path, split: DealtOut) -> dict[str, Any]:
    """Write a run's split into its directory, whole or not at all; what the journal says of it.

    The file is safetensors: ``positions`` (n,) and their ``labels`` (n,), client after client, and
    ``ends`` (clients,), where each client's stop; the numbers have the smallest type that holds
    them. Where networks differ, ``networks`` (clients,) are numbers of the names that the journal
    has.
    """
    write_whole(folder / SPLIT, data := _bytes_of(split))
    return _told(split, data)


def begun_split(folder: Path) -> DealtOut | None:
    """The split with which the run in a directory began; None if it names none yet, or the file is
    not there.

    Raises CorruptFile, naming the file, if it is not what was written.
    """
    if not (folder / "journal.jsonl").is_file() or not (folder / SPLIT).exists():
        return None
    first = read_journal(folder / "journal.jsonl", 1)
    return read_split(folder, first[0]) if first else None


def restore_split(folder: Path, start: Mapping[str, Any], split: DealtOut) -> None:
    """Write the file of a run that lost it again, given the split as it is drawn now.

    Raises CorruptFile if that is not the one with which the run began.
    """
    if "split" not in start or (folder / SPLIT).exists():
        return
    if digest(_bytes_of(split)) != start["split"].get("sha256"):
        raise CorruptFile(
            f"{folder / SPLIT} is gone, and the split that is drawn now is another than the run "
            "began with; restore it"
        )
    write_split(folder, split)


def read_split(folder: Path, start: Mapping[str, Any]) -> DealtOut | None:
    """The split that the event ``start`` of a run's journal names; None where it names none: real
    sites, old runs.

    Raises CorruptFile, naming the file, if it is gone or is not what was written.
    """
    if not isinstance(start.get("split"), Mapping):
        return None
    path = folder / SPLIT
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptFile(
            f"{path}, the split of the run, cannot be read: {error.strerror}; {AGAIN}"
        ) from error
    if digest(data) != start["split"].get("sha256"):
        raise CorruptFile(
            f"{path}, the split of the run, is not what was written: its SHA-256 is another; "
            f"{AGAIN}"
        )
    try:
        arrays = safetensors.numpy.load(data)
        order, labels, ends = (
            arrays[name].astype(np.int64) for name in ("positions", "labels", "ends")
        )
    except (SafetensorError, KeyError) as error:
        raise CorruptFile(f"{path} is no split of a run: {error}; {AGAIN}") from error
    names = tuple(str(name) for name in start["split"].get("networks", ()))
    return DealtOut(
        FlatParts(order, ends), labels, names, arrays.get("networks", np.zeros(0, dtype=np.int64))
    )


def read_label_counts(folder: Path, start: Mapping[str, Any]) -> LabelCounts:
    """Label counts by client of a run, from its file or an old journal's line; of no client where
    nobody knows them.

    Raises CorruptFile, naming the file, as ``read_split``; classes: as many as the event ``start``
    names.
    """
    return label_counts_of(read_split(folder, start), start)


def label_counts_of(stored: DealtOut | None, start: Mapping[str, Any]) -> LabelCounts:
    """The same, given what ``read_split`` gave."""
    classes = len(start.get("classes", []))
    return (
        LabelCounts.of_table(start.get("label_counts", []), classes)
        if stored is None
        else stored.counts(classes)
    )


def networks_of(stored: DealtOut | None, start: Mapping[str, Any]) -> Sequence[str]:
    """The network's name of each client, given what ``read_split`` gave; empty where all have the
    server's.
    """
    if stored is None or not stored.names:
        return [str(name) for name in start.get("models", [])]
    return [stored.names[number] for number in stored.networks.tolist()]


def split_of_sites(sites: SiteViews, networks: Sequence[ModelSpec] = ()) -> DealtOut | None:
    """How the data are dealt out, held-out examples included; None where that is nobody's to know.

    networks: of each client, where they have not all the server's.
    """
    if not isinstance(sites.parts, FlatParts):
        return None
    order, labels = sites.parts.order.numpy(), sites.train.labels.cpu().numpy()
    distinct = {spec: number for number, spec in enumerate(dict.fromkeys(networks))}
    names = tuple(spec.label for spec in distinct) if len(distinct) > 1 else ()
    numbers = np.array([distinct[spec] for spec in networks] if names else [], dtype=np.int64)
    return DealtOut(FlatParts(order, sites.parts.ends), labels[order], names, numbers)


def _told(split: DealtOut, data: bytes) -> dict[str, Any]:
    sizes = {"clients": len(split.parts), "examples": len(split.labels)}
    named = {"networks": list(split.names)} if split.names else {}
    return {"file": SPLIT, "sha256": digest(data), **sizes, **named}


def _bytes_of(split: DealtOut) -> bytes:
    arrays = {"positions": split.parts.order, "labels": split.labels, "ends": split.parts.ends}
    arrays |= {"networks": split.networks} if split.names else {}
    return safetensors.numpy.save({name: _narrow(array) for name, array in arrays.items()})


def _narrow(array: NDArray[Any]) -> NDArray[Any]:
    """The same numbers, at least 0, in the smallest type that safetensors and NumPy have in
    common.
    """
    most = int(array.max()) if len(array) else 0
    return array.astype(
        next(t for t in (np.uint8, np.uint16, np.uint32, np.int64) if most <= np.iinfo(t).max)
    )
