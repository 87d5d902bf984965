"""Secure sums over Flower, a site's side: its four answers in a stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedstill.core.errors import Refused
from fedstill.core.files import make_folder, write_secret
from fedstill.core.records import Payload, Reply
from fedstill.flower.messages import Request, SiteReply
from fedstill.flower.site_storage import Desk
from fedstill.privacy.masking import Masking
from fedstill.privacy.protocol import PUBLIC, SEALED, Summand
from fedstill.privacy.sum_steps import PREFIX, STEPS, UNREAD, as_bytes, as_tensor, byte_tensors

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
