"""A convolutional network for series: rows of measurements that were taken one after another."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fedstill.errors import ConfigError
from fedstill.fields import Count
from fedstill.models.network import Network, SeriesShape
from fedstill.models.pooling import MaxPool2d
from fedstill.registry import register

CHANNELS, KERNEL = (32, 64, 64), 5


@register("model", "series_cnn")
def series_cnn(input_shape: SeriesShape, classes: int, hidden: Count = 128) -> Network:
    """Three convolutions over time (kernel 5; 32, 64, 64 channels), each with max-pooling by 2, and
    one hidden layer.

    A series (channels, L) needs L >= 8. Its convolutions are those of images one row high, which
    torch computes faster than one-dimensional ones. Raises ConfigError for a shorter one.

    hidden: The units of the hidden layer.

    Source: ours, after Zeng et al., "Convolutional Neural Networks for Human Activity Recognition
    using Mobile Sensors" (2014).
    """
    channels, steps = input_shape
    least = 2 ** len(CHANNELS)
    if steps < least:
        raise ConfigError(
            f"model 'series_cnn' needs series of at least {least} steps, these have {steps}; set "
            "model.name = 'mlp'"
        )
    layers: list[nn.Module] = [nn.Unflatten(1, (channels, 1))]
    for inside, out in pairwise([channels, *CHANNELS]):
        layers += [
            nn.Conv2d(inside, out, (1, KERNEL), padding=(0, KERNEL // 2)),
            MaxPool2d((1, 2)),
            nn.ReLU(),
        ]
    flat = CHANNELS[-1] * (steps // least)
    return Network(
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, hidden), nn.ReLU()), hidden, classes
    )
