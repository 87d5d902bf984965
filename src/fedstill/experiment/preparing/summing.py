"""The sums: the stage before round 1 in which sites send, by column, how many values they know, their sum and squares.

Of these the server makes the mean and spread by which all standardise (``data.standardise = "summed"``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedstill.experiment.preparing.moments import Moments, Sums, moments_of, sums_of
from fedstill.method import Engine
from fedstill.records import NOTHING, Carry, Payload, Ran, Reply, Stage, Tensors, View, World
from fedstill.verdicts import demand_quorum
from fedstill.watch import Watch, replies_of, told
from fedstill.wire.screen import Refusal, Rules, screen
from fedstill.work import ClientWork

SUMS = ("count", "total", "squares")
"""The groups of a reply, each (D,) float64."""

ROUNDING = 1e-9
"""By what share of it a sum of squares may be too small, as float64 rounds."""


class SumUp(ClientWork):
    """Send the sums of the training examples by column or channel, once, before round 1."""

    def begin(self, down: Payload, memory: Payload, view: View, world: World) -> Carry:
        return Carry(params={})

    def end(self, params: Tensors, carry: Carry, ran: Ran, view: View, world: World) -> tuple[Payload, Payload]:
        own = sums_of(view.data.values.cpu())
        return Payload(**{name: getattr(own, name) for name in SUMS}), NOTHING


@dataclass(frozen=True)
class Summed:
    """What the stage gave: the mean and spread, and what was accepted and refused, for the journal."""

    moments: Moments
    stage: Stage
    replies: list[Reply]
    refused: list[Refusal]
    downs: dict[int, Payload]


def sums_stage(world: World) -> Stage:
    """The stage before round 1 in which every client sends its sums."""
    return Stage(0, 1, "moments", tuple(range(world.clients)))


def run_sums(
    shape: tuple[int, ...], fixed: Collection[int], world: World, engine: Engine, watch: Watch, rules: Rules
) -> Summed:
    """Ask every client for its sums, and make mean and spread of them.

    shape: of an example; fixed: columns of 0 and 1, which keep mean 0 and spread 1. Clients that are refused do not
    count; raises TooFewReplies where fewer are left than the quorum, after ``watch.failed``.
    """
    stage, work = sums_stage(world), SumUp()
    downs = {c: Payload() for c in stage.clients}
    expected = Payload(**{name: torch.zeros(shape[0], dtype=torch.float64) for name in SUMS})
    values = shape[1] if len(shape) > 1 else 1
    came = replies_of(lambda: engine.run(work, stage, downs, world.seed), stage, downs, rules, watch)
    came = [_possible(reply, values) for reply in came]
    replies, refused = screen(lambda _: expected, stage, downs, came, rules)
    with told(watch, stage, replies, refused, downs):
        demand_quorum(stage, replies, refused, rules)
        each = [Sums(*(reply.up.tensor(name) for name in SUMS)) for reply in replies]
        return Summed(moments_of(each, fixed), stage, replies, refused, downs)


def _possible(reply: Reply, values: int) -> Reply:
    """The reply, or a failure where no numbers have such sums. ``values``: of a column in one example."""
    sums = [reply.up.get(name) for name in SUMS]
    if reply.failure or not all(isinstance(one, Tensor) and one.dtype == torch.float64 for one in sums):
        return reply  # which the screen judges
    count, total, squares = (one for one in sums if isinstance(one, Tensor))
    if not count.shape == total.shape == squares.shape:
        return reply
    most = reply.examples * values
    if bool((count < 0).any() | (count > most).any() | (count != count.round()).any()):
        return replace(reply, failure=f"its sums count {float(count.max()):g} values, and it claims {most}")
    if bool((total * total > count * squares * (1 + ROUNDING)).any()):  # by Cauchy and Schwarz
        return replace(reply, failure="no numbers have the sums and the sums of squares that it sends")
    return reply
