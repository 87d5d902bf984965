"""The protocol of secure sums: the four steps of a client, and the removal of masks at the server.

The cryptographic primitives come from libraries in the extra ``secure``: X25519, HKDF-SHA256,
ChaCha20-Poly1305 and AES-256 in counter mode from ``cryptography``, and Shamir's secret sharing
over GF(2^128) from PyCryptodome. Flower's SecAgg+ is not used: it expands masks from a seed of 32
bits with a generator that is not a cipher, so an attacker can try all seeds.
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

# ---- primitives ----------------------------------------------------------------------------------


KEY = 32
"""The bytes of a private, public or agreed key, and of a cipher's key."""
SEED = 16
"""The bytes of the seed of a client's private mask."""
_CHUNK = 16
_NONCE = 12

Masks = NDArray[np.uint64]


def require_secure() -> None:
    """Raise ConfigError if a library that secure sums need is not installed."""
    try:
        import Crypto.Protocol.SecretSharing  # noqa: F401
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"privacy.secure_sum needs further libraries: pip install 'fedstill[secure]' ({error})"
        ) from error


def public_key(private: bytes) -> bytes:
    """The public key, 32 bytes, of a private key of 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed_key(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """The key, 32 bytes, that two parties derive for a purpose, each from its private key and the
    public key of the other party.

    Raises BadPayload for an invalid public key.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:
        raise BadPayload(f"a public key is invalid: {error}") from error
    return _derived(secret, purpose)


def check_public_key(public: bytes) -> None:
    """Raise BadPayload for an invalid public key."""
    agreed_key(os.urandom(KEY), public, b"none")


def encrypted(key: bytes, text: bytes, about: bytes) -> bytes:
    """An encrypted and authenticated message. ``about`` is authenticated with it.

    The nonce is constant, so use each key for one message only.
    """
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(bytes(_NONCE), text, about)


def decrypted(key: bytes, message: bytes, about: bytes) -> bytes:
    """The text of an encrypted message.

    Raises BadPayload if the message was altered, or encrypted with another key or ``about``.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(bytes(_NONCE), message, about)
    except InvalidTag as error:
        raise BadPayload("an encrypted share was altered, or is not for this client") from error


def mask_of(secret: bytes, length: int, purpose: bytes) -> Masks:
    """Pseudorandom 64-bit numbers, (length,), from a secret."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    encryptor = Cipher(
        algorithms.AES(_derived(secret, purpose)), modes.CTR(bytes(_CHUNK))
    ).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * length)), dtype="<u8").astype(np.uint64)


def secret_shares(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """Shares of a secret whose length is a multiple of 16. Any ``threshold`` of them reconstruct
    the secret; fewer reveal nothing.

    Source: Shamir, "How to Share a Secret" (1979).
    """
    from Crypto.Protocol.SecretSharing import Shamir

    chunks = [secret[i : i + _CHUNK] for i in range(0, len(secret), _CHUNK)]
    split = [
        [share for _, share in Shamir.split(threshold, number, chunk, ssss=False)]
        for chunk in chunks
    ]
    return [b"".join(shares) for shares in zip(*split, strict=True)]


def reconstructed(shares: Mapping[int, bytes]) -> bytes:
    """The secret from its shares, by number from 1. Too few or wrong shares give other bytes.

    Raises BadPayload for shares of unequal or invalid length.
    """
    from Crypto.Protocol.SecretSharing import Shamir

    lengths = {len(share) for share in shares.values()}
    if len(lengths) != 1:
        raise BadPayload("shares of one secret differ in length")
    length = lengths.pop()
    if length == 0 or length % _CHUNK:
        raise BadPayload(f"a share has {length} bytes, not a multiple of {_CHUNK}")
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


# ---- clients -------------------------------------------------------------------------------------
#
# A client adds two kinds of masks to its vector: a private mask, and a common mask with each other
# client. Of two clients, one adds their common mask and the other subtracts it, so common masks
# cancel in the sum. Before that, each client distributes shares of both secrets to all clients.
# Afterwards, if a client's vector arrived, the others reveal shares of its private mask; if it
# dropped out, they reveal shares of the key of its common masks. They never reveal both. So the
# server learns the sum, and nothing else about a vector.
#
# This protects against a server that follows the protocol and evaluates all that it receives, even
# together with ``threshold`` - 2 clients: the sum contains at least two further clients, and the
# server learns only their sum. The server forwards the keys, which are not signed. So the protocol
# does not protect against a server that replaces keys by its own.
#
# Source: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning"
# (2017), figure 4, without signatures.
# Reading: the paper rounds and sums modulo R. Here R is 2^64, so sums need no division. With its
# keys, a client sends the SHA-256 of its seed, so that the server detects wrong shares of a seed,
# as it detects wrong shares of a key, and ignores them.


PUBLIC = 3 * KEY
"""The bytes that a client sends in step 1: two public keys, and the SHA-256 of its seed."""
SEALED = SEED + KEY + 16
"""The bytes of an encrypted share: a share of the seed, a share of the key, and the cipher's tag.
"""


@dataclass(frozen=True)
class Sum:
    """The public facts of a sum.

    ``name``: for messages. ``clients``: the clients that were asked. ``threshold``: the least
    number of clients that must complete it. ``word``: a random word that no other sum has.
    """

    name: str
    clients: tuple[int, ...]
    threshold: int
    word: str = ""

    def __post_init__(self) -> None:
        if not len(self.clients) // 2 < self.threshold <= len(self.clients):
            raise BadPayload(
                f"a threshold of {self.threshold} is not more than half of {len(self.clients)} "
                "clients"
            )

    def purpose(self, use: str, *clients: int) -> bytes:
        """The purpose of a key: its use in this sum, between these clients."""
        return json.dumps([self.name, self.word, use, *clients]).encode()

    def check_clients(self, clients: Collection[int], action: str) -> None:
        """Raise TooFewReplies if fewer clients than the threshold did ``action``, and BadPayload
        if a client outside the sum did.
        """
        strangers = set(clients) - set(self.clients)
        if strangers:
            raise BadPayload(f"client {min(strangers)} {action}, but is not in the secure sum")
        if len(clients) < self.threshold:
            raise TooFewReplies(
                f"{self.name}: {len(clients)} of {len(self.clients)} clients {action}, but the "
                f"secure sum needs {self.threshold} (privacy.secure_threshold)"
            )

    def number(self, client: int) -> int:
        """The number of a client's shares, from 1."""
        return sorted(self.clients).index(client) + 1


TABLES = ("keys", "sealed", "out")
"""The fields of a ``Summand`` that are tables by client."""


@dataclass
class Summand:
    """A client in a sum, through its four steps: ``public``, ``shares``, ``masked``, ``revealed``.

    ``secrets``: two private keys (32 bytes each) and a seed (16 bytes) from the operating system's
    generator. ``keys``: the public keys of all clients, from step 2. ``sealed``: the encrypted
    shares that it received in step 3. ``left``: the clients whose vectors arrived, from step 4.
    ``out``: the encrypted shares that it sent; a repeated step 2 sends the same ones.
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
        """Step 1: the public keys for common masks and for encrypted shares, and the SHA-256 of
        the seed; 96 bytes.
        """
        digest = seed_digest(self.sum, self.client, self._seed)
        return public_key(self._masking) + public_key(self._sealing) + digest

    def shares(self, keys: Mapping[int, bytes]) -> dict[int, bytes]:
        """Step 2: shares of both secrets, encrypted for each client with keys, including itself.

        Raises BadPayload for wrong keys, and for other keys than in an earlier call.
        """
        self.sum.check_clients(keys, "sent keys")
        if keys.get(self.client) != self.public or len(set(keys.values())) < len(keys):
            raise BadPayload("the keys of the secure sum are not those of its clients")
        if any(len(client_keys) != PUBLIC for client_keys in keys.values()):
            raise BadPayload(f"a client's keys are not {PUBLIC} bytes")
        if self.keys and self.keys != dict(keys):
            raise BadPayload("the keys of the secure sum have changed")
        if self.out:
            return self.out
        self.keys = dict(keys)

        threshold = self.sum.threshold
        count = len(self.sum.clients)
        seed_shares = secret_shares(self._seed, threshold, count)
        key_shares = secret_shares(self._masking, threshold, count)
        for receiver, client_keys in sorted(self.keys.items()):
            place = self.sum.number(receiver) - 1
            about = self.sum.purpose("shares", self.client, receiver)
            key = agreed_key(self._sealing, client_keys[KEY : 2 * KEY], about)
            self.out[receiver] = encrypted(key, seed_shares[place] + key_shares[place], about)
        return self.out

    def unread(self, received: Mapping[int, bytes]) -> list[int]:
        """The clients whose encrypted shares this client cannot read. It is called before step 3,
        so that the sum can continue without them.
        """
        unreadable = []
        for sender, message in sorted(received.items()):
            try:
                self._share(sender, message)
            except BadPayload:
                unreadable.append(sender)
        return unreadable

    def masked(self, vector: Masks, received: Mapping[int, bytes]) -> Masks:
        """Step 3: the vector (n,) with all masks. ``received``: the encrypted shares by sender.

        Raises BadPayload for shares from clients without keys, for other shares than in an earlier
        call, and for shares that cannot be decrypted.
        """
        self.sum.check_clients(received, "sent shares")
        if not received.keys() <= self.keys.keys() or self.client not in received:
            raise BadPayload("encrypted shares came from clients without keys")
        if self.sealed and self.sealed != dict(received):
            raise BadPayload("the encrypted shares of the secure sum have changed")
        self.sealed = dict(received)
        for sender, message in received.items():
            self._share(sender, message)

        total = vector + mask_of(self._seed, len(vector), self.sum.purpose("own", self.client))
        for peer in sorted(received.keys() - {self.client}):
            mask = common_mask(
                self.sum,
                self._masking,
                client=self.client,
                peer=peer,
                public=self.keys[peer],
                length=len(vector),
            )
            total = with_common_mask(total, mask, self.client, peer)
        return total

    def revealed(self, left: Collection[int]) -> dict[int, bytes]:
        """Step 4: by client, a share of its seed if it is in ``left``, and of its key otherwise.

        ``left``: the clients whose masked vectors arrived. Raises BadPayload for other clients than
        in an earlier call, and for clients without shares.
        """
        self.sum.check_clients(left, "sent masked vectors")
        if not set(left) <= self.sealed.keys() or self.client not in left:
            raise BadPayload("masked vectors came from clients without shares")
        if self.left and self.left != tuple(sorted(left)):
            raise BadPayload(
                "this client already revealed shares for a sum of other clients, and reveals no "
                "more"
            )
        self.left = tuple(sorted(left))
        shares = {}
        for client, message in self.sealed.items():
            text = self._share(client, message)
            shares[client] = text[SEED:]
            if client in left:
                shares[client] = text[:SEED]
        return shares

    def note(self) -> str:
        """The client's state in the sum as JSON, for its disk between two steps."""
        tables = {
            name: {str(k): v.hex() for k, v in getattr(self, name).items()} for name in TABLES
        }
        return json.dumps({"secrets": self.secrets.hex(), "left": list(self.left), **tables})

    @staticmethod
    def from_note(sum: Sum, client: int, note: str) -> Summand:
        """The client with the state of a note."""
        fields = json.loads(note)
        tables = {
            name: {int(k): bytes.fromhex(v) for k, v in fields[name].items()} for name in TABLES
        }
        return Summand(
            sum, client, bytes.fromhex(fields["secrets"]), left=tuple(fields["left"]), **tables
        )

    @property
    def _masking(self) -> bytes:
        """The private key for common masks."""
        return self.secrets[:KEY]

    @property
    def _sealing(self) -> bytes:
        """The private key for encrypted shares."""
        return self.secrets[KEY : 2 * KEY]

    @property
    def _seed(self) -> bytes:
        """The seed of the private mask."""
        return self.secrets[2 * KEY :]

    def _share(self, sender: int, message: bytes) -> bytes:
        """The share of the sender's seed and of its key, from its encrypted message."""
        if sender not in self.keys:
            raise BadPayload(f"client {sender} sent shares but no keys")
        about = self.sum.purpose("shares", sender, self.client)
        key = agreed_key(self._sealing, self.keys[sender][KEY : 2 * KEY], about)
        text = decrypted(key, message, about)
        if len(text) != SEED + KEY:
            raise BadPayload(f"client {sender} sent shares of the wrong length")
        return text


def common_mask(
    sum: Sum, private: bytes, *, client: int, peer: int, public: bytes, length: int
) -> Masks:
    """The common mask of two clients, (length,). Both clients compute the same one.

    private: the client's private key for common masks. public: the peer's message of step 1.
    """
    purpose = sum.purpose("common", *sorted((client, peer)))
    return mask_of(agreed_key(private, public[:KEY], purpose), length, purpose)


def with_common_mask(vector: Masks, mask: Masks, client: int, peer: int) -> Masks:
    """A client's vector with the common mask of the client and a peer. The one with the lower id
    adds the mask, and the other subtracts it.
    """
    if client < peer:
        return vector + mask
    return vector - mask


def seed_digest(sum: Sum, client: int, seed: bytes) -> bytes:
    """The SHA-256 of a client's seed in a sum. The server recognises a reconstructed seed by it."""
    return hashlib.sha256(sum.purpose("seed", client) + seed).digest()


# ---- server --------------------------------------------------------------------------------------


log = logging.getLogger("fedstill.secure")

TRIES = 2000
"""How many sets of shares are tried for a secret. For ten clients, these are all sets; for many
clients, those without two or three wrong shares.
"""


def unmasked(
    sum: Sum,
    keys: Mapping[int, bytes],
    shared: Collection[int],
    masked: Mapping[int, Masks],
    revealed: Mapping[int, Mapping[int, bytes]],
) -> Masks:
    """The sum (n,) of the vectors of the clients in ``masked``, modulo 2^64.

    keys: the messages of step 1. shared: the clients that sent shares in step 2. masked, revealed:
    the messages of steps 3 and 4. Wrong shares are logged and ignored, as long as enough others are
    right. Raises TooFewReplies below the threshold, and BadPayload for vectors of unequal length
    and for shares from which a secret cannot be reconstructed.
    """
    sum.check_clients(masked, "sent masked vectors")
    sum.check_clients(revealed, "revealed shares")
    lengths = {len(vector) for vector in masked.values()}
    if len(lengths) != 1:
        raise BadPayload("masked vectors of one sum differ in length")
    length = lengths.pop()
    total = np.zeros(length, dtype=np.uint64)
    for vector in masked.values():
        total = total + vector

    suspects = set[int]()
    for client in sorted(shared):
        is_secret = _secret_check(sum, client, keys[client], client in masked)
        secret = _secret(sum, client, revealed, is_secret, suspects)
        if not secret:
            problem = "do not give its key, and it dropped out"
            if client in masked:
                problem = "do not give its seed"
            raise BadPayload(f"the shares of client {client} {problem}")
        if client in masked:
            total = total - mask_of(secret, length, sum.purpose("own", client))
            continue
        for peer in masked:
            mask = common_mask(
                sum, secret, client=client, peer=peer, public=keys[peer], length=length
            )
            # The peer's vector contains the mask with its sign, and the client's sign cancels it.
            total = with_common_mask(total, mask, client, peer)
    return total


def _secret_check(sum: Sum, client: int, public: bytes, arrived: bool) -> Callable[[bytes], bool]:
    """A function that recognises a client's secret: its seed if its vector arrived, and its key for
    common masks otherwise.
    """
    if arrived:
        return lambda secret: seed_digest(sum, client, secret) == public[2 * KEY :]
    return lambda secret: len(secret) == KEY and public_key(secret) == public[:KEY]


def _secret(
    sum: Sum,
    client: int,
    revealed: Mapping[int, Mapping[int, bytes]],
    is_secret: Callable[[bytes], bool],
    suspects: set[int],
) -> bytes:
    """A client's secret; empty if it cannot be reconstructed.

    ``suspects``: the clients that revealed wrong shares so far; their shares are tried last. It
    remains unknown who caused a wrong share, because the client itself may have sent it.
    """
    senders = [sender for sender, shares in revealed.items() if client in shares]
    senders.sort(key=lambda sender: (sender in suspects, sender))
    sum.check_clients(senders, f"revealed shares of client {client}")
    for selection in islice(_selections(senders, sum.threshold), TRIES):
        shares = {sum.number(sender): revealed[sender][client] for sender in selection.trusted}
        secret = reconstructed(shares)
        if not is_secret(secret):
            continue
        for sender in selection.excluded:
            log.warning(
                "%s: the share of client %d that %d revealed is wrong", sum.name, client, sender
            )
        suspects.update(selection.excluded)
        return secret
    return b""


@dataclass(frozen=True)
class _Selection:
    """The clients whose shares are used for a secret, and those that are taken for wrong."""

    trusted: tuple[int, ...]
    excluded: tuple[int, ...]


def _selections(senders: Sequence[int], threshold: int) -> Iterator[_Selection]:
    """All selections of ``threshold`` clients, those with few excluded ones first."""
    for wrong in range(len(senders) - threshold + 1):
        candidates = senders[: threshold + wrong]
        for excluded in combinations(candidates, wrong):
            trusted = tuple(sender for sender in candidates if sender not in excluded)
            yield _Selection(trusted, excluded)


# ---- messages of the steps -----------------------------------------------------------------------
#
# If the clients are on other machines, a stage has four messages. The server asks for each step
# with ``question``; one of them also contains the stage's own payload. A client's answer to the
# step ``keys`` is the group ``sum.keys``, and so on. Each side validates what it receives.


PREFIX = "sum."
"""The prefix of the protocol's groups in a payload. All other groups belong to the stage."""

STEPS = ("keys", "shares", "vector", "revealed")
"""The four steps, named after the clients' answers."""

UNREAD = f"{PREFIX}unread"
"""The answer of a client that cannot read some shares, instead of its vector: their senders."""

MOST_DIGITS = 9
"""The most digits of a client's id in a message."""


def question(step: str, word: str, **groups: Any) -> Payload:
    """The server's message for a step of the sum with this word, without the stage's payload."""
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
    """Bytes by client from a message, at most ``most`` for each.

    Raises BadPayload for anything else.
    """
    for name, tensor in tensors.items():
        is_client = name.isdecimal() and len(name) <= MOST_DIGITS
        if not is_client or tensor.dtype != torch.uint8 or tensor.ndim != 1:
            raise BadPayload("a message of a secure sum must consist of bytes by client")
    if any(len(tensor) > most for tensor in tensors.values()):
        raise BadPayload(f"a message of a secure sum has more than {most} bytes for a client")
    return {int(name): tensor.numpy().tobytes() for name, tensor in tensors.items()}


def as_tensor(vector: Masks) -> Tensor:
    """A masked vector for a message, (n,) int64."""
    return torch.from_numpy(vector.view(np.int64))
