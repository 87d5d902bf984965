"""Networks run so that running means and variances have gradients, as weights do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import batch_norm, instance_norm
from torch.overrides import TorchFunctionMode


class ThroughNorms(TorchFunctionMode):
    """Within it, normalisation by running statistics is a formula with gradients to them; all else
    is torch's own.

    torch's own kernels refuse to be derived by the statistics. The formula is theirs; only rounding
    differs.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """A function of torch's, or what stands in its place."""
        return _OWN.get(func, func)(*args, **(kwargs or {}))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return _by_statistics(input, running_mean, running_var, weight, bias, eps)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if use_input_stats or running_mean is None or running_var is None:
        return instance_norm(
            input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
    return _by_statistics(input, running_mean, running_var, weight, bias, eps)


def _by_statistics(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias by channel: x is (B, channels, …), all else
    (channels,).
    """
    shape = (1, -1, *[1] * (x.dim() - 2))
    out = (x - mean.view(shape)) / (var.view(shape) + eps).sqrt()
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


_OWN: dict[Any, Callable[..., Tensor]] = {batch_norm: _batch_norm, instance_norm: _instance_norm}
