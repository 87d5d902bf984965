"""Fully connected networks, and the linear model without a hidden layer."""

from __future__ import annotations

import math

from torch import nn

from fedstill.core.fields import Count, CountOrZero
from fedstill.core.registry import register
from fedstill.models.network import InputShape, Network, OnCircle, projected


@register("model", "mlp")
@register(
    "model",
    "logistic",
    about="Multinomial logistic regression: one linear layer on all its numbers.",
    hidden=(),
)
def mlp(
    input_shape: InputShape,
    classes: int,
    hidden: tuple[Count, ...] = (200, 200),
    projection: CountOrZero = 0,
) -> Network:
    """A fully connected network on all of an example's numbers, with ReLU between; by default
    FedAvg's 2NN.

    hidden: The sizes of the hidden layers; CWC's MLP is ``(1024,)``.
    projection: The width of a projection under the head, as MOON has it; 0 for none.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
    Data", sec. 3.
    """
    layers, width = _hidden_layers(input_shape, hidden)
    more, width = projected(width, projection)
    return Network(nn.Sequential(*layers, *more), width, classes)


@register("model", "sphere_mlp")
def sphere_mlp(
    input_shape: InputShape, classes: int, hidden: tuple[Count, ...] = (200, 200)
) -> Network:
    """A fully connected network whose features are points on a circle, as in ``sphere_cnn``: for
    all numbers.

    hidden: The sizes of the hidden layers.

    Source: ours; FedNTD, appendix N, has such features of a convolutional network.
    """
    layers, width = _hidden_layers(input_shape, hidden)
    return Network(nn.Sequential(*layers, nn.Linear(width, 2), OnCircle()), 2, classes, bias=False)


def _hidden_layers(input_shape: InputShape, hidden: tuple[int, ...]) -> tuple[list[nn.Module], int]:
    """Flattened inputs, linear layers with ReLU, and the width that they reach."""
    width = math.prod(input_shape)
    layers: list[nn.Module] = [nn.Flatten()]
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return layers, width
