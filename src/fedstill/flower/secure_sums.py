"""Secure sums over Flower, the server's side: four requests in a stage."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import BadPayload, Refused, TooFewReplies
from fedstill.core.files import make_folder, write_secret, write_whole
from fedstill.core.records import NOTHING, Payload, Reply, Stage, Tensors
from fedstill.core.screen import of_other_stage
from fedstill.core.work import ClientWork
from fedstill.flower.engine import FlowerEngine
from fedstill.flower.messages import Request, SiteReply
from fedstill.flower.site_storage import Desk
from fedstill.privacy.masking import (
    Masking,
    as_failed,
    common_start,
    demand_left,
    is_summed,
    known,
    or_all_failed,
)
from fedstill.privacy.primitives import KEY, SEED, Masks, demand_key
from fedstill.privacy.protocol import PUBLIC, SEALED, Sum, Summand, unmasked

# Who was left in a stage's secure sum, noted in the run's directory before shares are asked for.
#
# Sites that have revealed shares take part in another sum of the same stage only with the same
# clients left (``site_sums``). So where a run stops between that and the next checkpoint, its
# resume has the same clients left.


LEFT_NOTE = "sum-left.json"
"""The file in a run's directory: by stage, the clients that were left."""

KEPT = 8
"""Of how many stages that is known: a resume goes back to one of the last checkpoints."""


def note_left(
    folder: Path, stage: Stage, sum: Sum, masked: Mapping[int, Masks], came: dict[int, Reply]
) -> dict[int, Masks]:
    """The vectors of the clients that are left: of those that were, where that is noted; else of
    all, noted now.

    ``came`` gets why the others are not in the sum. Raises TooFewReplies where one that was left
    did not answer.
    """
    path, name = folder / LEFT_NOTE, f"{stage.round}-{stage.index}"
    noted: dict[str, list[int]] = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    )
    left = noted.get(name)
    if left is None:
        kept = [*noted.items(), (name, sorted(masked))][-KEPT:]
        write_whole(path, json.dumps(dict(kept)).encode())
        return dict(masked)
    if away := sorted(set(left) - masked.keys()):
        raise TooFewReplies(
            f"{sum.name}: clients already revealed shares for this sum, and repeat that only if "
            "the same clients take "
            f"part: {', '.join(map(str, left))}; client {away[0]}: {came[away[0]].failure}; resume "
            "when it is back"
        )
    for client in masked.keys() - set(left):
        came[client] = as_failed(
            came[client], "was not left when shares were revealed, before the run stopped"
        )
    return {client: masked[client] for client in left}


# Secure sums over Flower, the server's side: four questions in a stage, of which none brings it a
# single model.


Answer = TypeVar("Answer")

PREFIX = "sum."
"""With what the names of the groups begin that are of the protocol; the others are the stage's
own.
"""

STEPS = ("keys", "shares", "vector", "revealed")
"""The four steps, by what a client answers: ``sum.keys`` and so on."""

UNREAD = f"{PREFIX}unread"
"""What a client answers in the place of its vector if it cannot read some shares: whose."""


def question(step: str, word: str, **more: Any) -> Payload:
    """What a client is asked in a step of the sum with this word, beside what its stage sends
    it.
    """
    return Payload(
        {f"{PREFIX}step": step, f"{PREFIX}word": word, **{PREFIX + k: v for k, v in more.items()}}
    )


def byte_tensors(of: Mapping[int, bytes]) -> dict[str, Tensor]:
    """Bytes by client, for a message."""
    return {str(c): torch.tensor(list(data), dtype=torch.uint8) for c, data in sorted(of.items())}


def as_bytes(tree: Tensors, most: int) -> dict[int, bytes]:
    """Bytes by client out of a message, at most so many each; raises BadPayload for anything
    else.
    """
    plain = (
        t.dtype == torch.uint8 and t.ndim == 1 and k.isdecimal() and len(k) < 10
        for k, t in tree.items()
    )
    if not all(plain):
        raise BadPayload("a step of a secure sum brings bytes by client, and nothing else")
    if any(len(t) > most for t in tree.values()):
        raise BadPayload(f"a step of a secure sum brings more than {most} bytes for a client")
    return {int(name): t.numpy().tobytes() for name, t in tree.items()}


def as_tensor(vector: Masks) -> Tensor:
    """A masked vector for a message, (n,) int64."""
    return torch.from_numpy(vector.view(np.int64))


@dataclass
class SummedFleet:
    """Clients over Flower whose models the server knows by their sum only (``privacy.protocol``).

    ``folder``: the run's directory, where it is noted who was left, before shares are asked for:
    sites take part in another sum of the same stage only with the same clients left.
    """

    engine: FlowerEngine
    masking: Masking
    folder: Path | None = None

    def run(
        self, work: ClientWork, stage: Stage, downs: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients that are left; all of them fail where too few are."""
        if not is_summed(stage, downs):
            return self.engine.run(work, stage, downs, seed)
        came = {
            c: Reply(c, NOTHING, 0, {}, stage.round, stage.index)
            for c in stage.clients
            if c in downs
        }
        return or_all_failed(came.values(), lambda: self._summed(stage, downs, came))

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """From now on these clients' memories of the stage count."""
        self.engine.commit(stage, clients)

    def _summed(
        self, stage: Stage, downs: Mapping[int, Payload], came: dict[int, Reply]
    ) -> list[Reply]:
        """The replies that the sum gives; ``came`` gets the reason of each client that drops out
        before its vector.

        A sum with shares that most cannot read is begun anew, without the client that sent them.
        """
        while True:
            word = secrets.token_hex(8)
            of = self.masking.begun(stage, stage.clients, word)
            try:
                return self._tried(of, stage, downs, came)
            except _Unread as error:
                fresh = {c: Reply(c, NOTHING, 0, {}, stage.round, stage.index) for c in came}
                lost = {c: came[c] for c in error.before}
                lost[error.client] = as_failed(
                    fresh[error.client], "most clients cannot read the shares that it sent"
                )
                came.update({**fresh, **lost})

    def _tried(
        self, of: Sum, stage: Stage, downs: Mapping[int, Payload], came: dict[int, Reply]
    ) -> list[Reply]:
        """One sum of a stage, with the clients that have not failed; raises _Unread."""
        word, start = of.word, common_start(downs)
        before = [c for c, reply in came.items() if reply.failure]
        asked = {c: question("keys", word) for c in came if c not in before}
        keys = _of_one_each(self._asked(stage, asked, came, _keys), came)
        demand_left(of, keys, list(came.values()), "sent keys")
        told = byte_tensors(keys)
        shares = self._asked(
            stage, {c: question("shares", word, keys=told) for c in keys}, came, _sealed_for(keys)
        )
        demand_left(of, shares, list(came.values()), "sent shares")
        sealed = {c: byte_tensors({other: shares[other][c] for other in shares}) for c in shares}
        full = {
            c: Payload({**downs[c], **question("vector", word, sealed=sealed[c])}) for c in shares
        }
        vectors = self._asked(stage, full, came, _vector(start, shares), hold=True)
        masked = _read_by_most(vectors, came, before)
        demand_left(of, masked, list(came.values()))
        if self.folder is not None:
            masked = note_left(self.folder, stage, of, masked, came)
        left = torch.tensor(sorted(masked))
        last = {c: replace(came[c], failure="") for c in masked}
        asked = {c: question("revealed", word, left=left) for c in masked}
        revealed = self._asked(stage, asked, last, _revealed(shares, masked))
        demand_left(of, revealed, list(last.values()), "revealed shares")
        told_of_sum, content = self.masking.mean(
            of, unmasked(of, keys, shares, masked, revealed), start
        )
        return [known(reply, content, told_of_sum) for reply in came.values()]

    def _asked(
        self,
        stage: Stage,
        downs: Mapping[int, Payload],
        came: dict[int, Reply],
        read: Callable[[Payload], Answer],
        hold: bool = False,
    ) -> dict[int, Answer]:
        """What the clients answer in a step; ``came``: what is known of each client, and why it
        dropped out.

        hold: whether these answers leave memories.
        """
        answers, out = self.engine.ask(stage, downs), dict[int, Answer]()
        if hold:
            self.engine.hold(answers)
        for answer in answers:
            reply = self.engine.reply_of(answer, stage)
            if not reply.failure:
                try:
                    if other := of_other_stage(reply, stage):
                        raise BadPayload(other)
                    out[reply.client] = read(reply.content)
                except BadPayload as error:
                    reply = as_failed(reply, f"in a step of the secure sum: {error}")
            if reply.client in came:
                came[reply.client] = replace(
                    reply, content=NOTHING, round=stage.round, stage=stage.index
                )
        return out


class _Unread(Exception):
    """Most clients cannot read the shares of one; ``before``: those that had failed when the sum
    began.
    """

    def __init__(self, client: int, before: Collection[int]) -> None:
        super().__init__(client)
        self.client, self.before = client, before


def _read_by_most(
    vectors: Mapping[int, Masks | list[int]], came: dict[int, Reply], before: Collection[int]
) -> dict[int, Masks]:
    """The masked vectors; who cannot read another's shares drops out. Raises _Unread for shares
    that most cannot.
    """
    masked = {c: vector for c, vector in vectors.items() if not isinstance(vector, list)}
    unread = {c: senders for c, senders in vectors.items() if isinstance(senders, list)}
    for sender, times in Counter(
        sender for senders in unread.values() for sender in senders
    ).most_common(1):
        if 2 * times > len(vectors) - (sender in vectors):
            raise _Unread(sender, before)
    for client, senders in unread.items():
        came[client] = as_failed(
            came[client], f"it cannot read the shares that client {senders[0]} sent it"
        )
    return masked


def _of_one_each(keys: Mapping[int, bytes], came: dict[int, Reply]) -> dict[int, bytes]:
    """The keys that one client alone has sent; who sent those of another drops out."""
    times = Counter(keys.values())
    for client, both in keys.items():
        if times[both] > 1:
            came[client] = as_failed(came[client], "its keys are those of another client")
    return {client: both for client, both in keys.items() if times[both] == 1}


def _keys(content: Payload) -> bytes:
    both = as_bytes({"0": content.tensor("sum.keys")}, PUBLIC)[0]
    if len(both) != PUBLIC:
        raise BadPayload(f"its keys are not {PUBLIC} bytes")
    for key in (both[:KEY], both[KEY : 2 * KEY]):
        demand_key(key)
    return both


def _sealed_for(clients: Collection[int]) -> Callable[[Payload], dict[int, bytes]]:
    def read(content: Payload) -> dict[int, bytes]:
        shares = as_bytes(content.tensors("sum.shares"), SEALED)
        if shares.keys() != set(clients):
            raise BadPayload("its shares are not for the clients with keys")
        return shares

    return read


def _vector(like: Tensors, shared: Collection[int]) -> Callable[[Payload], Masks | list[int]]:
    length = sum(entry.numel() for entry in like.values()) + 1

    def read(content: Payload) -> Masks | list[int]:
        if set(content) == {UNREAD}:
            return _senders(content.tensor(UNREAD), shared)
        vector = content.tensor("sum.vector")
        if vector.dtype != torch.int64 or vector.shape != (length,) or len(content) != 1:
            raise BadPayload(f"it sent something else than a masked vector of {length} numbers")
        return np.asarray(vector.numpy().view(np.uint64))

    return read


def _senders(numbers: Tensor, shared: Collection[int]) -> list[int]:
    if numbers.dtype != torch.int64 or numbers.ndim != 1 or not 0 < len(numbers) <= len(shared):
        raise BadPayload("it does not say whose shares it cannot read")
    if not set(numbers.tolist()) <= set(shared):
        raise BadPayload("it cannot read shares of clients that sent none")
    return sorted(set(numbers.tolist()))


def _revealed(
    shared: Collection[int], left: Collection[int]
) -> Callable[[Payload], dict[int, bytes]]:
    def read(content: Payload) -> dict[int, bytes]:
        shares = as_bytes(content.tensors("sum.revealed"), KEY)
        if not shares.keys() <= set(shared):
            raise BadPayload("it revealed shares of clients that have none")
        if any(len(share) != (SEED if client in left else KEY) for client, share in shares.items()):
            raise BadPayload("it revealed what is no share")
        return shares

    return read


# Secure sums over Flower, a site's side: its four answers in a stage, of which none tells its
# model.
#
# What it must know in the next step is on its own disk, so every step may come to a process that
# has just started. A server that was stopped may begin a stage's sum anew, with another word; then
# secrets are drawn anew. But once shares are revealed, the site takes part in a sum of the same
# stage only if the same clients are left: the difference of two sums would be a single model.


NAME_NOTE, REVEALED = "secure-sum", "secure-sums"
"""Files in a client's folder: the sum that is under way, and who was left in those of which shares
were revealed.
"""


@dataclass(frozen=True)
class SiteSums:
    """One step of a stage's sum at a site."""

    masking: Masking
    request: Request
    desk: Desk

    def answer(self, work: Callable[[Request], SiteReply]) -> SiteReply:
        """The answer of a step; ``work`` does the stage itself. Raises Refused for a request that
        is no step.
        """
        payload = self.request.payload
        step, word = (str(payload.get(PREFIX + k, "")) for k in ("step", "word"))
        if step not in STEPS or not word.isalnum():
            raise Refused(
                "models of this run are summed in secret: this site answers only the steps of the "
                "secure sum"
            )
        one = self._summand(step, word)
        if step == "vector":
            return self._vector(one, word, work)
        if step == "keys":
            content = Payload({PREFIX + step: byte_tensors({0: one.public})["0"]})
        elif step == "shares":
            content = Payload(
                {
                    PREFIX + step: byte_tensors(
                        one.shares(as_bytes(payload.tensors("sum.keys"), PUBLIC))
                    )
                }
            )
        else:
            left = sorted(int(c) for c in payload.tensor("sum.left").tolist())
            self._demand_same(left)
            content = Payload({PREFIX + step: byte_tensors(one.revealed(left))})
            self._note_revealed(left)
        self._keep(one, word)
        return self._reply(content)

    def _vector(self, one: Summand, word: str, work: Callable[[Request], SiteReply]) -> SiteReply:
        payload = self.request.payload
        plain = Payload({k: v for k, v in payload.items() if not k.startswith(PREFIX)})
        asked = replace(self.request, payload=plain)
        if self._asked(word) not in ("", asked.digest()):
            raise Refused(
                "this site has masked another answer in this sum: one mask hides one model only"
            )
        received = as_bytes(payload.tensors("sum.sealed"), SEALED)
        if unread := one.unread(received):
            return self._reply(Payload({UNREAD: torch.tensor(unread)}))
        done = work(asked)
        if done.failure:
            return done
        reply = Reply(done.client, done.content, done.examples)
        vector = self.masking.vector(one.sum, reply, plain)
        masked = one.masked(vector, received)
        self._keep(one, word, asked.digest())
        seconds = {k: v for k, v in done.metrics.items() if k in ("seconds", "seconds_training")}
        return replace(
            self._reply(Payload({PREFIX + "vector": as_tensor(masked)})),
            metrics=seconds,
            memory=done.memory,
        )

    def _summand(self, step: str, word: str) -> Summand:
        """This client in the sum with this word; one that has just begun if the word is new in the
        first step.
        """
        stage = self.request.stage
        of = self.masking.begun(stage, stage.clients, word)
        told = self._told()
        if told.get("of") == self._of(word):
            return Summand.noted(of, self.request.client, told["note"])
        if step != "keys":
            raise Refused("the secure sum of this step is not the one that this site takes part in")
        return Summand(of, self.request.client)

    def _told(self) -> dict[str, Any]:
        path = self.desk.place / NAME_NOTE
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def _of(self, word: str) -> list[object]:
        return [self.request.stage.round, self.request.stage.index, word]

    def _keep(self, one: Summand, word: str, asked: str = "") -> None:
        make_folder(self.desk.place)
        told = {"of": self._of(word), "note": one.note(), "asked": asked or self._asked(word)}
        write_secret(self.desk.place / NAME_NOTE, json.dumps(told).encode())

    def _asked(self, word: str) -> str:
        """What the vector that was masked in this sum was asked for; empty if none was."""
        told = self._told()
        return str(told.get("asked", "")) if told.get("of") == self._of(word) else ""

    def _reply(self, content: Payload) -> SiteReply:
        return SiteReply(
            self.request.client, self.request.stage.round, self.request.stage.index, content
        )

    def _revealed(self) -> dict[str, list[int]]:
        path = self.desk.place / REVEALED
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def _demand_same(self, left: list[int]) -> None:
        before = self._revealed().get(self._stage_name)
        if before not in (None, left):
            raise Refused(
                f"this site has revealed shares for round {self.request.stage.round}, stage "
                f"{self.request.stage.name!r}, with other clients left: two sums would show a "
                "single model"
            )

    def _note_revealed(self, left: list[int]) -> None:
        """Before the shares leave."""
        told = {**self._revealed(), self._stage_name: left}
        write_secret(self.desk.place / REVEALED, json.dumps(told).encode())

    @property
    def _stage_name(self) -> str:
        return f"{self.request.stage.round}-{self.request.stage.index}"
