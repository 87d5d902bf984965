"""The protocol of secure sums: sums are exact with up to 40 % of the clients dropped out, uploads
look uniform, and malformed messages are refused.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import chisquare

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import BadPayload, ConfigError, TooFewReplies
from fedstill.privacy.protocol import Sum, Summand, unmasked
from fedstill.running.preparation import prepare

LENGTH = 40
TWO_ZEROS = np.zeros(2, dtype=np.uint64)

Shares = dict[int, dict[int, bytes]]
"""The shares that each client sends, by sender and receiver."""


@dataclass(frozen=True)
class Federation:
    """A sum and its clients, before they send anything."""

    secret_sum: Sum
    summands: dict[int, Summand]

    @property
    def clients(self) -> tuple[int, ...]:
        return self.secret_sum.clients

    @property
    def keys(self) -> dict[int, bytes]:
        """The public keys of the clients."""
        return {client: summand.public for client, summand in self.summands.items()}

    def shares(self) -> Shares:
        """The shares that all clients send."""
        keys = self.keys
        return {client: summand.shares(keys) for client, summand in self.summands.items()}

    def restored(self, client: int) -> Summand:
        """A client that begins its next step from its note, like a new process."""
        return Summand.from_note(self.secret_sum, client, self.summands[client].note())


def federation(size: int = 5, threshold: int = 3) -> Federation:
    """A sum of some clients, whose numbers begin at 10."""
    secret_sum = Sum("round 1", tuple(range(10, 10 + size)), threshold)
    summands = {client: Summand(secret_sum, client) for client in secret_sum.clients}
    return Federation(secret_sum, summands)


def vectors(clients: Collection[int], length: int = LENGTH) -> dict[int, np.ndarray]:
    """The vectors that clients add to the sum."""
    draw = np.random.default_rng(1)
    return {c: draw.integers(0, 2**64, length, dtype=np.uint64, endpoint=False) for c in clients}


def received_by(client: int, shares: Shares) -> dict[int, bytes]:
    """The shares that a client receives, by sender."""
    return {sender: shares_of_sender[client] for sender, shares_of_sender in shares.items()}


@dataclass(frozen=True)
class Dropouts:
    """The clients that drop out before they send their shares, their vector or their answer."""

    shares: Collection[int] = ()
    vector: Collection[int] = ()
    answer: Collection[int] = ()


def carried_out(federation: Federation, dropouts: Dropouts) -> np.ndarray:
    """The sum of all vectors. Every client begins each step from its note."""
    keys = federation.keys
    shares = {}
    for client in federation.clients:
        if client not in dropouts.shares:
            shares[client] = federation.summands[client].shares(keys)

    masked = {}
    after_upload = {}
    all_vectors = vectors(federation.clients)
    for client in shares:
        if client not in dropouts.vector:
            summand = federation.restored(client)
            masked[client] = summand.masked(all_vectors[client], received_by(client, shares))
            after_upload[client] = summand.note()

    revealed = {}
    for client, note in after_upload.items():
        if client not in dropouts.answer:
            summand = Summand.from_note(federation.secret_sum, client, note)
            revealed[client] = summand.revealed(list(masked))
    return unmasked(federation.secret_sum, keys, shares, masked, revealed)


def plain_sum(clients: Collection[int], dropouts: Collection[int]) -> np.ndarray:
    """The sum of the vectors of the clients that did not drop out."""
    total = np.zeros(LENGTH, dtype=np.uint64)
    for client, vector in vectors(clients).items():
        if client not in dropouts:
            total += vector
    return total


@pytest.mark.parametrize("count", range(5))
def test_the_sum_is_exact_with_up_to_40_percent_dropped_out_at_any_step(count: int) -> None:
    """Clients that drop out after their upload are in the sum."""
    ten = federation(10, 6)
    clients = ten.clients
    first = clients[:count]
    without_first = plain_sum(clients, first)
    assert (carried_out(ten, Dropouts(shares=first)) == without_first).all()
    assert (carried_out(federation(10, 6), Dropouts(vector=first)) == without_first).all()
    total = carried_out(federation(10, 6), Dropouts(answer=first))
    assert (total == plain_sum(clients, ())).all()


def test_it_is_exact_if_other_clients_drop_out_at_every_step() -> None:
    ten = federation(10, 6)
    total = carried_out(ten, Dropouts(shares=[10], vector=[13, 19], answer=[12]))
    assert (total == plain_sum(ten.clients, {10, 13, 19})).all()


@pytest.mark.parametrize("step", ["shares", "vector", "answer"])
def test_with_fewer_clients_than_the_threshold_it_ends_by_name(step: str) -> None:
    five = federation(5, 3)
    dropouts = Dropouts(**{step: five.clients[:3]})
    with pytest.raises(TooFewReplies, match=r"round 1: 2 of 5 clients .* needs 3"):
        carried_out(five, dropouts)


def p_value(numbers: np.ndarray) -> float:
    """The least p-value of the chi-square tests that the bytes of 64-bit numbers are uniform, at
    each of their eight places.
    """
    places = numbers.astype("<u8").view(np.uint8).reshape(-1, 8)
    counts = [np.bincount(places[:, place], minlength=256) for place in range(8)]
    return min(float(chisquare(count).pvalue) for count in counts)


def test_a_single_upload_cannot_be_distinguished_from_uniform_numbers() -> None:
    five = federation()
    shares = five.shares()
    vector = np.arange(20_000, dtype=np.uint64)  # seven of its eight bytes are almost constant
    assert p_value(vector) < 1e-100
    for client, summand in five.summands.items():
        assert p_value(summand.masked(vector, received_by(client, shares))) > 1e-9


def test_the_masked_vector_differs_between_clients_and_between_sums() -> None:
    numbers: set[int] = set()
    for five in (federation(), federation()):
        shares = five.shares()
        for client, summand in five.summands.items():
            masked = summand.masked(np.zeros(4, dtype=np.uint64), received_by(client, shares))
            numbers.update(masked.tolist())
    assert len(numbers) == 2 * 5 * 4


def upload_zeros(federation: Federation) -> Shares:
    """Let all clients send their shares and a masked vector of two zeros; returns the shares."""
    shares = federation.shares()
    for client, summand in federation.summands.items():
        summand.masked(TWO_ZEROS, received_by(client, shares))
    return shares


def test_a_client_never_reveals_shares_of_both_secrets_of_another_client() -> None:
    five = federation()
    upload_zeros(five)
    client_10 = five.summands[10]
    clients = list(five.clients)
    answer = client_10.revealed(clients)
    assert {len(share) for share in answer.values()} == {16}
    assert client_10.revealed(clients) == answer, "the same request has the same answer"

    with pytest.raises(BadPayload, match="reveals no more"):
        client_10.revealed(clients[:-1])
    with pytest.raises(BadPayload, match="reveals no more"):
        five.restored(10).revealed(clients[:-1])


def test_a_client_reveals_seeds_of_clients_that_uploaded_and_keys_of_those_that_dropped_out() -> (
    None
):
    five = federation()
    upload_zeros(five)
    revealed = five.summands[10].revealed([10, 11, 12])
    lengths = {client: len(share) for client, share in revealed.items()}
    seed = 16
    key = 32
    assert lengths == {10: seed, 11: seed, 12: seed, 13: key, 14: key}


def test_a_client_refuses_requests_with_too_few_unknown_or_changed_clients() -> None:
    five = federation()
    shares = upload_zeros(five)
    client_10 = five.summands[10]
    with pytest.raises(TooFewReplies):
        client_10.revealed([10, 11])
    with pytest.raises(BadPayload, match="client 99"):
        client_10.revealed([10, 11, 12, 99])
    with pytest.raises(BadPayload, match="without shares"):
        client_10.revealed([11, 12, 13])

    keys = five.keys
    with pytest.raises(BadPayload, match="changed"):
        client_10.shares({**keys, 11: keys[12][:32] + keys[11][32:]})
    of_three = {sender: shares[sender][10] for sender in (10, 11, 12)}
    with pytest.raises(BadPayload, match="changed"):
        client_10.masked(TWO_ZEROS, of_three)


def test_keys_that_are_not_those_of_the_clients_are_refused() -> None:
    five = federation()
    keys = five.keys
    exchanged_own = {**keys, 10: keys[11]}
    repeated = {**keys, 12: keys[11]}
    malformed = {**keys, 12: b"short"}
    for wrong in (exchanged_own, repeated, malformed):
        with pytest.raises(BadPayload, match="keys"):
            five.summands[10].shares(wrong)


def test_shares_for_another_client_are_refused() -> None:
    five = federation()
    shares = five.shares()
    received = received_by(10, shares)
    with pytest.raises(BadPayload, match="altered"):
        five.summands[10].masked(TWO_ZEROS, {**received, 11: shares[11][12]})


def test_wrong_shares_of_a_client_that_dropped_out_are_refused() -> None:
    five = federation()
    shares = upload_zeros(five)
    uploaded = [10, 11, 12]
    revealed = {client: five.summands[client].revealed(uploaded) for client in uploaded}
    revealed[11][14] = bytes(32)
    masked = dict.fromkeys(uploaded, TWO_ZEROS)
    with pytest.raises(BadPayload, match="client 14"):
        unmasked(five.secret_sum, five.keys, shares, masked, revealed)


@pytest.mark.parametrize(
    ("size", "threshold", "wrong"),
    [
        (6, 4, (10,)),
        (6, 4, (13,)),
        (6, 4, (10, 12)),
        (10, 6, (10, 11, 12)),
        (10, 6, (10, 11, 12, 13)),
        (10, 6, (14, 16, 19)),
    ],
)
def test_wrong_shares_are_skipped_if_enough_are_right(
    size: int, threshold: int, wrong: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the clients of wrong shares, as far as their shares are needed."""
    group = federation(size, threshold)
    clients = group.clients
    shares = group.shares()
    plain = vectors(clients, 2)
    masked = {}
    revealed = {}
    for client in clients:
        masked[client] = group.summands[client].masked(plain[client], received_by(client, shares))
    for client in clients:
        revealed[client] = group.summands[client].revealed(clients)
        if client in wrong:
            revealed[client] = zeroed(revealed[client])
    total = unmasked(group.secret_sum, group.keys, shares, masked, revealed)

    assert (total == sum(plain.values(), TWO_ZEROS)).all()
    examined = clients[: threshold + len(wrong)]
    logged = {record.message.partition(" that ")[2].split()[0] for record in caplog.records}
    assert logged == {str(client) for client in wrong if client in examined}

    for client in clients[: size - threshold + 1]:
        revealed[client] = zeroed(revealed[client])
    with pytest.raises(BadPayload, match="client 10"):
        unmasked(group.secret_sum, group.keys, shares, masked, revealed)


def zeroed(shares: dict[int, bytes]) -> dict[int, bytes]:
    """Shares of the same length without content."""
    return {client: bytes(len(share)) for client, share in shares.items()}


def test_shares_are_the_same_if_they_are_requested_again() -> None:
    """A key encrypts one message: a client that is asked twice must not send new shares."""
    five = federation()
    shares = five.shares()
    assert five.summands[10].shares(five.keys) == shares[10]
    assert five.restored(10).shares(five.keys) == shares[10]

    received = received_by(10, shares)
    assert five.summands[10].unread(received) == []
    malformed = {11: shares[11][12], 13: bytes(64), 99: bytes(64)}
    assert five.summands[10].unread({**received, **malformed}) == [11, 13, 99]


@pytest.mark.parametrize("threshold", [0, 2, 6])
def test_a_threshold_must_be_a_majority_of_the_clients(threshold: int) -> None:
    with pytest.raises(BadPayload, match="threshold"):
        Sum("round 1", (0, 1, 2, 3, 4), threshold)


@pytest.mark.parametrize(
    ("topology", "key"),
    [
        ({"clients": 2}, "topology.clients"),
        ({"clients": 4, "sampled": 2}, "topology.sampled"),
        ({"clients": 4, "kind": "sequential"}, "topology.kind"),
    ],
)
def test_a_stage_with_too_few_clients_is_refused_with_the_key_to_change(
    topology: dict[str, object], key: str
) -> None:
    experiment = toys.toy("fedavg", topology=topology, privacy={"secure_sum": True}, measure=())
    with pytest.raises(ConfigError, match=f"a secure sum needs at least 3; .* {key} "):
        prepare(resolve(experiment), toys.blobs())
