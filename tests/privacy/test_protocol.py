"""The protocol of secure sums: exact with 0 to 40 % dropped out, uniform to look at, or ended by
name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pytest
from scipy.stats import chisquare

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

from fedstill.core.errors import BadPayload, TooFewReplies
from fedstill.privacy.protocol import Sum, Summand, unmasked

LENGTH = 40


def begun(n: int = 5, threshold: int = 3) -> tuple[Sum, dict[int, Summand]]:
    of = Sum("round 1", tuple(range(10, 10 + n)), threshold)
    return of, {c: Summand(of, c) for c in of.clients}


def vectors(clients: Collection[int], length: int = LENGTH) -> dict[int, np.ndarray]:
    draw = np.random.default_rng(1)
    return {c: draw.integers(0, 2**64, length, dtype=np.uint64, endpoint=False) for c in clients}


def carried_out(
    of: Sum,
    clients: dict[int, Summand],
    *,
    without_shares: Sequence[int] = (),
    without_vector: Sequence[int] = (),
    without_answer: Sequence[int] = (),
) -> np.ndarray:
    """A sum from whose steps clients drop out; before each step a client is what its note says."""
    keys = {c: one.public for c, one in clients.items()}
    shares = {c: one.shares(keys) for c, one in clients.items() if c not in without_shares}
    kept = {c: Summand.from_note(of, c, clients[c].note()) for c in shares}
    mine, left = vectors(clients), [c for c in shares if c not in without_vector]
    masked = {c: kept[c].masked(mine[c], {o: shares[o][c] for o in shares}) for c in left}
    kept = {c: Summand.from_note(of, c, kept[c].note()) for c in left}
    revealed = {c: kept[c].revealed(left) for c in left if c not in without_answer}
    return unmasked(of, keys, shares, masked, revealed)


def plain(clients: Collection[int], left: Collection[int]) -> np.ndarray:
    return sum(
        (v for c, v in vectors(clients).items() if c in left), np.zeros(LENGTH, dtype=np.uint64)
    )


@pytest.mark.parametrize("dropped", range(5))
def test_the_sum_is_exact_with_up_to_40_percent_dropped_out_at_any_step(dropped: int) -> None:
    n = 10
    for step in ("without_shares", "without_vector", "without_answer"):
        of, clients = begun(n, 6)
        gone = of.clients[:dropped]
        left = of.clients if step == "without_answer" else of.clients[dropped:]
        assert (carried_out(of, clients, **{step: gone}) == plain(clients, left)).all()


def test_it_is_exact_where_other_clients_drop_out_at_every_step() -> None:
    of, clients = begun(10, 6)
    got = carried_out(
        of, clients, without_shares=[10], without_vector=[13, 19], without_answer=[12]
    )
    assert (got == plain(clients, set(of.clients) - {10, 13, 19})).all()


@pytest.mark.parametrize("step", ["without_shares", "without_vector", "without_answer"])
def test_with_fewer_than_the_threshold_it_ends_by_name(step: str) -> None:
    of, clients = begun(5, 3)
    with pytest.raises(TooFewReplies, match=r"round 1: 2 of 5 clients .* needs 3"):
        carried_out(of, clients, **{step: of.clients[:3]})


def p_value(numbers: np.ndarray) -> float:
    """Of the chi-square test that all bytes of some 64-bit numbers are uniform; the least, of eight
    places.
    """
    places = numbers.astype("<u8").view(np.uint8).reshape(-1, 8)
    return min(float(chisquare(np.bincount(places[:, i], minlength=256)).pvalue) for i in range(8))


def test_a_single_upload_cannot_be_told_from_uniform_numbers() -> None:
    _of, clients = begun()
    keys = {c: one.public for c, one in clients.items()}
    shares = {c: one.shares(keys) for c, one in clients.items()}
    vector = np.arange(20_000, dtype=np.uint64)  # of which seven bytes of eight are almost constant
    assert p_value(vector) < 1e-100
    for c, one in clients.items():
        assert p_value(one.masked(vector, {o: shares[o][c] for o in shares})) > 1e-9


def test_the_same_vector_looks_different_from_every_client_and_in_every_sum() -> None:
    seen = set()
    for _ in range(2):
        _of, clients = begun()
        keys = {c: one.public for c, one in clients.items()}
        shares = {c: one.shares(keys) for c, one in clients.items()}
        for c, one in clients.items():
            masked = one.masked(np.zeros(4, dtype=np.uint64), {o: shares[o][c] for o in shares})
            seen |= set(masked.tolist())
    assert len(seen) == 2 * 5 * 4


def answered(
    of: Sum, clients: dict[int, Summand]
) -> tuple[dict[int, bytes], dict[int, dict[int, bytes]]]:
    keys = {c: one.public for c, one in clients.items()}
    shares = {c: one.shares(keys) for c, one in clients.items()}
    for c, one in clients.items():
        one.masked(np.zeros(2, dtype=np.uint64), {o: shares[o][c] for o in shares})
    return keys, shares


def test_a_client_never_gives_shares_of_both_secrets_of_another() -> None:
    of, clients = begun()
    answered(of, clients)
    one, everyone = clients[10], list(of.clients)
    first = one.revealed(everyone)
    assert {len(share) for share in first.values()} == {16}
    assert one.revealed(everyone) == first  # asked again, the same
    with pytest.raises(BadPayload, match="reveals no more"):
        one.revealed(everyone[:-1])
    again = Summand.from_note(of, 10, one.note())
    with pytest.raises(BadPayload, match="reveals no more"):
        again.revealed(everyone[:-1])


def test_of_a_client_that_dropped_out_shares_of_its_key_are_given_and_of_the_others_seeds() -> None:
    of, clients = begun()
    answered(of, clients)
    given = clients[10].revealed([10, 11, 12])
    assert {c: len(share) for c, share in given.items()} == {10: 16, 11: 16, 12: 16, 13: 32, 14: 32}


def test_a_client_refuses_to_be_asked_for_too_few_or_others_or_anew() -> None:
    of, clients = begun()
    keys, shares = answered(of, clients)
    one = clients[10]
    with pytest.raises(TooFewReplies):
        one.revealed([10, 11])
    with pytest.raises(BadPayload, match="client 99"):
        one.revealed([10, 11, 12, 99])
    with pytest.raises(BadPayload, match="without shares"):
        one.revealed([11, 12, 13])
    with pytest.raises(BadPayload, match="changed"):
        one.shares({**keys, 11: keys[12][:32] + keys[11][32:]})
    with pytest.raises(BadPayload, match="changed"):
        one.masked(np.zeros(2, dtype=np.uint64), {o: shares[o][10] for o in (10, 11, 12)})


def test_keys_that_are_not_the_clients_are_refused() -> None:
    _of, clients = begun()
    keys = {c: one.public for c, one in clients.items()}
    for wrong in ({**keys, 10: keys[11]}, {**keys, 12: keys[11]}, {**keys, 12: b"short"}):
        with pytest.raises(BadPayload, match="keys"):
            clients[10].shares(wrong)


def test_shares_for_another_client_or_altered_are_refused() -> None:
    _of, clients = begun()
    keys = {c: one.public for c, one in clients.items()}
    shares = {c: one.shares(keys) for c, one in clients.items()}
    mine = {o: shares[o][10] for o in shares}
    with pytest.raises(BadPayload, match="altered"):
        clients[10].masked(np.zeros(2, dtype=np.uint64), {**mine, 11: shares[11][12]})


def test_wrong_shares_of_a_client_that_dropped_out_are_noticed() -> None:
    of, clients = begun()
    keys, shares = answered(of, clients)
    left = [10, 11, 12]
    revealed = {c: clients[c].revealed(left) for c in left}
    revealed[11][14] = bytes(32)
    masked = {c: np.zeros(2, dtype=np.uint64) for c in left}
    with pytest.raises(BadPayload, match="client 14"):
        unmasked(of, keys, shares, masked, revealed)


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        ((6, 4), (10,)),
        ((6, 4), (13,)),
        ((6, 4), (10, 12)),
        ((10, 6), (10, 11, 12)),
        ((10, 6), (10, 11, 12, 13)),
        ((10, 6), (14, 16, 19)),
    ],
)
def test_wrong_shares_are_passed_over_where_enough_are_right(
    asked: tuple[int, int], wrong: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    of, clients = begun(*asked)
    keys, shares = answered(of, clients)
    mine = vectors(of.clients, 2)
    kept = {c: Summand.from_note(of, c, one.note()) for c, one in clients.items()}
    masked = {c: kept[c].masked(mine[c], {o: shares[o][c] for o in shares}) for c in of.clients}
    revealed = {c: clients[c].revealed(of.clients) for c in of.clients}
    for c in wrong:
        revealed[c] = {other: bytes(len(share)) for other, share in revealed[c].items()}
    total = unmasked(of, keys, shares, masked, revealed)
    assert (total == sum(mine.values(), np.zeros(2, dtype=np.uint64))).all()
    said = {record.message.partition(" that ")[2].split()[0] for record in caplog.records}
    # whose share is not needed is not found out
    looked_at = of.clients[: of.threshold + len(wrong)]
    assert said == {str(c) for c in wrong if c in looked_at}
    revealed.update(
        {c: {o: bytes(16) for o in of.clients} for c in of.clients[: asked[0] - asked[1] + 1]}
    )
    with pytest.raises(BadPayload, match="client 10"):
        unmasked(of, keys, shares, masked, revealed)


def test_shares_sent_again_are_the_same_and_who_cannot_be_read_is_named() -> None:
    """One key seals one message: a site asked twice must not deal out anew under it."""
    of, clients = begun()
    keys = {c: one.public for c, one in clients.items()}
    shares = {c: one.shares(keys) for c, one in clients.items()}
    assert clients[10].shares(keys) == shares[10]
    assert Summand.from_note(of, 10, clients[10].note()).shares(keys) == shares[10]
    mine = {o: shares[o][10] for o in shares}
    assert clients[10].unread(mine) == []
    assert clients[10].unread({**mine, 11: shares[11][12], 13: bytes(64), 99: bytes(64)}) == [
        11,
        13,
        99,
    ]


def test_a_threshold_of_half_or_less_is_none() -> None:
    for threshold in (0, 2, 6):
        with pytest.raises(BadPayload, match="threshold"):
            Sum("round 1", (0, 1, 2, 3, 4), threshold)
