"""Federated learning written out plainly with torch.optim and autograd, for tests to compare the
library with.

Of the library only draws are used: the sampled clients, the order of examples, held-out examples
and initial weights. Both sides compute in float64 from the initial weights on, so that they differ
by the rounding of float64 alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import toys
from double import NEAR, in_double
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import Payload, State
from fedstill.core.registry import register
from fedstill.core.topology import sample
from fedstill.engines.serial import Memory
from fedstill.models import contract, resnet
from fedstill.running.preparation import Prepared, prepare
from loops import context_of, states_after

Params = dict[str, Tensor]

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""The loss of a model on a batch of inputs and labels: one number."""

PLAN = {"epochs": 2, "batch": 10, "lr": 0.1, "lr_decay": 0.9, "momentum": 0.9, "weight_decay": 1e-3}

HEAD = ("head.weight", "head.bias")
BODY = ("body.1.weight", "body.1.bias")
"""Together, all entries of the toy experiments' network."""

SEED = 7
"""The seed of the toy experiments."""

FEW_EXAMPLES = 150
"""Examples of all clients together. They suffice, since one step is like another."""

MANY_EXAMPLES = 300
"""For differences that show only after many steps."""


@register("model", "toy_slim")
def toy_slim(
    input_shape: tuple[int, int, int], classes: int, norm: Literal["group", "batch"] = "group"
) -> nn.Module:
    """A small ResNet-56: two stages of one bottleneck block, the last of them slimmable."""
    shape = resnet.ResNetShape("toy_slim", resnet.bottleneck, depths=[1, 1], width=16)
    return resnet._resnet(shape, input_shape, classes, norm)


# Draws: the same as the library's.


def batches(
    size: int, plan: Mapping[str, float], round_index: int, stage: int, client: int
) -> Iterator[Tensor]:
    """The positions of the examples of each batch, epoch by epoch."""
    order = generator(seed_for(SEED, round_index, stage, client, "order"))
    for _ in range(int(plan["epochs"])):
        yield from torch.randperm(size, generator=order).split(int(plan["batch"]))


class Split(NamedTuple):
    """The positions of a client's training examples and of its held-out ones."""

    training: Tensor
    validation: Tensor


def split_for_validation(size: int, validation_size: int, client: int) -> Split:
    """Which of its examples a client holds out."""
    draw = generator(seed_for(SEED, 0, 0, client, "validation"))
    order = torch.randperm(size, generator=draw)
    return Split(
        training=order[validation_size:].sort().values,
        validation=order[:validation_size].sort().values,
    )


# Clients that train.


class Examples(NamedTuple):
    """Inputs in float64, and their labels."""

    inputs: Tensor
    labels: Tensor

    def take(self, positions: Tensor) -> Examples:
        """The examples at these positions."""
        return Examples(self.inputs[positions], self.labels[positions])


@dataclass
class ClientResult:
    """The model of a client after its local training."""

    client: int
    params: Params
    examples: int
    steps: int
    effective_steps: float
    """How many steps without momentum the training is worth: a gradient also moves the later
    steps.
    """


def normalised(ready: Prepared, images: Tensor) -> Tensor:
    """Images as inputs in float64."""
    mean = np.reshape(ready.dataset.mean, (-1, 1, 1))
    std = np.reshape(ready.dataset.std, (-1, 1, 1))
    return torch.from_numpy((images.cpu().numpy() / 255 - mean) / std)


def weights_of(model: nn.Module) -> Params:
    """A copy of all entries of a model."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@dataclass
class Federation:
    """A plain federation over the data that an experiment deals out."""

    ready: Prepared
    sampled: int = 4
    plan: Mapping[str, float] = field(default_factory=PLAN.copy)

    def with_plan(self, **changes: float) -> Federation:
        """The same federation, which trains by another plan."""
        return replace(self, plan={**self.plan, **changes})

    @property
    def start(self) -> Params:
        """The initial model."""
        return {name: value.clone() for name, value in self.ready.world.initial(0).items()}

    @property
    def clients(self) -> range:
        """The numbers of all clients."""
        return range(self.ready.world.clients)

    def net(self, params: Mapping[str, Tensor]) -> nn.Module:
        """A network with these parameters."""
        network = contract.build(self.ready.world.model(0)).double()
        network.load_state_dict(dict(params))
        return network

    def cohort(self, round_index: int) -> list[int]:
        """The clients of a parallel round."""
        return sorted(self.chain(round_index))

    def chain(self, round_index: int) -> list[int]:
        """The clients of a round of a chain, in their order."""
        return sample(self.ready.world, round_index, self.sampled)

    def participants(self, rounds: int) -> set[int]:
        """The clients that take part in at least one of the first rounds."""
        return {client for index in range(1, rounds + 1) for client in self.cohort(index)}

    def data(self, client: int) -> Examples:
        """The training examples of a client."""
        positions = self.ready.sites.positions(client)
        train = self.ready.sites.train
        return Examples(self.inputs(train.values[positions]), train.labels[positions].cpu())

    def size(self, client: int) -> int:
        """The number of a client's training examples."""
        return len(self.data(client).labels)

    def label_counts(self, client: int) -> Tensor:
        """A client's number of examples of each class."""
        return self.data(client).labels.bincount(minlength=toys.CLASSES)

    def shares(self, client: int) -> np.ndarray:
        """The share of each class among a client's examples."""
        labels = self.data(client).labels.numpy()
        return np.array([(labels == c).mean() for c in range(toys.CLASSES)])

    def inputs(self, images: Tensor) -> Tensor:
        """Images as inputs in float64."""
        return normalised(self.ready, images)

    def lr(self, round_index: int) -> float:
        """The learning rate of a round."""
        return self.plan["lr"] * self.plan["lr_decay"] ** (round_index - 1)

    def sgd(self, parameters: Sequence[Tensor], round_index: int) -> torch.optim.SGD:
        """The optimiser of the plan."""
        return torch.optim.SGD(
            parameters,
            lr=self.lr(round_index),
            momentum=self.plan["momentum"],
            weight_decay=self.plan["weight_decay"],
            foreach=False,
        )

    def batches(self, round_index: int, client: int, stage: int = 0) -> Iterator[Tensor]:
        """The positions of the examples of each batch of a client's training."""
        return batches(self.size(client), self.plan, round_index, stage, client)

    def fit(
        self,
        start: Mapping[str, Tensor],
        loss: Loss,
        round_index: int,
        client: int,
        *,
        stage: int = 0,
        names: Sequence[str] | None = None,
        correction: Params | None = None,
        watch: Callable[[Params, Params, Params], None] | None = None,
    ) -> ClientResult:
        """One client's local training.

        names: the entries that are trained, if not all. correction: is added to every gradient.
        watch: sees the parameters before every step, the gradients, and the parameters after it.
        """
        model = self.net(start).train()
        trained = dict(model.named_parameters())
        if names is not None:
            trained = {name: trained[name] for name in names}
        sgd = self.sgd(list(trained.values()), round_index)
        inputs, labels = self.data(client)
        steps = 0
        steps_of_gradient = 0.0  # how far one gradient has moved the model until this step
        effective_steps = 0.0

        for index in self.batches(round_index, client, stage):
            model.zero_grad()
            loss(model, inputs[index], labels[index]).backward()
            if correction:
                for name, parameter in trained.items():
                    parameter.grad += correction[name]
            before = {name: value.detach().clone() for name, value in trained.items()}
            sgd.step()
            if watch:
                gradients = {name: value.grad for name, value in trained.items()}
                watch(before, gradients, {name: value.detach() for name, value in trained.items()})
            steps += 1
            steps_of_gradient = self.plan["momentum"] * steps_of_gradient + 1
            effective_steps += steps_of_gradient

        return ClientResult(
            client=client,
            params=weights_of(model),
            examples=len(labels),
            steps=steps,
            effective_steps=effective_steps,
        )

    def fit_cohort(
        self, start: Mapping[str, Tensor], loss: Loss, round_index: int
    ) -> list[ClientResult]:
        """The local training of all clients of a parallel round with the same loss."""
        return [self.fit(start, loss, round_index, client) for client in self.cohort(round_index)]


# Arithmetic with models.


def weighted_mean(models: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> Params:
    """The mean of models, entry by entry."""
    mean = {}
    for name in models[0]:
        terms = [weight * model[name] for weight, model in zip(weights, models, strict=True)]
        mean[name] = sum(terms) / sum(weights)
    return mean


def average(results: Sequence[ClientResult], uniform: bool = False) -> Params:
    """The mean of clients' models, weighted by their numbers of examples or uniform."""
    weights = [result.examples for result in results]
    if uniform:
        weights = [1] * len(results)
    return weighted_mean([result.params for result in results], weights)


def zeros(like: Mapping[str, Tensor]) -> Params:
    """Zeros of the same shapes."""
    return {name: torch.zeros_like(value) for name, value in like.items()}


def plus(*terms: Mapping[str, Tensor]) -> Params:
    """The sum, entry by entry."""
    return {name: sum(term[name] for term in terms) for name in terms[0]}


def minus(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Params:
    """The difference of the entries that ``a`` has."""
    return {name: value - b[name] for name, value in a.items()}


def scaled(factor: float, a: Mapping[str, Tensor]) -> Params:
    """Each entry times the factor."""
    return {name: factor * value for name, value in a.items()}


def direction(start: Params, end: Params, lr: float, steps: float) -> Params:
    """The mean gradient of a training that went from one model to another."""
    return scaled(1 / (lr * steps), minus(start, end))


def norm(a: Mapping[str, Tensor]) -> float:
    """The Euclidean norm of all entries together."""
    return float(sum((value**2).sum() for value in a.values()) ** 0.5)


def largest_gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest absolute difference of the entries that ``a`` has."""
    return max(float(value.abs().max()) for value in minus(a, b).values())


def all_finite(a: Mapping[str, Tensor]) -> bool:
    """Whether no entry is infinite or not a number."""
    return all(bool(value.isfinite().all()) for value in a.values())


# Losses.


def ce(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Plain cross-entropy."""
    return nn.functional.nll_loss(model(x).log_softmax(1), y)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """The Kullback–Leibler divergence of probabilities, per example."""
    return (p * (p / q).log()).sum(1)


def squared_distance(model: nn.Module, anchor: Mapping[str, Tensor]) -> Tensor:
    """How far the parameters of a model are from the anchor, squared and summed."""
    return sum(((value - anchor[name]) ** 2).sum() for name, value in model.named_parameters())


def at_labels(values: Tensor, labels: Tensor) -> Tensor:
    """The value of each example's label."""
    return values[torch.arange(len(labels)), labels]


def without_label(row: Tensor, label: int) -> Tensor:
    """The values of an example's other classes."""
    return torch.cat([row[:label], row[label + 1 :]])


def without_labels(values: Tensor, labels: Tensor) -> Tensor:
    """The values of each example's other classes."""
    rows = zip(values, labels.tolist(), strict=True)
    return torch.stack([without_label(row, label) for row, label in rows])


# The library's runs, and comparisons with them.


def experiment(method: object, **changes: object) -> Experiment:
    """A toy experiment of two rounds under the plain plan; nothing is measured."""
    plan = {**PLAN, **changes.pop("plan", {})}  # type: ignore[dict-item]
    return toys.toy(method, plan=plan, **{"rounds": 2, "measure": (), **changes})


_blobs = functools.cache(toys.blobs)


def ready_for(method: object, examples: int = FEW_EXAMPLES, **changes: object) -> Prepared:
    """The experiment with its data dealt out, in float64."""
    return in_double(prepare(resolve(experiment(method, **changes)), _blobs(size=examples)))


class LibraryRun(NamedTuple):
    """What the library's own run ends with."""

    states: list[State]
    """The state before round 1, and after each round."""
    memory: Memory
    """What clients remember."""

    @property
    def final(self) -> State:
        """The state after the last round."""
        return self.states[-1]

    @property
    def params(self) -> Params:
        """The global model after the last round."""
        return dict(self.final.params)

    def remembered(self, client: int) -> Payload:
        """What a client remembers after the last round; empty if it never took part."""
        return self.memory.load(client)

    def personal_model(self, client: int) -> Params:
        """The model that a client has kept."""
        return dict(self.memory.load(client).params)


def drive(ready: Prepared) -> LibraryRun:
    """Have the library run all rounds of an experiment."""
    engine = ready.engine()
    states = states_after(context_of(ready, engine), ready.world.rounds)
    return LibraryRun(states, engine.memory)


def run_of(method: object, examples: int = FEW_EXAMPLES, **changes: object) -> LibraryRun:
    """Have the library run an experiment with a method."""
    return drive(ready_for(method, examples, **changes))


def assert_same_model(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The two models differ by the rounding of float64 alone: training enlarges it, but not to
    1e-9.
    """
    assert set(ours) == set(expected)
    for name, value in expected.items():
        if value.is_floating_point():
            assert ours[name].dtype == value.dtype == torch.float64, name
        torch.testing.assert_close(
            ours[name], value, rtol=NEAR, atol=NEAR, msg=lambda m, name=name: f"{name}: {m}"
        )


def assert_personal_models(
    run: LibraryRun, expected: Mapping[int, Params], participants: set[int]
) -> None:
    """The clients that took part have kept the expected models, and no other client remembers
    anything.
    """
    for client, params in expected.items():
        assert bool(run.remembered(client)) == (client in participants)
        if client in participants:
            assert_same_model(run.personal_model(client), params)


def assert_unlike_fedavg(ours: Mapping[str, Tensor], ready: Prepared, rounds: int = 2) -> None:
    """The method did something: its model is not FedAvg's."""
    fed = Federation(ready)
    params = fed.start
    for round_index in range(1, rounds + 1):
        params = average(fed.fit_cohort(params, ce, round_index))

    learned = norm(minus(params, fed.start))
    assert norm(minus(params, ours)) > 0.01 * learned
