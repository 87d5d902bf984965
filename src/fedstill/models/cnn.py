"""Convolutional networks: LeNet-5, AlexNet, the papers' small networks, and one for series."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fedstill.core.errors import ConfigError
from fedstill.core.fields import Count, CountOrZero, Share
from fedstill.core.registry import register
from fedstill.models.network import (
    ImageShape,
    MaxPool2d,
    Network,
    Norm,
    OnCircle,
    SeriesShape,
    flat_size,
    norm_layer,
    projected,
)

# LeNet-5, with ReLU and max-pooling.


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


# AlexNet with eight layers, for images of 32 x 32.


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

    def optional_relu() -> list[nn.Module]:
        if not relu:
            return []
        return [nn.ReLU()]

    layers: list[nn.Module] = [
        *(nn.Conv2d(input_shape[0], 32, 3, padding=1), MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, padding=1), *optional_relu()),
        *(nn.Conv2d(128, 256, 3, padding=1), *optional_relu()),
        *(nn.Conv2d(256, 256, 3, padding=1), MaxPool2d(3, stride=2), nn.ReLU()),
    ]
    flat = flat_size("alexnet", layers, input_shape)
    dense: list[nn.Module] = [
        nn.Flatten(),
        *(nn.Linear(flat, 1024), *optional_relu()),
        *(nn.Linear(1024, 512), *optional_relu()),
    ]
    return Network(nn.Sequential(*layers, *dense), 512, classes)


# Small convolutional networks: those of the papers, and one for 8 x 8 digits.
#
# All pool before ReLU: both are monotone, so the result is the same, and ReLU sees a quarter of the
# numbers.


@register("model", "cnn")
def cnn(input_shape: ImageShape, classes: int, projection: CountOrZero = 0) -> Network:
    """FedNTD's CNN: two 5 x 5 convolutions (32, 64), one hidden layer of 512; 2,156,490 parameters
    on CIFAR-10.

    projection: The width of a projection under the head, as MOON has it (256 there); 0 for none.

    Source: FedNTD, appendix B.1; FedAvg's CNN of McMahan et al. with padding.
    """
    blocks = [_block(input_shape[0], 32, 5, 2), _block(32, 64, 5, 2)]
    return _build("cnn", input_shape, classes, blocks, [512], projection=projection)


@register("model", "simple_cnn")
def simple_cnn(input_shape: ImageShape, classes: int, dropout: Share = 0.25) -> Network:
    """HiPer-FedKD's SimpleCNN: three 3 x 3 convolutions (32, 64, 128), 512 hidden, dropout;
    1,147,466 parameters.

    dropout: The share of hidden units left out in training, 0 for none.

    Source: HiPer-FedKD, sec. 2.1.4.
    """
    blocks = [_block(input_shape[0], 32, 3, 1), _block(32, 64, 3, 1), _block(64, 128, 3, 1)]
    return _build("simple_cnn", input_shape, classes, blocks, [512], dropout=dropout)


@register("model", "fedseq_cnn")
def fedseq_cnn(input_shape: ImageShape, classes: int) -> Network:
    """FedSeq's CNN: two 5 x 5 convolutions (64, 64) unpadded, 384 and 192 hidden; 797,962
    parameters on CIFAR-10.

    Source: Li & Lyu, "Convergence Analysis of Sequential Federated Learning" (its `cnncifar`).
    Reading: SFedKD's "simple CNN" is not described; it builds on this code base, so we take this
    one.
    """
    return _build(
        "fedseq_cnn",
        input_shape,
        classes,
        [_block(input_shape[0], 64, 5, 0), _block(64, 64, 5, 0)],
        [384, 192],
    )


@register("model", "qkt_cnn")
def qkt_cnn(input_shape: ImageShape, classes: int) -> Network:
    """QKT's small CNN: two 5 x 5 convolutions (32, 64) and the head, no hidden layer; 94,666
    parameters on CIFAR-10.

    Source: QKT, appendix A.6.3.
    Reading: the paper says "two convolutional layers followed by a fully connected layer" without
    sizes; these are FedNTD's.
    """
    return _build(
        "qkt_cnn",
        input_shape,
        classes,
        [_block(input_shape[0], 32, 5, 2), _block(32, 64, 5, 2)],
        [],
    )


@register("model", "qkt_cnn_pooled")
def qkt_cnn_pooled(
    input_shape: ImageShape, classes: int, norm: Norm = "group", projection: CountOrZero = 0
) -> Network:
    """QKT's small CNN with pooling: three normalised 3 x 3 convolutions (32 to 128), average
    pooling; 94,762 parameters on CIFAR-10.

    norm: What follows each convolution: GroupNorm, or BatchNorm without ("batch_stats") or with
    ("batch") running statistics, as in QKT's ResNet-18.
    projection: The width of a projection under the head, as MOON has it; 0 for none.

    Source: ours. It has what QKT's ResNet-18 has and ``qkt_cnn`` lacks: normalisation, and 128
    features that are means over places. It is about as large as ``qkt_cnn``.
    """
    layers: list[nn.Module] = []
    for inside, out in pairwise([input_shape[0], 32, 64, 128]):
        layers += [
            nn.Conv2d(inside, out, 3, padding=1, bias=False),
            norm_layer(norm, out),
            MaxPool2d(2),
            nn.ReLU(),
        ]
    flat_size("qkt_cnn_pooled", layers, input_shape)  # refuses images that are too small
    projection_layers, width = projected(128, projection)
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *projection_layers)
    return Network(body, width, classes)


@register("model", "cwc_cnn")
def cwc_cnn(input_shape: ImageShape, classes: int) -> Network:
    """CWC's CNN: four 3 x 3 convolutions (64 to 512), 512 and 256 hidden; 2,733,962 parameters on
    CIFAR-10.

    Source: the code of CWC (cyclical weight consolidation).
    """
    widths = [input_shape[0], 64, 128, 256, 512]
    blocks = [_block(a, b, 3, 1) for a, b in pairwise(widths)]
    return _build("cwc_cnn", input_shape, classes, blocks, [512, 256])


@register("model", "digits_cnn")
def digits_cnn(input_shape: ImageShape, classes: int) -> Network:
    """A small CNN for 8 x 8 images: two 3 x 3 convolutions (16, 32), 64 hidden; 13,706 parameters
    on ten digits.
    """
    return _build(
        "digits_cnn",
        input_shape,
        classes,
        [_block(input_shape[0], 16, 3, 1), _block(16, 32, 3, 1)],
        [64],
    )


@register("model", "tiny_cnn")
def tiny_cnn(input_shape: ImageShape, classes: int) -> Network:
    """A tiny CNN for many clients with few images: two 3 x 3 convolutions (8, 16); 1,898 parameters
    on ten digits.
    """
    return _build(
        "tiny_cnn", input_shape, classes, [_block(input_shape[0], 8, 3, 1), _block(8, 16, 3, 1)], []
    )


@register("model", "sphere_cnn")
def sphere_cnn(input_shape: ImageShape, classes: int) -> Network:
    """FedNTD's CNN with features on a circle: 512 hidden, two features of norm 1, and a head
    without bias.

    Source: FedNTD, appendix N, figure 18.
    Reading: the paper does not say how its two-dimensional features are made; here a linear layer
    follows the 512.
    """
    blocks = [_block(input_shape[0], 32, 5, 2), _block(32, 64, 5, 2)]
    return _build("sphere_cnn", input_shape, classes, blocks, [512], circle=True)


@register("model", "sphere_digits_cnn")
def sphere_digits_cnn(input_shape: ImageShape, classes: int) -> Network:
    """The small CNN for 8 x 8 images with features on a circle, as in sphere_cnn."""
    blocks = [_block(input_shape[0], 16, 3, 1), _block(16, 32, 3, 1)]
    return _build("sphere_digits_cnn", input_shape, classes, blocks, [64], circle=True)


def _block(inside: int, out: int, kernel: int, padding: int) -> list[nn.Module]:
    return [nn.Conv2d(inside, out, kernel, padding=padding), MaxPool2d(2), nn.ReLU()]


def _build(
    name: str,
    input_shape: ImageShape,
    classes: int,
    blocks: list[list[nn.Module]],
    hidden: list[int],
    *,
    dropout: float = 0.0,
    projection: int = 0,
    circle: bool = False,
) -> Network:
    layers = [layer for block in blocks for layer in block]
    width = flat_size(name, layers, input_shape)
    layers.append(nn.Flatten())
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    if dropout > 0:
        layers.append(nn.Dropout(dropout))
    if circle:
        body = nn.Sequential(*layers, nn.Linear(width, 2), OnCircle())
        return Network(body, 2, classes, bias=False)
    projection_layers, width = projected(width, projection)
    return Network(nn.Sequential(*layers, *projection_layers), width, classes)


# A convolutional network for series: rows of measurements that were taken one after another.


CHANNELS = (32, 64, 64)
KERNEL = 5


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
