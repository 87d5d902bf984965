"""Updates that a run keeps if it is asked to: the content of every reply that was accepted.

With ``keep_updates = true``, each reply is one file under ``updates/`` in the run's directory, by
round, stage and client. The client's event in the journal holds its SHA-256: the journal is the
index of what was kept. A file is durable before its event is written, and the event before the
checkpoint of its stage, so that a killed run never names an update that is not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedstill.config.settings import Settings
from fedstill.core.codec import OWN_ENTRIES, decode, encode
from fedstill.core.errors import BadPayload, ConfigError, CorruptFile
from fedstill.core.extensions import Event, Fields, StageKeeper
from fedstill.core.files import digest, make_folder, remove, write_together
from fedstill.core.records import SERVER, Payload
from fedstill.core.results import StageResult
from fedstill.running.checkpoint import read_sealed
from fedstill.running.journal import read_journal

UPDATES = "updates"
"""The folder of kept updates in a run's directory."""

SEAL = "update_sha256"
"""The field of a client's event with the SHA-256 of its kept update."""

_FILE_NAME = re.compile(r"client(?P<client>\d+)-round(?P<round>\d+)-stage(?P<stage>\d+)")


def update_keepers(settings: Settings, folder: Path | None) -> tuple[StageKeeper, ...]:
    """What keeps the updates of a run, if it is asked to, in the run's directory."""
    if folder is None or not settings.keep_updates:
        return ()
    return (UpdateKeeper(folder / UPDATES),)


@dataclass(frozen=True)
class UpdateKeeper:
    """Keeps what clients sent (``core.extensions.StageKeeper``)."""

    folder: Path

    def keep(self, result: StageResult) -> dict[int, Fields]:
        """Write the accepted replies of a stage; their SHA-256 for the events of their clients."""
        replies = [reply for reply in result.accepted if reply.client != SERVER]
        fields: dict[int, Fields] = {}

        def files() -> Iterator[tuple[Path, bytes]]:
            for reply in replies:
                data = encode(reply.content)
                fields[reply.client] = {SEAL: digest(data)}
                yield _path(self.folder, result.stage.round, result.stage.index, reply.client), data

        if replies:
            make_folder(self.folder)
            write_together(files())
        return fields

    def cut(self, round: int, stage: int) -> None:
        """Delete the updates of this stage and of all later ones."""
        for path in self.folder.glob("*.safetensors"):
            name = _FILE_NAME.fullmatch(path.stem)
            if name is not None and (int(name["round"]), int(name["stage"])) >= (round, stage):
                remove(path)


@dataclass(frozen=True)
class KeptUpdate:
    """One reply that a run has kept.

    ``stage``: the index of its stage in the round; ``stage_name``: the name of that stage.
    ``examples``: on how many the client says that it trained.
    """

    round: int
    stage: int
    stage_name: str
    client: int
    examples: int
    path: Path
    sha256: str

    def content(self) -> Payload:
        """What the client sent; raises CorruptFile if the file is not the one that was written."""
        data = read_sealed(self.path, self.sha256)
        try:
            return decode(data, entries=OWN_ENTRIES)
        except BadPayload as error:
            raise CorruptFile(f"{self.path} is damaged: {error}") from error


def kept_updates(folder: Path) -> list[KeptUpdate]:
    """The updates that a run has kept, in the order of the journal: by round, stage and client.

    Raises ConfigError for a run that keeps none.
    """
    updates = folder / UPDATES
    if not updates.is_dir():
        raise ConfigError(f"{folder} keeps no updates; run it anew with keep_updates = true")
    events = read_journal(folder / "journal.jsonl")
    return [_kept_update(updates, event) for event in events if SEAL in event]


def _kept_update(updates: Path, event: Event) -> KeptUpdate:
    """What a client's event says of its kept update."""
    return KeptUpdate(
        round=event["round"],
        stage=event["stage"],
        stage_name=event["name"],
        client=event["client"],
        examples=event["examples"],
        path=_path(updates, event["round"], event["stage"], event["client"]),
        sha256=event[SEAL],
    )


def _path(folder: Path, round: int, stage: int, client: int) -> Path:
    return folder / f"client{client}-round{round}-stage{stage}.safetensors"
