"""Secure sums in a stage: how they are set, a client's reply as a masked vector, and what the
server makes of the sum.

``MaskedEngine`` is the whole of it in one process, around an engine whose replies it masks, sums
and unmasks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fedstill import trees
from fedstill.errors import BadPayload, FedstillError
from fedstill.method import Method
from fedstill.records import NOTHING, SERVER, Payload, Reply, Stage, Tensors
from fedstill.robust import part_of
from fedstill.rounds import Engine
from fedstill.secure.fixed_point import BITS, RANGE, FixedPoint, change_of, moved_by
from fedstill.secure.primitives import Masks
from fedstill.secure.protocol import Sum, Summand
from fedstill.secure.unmasking import unmasked
from fedstill.watch import place
from fedstill.wire.privacy import Privacy
from fedstill.wire.reports import OWN
from fedstill.work import ClientWork

FEWEST_SUMMED = 3
"""The clients that must be left in a sum: of two, each could subtract its own model and have the
other's.
"""

LEFT = 0.5
"""The share of a stage's clients more than which must stay where nothing else is said."""


@dataclass(frozen=True)
class Masking:
    """How models are summed: the largest change, its bits, the share of clients that must stay, and
    their weights.
    """

    most: float
    bits: int
    share: float
    by_examples: bool

    @staticmethod
    def of(privacy: Privacy, method: Method) -> Masking | None:
        """What a config asks for; None where replies are not masked."""
        if not privacy.secure_sum:
            return None
        share = LEFT if privacy.secure_threshold is None else privacy.secure_threshold
        by_examples = getattr(method, "aggregation", "examples") == "examples"
        return Masking(
            privacy.secure_range or RANGE, privacy.secure_bits or BITS, share, by_examples
        )

    def begun(self, stage: Stage, clients: Sequence[int], word: str = "") -> Sum:
        """The sum of a stage, and its word; raises BadPayload for too few clients."""
        if len(clients) < FEWEST_SUMMED:
            raise BadPayload(
                f"{place(stage)}: a secure sum needs {FEWEST_SUMMED} clients, and the stage has "
                f"{len(clients)}"
            )
        threshold = max(FEWEST_SUMMED, part_of(self.share, len(clients)) + 1)
        return Sum(place(stage), tuple(sorted(clients)), min(threshold, len(clients)), word)

    def fixed(self, sum: Sum) -> FixedPoint:
        """How changes are rounded in a sum."""
        return FixedPoint(self.most, self.bits, len(sum.clients))

    def vector(self, sum: Sum, reply: Reply, down: Payload) -> Masks:
        """What a client sums: its weight times what training changed, and the weight; raises
        BadPayload.
        """
        if set(reply.up) != {"params"}:
            raise BadPayload(
                f"a secure sum is of models alone, and the client sends {sorted(reply.up)}"
            )
        weight = reply.examples if self.by_examples else 1
        return self.fixed(sum).encoded(change_of(reply.up.params, down.params), weight)

    def mean(self, sum: Sum, total: Masks, start: Tensors) -> tuple[dict[str, object], Payload]:
        """What the server knows of every client then, as its report, and as what it sent: the mean
        model.
        """
        change, weight = self.fixed(sum).decoded(total, start)
        return {"summed": weight}, Payload(params=moved_by(start, change))


@dataclass(frozen=True)
class MaskedEngine:
    """An engine whose clients' models are known by their sum only.

    Every accepted reply holds the mean model, no number of examples, and of its report the
    seconds alone: a fold that is linear makes of these what it would make of the models.
    """

    engine: Engine
    masking: Masking

    def run(
        self, work: ClientWork, stage: Stage, downs: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients that are left; all of them fail where too few are."""
        if not is_summed(stage, downs):
            return self.engine.run(work, stage, downs, seed)
        came = list(self.engine.run(work, stage, downs, seed))
        return or_all_failed(came, lambda: self._summed(stage, downs, came))

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what clients remember."""
        self.engine.commit(stage, clients)

    def _summed(self, stage: Stage, downs: Mapping[int, Payload], came: list[Reply]) -> list[Reply]:
        """The replies that the sum gives; of ``came``, those that cannot be summed become
        failures.
        """
        of, start = self.masking.begun(stage, sorted(downs)), common_start(downs)
        clients = {c: Summand(of, c) for c in of.clients}
        keys = {c: one.public for c, one in clients.items()}
        shares = {c: one.shares(keys) for c, one in clients.items()}
        masked = dict[int, Masks]()
        for at, reply in enumerate(came):
            if not reply.failure:
                try:
                    vector = self.masking.vector(of, reply, downs[reply.client])
                    sealed = {other: shares[other][reply.client] for other in shares}
                    masked[reply.client] = clients[reply.client].masked(vector, sealed)
                except BadPayload as error:
                    came[at] = as_failed(reply, str(error))
        demand_left(of, masked, came)
        revealed = {c: clients[c].revealed(masked) for c in masked}
        told, up = self.masking.mean(of, unmasked(of, keys, shares, masked, revealed), start)
        return [known(reply, up, told) for reply in came]


def is_summed(stage: Stage, downs: Mapping[int, Payload]) -> bool:
    """Whether the replies of a stage are summed: those of clients to which a model was sent."""
    return SERVER not in stage.clients and any("params" in down for down in downs.values())


def common_start(downs: Mapping[int, Payload]) -> Tensors:
    """The model that all clients of a stage were sent; raises BadPayload if it is not one."""
    first, *others = (down.params for down in downs.values())
    if not all(other is first or trees.same_bits(other, first) for other in others):
        raise BadPayload(
            "a secure sum is of changes to one model, and clients were sent different ones"
        )
    return first


def known(reply: Reply, up: Payload, told: Mapping[str, object]) -> Reply:
    """What the server knows of a client that is in the sum; one that failed as it is."""
    if reply.failure:
        return reply
    seconds = {k: v for k, v in reply.metrics.items() if k in ("seconds", "seconds_training")}
    return replace(reply, up=up, examples=0, metrics={**seconds, OWN: dict(told)})


def bytes_of(up: Payload, summed: bool) -> int:
    """The bytes of what a client sent; of a model that was ``summed``, of its masked vector without
    keys and shares.
    """
    if summed and "params" in up:
        return 8 * (sum(entry.numel() for entry in up.params.values()) + 1)
    return up.nbytes


def as_failed(reply: Reply, why: str) -> Reply:
    """A client that dropped out of a sum."""
    return replace(reply, up=NOTHING, examples=0, metrics={}, failure=why)


def demand_left(
    sum: Sum, there: Collection[int], replies: Sequence[Reply], did: str = "sent masked vectors"
) -> None:
    """Raise TooFewReplies where too few clients did something; it says why the first did not."""
    try:
        sum.demand(there, did)
    except FedstillError as error:
        lost = next((f"; client {r.client}: {r.failure}" for r in replies if r.failure), "")
        raise type(error)(f"{error}{lost}") from error


def or_all_failed(replies: Collection[Reply], summed: Callable[[], list[Reply]]) -> list[Reply]:
    """The replies that a sum gave; where there is none, every client's failure, first why of those
    that did not fail.

    Nothing of a single client is left in them.
    """
    try:
        return summed()
    except FedstillError as error:
        why = f"no secure sum: {error}"
        all_failed = [as_failed(r, r.failure or why) for r in replies]
        return sorted(all_failed, key=lambda r: r.failure != why)
