"""A round's stage as a game: what the state would be, had only some of its clients acted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fedstill.data.inputs import Inputs
from fedstill.engines.passes import shards
from fedstill.experiment.measures.through_norms import ThroughNorms
from fedstill.method import Method
from fedstill.metrics.shapley import soft_accuracy
from fedstill.models import contract
from fedstill.models.contract import Predictor
from fedstill.records import Examples, ModelSpec, Payload, Reply, Stage, State, Tensors, World
from fedstill.trees import floats, norm, sub

Game = Literal["idle", "absent"]
"""Whether clients that are no part of a coalition change nothing (idle), or do not reply at all
(absent).
"""

AFFINE = 1e-4
"""How far, relative to the whole change, the sum of the clients' own changes may be off for a fold
to be affine.
"""


@dataclass(frozen=True, eq=False)
class StageGame:
    """The players are the clients whose replies were accepted; the fold is the method's own.

    idle: a client outside a coalition replies as if it had changed nothing; its number of examples
    counts. absent: it does not reply. ``before``: the state in which the replies were folded.
    """

    method: Method
    before: State
    stage: Stage
    replies: Sequence[Reply]
    downs: Mapping[int, Payload]
    world: World
    game: Game = "idle"

    @property
    def players(self) -> tuple[int, ...]:
        """The clients, in the order of their replies."""
        return tuple(r.client for r in self.replies)

    @cached_property
    def _idle(self) -> list[Reply] | None:
        made = [self.method.idle(r, self.downs[r.client]) for r in self.replies]
        pairs = zip(self.replies, made, strict=True)
        return None if None in made else [replace(r, up=up) for r, up in pairs if up is not None]

    def can_idle(self) -> bool:
        """Whether it is known what clients that change nothing would have sent."""
        return self._idle is not None

    def state(self, coalition: Sequence[int]) -> State:
        """The state after the fold, had only the players in these positions acted."""
        acting = set(coalition)
        if self.game == "absent":
            replies = [r for i, r in enumerate(self.replies) if i in acting]
            return self._fold(replies) if replies else self.before
        assert self._idle is not None
        pairs = zip(self.replies, self._idle, strict=True)
        return self._fold([r if i in acting else still for i, (r, still) in enumerate(pairs)])

    def _fold(self, replies: Sequence[Reply]) -> State:
        return self.method.fold(self.before, replies, self.stage, self.world)

    def _moved(self, start: Tensors, coalition: Sequence[int]) -> Tensors | None:
        """How far a coalition moves the parameters from a start; None where it makes another
        network of them.
        """
        end = floats(self.state(coalition).params)
        same = start.keys() == end.keys() and all(v.shape == end[k].shape for k, v in start.items())
        return sub(end, start) if same else None

    @cached_property
    def changes(self) -> Sequence[Tensors] | None:
        """How far each player moves the parameters when it acts alone; None where the fold is not
        their sum.

        It is none either where a fold makes another network, whose entries cannot be subtracted.
        """
        if self.game != "idle" or not self.can_idle():
            return None
        start, players = floats(self.state(()).params), range(len(self.replies))
        whole = self._moved(start, players)
        alone = [
            own
            for k in players
            if whole is not None and (own := self._moved(start, (k,))) is not None
        ]
        if whole is None or len(alone) < len(players):
            return None
        rest = {name: value - sum(own[name] for own in alone) for name, value in whole.items()}
        return alone if norm(rest) <= AFFINE * max(norm(whole), 1e-12) else None


@dataclass(frozen=True, eq=False)
class Judged:
    """Test examples by class, and what a model is worth on them: soft accuracy at a temperature.

    ``examples``: {class: its examples}, of the classes that are asked about.
    """

    examples: Mapping[int, Examples]
    inputs: Inputs
    temperature: float

    def worth(self, predict: Callable[[Tensor], Tensor], classes: Sequence[int]) -> Tensor:
        """Soft accuracy (c,) float64 of these classes, without gradients."""
        with torch.no_grad():
            return torch.stack(
                [self._of(predict, self.examples[c]).double().cpu() for c in classes]
            )

    def _of(self, predict: Callable[[Tensor], Tensor], own: Examples) -> Tensor:
        logits = torch.cat([predict(x) for x in shards(own.values, self.inputs)])
        return soft_accuracy(logits, own.labels.to(logits.device), self.temperature).mean()

    def gradient(
        self, predict: Callable[[Tensor], Tensor], of: int, leaves: Sequence[Tensor]
    ) -> list[Tensor]:
        """How soft accuracy of a class moves with each leaf; shard by shard, so that memory stays
        small.
        """
        own, total = self.examples[of], [torch.zeros_like(leaf) for leaf in leaves]
        at = 0
        for x in shards(own.values, self.inputs):
            labels = own.labels[at : at + len(x)].to(x.device)
            at += len(x)
            part = soft_accuracy(predict(x), labels, self.temperature).sum() / len(own)
            given = torch.autograd.grad(part, list(leaves), allow_unused=True)
            total = [t if g is None else t + g for t, g in zip(total, given, strict=True)]
        return total


@dataclass(frozen=True, eq=False)
class ModelLine:
    """Soft accuracy along the line from a start to start + the sum of the players' changes
    (``shapley.Line``).

    Running means and variances of normalisation lie on the line as weights do; whole numbers stay.
    """

    spec: ModelSpec
    start: Tensors
    changes: Sequence[Tensors]
    judged: Judged

    @cached_property
    def _whole(self) -> Tensors:
        return {name: sum(own[name] for own in self.changes) for name in self.changes[0]}  # type: ignore[misc]

    def _at(self, s: float) -> dict[str, Tensor]:
        there = next(iter(self.judged.examples.values())).values.device
        moved = {
            k: v + s * self._whole[k] if k in self._whole else v for k, v in self.start.items()
        }
        return {k: v.to(there) for k, v in moved.items()}

    def values(self, s: float, classes: Sequence[int]) -> Tensor:
        """Soft accuracy (c,) at a place of the line."""
        network, there = contract.module(self.spec, "frozen").eval(), self._at(s)
        return self.judged.worth(lambda x: contract.forward(network, there, x), classes)

    def slopes(self, s: float, classes: Sequence[int]) -> Tensor:
        """Its gradient there along each player's change: (m, c)."""
        network, there = contract.module(self.spec, "frozen").eval(), self._at(s)
        leaves = {k: there[k].detach().requires_grad_() for k in self._whole}
        params = {**there, **leaves}

        def predict(x: Tensor) -> Tensor:
            with ThroughNorms():
                return contract.forward(network, params, x)

        rows = []
        for c in classes:
            grads = self.judged.gradient(predict, c, list(leaves.values()))
            by_name = {k: g.cpu() for k, g in zip(leaves, grads, strict=True)}
            rows.append(
                [
                    sum(float((g * own[k]).sum(dtype=torch.float64)) for k, g in by_name.items())
                    for own in self.changes
                ]
            )
        return torch.tensor(rows, dtype=torch.float64).T


def global_model(method: Method, state: State, world: World) -> Callable[[Tensor], Tensor] | None:
    """The server's answer for everybody; None where there are answers of single clients only."""
    named = method.predictors(state, world)
    return next(
        (predict for name, predict in named.items() if not name.startswith("client ")), None
    )


def is_plain(predict: Callable[[Tensor], Tensor] | None, state: State) -> bool:
    """Whether an answer is the network with the state's parameters, and nothing else."""
    return isinstance(predict, Predictor) and predict.params is state.params
