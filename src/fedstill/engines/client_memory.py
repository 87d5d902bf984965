"""What clients remember from one stage to the next."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fedstill.core.records import KEEP, NOTHING, Keep, Payload, Stage

Version = tuple[str, str]
"""A client's memory of a stage: the name of its file, and that file's SHA-256."""


class Memory:
    """The memories of all clients, in this process. What a stage changes takes effect when it is
    committed.

    remembered: what some clients remember already. ``index``: the version that counts of each
    client whose memory is a file; none here (``running.checkpoint``).
    """

    def __init__(self, remembered: Mapping[int, Payload] | None = None) -> None:
        self.index: dict[int, Version] = {}
        self.named: frozenset[str] = frozenset()
        self._committed = dict(remembered or {})
        self._pending: dict[int, Payload] = {}

    def in_process(self) -> Memory:
        """The same in this process, to go on from without changing this one."""
        return Memory(self._committed)

    def load(self, client: int) -> Payload:
        """What a client remembers; nothing at first."""
        return self._committed.get(client, NOTHING)

    def hold(self, client: int, client_state: Payload | Keep) -> None:
        """Take a client's state after a stage that is not committed yet; ``KEEP``: the one before
        the stage.
        """
        if client_state is KEEP:
            client_state = self.load(client)
        self._pending[client] = client_state

    def held(self, client: int) -> Payload:
        """What a client remembers of a stage that is not committed yet; nothing, if it remembers
        nothing.
        """
        return self._pending.get(client, NOTHING)

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what these clients remember of a stage, and drop what the others do."""
        for client in clients:
            self.forget(client)
        states = {client: self.held(client) for client in clients}
        self.write(stage, {client: state for client, state in states.items() if state})
        self._pending.clear()

    def forget(self, client: int) -> None:
        """Drop what a client remembers."""
        self._committed.pop(client, None)

    def write(self, stage: Stage, states: Mapping[int, Payload]) -> None:
        """Keep the states of clients after a stage, none of which is empty."""
        self._committed.update(states)

    def prune(self, names: Collection[str]) -> None:
        """Take note of the files that checkpoints name; a memory in files deletes all others."""
        self.named = frozenset(names)
