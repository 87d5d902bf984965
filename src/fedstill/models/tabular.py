"""Networks for vectors and rows of tables: fully connected networks, logistic regression, residual
networks and transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedstill.core.fields import Count, CountOrZero
from fedstill.core.registry import register
from fedstill.models.network import (
    AttentionBlock,
    InputShape,
    Network,
    RowShape,
    UnitVectors,
    masked_mean,
    projected,
)


@register("model", "mlp")
@register(
    "model",
    "logistic",
    about="Multinomial logistic regression: one linear layer on the flattened example.",
    hidden=(),
)
def mlp(
    input_shape: InputShape,
    classes: int,
    hidden: tuple[Count, ...] = (200, 200),
    projection: CountOrZero = 0,
) -> Network:
    """A fully connected network with ReLU on the flattened example; the defaults are FedAvg's 2NN.

    hidden: The widths of the hidden layers; CWC's MLP has ``(1024,)``.
    projection: The width of a projection before the head, as in MOON; 0 for none.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
    Data", sec. 3.
    """
    layers, width = _hidden_layers(input_shape, hidden)
    projection_layers, width = projected(width, projection)
    return Network(nn.Sequential(*layers, *projection_layers), width, classes)


@register("model", "sphere_mlp")
def sphere_mlp(
    input_shape: InputShape, classes: int, hidden: tuple[Count, ...] = (200, 200)
) -> Network:
    """A fully connected network with features on the unit circle, as in sphere_cnn.

    hidden: The widths of the hidden layers.

    Source: ours; FedNTD, appendix N, has a convolutional network with such features.
    """
    layers, width = _hidden_layers(input_shape, hidden)
    return Network(
        nn.Sequential(*layers, nn.Linear(width, 2), UnitVectors()), 2, classes, bias=False
    )


def _hidden_layers(input_shape: InputShape, hidden: tuple[int, ...]) -> tuple[list[nn.Module], int]:
    """The layers of a fully connected network, and the width of the last one."""
    width = math.prod(input_shape)
    layers: list[nn.Module] = [nn.Flatten()]
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return layers, width


class DenseResidual(nn.Module):
    """A residual block x + path(norm(x)) with two linear layers; (B, D) in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, D)."""
        return x + self.path(x)  # type: ignore[no-any-return]


@register("model", "table_resnet")
def table_resnet(
    input_shape: InputShape, classes: int, width: Count = 128, blocks: Count = 2
) -> Network:
    """A residual network of linear layers on the flattened example.

    width: The number of features.
    blocks: The number of residual blocks, each with two linear layers.

    Source: Gorishniy et al., "Revisiting Deep Learning Models for Tabular Data" (2021), sec. 3.2.
    Reading: LayerNorm replaces the paper's BatchNorm, whose statistics differ between clients;
    there is no dropout.
    """
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(math.prod(input_shape), width)]
    layers += [DenseResidual(width) for _ in range(blocks)]
    return Network(nn.Sequential(*layers, nn.LayerNorm(width), nn.ReLU()), width, classes)


class ColumnAttention(nn.Module):
    """Transformer blocks on the columns of a row, each a token x_j w_j + b_j, and the mean of the
    tokens (B, D).
    """

    def __init__(self, columns: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(columns, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(columns, width).uniform_(-bound, bound))
        self.blocks = nn.ModuleList(AttentionBlock(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Features of rows (B, columns)."""
        x = x.unsqueeze(2) * self.weight + self.bias
        for block in self.blocks:
            x = block(x)
        return masked_mean(self.norm(x))


@register("model", "ft_transformer")
def ft_transformer(
    input_shape: RowShape, classes: int, width: Count = 64, heads: Count = 4, blocks: Count = 2
) -> Network:
    """A transformer on the columns of a row (FT-Transformer): each column is a token.

    width: The width of a token, a multiple of ``heads``.
    heads: The number of attention heads.
    blocks: The number of transformer blocks.

    Source: Gorishniy et al., "Revisiting Deep Learning Models for Tabular Data" (2021), sec. 3.3,
    FT-Transformer.
    Reading: the features are the mean of the tokens; the paper uses a class token. There is no
    dropout. One-hot columns are treated as numeric columns.
    """
    return Network(ColumnAttention(input_shape[0], width, heads, blocks), width, classes)
