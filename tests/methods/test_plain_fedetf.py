"""FedETF against a plain implementation."""

from __future__ import annotations

import pytest
import torch
from plain import Federation, average, check, check_matters, drive, ready_for
from torch import Tensor, nn

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.losses import adjusted_cross_entropy, cross_entropy
from fedstill.running.preparation import prepare

CLASSES = toys.CLASSES


@pytest.mark.parametrize("projection", [0, 6])
def test_fedetf(projection: int) -> None:
    ready = ready_for("fedetf", model={**toys.on_simplex(), "projection": projection})
    fed = Federation(ready)
    v = fed.net(fed.start).head.vertices
    server = fed.start
    for round in (1, 2):
        sent = []
        for k in fed.cohort(round):
            counts = [max(1, int((fed.data(k)[1] == c).sum())) for c in range(CLASSES)]

            def loss(model: nn.Module, x: Tensor, y: Tensor, counts: list[int] = counts) -> Tensor:
                h = model.body(x)
                z = model.head.scale * torch.stack([(row / row.norm()) @ v for row in h])
                weighed = torch.tensor(counts, dtype=torch.float64) * z.exp()
                return -(weighed[range(len(y)), y] / weighed.sum(1)).log().mean()

            sent.append(fed.fit(server, loss, round, k))
        server = average(sent)
    states, _ = drive(ready)
    check(states[-1].params, server)
    check_matters(states[-1].params, ready)
    assert torch.equal(fed.net(dict(states[-1].params)).head.vertices, v)


def test_equal_counts_are_plain_cross_entropy() -> None:
    z = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(6) % CLASSES
    shift = torch.full((CLASSES,), 7.0, dtype=torch.float64).log()
    torch.testing.assert_close(
        adjusted_cross_entropy(z, y, shift=shift), cross_entropy(z, y), rtol=1e-12, atol=1e-12
    )


def test_another_head_is_refused_and_the_refusal_says_what_to_set() -> None:
    with pytest.raises(
        IncompatibleMethod,
        match=r"model\.name = 'etf', and model\.of",
    ):
        prepare(resolve(toys.toy("fedetf")), toys.blobs())
