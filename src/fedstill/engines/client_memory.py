"""What clients remember from one stage to the next: held until it is committed, then one file a
client and stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedstill.core.codec import OWN_ENTRIES, decode, encode
from fedstill.core.errors import BadPayload, CorruptFile
from fedstill.core.files import digest, make_folder, remove, write_together
from fedstill.core.records import KEEP, NOTHING, Keep, Payload, Stage


@dataclass
class Memory:
    """The memories of all clients, in a folder, or in this process if there is none.

    ``index``: which file, with which SHA-256, holds what a client remembers.
    """

    folder: Path | None = None
    index: dict[int, tuple[str, str]] = field(default_factory=dict)
    _held: dict[int, Payload] = field(default_factory=dict)
    _kept: dict[int, Payload] = field(default_factory=dict)

    @staticmethod
    def of(remembered: Mapping[int, Payload]) -> Memory:
        """In this process: what some clients remember already."""
        return Memory(_kept=dict(remembered))

    def in_process(self) -> Memory:
        """The same in this process, to go on from without changing this one."""
        return Memory.of({client: self.load(client) for client in {*self.index, *self._kept}})

    def load(self, client: int) -> Payload:
        """What a client remembers; nothing at first. Raises CorruptFile if its file is not the one
        that was written.
        """
        if self.folder is None:
            return self._kept.get(client, NOTHING)
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

    def hold(self, client: int, client_state: Payload | Keep) -> None:
        """Take a client's state after a stage that is not committed yet; ``KEEP``: the one before
        the stage.
        """
        if client_state is KEEP:
            client_state = self.load(client)
        self._held[client] = client_state

    def held(self, client: int) -> Payload:
        """What a client remembers of a stage that is not committed yet; nothing, if it remembers
        nothing.
        """
        return self._held.get(client, NOTHING)

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what these clients remember of a stage, and drop what the others do."""
        for client in clients:
            self.index.pop(client, None)
            self._kept.pop(client, None)
        kept = {c: memory for c in clients if (memory := self._held.get(c, NOTHING))}
        if self.folder is None:
            self._kept.update(kept)
        elif kept:
            self._write(self.folder, stage, kept)
        self._held.clear()

    def prune(self, named: Collection[str]) -> None:
        """Delete files that no checkpoint names."""
        if self.folder is not None and self.folder.is_dir():
            for path in self.folder.glob("*.safetensors"):
                if path.name not in named:
                    remove(path)

    def _write(self, folder: Path, stage: Stage, kept: Mapping[int, Payload]) -> None:
        make_folder(folder)
        index: dict[int, tuple[str, str]] = {}

        def files() -> Iterator[tuple[Path, bytes]]:
            for client, memory in kept.items():
                data = encode(memory)
                index[client] = (
                    f"client{client}-round{stage.round}-stage{stage.index}.safetensors",
                    digest(data),
                )
                yield folder / index[client][0], data

        write_together(files())
        self.index.update(index)
