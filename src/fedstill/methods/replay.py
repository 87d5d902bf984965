"""Replay: clients keep a few of their examples of each task, and train on these, too, in the tasks
that follow.

Source: Buzzega et al., "Dark Experience for General Continual Learning" (2020), DER++, and its form
of experience replay; Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning"
(2017), for ``choose`` and ``nearest_mean``.
Symbols: m = ``size``; alpha = ``alpha``, beta = ``beta``; n = the client's own examples, N = these
and the kept ones.
Stages: ``train``; after each task ``remember``, of all clients that are there: nothing is trained.
State: the global parameters; means = the mean of each class's features at length 1, (C, D); known =
which classes have one, (C,), where ``nearest_mean`` is set.
Memory: values, labels, tasks, places, keys = of each kept example what it is, its label, its task,
its place among the client's examples of that, and its key; logits = the model's logits of it at its
task's end, where ``alpha`` is set.
Reading: an example's key is drawn by client, task and place. Those with the lowest keys of all so
far are kept: an even sample of the past, whatever the order and the rounds. DER++'s reservoir takes
an example again in each epoch, and holds the current task; this one does neither.
Reading: with ``beta`` or ``alpha`` the objective is the mean over the client's own examples, and
beta and alpha times those over the kept ones, as in DER++. Each batch is drawn from both together;
DER++'s draws a batch from each.
Reading: kept examples take part with the outputs of all classes seen so far, where ``stream.head``
is "task", too.
Reading: what the released codes of TARGET and LANDER call iCaRL has no chosen examples, no class
means and no memory: each round draws 300 anew from all data that the client ever had. Not followed.
Reading: the mean of a class of which nobody keeps an example is that of its own task's end, under
the model of then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedstill.core.capabilities import Need, Permit
from fedstill.core.fields import CountOrZero, NonNegative
from fedstill.core.keys import generator, seed_for
from fedstill.core.labels import means_by_class
from fedstill.core.method import ClientWork
from fedstill.core.payload import NOTHING, Payload
from fedstill.core.records import (
    KEEP,
    OFF,
    RULED_OUT,
    SERVER,
    Examples,
    Keep,
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
from fedstill.methods.class_values import mean_by_class
from fedstill.methods.fedavg import FEDNTD_PLAN, FedAvg
from fedstill.methods.ridge import NO_TRAINING, no_linear_head
from fedstill.models.contract import predictor, width

# What a client keeps of its examples for later tasks: which of them, merged task by task, and what
# it holds by then.
#
# Of two groups of examples the same are kept, whether they come together or one after the other:
# nothing depends on rounds, so a run that was killed goes on to the same.


def lowest(keys: Tensor, labels: Tensor, size: int, by_class: bool = False) -> Tensor:
    """Which ``size`` examples are kept: those with the lowest keys, as ascending positions.

    keys: (n,) float64; labels: (n,) int64. ``by_class``: of each class there is equally many, as
    far as it has them; where that leaves a rest, the first classes get one more.

    >>> lowest(torch.tensor([0.3, 0.1, 0.2, 0.9]), torch.tensor([0, 0, 0, 1]), 2).tolist()
    [1, 2]
    >>> lowest(
    ...     torch.tensor([0.3, 0.1, 0.2, 0.9]), torch.tensor([0, 0, 0, 1]), 2, by_class=True
    ... ).tolist()
    [1, 3]
    """
    if not by_class:
        return keys.argsort(stable=True)[:size].sort().values
    classes, picked = sorted(set(labels.tolist())), [torch.zeros(0, dtype=torch.int64)]
    for i, c in enumerate(classes):
        own = (labels == c).nonzero().flatten()
        quota = size // len(classes) + (i < size % len(classes))
        picked.append(own[keys[own].argsort(stable=True)[:quota]])
    return torch.cat(picked).sort().values


def herded(features: Tensor, labels: Tensor, size: int) -> Tensor:
    """Keys (n,) float64 by herding: an example's rank in its class, from 0; those beyond ``size``
    come last.

    features: (n, D), taken at length 1. Each next example brings the mean of those chosen nearest
    to the class's mean.

    Source: Rebuffi et al., "iCaRL" (2017), Algorithm 4.

    >>> herded(
    ...     torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]]), torch.zeros(3, dtype=torch.int64), 2
    ... ).tolist()
    [3.0, 1.0, 0.0]
    """
    unit, keys = normalize(features.double(), dim=1), torch.zeros(len(labels), dtype=torch.float64)
    for c in sorted(set(labels.tolist())):
        own = (labels == c).nonzero().flatten()
        z = unit[own]
        ranks, total = torch.arange(len(own)).double() + len(own), torch.zeros_like(z[0])
        for k in range(min(size, len(own))):
            off = torch.linalg.vector_norm(z.mean(0) - (total + z) / (k + 1), dim=1)
            best = int(off.masked_fill(ranks < len(own), torch.inf).argmin())
            ranks[best], total = k, total + z[best]
        keys[own] = ranks
    return keys


def merged(before: Payload, now: Payload, size: int, by_class: bool) -> Payload:
    """What a client keeps after a task: of what it kept, and of that task's examples; ``now`` has
    the same groups.

    values, labels, tasks, places, keys: of each kept example what it is, its label, its task, its
    place among the client's examples of that, its key.
    """
    both = (
        Payload({g: torch.cat([before.tensor(g), now.tensor(g)]) for g in now}) if before else now
    )
    kept = lowest(both.tensor("keys"), both.tensor("labels"), size, by_class)
    return Payload({g: both.tensor(g)[kept] for g in both})


def of_other_tasks(client_state: Payload, task: int) -> Payload:
    """What a client keeps of all tasks but one, that it is in; nothing where that is no example."""
    other = client_state.tensor("tasks") != task if client_state else torch.zeros(0)
    return (
        Payload({g: client_state.tensor(g)[other] for g in client_state})
        if bool(other.any())
        else NOTHING
    )


def means_to_send(sets: Sequence[Examples], view: View, params: Tensors, classes: int) -> Payload:
    """means = of each class the mean (C, D) of its examples' features at length 1; counts = how
    many, (C,).
    """
    unit = [normalize(view.passes.features(params, e).cpu(), dim=1) for e in sets]
    means, counts = means_by_class(
        torch.cat(unit), torch.cat([e.labels.cpu() for e in sets]), classes
    )
    return Payload(means=means.to(dtype_of(params)), counts=counts)


def nearest_mean_head(means: Tensor, known: Tensor) -> dict[str, Tensor]:
    """A linear head that answers by the nearest mean (C, D), at length 1, of the classes that have
    one (C,).
    """
    bias = torch.where(known, 0.0, RULED_OUT).to(means.dtype)
    return {"head.weight": normalize(means, dim=1), "head.bias": bias}


REMEMBER = "remember"


@method("replay")
@dataclass(frozen=True)
class Replay(FedAvg):
    """FedAvg whose clients train again on a few kept examples of earlier tasks; needs [stream]."""

    schedule: ClassVar[Mapping[str, Any]] = {"task_end": REMEMBER}
    stages: ClassVar[frozenset[str]] = frozenset({"train", REMEMBER})
    # kept examples act in rounds that no noise was counted for
    permits: ClassVar[Permit] = Permit.NOTHING
    plans: ClassVar[Mapping[str, Plan]] = {"train": FEDNTD_PLAN, REMEMBER: NO_TRAINING}

    size: CountOrZero = 50
    """The most examples that a client keeps (m)."""
    choose: Literal["reservoir", "herding"] = "reservoir"
    """Which are kept: drawn evenly, or as many of each class, those whose features come nearest to
    its mean (iCaRL).
    """
    balance: Literal["none", "class"] = "none"
    """Whether as many of each class are kept."""
    beta: NonNegative | None = None
    """Weight of the cross-entropy over kept examples against that over the client's own; unset: all
    examples alike.
    """
    alpha: NonNegative = 0.0
    """Weight of the squared distance to the logits that kept examples had at their task's end
    (DER++: 0.5 each).
    """
    nearest_mean: bool = False
    """Whether the model that answers by the nearest class mean is made and tested as well."""
    answers: Literal["network", "nearest_mean"] = "network"
    """Whose accuracy the run's numbers are, from the first task's end on; ``nearest_mean`` makes
    that model, too.
    """

    @property
    def by_means(self) -> bool:
        """Whether class means are sent, and a model is made that answers by the nearest."""
        return self.nearest_mean or self.answers == "nearest_mean"

    @property
    def reads_model(self) -> bool:
        """Whether clients need the model to remember."""
        return self.by_means or (self.size > 0 and (self.alpha > 0 or self.choose == "herding"))

    def requires(self) -> Need:
        if self.by_means:
            return self.needs | Need.HEAD | Need.FEATURES
        if self.choose == "herding":
            return self.needs | Need.FEATURES
        return self.needs

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        shares = [world.plans[name].validation for name in ("train", REMEMBER)]
        if shares[0] != shares[1]:
            return (
                f"examples held out of training must not be kept; set validation = {shares[0]} in "
                f"[plan.{REMEMBER}]"
            )
        return no_linear_head(world) if self.by_means else ""

    def setting_warnings(self, world: World) -> str:
        return world.stream.nothing_before

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        if stage.name != REMEMBER:
            return Payload(params=state.params)
        if not self.by_means and not self.remembers(stage, world):
            return None
        return Payload(params=state.params) if self.reads_model else Payload()

    def remembers(self, stage: Stage, world: World) -> bool:
        """Whether clients keep examples of a stage's task: there is a later one, in which these
        would be gone.
        """
        stream = world.stream
        return self.size > 0 and not stream.kept and stream.task(stage.round) < stream.tasks - 1

    def work(self, stage: Stage) -> ClientWork:
        return Remember(self, stage) if stage.name == REMEMBER else Rehearse(self, stage.round)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name != REMEMBER:
            return super().expected_reply(client, stage, world)
        if not self.by_means:
            return Payload()
        like = torch.zeros(
            world.classes, width(world.model(client)), dtype=dtype_of(world.initial(client))
        )
        return Payload(means=like, counts=torch.zeros(world.classes, dtype=torch.int64))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name != REMEMBER:
            return super().aggregate(state, replies, stage, world)
        if not self.by_means:
            return state
        blank = torch.zeros_like(replies[0].content.tensor("means"))
        before = state.extra.get("means", blank), state.extra.get("known", blank[:, 0] > 0)
        means, known = mean_by_class(replies, before[0])
        return state.next(means=means, known=known | before[1])

    def predictors(self, state: State, world: World) -> dict[str, Callable[[Tensor], Tensor]]:
        """The global model; and, once there are class means, the same with these as its last
        layer.
        """
        named = super().predictors(state, world)
        if "means" in state.extra:
            last = nearest_mean_head(state.extra.tensor("means"), state.extra.tensor("known"))
            means = {"nearest_mean": predictor(world.model(SERVER), {**state.params, **last})}
            return means | named if self.answers == "nearest_mean" else named | means
        return named


@dataclass(frozen=True)
class Rehearse(ClientWork):
    """Local training on the client's own examples and on those that it keeps of other tasks."""

    method: Replay
    round: int

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        m, stream = self.method, world.stream
        kept = of_other_tasks(client_state, stream.task(self.round, view.client))
        if not kept or stream.kept or not m.size:
            return TrainingStart(params=payload.params)
        kept_examples = Examples(kept.tensor("values"), kept.tensor("labels"))
        own = len(view.data)
        constants: dict[str, Any] = {"own": own}
        if stream.head == "task":
            constants["seen"] = self.seen(view, world)
        if m.beta is not None or m.alpha:
            both = own + len(kept_examples)
            constants |= {"per_own": both / max(own, 1), "per_kept": both / len(kept_examples)}
        if m.alpha:
            blank = torch.zeros(
                m.size - len(kept_examples), world.classes, dtype=kept.tensor("logits").dtype
            )
            constants |= {
                "logits": torch.cat([kept.tensor("logits"), blank]),
                "columns": self.seen(view, world),
            }
        return TrainingStart(
            params=payload.params, examples=view.data + kept_examples, constants=constants
        )

    def seen(self, view: View, world: World) -> Tensor:
        """The outputs with which kept examples take part, (C,) bool: those of the classes seen so
        far.
        """
        seen, stream = torch.zeros(world.classes, dtype=torch.bool), world.stream
        own = stream.seen(stream.task(self.round, view.client))
        seen[list(own if stream.head != "all" else range(world.classes))] = True
        return seen

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        known, m = start.constants, self.method
        if "own" not in known:
            return super().terms(step, start)
        again, logits = step.index >= known["own"], step.logits()  # (B,), (B, C)
        if "seen" in known:
            of_kept = torch.where(known["seen"], step.logits(raw=True), OFF)
            logits = torch.where(again.unsqueeze(1), of_kept, logits)
        ce = step.weighted(cross_entropy(logits, step.y))
        if "per_own" not in known:
            return {"ce": ce}
        beta = known["per_kept"] * m.beta if m.beta is not None else 1.0
        weighed = torch.where(
            again, beta * ce, (known["per_own"] if m.beta is not None else 1.0) * ce
        )
        if not m.alpha:
            return {"ce": weighed}
        stored = known["logits"][(step.index - known["own"]).clamp(min=0)]
        columns = known["columns"].to(ce.dtype)
        apart = ((step.logits(raw=True) - stored).square() * columns).sum(1) / columns.sum()
        return {"ce": weighed, "logits": m.alpha * known["per_kept"] * again * apart}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload | Keep]:
        return Payload(params=params), KEEP


@dataclass(frozen=True)
class Remember(ClientWork):
    """Keep examples of the task that ends; and send class means, where they are asked for."""

    method: Replay
    stage: Stage

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        m, task = self.method, world.stream.task(self.stage.round, view.client)
        others = of_other_tasks(client_state, task)
        keeps = m.remembers(self.stage, world)
        now = (
            merged(others, self.now(task, payload, view, world), m.size, self.by_class)
            if keeps
            else client_state
        )
        up = Payload()
        if m.by_means:
            kept = [Examples(others.tensor("values"), others.tensor("labels"))] if others else []
            up = means_to_send([view.data, *kept], view, payload.params, world.classes)
        return TrainingStart(params={}, constants={"up": up, "memory": now})

    @property
    def by_class(self) -> bool:
        """Whether as many of each class are kept."""
        return self.method.balance == "class" or self.method.choose == "herding"

    def now(self, task: int, payload: Payload, view: View, world: World) -> Payload:
        """The client's examples of its task, as a memory holds them."""
        m, data = self.method, view.data.to("cpu")
        if m.choose == "herding":
            keys = herded(view.features(payload.params), data.labels, m.size)
        else:
            draw = generator(seed_for(world.seed, task, 0, view.client, "reservoir"))
            keys = torch.rand(len(data), generator=draw, dtype=torch.float64)
        logits = {"logits": view.logits(payload.params)} if m.alpha else {}
        of = {
            "tasks": torch.full((len(data),), task),
            "places": torch.arange(len(data)),
            "keys": keys,
        }
        return Payload(values=data.values, labels=data.labels, **of, **logits)

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return start["up"], start["memory"]

    def report(
        self, params: Tensors, start: TrainingStart, view: View, world: World
    ) -> dict[str, Any]:
        """``kept``: how many examples the client keeps by now, of all tasks."""
        return {"kept": len(start["memory"].tensor("labels")) if start["memory"] else 0}
