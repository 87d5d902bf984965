"""AlexNet with eight layers, for images of 32 x 32."""

from __future__ import annotations

from torch import nn

from fedstill.models.network import ImageShape, Network, flat_size
from fedstill.models.pooling import MaxPool2d
from fedstill.registry import register


@register("model", "alexnet")
def alexnet(input_shape: ImageShape, classes: int, relu: bool = True) -> Network:
    """AlexNet-8: five 3 x 3 convolutions (32 to 256), 1024 and 512 hidden; 3,868,746 parameters on
    CIFAR-10.

    relu: Whether ReLU follows every layer; without it there is none after the third and fourth
    convolution, nor after the hidden layers, which are then one linear map in two steps.

    Source: SFedKD, sec. 4.1 ("8-layer AlexNet").
    Reading: the paper gives no sizes and its code base has no AlexNet; this is the one of
    split-learning code, which has ``relu = false``. We put ReLU everywhere.
    """

    def bend() -> list[nn.Module]:
        return [nn.ReLU()] if relu else []

    layers: list[nn.Module] = [
        *(nn.Conv2d(input_shape[0], 32, 3, padding=1), MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, padding=1), *bend()),
        *(nn.Conv2d(128, 256, 3, padding=1), *bend()),
        *(nn.Conv2d(256, 256, 3, padding=1), MaxPool2d(3, stride=2), nn.ReLU()),
    ]
    flat = flat_size("alexnet", layers, input_shape)
    dense = [nn.Flatten(), nn.Linear(flat, 1024), *bend(), nn.Linear(1024, 512), *bend()]
    return Network(nn.Sequential(*layers, *dense), 512, classes)
