"""What secure sums stand on: agreed keys, encrypted messages, masks and shares."""

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


def test_two_agree_on_one_key_and_for_another_purpose_on_another() -> None:
    one, other = os.urandom(32), os.urandom(32)
    key = agreed_key(one, public_key(other), b"a sum")
    assert key == agreed_key(other, public_key(one), b"a sum")
    assert key != agreed_key(one, public_key(other), b"another")
    assert key != agreed_key(os.urandom(32), public_key(other), b"a sum")


def test_a_key_of_low_order_is_refused() -> None:
    """With it every private key would agree on zeros."""
    with pytest.raises(BadPayload, match="public key"):
        agreed_key(os.urandom(32), bytes(32), b"a sum")


def test_what_is_sealed_is_read_by_its_key_alone_and_as_it_was() -> None:
    key, message = os.urandom(32), encrypted(os.urandom(32), b"text", b"about")
    message = encrypted(key, b"text", b"about")
    assert decrypted(key, message, b"about") == b"text"
    altered = bytes([message[0] ^ 1]) + message[1:]
    for wrong in (
        (os.urandom(32), message, b"about"),
        (key, altered, b"about"),
        (key, message, b"another"),
    ):
        with pytest.raises(BadPayload, match="altered"):
            decrypted(*wrong)


def test_a_mask_is_the_same_for_the_same_secret_and_purpose_alone() -> None:
    secret = os.urandom(16)
    mask = mask_of(secret, 100, b"own")
    assert (mask == mask_of(secret, 100, b"own")).all()
    assert (mask[:10] == mask_of(secret, 10, b"own")).all()
    assert not (mask == mask_of(secret, 100, b"other")).any()
    assert len(set(mask.tolist())) == 100


@pytest.mark.parametrize("length", [16, 32])
def test_any_shares_of_the_threshold_give_the_secret_and_fewer_do_not(length: int) -> None:
    secret = os.urandom(length)
    shares = dict(enumerate(secret_shares(secret, 3, 5), 1))
    for some in itertools.combinations(shares, 3):
        assert reconstructed({n: shares[n] for n in some}) == secret
    for few in itertools.combinations(shares, 2):
        assert reconstructed({n: shares[n] for n in few}) != secret


def test_shares_of_different_length_are_refused() -> None:
    with pytest.raises(BadPayload, match="length"):
        reconstructed({1: bytes(16), 2: bytes(32)})
