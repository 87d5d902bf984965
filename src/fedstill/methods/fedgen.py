"""FedGen: the server trains a generator of class-conditional features with the clients' heads, and
clients also learn from generated features.

Source: Zhu et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning" (2021),
Algorithm 1, and its code.
Symbols: G = the generator, from noise and a class to features; a_t = ``weight``, b_t = ``match``,
both times ``decay``^t; eta = ``diversity``; omega_{k,c} = client k's part of the round's examples
of class c.
Stages: ``train``, and ``generate``, in which the server trains G.
State: the global parameters; labels = label counts by client, (clients, C); generator = the
parameters of G; head.N = the head that client N sent in the round, until G has been trained.
Memory: nothing.
Reading: omega counts all examples of the round's clients. The code counts the examples used so far,
starting at 1, so that clients without a class also teach it.
Reading: the code gives each generated example the mean omega of the batch. Here it has the omega of
its own class, as in the paper.
Reading: a client draws 100 features of each class in a round, and uses them in turn. The code draws
new ones in every step.
Reading: G has no normalisation, and its optimiser starts anew in each round. The code's term that
keeps G from reproducing the global model has weight 0 and is left out.
Reading: a and b are 10 on MNIST and 1 on EMNIST, at 0.01 without momentum. Here they are 1, because
momentum makes steps longer.
Reading: the code's clients take 20 batches in a round. Here they train as in the other methods'
tables.
Reading: the code has no class weights. Here they also apply to the cross-entropy of generated
features, because it depends on labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstill.core.capabilities import Need, Permit
from fedstill.core.fields import Count, NonNegative, PositiveShare
from fedstill.core.keys import generator, seed_for
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
    many,
)
from fedstill.core.registry import method
from fedstill.core.trees import dtype_of, only
from fedstill.losses import cross_entropy, kd
from fedstill.methods.fedavg import FEDNTD_PLAN, FedAvg
from fedstill.methods.ridge import no_linear_head
from fedstill.models import contract

GENERATE = "generate"
"""The stage in which the server trains the generator."""

HEAD = ("head.weight", "head.bias")
POOL = 100
"""The number of features per class that a client draws in a round."""
LEAST_DECAY = 1e-5
"""The smallest factor to which the decay over rounds reduces the weights a and b."""


@method("fedgen")
@dataclass(frozen=True)
class FedGen(FedAvg):
    """FedAvg whose clients also learn from features of a generator, which the server trains on the
    clients' heads.
    """

    schedule: ClassVar[Mapping[str, Any]] = {"server": GENERATE}
    stages: ClassVar[frozenset[str]] = frozenset({"train", GENERATE})
    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.FEATURES | Need.HEAD | Need.LABEL_COUNTS
    permits: ClassVar[Permit] = Permit.NOTHING  # the server learns from each client's head
    plans: ClassVar[Mapping[str, Plan]] = {
        "train": FEDNTD_PLAN,
        GENERATE: Plan(
            epochs=1, batch=32, optimiser="adam", lr=3e-4, lr_decay=0.98, weight_decay=1e-2
        ),
    }

    weight: NonNegative = 1.0
    """Weight of the cross-entropy of generated features (a)."""
    match: NonNegative = 1.0
    """Weight of the divergence from the head's logits for generated features of the same class
    (b).
    """
    decay: PositiveShare = 0.98
    """Factor by which both weights are multiplied after every round."""
    diversity: NonNegative = 1.0
    """Weight of the generator's penalty on equal features for different noise (eta)."""
    noise: Count = 32
    """Number of noise inputs of the generator."""
    hidden: Count = 256
    """Number of hidden units of the generator."""
    samples: Count = 1600
    """Number of pairs of noise and class on which the generator trains in a round."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if any(stage.name == GENERATE for stage in stages):
            return no_linear_head(world)
        return (
            "it needs a server stage; set topology.kind = 'parallel' and topology.server = "
            f"{GENERATE!r}"
        )

    def spec(self, world: World) -> ModelSpec:
        """The network G, from noise and a one-hot class to features."""
        width = contract.width(world.model(SERVER))
        return contract.spec_for(
            "mlp", (self.noise + world.classes,), width, {"hidden": (self.hidden,)}
        )

    def initial_state(self, world: World) -> State:
        start = super().initial_state(world)
        drawn = contract.initial(self.spec(world), seed_for(world.seed, 0, 0, SERVER, GENERATE))
        dtype = dtype_of(start.params)
        return start.next(generator={k: v.to(dtype) for k, v in drawn.items()})

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        generator_params = state.extra["generator"]
        if stage.name == GENERATE:
            heads = state.extra.many("head")
            counts = state.extra.tensor("labels")[sorted(heads)]  # (K, C)
            groups = {"generator": generator_params, **many("head", heads)}
            return Payload(groups, counts=counts)
        if stage.round == 1:
            return Payload(params=state.params)  # nothing has trained the generator yet
        counts = state.extra.tensor("labels").sum(0)  # (C,)
        return Payload(params=state.params, generator=generator_params, counts=counts)

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == GENERATE:
            return TrainGenerator(self, stage.round)
        if stage.round == 1:
            return ClientWork()
        return FromGenerator(self, stage.round)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name == GENERATE:
            return Payload(generator=self.initial_state(world).extra["generator"])
        return super().expected_reply(client, stage, world)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == GENERATE:
            return state.without("head.").next(generator=replies[0].content["generator"])
        heads = many("head", {r.client: only(r.content.params, HEAD) for r in replies})
        return super().aggregate(state.without("head."), replies, stage, world).next(groups=heads)

    def inputs(self, labels: Tensor, classes: int, draw: torch.Generator) -> Tensor:
        """The inputs of G for labels (n,): uniform noise in [0, 1), concatenated with one-hot
        classes; (n, noise + C) float64.
        """
        eps = torch.rand(len(labels), self.noise, generator=draw, dtype=torch.float64)
        return torch.cat([eps, torch.eye(classes, dtype=torch.float64)[labels]], 1)


def diversity_loss(noise: Tensor, features: Tensor, mask: Tensor) -> Tensor:
    """A penalty on similar features for different noise, () in (0, 1]; 1 if all features are equal.

    ``exp(-mean over pairs of mean (e_i - e_j)² * mean |h_i - h_j|)``. noise: (B, d); features: (B,
    D); mask: (B,), 1 for real examples.
    """
    noise_distance = (noise.unsqueeze(0) - noise.unsqueeze(1)).square().mean(2)  # (B, B)
    feature_distance = (features.unsqueeze(0) - features.unsqueeze(1)).abs().mean(2)  # (B, B)
    pairs = mask.unsqueeze(0) * mask.unsqueeze(1)
    return torch.exp(-(pairs * noise_distance * feature_distance).sum() / pairs.sum())


@dataclass(frozen=True)
class TrainGenerator(ClientWork):
    """The server trains G so that the clients' heads recognise the class of its features, weighted
    by the clients' examples of the class.
    """

    method: FedGen
    round: int

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        params = payload.tensors("generator")
        dtype = dtype_of(params)
        counts = payload.tensor("counts").double()  # (K, C)
        omega = counts / counts.sum(0).clamp(min=1)

        draw = generator(seed_for(world.seed, self.round, 0, SERVER, GENERATE))
        classes = counts.sum(0).nonzero().squeeze(1)
        labels = classes[torch.randint(len(classes), (self.method.samples,), generator=draw)]
        inputs = self.method.inputs(labels, world.classes, draw)

        heads = payload.many("head").values()
        constants = {
            "omega": omega.to(dtype),
            "weight": torch.stack([head["head.weight"] for head in heads]),  # (K, C, D)
            "bias": torch.stack([head["head.bias"] for head in heads]),  # (K, C)
        }
        return TrainingStart(
            params,
            constants=constants,
            model=self.method.spec(world),
            examples=Examples(inputs.to(dtype), labels),
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        features = step.logits()  # (B, D)
        logits = torch.einsum("bd,kcd->kbc", features, start["weight"]) + start["bias"].unsqueeze(1)
        losses = torch.stack([cross_entropy(z, step.y) for z in logits])  # (K, B)
        noise = step.x[:, : self.method.noise]
        return {
            "known": step.weighted((start["omega"][:, step.y] * losses).sum(0)),
            "diverse": self.method.diversity * diversity_loss(noise, features, step.mask),
        }

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return Payload(generator=params), NOTHING


@dataclass(frozen=True)
class FromGenerator(ClientWork):
    """Cross-entropy of the client's examples and of generated features, and the divergence from the
    head's logits for generated features of the same class.
    """

    method: FedGen
    round: int

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        params = payload.tensors("generator")
        draw = generator(seed_for(world.seed, self.round, 0, view.client, GENERATE))
        labels = torch.arange(world.classes).repeat_interleave(POOL)
        inputs = self.method.inputs(labels, world.classes, draw).to(dtype_of(params))
        network = self.method.spec(world)
        features = view.passes.logits(
            params, Examples(inputs, labels), network
        ).cpu()  # (C*POOL, D)

        # Features of the classes that some client has, in an order of their own.
        trained = (payload.tensor("counts") > 0)[labels].nonzero().squeeze(1)
        shuffled = trained[torch.randperm(len(trained), generator=draw)]
        constants = {
            "by_class": features.view(world.classes, POOL, -1),
            "shuffled": features[shuffled],
            "labels": labels[shuffled],
        }
        return TrainingStart(payload.params, constants=constants)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        m = self.method
        weight = step.params["head.weight"]
        bias = step.params["head.bias"]
        turn = step.index + step.epoch  # so that every epoch has other features

        # The cross-entropy of a feature of any class, one for each example of the batch.
        position = turn % len(start["labels"])
        labels = start["labels"][position]
        logits = step.on(start["shuffled"][position] @ weight.T + bias)
        losses = cross_entropy(logits, labels)  # (B,)
        if start.class_weights is not None:
            losses = losses * start.class_weights.to(losses.dtype)[labels]
        if start.head is not None:  # other clients may have classes that take no part here
            losses = torch.where(start.head[labels], losses, 0.0)

        # The divergence from the head's logits for a feature of the example's class.
        same_class = start["by_class"][step.y, turn % POOL]  # (B, D)
        target = step.on((same_class @ weight.T + bias).detach())
        divergence = kd(step.logits(), target)  # (B,)

        decay = max(LEAST_DECAY, m.decay ** (self.round - 1))
        return {
            **super().terms(step, start),
            "generated": decay * m.weight * losses,
            "match": decay * m.match * divergence,
        }
