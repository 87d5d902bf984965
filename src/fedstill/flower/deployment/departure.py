"""What a server deletes of a client that leaves a federation, and what it cannot delete."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedstill.core.files import remove
from fedstill.flower.deployment.folder import Federation
from fedstill.running.directory import pack_of
from fedstill.running.journal import read_journal
from fedstill.running.runs import CONFIG, JOURNAL

FOLDERS = ("updates", "memory")
"""The folders of a run's directory with files of single clients: kept replies, and states."""

BEYOND_REACH = (
    "copies of models that sites, users or trackers hold, and models that were published",
    "backups of this machine",
    "data and state at the client's own site, which deletes them itself",
)
"""What no command on the server can delete."""


@dataclass(frozen=True)
class Deletion:
    """What was deleted, and what is left.

    ``deleted``: files and folders. ``left``: in words, each with its path if it has one.
    """

    deleted: Sequence[Path]
    left: Sequence[str]


def acted_in(run: Path, client: int) -> bool:
    """Whether a client took part in the run in a directory; False if there is no run."""
    if not (run / CONFIG).is_file() or not (run / JOURNAL).is_file():
        return False
    events = read_journal(run / JOURNAL)
    return any(event["event"] == "client" and event["client"] == client for event in events)


def delete_traces(federation: Federation, client: int, runs: Sequence[Path]) -> Deletion:
    """Delete the replies, states and files of a client on this machine: in the directories of runs,
    and its folder in the federation's folder.
    """
    deleted = []
    for run in runs:
        for path in _files_of_client(run, client):
            remove(path)
            deleted.append(path)
        for path in sorted((run / "sites").glob(f"*/client{client}")):
            shutil.rmtree(path)
            deleted.append(path)
    folder = federation.client(client)
    if folder.is_dir():
        shutil.rmtree(folder)
        deleted.append(folder)
    left = [line for run in runs for line in _left_in(run)]
    database = federation.server / "link.db"
    if database.is_file():
        left.append(f"{database}: Flower's database, with the client's public key and node number")
    return Deletion(deleted, [*left, *BEYOND_REACH])


def _files_of_client(run: Path, client: int) -> Iterator[Path]:
    """The kept replies and the states of a client in a run's directory."""
    name = re.compile(rf"client{client}-round\d+-stage\d+\.safetensors")
    for folder in FOLDERS:
        for path in sorted((run / folder).glob("*.safetensors")):
            if name.fullmatch(path.name):
                yield path


def _left_in(run: Path) -> Iterator[str]:
    """What a run's directory, and packs of it, still have of what the client has taught or sent."""
    yield (
        f"{run}: the old model and its checkpoints, and the journal with the client's numbers; "
        "delete the directory when nobody needs it"
    )
    for folder in (run, *run.parents):
        if folder.name and pack_of(folder).is_file():
            yield f"{pack_of(folder)}: a pack with the journal of {run.name}"
