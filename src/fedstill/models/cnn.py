"""Convolutional networks: LeNet-5, AlexNet, small networks of papers, and a network for series."""

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
    SeriesShape,
    UnitVectors,
    flat_size,
    norm_layer,
    projected,
)

# LeNet-5, with ReLU and max-pooling.


@register("model", "lenet5")
def lenet5(input_shape: ImageShape, classes: int) -> Network:
    """LeNet-5: two 5 x 5 convolutions (6, 16 channels) without padding, 120 and 84 hidden units;
    44,426 parameters on 28 x 28 images.

    Source: LeCun et al., "Gradient-Based Learning Applied to Document Recognition", as in FedSeq's
    code.
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
    """AlexNet-8: five 3 x 3 convolutions (32 to 256 channels), 1024 and 512 hidden units; 3,868,746
    parameters on CIFAR-10.

    relu: Whether ReLU follows every layer. With false, there is no ReLU after the third and fourth
    convolution, nor after the hidden layers, which are then a single linear map.

    Source: SFedKD, sec. 4.1 ("8-layer AlexNet").
    Reading: the paper gives no sizes, and its code base has no AlexNet. This is the AlexNet of
    split-learning code, which has ``relu = false``; our default applies ReLU everywhere.
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


# Small convolutional networks of papers, and networks for 8 x 8 digits.
#
# Max-pooling comes before ReLU. Both are monotone, so the result is the same, and ReLU has a
# quarter of the work.


@register("model", "cnn")
def cnn(input_shape: ImageShape, classes: int, projection: CountOrZero = 0) -> Network:
    """FedNTD's CNN: two 5 x 5 convolutions (32, 64 channels), 512 hidden units; 2,156,490
    parameters on CIFAR-10.

    projection: The width of a projection before the head, as in MOON (256 there); 0 for none.

    Source: FedNTD, appendix B.1; the CNN of McMahan et al. (FedAvg), with padding.
    """
    blocks = [_block(input_shape[0], 32, 5, 2), _block(32, 64, 5, 2)]
    return _build("cnn", input_shape, classes, blocks, [512], projection=projection)


@register("model", "simple_cnn")
def simple_cnn(input_shape: ImageShape, classes: int, dropout: Share = 0.25) -> Network:
    """HiPer-FedKD's SimpleCNN: three 3 x 3 convolutions (32, 64, 128 channels), 512 hidden units,
    dropout; 1,147,466 parameters on CIFAR-10.

    dropout: The probability of dropout before the head; 0 for none.

    Source: HiPer-FedKD, sec. 2.1.4.
    """
    blocks = [_block(input_shape[0], 32, 3, 1), _block(32, 64, 3, 1), _block(64, 128, 3, 1)]
    return _build("simple_cnn", input_shape, classes, blocks, [512], dropout=dropout)


@register("model", "fedseq_cnn")
def fedseq_cnn(input_shape: ImageShape, classes: int) -> Network:
    """FedSeq's CNN: two 5 x 5 convolutions (64, 64 channels) without padding, 384 and 192 hidden
    units; 797,962 parameters on CIFAR-10.

    Source: Li & Lyu, "Convergence Analysis of Sequential Federated Learning" (its `cnncifar`).
    Reading: SFedKD does not describe its "simple CNN". Its code builds on this code base, so we
    assume this network.
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
    """QKT's small CNN: two 5 x 5 convolutions (32, 64 channels), no hidden layer; 94,666 parameters
    on CIFAR-10.

    Source: QKT, appendix A.6.3.
    Reading: the paper says "two convolutional layers followed by a fully connected layer" without
    sizes; we use FedNTD's sizes.
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
    """QKT's small CNN with normalisation and average pooling: three 3 x 3 convolutions (32 to 128
    channels); 94,762 parameters on CIFAR-10.

    norm: The normalisation after each convolution: GroupNorm ("group"), or BatchNorm without
    ("batch_stats") or with ("batch") running statistics, as in QKT's ResNet-18.
    projection: The width of a projection before the head, as in MOON; 0 for none.

    Source: ours. Like QKT's ResNet-18, and unlike ``qkt_cnn``, it has normalisation, and its 128
    features are means over positions. It is about as large as ``qkt_cnn``.
    """
    layers: list[nn.Module] = []
    for inside, out in pairwise([input_shape[0], 32, 64, 128]):
        layers += [
            nn.Conv2d(inside, out, 3, padding=1, bias=False),
            norm_layer(norm, out),
            MaxPool2d(2),
            nn.ReLU(),
        ]
    flat_size("qkt_cnn_pooled", layers, input_shape)  # raises ConfigError for small images
    projection_layers, width = projected(128, projection)
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *projection_layers)
    return Network(body, width, classes)


@register("model", "cwc_cnn")
def cwc_cnn(input_shape: ImageShape, classes: int) -> Network:
    """CWC's CNN: four 3 x 3 convolutions (64 to 512 channels), 512 and 256 hidden units; 2,733,962
    parameters on CIFAR-10.

    Source: the code of CWC (cyclical weight consolidation).
    """
    widths = [input_shape[0], 64, 128, 256, 512]
    blocks = [_block(a, b, 3, 1) for a, b in pairwise(widths)]
    return _build("cwc_cnn", input_shape, classes, blocks, [512, 256])


@register("model", "digits_cnn")
def digits_cnn(input_shape: ImageShape, classes: int) -> Network:
    """A small CNN for 8 x 8 images: two 3 x 3 convolutions (16, 32 channels), 64 hidden units;
    13,706 parameters on 8 x 8 digits.
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
    """A tiny CNN for many clients with few images: two 3 x 3 convolutions (8, 16 channels); 1,898
    parameters on 8 x 8 digits.
    """
    return _build(
        "tiny_cnn", input_shape, classes, [_block(input_shape[0], 8, 3, 1), _block(8, 16, 3, 1)], []
    )


@register("model", "sphere_cnn")
def sphere_cnn(input_shape: ImageShape, classes: int) -> Network:
    """FedNTD's CNN with features on the unit circle: 512 hidden units, two features of norm 1, and
    a head without bias.

    Source: FedNTD, appendix N, figure 18.
    Reading: the paper does not say how it obtains two-dimensional features; here a linear layer
    follows the 512 units.
    """
    blocks = [_block(input_shape[0], 32, 5, 2), _block(32, 64, 5, 2)]
    return _build("sphere_cnn", input_shape, classes, blocks, [512], circle=True)


@register("model", "sphere_digits_cnn")
def sphere_digits_cnn(input_shape: ImageShape, classes: int) -> Network:
    """The CNN digits_cnn with features on the unit circle, as in sphere_cnn."""
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
        body = nn.Sequential(*layers, nn.Linear(width, 2), UnitVectors())
        return Network(body, 2, classes, bias=False)
    projection_layers, width = projected(width, projection)
    return Network(nn.Sequential(*layers, *projection_layers), width, classes)


# A convolutional network for series: channels of measurements over time.


CHANNELS = (32, 64, 64)
KERNEL = 5


@register("model", "series_cnn")
def series_cnn(input_shape: SeriesShape, classes: int, hidden: Count = 128) -> Network:
    """A CNN for series: three convolutions over time (kernel 5; 32, 64, 64 channels), each followed
    by max-pooling by 2, and one hidden layer.

    A series (channels, L) needs L >= 8; a shorter one raises ConfigError. The convolutions treat a
    series as an image with one row, which is faster in torch than one-dimensional convolutions.

    hidden: The number of units of the hidden layer.

    Source: ours, after Zeng et al., "Convolutional Neural Networks for Human Activity Recognition
    using Mobile Sensors" (2014).
    """
    channels, steps = input_shape
    least = 2 ** len(CHANNELS)
    if steps < least:
        raise ConfigError(
            f"model 'series_cnn' needs series of at least {least} steps, but the data have "
            f"{steps}; set model.name = 'mlp'"
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
