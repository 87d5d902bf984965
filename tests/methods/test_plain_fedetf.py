"""FedETF against a plain implementation."""

from __future__ import annotations

import pytest
import torch
from plain import (
    Federation,
    Loss,
    assert_same_model,
    assert_unlike_fedavg,
    at_labels,
    average,
    drive,
    ready_for,
)
from torch import Tensor, nn

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.losses import adjusted_cross_entropy, cross_entropy
from fedstill.running.preparation import prepare

CLASSES = toys.CLASSES


def balanced_on_simplex(vertices: Tensor, counts: Tensor) -> Loss:
    """Cross-entropy of cosines with the vertices, in which each class counts by its examples."""
    weights = counts.clamp(min=1).double()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        features = model.body(x)
        directions = features / features.norm(dim=1, keepdim=True)
        z = model.head.scale * directions @ vertices
        scores = weights * z.exp()
        return -(at_labels(scores, y) / scores.sum(1)).log().mean()

    return loss


@pytest.mark.parametrize("projection", [0, 6])
def test_fedetf(projection: int) -> None:
    """The vertices of the simplex stay."""
    ready = ready_for("fedetf", model={**toys.on_simplex(), "projection": projection})
    fed = Federation(ready)
    params = fed.start
    vertices = fed.net(params).head.vertices
    for round_index in (1, 2):
        results = []
        for client in fed.cohort(round_index):
            loss = balanced_on_simplex(vertices, fed.label_counts(client))
            results.append(fed.fit(params, loss, round_index, client))
        params = average(results)

    ours = drive(ready).params

    assert_same_model(ours, params)
    assert_unlike_fedavg(ours, ready)
    assert torch.equal(fed.net(ours).head.vertices, vertices)


def test_equal_counts_are_plain_cross_entropy() -> None:
    z = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(6) % CLASSES
    shift = torch.full((CLASSES,), 7.0, dtype=torch.float64).log()

    adjusted = adjusted_cross_entropy(z, y, shift=shift)

    torch.testing.assert_close(adjusted, cross_entropy(z, y), rtol=1e-12, atol=1e-12)


def test_another_head_is_refused_and_the_refusal_says_what_to_set() -> None:
    with pytest.raises(IncompatibleMethod, match=r"model\.name = 'etf', and model\.of"):
        prepare(resolve(toys.toy("fedetf")), toys.blobs())
