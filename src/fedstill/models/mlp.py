"""Fully connected networks, and the linear model without a hidden layer."""

from __future__ import annotations

import math

from torch import nn

from fedstill.fields import Count, CountOrZero
from fedstill.models.network import InputShape, Network, projected
from fedstill.registry import register


@register("model", "mlp")
@register(
    "model",
    "logistic",
    about="Multinomial logistic regression: one linear layer on all its numbers.",
    hidden=(),
)
def mlp(
    input_shape: InputShape, classes: int, hidden: tuple[Count, ...] = (200, 200), projection: CountOrZero = 0
) -> Network:
    """A fully connected network on all of an example's numbers, with ReLU between; by default FedAvg's 2NN.

    hidden: The sizes of the hidden layers; CWC's MLP is ``(1024,)``.
    projection: The width of a projection under the head, as MOON has it; 0 for none.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", sec. 3.
    """
    width = math.prod(input_shape)
    layers: list[nn.Module] = [nn.Flatten()]
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    more, width = projected(width, projection)
    return Network(nn.Sequential(*layers, *more), width, classes)
