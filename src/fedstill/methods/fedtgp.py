"""FedTGP: like FedProto, but the server trains the prototypes to be separated, with a margin that
depends on the clients' class means.

Source: Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive
Learning for Data and Model Heterogeneity in Federated Learning" (2024), Algorithm 1, and its code.
Symbols: lambda = ``strength``; tau = ``largest_margin``; G = the table of prototypes, S = the
server's epochs.
Stages: ``train``, and ``prototypes``, in which the server trains G on the means from the round's
clients.
State: no global parameters; values = G of each class, (C, D); seen = 1 for a class that some client
has had, else 0, (C,); table = the parameters of G; means.N = the means from client N; counts.N =
its label counts, both until the server has learned from them.
Memory: params = the client's own model.
Reading: G is an embedding, a linear layer, ReLU and a linear layer. Here the first two are a single
table of width D.
Reading: the code's distance is the square root of a difference that rounding can make negative.
Here it is the square root of the sum of squares, which is at least 1e-12.
Reading: the code predicts by the nearest prototype. Here the client's head predicts, as in
FedProto.
Reading: the margin is the largest distance between the mean of a class over clients and the mean of
its nearest other class. With one class, it is 0.
Reading: the code's clients and server train for one epoch at 0.01 in batches of 10. Here clients
train as in FedProto.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstill.core.fields import NonNegative
from fedstill.core.keys import seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NOTHING,
    SERVER,
    Examples,
    ModelSpec,
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
from fedstill.core.trees import dtype_of
from fedstill.losses import cross_entropy
from fedstill.methods.class_values import client_groups, mean_by_class
from fedstill.methods.fedproto import WithPrototypes
from fedstill.models import contract

PROTOTYPES = "prototypes"
"""The stage in which the server trains the prototypes."""


@method("fedtgp")
@dataclass(frozen=True)
class FedTGP(WithPrototypes):
    """Clients pull their features towards prototypes, which the server trains to be far apart;
    networks may differ.
    """

    schedule: ClassVar[Mapping[str, Any]] = {"server": PROTOTYPES}
    stages: ClassVar[frozenset[str]] = frozenset({"train", PROTOTYPES})
    plans: ClassVar[Mapping[str, Plan]] = {
        **WithPrototypes.plans,
        PROTOTYPES: Plan(epochs=100, batch=10, lr=0.01),
    }

    strength: NonNegative = 10.0
    """Weight of the distance to the prototypes (lambda)."""
    largest_margin: NonNegative = 100.0
    """Largest margin by which the server separates prototypes (tau)."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        incompatibility = super().incompatibility(stages, world)
        if incompatibility or any(stage.name == PROTOTYPES for stage in stages):
            return incompatibility
        return f"it needs a server stage; set topology.server = {PROTOTYPES!r}"

    def initial_state(self, world: World) -> State:
        spec = table_of(self.blank(SERVER, world))
        drawn = contract.initial(spec, seed_for(world.seed, 0, 0, SERVER, "prototypes"))
        dtype = dtype_of(world.initial(SERVER))
        table = {k: v.to(dtype) for k, v in drawn.items()}
        return super().initial_state(world).next(table=table)

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        if stage.name != PROTOTYPES:
            return super().payload_for_client(state, client, stage, world)
        sent = {
            name: group
            for name, group in state.extra.items()
            if name.startswith(("means.", "counts."))
        }
        return Payload(sent, table=state.extra["table"], margin=self.margin(state))

    def margin(self, state: State) -> float:
        """The largest distance between the mean of a class and that of its nearest other class, at
        most ``largest_margin``.
        """
        replies = [
            Reply(sent.client, Payload(means=sent.means, counts=sent.counts), 0)
            for sent in class_means(state.extra)
        ]
        means, has_mean = mean_by_class(replies, state.extra.tensor("values"), "uniform")
        if int(has_mean.sum()) < 2:
            return 0.0
        distances = torch.cdist(means[has_mean], means[has_mean]).fill_diagonal_(torch.inf)
        return min(float(distances.min(1).values.max()), self.largest_margin)

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == PROTOTYPES:
            return TrainPrototypes()
        return super().work(stage)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name != PROTOTYPES:
            return super().expected_reply(client, stage, world)
        return Payload(table=self.initial_state(world).extra.tensors("table"))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == PROTOTYPES:
            table = replies[0].content.tensors("table")
            values = all_prototypes(table_of(state.extra.tensor("values")), table)
            return state.without("means.", "counts.").next(table=table, values=values)
        has_class = [(reply.content.tensor("counts") > 0).float() for reply in replies]
        has_prototype = torch.stack([state.extra.tensor("seen"), *has_class]).amax(0)
        return state.next(groups=client_groups(replies), seen=has_prototype)


def table_of(values: Tensor) -> ModelSpec:
    """The network G from one-hot classes to prototypes, for values by class (C, D)."""
    classes, width = values.shape
    return contract.spec_for("mlp", (classes,), width, {"hidden": (width,)})


def all_prototypes(spec: ModelSpec, table: Tensors) -> Tensor:
    """The output of G for every class, (C, D)."""
    classes = spec.input_shape[0]
    device = table["head.weight"].device
    one_hot = torch.eye(classes, dtype=dtype_of(table), device=device)
    return contract.forward(contract.module(spec, "frozen"), table, one_hot)


@dataclass(frozen=True)
class ClassMeans:
    """A client's reply: the means (C, D) of its features by class, and its label counts (C,)."""

    client: int
    means: Tensor
    counts: Tensor


def class_means(groups: Payload) -> list[ClassMeans]:
    """The class means from clients, in the order of their ids."""
    ids = sorted(int(name.removeprefix("means.")) for name in groups if name.startswith("means."))
    return [
        ClassMeans(client, groups.tensor(f"means.{client}"), groups.tensor(f"counts.{client}"))
        for client in ids
    ]


class TrainPrototypes(ClientWork):
    """The server trains G so that each received mean is nearest to the prototype of its class, by a
    margin.
    """

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        sent = class_means(payload)
        means = torch.cat([s.means[s.counts > 0] for s in sent])
        labels = torch.cat([(s.counts > 0).nonzero().squeeze(1) for s in sent])
        spec = table_of(sent[0].means)
        return TrainingStart(
            payload.tensors("table"),
            constants={"margin": payload.number("margin"), "spec": spec},
            model=spec,
            examples=Examples(means, labels),
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        prototypes = all_prototypes(start["spec"], step.params)  # (C, D)
        squares = (step.x.unsqueeze(1) - prototypes).square().sum(2)  # (B, C)
        distances = squares.clamp(min=1e-12).sqrt()
        classes = torch.arange(len(prototypes), device=step.y.device)
        is_label = (step.y.unsqueeze(1) == classes).to(distances.dtype)  # (B, C)
        losses = cross_entropy(-(distances + start["margin"] * is_label), step.y)
        return {"apart": step.weighted(losses)}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return Payload(table=params), NOTHING
