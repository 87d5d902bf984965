"""A network for a stack of clients computes for each client what its own network does, and the same
gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedstill.engines.stack import use_stacked_layers

CLIENTS = 3
BATCH = 4


def convolution(**options: Any) -> nn.Module:
    """A convolution with these options, and a linear layer."""
    layer = nn.Conv2d(2, 6, 3, **options)
    return nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "padding": lambda: convolution(padding=1),
    "the same size": lambda: convolution(padding="same"),
    "stride": lambda: convolution(stride=2),
    "dilation": lambda: convolution(dilation=2),
    "no bias": lambda: convolution(bias=False),
    "groups": lambda: convolution(groups=2),
    "mirrored edges, by torch's rule": lambda: convolution(padding=1, padding_mode="reflect"),
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
    "a norm, by torch's rule": lambda: nn.Sequential(convolution(padding=1), nn.LayerNorm(5)),
}


def random_params(network: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters of all clients, stacked."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(CLIENTS, *value.shape, generator=generator, dtype=dtype).requires_grad_()
        for name, value in network.state_dict().items()
    }


def mean_loss(network: nn.Module, params: dict[str, Tensor], images: Tensor) -> Tensor:
    """A loss of one client."""
    return functional_call(network, params, (images,)).logsumexp(1).mean()


@pytest.mark.parametrize("image_dimension", [0, None], ids=["own images", "common images"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_stack_computes_the_losses_and_gradients_of_its_clients(
    name: str, image_dimension: int | None
) -> None:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(CLIENTS, BATCH, 2, 8, 8, generator=generator, dtype=torch.float64)
    stacked_images = images
    if image_dimension is None:
        stacked_images = images[0]
        images = images[:1].expand_as(images)
    network = NETWORKS[name]().double()
    network(images[0])  # gives lazy layers their shapes
    stacked = use_stacked_layers(copy.deepcopy(network))
    params = random_params(network, torch.float64)

    def stacked_loss(client_params: dict[str, Tensor], client_images: Tensor) -> Tensor:
        return mean_loss(stacked, client_params, client_images)

    losses = vmap(stacked_loss, in_dims=(0, image_dimension))(params, stacked_images)
    gradients = torch.autograd.grad(losses.sum(), list(params.values()))

    expected = []
    for client in range(CLIENTS):
        client_params = {name: value[client] for name, value in params.items()}
        expected.append(mean_loss(network, client_params, images[client]))
    expected_losses = torch.stack(expected)
    expected_gradients = torch.autograd.grad(expected_losses.sum(), list(params.values()))
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(gradients, expected_gradients)


def layer_types(network: nn.Module) -> list[type[nn.Module]]:
    """The types of all parts of a network."""
    return [type(layer) for layer in network.modules()]


def test_layers_change_only_in_networks_of_known_layers() -> None:
    """A second change has no effect."""
    known = NETWORKS["pooling"]()
    known(torch.zeros(1, 2, 8, 8))
    unknown = NETWORKS["a norm, by torch's rule"]()

    changed = layer_types(use_stacked_layers(known))
    unchanged = layer_types(use_stacked_layers(unknown))

    assert nn.Conv2d not in changed
    assert nn.Conv2d in unchanged
    assert nn.LayerNorm in unchanged
    assert layer_types(use_stacked_layers(known)) == changed


def test_a_layer_of_a_stack_says_that_it_cannot_run_alone() -> None:
    network = use_stacked_layers(nn.Sequential(nn.Conv2d(1, 2, 3)))

    with pytest.raises(RuntimeError, match=r"under torch\.func\.vmap only"):
        network(torch.zeros(1, 1, 4, 4))


def test_gradients_of_weights_have_the_strides_of_weights() -> None:
    network = use_stacked_layers(nn.Sequential(nn.Flatten(), nn.Linear(12, 7)))
    params = random_params(network, torch.float32)
    images = torch.randn(CLIENTS, BATCH, 3, 2, 2)

    losses = vmap(lambda client_params, x: mean_loss(network, client_params, x))(params, images)
    (gradient,) = torch.autograd.grad(losses.sum(), [params["1.weight"]])

    assert gradient.stride() == params["1.weight"].stride()
