"""Analytic learning over tasks: the network is trained in the first task and then frozen; its last
layer is solved for.

Source: Guan et al., "STSA: Federated Class-Incremental Learning via Spatial-Temporal Statistics
Aggregation" (2025), and its code; the sums of AFL lead to the same layer.
Symbols: rho = ``ridge``; M = ``width``; G = gram, P = cross, the sums of e e^T and e y^T, y
one-hot.
Stages: ``train``, in which clients are idle from the second task on; after each task ``sums``, of
all available clients, without training.
State: the global parameters; from the end of the first task on, those of the network with the
random layer; gram = G so far, (M+1, M+1); cross = P so far, (M+1, C), both in float64.
Memory: gram, cross = the client's own sums of its last task, without ``groups``; task = this task.
Reading: features e are ReLU(h Q), where Q has fixed random numbers of mean 0 and standard deviation
1, (D, M). With ``width`` 0, e is h. The code states M = 1,250 in its README and 10,000 as its
default.
Reading: rho is 10. The code has 1e6, and tunes it: the best value depends on M and on the size of
the features.
Reading: the code's layer has no bias. Here it has one, without a penalty, as in ``afl``.
Reading: the code predicts by the cosine with the columns of the layer (``cosine``). Here the
columns include the bias.
Reading: a client that takes part again within a task sends the change of its sums, so that nothing
counts twice.
Reading: with ``groups``, the method is STSA-E: by class, clients send the sums of as many random
groups of their examples, and G is estimated from these for each task, as in the code. An estimate
can have negative eigenvalues; they count as 0 when the layer is solved for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedstill.core.capabilities import Need, Permit
from fedstill.core.fields import CountOrZero, NonNegative
from fedstill.core.keys import generator, seed_for
from fedstill.core.label_counts import count_problem
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NO_TRAINING,
    SERVER,
    ModelSpec,
    Payload,
    Plan,
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
from fedstill.methods.afl import SendChange, added_sums
from fedstill.methods.fedavg import FEDNTD_PLAN, FedAvg
from fedstill.methods.ridge import (
    empty_group_sums,
    empty_sums,
    estimated_gram,
    group_sums,
    no_linear_head,
    solved,
)
from fedstill.models.adapted import lifted_body, lifted_spec

SUM_UP = "sums"


@method("analytic")
@dataclass(frozen=True)
class Analytic(FedAvg):
    """FedAvg in the first task; after each task, it solves for a last layer that equals that of
    training on all tasks so far; needs [stream].
    """

    schedule: ClassVar[Mapping[str, Any]] = {"task_end": SUM_UP}
    stages: ClassVar[frozenset[str]] = frozenset({"train", SUM_UP})
    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.FEATURES | Need.HEAD
    permits: ClassVar[Permit] = Permit.NOTHING  # sums of features are sent, too
    plans: ClassVar[Mapping[str, Plan]] = {"train": FEDNTD_PLAN, SUM_UP: NO_TRAINING}

    ridge: NonNegative = 10.0
    """Weight of the L2 penalty on the last layer (rho)."""
    width: CountOrZero = 1250
    """Number of random features before the last layer (M); 0: the features of the network."""
    groups: CountOrZero = 0
    """Number of random groups of examples whose sums a client sends (STSA-E's code: 5); 0: exact
    products of features.
    """
    cosine: bool = True
    """Whether logits are cosines, so that the logits of rare classes are not too small."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        spec = world.model(SERVER)
        if self.width and (spec.held or spec.widths):
            return (
                "only a part of the network is trained, or widths are its own; set method.width = 0"
            )
        if self.groups and world.stream.keeps_data:
            return (
                "groups count each example once, and stream.past = 'kept' shows it in each task; "
                "set method.groups = 0"
            )
        return no_linear_head(world)

    def network(self, spec: ModelSpec) -> ModelSpec:
        """The network with the random layer under its head."""
        return lifted_spec(spec, self.width)

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        if stage.name == SUM_UP:
            return Payload(body=self._body(state))
        if world.stream.task(stage.round) > 0:
            return None  # the network is frozen
        return Payload(params=state.params)

    def work(self, stage: Stage) -> ClientWork:
        if stage.name != SUM_UP:
            return super().work(stage)
        if self.groups:
            return SendGroups(stage, self)
        return SendTaskSums(stage.round, self)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name != SUM_UP:
            return super().expected_reply(client, stage, world)
        spec = self.network(world.model(client))
        if self.groups:
            return empty_group_sums(spec, world.classes, self.groups)
        return empty_sums(spec, world.classes)

    def refuses(self, reply: Reply, stage: Stage) -> str:
        return count_problem(reply, "counts", reply.examples)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name != SUM_UP:
            return super().aggregate(state, replies, stage, world)
        spec = self.network(world.model(SERVER))
        total = state.extra
        if "gram" not in total:
            total = empty_sums(spec, world.classes)
        contents = [reply.content for reply in replies]
        if self.groups:
            contents = [self._estimated(replies)]
        sums = added_sums(total, contents)

        layer = self.layer(sums["gram"], sums["cross"])
        head = {name: value.to(dtype_of(state.params)) for name, value in layer.items()}
        solved_state = state.next(params={**self._body(state), **head}, groups=sums)
        if not self.width:
            return solved_state
        return replace(solved_state, model=spec)

    def layer(self, gram: Tensor, cross: Tensor) -> dict[str, Tensor]:
        """The last layer that solves the sums, ``head.weight`` (C, M) and ``head.bias`` (C,)."""
        if self.groups:
            gram = without_negative(gram)  # an estimate may have negative eigenvalues
        exact = solved(gram, cross, ridge=self.ridge)
        if not self.cosine:
            return exact
        columns = torch.cat([exact["head.weight"], exact["head.bias"].unsqueeze(1)], dim=1)
        unit = normalize(columns, dim=1)
        return {"head.weight": unit[:, :-1].contiguous(), "head.bias": unit[:, -1].clone()}

    def _estimated(self, replies: Sequence[Reply]) -> Payload:
        """The estimates of gram and cross for a task, from all clients' groups."""
        sums = torch.cat([reply.content.tensor("sums") for reply in replies])
        counts = torch.cat([reply.content.tensor("counts") for reply in replies])
        return Payload(gram=estimated_gram(sums, counts), cross=sums.sum(0).T.contiguous())

    def _body(self, state: State) -> dict[str, Tensor]:
        """The entries of the frozen body, with their names in the network with the random layer."""
        if state.model:
            return lifted_body(state.params, 0)  # its entries have these names already
        return lifted_body(state.params, self.width)


@dataclass(frozen=True)
class SendTaskSums(SendChange):
    """The client sends the sums of the task's features under the frozen network."""

    method: Analytic

    def network(self, view: View) -> ModelSpec:
        return self.method.network(view.model)

    def features(self, payload: Payload, view: View, world: World) -> Tensor:
        return view.features(payload.tensors("body"), model=self.network(view))


@dataclass(frozen=True)
class SendGroups(ClientWork):
    """The client sends, once per task, the sums of the features of random groups of examples;
    nothing is trained.
    """

    stage: Stage
    method: Analytic

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        spec = self.method.network(view.model)
        task = world.stream.task(self.stage.round, view.client)
        sums = empty_group_sums(spec, world.classes, self.method.groups)
        if not client_state or client_state.number("task") != task:
            sums = self.group_sums(view.features(payload.tensors("body"), model=spec), view, world)
        return TrainingStart(params={}, constants={"sums": sums, "task": task})

    def group_sums(self, features: Tensor, view: View, world: World) -> Payload:
        """The sums of features (n, D) by random groups of the client's examples."""
        task = world.stream.task(self.stage.round, view.client)
        draw = generator(seed_for(world.seed, task, 0, view.client, "groups"))
        groups = self.method.groups
        group_of = torch.randperm(len(features), generator=draw) % groups
        return group_sums(features, view.data.labels.cpu(), world.classes, group_of, groups)

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return start["sums"], Payload(task=start["task"])


def without_negative(gram: Tensor) -> Tensor:
    """A symmetric matrix with its negative eigenvalues set to 0."""
    values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    cut: Tensor = (vectors * values.clamp(min=0)) @ vectors.T
    return cut
