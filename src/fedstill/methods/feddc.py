"""FedDC: each client tracks its drift from the global model and corrects its training for it, and
the server adds the mean drift.

Source: Gao et al., "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and
Correction" (2022), and its code; training settings from the code.
Symbols: alpha = weight of the drift's penalty; h_k = a client's drift, g_k = its gradient in the
last visit, g = the server's gradient; v_k = the client's number of examples divided by the mean
number over clients.
State: the global parameters; drift = the mean of h_k over all clients, for each trained parameter,
0 at first; gradient = g, likewise; labels = the census's label counts (clients, C), whose sums
determine v_k.
Memory: drift = h_k; gradient = g_k, each for each trained parameter.
Reading: with partial participation, the paper averages w_k + h_k over the participants. The code
averages w_k over the participants and h_k over all clients, as we do. The server does not need the
drifts for this: it adds their changes.
Reading: alpha and g are divided by v_k at the client, and the change of g_k is multiplied by it, as
in the code. A client without examples counts as one of average size.
Reading: g_k is the distance over steps times learning rate. The code uses the same number of steps
for all clients, and the first round's rate. Here both are those of the visit. Momentum does not
count: the code's plan has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.aggregation import ROBUST, Aggregation, uniform_unless_robust
from fedstill.core.capabilities import Need, Permit
from fedstill.core.fields import NonNegative
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    SERVER,
    Payload,
    Plan,
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
from fedstill.core.trees import add, only, scale, sub, zeros_like
from fedstill.losses import proximal
from fedstill.methods.fedavg import FEDNTD_PLAN, FedAvg
from fedstill.methods.fednova import direction_of
from fedstill.models.contract import trainable_entries


@method("feddc")
@dataclass(frozen=True)
class FedDC(FedAvg):
    """Clients train with a penalty on their drift from the global model and with corrected
    gradients; the server adds the mean drift.
    """

    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.LABEL_COUNTS
    # changes of gradients are sent, too
    permits: ClassVar[Permit] = Permit.ROBUST_AGGREGATE
    plans: ClassVar[Mapping[str, Plan]] = {
        "train": replace(
            FEDNTD_PLAN, lr=0.1, lr_decay=0.998, momentum=0.0, weight_decay=1e-3, clip_norm=10.0
        )
    }

    aggregation: Aggregation = "uniform"
    alpha: NonNegative = 0.01
    """Weight of the penalty on the distance to the global model minus the client's drift (alpha).
    """

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if not has_chain(stages):
            return ""
        return (
            "in a chain, the server's mean drift would change the model between two clients; "
            "choose method fedprox, or topology.kind = 'parallel'"
        )

    def initial_state(self, world: World) -> State:
        start = super().initial_state(world)
        zeros = zeros_like(trainable_entries(world.model(SERVER), start.params))
        return start.next(drift=zeros, gradient=zeros)

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        gradient = state.extra.tensors("gradient")
        return Payload(
            params=state.params, gradient=gradient, relative_size=relative_size(state, client)
        )

    def work(self, stage: Stage) -> ClientWork:
        return Drifting(self)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        trained = trainable_entries(world.model(client), world.initial(client))
        return Payload(super().expected_reply(client, stage, world), change=trained)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        drift = state.extra.tensors("drift")
        sent = only(state.params, drift)
        mean = self.averaged(replies, state.params)
        weighting = uniform_unless_robust(self.aggregation)
        uniform_mean = self.averaged(replies, state.params, weighting=weighting)
        moved = sub(only(uniform_mean, sent), sent)
        drift = add(drift, scale(moved, len(replies) / world.clients))

        sizes = [relative_size(state, reply.client) for reply in replies]
        if self.aggregation in ROBUST:
            change = self.averaged(replies, None, "change")
        else:
            change = trees.mean([reply.content.tensors("change") for reply in replies], sizes)
        gradient = add(state.extra.tensors("gradient"), scale(change, sum(sizes) / world.clients))

        params = {**mean, **add(only(mean, drift), drift)}
        return state.next(params=params, drift=drift, gradient=gradient)


def relative_size(state: State, client: int) -> float:
    """A client's number of examples divided by the mean number over clients, from the census; 1 for
    a client without examples.
    """
    if "labels" not in state.extra:
        return 1.0  # before the census: for what a run will send
    sizes = state.extra.tensor("labels").sum(1).double()
    if not sizes[client] > 0:
        return 1.0
    return float(sizes[client] / sizes.mean())


@dataclass(frozen=True)
class Drifting(ClientWork):
    """Cross-entropy, the penalty on the drift, and the correction of the gradient; the client
    stores drift and gradient.
    """

    method: FedDC

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        sent = trainable_entries(view.model, payload.params)
        drift: Tensors = zeros_like(sent)
        gradient: Tensors = zeros_like(sent)
        if client_state:
            drift = client_state.tensors("drift")
            gradient = client_state.tensors("gradient")

        size = payload.number("relative_size")
        global_gradient = scale(payload.tensors("gradient"), 1 / size)
        constants = {
            "sent": sent,
            "drift": drift,
            "gradient": gradient,
            "global_gradient": global_gradient,
            "anchor": sub(sent, drift),
            "correction": sub(global_gradient, gradient),
            "alpha": self.method.alpha / size,
        }
        return TrainingStart(payload.params, constants=constants)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        correction = start["correction"]
        params = only(step.params, start["anchor"])
        linear = torch.stack([(correction[k] * params[k]).sum() for k in params]).sum()
        penalty = proximal(params, start["anchor"], start["alpha"])
        return {**super().terms(step, start), "linear": linear, "proximal": penalty}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        moved = sub(only(params, start["sent"]), start["sent"])
        change = zeros_like(moved)
        if result.steps > 0:
            direction = direction_of(start["sent"], params, result.lr, result.steps)
            change = sub(direction, start["global_gradient"])
        drift = add(start["drift"], moved)
        gradient = add(start["gradient"], change)
        return Payload(params=params, change=change), Payload(drift=drift, gradient=gradient)
