"""The methods whose clients know their label counts, against a plain implementation of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from plain import (
    PLAN,
    Federation,
    Loss,
    assert_same_model,
    assert_unlike_fedavg,
    at_labels,
    average,
    ce,
    drive,
    ready_for,
    run_of,
    without_label,
    without_labels,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import toys
from fedstill.core.method import ClientWork
from fedstill.core.records import Examples, Payload, Stage, TrainingStart
from fedstill.core.trees import same_bits

Objective = Callable[[nn.Module, list[int]], Loss]
"""A client's loss; it knows the model received and the client's label counts."""


# FedLC.


def margins(counts: list[int]) -> Tensor:
    """What each class's logit is lowered by: more if the client has few examples of it."""
    values = torch.full((len(counts),), 70.0, dtype=torch.float64)
    for c, count in enumerate(counts):
        if count:
            values[c] = 0.7 / count**0.25
    return values


def calibrated(received: nn.Module, counts: list[int]) -> Loss:
    """Cross-entropy of calibrated logits."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x) - margins(counts), y)

    return loss


def calibrated_as_printed(received: nn.Module, counts: list[int]) -> Loss:
    """The paper's equation, whose denominator leaves out the label."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = model(x) - margins(counts)
        denominator = without_labels(z, y).exp().sum(1)
        return -(at_labels(z, y) - denominator.log()).mean()

    return loss


# FedRS.


def restricted(received: nn.Module, counts: list[int]) -> Loss:
    """The logits of missing classes are scaled by alpha."""
    factors = torch.full((len(counts),), 0.4, dtype=torch.float64)
    factors[torch.tensor(counts) > 0] = 1.0

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x) * factors, y)

    return loss


def restricted_by_share(received: nn.Module, counts: list[int]) -> Loss:
    """The fewer examples of a class, the nearer is its factor to alpha."""
    factors = 0.6 * torch.tensor(counts).double() / max(counts) + 0.4

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x) * factors, y)

    return loss


# FedLMD.


@dataclass(frozen=True)
class Masked:
    """Distillation of the classes that the client has few examples of, but not of the label."""

    uniform: bool
    """Whether these classes are all alike, without a teacher."""
    temperature: float = 2.0
    beta: float = 0.8

    def __call__(self, received: nn.Module, counts: list[int]) -> Loss:
        mean_count = sum(counts) / len(counts)
        minority = [c for c, count in enumerate(counts) if count <= mean_count]
        tau = self.temperature

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = model(x) / tau
            t = received(x).detach() / tau
            divergences = []
            for student, teacher, label in zip(z, t, y.tolist(), strict=True):
                classes = [c for c in minority if c != label]
                divergences.append(self.divergence(student, teacher, label, classes))
            return ce(model, x, y) + self.beta * tau**2 * torch.stack(divergences).mean()

        return loss

    def divergence(
        self, student: Tensor, teacher: Tensor, label: int, classes: list[int]
    ) -> Tensor:
        """The divergence of one example over these classes; the student's shares are of all classes
        but the label.
        """
        shares = teacher[classes].softmax(0)
        if self.uniform:
            shares = torch.full((len(classes),), 1 / max(len(classes), 1), dtype=torch.float64)
        log_total = without_label(student, label).exp().sum().log()
        log_shares = student[classes] - log_total
        return (shares * (shares.log() - log_shares)).sum()


OBJECTIVES: dict[str, tuple[dict[str, object], Objective]] = {
    "fedlc": ({"name": "fedlc", "margin": 0.7}, calibrated),
    "fedlc printed": (
        {"name": "fedlc", "margin": 0.7, "denominator": "others"},
        calibrated_as_printed,
    ),
    "fedrs": ({"name": "fedrs", "alpha": 0.4}, restricted),
    "fedrs by share": ({"name": "fedrs", "alpha": 0.4, "scaling": "share"}, restricted_by_share),
    "fedlmd": ({"name": "fedlmd", "beta": 0.8, "temperature": 2.0}, Masked(uniform=False)),
    "fedlmd_tf": ({"name": "fedlmd_tf", "beta": 0.8, "temperature": 2.0}, Masked(uniform=True)),
}

UNEVEN = {"partition": {"kind": "sharding", "shards": 2}, "topology": {"clients": 5, "sampled": 4}}
"""Each client misses classes."""


@pytest.mark.parametrize("split", [{}, UNEVEN], ids=["dirichlet", "missing classes"])
@pytest.mark.parametrize(("method", "objective"), list(OBJECTIVES.values()), ids=list(OBJECTIVES))
def test_two_rounds_are_those_of_a_plain_implementation(
    method: dict[str, object], objective: Objective, split: dict[str, object]
) -> None:
    ready = ready_for(method, plan={"lr": 0.05}, **split)
    fed = Federation(ready, plan={**PLAN, "lr": 0.05})
    params = fed.start
    for round_index in (1, 2):
        received = fed.net(params).eval()
        results = []
        for client in fed.cohort(round_index):
            loss = objective(received, fed.label_counts(client).tolist())
            results.append(fed.fit(params, loss, round_index, client))
        params = average(results)

    ours = drive(ready).params

    assert_same_model(ours, params)
    if split:
        assert_unlike_fedavg(ours, ready)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ({"name": "fedlc", "margin": 0.0}, {}),
        ({"name": "fedrs", "alpha": 1.0}, {}),
        ({"name": "fedrs", "alpha": 1.0, "scaling": "share"}, UNEVEN),
        ({"name": "fedlmd", "beta": 0.0}, {}),
        ({"name": "fedlmd_tf", "beta": 0.0}, {}),
        ({"name": "fedrs", "alpha": 0.2}, {"partition": "iid", "topology": {"clients": 2}}),
    ],
    ids=str,
)
def test_at_its_edge_it_is_federated_averaging_to_the_bit(
    method: object, changes: dict[str, object]
) -> None:
    assert same_bits(run_of(method, **changes).params, run_of("fedavg", **changes).params)


@pytest.mark.parametrize(
    ("method", "equivalent", "to_the_bit"),
    [
        ({"name": "fedlc", "margin": 2.0}, "fedavg", False),
        ({"name": "fedrs", "scaling": "share", "alpha": 0.2}, "fedavg", True),
        (
            {"name": "fedlmd", "beta": 0.7, "temperature": 2.0},
            {"name": "fedntd", "beta": 0.7, "temperature": 2.0},
            True,
        ),
    ],
    ids=str,
)
def test_with_equal_label_counts_it_is_a_method_that_ignores_them(
    method: object, equivalent: object, to_the_bit: bool
) -> None:
    """A single client has all examples: equally many of each class."""
    ours = run_of(method, topology={"clients": 1}).params
    expected = run_of(equivalent, topology={"clients": 1}).params

    assert_same_model(ours, expected)
    if to_the_bit:
        assert same_bits(ours, expected)


# Single batches.


@dataclass(frozen=True)
class Training:
    """A client's work, and what its training starts from."""

    work: ClientWork
    start: TrainingStart

    def loss(self, term: str, z: Tensor, y: Tensor) -> Tensor:
        """One term of the objective on a batch with these logits, per example."""
        return self.work.terms(Batch(z, y), self.start)[term]  # type: ignore[arg-type]


def training_of(method: dict[str, object], counts: list[int]) -> Training:
    """The training of a client with these label counts."""
    ready = ready_for(method)
    stage = Stage(1, 0, "train", (0,))
    view = ready.sites.view(0, stage)
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    data = Examples(torch.zeros(len(labels), *view.data.values.shape[1:]), labels)
    view = replace(view, data=data, counts=torch.tensor(counts))
    work = ready.settings.method.work(stage)
    payload = Payload(params=ready.world.initial(0))
    return Training(work, work.begin(payload, Payload(), view, ready.world))


@dataclass(frozen=True)
class Batch:
    """A batch with given logits."""

    z: Tensor
    y: Tensor

    def logits(self) -> Tensor:
        return self.z

    def weighted(self, losses: Tensor) -> Tensor:
        return losses


def logits_of_four() -> Tensor:
    """Logits of four examples, with a gradient."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(4, toys.CLASSES, dtype=torch.float64, generator=draw).requires_grad_()


def test_fedlc_leaves_classes_without_examples_alone_and_a_single_class_has_nothing_to_lose() -> (
    None
):
    z = logits_of_four()

    training = training_of({"name": "fedlc"}, [7, 3, 0, 0, 9])
    losses = training.loss("calibrated", z, torch.tensor([0, 1, 4, 4]))

    (gradient,) = torch.autograd.grad(losses.sum(), z)
    assert gradient[:, [2, 3]].abs().max() < 1e-30
    assert gradient[:, [0, 1, 4]].abs().min() > 1e-6

    of_one_class = training_of({"name": "fedlc"}, [0, 8, 0, 0, 0])
    losses = of_one_class.loss("calibrated", z, torch.tensor([1, 1, 1, 1]))
    assert losses.abs().max() < 1e-12


def test_fedrs_takes_alpha_of_the_gradient_of_a_missing_class() -> None:
    z = logits_of_four()
    y = torch.tensor([0, 1, 4, 4])

    training = training_of({"name": "fedrs", "alpha": 0.3}, [7, 3, 0, 0, 9])
    losses = training.loss("restricted", z, y)

    (gradient,) = torch.autograd.grad(losses.sum(), z)
    factors = torch.tensor([1, 1, 0.3, 0.3, 1], dtype=torch.float64)
    scaled_logits = (z.detach() * factors).requires_grad_()
    plain_loss = cross_entropy(scaled_logits, y, reduction="sum")
    (plain_gradient,) = torch.autograd.grad(plain_loss, scaled_logits)
    torch.testing.assert_close(gradient, factors * plain_gradient)
