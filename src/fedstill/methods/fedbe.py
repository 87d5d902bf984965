"""FedBE: the server samples models from a distribution around the clients' models, and distils the
mean prediction of all models into the average model.

Source: Chen & Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning"
(2021), and its code; the averaged weights and their learning rate are those of Izmailov et al.,
"Averaging Weights Leads to Wider Optima" (2018).
Symbols: M = ``samples``; alpha of the Dirichlet distribution = ``concentration``.
State: the global parameters; model.N = the model that client N sent in this round, until the server
has distilled; sizes = the weights of these clients, until then.
Memory: nothing.
Reading: the mean of the Gaussian is the average model, and its variance is that of the clients'
entries around it, with the clients' weights in the average. The code normalises each tensor of the
changes, and multiplies deviations by 0.1 (``spread``).
Reading: a model drawn from the Dirichlet distribution is the mean of the clients' models with the
drawn shares, as in the code.
Reading: buffers are not sampled: sampled models have the buffers of the average. With averaged
weights, buffers are those of the last step; the code recomputes the statistics of batch
normalisation.
Reading: the code raises the mean prediction to the power of 1/0.5 (``temperature`` 0.5). Here it is
not sharpened: on digits, with few classes for each client, sharpened predictions were worse on each
of three seeds (docs/results/methods.md).
Reading: the code averages the divergence over classes, too, so that its steps are C times shorter.
Here it is summed over classes, as in the other methods.
Reading: the code averages every 25 steps, starting at step 500 of about 1,600, with a constant
learning rate. Here the rate falls linearly from 0.001 to 0.0004 in each cycle of 25 steps; ``low``
= 1 makes it constant. The last step is averaged, too.
Reading: the paper's clients train for 20 epochs in batches of 40. Here they train as in the other
methods' tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedstill.core.fields import Count, CountOrZero, NonNegative, Positive, PositiveShare, Share
from fedstill.core.keys import generator, numpy_generator, seed_for
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
    many,
)
from fedstill.core.registry import method
from fedstill.core.trees import dtype_of, mean, scale, zeros_like
from fedstill.losses import kd
from fedstill.methods.fedavg import FEDNTD_PLAN
from fedstill.methods.feddf import TEACH_SERVER, FedDF, Fused
from fedstill.models.contract import joins_last_example, trainable_entries


@method("fedbe")
@dataclass(frozen=True)
class FedBE(FedDF):
    """FedDF whose ensemble also contains the average and sampled models; the server averages its
    weights during distillation.
    """

    plans: ClassVar[Mapping[str, Plan]] = {
        "train": FEDNTD_PLAN,
        TEACH_SERVER: Plan(epochs=20, batch=128, lr=0.001, momentum=0.9, weight_decay=1e-5),
    }

    temperature: Positive = 1.0
    """Temperature of the ensemble's mean prediction; values below 1 sharpen it."""
    distribution: Literal["gaussian", "dirichlet"] = "gaussian"
    """Distribution of sampled models: entries around the average, or means of the clients' models
    with random shares.
    """
    samples: CountOrZero = 10
    """Number of sampled models (M)."""
    spread: NonNegative = 0.1
    """Factor by which the standard deviations of the Gaussian are multiplied."""
    concentration: Positive = 1.0
    """Concentration of the Dirichlet distribution of the shares (alpha)."""
    cycle: Count = 25
    """Number of steps in a cycle of the learning rate; weights are averaged at its end."""
    low: PositiveShare = 0.4
    """Share of the learning rate that remains at the end of a cycle."""
    after: Share = 0.3
    """Share of the server's steps before the first cycle."""

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        payload = super().payload_for_client(state, client, stage, world)
        if not payload.many("model"):
            return payload
        # The further models have the ids after those of clients.
        further = [state.params, *self.drawn(state, stage, world)]
        return Payload({**payload, **many("model", dict(enumerate(further, world.clients)))})

    def drawn(self, state: State, stage: Stage, world: World) -> list[Tensors]:
        """The models sampled from the distribution around the clients' models."""
        models = list(state.extra.many("model").values())
        seed = seed_for(world.seed, stage.round, stage.index, SERVER, "models")
        if self.distribution == "dirichlet":
            concentrations = [self.concentration] * len(models)
            shares = numpy_generator(seed).dirichlet(concentrations, self.samples)
            return [mean(models, row) for row in shares.tolist()]

        center = trainable_entries(world.model(SERVER), state.params)
        squares = [{k: (m[k] - w).square() for k, w in center.items()} for m in models]
        variances = mean(squares, state.extra.tensor("sizes").tolist())
        deviations = {k: v.sqrt() * self.spread for k, v in variances.items()}
        draw = generator(seed)
        return [
            {**state.params, **gaussian_sample(center, deviations, draw)}
            for _ in range(self.samples)
        ]

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == TEACH_SERVER:
            return FusedAndAveraged(self.temperature, self)
        return ClientWork()

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        averaged = super().aggregate(state, replies, stage, world)
        if stage.name == TEACH_SERVER:
            return averaged.without("sizes")
        sizes = torch.tensor([float(reply.examples) for reply in replies])
        if self.aggregation == "uniform" or not sizes.sum() > 0:
            sizes = torch.ones_like(sizes)
        return averaged.next(sizes=sizes)


def gaussian_sample(
    center: Tensors, deviations: Tensors, draw: torch.Generator
) -> dict[str, Tensor]:
    """Entries drawn from a normal distribution around ``center``, with a standard deviation for
    each entry.
    """
    noise = {k: torch.randn(v.shape, dtype=v.dtype, generator=draw) for k, v in deviations.items()}
    return {k: center[k] + deviations[k] * n for k, n in noise.items()}


@dataclass(frozen=True)
class FusedAndAveraged(Fused):
    """The divergence from the ensemble's mean prediction; the reply has the mean of the weights
    during training.
    """

    method: FedBE

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        plan = world.plans[TEACH_SERVER]
        joined = joins_last_example(view.model, plan, len(view.data))
        steps = plan.steps or plan.epochs * plan.batches_per_epoch(len(view.data), joined)

        zero = torch.zeros((), dtype=dtype_of(payload.params))
        trained = zeros_like(trainable_entries(view.model, payload.params))
        sums = {f"sum.{name}": zeros for name, zeros in trained.items()}
        return replace(
            super().begin(payload, client_state, view, world),
            trace={"steps": zero, "models": zero, **sums},
            constants={"steps": steps, "first": int(self.method.after * steps)},
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        logits = torch.stack([step.teacher(name) for name in start.teachers])  # (M, B, C)
        mean = logits.log_softmax(-1).logsumexp(0)  # (B, C), up to a constant
        return {"ensemble": kd(step.logits(), mean / self.temperature)}

    def after_step(
        self, before: Tensors, grads: Tensors, after: Tensors, trace: Tensors, start: TrainingStart
    ) -> tuple[Tensors, Tensors]:
        m = self.method
        steps = trace["steps"] + 1
        in_cycle = steps > start["first"]
        position = (steps - start["first"] - 1) % m.cycle + 1  # from 1 to the cycle's length

        # The optimiser has a constant learning rate: scaling the step is a falling rate.
        rate = torch.where(in_cycle, 1 - (1 - m.low) * position / m.cycle, 1.0)
        moved = {k: before[k] + rate * (after[k] - before[k]) for k in after}

        cycle_ends = in_cycle & (position == m.cycle)
        averaged = (cycle_ends | (steps == start["steps"])).to(steps.dtype)
        sums = {f"sum.{k}": trace[f"sum.{k}"] + averaged * moved[k] for k in moved}
        return moved, {"steps": steps, "models": trace["models"] + averaged, **sums}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        sums = {k.removeprefix("sum."): v for k, v in result.trace.items() if k.startswith("sum.")}
        models = float(result.trace["models"])
        if not models:
            return Payload(params=params), Payload()
        return Payload(params={**params, **scale(sums, 1 / models)}), Payload()
