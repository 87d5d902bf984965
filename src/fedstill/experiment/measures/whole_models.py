"""Models that measures run: whole ones. A module fills in what a model lacks, with random weights
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedstill.engines.passes import ModelPasses
from fedstill.errors import FedstillError
from fedstill.models import contract
from fedstill.records import Examples, ModelSpec, Tensors


def lacking(spec: ModelSpec, params: Tensors, part: str = "") -> list[str]:
    """The entries of an architecture, below a part of it, that a model is without."""
    there = contract.entries(spec, contract.module(spec, "frozen"))
    return [name for name in there if name.startswith(part) and name not in params]


def whole(spec: ModelSpec, params: Tensors, part: str = "") -> Tensors:
    """A model that has all entries of an architecture, or of a part of it. Raises FedstillError for
    another.
    """
    if missing := lacking(spec, params, part):
        rest = f" and {len(missing) - 1} more entries" if len(missing) > 1 else ""
        raise FedstillError(
            f"a measure was to run a model of a {spec.label} that lacks {missing[0]}{rest}"
        )
    return params


@dataclass(frozen=True)
class WholePasses(ModelPasses):
    """Passes of whole models. Raises FedstillError for one that lacks an entry: of features, one of
    the body.
    """

    def gradients(
        self, params: Tensors, examples: Examples, loss: Any, batch: int, seed: int | None = None
    ) -> Iterator[Tensors]:
        """As ``ModelPasses.gradients``."""
        return super().gradients(whole(self.model, params), examples, loss, batch, seed)

    def _each(
        self,
        run: Callable[..., Tensor],
        params: Tensors,
        examples: Examples,
        model: ModelSpec | None = None,
    ) -> Tensor:
        part = "body." if run is contract.features else ""
        return super()._each(run, whole(model or self.model, params, part), examples, model)
