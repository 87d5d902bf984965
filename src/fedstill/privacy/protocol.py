"""The protocol of secure sums: a client's four steps, and the server's removal of masks.

The cryptographic primitives come from libraries in the extra ``secure``. X25519, HKDF-SHA256,
ChaCha20-Poly1305 and AES-256 in counter mode are those of ``cryptography``; Shamir's secret sharing
over GF(2^128) is that of PyCryptodome. Flower's SecAgg+ expands masks from a seed of 32 bits with a
generator that is not a cipher, so whoever tries all seeds finds the mask.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.errors import BadPayload, ConfigError, TooFewReplies
from fedstill.core.records import Payload, Tensors

# Primitives: agreed keys, sealed messages, streams of masks, shared secrets.


KEY = 32
"""Bytes of a private or public key, of an agreed key and of a cipher's key."""
SEED = 16
"""Bytes of the seed of a client's own mask."""
_CHUNK = 16
_NONCE = 12

Masks = NDArray[np.uint64]


def require_secure() -> None:
    """Raise ConfigError if a library that secure sums need is not here."""
    try:
        import Crypto.Protocol.SecretSharing  # noqa: F401
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"privacy.secure_sum needs more: pip install 'fedstill[secure]' ({error})"
        ) from error


def public_half(private: bytes) -> bytes:
    """The public key, 32 bytes, of a private one of 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed_key(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """The key that two agree on, 32 bytes, each with its private key and the other's public one,
    for one purpose.

    Raises BadPayload for a public key that is none.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:
        raise BadPayload(f"a public key is none: {error}") from error
    return _derived(secret, purpose)


def demand_key(public: bytes) -> None:
    """Raise BadPayload for a public key that nobody can agree on a secret with."""
    agreed_key(os.urandom(KEY), public, b"none")


def sealed(key: bytes, text: bytes, about: bytes) -> bytes:
    """A message that only who has the key can read or make; a key seals one message only. ``about``
    is bound to it.
    """
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(bytes(_NONCE), text, about)


def unsealed(key: bytes, message: bytes, about: bytes) -> bytes:
    """What was sealed; raises BadPayload if it was altered, or sealed with another key or about
    something else.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(bytes(_NONCE), message, about)
    except InvalidTag as error:
        raise BadPayload("a sealed share was altered, or is not for this client") from error


def mask_of(secret: bytes, length: int, purpose: bytes) -> Masks:
    """Numbers of 64 bits that cannot be told from uniform ones without the secret, (length,)."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    encryptor = Cipher(
        algorithms.AES(_derived(secret, purpose)), modes.CTR(bytes(_CHUNK))
    ).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * length)), dtype="<u8").astype(np.uint64)


def shared_out(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """Shares of a secret whose length is a multiple of 16: any ``threshold`` of them give it back,
    fewer say nothing.

    Source: Shamir, "How to Share a Secret" (1979).
    """
    from Crypto.Protocol.SecretSharing import Shamir

    chunks = [secret[i : i + _CHUNK] for i in range(0, len(secret), _CHUNK)]
    split = [
        [share for _, share in Shamir.split(threshold, number, chunk, ssss=False)]
        for chunk in chunks
    ]
    return [b"".join(shares) for shares in zip(*split, strict=True)]


def put_together(shares: Mapping[int, bytes]) -> bytes:
    """The secret of some of its shares, by their numbers from 1; of too few or wrong ones, other
    bytes.

    Raises BadPayload for shares of unequal length.
    """
    from Crypto.Protocol.SecretSharing import Shamir

    lengths = {len(share) for share in shares.values()}
    if len(lengths) != 1 or (length := lengths.pop()) == 0 or length % _CHUNK:
        raise BadPayload("shares of one secret differ in their length")
    return b"".join(
        Shamir.combine(
            [(number, share[i : i + _CHUNK]) for number, share in shares.items()], ssss=False
        )
        for i in range(0, length, _CHUNK)
    )


def _derived(secret: bytes, purpose: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=KEY, salt=None, info=purpose).derive(secret)


# The protocol.


# The protocol of secure sums: what a client does in its four steps; ``unmasking`` is the server's
# part.
#
# Each client adds to its vector a mask of its own, and a mask for each other client, which the two
# agree on and which one adds and the other subtracts: these cancel in the sum. Both secrets are
# shared out among all before. Of clients whose vectors came, the others then give shares of the own
# mask; of those that dropped out, shares of the key of the common ones: never both. So the server
# learns the sum, and of no vector more than that.
#
# What is held: against a server that follows the protocol and looks at all it gets, even together
# with ``threshold`` - 2 clients: at least two others are left in a sum, and of these it learns the
# sum alone. Keys are passed on by the server and not signed: one that puts keys of its own in their
# place, and so plays the others to each client, is not withstood.
#
# Source: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning"
# (2017), figure 4, without signatures.
# Reading: the paper rounds and sums modulo R; here R is 2^64, so sums need no division. With its
# keys a client sends the SHA-256 of its seed, so that the server notices wrong shares of a seed, as
# it does of a key, and passes them over.


PUBLIC = 3 * KEY
"""Bytes of what a client sends in step 1: two public keys, and the SHA-256 of its seed."""
SEALED = SEED + KEY + 16
"""Bytes of a sealed share: of a seed and of a key, and the cipher's tag."""


@dataclass(frozen=True)
class Sum:
    """What all know of one sum: its name; who was asked; how many at least must stay; and a word no
    other sum has.
    """

    name: str
    clients: tuple[int, ...]
    threshold: int
    word: str = ""

    def __post_init__(self) -> None:
        if not len(self.clients) // 2 < self.threshold <= len(self.clients):
            raise BadPayload(
                f"{self.threshold} of {len(self.clients)} clients is no threshold over a half"
            )

    def purpose(self, what: str, *clients: int) -> bytes:
        """What a key is for: of this sum, and between these clients."""
        return json.dumps([self.name, self.word, what, *clients]).encode()

    def demand(self, there: Collection[int], did: str) -> None:
        """Raise TooFewReplies where fewer than the threshold did something, or BadPayload where
        others did.
        """
        if others := set(there) - set(self.clients):
            raise BadPayload(f"client {min(others)} {did}, and is not in the secure sum")
        if len(there) < self.threshold:
            raise TooFewReplies(
                f"{self.name}: {len(there)} of {len(self.clients)} clients {did}, and the secure "
                "sum needs "
                f"{self.threshold} (privacy.secure_threshold)"
            )

    def number(self, client: int) -> int:
        """The number of a client's shares, from 1."""
        return sorted(self.clients).index(client) + 1


TABLES = ("keys", "sealed", "out")
"""What a note of a client holds by client."""


@dataclass
class Summand:
    """One client in one sum, through its four steps: ``public``, ``shares``, ``masked``,
    ``revealed``.

    ``secrets``: two private keys (32 bytes each) and a seed (16), drawn from the operating system's
    generator. What it was told in one step counts in the next. ``out``: the sealed shares that
    it sent: sent again, they are the same.
    """

    sum: Sum
    client: int
    secrets: bytes = field(default_factory=lambda: os.urandom(2 * KEY + SEED), repr=False)
    keys: dict[int, bytes] = field(default_factory=dict)
    sealed: dict[int, bytes] = field(default_factory=dict)
    left: tuple[int, ...] = ()
    out: dict[int, bytes] = field(default_factory=dict)

    @property
    def public(self) -> bytes:
        """Step 1: two public keys, of common masks and of sealed shares, and the SHA-256 of the
        seed; 96 bytes.
        """
        seed = sum_of_seed(self.sum, self.client, self._seed)
        return public_half(self._masking) + public_half(self._sealing) + seed

    def shares(self, keys: Mapping[int, bytes]) -> dict[int, bytes]:
        """Step 2: shares of both secrets for each client with keys, itself included, each sealed
        for it alone.

        Raises BadPayload for keys that are not the clients', or that were others before.
        """
        self.sum.demand(keys, "sent keys")
        if keys.get(self.client) != self.public or len(set(keys.values())) < len(keys):
            raise BadPayload("the keys of the secure sum are not those of its clients")
        if any(len(both) != PUBLIC for both in keys.values()):
            raise BadPayload(f"a client's keys are not {PUBLIC} bytes")
        if self.keys and self.keys != dict(keys):
            raise BadPayload("the keys of the secure sum were others before")
        if self.out:
            return self.out
        self.keys = dict(keys)
        split = [
            shared_out(s, self.sum.threshold, len(self.sum.clients))
            for s in (self._seed, self._masking)
        ]
        for other, both in sorted(self.keys.items()):
            text = b"".join(shares[self.sum.number(other) - 1] for shares in split)
            about = self.sum.purpose("shares", self.client, other)
            self.out[other] = sealed(
                agreed_key(self._sealing, both[KEY : 2 * KEY], about), text, about
            )
        return self.out

    def unread(self, received: Mapping[int, bytes]) -> list[int]:
        """The clients whose sealed shares this one cannot read; before step 3, so that the sum can
        go on without.
        """
        out = []
        for other, message in sorted(received.items()):
            try:
                self._read(other, message)
            except BadPayload:
                out.append(other)
        return out

    def masked(self, vector: Masks, received: Mapping[int, bytes]) -> Masks:
        """Step 3: the vector (n,) under all masks; ``received``: the sealed shares from each client
        that sent some.

        Raises BadPayload for shares from clients without keys, for others than before, and for
        shares that cannot be opened.
        """
        self.sum.demand(received, "sent shares")
        if not received.keys() <= self.keys.keys() or self.client not in received:
            raise BadPayload("sealed shares came from clients without keys")
        if self.sealed and self.sealed != dict(received):
            raise BadPayload("the sealed shares of the secure sum were others before")
        self.sealed = dict(received)
        for other in received:
            self._opened(other)
        out = vector + mask_of(self._seed, len(vector), self.sum.purpose("own", self.client))
        for peer in sorted(received.keys() - {self.client}):
            mask = common_mask(
                self.sum,
                self._masking,
                client=self.client,
                peer=peer,
                public=self.keys[peer],
                length=len(vector),
            )
            out = with_common_mask(out, mask, self.client, peer)
        return out

    def revealed(self, left: Collection[int]) -> dict[int, bytes]:
        """Step 4: of each client that is left a share of its seed, of each other one of its key;
        for one ``left`` only.

        ``left``: the clients whose masked vectors came. Raises BadPayload for others than before,
        or without shares.
        """
        self.sum.demand(left, "sent masked vectors")
        if not set(left) <= self.sealed.keys() or self.client not in left:
            raise BadPayload("masked vectors came from clients without shares")
        if self.left and self.left != tuple(sorted(left)):
            raise BadPayload(
                "the clients that are left were others before: no second answer is given"
            )
        self.left = tuple(sorted(left))
        shares = {}
        for client in self.sealed:
            both = self._opened(client)
            shares[client] = both[SEED:]
            if client in left:
                shares[client] = both[:SEED]
        return shares

    def note(self) -> str:
        """All of it but the sum, as JSON, for a client's own disk between two steps."""
        tables = {
            name: {str(k): v.hex() for k, v in getattr(self, name).items()} for name in TABLES
        }
        return json.dumps({"secrets": self.secrets.hex(), "left": list(self.left), **tables})

    @staticmethod
    def noted(sum: Sum, client: int, note: str) -> Summand:
        """The client of a note."""
        told = json.loads(note)
        tables = {
            name: {int(k): bytes.fromhex(v) for k, v in told[name].items()} for name in TABLES
        }
        return Summand(
            sum, client, bytes.fromhex(told["secrets"]), left=tuple(told["left"]), **tables
        )

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
        return self._read(other, self.sealed[other])

    def _read(self, other: int, message: bytes) -> bytes:
        about = self.sum.purpose("shares", other, self.client)
        if other not in self.keys:
            raise BadPayload(f"client {other} sent shares and no keys")
        text = unsealed(
            agreed_key(self._sealing, self.keys[other][KEY : 2 * KEY], about), message, about
        )
        if len(text) != SEED + KEY:
            raise BadPayload(f"client {other} sent no shares")
        return text


def common_mask(
    sum: Sum, private: bytes, *, client: int, peer: int, public: bytes, length: int
) -> Masks:
    """The mask that two clients agree on, (length,): the same from either side.

    private: the client's key of common masks. public: both public keys of the peer.
    """
    purpose = sum.purpose("common", *sorted((client, peer)))
    return mask_of(agreed_key(private, public[:KEY], purpose), length, purpose)


def with_common_mask(vector: Masks, mask: Masks, client: int, peer: int) -> Masks:
    """A client's vector with the mask that it has in common with a peer: of the two, the one with
    the lower id adds it and the other subtracts it.
    """
    if client < peer:
        return vector + mask
    return vector - mask


def sum_of_seed(sum: Sum, client: int, seed: bytes) -> bytes:
    """The SHA-256 of a client's seed in a sum, by which the server knows it when shares give it."""
    return hashlib.sha256(sum.purpose("seed", client) + seed).digest()


# The server's part of a secure sum: masks taken off the sum, by shares of which some may be wrong.


log = logging.getLogger("fedstill.secure")

TRIES = 2000
"""How many choices of shares are tried for one secret: of ten clients all that there are, of many
those that leave out two or three wrong ones.
"""


def unmasked(
    sum: Sum,
    keys: Mapping[int, bytes],
    shared: Collection[int],
    masked: Mapping[int, Masks],
    revealed: Mapping[int, Mapping[int, bytes]],
) -> Masks:
    """The sum (n,) of the vectors of the clients in ``masked``, modulo 2^64.

    keys: of step 1; shared: whose shares the others have, of step 2; masked, revealed: what came in
    steps 3 and 4. A wrong share is named in the log and passed over, where enough others are right.
    Raises TooFewReplies below the threshold, BadPayload for vectors of unequal length and shares
    that fit no secret.
    """
    sum.demand(masked, "sent masked vectors")
    sum.demand(revealed, "revealed shares")
    lengths = {len(vector) for vector in masked.values()}
    if len(lengths) != 1:
        raise BadPayload("masked vectors of one sum differ in their length")
    length = lengths.pop()
    total = np.zeros(length, dtype=np.uint64)
    doubted = set[int]()
    for vector in masked.values():
        total = total + vector
    for client in sorted(shared):
        secret = _secret(
            sum, client, revealed, _fits(sum, client, keys[client], client in masked), doubted
        )
        if not secret:
            problem = ", which dropped out, do not give its key"
            if client in masked:
                problem = " do not give its seed"
            raise BadPayload(f"shares of client {client}{problem}")
        if client in masked:
            total = total - mask_of(secret, length, sum.purpose("own", client))
            continue
        for peer in masked:
            mask = common_mask(
                sum, secret, client=client, peer=peer, public=keys[peer], length=length
            )
            # The peer's vector holds the mask with the peer's sign: the client's sign cancels it.
            total = with_common_mask(total, mask, client, peer)
    return total


def _fits(sum: Sum, client: int, public: bytes, left: bool) -> Callable[[bytes], bool]:
    """Whether something is a client's secret: its seed if it is left, its key of common masks if it
    dropped out.
    """
    if left:
        return lambda secret: sum_of_seed(sum, client, secret) == public[2 * KEY :]
    return lambda secret: len(secret) == KEY and public_half(secret) == public[:KEY]


def _secret(
    sum: Sum,
    client: int,
    revealed: Mapping[int, Mapping[int, bytes]],
    fits: Callable[[bytes], bool],
    doubted: set[int],
) -> bytes:
    """A client's secret; empty where no threshold of shares fits. ``doubted``: who revealed a share
    that did not fit; theirs are taken last. It is not said whose fault a wrong share is: the client
    may have dealt it out so.
    """
    there = sorted(
        (o for o in revealed if client in revealed[o]), key=lambda other: (other in doubted, other)
    )
    sum.demand(there, f"revealed shares of client {client}")
    for first, out in islice(_choices(there, sum.threshold), TRIES):
        shares = {sum.number(other): revealed[other][client] for other in first if other not in out}
        if fits(secret := put_together(shares)):
            for other in out:
                log.warning(
                    "%s: the share of client %d that %d revealed is wrong", sum.name, client, other
                )
            doubted.update(out)
            return secret
    return b""


def _choices(
    there: Sequence[int], threshold: int
) -> Iterator[tuple[Sequence[int], tuple[int, ...]]]:
    """Those whose shares are looked at, and which of them are left out, so that a
    threshold remains: few out first.
    """
    for wrong in range(len(there) - threshold + 1):
        first = there[: threshold + wrong]
        for out in combinations(first, wrong):
            yield first, out


# ---- messages of the steps -----------------------------------------------------------------------
#
# The messages of a secure sum whose clients are elsewhere: four steps in a stage. The server asks
# for each step with ``question``, beside what the stage itself sends. A client's answer to step
# ``keys`` is the group ``sum.keys``, and so on. Neither side trusts what it reads.


PREFIX = "sum."
"""The names of the protocol's groups begin with it; the other groups are the stage's."""

STEPS = ("keys", "shares", "vector", "revealed")
"""The four steps, by what a client answers."""

UNREAD = f"{PREFIX}unread"
"""A client's answer instead of its vector if it cannot read some shares: who sent these."""

MOST_DIGITS = 9
"""The most digits of a client's id in a message."""


def question(step: str, word: str, **groups: Any) -> Payload:
    """What a client is asked in a step of the sum with this word, beside the stage's payload."""
    prefixed = {PREFIX + name: group for name, group in groups.items()}
    return Payload({f"{PREFIX}step": step, f"{PREFIX}word": word, **prefixed})


def asked_step(payload: Payload) -> tuple[str, str]:
    """The step and the word of a question; empty strings for what is missing."""
    return str(payload.get(f"{PREFIX}step", "")), str(payload.get(f"{PREFIX}word", ""))


def plain_payload(payload: Payload) -> Payload:
    """The stage's payload in a question."""
    return Payload({name: group for name, group in payload.items() if not name.startswith(PREFIX)})


def byte_tensors(data: Mapping[int, bytes]) -> dict[str, Tensor]:
    """Bytes by client, for a message."""
    return {str(client): byte_tensor(data[client]) for client in sorted(data)}


def byte_tensor(data: bytes) -> Tensor:
    """Bytes, for a message."""
    return torch.tensor(list(data), dtype=torch.uint8)


def as_bytes(tensors: Tensors, most: int) -> dict[int, bytes]:
    """Bytes by client out of a message, at most ``most`` of each.

    Raises BadPayload for anything else.
    """
    for name, tensor in tensors.items():
        is_client = name.isdecimal() and len(name) <= MOST_DIGITS
        if not is_client or tensor.dtype != torch.uint8 or tensor.ndim != 1:
            raise BadPayload("a step of a secure sum brings bytes by client, and nothing else")
    if any(len(tensor) > most for tensor in tensors.values()):
        raise BadPayload(f"a step of a secure sum brings more than {most} bytes for a client")
    return {int(name): tensor.numpy().tobytes() for name, tensor in tensors.items()}


def as_tensor(vector: Masks) -> Tensor:
    """A masked vector for a message, (n,) int64."""
    return torch.from_numpy(vector.view(np.int64))
