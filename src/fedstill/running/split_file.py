"""The split of a run in a file beside its journal, which has the file's SHA-256."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from fedstill.core.errors import CorruptFile
from fedstill.core.files import digest, read_file, write_whole
from fedstill.data.client_split import ClientSplit, LabelCounts
from fedstill.running.journal import read_start

if TYPE_CHECKING:
    from fedstill.core.records import ModelSpec
    from fedstill.data.views import SiteViews

SPLIT = "split.safetensors"
"""The file's name in a run's directory."""

REMEDY = (
    "restore it; or delete it (and summary.json, if the run is finished) and `fedstill resume` the "
    "run, which draws the split again"
)

STORED_TYPES = (np.uint8, np.uint16, np.uint32, np.int64)
"""Types that safetensors and NumPy have in common, the smallest first."""


def _empty() -> NDArray[Any]:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class StoredSplit:
    """The content of a run's split file.

    clients: the training examples of each client. labels: (n,), of the examples at
    ``clients.positions``, so that labels can be counted without the data set. network_names: the
    names of the networks, if clients have different ones. networks: (clients,), the index of each
    client's network in ``network_names``; empty if all have the server's.
    """

    clients: ClientSplit
    labels: NDArray[Any]
    network_names: tuple[str, ...] = ()
    networks: NDArray[Any] = field(default_factory=_empty)

    @staticmethod
    def of_sites(sites: SiteViews, networks: Sequence[ModelSpec] = ()) -> StoredSplit | None:
        """The split of a run, with held-out examples; None if sites keep their data.

        networks: each client's network, unless all clients have the server's.
        """
        if sites.split is None:
            return None
        labels = sites.train.labels.cpu().numpy()[sites.split.positions]
        distinct = list(dict.fromkeys(networks))
        if len(distinct) < 2:
            return StoredSplit(sites.split, labels)
        index_of = {spec: index for index, spec in enumerate(distinct)}
        return StoredSplit(
            clients=sites.split,
            labels=labels,
            network_names=tuple(spec.label for spec in distinct),
            networks=np.array([index_of[spec] for spec in networks], dtype=np.int64),
        )

    def label_counts(self, classes: int) -> LabelCounts:
        """Label counts by client."""
        return LabelCounts.of_labels(self.labels, self.clients.ends, classes)

    def fits(self, labels: NDArray[Any], clients: int) -> bool:
        """Whether this can be a split of examples with these labels over so many clients."""
        positions = self.clients.positions
        if len(self.clients) != clients or not len(positions):
            return False
        if int(positions.max()) >= len(labels):
            return False
        return np.array_equal(labels[positions], self.labels)

    def to_bytes(self) -> bytes:
        """The file's content, in safetensors.

        ``positions`` (n,) and their ``labels`` (n,), client after client, and ``ends`` (clients,),
        where each client's end; ``networks`` (clients,) if networks differ. Numbers have the
        smallest type that holds them.
        """
        arrays = {
            "positions": self.clients.positions,
            "labels": self.labels,
            "ends": self.clients.ends,
        }
        if self.network_names:
            arrays["networks"] = self.networks
        return safetensors.numpy.save({name: _narrow(array) for name, array in arrays.items()})


def write_split(folder: Path, split: StoredSplit) -> dict[str, Any]:
    """Write a run's split into its directory, completely or not at all.

    Returns the field ``split`` of the journal's event ``start``.
    """
    data = split.to_bytes()
    write_whole(folder / SPLIT, data)
    fields = {
        "file": SPLIT,
        "sha256": digest(data),
        "clients": len(split.clients),
        "examples": len(split.labels),
    }
    if split.network_names:
        fields["networks"] = list(split.network_names)
    return fields


def restore_split(folder: Path, start: Mapping[str, Any], split: StoredSplit) -> None:
    """Write a missing split file again. ``split``: the split as it is drawn now.

    Raises CorruptFile if the run began with another split.
    """
    if "split" not in start or (folder / SPLIT).exists():
        return
    if digest(split.to_bytes()) != start["split"].get("sha256"):
        raise CorruptFile(
            f"{folder / SPLIT} is missing, and the split that is drawn now differs from the one "
            "with which the run began; restore the file"
        )
    write_split(folder, split)


def stored_split(folder: Path) -> StoredSplit | None:
    """The split of the run in a directory; None if its journal names none yet, or if the file is
    missing.

    Raises CorruptFile, naming the file, if the file has changed.
    """
    if not (folder / SPLIT).exists():
        return None
    return read_split(folder, read_start(folder))


def read_split(folder: Path, start: Mapping[str, Any]) -> StoredSplit | None:
    """The split that the event ``start`` of a run's journal names; None if it names none, as for
    real sites.

    Raises CorruptFile, naming the file, if the file is missing or has changed.
    """
    fields = start.get("split")
    if not isinstance(fields, Mapping):
        return None
    path = folder / SPLIT
    data = _read_verified(path, fields.get("sha256"))
    network_names = tuple(str(name) for name in fields.get("networks", ()))
    try:
        split = _parse_split(data, network_names)
        _check_ranges(split, len(start.get("classes", ())))
    except (SafetensorError, KeyError, ValueError) as error:
        raise CorruptFile(f"{path} is no split of a run: {error}; {REMEDY}") from error
    return split


def _read_verified(path: Path, sha256: Any) -> bytes:
    """The bytes of a split file; raises CorruptFile if they do not have the journal's SHA-256."""
    try:
        data = read_file(path)
    except OSError as error:
        raise CorruptFile(
            f"{path}, the split of the run, cannot be read: {error.strerror}; {REMEDY}"
        ) from error
    if digest(data) != sha256:
        raise CorruptFile(
            f"{path}, the split of the run, has changed: its SHA-256 differs from the journal's; "
            f"{REMEDY}"
        )
    return data


def _parse_split(data: bytes, network_names: tuple[str, ...]) -> StoredSplit:
    """The split of which ``StoredSplit.to_bytes`` made these bytes.

    Raises SafetensorError, KeyError or ValueError for bytes of another form.
    """
    arrays = safetensors.numpy.load(data)
    networks = _empty()
    if "networks" in arrays:
        networks = _integers(arrays, "networks")
    return StoredSplit(
        clients=ClientSplit(_integers(arrays, "positions"), _integers(arrays, "ends")),
        labels=_integers(arrays, "labels"),
        network_names=network_names,
        networks=networks,
    )


def _integers(arrays: Mapping[str, NDArray[Any]], name: str) -> NDArray[np.int64]:
    """An array of the file; raises ValueError if it is no list of numbers from 0."""
    array = arrays[name]
    is_list = array.ndim == 1 and array.dtype.type in STORED_TYPES
    if not is_list or (array < 0).any():
        raise ValueError(f"{name} must be a list of whole numbers from 0")
    return array.astype(np.int64)


def _check_ranges(split: StoredSplit, classes: int) -> None:
    """Raise ValueError if the arrays do not fit together, or name classes that the run lacks.

    The file may come from a stranger: a huge label would need a table of terabytes.
    """
    ends = split.clients.ends
    example_count = len(split.clients.positions)
    are_sorted = bool((np.diff(ends) >= 0).all())
    if not are_sorted or ends.max(initial=0) != example_count:
        raise ValueError("its clients' ends do not fit its positions")
    if len(split.labels) != example_count:
        raise ValueError("it does not have one label for each position")
    if (split.labels >= classes).any():
        raise ValueError(f"it has a label above {classes - 1}")

    expected_networks = 0
    if split.network_names:
        expected_networks = len(ends)
    has_unknown_network = bool((split.networks >= len(split.network_names)).any())
    if len(split.networks) != expected_networks or has_unknown_network:
        raise ValueError("its networks do not fit its clients")


def read_label_counts(folder: Path, start: Mapping[str, Any]) -> LabelCounts:
    """Label counts by client of a run; of no client if the run has no split.

    Raises CorruptFile as ``read_split``.
    """
    return label_counts_of(read_split(folder, start), start)


def label_counts_of(split: StoredSplit | None, start: Mapping[str, Any]) -> LabelCounts:
    """Label counts by client, given what ``read_split`` returned and the event ``start``."""
    classes = len(start.get("classes", []))
    if split is None:
        return LabelCounts.of_table([], classes)
    return split.label_counts(classes)


def networks_of(split: StoredSplit | None, start: Mapping[str, Any]) -> Sequence[str]:
    """The name of each client's network, given what ``read_split`` returned.

    Empty if all clients have the server's network.
    """
    if split is None or not split.network_names:
        return [str(name) for name in start.get("models", [])]
    return [split.network_names[number] for number in split.networks.tolist()]


def _narrow(array: NDArray[Any]) -> NDArray[Any]:
    """The same numbers, at least 0, in the smallest type."""
    largest = int(array.max(initial=0))
    smallest_type = next(kind for kind in STORED_TYPES if largest <= np.iinfo(kind).max)
    return array.astype(smallest_type)
