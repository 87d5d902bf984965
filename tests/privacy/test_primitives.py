"""The primitives of secure sums: agreed keys, encrypted messages, masks and shares of secrets."""

from __future__ import annotations

import itertools
import os

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

from fedstill.core.errors import BadPayload
from fedstill.privacy.protocol import (
    agreed_key,
    decrypted,
    encrypted,
    mask_of,
    public_key,
    reconstructed,
    secret_shares,
)


def test_two_clients_agree_on_a_key_which_depends_on_its_purpose() -> None:
    alice = os.urandom(32)
    bob = os.urandom(32)
    key = agreed_key(alice, public_key(bob), b"a sum")
    assert key == agreed_key(bob, public_key(alice), b"a sum")
    assert key != agreed_key(alice, public_key(bob), b"another")
    assert key != agreed_key(os.urandom(32), public_key(bob), b"a sum")


def test_a_key_of_low_order_is_refused() -> None:
    """With it, the agreed key of every private key would be zero."""
    with pytest.raises(BadPayload, match="public key"):
        agreed_key(os.urandom(32), bytes(32), b"a sum")


def test_only_an_unaltered_message_is_decrypted_and_only_with_its_key_and_context() -> None:
    key = os.urandom(32)
    message = encrypted(key, b"text", b"about")
    assert decrypted(key, message, b"about") == b"text"

    altered = bytes([message[0] ^ 1]) + message[1:]
    with pytest.raises(BadPayload, match="altered"):
        decrypted(os.urandom(32), message, b"about")
    with pytest.raises(BadPayload, match="altered"):
        decrypted(key, altered, b"about")
    with pytest.raises(BadPayload, match="altered"):
        decrypted(key, message, b"another")


def test_a_mask_is_determined_by_its_secret_and_its_purpose() -> None:
    secret = os.urandom(16)
    mask = mask_of(secret, 100, b"own")
    assert (mask == mask_of(secret, 100, b"own")).all()
    assert (mask[:10] == mask_of(secret, 10, b"own")).all()
    assert not (mask == mask_of(secret, 100, b"other")).any()
    assert len(set(mask.tolist())) == 100


@pytest.mark.parametrize("length", [16, 32])
def test_as_many_shares_as_the_threshold_reconstruct_the_secret_and_fewer_do_not(
    length: int,
) -> None:
    secret = os.urandom(length)
    shares = dict(enumerate(secret_shares(secret, 3, 5), 1))
    for numbers in itertools.combinations(shares, 3):
        assert reconstructed({number: shares[number] for number in numbers}) == secret
    for numbers in itertools.combinations(shares, 2):
        assert reconstructed({number: shares[number] for number in numbers}) != secret


def test_shares_of_different_length_are_refused() -> None:
    with pytest.raises(BadPayload, match="length"):
        reconstructed({1: bytes(16), 2: bytes(32)})
