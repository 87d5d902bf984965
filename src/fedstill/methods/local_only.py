"""Baselines in which every client trains a model alone: ``local_only`` uses these models as they
are, ``fedavg_once`` averages them once, and ``ensemble`` averages their predictions.

Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments"
(QKT), section 4.1, Table 2, and appendices A.2 and A.6.2.
State: no global parameters, except with ``fedavg_once``; model.N = the model that client N trained
alone; size.N = its number of examples.
Memory: params = the client's own model, with ``fedavg_once`` if rounds follow.
Reading: for ``fedavg_once``, the paper states one round of FedAvg. We average completely trained
models, because a single exchange between peers can provide these. Models with the same initial
weights that were trained separately average to about chance, as in the paper.
Reading: ``ensemble`` averages probabilities, and includes the client's own model.
Reading: with ``participants``, each client uses this number of models, including its own; the peers
are drawn by key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstill.core.aggregation import Aggregation, weighted_mean
from fedstill.core.capabilities import Need, Permit
from fedstill.core.fields import CountOrZero
from fedstill.core.keys import generator, seed_for
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import SERVER, Payload, Plan, Reply, Stage, State, Tensors, World, many
from fedstill.core.registry import method
from fedstill.methods.fedavg import Suspected
from fedstill.methods.fit import FIT, FITTING, GOES_ON, Fit, fitted_models, student_models
from fedstill.models.predictors import CombinedPredictor, MeanOfProbabilities, predictor


@method("local_only")
@dataclass(frozen=True)
class LocalOnly(Method):
    """Each client trains alone; nothing is exchanged."""

    topology: ClassVar[str] = "peer_to_peer"
    schedule: ClassVar[Mapping[str, Any]] = {"transfer": False, "refine": False}
    stages: ClassVar[frozenset[str]] = frozenset({FIT})
    needs: ClassVar[Need] = Need.NOTHING
    plans: ClassVar[Mapping[str, Plan]] = {FIT: FITTING}
    personal: ClassVar[frozenset[str]] = frozenset({FIT})
    reusable: ClassVar[frozenset[str]] = frozenset({FIT})

    def initial_state(self, world: World) -> State:
        return State(params={})  # there is no global model

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        """In later rounds, clients continue from their last models."""
        trained = student_models(state).get(client) or fitted_models(state).get(client)
        return Payload(params=trained or world.initial(client))

    def work(self, stage: Stage) -> ClientWork:
        return Fit()

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        sizes = {f"size.{reply.client}": reply.examples for reply in replies}
        models = many("model", {reply.client: reply.content.params for reply in replies})
        # Students of the previous round are older than the new models.
        without_students = state.without(*(f"student.{reply.client}" for reply in replies))
        return without_students.next(groups={**models, **sizes})


@method("fedavg_once")
@dataclass(frozen=True)
class FedAvgOnce(LocalOnly):
    """Averages, once, the models that clients trained alone."""

    needs: ClassVar[Need] = Need.SAME_SHAPES
    permits: ClassVar[Permit] = (
        Permit.LINEAR_AGGREGATE | Permit.CENTRAL_NOISE | Permit.ROBUST_AGGREGATE
    )
    personal: ClassVar[frozenset[str]] = frozenset()

    aggregation: Aggregation = "examples"
    """How models are averaged: weighted by numbers of examples, uniformly, or by a robust rule that
    limits the influence of hostile clients.
    """
    suspected: Suspected | None = field(default=None, kw_only=True)
    """The share of clients that may be hostile, for trimmed_mean and krum; unset: 0.3."""

    def initial_state(self, world: World) -> State:
        return State(params=world.initial(SERVER))

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        """In later rounds, clients continue from their own models, which they store, because the
        server may only know the mean.
        """
        payload = Payload(params=world.initial(client))
        if world.rounds == 1:
            return payload
        return Payload(payload, **{GOES_ON: 1})

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        mean = weighted_mean(replies, "params", self.aggregation, state.params, self.suspected)
        return state.next(params=mean)


@method("ensemble")
@dataclass(frozen=True)
class Ensemble(LocalOnly):
    """Averages the predicted probabilities of all local models."""

    personal: ClassVar[frozenset[str]] = frozenset()

    participants: CountOrZero = 0
    """Number of clients whose models predict for a client, including its own; 0: all."""

    def predictors(self, state: State, world: World) -> dict[str, Callable[[Tensor], Tensor]]:
        models = fitted_models(state)
        if not models:
            return {}
        predictors: dict[str, Callable[[Tensor], Tensor]] = {"ensemble": mixture(models, world)}
        if not self.participants:
            return predictors
        for client in range(world.clients):
            peers = asked_peers(client, self.participants, world)
            members = {c: models[c] for c in sorted((client, *peers)) if c in models}
            if members:
                predictors[f"client {client}"] = mixture(members, world)
        return predictors


def mixture(models: Mapping[int, Tensors], world: World) -> CombinedPredictor:
    """A function from x to the log of the mean probabilities (B, C) of some clients' models."""
    predictors = [predictor(world.model(client), params) for client, params in models.items()]
    return CombinedPredictor(predictors, MeanOfProbabilities())


def asked_peers(client: int, participants: int, world: World) -> list[int]:
    """The peers of a client, sorted: all other clients, or ``participants`` - 1 of them, drawn by
    key.
    """
    peers = [c for c in range(world.clients) if c != client]
    if not participants:
        return peers
    draw = generator(seed_for(world.seed, 1, 0, client, "participants"))
    order = torch.randperm(len(peers), generator=draw)
    return sorted(peers[i] for i in order[: participants - 1].tolist())
