"""The methods whose clients know their label counts, against a plain implementation of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from plain import Federation, average, ce, check, check_matters, drive, ready_for
from torch import Tensor, nn

import toys
from fedstill.core.records import Examples, Payload, Stage

Objective = Callable[[nn.Module, nn.Module, Tensor, Tensor, list[int]], Tensor]


def others_of(row: Tensor, label: int) -> Tensor:
    return torch.cat([row[:label], row[label + 1 :]])


def calibrated(
    model: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor, counts: list[int]
) -> Tensor:
    margins = torch.tensor([0.7 / n**0.25 if n else 70.0 for n in counts], dtype=torch.float64)
    z = model(x) - margins
    return -torch.stack(
        [row[c] - row.exp().sum().log() for row, c in zip(z, y.tolist(), strict=True)]
    ).mean()


def calibrated_as_printed(
    model: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor, counts: list[int]
) -> Tensor:
    margins = torch.tensor([0.7 / n**0.25 if n else 70.0 for n in counts], dtype=torch.float64)
    z = model(x) - margins
    each = [
        row[c] - others_of(row, c).exp().sum().log() for row, c in zip(z, y.tolist(), strict=True)
    ]
    return -torch.stack(each).mean()


def restricted(
    model: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor, counts: list[int]
) -> Tensor:
    scale = torch.tensor([1.0 if n else 0.4 for n in counts], dtype=torch.float64)
    return nn.functional.nll_loss((model(x) * scale).log_softmax(1), y)


def restricted_by_share(
    model: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor, counts: list[int]
) -> Tensor:
    scale = torch.tensor([0.6 * n / max(counts) + 0.4 for n in counts], dtype=torch.float64)
    return nn.functional.nll_loss((model(x) * scale).log_softmax(1), y)


def masked(tau: float, beta: float, uniform: bool) -> Objective:
    def loss(
        model: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor, counts: list[int]
    ) -> Tensor:
        z, t, terms = model(x), teacher(x).detach(), []
        small = [c for c, n in enumerate(counts) if n <= sum(counts) / len(counts)]
        for student, guide, label in zip(z / tau, t / tau, y.tolist(), strict=True):
            kept = [c for c in small if c != label]
            rest = others_of(student, label).exp().sum().log()
            total = sum(guide[c].exp() for c in kept)
            share = {c: 1 / len(kept) if uniform else float(guide[c].exp() / total) for c in kept}
            divergence = [
                p * (torch.tensor(p).log() - (student[c] - rest)) for c, p in share.items()
            ]
            terms.append(sum(divergence, torch.zeros((), dtype=torch.float64)))
        return ce(model, x, y) + beta * tau**2 * torch.stack(terms).mean()

    return loss


PLAIN: dict[str, tuple[dict[str, object], Objective]] = {
    "fedlc": ({"name": "fedlc", "margin": 0.7}, calibrated),
    "fedlc printed": (
        {"name": "fedlc", "margin": 0.7, "denominator": "others"},
        calibrated_as_printed,
    ),
    "fedrs": ({"name": "fedrs", "alpha": 0.4}, restricted),
    "fedrs by share": ({"name": "fedrs", "alpha": 0.4, "scaling": "share"}, restricted_by_share),
    "fedlmd": (
        {"name": "fedlmd", "beta": 0.8, "temperature": 2.0},
        masked(2.0, 0.8, uniform=False),
    ),
    "fedlmd_tf": (
        {"name": "fedlmd_tf", "beta": 0.8, "temperature": 2.0},
        masked(2.0, 0.8, uniform=True),
    ),
}
UNEVEN = {"partition": {"kind": "sharding", "shards": 2}, "topology": {"clients": 5, "sampled": 4}}


@pytest.mark.parametrize("split", [{}, UNEVEN], ids=["dirichlet", "missing classes"])
@pytest.mark.parametrize("name", PLAIN)
def test_two_rounds_are_those_of_a_plain_implementation(
    name: str, split: dict[str, object]
) -> None:
    fields, objective = PLAIN[name]
    ready = ready_for(fields, plan={"lr": 0.05}, **split)
    fed = Federation(ready)
    fed.lr = lambda round: 0.05 * 0.9 ** (round - 1)  # type: ignore[method-assign]
    params = fed.start
    for round in (1, 2):
        sent = []
        for c in fed.cohort(round):
            teacher, counts = (
                fed.net(params).eval(),
                fed.data(c)[1].bincount(minlength=toys.CLASSES).tolist(),
            )

            def loss(
                m: nn.Module, x: Tensor, y: Tensor, t: nn.Module = teacher, n: list[int] = counts
            ) -> Tensor:
                return objective(m, t, x, y, n)

            sent.append(fed.fit(params, loss, round, c))
        params = average(sent)
    ours = drive(ready)[0][-1].params
    check(ours, params)
    if split:
        check_matters(ours, ready)


EVEN = {"partition": "iid"}


@pytest.mark.parametrize(
    ("one", "other", "changes"),
    [
        ({"name": "fedlc", "margin": 0.0}, "fedavg", {}),
        ({"name": "fedrs", "alpha": 1.0}, "fedavg", {}),
        ({"name": "fedrs", "alpha": 1.0, "scaling": "share"}, "fedavg", UNEVEN),
        ({"name": "fedlmd", "beta": 0.0}, "fedavg", {}),
        ({"name": "fedlmd_tf", "beta": 0.0}, "fedavg", {}),
        ({"name": "fedrs", "alpha": 0.2}, "fedavg", {**EVEN, "topology": {"clients": 2}}),
    ],
    ids=str,
)
def test_at_its_edge_it_is_another_method_to_the_bit(
    one: object, other: str, changes: dict[str, object]
) -> None:
    ours, theirs = (drive(ready_for(m, **changes))[0][-1].params for m in (one, other))
    assert all(torch.equal(ours[k], v) for k, v in theirs.items())


@pytest.mark.parametrize(
    ("one", "other", "same_bits"),
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
def test_of_clients_with_equal_counts_it_is_a_method_without_them(
    one: object, other: object, same_bits: bool
) -> None:
    alike = {"topology": {"clients": 1}}  # one client has 60 examples of each class
    ours, theirs = (drive(ready_for(m, **alike))[0][-1].params for m in (one, other))
    check(ours, theirs)
    assert not same_bits or all(torch.equal(ours[k], v) for k, v in theirs.items())


def begun(fields: dict[str, object], counts: list[int]) -> tuple[object, object]:
    ready = ready_for(fields)
    start, stage = ready.world.initial(0), Stage(1, 0, "train", (0,))
    view = ready.sites.view(0, stage)
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    data = Examples(torch.zeros(len(labels), *view.data.values.shape[1:]), labels)
    view = replace(view, data=data, counts=torch.tensor(counts))
    work = ready.settings.method.work(stage)
    return work, work.begin(Payload(params=start), Payload(), view, ready.world)


class Batch:
    """A batch with given logits."""

    def __init__(self, z: Tensor, y: Tensor) -> None:
        self.z, self.y = z, y

    def logits(self) -> Tensor:
        return self.z

    def weighted(self, losses: Tensor) -> Tensor:
        return losses


def test_fedlc_leaves_classes_without_examples_alone_and_a_single_class_has_nothing_to_lose() -> (
    None
):
    z = torch.randn(
        4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    work, carry = begun({"name": "fedlc"}, [7, 3, 0, 0, 9])
    loss = work.terms(Batch(z, torch.tensor([0, 1, 4, 4])), carry)["calibrated"]
    (slope,) = torch.autograd.grad(loss.sum(), z)
    assert slope[:, [2, 3]].abs().max() < 1e-30
    assert slope[:, [0, 1, 4]].abs().min() > 1e-6
    work, carry = begun({"name": "fedlc"}, [0, 8, 0, 0, 0])
    assert work.terms(Batch(z, torch.tensor([1, 1, 1, 1])), carry)["calibrated"].abs().max() < 1e-12


def test_fedrs_takes_alpha_of_the_gradient_of_a_missing_class() -> None:
    z = torch.randn(
        4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    y, scale = torch.tensor([0, 1, 4, 4]), torch.tensor([1, 1, 0.3, 0.3, 1]).double()
    work, carry = begun({"name": "fedrs", "alpha": 0.3}, [7, 3, 0, 0, 9])
    (slope,) = torch.autograd.grad(work.terms(Batch(z, y), carry)["restricted"].sum(), z)
    scaled = (z.detach() * scale).requires_grad_()
    (plain,) = torch.autograd.grad(nn.functional.cross_entropy(scaled, y, reduction="sum"), scaled)
    torch.testing.assert_close(slope, scale * plain)
