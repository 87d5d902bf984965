"""Networks on vectors of numbers: fully connected networks, the linear model without a hidden
layer, and networks for the rows of a table.
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
    OnCircle,
    RowShape,
    masked_mean,
    projected,
)


@register("model", "mlp")
@register(
    "model",
    "logistic",
    about="Multinomial logistic regression: one linear layer on all numbers of an example.",
    hidden=(),
)
def mlp(
    input_shape: InputShape,
    classes: int,
    hidden: tuple[Count, ...] = (200, 200),
    projection: CountOrZero = 0,
) -> Network:
    """A fully connected network with ReLU on all numbers of an example; the defaults are those of
    FedAvg's 2NN.

    hidden: The sizes of the hidden layers; CWC's MLP is ``(1024,)``.
    projection: The width of a projection under the head, as MOON has it; 0 for none.

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
    """A fully connected network with features on a circle, as in sphere_cnn.

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


class DenseResidual(nn.Module):
    """x + two linear layers of norm(x): (B, D) in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The features, a little further."""
        return x + self.path(x)  # type: ignore[no-any-return]


@register("model", "table_resnet")
def table_resnet(
    input_shape: InputShape, classes: int, width: Count = 128, blocks: Count = 2
) -> Network:
    """A residual network of linear layers on all numbers of an example.

    width: The number of features.
    blocks: How many residual blocks of two linear layers there are.

    Source: Gorishniy et al., "Revisiting Deep Learning Models for Tabular Data" (2021), sec. 3.2.
    Reading: LayerNorm stands for the paper's BatchNorm, whose statistics differ between clients;
    there is no dropout.
    """
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(math.prod(input_shape), width)]
    layers += [DenseResidual(width) for _ in range(blocks)]
    return Network(nn.Sequential(*layers, nn.LayerNorm(width), nn.ReLU()), width, classes)


class ColumnAttention(nn.Module):
    """Blocks of attention between the columns of a row, each a token x_j w_j + b_j, and their mean
    (B, D).
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

    width: The numbers of a token, a multiple of ``heads``.
    heads: How many heads the attention of a block has.
    blocks: How many blocks there are.

    Source: Gorishniy et al., "Revisiting Deep Learning Models for Tabular Data" (2021), sec. 3.3,
    FT-Transformer.
    Reading: the features are the mean of the tokens, where the paper has a token of its own for the
    class; there is no dropout. One-hot columns are numbers like others.
    """
    return Network(ColumnAttention(input_shape[0], width, heads, blocks), width, classes)
