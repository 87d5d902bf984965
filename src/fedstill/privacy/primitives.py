"""The cryptography of secure sums, by kept libraries: agreed keys, sealed messages, streams of
masks, shared secrets.

X25519, HKDF-SHA256, ChaCha20-Poly1305 and AES-256 in counter mode are those of ``cryptography``;
Shamir's sharing of secrets, over GF(2^128), is that of PyCryptodome. Both come with the extra
``secure``. Flower's SecAgg+ has such pieces, too, but makes masks of a seed folded to 32 bits by a
generator that is no cipher: whoever tries all seeds has the mask.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import BadPayload, ConfigError

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
