"""Secure sums over Flower, the server's side: four questions in a stage, of which none brings it a single model."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedstill.engines.flower.flower_engine import FlowerEngine
from fedstill.engines.masking import Masking, as_failed, common_start, demand_left, is_summed, known, or_all_failed
from fedstill.errors import BadPayload
from fedstill.records import NOTHING, Payload, Reply, Stage, Tensors
from fedstill.secure.primitives import KEY, Masks
from fedstill.secure.protocol import unmasked
from fedstill.work import ClientWork

Answer = TypeVar("Answer")

PREFIX = "sum."
"""With what the names of the groups begin that are of the protocol; the others are the stage's own."""

STEPS = ("keys", "shares", "vector", "revealed")
"""The four steps, by what a client answers: ``sum.keys`` and so on."""


def question(step: str, word: str, **more: Any) -> Payload:
    """What a client is asked in a step of the sum with this word, beside what its stage sends it."""
    return Payload({f"{PREFIX}step": step, f"{PREFIX}word": word, **{PREFIX + k: v for k, v in more.items()}})


def byte_tensors(of: Mapping[int, bytes]) -> dict[str, Tensor]:
    """Bytes by client, for a message."""
    return {str(c): torch.tensor(list(data), dtype=torch.uint8) for c, data in sorted(of.items())}


def as_bytes(tree: Tensors) -> dict[int, bytes]:
    """Bytes by client out of a message; raises BadPayload for anything else."""
    plain = (t.dtype == torch.uint8 and t.ndim == 1 and k.isdecimal() and len(k) < 10 for k, t in tree.items())
    if not all(plain):
        raise BadPayload("a step of a secure sum brings bytes by client, and nothing else")
    return {int(name): bytes(t.tolist()) for name, t in tree.items()}


def as_tensor(vector: Masks) -> Tensor:
    """A masked vector for a message, (n,) int64."""
    return torch.from_numpy(vector.view(np.int64))


@dataclass
class SummedFleet:
    """Clients over Flower whose models the server knows by their sum only (``secure.protocol``)."""

    engine: FlowerEngine
    masking: Masking

    def run(self, work: ClientWork, stage: Stage, downs: Mapping[int, Payload], seed: int) -> list[Reply]:
        """The replies of the clients that are left; all of them fail where too few are."""
        if not is_summed(stage, downs):
            return self.engine.run(work, stage, downs, seed)
        came = {c: Reply(c, NOTHING, 0, {}, stage.round, stage.index) for c in stage.clients if c in downs}
        return or_all_failed(came.values(), lambda: self._summed(stage, downs, came))

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """From now on these clients' memories of the stage count."""
        self.engine.commit(stage, clients)

    def _summed(self, stage: Stage, downs: Mapping[int, Payload], came: dict[int, Reply]) -> list[Reply]:
        """The replies that the sum gives; ``came`` gets the reason of each client that drops out before its vector."""
        word, start = secrets.token_hex(8), common_start(downs)
        of = self.masking.begun(stage, stage.clients, word)
        keys = self._asked(stage, {c: question("keys", word) for c in came}, came, _keys)
        demand_left(of, keys, list(came.values()), "sent keys")
        told = byte_tensors(keys)
        shares = self._asked(stage, {c: question("shares", word, keys=told) for c in keys}, came, _sealed_for(keys))
        demand_left(of, shares, list(came.values()), "sent shares")
        sealed = {c: byte_tensors({other: shares[other][c] for other in shares}) for c in shares}
        full = {c: Payload({**downs[c], **question("vector", word, sealed=sealed[c])}) for c in shares}
        masked = self._asked(stage, full, came, _vector(start), hold=True)
        demand_left(of, masked, list(came.values()))
        left = torch.tensor(sorted(masked))
        last = {c: question("revealed", word, left=left) for c in masked}
        revealed = self._asked(stage, last, {}, _revealed(shares))
        told_of_sum, up = self.masking.mean(of, unmasked(of, keys, shares, masked, revealed), start)
        return [known(reply, up, told_of_sum) for reply in came.values()]

    def _asked(
        self,
        stage: Stage,
        downs: Mapping[int, Payload],
        came: dict[int, Reply],
        read: Callable[[Payload], Answer],
        hold: bool = False,
    ) -> dict[int, Answer]:
        """What the clients answer in a step; ``came``: what is known of each client, and why it dropped out.

        hold: whether these answers leave memories.
        """
        answers, out = self.engine.ask(stage, downs), dict[int, Answer]()
        if hold:
            self.engine.hold(answers)
        for answer in answers:
            reply = self.engine.reply_of(answer, stage)
            if not reply.failure:
                try:
                    out[reply.client] = read(reply.up)
                except BadPayload as error:
                    reply = as_failed(reply, f"in a step of the secure sum: {error}")
            if reply.client in came:
                came[reply.client] = replace(reply, up=NOTHING)
        return out


def _keys(up: Payload) -> bytes:
    both = as_bytes({"0": up.tensor("sum.keys")})[0]
    if len(both) != 2 * KEY:
        raise BadPayload("its keys are not 64 bytes")
    return both


def _sealed_for(clients: Collection[int]) -> Callable[[Payload], dict[int, bytes]]:
    def read(up: Payload) -> dict[int, bytes]:
        shares = as_bytes(up.tensors("sum.shares"))
        if shares.keys() != set(clients):
            raise BadPayload("its shares are not for the clients with keys")
        return shares

    return read


def _vector(like: Tensors) -> Callable[[Payload], Masks]:
    length = sum(entry.numel() for entry in like.values()) + 1

    def read(up: Payload) -> Masks:
        vector = up.tensor("sum.vector")
        if vector.dtype != torch.int64 or vector.shape != (length,) or len(up) != 1:
            raise BadPayload(f"it sent something else than a masked vector of {length} numbers")
        return np.asarray(vector.numpy().view(np.uint64))

    return read


def _revealed(shared: Collection[int]) -> Callable[[Payload], dict[int, bytes]]:
    def read(up: Payload) -> dict[int, bytes]:
        shares = as_bytes(up.tensors("sum.revealed"))
        if not shares.keys() <= set(shared):
            raise BadPayload("it revealed shares of clients that have none")
        return shares

    return read
