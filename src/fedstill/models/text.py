"""Networks for texts. Inputs are token ids (B, L), where 0 is padding; the amount of padding does
not change the logits.

A text that only consists of padding has features of 0. The networks do not use
``nn.EmbeddingBag``, which does not support stacked clients.
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

    width: The width of the embeddings.
    hidden: The widths of hidden layers with ReLU after the mean.

    Source: Joulin et al., "Bag of Tricks for Efficient Text Classification" (2017): fastText
    without n-grams.
    """
    layers: list[nn.Module] = [TokenMean(vocabulary, width)]
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return Network(nn.Sequential(*layers), width, classes)


class TokenConvolutions(nn.Module):
    """Convolutions over the embeddings of a text, and the maximum of each channel: (B, D)."""

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
        # an image with one row: (B, D, 1, L)
        x = self.tokens(ids).transpose(1, 2).unsqueeze(2) * mask
        for layer in self.layers:
            # The mask sets padding to 0 after each layer, so that its length has no effect.
            x = self.pool(torch.relu(layer(x)) * mask)
            mask = self.pool(mask)
        largest: Tensor = x.amax((2, 3))
        return largest


@register("model", "text_cnn")
def text_cnn(vocabulary: int, classes: int, width: Count = 64) -> Network:
    """A CNN for texts: two convolutions over token embeddings (kernel 5), each followed by
    max-pooling by 2, then max-pooling over all positions.

    It suits bytes, and tokens whose order matters.

    width: The width of the embeddings, and the number of channels of the convolutions.

    Source: ours, after Kim, "Convolutional Neural Networks for Sentence Classification" (2014),
    sec. 2.
    """
    return Network(TokenConvolutions(vocabulary, width), width, classes)


class TokenAttention(nn.Module):
    """Transformer blocks on tokens with position embeddings, and the mean of the tokens (B, D)."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(AttentionBlock(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """Features of token ids (B, L), where L is at most the number of position embeddings."""
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

    There is no dropout, so clients can be stacked.

    width: The width of the embeddings, a multiple of ``heads``.
    heads: The number of attention heads.
    blocks: The number of transformer blocks.

    Source: Vaswani et al., "Attention Is All You Need" (2017), sec. 3: the encoder, with layer
    normalisation first.
    """
    return Network(
        TokenAttention(vocabulary, input_shape[-1], width, heads, blocks), width, classes
    )
