"""What clients remember, in one file for each client and stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from fedstill.core.codec import OWN_ENTRIES, decode, encode
from fedstill.core.errors import BadPayload, CorruptFile
from fedstill.core.files import digest, make_folder, remove, write_together
from fedstill.core.records import NOTHING, Payload, Stage
from fedstill.engines.client_memory import Memory, Version


class StoredMemory(Memory):
    """The memories of all clients in a folder; a file that ``index`` does not name does not
    count.
    """

    def __init__(self, folder: Path, index: Mapping[int, Version] | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.index.update(index or {})

    def in_process(self) -> Memory:
        return Memory({client: self.load(client) for client in self.index})

    def load(self, client: int) -> Payload:
        """What a client remembers; nothing at first. Raises CorruptFile if its file is not the one
        that was written.
        """
        if client not in self.index:
            return NOTHING
        name, sha = self.index[client]
        path = self.folder / name
        try:
            data = path.read_bytes()
            if digest(data) != sha:
                raise BadPayload("its SHA-256 is not the one noted")
            return decode(data, entries=OWN_ENTRIES)
        except (OSError, BadPayload) as error:
            raise CorruptFile(
                f"{path}, the memory of client {client}, cannot be used: {error}"
            ) from error

    def forget(self, client: int) -> None:
        self.index.pop(client, None)

    def write(self, stage: Stage, states: Mapping[int, Payload]) -> None:
        if not states:
            return
        make_folder(self.folder)
        versions: dict[int, Version] = {}

        def files() -> Iterator[tuple[Path, bytes]]:
            # One at a time: the encoded states of all clients may not fit into memory.
            for client, state in states.items():
                data = encode(state)
                name = f"client{client}-round{stage.round}-stage{stage.index}.safetensors"
                versions[client] = (name, digest(data))
                yield self.folder / name, data

        write_together(files())
        self.index.update(versions)

    def prune(self, names: Collection[str]) -> None:
        super().prune(names)
        for path in self.folder.glob("*.safetensors"):
            if path.name not in names:
                remove(path)
