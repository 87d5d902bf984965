"""An approximation of CLUE: for a class, a client copies the significant parameters of the peer
with the best knowledge of it, and combines both models by voting.

Source: Daga et al., "CLUE: Systems Support for Knowledge Transfer in Collaborative Learning with
Neural Nets" (2023), of which only the abstract is open: significant parameters of a helper's model
are found for a class and combined with the client's own by boosting several models. A baseline of
Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments" (QKT),
Table 2, for queries of one class. All else here is ours.
Symbols: g, w = a helper's gradient and weight; ``share`` = the share of each layer that is copied;
``samples`` = the number of noise examples; ``participants`` as in naive KD.
State: no global parameters; model.N = the model that client N trained alone; size.N = its number of
examples; student.N = client N's model with its helper's parameters; vote.N = the weights (2,) of
both models' votes.
Memory: nothing.
Reading: the helper is the peer with the largest mean softmax output on noise for the queried class;
ties go to the first peer.
Reading: a significant weight has a large abs(g w), where g is the gradient of the helper's
cross-entropy on that noise, labelled as the class. In each layer, the most significant weights and
biases replace the client's in a copy of its model; ties go to the first entries. Running statistics
are not replaced.
Reading: the client's model and the copy vote with their probabilities. The weight of a vote is
log((1 - e) / e), at least 0, where e is the error on the client's own data, counted as (wrong +
1/2) / (n + 1). Both have the same weight if neither is correct more than half of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.fields import Count, CountOrZero, PositiveShare
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NOTHING,
    Examples,
    Payload,
    Reply,
    Stage,
    State,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.registry import method
from fedstill.core.trees import dtype_of
from fedstill.losses import cross_entropy
from fedstill.methods.fit import (
    FIT,
    Queries,
    as_inputs,
    fitted_models,
    noise,
    probe_seed,
    probed,
    queries_of,
    student_models,
    with_students,
)
from fedstill.methods.local_only import LocalOnly
from fedstill.methods.naive_kd import TRANSFER, own_and_peers
from fedstill.methods.qkt import highest
from fedstill.models.predictors import CombinedPredictor, Predictor, WeightedVote, predictor


@method("clue")
@dataclass(frozen=True)
class CLUE(LocalOnly):
    """An approximation of CLUE: copies parameters from the peer that knows a class best, and lets
    both models vote.
    """

    schedule: ClassVar[Mapping[str, Any]] = {"refine": False}
    stages: ClassVar[frozenset[str]] = frozenset({FIT, TRANSFER})
    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.QUERIES
    personal: ClassVar[frozenset[str]] = frozenset()

    share: PositiveShare = 0.1
    """Share of each layer's entries that is copied from the helper, at least one entry."""
    samples: Count = 20
    """Number of noise examples on which the peers' models are probed."""
    participants: CountOrZero = 0
    """Number of clients in one exchange, including the client that queries; 0: all."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        queries = world.get(Queries) or Queries()
        if queries.raised not in (None, "single"):
            return "it answers queries for one class; set query.draw = 'single'"
        for client, query in sorted(queries.by_client.items()):
            if len(query) > 1:
                return (
                    f"it answers queries for one class, and client {client} asks for {len(query)}; "
                    "set query.draw = 'single'"
                )
        return super().incompatibility(stages, world)

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        if stage.name == FIT:
            return super().payload_for_client(state, client, stage, world)
        if client not in queries_of(world):
            return None
        return own_and_peers(state, client, self.participants, world)

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == FIT:
            return super().work(stage)
        return Patched(self)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        reply = super().expected_reply(client, stage, world)
        if stage.name == FIT:
            return reply
        return Payload(reply, vote=torch.zeros(2, dtype=dtype_of(world.initial(client))))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == FIT:
            return super().aggregate(state, replies, stage, world)
        votes = {f"vote.{r.client}": r.content.tensor("vote") for r in replies}
        return with_students(state, replies).next(groups=votes)

    def predictors(self, state: State, world: World) -> dict[str, Callable[[Tensor], Tensor]]:
        fitted = fitted_models(state)
        predictors: dict[str, Callable[[Tensor], Tensor]] = {}
        for client, patched in student_models(state).items():
            spec = world.model(client)
            models = [predictor(spec, fitted[client]), predictor(spec, patched)]
            predictors[f"client {client}"] = vote(models, state.extra.tensor(f"vote.{client}"))
        return predictors


def vote(models: Sequence[Predictor], weights: Tensor) -> CombinedPredictor:
    """A function from x to the log of the weighted mean (B, C) of the models' probabilities."""
    return CombinedPredictor(models, WeightedVote((weights / weights.sum()).tolist()))


@dataclass(frozen=True)
class Patched(ClientWork):
    """The client finds its helper, copies its significant parameters, and computes the weights of
    both models; nothing is trained.
    """

    method: CLUE

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        peers = payload.many("peer")
        helper = view.client
        patched = dict(payload.params)
        if peers:
            helper = self.helper(peers, view, world)
            patched |= self.significant(payload.params, peers[helper], view, world)

        errors = [self.weight(model, view) for model in (payload.params, patched)]
        weights = torch.tensor(errors, dtype=dtype_of(payload.params))
        if not bool(weights.any()):
            weights = torch.ones_like(weights)
        return TrainingStart({}, constants={"helper": helper, "patched": patched, "vote": weights})

    def helper(self, peers: Mapping[int, Tensors], view: View, world: World) -> int:
        """The peer that knows the queried class best, by its mean softmax on noise."""
        (query_class,) = view.query
        samples = self.method.samples
        knowledge = {
            client: float(probed(world.model(client), params, world, samples)[query_class])
            for client, params in peers.items()
        }
        return max(knowledge, key=lambda client: (knowledge[client], -client))

    def significant(
        self, params: Tensors, helper: Tensors, view: View, world: World
    ) -> dict[str, Tensor]:
        """The client's entries, of which some are replaced by the helper's significant entries for
        the queried class.
        """
        (query_class,) = view.query
        spec = view.model
        inputs = noise(spec.input_shape, self.method.samples, probe_seed(world), spec.vocabulary)
        x = as_inputs(inputs, dtype_of(helper))
        labels = torch.full((len(x),), query_class)
        examples = Examples(x, labels).to(str(view.data.values.device))
        (grads,) = view.passes.gradients(helper, examples, cross_entropy, len(x))
        taken = {name: self.largest((grad * helper[name]).abs()) for name, grad in grads.items()}
        return {
            name: torch.where(taken[name], helper[name], value)
            for name, value in params.items()
            if name in taken
        }

    def largest(self, scores: Tensor) -> Tensor:
        """Whether each entry is among the copied share, which has at least one entry."""
        count = max(1, round(self.method.share * scores.numel()))
        return highest(scores.flatten(), count).reshape(scores.shape)

    def weight(self, params: Tensors, view: View) -> float:
        """The weight of a model's vote, from its error on the client's own data."""
        wrong = int((view.logits(params).argmax(1) != view.data.labels.cpu()).sum())
        error = (wrong + 0.5) / (len(view.data) + 1)
        return max(0.0, math.log((1 - error) / error))

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return Payload(params=start["patched"], vote=start["vote"]), NOTHING

    def report(
        self, params: Tensors, start: TrainingStart, view: View, world: World
    ) -> dict[str, Any]:
        """``helper``: the helper, or the client itself if it has no peers; ``vote``: the weights of
        its model and the copy.
        """
        return {
            "query": list(view.query),
            "helper": start["helper"],
            "vote": start["vote"].tolist(),
        }
