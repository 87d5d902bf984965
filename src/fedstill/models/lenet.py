"""LeNet-5, with ReLU and max-pooling."""

from __future__ import annotations

from torch import nn

from fedstill.models.network import ImageShape, Network, flat_size
from fedstill.models.pooling import MaxPool2d
from fedstill.registry import register


@register("model", "lenet5")
def lenet5(input_shape: ImageShape, classes: int) -> Network:
    """LeNet-5: two 5 x 5 convolutions (6, 16) without padding, 120 and 84 hidden; 44,426 parameters
    on 28 x 28.

    Source: LeCun et al., "Gradient-Based Learning Applied to Document Recognition", in the form of
    FedSeq's code.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(input_shape[0], 6, 5),
        MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(6, 16, 5),
        MaxPool2d(2),
        nn.ReLU(),
    ]
    flat = flat_size("lenet5", layers, input_shape)
    dense = [nn.Flatten(), nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
    return Network(nn.Sequential(*layers, *dense), 84, classes)
