"""What may follow a convolution to normalise its channels: the models' field ``norm``.

- ``"group"`` (default): GroupNorm, each example by itself. No running statistics, nothing depends
  on the batch.
- ``"batch_stats"``: BatchNorm without running statistics, in evaluation too: predictions depend on
  the batch. FedNTD's.
- ``"batch"``: BatchNorm with running statistics, which are buffers, travel and are averaged. QKT's.

Parameters are as many in all three.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from fedstill.errors import ConfigError

Norm = Literal["group", "batch_stats", "batch"]


def norm_layer(norm: Norm, channels: int) -> nn.Module:
    """The layer for images (B, channels, H, W); raises ConfigError for another ``norm``."""
    if norm == "group":
        return nn.GroupNorm(min(32, channels // 4), channels)
    if norm in ("batch", "batch_stats"):
        return nn.BatchNorm2d(channels, track_running_stats=norm == "batch")
    raise ConfigError(f"norm = {norm!r} must be group, batch_stats or batch")


def of_the_batch(m: nn.Module) -> bool:
    """Whether a network's answers depend on the other images of a batch, in evaluation mode too."""
    return any(
        isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is None
        for part in m.modules()
    )
