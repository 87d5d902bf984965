"""Replay: clients store a few examples of each task, and also train on these in later tasks.

Source: Buzzega et al., "Dark Experience for General Continual Learning" (2020), DER++, and its form
of experience replay; Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning"
(2017), for ``choose`` and ``nearest_mean``.
Symbols: m = ``size``; alpha = ``alpha``, beta = ``beta``; n = the client's own examples, N = these
and the kept ones.
Stages: ``train``; after each task ``remember``, of all available clients, without training.
State: the global parameters; means = with ``nearest_mean``, the mean of each class's normalised
features, (C, D); known = with ``nearest_mean``, whether a class has a mean, (C,).
Memory: values, labels, tasks, places, keys = of each stored example, its values, its label, its
task, its position among the client's examples of the task, and its key; logits = with ``alpha``,
the model's logits for it at the end of its task.
Reading: an example's key is drawn by client, task and position. A client keeps the examples with
the lowest keys so far, which are a uniform sample of the past, independent of the order and the
number of rounds. DER++'s reservoir considers an example again in each epoch, and also contains the
current task. This memory does neither.
Reading: with ``beta`` or ``alpha``, the objective is the mean over the client's own examples, plus
beta and alpha times the means over the kept ones, as in DER++. Each batch is drawn from the union
of both; DER++ draws a batch from each.
Reading: the loss of kept examples is over the outputs of all classes so far, even if
``stream.head`` is "task".
Reading: the released codes of TARGET and LANDER have a method called iCaRL without chosen examples,
class means or memory: in each round, it draws 300 new examples from all data that the client ever
had. We do not follow this.
Reading: if no client stores an example of a class, its mean remains that of the end of its task,
with the model at that time.
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
from fedstill.core.label_counts import count_problem, means_by_class
from fedstill.core.method import ClientWork
from fedstill.core.payload import NOTHING, Payload
from fedstill.core.records import (
    KEEP,
    NO_TRAINING,
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
from fedstill.methods.ridge import no_linear_head
from fedstill.models.contract import width
from fedstill.models.predictors import predictor

# The client's memory of examples: which examples it keeps, and how it merges them task by task.
#
# The choice does not depend on whether two groups of examples come together or one after the other.
# So it does not depend on rounds, and a resumed run makes the same choice.


def lowest(keys: Tensor, labels: Tensor, size: int, by_class: bool = False) -> Tensor:
    """The positions of the ``size`` examples with the lowest keys, ascending.

    keys: (n,) float64; labels: (n,) int64. ``by_class``: equally many examples of each class, as
    far as possible; the first classes get the remaining ones.

    >>> lowest(torch.tensor([0.3, 0.1, 0.2, 0.9]), torch.tensor([0, 0, 0, 1]), 2).tolist()
    [1, 2]
    >>> lowest(
    ...     torch.tensor([0.3, 0.1, 0.2, 0.9]), torch.tensor([0, 0, 0, 1]), 2, by_class=True
    ... ).tolist()
    [1, 3]
    """
    if not by_class:
        return keys.argsort(stable=True)[:size].sort().values
    classes = sorted(set(labels.tolist()))
    picked = [torch.zeros(0, dtype=torch.int64)]
    for i, c in enumerate(classes):
        of_class = (labels == c).nonzero().flatten()
        quota = size // len(classes) + (i < size % len(classes))
        picked.append(of_class[keys[of_class].argsort(stable=True)[:quota]])
    return torch.cat(picked).sort().values


def herded(features: Tensor, labels: Tensor, size: int) -> Tensor:
    """Keys (n,) float64 by herding: an example's rank in its class, from 0; examples beyond
    ``size`` come last.

    features: (n, D), normalised to length 1. Examples are chosen one by one; each choice brings the
    mean of the chosen examples as near as possible to the class mean.

    Source: Rebuffi et al., "iCaRL" (2017), Algorithm 4.

    >>> herded(
    ...     torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]]), torch.zeros(3, dtype=torch.int64), 2
    ... ).tolist()
    [3.0, 1.0, 0.0]
    """
    unit = normalize(features.double(), dim=1)
    keys = torch.zeros(len(labels), dtype=torch.float64)
    for c in sorted(set(labels.tolist())):
        of_class = (labels == c).nonzero().flatten()
        keys[of_class] = herding_ranks(unit[of_class], size)
    return keys


def herding_ranks(z: Tensor, size: int) -> Tensor:
    """The ranks (m,) by herding of the features (m, D) of one class."""
    examples = len(z)
    ranks = torch.arange(examples).double() + examples  # behind all chosen examples
    total = torch.zeros_like(z[0])
    for k in range(min(size, examples)):
        distances = torch.linalg.vector_norm(z.mean(0) - (total + z) / (k + 1), dim=1)
        best = int(distances.masked_fill(ranks < examples, torch.inf).argmin())
        ranks[best] = k
        total = total + z[best]
    return ranks


def merged(memory: Payload, examples: Payload, size: int, by_class: bool) -> Payload:
    """The memory after a task, selected from the previous memory and the task's examples, which
    have the same groups.

    Each stored example has its values, label, task, place (its position among the client's examples
    of the task) and key.
    """
    union = examples
    if memory:
        groups = {g: torch.cat([memory.tensor(g), examples.tensor(g)]) for g in examples}
        union = Payload(groups)
    positions = lowest(union.tensor("keys"), union.tensor("labels"), size, by_class)
    return Payload({group: union.tensor(group)[positions] for group in union})


def of_other_tasks(memory: Payload, task: int) -> Payload:
    """The part of a memory that belongs to other tasks than the given one; may be empty."""
    if not memory:
        return NOTHING
    in_other_task = memory.tensor("tasks") != task
    if not bool(in_other_task.any()):
        return NOTHING
    return Payload({group: memory.tensor(group)[in_other_task] for group in memory})


def means_to_send(sets: Sequence[Examples], view: View, params: Tensors, classes: int) -> Payload:
    """The groups ``means``, the means (C, D) of normalised features by class, and ``counts``, the
    numbers of examples (C,).
    """
    unit = [normalize(view.passes.features(params, e).cpu(), dim=1) for e in sets]
    labels = torch.cat([examples.labels.cpu() for examples in sets])
    means, counts = means_by_class(torch.cat(unit), labels, classes)
    return Payload(means=means.to(dtype_of(params)), counts=counts)


def nearest_mean_head(means: Tensor, has_mean: Tensor) -> dict[str, Tensor]:
    """A linear head that predicts the class of the nearest normalised mean (C, D), among the
    classes with a mean (C,).
    """
    bias = torch.where(has_mean, 0.0, RULED_OUT).to(means.dtype)
    return {"head.weight": normalize(means, dim=1), "head.bias": bias}


REMEMBER = "remember"
"""The stage after a task, in which clients choose the examples that they keep."""


@method("replay")
@dataclass(frozen=True)
class Replay(FedAvg):
    """FedAvg whose clients also train on a few stored examples of earlier tasks; needs [stream]."""

    schedule: ClassVar[Mapping[str, Any]] = {"task_end": REMEMBER}
    stages: ClassVar[frozenset[str]] = frozenset({"train", REMEMBER})
    # kept examples act in rounds that no noise was counted for
    permits: ClassVar[Permit] = Permit.NOTHING
    plans: ClassVar[Mapping[str, Plan]] = {"train": FEDNTD_PLAN, REMEMBER: NO_TRAINING}

    size: CountOrZero = 50
    """Largest number of examples that a client stores (m)."""
    choose: Literal["reservoir", "herding"] = "reservoir"
    """Which are kept: drawn evenly, or as many of each class, those whose features come nearest to
    its mean (iCaRL).
    """
    balance: Literal["none", "class"] = "none"
    """Whether the same number of examples is stored for each class."""
    beta: NonNegative | None = None
    """Weight of the cross-entropy of stored examples relative to that of the client's data; unset:
    all examples count equally.
    """
    alpha: NonNegative = 0.0
    """Weight of the squared distance to the logits of stored examples at the end of their task
    (DER++: 0.5 each).
    """
    nearest_mean: bool = False
    """Whether a nearest-class-mean classifier is also created and tested."""
    answers: Literal["network", "nearest_mean"] = "network"
    """Whose accuracy the run's numbers are, from the first task's end on; ``nearest_mean`` makes
    that model, too.
    """

    @property
    def by_means(self) -> bool:
        """Whether class means are sent, and a nearest-class-mean classifier is created."""
        return self.nearest_mean or self.answers == "nearest_mean"

    @property
    def reads_model(self) -> bool:
        """Whether clients need the model to select examples."""
        return self.by_means or (self.size > 0 and (self.alpha > 0 or self.choose == "herding"))

    def requires(self) -> Need:
        if self.by_means:
            return self.needs | Need.HEAD | Need.FEATURES
        if self.choose == "herding":
            return self.needs | Need.FEATURES
        return self.needs

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        validation = world.plans["train"].validation
        if world.plans[REMEMBER].validation != validation:
            return (
                f"examples held out of training must not be kept; set validation = {validation} in "
                f"[plan.{REMEMBER}]"
            )
        if not self.by_means:
            return ""
        return no_linear_head(world)

    def setting_warnings(self, world: World) -> str:
        return world.stream.nothing_before

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        if stage.name != REMEMBER:
            return Payload(params=state.params)
        if not self.by_means and not self.remembers(stage, world):
            return None
        if not self.reads_model:
            return Payload()
        return Payload(params=state.params)

    def remembers(self, stage: Stage, world: World) -> bool:
        """Whether clients store examples of a stage's task: there must be a later task without
        these examples.
        """
        stream = world.stream
        return (
            self.size > 0 and not stream.keeps_data and stream.task(stage.round) < stream.tasks - 1
        )

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == REMEMBER:
            return Remember(self, stage)
        return Rehearse(self, stage.round)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name != REMEMBER:
            return super().expected_reply(client, stage, world)
        if not self.by_means:
            return Payload()
        dtype = dtype_of(world.initial(client))
        means = torch.zeros(world.classes, width(world.model(client)), dtype=dtype)
        return Payload(means=means, counts=torch.zeros(world.classes, dtype=torch.int64))

    def refuses(self, reply: Reply, stage: Stage) -> str:
        # A client counts the examples that it keeps of earlier tasks, too.
        return count_problem(reply, "counts", reply.examples + self.size)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name != REMEMBER:
            return super().aggregate(state, replies, stage, world)
        if not self.by_means:
            return state
        zeros = torch.zeros_like(replies[0].content.tensor("means"))  # (C, D)
        had_mean = state.extra.get("known", zeros[:, 0] > 0)  # (C,)
        means, has_mean = mean_by_class(replies, state.extra.get("means", zeros))
        return state.next(means=means, known=has_mean | had_mean)

    def predictors(self, state: State, world: World) -> dict[str, Callable[[Tensor], Tensor]]:
        """The global model and, once there are class means, the same model with these as its last
        layer.
        """
        predictors = super().predictors(state, world)
        if "means" not in state.extra:
            return predictors
        head = nearest_mean_head(state.extra.tensor("means"), state.extra.tensor("known"))
        nearest_mean = predictor(world.model(SERVER), {**state.params, **head})
        if self.answers == "nearest_mean":  # the first one is the run's
            return {"nearest_mean": nearest_mean, **predictors}
        return {**predictors, "nearest_mean": nearest_mean}


@dataclass(frozen=True)
class Rehearse(ClientWork):
    """Local training on the client's own examples and on its stored examples of other tasks."""

    method: Replay
    round: int

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        m = self.method
        stream = world.stream
        memory = of_other_tasks(client_state, stream.task(self.round, view.client))
        if not memory or stream.keeps_data or not m.size:
            return TrainingStart(params=payload.params)

        kept = Examples(memory.tensor("values"), memory.tensor("labels"))
        new = len(view.data)
        # Training is on both together; kept examples come after the client's new ones.
        constants: dict[str, Any] = {"new": new}
        if stream.head == "task":
            constants["outputs"] = self.outputs(view, world)
        if m.beta is not None or m.alpha:
            # Factors that make a mean over all examples one over the new or the kept ones.
            total = new + len(kept)
            constants["new_factor"] = total / max(new, 1)
            constants["kept_factor"] = total / len(kept)
        if m.alpha:
            logits = memory.tensor("logits")
            # Clients of a stack keep different numbers of examples: all have as many rows.
            padding = torch.zeros(m.size - len(kept), world.classes, dtype=logits.dtype)
            constants["logits"] = torch.cat([logits, padding])
            constants["stored_outputs"] = self.outputs(view, world)
        return TrainingStart(params=payload.params, examples=view.data + kept, constants=constants)

    def outputs(self, view: View, world: World) -> Tensor:
        """The outputs that are used for stored examples, (C,) bool: the classes up to the client's
        task.
        """
        stream = world.stream
        if stream.head == "all":
            return torch.ones(world.classes, dtype=torch.bool)
        outputs = torch.zeros(world.classes, dtype=torch.bool)
        outputs[list(stream.seen(stream.task(self.round, view.client)))] = True
        return outputs

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        if "new" not in start.constants:
            return super().terms(step, start)
        m = self.method
        is_kept = step.index >= start["new"]  # (B,)
        losses = step.weighted(cross_entropy(self.logits(step, is_kept, start), step.y))
        if m.beta is not None:
            kept_losses = start["kept_factor"] * m.beta * losses
            losses = torch.where(is_kept, kept_losses, start["new_factor"] * losses)
        if not m.alpha:
            return {"ce": losses}

        stored = start["logits"][(step.index - start["new"]).clamp(min=0)]  # (B, C)
        outputs = start["stored_outputs"].to(losses.dtype)  # (C,)
        squares = (step.logits(raw=True) - stored).square() * outputs
        error = squares.sum(1) / outputs.sum()  # (B,)
        return {"ce": losses, "logits": m.alpha * start["kept_factor"] * is_kept * error}

    def logits(self, step: Step, is_kept: Tensor, start: TrainingStart) -> Tensor:
        """The logits (B, C); stored examples use more outputs if each task has its own outputs."""
        if "outputs" not in start.constants:
            return step.logits()
        of_kept = torch.where(start["outputs"], step.logits(raw=True), OFF)
        return torch.where(is_kept.unsqueeze(1), of_kept, step.logits())

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
    """The client stores examples of the ending task; it sends class means if they are used."""

    method: Replay
    stage: Stage

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        m = self.method
        task = world.stream.task(self.stage.round, view.client)
        previous = of_other_tasks(client_state, task)
        memory = client_state
        if m.remembers(self.stage, world):
            examples = self.examples(task, payload, view, world)
            memory = merged(previous, examples, m.size, self.by_class)

        content = Payload()
        if m.by_means:
            sets = [view.data]
            if previous:
                sets.append(Examples(previous.tensor("values"), previous.tensor("labels")))
            content = means_to_send(sets, view, payload.params, world.classes)
        return TrainingStart(params={}, constants={"content": content, "memory": memory})

    @property
    def by_class(self) -> bool:
        """Whether the same number of examples is stored for each class."""
        return self.method.balance == "class" or self.method.choose == "herding"

    def examples(self, task: int, payload: Payload, view: View, world: World) -> Payload:
        """The client's examples of its task, in the form of a memory."""
        m = self.method
        data = view.data.to("cpu")
        if m.choose == "herding":
            keys = herded(view.features(payload.params), data.labels, m.size)
        else:
            draw = generator(seed_for(world.seed, task, 0, view.client, "reservoir"))
            keys = torch.rand(len(data), generator=draw, dtype=torch.float64)
        memory = Payload(
            values=data.values,
            labels=data.labels,
            tasks=torch.full((len(data),), task),
            places=torch.arange(len(data)),
            keys=keys,
        )
        if not m.alpha:
            return memory
        return Payload(memory, logits=view.logits(payload.params))

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return start["content"], start["memory"]

    def report(
        self, params: Tensors, start: TrainingStart, view: View, world: World
    ) -> dict[str, Any]:
        """``kept``: the number of examples of all tasks that the client stores."""
        if not start["memory"]:
            return {"kept": 0}
        return {"kept": len(start["memory"].tensor("labels"))}
