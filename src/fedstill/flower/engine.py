"""The Flower engine: clients on other machines do a stage, to which it only sends messages.

The server's own stages run in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedstill.core.errors import on_one_line
from fedstill.core.records import SERVER, Payload, Reply, Stage
from fedstill.core.screen import Truth, untrue
from fedstill.core.work import ClientWork
from fedstill.engines.client_measures import ClientMeasures
from fedstill.engines.client_memory import Memory
from fedstill.engines.serial import SerialEngine
from fedstill.flower.messages import Request, SiteReply, Version


class Asks(Protocol):
    """Brings requests to clients and their answers back; a client that gives none is a failed
    answer.
    """

    def ask(self, requests: Sequence[Request]) -> list[SiteReply]:
        """One answer for each request."""


@dataclass
class FlowerEngine:
    """``here`` does the stages of the server; ``request`` makes a request of what is known of the
    run and a payload.

    ``measures``: those that its clients take. ``truth``: what the server
    knows of a client's data in a round. What clients remember is on their own disks;
    ``memory.index`` says which version of each counts.
    """

    here: SerialEngine
    fleet: Asks
    request: Callable[..., Request]
    facts: Mapping[str, Any] = field(default_factory=dict)
    measures: ClientMeasures = field(default_factory=ClientMeasures)
    truth: Callable[[int, int], Truth] = lambda client, round: Truth()
    _held: dict[int, Version | None] = field(default_factory=dict, init=False, repr=False)

    @property
    def memory(self) -> Memory:
        """The server's own memory, and the index of all."""
        return self.here.memory

    def run(
        self, work: ClientWork, stage: Stage, downs: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients that were sent something; the work itself they look up by
        name.
        """
        if SERVER in stage.clients:
            return self.here.run(work, stage, downs, seed)
        answers = self.ask(stage, downs)
        self.hold(answers)
        return [self.reply_of(a, stage) for a in answers]

    def ask(self, stage: Stage, downs: Mapping[int, Payload]) -> list[SiteReply]:
        """What the clients that are sent something answer."""
        asked = [
            self.request(
                client=c,
                stage=stage,
                memory=self.memory.index.get(c),
                payload=downs[c],
                facts=self.facts,
            )
            for c in stage.clients
            if c in downs
        ]
        return self.fleet.ask(asked) if asked else []

    def hold(self, answers: Sequence[SiteReply]) -> None:
        """Note which memories these answers left, until ``commit`` says which of them count."""
        self._held = {a.client: a.memory for a in answers}

    def reply_of(self, answer: SiteReply, stage: Stage) -> Reply:
        """A site's answer as a reply; one whose report cannot come from this run, or cannot be
        true, is a failure.
        """
        a = answer
        try:
            failure = a.failure or self.measures.refuses(a.metrics, stage, self.here.world.classes)
            failure = failure or untrue(a.examples, a.metrics, self.truth(a.client, stage.round))
        except Exception as error:
            failure = f"its report could not be checked: {on_one_line(error)}"
        return Reply(a.client, a.content, a.examples, a.metrics, a.round, a.stage, failure, a.idle)

    def close(self) -> None:
        """End the engine of the server's own stages."""
        self.here.close()

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """From now on these clients' memories of the stage count; what the others remember of it
        does not.
        """
        if SERVER in stage.clients:
            self.here.commit(stage, clients)
            return
        for client in clients:
            version = self._held.get(client)
            if version is None:
                self.memory.index.pop(client, None)
            else:
                self.memory.index[client] = version
        self._held = {}
