"""Attention between the parts of an example, in products that can be stacked and derived twice; and
masked means.

torch's own attention (``scaled_dot_product_attention``) has no rule under ``torch.func.vmap`` and,
on the CPU, no second derivative: so this is plain matrix products and a softmax.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from fedstill.errors import ConfigError

FAR = -1e9
"""What stands in place of a score that does not count; finite, so that a text of padding alone
gives numbers.
"""


def masked_mean(x: Tensor, there: Tensor | None = None) -> Tensor:
    """The mean (B, D) of the parts (B, L, D) that are there, (B, L) bool; 0 where none is. Of all
    without a mask.
    """
    if there is None:
        return x.mean(1)
    kept = there.unsqueeze(2).to(x.dtype)
    return (x * kept).sum(1) / kept.sum(1).clamp(min=1)


class Attention(nn.Module):
    """Self-attention with several heads: (B, L, D) in and out; parts that are not there are not
    looked at.

    Source: Vaswani et al., "Attention Is All You Need" (2017), sec. 3.2.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"width = {width} must be a multiple of heads = {heads}")
        self.heads = heads
        self.asked = nn.Linear(width, width)
        self.keys = nn.Linear(width, width)
        self.values = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, there: Tensor | None = None) -> Tensor:
        """What each part learns of the others."""
        asked, keys, values = (
            part(x).unflatten(2, (self.heads, -1)) for part in (self.asked, self.keys, self.values)
        )
        # (B, heads, L, L)
        scores = asked.transpose(1, 2) @ keys.permute(0, 2, 3, 1) / math.sqrt(asked.shape[3])
        if there is not None:
            scores = scores.masked_fill(~there[:, None, None, :], FAR)
        mixed = scores.softmax(3) @ values.transpose(1, 2)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class AttentionBlock(nn.Module):
    """x + attention(norm(x)), and then x + two linear layers of norm(x): (B, L, D) in and out.

    Source: Xiong et al., "On Layer Normalization in the Transformer Architecture" (2020): norms
    come first.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, there: Tensor | None = None) -> Tensor:
        """Parts that have seen each other."""
        x = x + self.attention(self.norm(x), there)
        return x + self.dense(x)  # type: ignore[no-any-return]
