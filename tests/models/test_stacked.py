"""A network for a stack of clients gives each client what its own network does, and the same
gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedstill.engines.stack import use_stacked_layers

CLIENTS, BATCH = 3, 4


def conv(**how: object) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 6, 3, **how), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))  # type: ignore[arg-type]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "padding": lambda: conv(padding=1),
    "the same size": lambda: conv(padding="same"),
    "stride": lambda: conv(stride=2),
    "dilation": lambda: conv(dilation=2),
    "no bias": lambda: conv(bias=False),
    "groups": lambda: conv(groups=2),
    "mirrored edges, by torch's rule": lambda: conv(padding=1, padding_mode="reflect"),
    "pooling": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.MaxPool2d(3, 2, padding=1, ceil_mode=True),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(5),
    ),
    "two convolutions": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(5),
    ),
    "linear": lambda: nn.Sequential(
        nn.Flatten(), nn.LazyLinear(6, bias=False), nn.ReLU(), nn.Linear(6, 5)
    ),
    "linear on rows": lambda: nn.Sequential(nn.LazyLinear(6), nn.Flatten(), nn.LazyLinear(5)),
    "a norm, by torch's rule": lambda: nn.Sequential(conv(padding=1), nn.LayerNorm(5)),
}


@pytest.mark.parametrize("shared", [False, True], ids=["own images", "common images"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_stack_is_its_clients(name: str, shared: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    images = torch.randn(CLIENTS, BATCH, 2, 8, 8, generator=draw, dtype=torch.float64)
    network = NETWORKS[name]().double()
    network(images[0])  # shapes of lazy layers
    alone, together = network, use_stacked_layers(copy.deepcopy(network))
    params = {
        k: torch.randn(CLIENTS, *v.shape, generator=draw, dtype=torch.float64).requires_grad_()
        for k, v in alone.state_dict().items()
    }

    def loss(run: nn.Module, own: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(run, own, (x,)).logsumexp(1).mean()

    given = images[0] if shared else images
    got = vmap(lambda p, x: loss(together, p, x), in_dims=(0, None if shared else 0))(params, given)
    want = torch.stack(
        [
            loss(alone, {k: v[i] for k, v in params.items()}, images[0 if shared else i])
            for i in range(CLIENTS)
        ]
    )
    torch.testing.assert_close(got, want)
    ours, theirs = (torch.autograd.grad(v.sum(), list(params.values())) for v in (got, want))
    torch.testing.assert_close(ours, theirs)


def test_layers_change_only_where_all_are_known() -> None:
    known, other = NETWORKS["pooling"](), NETWORKS["a norm, by torch's rule"]()
    assert {type(layer) for layer in use_stacked_layers(other).modules()} >= {
        nn.Conv2d,
        nn.LayerNorm,
    }
    known(torch.zeros(1, 2, 8, 8))
    changed = [type(layer) for layer in use_stacked_layers(known).modules()]
    assert nn.Conv2d not in changed
    assert [type(layer) for layer in use_stacked_layers(known).modules()] == changed, (
        "done twice, the same"
    )


def test_a_layer_of_a_stack_says_that_it_cannot_run_alone() -> None:
    network = use_stacked_layers(nn.Sequential(nn.Conv2d(1, 2, 3)))
    with pytest.raises(RuntimeError, match=r"under torch\.func\.vmap only"):
        network(torch.zeros(1, 1, 4, 4))


def test_weights_gradients_lie_as_weights_do() -> None:
    network = use_stacked_layers(nn.Sequential(nn.Flatten(), nn.Linear(12, 7)))
    params = {
        k: torch.randn(CLIENTS, *v.shape).requires_grad_() for k, v in network.state_dict().items()
    }
    x = torch.randn(CLIENTS, BATCH, 3, 2, 2)
    out = vmap(lambda p, x: functional_call(network, p, (x,)))(params, x)
    (grad,) = torch.autograd.grad(out.sum(), [params["1.weight"]])
    assert grad.stride() == params["1.weight"].stride()
