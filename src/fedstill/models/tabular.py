"""Networks for rows of a table: as many numbers as there are columns."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedstill.core.fields import Count
from fedstill.core.registry import register
from fedstill.models.layers import AttentionBlock, masked_mean
from fedstill.models.network import InputShape, Network, RowShape


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
    """A residual network of linear layers on all of an example's numbers.

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
    """A transformer on the columns of a row: each number becomes a token, and tokens look at each
    other.

    width: The numbers of a token, a multiple of ``heads``.
    heads: How many heads the attention of a block has.
    blocks: How many blocks there are.

    Source: Gorishniy et al., "Revisiting Deep Learning Models for Tabular Data" (2021), sec. 3.3,
    FT-Transformer.
    Reading: the features are the mean of the tokens, where the paper has a token of its own for the
    class; there is no dropout. One-hot columns are numbers like others.
    """
    return Network(ColumnAttention(input_shape[0], width, heads, blocks), width, classes)
