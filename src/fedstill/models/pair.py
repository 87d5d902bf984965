"""Two networks side by side: one that a client keeps, of whatever architecture, and one that all
share.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedstill.core.payload import Tensors
from fedstill.core.records import ModelSpec, as_pairs, as_table_again
from fedstill.core.registry import register
from fedstill.models import contract
from fedstill.models.network import InputShape


class Pair(nn.Module):
    """Networks ``own`` and ``shared``; what the pair gives is what the shared one does."""

    def __init__(self, own: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = own, shared

    def forward(self, x: Tensor) -> Tensor:
        """The shared network's logits (B, C)."""
        return self.shared(x)  # type: ignore[no-any-return]


@register("model", "pair")
def pair(
    input_shape: InputShape,
    classes: int,
    own: str = "cnn",
    shared: str = "cnn",
    own_arguments: dict[str, Any] | None = None,
    shared_arguments: dict[str, Any] | None = None,
    vocabulary: int = 0,
) -> nn.Module:
    """Two networks in one: each client's own, and the one that all share, which is what the
    server's model gives.

    own: The name of the client's own network, or an import path; clients.models can give each
    client another pair.
    shared: The name of the network that all share.
    own_arguments: Fields of the client's own network.
    shared_arguments: Fields of the network that all share.

    Source: Shen et al., "Federated Mutual Learning" (2020).
    """
    spec = ModelSpec("pair", input_shape, classes, vocabulary=vocabulary)
    both = ((own, own_arguments), (shared, shared_arguments))
    return Pair(
        *(contract.built(name, spec, as_table_again(fields or {})) for name, fields in both)
    )


def own_of(spec: ModelSpec, params: Tensors) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The client's own network of a pair, with its parameters."""
    fields = dict(spec.fields)
    table = as_table_again(fields.get("own_arguments") or {})
    own = ModelSpec(
        fields["own"], spec.input_shape, spec.classes, as_pairs(table), vocabulary=spec.vocabulary
    )
    return own, {k.removeprefix("own."): v for k, v in params.items() if k.startswith("own.")}
