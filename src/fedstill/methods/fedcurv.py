"""FedCurv: a penalty keeps the model near the other clients' models, weighted by their Fisher
information for each parameter.

Source: Shoham et al., "Overcoming Forgetting in Federated Learning on Non-IID Data" (2019), in
FedNTD's version.
Symbols: lambda = ``weight``; s = ``samples``; u_k = diagonal Fisher information of client k, v_k =
u_k w_k; P, Q = their sums over the other clients.
State: the global parameters; fisher, fisher_params = the sums of u_k and v_k over some clients, for
each trained parameter; counted = 1 for each client that is included, else 0, (clients,).
Memory: fisher, fisher_params = the client's u_k and v_k of its last visit.
Reading: FedCurv's paper sums over the last round's clients, FedNTD's code over all clients that
took part so far. ``scope`` decides.
Reading: the information is computed on training images, with augmentation if the run uses it, as in
FedNTD's code; FedCurv's paper does not augment. The network is in evaluation mode, as in that code.
Reading: FedNTD's code decrements the global sum in place, so that later clients of a round lack
earlier ones. We do not follow this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedstill.core.capabilities import Permit
from fedstill.core.fields import Count, NonNegative
from fedstill.core.keys import seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    OFF,
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
from fedstill.core.trees import add, scale, sub, zeros_like
from fedstill.losses import cross_entropy
from fedstill.methods.fedavg import FedAvg
from fedstill.models.contract import trainable_entries

SUMS = ("fisher", "fisher_params")
"""The groups P and Q: the sums of the clients' Fisher information, and of Fisher information times
parameters.
"""


@method("fedcurv")
@dataclass(frozen=True)
class FedCurv(FedAvg):
    """FedAvg with a quadratic penalty on the distance to the other clients' models, weighted by
    Fisher information.
    """

    # Fisher information would need a noise of its own
    permits: ClassVar[Permit] = Permit.NOTHING

    weight: NonNegative = 1.0
    """Weight of the penalty on the distance to the other clients' models (lambda)."""
    samples: Count = 500
    """Approximate number of examples from which a client computes its Fisher information (s)."""
    scope: Literal["all_seen", "last_round"] = "all_seen"
    """Whose information is used: that of all clients so far, or of the clients of the last round.
    """

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if self.scope == "all_seen" or not has_chain(stages):
            return ""
        return (
            "method.scope = 'last_round' would forget after every client of a chain; set "
            "method.scope = 'all_seen'"
        )

    def initial_state(self, world: World) -> State:
        start = super().initial_state(world)
        zeros = zeros_like(trainable_entries(world.model(SERVER), start.params))
        counted = torch.zeros(world.clients, dtype=torch.int64)
        return start.next(fisher=zeros, fisher_params=zeros, counted=counted)

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        counted = int(state.extra.tensor("counted")[client])
        sums = {group: state.extra.tensors(group) for group in SUMS}
        return Payload({"params": state.params, **sums}, counted=counted)

    def work(self, stage: Stage) -> ClientWork:
        return Curved(self, stage)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        reply = super().expected_reply(client, stage, world)
        trained = trainable_entries(world.model(client), world.initial(client))
        return Payload(reply, fisher=trained, fisher_params=trained)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        counted = state.extra.tensor("counted").clone()
        sums = {group: state.extra.tensors(group) for group in SUMS}
        if self.scope == "last_round":
            counted.zero_()
            sums = {group: zeros_like(total) for group, total in sums.items()}
        for reply in replies:
            counted[reply.client] = 1
            sums = {g: add(total, reply.content.tensors(g)) for g, total in sums.items()}
        averaged = super().aggregate(state, replies, stage, world)
        return averaged.next(counted=counted, groups=sums)


@dataclass(frozen=True)
class Curved(ClientWork):
    """Cross-entropy and lambda (<P, w^2> - 2 <Q, w>); afterwards, the client sends the change of
    its Fisher information.
    """

    method: FedCurv
    stage: Stage

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        sums = {group: payload.tensors(group) for group in SUMS}
        # The client's share of the sums: what it sent last, if the server still counts it.
        client_sums: dict[str, Tensors] = {g: zeros_like(total) for g, total in sums.items()}
        if client_state and payload.number("counted") > 0:
            client_sums = {group: client_state.tensors(group) for group in SUMS}
        other_sums = {group: sub(sums[group], client_sums[group]) for group in SUMS}
        return TrainingStart(
            payload.params, constants={"client_sums": client_sums, "other_sums": other_sums}
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        p = start["other_sums"]["fisher"]
        q = start["other_sums"]["fisher_params"]
        w = step.params
        pull = torch.stack([(p[k] * w[k] ** 2 - 2 * q[k] * w[k]).sum() for k in p]).sum()
        return {**super().terms(step, start), "pull": self.method.weight * pull}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        fisher = self.fisher(params, view, world)
        sums = {"fisher": fisher, "fisher_params": {k: fisher[k] * params[k] for k in fisher}}
        change = sums
        if self.method.scope == "all_seen":
            change = {group: sub(sums[group], start["client_sums"][group]) for group in sums}
        return Payload({"params": params, **change}), Payload(sums)

    def fisher(self, params: Tensors, view: View, world: World) -> Tensors:
        """The mean over batches of the squared gradient of a batch's mean cross-entropy, over
        ``samples`` examples. Outputs that take no part in training take no part here, either.
        """

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            if view.head is not None:
                logits = torch.where(view.head.to(logits.device), logits, OFF)
            return cross_entropy(logits, labels)

        batch = world.plans[self.stage.name].batch
        seed = seed_for(world.seed, self.stage.round, self.stage.index, view.client, "fisher")
        total = zeros_like(trainable_entries(view.model, params))
        batches = 0
        for grads in view.gradients(params, loss, batch, seed=seed):
            total = {k: total[k] + grads[k] ** 2 for k in total}
            batches += 1
            if batches * batch > self.method.samples:
                break
        return scale(total, 1 / max(batches, 1))
