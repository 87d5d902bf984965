"""FedDyn: a linear term at each client makes the clients' optima agree with the global optimum in
the limit.

Source: Acar et al., "Federated Learning Based on Dynamic Regularization" (2021), Algorithm 1.
Symbols: alpha = weight of the proximal term; g_i = a client's gradient at its last model; h = the
server's mean of them.
State: the global parameters; h = the server's h, for each trained parameter, 0 at first.
Memory: gradient = g_i, for each trained parameter.
Reading: the algorithm averages participants uniformly, which is the default of ``aggregation``.
FedNTD's code averages by size but sums h uniformly; ``aggregation`` = "examples" follows it.
Reading: the paper's alpha is between 0.001 and 0.1, depending on the data; FedNTD's code has 0.1.
We use 0.01.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstill.core.aggregation import Aggregation, uniform_unless_robust
from fedstill.core.fields import Positive
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    SERVER,
    Payload,
    Reply,
    Stage,
    State,
    Step,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.registry import method
from fedstill.core.topology import has_chain
from fedstill.core.trees import only, scale, sub, zeros_like
from fedstill.losses import proximal
from fedstill.methods.fedavg import FedAvg
from fedstill.models.contract import trainable_entries


@method("feddyn")
@dataclass(frozen=True)
class FedDyn(FedAvg):
    """Dynamic regularisation: -<g_i, w> + (alpha/2) ||w - w_global||^2 on each client, and a
    correction h on the server.
    """

    aggregation: Aggregation = "uniform"
    alpha: Positive = 0.01
    """Weight of the proximal term (alpha)."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if not has_chain(stages):
            return ""
        return (
            "in a chain, the server's correction h would change the model between two clients; "
            "choose method fedprox, or topology.kind = 'parallel'"
        )

    def initial_state(self, world: World) -> State:
        start = super().initial_state(world)
        return start.next(h=zeros_like(trainable_entries(world.model(SERVER), start.params)))

    def work(self, stage: Stage) -> ClientWork:
        return Dynamic(self)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        h = state.extra.tensors("h")
        mean = self.averaged(replies, state.params)
        weighting = uniform_unless_robust(self.aggregation)
        uniform_mean = self.averaged(replies, state.params, weighting=weighting)
        moved = sub(only(uniform_mean, h), only(state.params, h))
        h = sub(h, scale(moved, self.alpha * len(replies) / world.clients))
        corrected = sub(only(mean, h), scale(h, 1 / self.alpha))
        return state.next(params={**mean, **corrected}, h=h)


@dataclass(frozen=True)
class Dynamic(ClientWork):
    """Cross-entropy minus the client's linear term plus the proximal term; the client stores its
    g_i.
    """

    method: FedDyn

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        anchor = trainable_entries(view.model, payload.params)
        gradient: Tensors = zeros_like(anchor)
        if client_state:
            gradient = client_state.tensors("gradient")
        return TrainingStart(payload.params, constants={"anchor": anchor, "gradient": gradient})

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        gradient = start["gradient"]
        params = only(step.params, start["anchor"])
        linear = torch.stack([(gradient[k] * params[k]).sum() for k in gradient]).sum()
        penalty = proximal(params, start["anchor"], self.method.alpha)
        return {**super().terms(step, start), "linear": -linear, "proximal": penalty}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        moved = sub(only(params, start["anchor"]), start["anchor"])
        gradient = sub(start["gradient"], scale(moved, self.method.alpha))
        return Payload(params=params), Payload(gradient=gradient)
