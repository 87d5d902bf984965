"""Models in a secure sum: changes as integers modulo 2^64, and the mean model from their sum."""

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

# ---- fixed-point numbers -------------------------------------------------------------------------


RANGE = 16.0
"""The default of ``privacy.secure_range``, the largest change of an entry."""
BITS = 32
"""The default of ``privacy.secure_bits``, the bits to which a change is rounded."""


@dataclass(frozen=True)
class FixedPoint:
    """The encoding of changes as integers modulo 2^64, whose sums are exact.

    ``most``: the largest change of an entry. ``bits``: the bits of a rounded change. ``clients``:
    the largest number of summands. Each floating-point entry of a mean has an error of at most
    ``error``. Changes of integer entries are summed exactly, and their mean is rounded.
    """

    most: float
    bits: int
    clients: int

    @property
    def levels(self) -> int:
        """The integer that represents the largest change."""
        return (1 << (self.bits - 1)) - 1

    @property
    def error(self) -> float:
        """The largest error of a weighted mean through rounding."""
        return self.most / self.levels / 2

    @property
    def heaviest(self) -> int:
        """The largest weight of a client for which no sum overflows a signed 64-bit integer."""
        return (2**63 - 1) // (self.levels * self.clients)

    def encoded(self, change: Tensors, weight: int) -> Masks:
        """Each entry, in the order of names, multiplied by ``weight``, and then the weight:
        (entries + 1,) modulo 2^64.

        Raises BadPayload for an entry that is not finite or exceeds ``most``, and for too large a
        weight. The server sees the message, so it contains no numbers of the client.
        """
        if not 0 <= weight <= self.heaviest:
            raise BadPayload(
                f"has more than the {self.heaviest} examples that privacy.secure_bits = "
                f"{self.bits} allows; set fewer bits, or method.aggregation = 'uniform'"
            )
        parts = [self._whole(name, change[name]) * np.int64(weight) for name in sorted(change)]
        return np.concatenate([*parts, np.array([weight], dtype=np.int64)]).view(np.uint64)

    def decoded(self, total: Masks, like: Tensors) -> tuple[dict[str, Tensor], int]:
        """The weighted mean of the changes in a sum, float64 in the shapes of ``like``, and the sum
        of the weights.

        If the weights sum to 0, the mean is 0. Raises BadPayload for a sum that no changes can
        have: a mask was not removed.
        """
        signed = total.view(np.int64)
        weight = int(signed[-1])
        if not 0 <= weight <= self.heaviest * self.clients:
            raise BadPayload(
                f"the weights of a secure sum add up to {weight}: a mask was not removed"
            )
        flat = torch.from_numpy(signed[:-1].copy())
        mean: dict[str, Tensor] = {}
        begin = 0
        for name in sorted(like):
            entry = like[name]
            part = flat[begin : begin + entry.numel()].double().reshape(entry.shape)
            if bool((part.abs() > float(self.levels) * weight).any()):
                raise BadPayload(f"{name} of a secure sum is out of range: a mask was not removed")
            mean[name] = part * (self._step(entry) / max(weight, 1))
            begin += entry.numel()
        return mean, weight

    def _step(self, entry: Tensor) -> float:
        """The change of an entry that the integer 1 represents."""
        if entry.is_floating_point():
            return self.most / self.levels
        return 1.0

    def _whole(self, name: str, entry: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        wide = entry.detach().cpu().double()
        if not bool(wide.isfinite().all()):
            raise BadPayload(f"the change of {name} contains numbers that are not finite")
        whole = (wide / self._step(entry)).round().flatten()
        if wide.numel() and float(whole.abs().max()) > self.levels:
            raise BadPayload(
                f"the change of {name} exceeds privacy.secure_range = {self.most:g}; raise it, or "
                "lower plan.lr"
            )
        return np.asarray(whole.to(torch.int64).numpy(), dtype=np.int64)


def change_of(params: Tensors, start: Tensors) -> dict[str, Tensor]:
    """The change of each entry by training; floating-point entries in float64.

    Raises BadPayload if names or shapes differ.
    """
    if params.keys() != start.keys() or any(params[k].shape != start[k].shape for k in start):
        raise BadPayload("the model of a secure sum has other entries than the model that was sent")
    return {k: _wide(params[k]) - _wide(start[k]) for k in start}


def moved_by(start: Tensors, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``start`` plus a mean change, in the types of ``start``; integer entries are rounded."""
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


# ---- the sum of a stage --------------------------------------------------------------------------


FEWEST_SUMMED = 3
"""The least number of clients in a sum. In a sum of two, each client could subtract its model and
learn the other one.
"""

TIMES = ("seconds", "seconds_training")
"""The metrics that the server learns of a client whose model is summed."""

LEFT = 0.5
"""The default of ``privacy.secure_threshold``: more than this share of a stage's clients must
complete a sum.
"""


@dataclass(frozen=True)
class Masking:
    """How the models of a run are summed.

    ``most``: the largest change of an entry. ``bits``: the bits of a rounded change. ``share``:
    more than this share of a stage's clients must complete a sum. ``by_examples``: whether clients
    are weighted by their numbers of examples.
    """

    most: float
    bits: int
    share: float
    by_examples: bool

    @staticmethod
    def of(privacy: Privacy, method: Method) -> Masking | None:
        """The settings of a config; None if replies are not masked."""
        if not privacy.secure_sum:
            return None
        share = LEFT
        if privacy.secure_threshold is not None:
            share = privacy.secure_threshold
        by_examples = getattr(method, "aggregation", "examples") == "examples"
        return Masking(
            privacy.secure_range or RANGE, privacy.secure_bits or BITS, share, by_examples
        )

    def new_sum(self, stage: Stage, clients: Sequence[int], word: str = "") -> Sum:
        """A sum over the clients of a stage. ``word``: see ``Sum``.

        Raises BadPayload for too few clients.
        """
        if len(clients) < FEWEST_SUMMED:
            raise BadPayload(
                f"{place(stage)}: a secure sum needs {FEWEST_SUMMED} clients, but the stage has "
                f"{len(clients)}"
            )
        threshold = max(FEWEST_SUMMED, rounded_down_share(self.share, len(clients)) + 1)
        return Sum(place(stage), tuple(sorted(clients)), min(threshold, len(clients)), word)

    def encoding(self, sum: Sum) -> FixedPoint:
        """The encoding of changes in a sum."""
        return FixedPoint(self.most, self.bits, len(sum.clients))

    def vector(self, sum: Sum, reply: Reply, payload: Payload) -> Masks:
        """A client's summand: the weighted change of its model, and its weight.

        Raises BadPayload for a reply that is not a model alone, or that cannot be encoded.
        """
        if set(reply.content) != {"params"}:
            raise BadPayload(
                f"a secure sum needs a model and nothing else, but the client sends "
                f"{sorted(reply.content)}"
            )
        weight = 1
        if self.by_examples:
            weight = reply.examples
        change = change_of(reply.content.params, payload.params)
        return self.encoding(sum).encoded(change, weight)

    def mean(self, sum: Sum, total: Masks, start: Tensors) -> tuple[dict[str, object], Payload]:
        """The report and the content that replace those of every client in the sum: the sum of the
        weights, and the mean model.
        """
        change, weight = self.encoding(sum).decoded(total, start)
        return {"summed": weight}, Payload(params=moved_by(start, change))
