"""PFNM: separately trained models are combined by matching their hidden units; the resulting model
may be wider.

Source: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (2019) and
its code; with convolutions, the code of Wang et al., "Federated Learning with Matched Averaging"
(2020). A baseline in Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning
Environments" (QKT), Table 2.
Symbols: sigma^2 = ``variance``, sigma_0^2 = ``prior_variance``, gamma; ``passes`` over the clients
after the first match; if a layer has ``most`` global units, a client adds at most one.
State: the global parameters, and their architecture, once units are matched; candidate.N = the
model of the Nth setting, until clients have evaluated all candidates; labels = the census's label
counts (clients, C).
Memory: params = the client's own model, from which it continues if rounds follow.
Reading: QKT gives no settings. PFNM's code tries 3 gamma x 3 sigma^2 x 2 sigma_0^2 and takes the
candidate with the best training accuracy. Here the server sends every candidate to the clients (the
stage ``transfer``), which count the correct predictions on their own data. With a single candidate,
nothing is sent.
Reading: the method is exact for fully connected and plain convolutional networks. QKT uses it with
ResNet-18, which PFNM does not cover, without details. For such networks, we use an approximation of
our own (``fedstill.methods.matching``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch

from fedstill.core.capabilities import Need, Permit
from fedstill.core.fields import Candidates, Count, CountOrZero
from fedstill.core.keys import seed_for
from fedstill.core.label_counts import count_problem
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    KEEP,
    SERVER,
    Keep,
    Payload,
    Reply,
    Stage,
    State,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
    many,
)
from fedstill.core.registry import method
from fedstill.methods.fit import FIT
from fedstill.methods.local_only import FedAvgOnce
from fedstill.methods.matching import (
    FittedModels,
    MatchingSettings,
    match_models,
    matchable,
    unmatched,
    widened,
)
from fedstill.methods.naive_kd import TRANSFER


@method("pfnm")
@dataclass(frozen=True)
class PFNM(FedAvgOnce):
    """Combines all local models into one by matching their hidden units; for residual networks
    approximately.
    """

    schedule: ClassVar[Mapping[str, Any]] = {"refine": False}
    stages: ClassVar[frozenset[str]] = frozenset({FIT, TRANSFER})
    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.LABEL_COUNTS
    permits: ClassVar[Permit] = Permit.NOTHING  # the server needs each client's model

    gamma: Candidates = (1.0, 0.001, 50.0)
    """Readiness to create a new global unit: the values to try."""
    variance: Candidates = (1.0, 0.1, 0.5)
    """Variance of clients' weights about the global ones (sigma^2): the values to try."""
    prior_variance: Candidates = (1.0, 10.0)
    """Variance of the global weights about their prior mean (sigma_0^2): the values to try."""
    most: Count = 700
    """Number of global units in a layer above which a client adds at most one."""
    passes: CountOrZero = 5
    """Number of passes over the clients after the first match."""

    @property
    def settings(self) -> list[MatchingSettings]:
        """The settings to try, in the order of the fields' values."""
        grid = product(self.gamma, self.variance, self.prior_variance)
        return [
            MatchingSettings(variance, prior, gamma, self.most, self.passes)
            for gamma, variance, prior in grid
        ]

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        spec = world.model(SERVER)
        if spec.held:
            return "it changes the widths of layers, and train_only keeps some as they are"
        if not matchable(spec):
            return (
                "it matches units of plain chains of layers and of residual networks, and "
                f"{unmatched(spec)}"
            )
        return super().incompatibility(stages, world)

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        if stage.name == FIT:
            return super().payload_for_client(state, client, stage, world)
        candidates = state.extra.many("candidate")
        if not candidates:
            return None
        return Payload(many("candidate", candidates))

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == FIT:
            return super().work(stage)
        return CountCorrect()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name == FIT:
            return super().expected_reply(client, stage, world)
        return Payload(right=torch.zeros(len(self.settings), dtype=torch.int64))

    def refuses(self, reply: Reply, stage: Stage) -> str:
        if stage.name == FIT:
            return super().refuses(reply, stage)
        # Each candidate is tested on all of the client's examples.
        return count_problem(reply, "right", reply.examples * len(self.settings))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == FIT:
            models = FittedModels(
                models=[reply.content.params for reply in replies],
                counts=state.extra.tensor("labels")[[reply.client for reply in replies]],
                sizes=[float(reply.examples) for reply in replies],
            )
            seed = seed_for(world.seed, stage.round, stage.index, SERVER, "matching")
            # Every setting matches with the same draws.
            candidates = {
                i: match_models(world.model(SERVER), models, setting, np.random.default_rng(seed))
                for i, setting in enumerate(self.settings)
            }
            if len(candidates) == 1:
                return self.chosen(state, candidates[0], world)
            return state.next(groups=many("candidate", candidates))

        correct = torch.stack([reply.content.tensor("right") for reply in replies]).sum(0)
        best = state.extra.many("candidate")[int(correct.argmax())]
        return self.chosen(state.without("candidate."), best, world)

    def chosen(self, state: State, params: Tensors, world: World) -> State:
        """The state whose model has these parameters and their widths."""
        return replace(state.next(params=params), model=widened(world.model(SERVER), params))


@dataclass(frozen=True)
class CountCorrect(ClientWork):
    """The client counts the correct predictions of each candidate on its examples; nothing is
    trained.
    """

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        correct = [self.correct(params, view) for params in payload.many("candidate").values()]
        return TrainingStart({}, constants={"right": torch.tensor(correct, dtype=torch.int64)})

    def correct(self, params: Tensors, view: View) -> int:
        """The number of correct predictions of a candidate on the client's examples."""
        logits = view.logits(params, model=widened(view.model, params))
        return int((logits.argmax(1) == view.data.labels.cpu()).sum())

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload | Keep]:
        return Payload(right=start["right"]), KEEP

    def report(
        self, params: Tensors, start: TrainingStart, view: View, world: World
    ) -> dict[str, Any]:
        """``right``: each candidate's number of correct predictions on the client's examples."""
        return {"right": start["right"].tolist()}
