"""What a secure sum adds up: changes of models as whole numbers, and the mean model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedstill.core.checks import place
from fedstill.core.errors import BadPayload
from fedstill.core.method import Method
from fedstill.core.payload import Tensors
from fedstill.core.records import Payload, Reply, Stage
from fedstill.core.robust_means import rounded_down_share
from fedstill.privacy.noise import Privacy
from fedstill.privacy.protocol import Masks, Sum

# Changes of models as whole numbers modulo 2^64, whose sums are exact; and the weighted mean out of
# a sum.


RANGE = 16.0
"""The largest change of an entry where nothing else is said."""
BITS = 32
"""How many bits a change is rounded to where nothing else is said."""


@dataclass(frozen=True)
class FixedPoint:
    """How a change becomes a whole number. ``most``: the largest change of an entry; ``bits``: of
    its rounded value;
    ``clients``: how many at most are summed. A real entry of a mean is off by at most ``error``;
    one of integers, whose changes are summed as they are, is rounded.
    """

    most: float
    bits: int
    clients: int

    @property
    def levels(self) -> int:
        """The whole number that stands for the largest change."""
        return (1 << (self.bits - 1)) - 1

    @property
    def error(self) -> float:
        """The most by which rounding moves a weighted mean."""
        return self.most / self.levels / 2

    @property
    def heaviest(self) -> int:
        """The largest weight of a client with which no sum can leave 63 bits and a sign."""
        return (2**63 - 1) // (self.levels * self.clients)

    def encoded(self, change: Tensors, weight: int) -> Masks:
        """``weight`` times each entry, in the order of names, and the weight itself last:
        (entries + 1,) modulo 2^64.

        Raises BadPayload for an entry that is not finite or beyond ``most``, or too large a weight:
        without the client's own numbers, for the server is told why.
        """
        if not 0 <= weight <= self.heaviest:
            raise BadPayload(
                f"weighs more than the {self.heaviest} examples that privacy.secure_bits = "
                f"{self.bits} leaves room "
                "for; set fewer bits, or method.aggregation = 'uniform'"
            )
        parts = [self._whole(name, change[name]) * np.int64(weight) for name in sorted(change)]
        return np.concatenate([*parts, np.array([weight], dtype=np.int64)]).view(np.uint64)

    def decoded(self, total: Masks, like: Tensors) -> tuple[dict[str, Tensor], int]:
        """The weighted mean of the changes in a sum, float64 of the shapes of ``like``, and the sum
        of the weights.

        Without any weight the mean is 0. Raises BadPayload for numbers that no sum of changes can
        have.
        """
        signed = total.view(np.int64)
        weight = int(signed[-1])
        if not 0 <= weight <= self.heaviest * self.clients:
            raise BadPayload(f"the weights of a secure sum came to {weight}: a mask is left in it")
        flat = torch.from_numpy(signed[:-1].copy())
        mean: dict[str, Tensor] = {}
        begin = 0
        for name in sorted(like):
            entry = like[name]
            part = flat[begin : begin + entry.numel()].double().reshape(entry.shape)
            if bool((part.abs() > float(self.levels) * weight).any()):
                raise BadPayload(f"{name} of a secure sum is out of range: a mask is left in it")
            mean[name] = part * (self._step(entry) / max(weight, 1))
            begin += entry.numel()
        return mean, weight

    def _step(self, entry: Tensor) -> float:
        """The size of one unit of an entry's whole numbers."""
        if entry.is_floating_point():
            return self.most / self.levels
        return 1.0

    def _whole(self, name: str, entry: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        wide = entry.detach().cpu().double()
        if not bool(wide.isfinite().all()):
            raise BadPayload(f"the change of {name} holds numbers that are not finite")
        whole = (wide / self._step(entry)).round().flatten()
        if wide.numel() and float(whole.abs().max()) > self.levels:
            raise BadPayload(
                f"the change of {name} is over privacy.secure_range = {self.most:g}; raise it, or "
                "lower plan.lr"
            )
        return np.asarray(whole.to(torch.int64).numpy(), dtype=np.int64)


def change_of(params: Tensors, start: Tensors) -> dict[str, Tensor]:
    """What training changed, entry by entry, real ones in float64; raises BadPayload where names or
    shapes differ.
    """
    if params.keys() != start.keys() or any(params[k].shape != start[k].shape for k in start):
        raise BadPayload("a secure sum is of models that have the entries they were sent")
    return {k: _wide(params[k]) - _wide(start[k]) for k in start}


def moved_by(start: Tensors, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``start`` moved by a mean change, in the types of ``start``; integers are rounded."""
    out = {}
    for name, entry in start.items():
        moved = entry.detach().cpu().double() + mean[name]
        if not entry.is_floating_point():
            moved = moved.round()
        out[name] = moved.to(entry)
    return out


def _wide(entry: Tensor) -> Tensor:
    """An entry on the CPU, in float64 or int64."""
    widest = torch.float64
    if not entry.is_floating_point():
        widest = torch.int64
    return entry.detach().cpu().to(widest)


# Secure sums in a stage: how they are set, what a client sums of its reply, and what the server
# makes of the sum.


FEWEST_SUMMED = 3
"""The clients that must be left in a sum: of two, each could subtract its own model and have the
other's.
"""

TIMES = ("seconds", "seconds_training")
"""All that stays of the report of a client whose model is summed."""

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
        share = LEFT
        if privacy.secure_threshold is not None:
            share = privacy.secure_threshold
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
        threshold = max(FEWEST_SUMMED, rounded_down_share(self.share, len(clients)) + 1)
        return Sum(place(stage), tuple(sorted(clients)), min(threshold, len(clients)), word)

    def fixed(self, sum: Sum) -> FixedPoint:
        """How changes are rounded in a sum."""
        return FixedPoint(self.most, self.bits, len(sum.clients))

    def vector(self, sum: Sum, reply: Reply, payload: Payload) -> Masks:
        """What a client sums: its weight times what training changed, and the weight; raises
        BadPayload.
        """
        if set(reply.content) != {"params"}:
            raise BadPayload(
                f"a secure sum is of models alone, and the client sends {sorted(reply.content)}"
            )
        weight = 1
        if self.by_examples:
            weight = reply.examples
        return self.fixed(sum).encoded(change_of(reply.content.params, payload.params), weight)

    def mean(self, sum: Sum, total: Masks, start: Tensors) -> tuple[dict[str, object], Payload]:
        """What the server knows of every client then, as its report, and as what it sent: the mean
        model.
        """
        change, weight = self.fixed(sum).decoded(total, start)
        return {"summed": weight}, Payload(params=moved_by(start, change))
