"""Networks for texts: token ids (B, L) in, of which 0 is padding. Padding changes no logit, however
much there is.

A text of padding alone has features of 0. None has an ``nn.EmbeddingBag``, which cannot be stacked.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedstill.core.fields import Count
from fedstill.core.registry import register
from fedstill.models.network import AttentionBlock, MaxPool2d, Network, masked_mean

KERNEL = 5
CONVOLUTIONS = 2


class TokenMean(nn.Module):
    """The mean (B, D) of the embeddings of a text's tokens."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)

    def forward(self, ids: Tensor) -> Tensor:
        """Features of token ids (B, L)."""
        return masked_mean(self.tokens(ids), ids != 0)


@register("model", "bag")
def bag(
    vocabulary: int, classes: int, width: Count = 64, hidden: tuple[Count, ...] = ()
) -> Network:
    """A bag of words: the mean of the embeddings of a text's tokens, independent of their order.

    width: The numbers of an embedding.
    hidden: The sizes of hidden layers after the mean, with ReLU between.

    Source: Joulin et al., "Bag of Tricks for Efficient Text Classification" (2017), its fastText
    without n-grams.
    """
    layers: list[nn.Module] = [TokenMean(vocabulary, width)]
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return Network(nn.Sequential(*layers), width, classes)


class TokenConvolutions(nn.Module):
    """Convolutions over the embeddings of a text, and of each channel the largest number: (B,
    D).
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.Conv2d(width, width, (1, KERNEL), padding=(0, KERNEL // 2))
            for _ in range(CONVOLUTIONS)
        )
        self.pool = MaxPool2d((1, 2), ceil_mode=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Features of token ids (B, L)."""
        mask = (ids != 0)[:, None, None, :].to(self.tokens.weight.dtype)
        # an image of one row: (B, D, 1, L)
        x = self.tokens(ids).transpose(1, 2).unsqueeze(2) * mask
        for layer in self.layers:
            # Padding is 0 again after each layer, like the border: so its length has no effect.
            x = self.pool(torch.relu(layer(x)) * mask)
            mask = self.pool(mask)
        largest: Tensor = x.amax((2, 3))
        return largest


@register("model", "text_cnn")
def text_cnn(vocabulary: int, classes: int, width: Count = 64) -> Network:
    """Two convolutions over token embeddings (kernel 5), each with max-pooling by 2, then max-
    pooling over all positions.

    For bytes, or tokens whose order counts.

    width: The numbers of an embedding, and the channels of the convolutions.

    Source: ours, after Kim, "Convolutional Neural Networks for Sentence Classification" (2014),
    sec. 2.
    """
    return Network(TokenConvolutions(vocabulary, width), width, classes)


class TokenAttention(nn.Module):
    """Blocks of attention between a text's tokens, each with its place, and their mean (B, D)."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(AttentionBlock(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """Features of token ids (B, L), L at most as long as there are places."""
        mask = ids != 0
        x = self.tokens(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        return masked_mean(self.norm(x), mask)


@register("model", "tiny_transformer")
def tiny_transformer(
    input_shape: tuple[int, ...],
    vocabulary: int,
    classes: int,
    *,
    width: Count = 64,
    heads: Count = 4,
    blocks: Count = 2,
) -> Network:
    """A small transformer: embeddings of tokens and positions, attention blocks, and the mean over
    tokens.

    No dropout, so it can be stacked and draws nothing.

    width: The numbers of an embedding, a multiple of ``heads``.
    heads: How many heads the attention of a block has.
    blocks: How many blocks there are.

    Source: Vaswani et al., "Attention Is All You Need" (2017), sec. 3, its encoder, with norms
    first.
    """
    return Network(
        TokenAttention(vocabulary, input_shape[-1], width, heads, blocks), width, classes
    )
