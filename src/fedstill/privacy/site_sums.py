"""Secure sums at a site: its four answers in a stage, none of which tells its model.

A site keeps on its disk what it must know in the next step, so every step may come to a process
that has just started. A server that was stopped may begin a stage's sum anew, with another word;
then secrets are drawn anew. But once shares are revealed, the site takes part in a sum of the same
stage only if the same clients are left: the difference of two sums would be a single model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedstill.core.errors import Refused
from fedstill.core.extensions import SiteGuard, SiteRequest
from fedstill.core.files import make_folder, write_secret
from fedstill.core.label_counts import CENSUS
from fedstill.core.records import Payload, Reply, Stage, World
from fedstill.privacy.masking import TIMES, Masking
from fedstill.privacy.noise import Privacy
from fedstill.privacy.protocol import PUBLIC, SEALED, Summand
from fedstill.privacy.sum_steps import (
    PREFIX,
    STEPS,
    UNREAD,
    as_bytes,
    as_tensor,
    asked_step,
    byte_tensor,
    byte_tensors,
    plain_payload,
)
from fedstill.running.preparation import Prepared
from fedstill.running.standardisation import sums_stage

UNDER_WAY = "secure-sum"
"""The file in a client's folder about the sum that is under way."""

REVEALED = "secure-sums"
"""The file in a client's folder with the clients left in each sum of which shares were revealed."""


def site_guards(prepared: Prepared, folder: Path) -> tuple[SiteGuard, ...]:
    """The guard of a site's model, if the config that it accepted asks for secure sums.

    ``folder``: the client's folder of the run, where the guard keeps its notes.
    """
    settings = prepared.settings
    masking = Masking.of(settings.table(Privacy), settings.method)
    if masking is None:
        return ()
    return (SiteSums(masking, prepared.world, SumNotes(folder)),)


@dataclass(frozen=True)
class SumUnderWay:
    """What a site notes of a sum between two steps.

    ``identity``: round, stage and word. ``summand``: the client in the sum (``Summand.note``).
    ``masked``: the digest of the request whose model was masked; empty if none was.
    """

    identity: list[Any]
    summand: str
    masked: str


@dataclass(frozen=True)
class SumNotes:
    """What a site notes of secure sums, in two files of the client's folder."""

    folder: Path

    def under_way(self, stage: Stage, word: str) -> SumUnderWay | None:
        """The note of a sum, if it is the one that is under way."""
        fields = self._read(UNDER_WAY)
        if fields.get("of") != _identity(stage, word):
            return None
        return SumUnderWay(
            identity=fields["of"], summand=fields["note"], masked=str(fields.get("asked", ""))
        )

    def keep(self, note: SumUnderWay) -> None:
        """Note a sum in the place of the one before."""
        self._write(UNDER_WAY, {"of": note.identity, "note": note.summand, "asked": note.masked})

    def left(self, stage: Stage) -> list[int] | None:
        """The clients that were left when shares of a stage were revealed; None if none were."""
        clients: list[int] | None = self._read(REVEALED).get(_name(stage))
        return clients

    def note_left(self, stage: Stage, clients: list[int]) -> None:
        """Note the clients that are left, before shares of a stage leave."""
        self._write(REVEALED, {**self._read(REVEALED), _name(stage): clients})

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        return dict(json.loads(path.read_text(encoding="utf-8")))

    def _write(self, name: str, fields: dict[str, Any]) -> None:
        make_folder(self.folder)
        write_secret(self.folder / name, json.dumps(fields).encode())


def _identity(stage: Stage, word: str) -> list[Any]:
    return [stage.round, stage.index, word]


def _name(stage: Stage) -> str:
    return f"{stage.round}-{stage.index}"


@dataclass(frozen=True)
class SiteSums(SiteGuard):
    """Answers the steps of secure sums, and no other request for a model."""

    masking: Masking
    world: World
    notes: SumNotes

    def answer(self, request: SiteRequest, respond: Callable[[Payload], Reply]) -> Reply:
        """The answer of a step. Raises Refused for a request that is no step."""
        if not self._is_summed(request.stage):
            return respond(request.payload)

        step, word = asked_step(request.payload)
        if step not in STEPS or not word.isalnum():
            raise Refused(
                "models of this run are summed in secret: this site answers only the steps of the "
                "secure sum"
            )
        answer = self._answer(request, step, word)
        match step:
            case "keys":
                return answer.keys()
            case "shares":
                return answer.shares()
            case "vector":
                return answer.vector(respond)
            case _:
                return answer.revealed()

    def _is_summed(self, stage: Stage) -> bool:
        """Whether the answers of a stage are models. Label counts and the sums that standardise
        data leave the site as they are.
        """
        return stage.name != CENSUS and stage != sums_stage(self.world)

    def _answer(self, request: SiteRequest, step: str, word: str) -> SumAnswer:
        """The answers of this client in the sum with this word. A new word in the first step begins
        another sum.
        """
        stage = request.stage
        sum = self.masking.begun(stage, stage.clients, word)
        note = self.notes.under_way(stage, word)
        if note is not None:
            summand = Summand.noted(sum, request.client, note.summand)
            masked = note.masked
        elif step == "keys":
            summand = Summand(sum, request.client)
            masked = ""
        else:
            raise Refused("the secure sum of this step is not the one that this site takes part in")
        return SumAnswer(
            masking=self.masking,
            notes=self.notes,
            request=request,
            summand=summand,
            masked=masked,
        )


@dataclass(frozen=True)
class SumAnswer:
    """The answers of one client in one sum, each of which is noted before it leaves.

    ``masked``: the digest of the request whose model was masked in this sum; empty if none was.
    """

    masking: Masking
    notes: SumNotes
    request: SiteRequest
    summand: Summand
    masked: str

    def keys(self) -> Reply:
        """Step 1: the client's keys."""
        keys = byte_tensor(self.summand.public)
        self._note(self.masked)
        return self._reply("keys", keys)

    def shares(self) -> Reply:
        """Step 2: shares of the client's secrets, sealed for each client."""
        keys = as_bytes(self.request.payload.tensors(f"{PREFIX}keys"), PUBLIC)
        shares = byte_tensors(self.summand.shares(keys))
        self._note(self.masked)
        return self._reply("shares", shares)

    def vector(self, respond: Callable[[Payload], Reply]) -> Reply:
        """Step 3: the stage's work, and its masked model; or whose shares cannot be read."""
        payload = plain_payload(self.request.payload)
        digest = self.request.with_payload(payload).digest()
        if self.masked not in ("", digest):
            raise Refused(
                "this site has masked another answer in this sum: one mask hides one model only"
            )
        received = as_bytes(self.request.payload.tensors(f"{PREFIX}sealed"), SEALED)
        unread = self.summand.unread(received)
        if unread:
            return self._reply(UNREAD.removeprefix(PREFIX), torch.tensor(unread))

        reply = respond(payload)
        if reply.failure:
            return reply
        vector = self.masking.vector(self.summand.sum, reply, payload)
        masked = self.summand.masked(vector, received)
        self._note(digest)
        times = {name: value for name, value in reply.metrics.items() if name in TIMES}
        return replace(self._reply("vector", as_tensor(masked)), metrics=times)

    def revealed(self) -> Reply:
        """Step 4: shares of the secrets that take the masks off the sum."""
        stage = self.request.stage
        numbers = self.request.payload.tensor(f"{PREFIX}left").tolist()
        left = sorted(int(number) for number in numbers)
        if self.notes.left(stage) not in (None, left):
            raise Refused(
                f"this site has revealed shares for round {stage.round}, stage {stage.name!r}, "
                "with other clients left: two sums would show a single model"
            )
        shares = byte_tensors(self.summand.revealed(left))
        self.notes.note_left(stage, left)
        self._note(self.masked)
        return self._reply("revealed", shares)

    def _note(self, masked: str) -> None:
        sum = self.summand.sum
        identity = _identity(self.request.stage, sum.word)
        self.notes.keep(SumUnderWay(identity, self.summand.note(), masked))

    def _reply(self, name: str, group: Any) -> Reply:
        stage = self.request.stage
        content = Payload({PREFIX + name: group})
        return Reply(self.request.client, content, 0, {}, stage.round, stage.index)
