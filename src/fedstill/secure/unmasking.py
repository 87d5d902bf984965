"""The server's part of a secure sum: masks taken off the sum, by shares of which some may be
wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations, islice

import numpy as np

from fedstill.errors import BadPayload
from fedstill.secure.primitives import KEY, Masks, mask_of, public_half, put_together
from fedstill.secure.protocol import Sum, common_mask, sum_of_seed

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
    total, (length,) = np.zeros(next(iter(lengths)), dtype=np.uint64), lengths
    doubted = set[int]()
    for vector in masked.values():
        total = total + vector
    for client in sorted(shared):
        secret = _secret(
            sum, client, revealed, _fits(sum, client, keys[client], client in masked), doubted
        )
        if not secret:
            what = (
                " do not give its seed"
                if client in masked
                else ", which dropped out, do not give its key"
            )
            raise BadPayload(f"shares of client {client}{what}")
        if client in masked:
            total = total - mask_of(secret, length, sum.purpose("own", client))
            continue
        for other in masked:
            mask = common_mask(sum, secret, client, other, keys[other], length)
            total = total + mask if client < other else total - mask
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
