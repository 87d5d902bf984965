"""The protocol of secure sums: what a client does in its four steps, and what the server makes of what it gets.

Each client adds to its vector a mask of its own, and a mask for each other client, which the two agree on and which one
adds and the other subtracts: these cancel in the sum. Both secrets are shared out among all before. Of clients whose
vectors came, the others then give shares of the own mask; of those that dropped out, shares of the key of the common
ones: never both. So the server learns the sum, and of no vector more than that.

What is held: against a server that follows the protocol and looks at all it gets, and together with fewer than
``threshold`` clients. Keys are passed on by the server and not signed: one that puts keys of its own in their place,
and so plays the others to each client, is not withstood.

Source: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (2017), figure 4,
without signatures.
Reading: the paper rounds and sums modulo R; here R is 2^64, so sums need no division.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedstill.errors import BadPayload, TooFewReplies
from fedstill.secure.primitives import (
    KEY,
    SEED,
    Masks,
    agreed_key,
    mask_of,
    public_half,
    put_together,
    sealed,
    shared_out,
    unsealed,
)


@dataclass(frozen=True)
class Sum:
    """What all know of one sum: its name; who was asked; how many at least must stay; and a word no other sum has."""

    name: str
    clients: tuple[int, ...]
    threshold: int
    word: str = ""

    def __post_init__(self) -> None:
        if not len(self.clients) // 2 < self.threshold <= len(self.clients):
            raise BadPayload(f"{self.threshold} of {len(self.clients)} clients is no threshold over a half")

    def purpose(self, what: str, *clients: int) -> bytes:
        """What a key is for: of this sum, and between these clients."""
        return json.dumps([self.name, self.word, what, *clients]).encode()

    def demand(self, there: Collection[int], did: str) -> None:
        """Raise TooFewReplies where fewer than the threshold did something, or BadPayload where others did."""
        if others := set(there) - set(self.clients):
            raise BadPayload(f"client {min(others)} {did}, and is not in the secure sum")
        if len(there) < self.threshold:
            raise TooFewReplies(
                f"{self.name}: {len(there)} of {len(self.clients)} clients {did}, and the secure sum needs "
                f"{self.threshold} (privacy.secure_threshold)"
            )

    def number(self, client: int) -> int:
        """The number of a client's shares, from 1."""
        return sorted(self.clients).index(client) + 1


@dataclass
class Summand:
    """One client in one sum, through its four steps: ``public``, ``shares``, ``masked``, ``revealed``.

    ``secrets``: two private keys (32 bytes each) and a seed (16), drawn from the operating system's generator. What it
    was told in one step counts in the next.
    """

    sum: Sum
    client: int
    secrets: bytes = field(default_factory=lambda: os.urandom(2 * KEY + SEED), repr=False)
    keys: dict[int, bytes] = field(default_factory=dict)
    sealed: dict[int, bytes] = field(default_factory=dict)
    left: tuple[int, ...] = ()

    @property
    def public(self) -> bytes:
        """Step 1: two public keys, 64 bytes: of common masks, and of sealed shares."""
        return public_half(self._masking) + public_half(self._sealing)

    def shares(self, keys: Mapping[int, bytes]) -> dict[int, bytes]:
        """Step 2: shares of both secrets for each client with keys, itself included, each sealed for it alone."""
        self.sum.demand(keys, "sent keys")
        if keys.get(self.client) != self.public or len(set(keys.values())) < len(keys):
            raise BadPayload("the keys of the secure sum are not those of its clients")
        if any(len(both) != 2 * KEY for both in keys.values()):
            raise BadPayload("a client's keys are not 64 bytes")
        if self.keys and self.keys != dict(keys):
            raise BadPayload("the keys of the secure sum were others before")
        self.keys = dict(keys)
        split = [shared_out(s, self.sum.threshold, len(self.sum.clients)) for s in (self._seed, self._masking)]
        out = {}
        for other, both in sorted(self.keys.items()):
            text = b"".join(shares[self.sum.number(other) - 1] for shares in split)
            key = agreed_key(self._sealing, both[KEY:], self.sum.purpose("shares", self.client, other))
            out[other] = sealed(key, text, self.sum.purpose("shares", self.client, other))
        return out

    def masked(self, vector: Masks, received: Mapping[int, bytes]) -> Masks:
        """Step 3: the vector (n,) under all masks; ``received``: the sealed shares from each client that sent some."""
        self.sum.demand(received, "sent shares")
        if not received.keys() <= self.keys.keys() or self.client not in received:
            raise BadPayload("sealed shares came from clients without keys")
        if self.sealed and self.sealed != dict(received):
            raise BadPayload("the sealed shares of the secure sum were others before")
        self.sealed = dict(received)
        for other in received:
            self._opened(other)
        out = vector + mask_of(self._seed, len(vector), self.sum.purpose("own", self.client))
        for other in sorted(received.keys() - {self.client}):
            mask = common_mask(self.sum, self._masking, self.client, other, self.keys[other], len(vector))
            out = out + mask if self.client < other else out - mask
        return out

    def revealed(self, left: Collection[int]) -> dict[int, bytes]:
        """Step 4: of each client that is left a share of its seed, of each other one of its key; for one ``left`` only.

        ``left``: the clients whose masked vectors came.
        """
        self.sum.demand(left, "sent masked vectors")
        if not set(left) <= self.sealed.keys() or self.client not in left:
            raise BadPayload("masked vectors came from clients without shares")
        if self.left and self.left != tuple(sorted(left)):
            raise BadPayload("the clients that are left were others before: no second answer is given")
        self.left = tuple(sorted(left))
        return {
            other: self._opened(other)[:SEED] if other in left else self._opened(other)[SEED:] for other in self.sealed
        }

    def note(self) -> str:
        """All of it but the sum, as JSON, for a client's own disk between two steps."""
        tables = {name: {str(k): v.hex() for k, v in getattr(self, name).items()} for name in ("keys", "sealed")}
        return json.dumps({"secrets": self.secrets.hex(), "left": list(self.left), **tables})

    @staticmethod
    def noted(sum: Sum, client: int, note: str) -> Summand:
        """The client of a note."""
        told = json.loads(note)
        keys, kept = ({int(k): bytes.fromhex(v) for k, v in told[name].items()} for name in ("keys", "sealed"))
        return Summand(sum, client, bytes.fromhex(told["secrets"]), keys, kept, tuple(told["left"]))

    @property
    def _masking(self) -> bytes:
        return self.secrets[:KEY]

    @property
    def _sealing(self) -> bytes:
        return self.secrets[KEY : 2 * KEY]

    @property
    def _seed(self) -> bytes:
        return self.secrets[2 * KEY :]

    def _opened(self, other: int) -> bytes:
        about = self.sum.purpose("shares", other, self.client)
        text = unsealed(agreed_key(self._sealing, self.keys[other][KEY:], about), self.sealed[other], about)
        if len(text) != SEED + KEY:
            raise BadPayload(f"client {other} sent no shares")
        return text


def common_mask(sum: Sum, private: bytes, own: int, other: int, public: bytes, length: int) -> Masks:
    """The mask that two clients agree on, (length,): the same from either side. ``public``: both keys of the other."""
    purpose = sum.purpose("common", *sorted((own, other)))
    return mask_of(agreed_key(private, public[:KEY], purpose), length, purpose)


def unmasked(
    sum: Sum,
    keys: Mapping[int, bytes],
    shared: Collection[int],
    masked: Mapping[int, Masks],
    revealed: Mapping[int, Mapping[int, bytes]],
) -> Masks:
    """The server's part: the sum (n,) of the vectors of the clients in ``masked``, modulo 2^64.

    keys: of step 1; shared: whose shares the others have, of step 2; masked, revealed: what came in steps 3 and 4.
    Raises TooFewReplies below the threshold, BadPayload for vectors of unequal length and shares that fit no key.
    """
    sum.demand(masked, "sent masked vectors")
    sum.demand(revealed, "revealed shares")
    lengths = {len(vector) for vector in masked.values()}
    if len(lengths) != 1:
        raise BadPayload("masked vectors of one sum differ in their length")
    total, (length,) = np.zeros(next(iter(lengths)), dtype=np.uint64), lengths
    for vector in masked.values():
        total = total + vector
    for client in sorted(shared):
        secret = _secret(sum, client, revealed)
        if client in masked:
            total = total - mask_of(secret, length, sum.purpose("own", client))
            continue
        if len(secret) != KEY or public_half(secret) != keys[client][:KEY]:
            raise BadPayload(f"shares of client {client}, which dropped out, do not give its key")
        for other in masked:
            mask = common_mask(sum, secret, client, other, keys[other], length)
            total = total + mask if client < other else total - mask
    return total


def _secret(sum: Sum, client: int, revealed: Mapping[int, Mapping[int, bytes]]) -> bytes:
    there = [other for other in sorted(revealed) if client in revealed[other]]
    sum.demand(there, f"revealed shares of client {client}")
    return put_together({sum.number(other): revealed[other][client] for other in there[: sum.threshold]})
