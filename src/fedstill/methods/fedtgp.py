"""FedTGP: as FedProto, with prototypes that the server trains to lie apart, by a margin taken from
the clients' own.

Source: Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive
Learning for Data and Model Heterogeneity in Federated Learning" (2024), Algorithm 1, and its code.
Symbols: lambda = ``strength``; tau = ``largest_margin``; G = the table of prototypes, S = the
server's epochs.
Stages: ``train``, and ``prototypes``, in which the server trains G on what the round's clients
sent.
State: no global parameters; values = G of each class, (C, D); seen = 1 for a class that any client
ever had, else 0, (C,); table = the parameters of G; means.N = what client N sent; counts.N = its
label counts, until the server has learned from them.
Memory: params = the client's own model.
Reading: G is an embedding, a linear layer, ReLU and a linear layer; the first two are one table,
here of width D.
Reading: the code's distance is the root of a difference that rounding can make negative; here it is
the root of the sum of squares, which is at least 1e-12.
Reading: the code answers by the nearest prototype; here the client's head answers, as in FedProto.
Reading: the margin is the largest distance of a class's mean over clients to the next class's; with
one class it is 0.
Reading: the code trains for an epoch at 0.01 in batches of 10, clients and server alike; clients
here as in FedProto.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstill.core.aggregation import mean_by_class
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
from fedstill.methods.fedproto import WithPrototypes
from fedstill.models import contract

PROTOTYPES = "prototypes"
"""The stage in which the server trains the prototypes."""


@method("fedtgp")
@dataclass(frozen=True)
class FedTGP(WithPrototypes):
    """Clients draw their features to prototypes that the server trains to lie apart; networks may
    differ.
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
    """The most by which the server pushes prototypes apart (tau)."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        unmet = f"it needs its server's stage; set topology.server = {PROTOTYPES!r}"
        return super().incompatibility(stages, world) or (
            "" if PROTOTYPES in {s.name for s in stages} else unmet
        )

    def initial_state(self, world: World) -> State:
        start, spec = super().initial_state(world), table_of(self.blank(SERVER, world))
        drawn = contract.initial(spec, seed_for(world.seed, 0, 0, SERVER, "prototypes"))
        return start.next(
            table={k: v.to(dtype_of(world.initial(SERVER))) for k, v in drawn.items()}
        )

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        if stage.name != PROTOTYPES:
            return super().payload_for_client(state, client, stage, world)
        said = {g: v for g, v in state.extra.items() if g.startswith(("means.", "counts."))}
        return Payload({**said, "table": state.extra["table"], "margin": self.margin(state)})

    def margin(self, state: State) -> float:
        """The largest distance of a class's mean to the next class's, at most
        ``largest_margin``.
        """
        replies = [Reply(c, Payload(means=m, counts=n), 0) for c, m, n in said_of(state.extra)]
        means, seen = mean_by_class(replies, state.extra.tensor("values"), "uniform")
        apart = torch.cdist(means[seen], means[seen]).fill_diagonal_(torch.inf)
        return (
            min(float(apart.min(1).values.max()), self.largest_margin)
            if int(seen.sum()) > 1
            else 0.0
        )

    def work(self, stage: Stage) -> ClientWork:
        return Apart() if stage.name == PROTOTYPES else super().work(stage)

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
        seen = torch.stack(
            [
                state.extra.tensor("seen"),
                *((r.content.tensor("counts") > 0).float() for r in replies),
            ]
        )
        said = {
            f"{g}.{r.client}": r.content.tensor(g) for r in replies for g in ("means", "counts")
        }
        return state.next(groups=said, seen=seen.amax(0))


def table_of(values: Tensor) -> ModelSpec:
    """The network G from one-hot classes to prototypes, for values by class (C, D)."""
    classes, width = values.shape
    return contract.spec_for("mlp", (classes,), width, {"hidden": (width,)})


def all_prototypes(spec: ModelSpec, table: Tensors) -> Tensor:
    """G of every class, (C, D)."""
    one_hot = torch.eye(
        spec.input_shape[0], dtype=dtype_of(table), device=table["head.weight"].device
    )
    return contract.forward(contract.module(spec, "frozen"), table, one_hot)


def said_of(groups: Payload) -> list[tuple[int, Tensor, Tensor]]:
    """What each client sent: its id, means (C, D), counts (C,)."""
    ids = sorted(int(g.removeprefix("means.")) for g in groups if g.startswith("means."))
    return [(c, groups.tensor(f"means.{c}"), groups.tensor(f"counts.{c}")) for c in ids]


class Apart(ClientWork):
    """The server trains G so that each mean that a client sent is nearest its own class's
    prototype, by a margin.
    """

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        pairs = [(means[n > 0], (n > 0).nonzero().squeeze(1)) for _, means, n in said_of(payload)]
        points = Examples(torch.cat([m for m, _ in pairs]), torch.cat([y for _, y in pairs]))
        table = payload.tensors("table")
        spec = contract.spec_for(
            "mlp", (world.classes,), points.values.shape[1], {"hidden": (points.values.shape[1],)}
        )
        return TrainingStart(
            table,
            constants={"margin": payload.number("margin"), "spec": spec},
            model=spec,
            examples=points,
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        prototypes = all_prototypes(start["spec"], step.params)  # (C, D)
        apart = (step.x.unsqueeze(1) - prototypes).square().sum(2).clamp(min=1e-12).sqrt()  # (B, C)
        own = step.y.unsqueeze(1) == torch.arange(len(prototypes), device=step.y.device)
        losses = cross_entropy(-(apart + start["margin"] * own.to(apart.dtype)), step.y)
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
