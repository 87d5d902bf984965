"""From stored values to what a network sees: images normalised, and augmented where the run asks
for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedstill.data.augment import augment, normalise
from fedstill.data.form import IMAGES, MANY, About

SHARD = 100
"""Examples in one evaluation pass; fixed, because results in float32 depend on it in the last bit.
With many more, the outputs of a convolution no longer fit into a core's cache.
"""

MOST_FEATURES = 12
"""Features that are named; the others are counted."""


@dataclass(frozen=True)
class Inputs:
    """How stored values become inputs: of images the mean and spread of each channel, and the
    augmentation steps.

    ``mean``, ``std`` of other numbers, one a column or channel, are those by which they are
    standardised already.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    steps: tuple[str, ...] = ()
    about: About = IMAGES

    def plain(self, values: Tensor) -> Tensor:
        """Values (n, …) as inputs: pixels normalised, in float32; other numbers, and token ids, as
        they are.
        """
        return normalise(values, self.mean, self.std) if values.dtype == torch.uint8 else values

    def stored(self, values: Tensor) -> dict[str, Any]:
        """What makes the same inputs of such values again: shape, type, mean, spread, kind, and
        what names became.
        """
        type_ = str(values.dtype).removeprefix("torch.")
        told = {
            "shape": list(values.shape[1:]),
            "pixels": type_,
            "mean": self.mean,
            "std": self.std,
        }
        if self.about.kind == "image":
            return told
        more = {
            k: v
            for k, v in asdict(self.about).items()
            if k not in ("notes", "cautions", "owners", "kind") and v
        }
        return {**told, "kind": self.about.kind, **more}

    def trained_on(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Values as one training batch, augmented with draws from the generator."""
        if not self.steps:
            return self.plain(values)
        return augment(values, self.steps, self.mean, self.std, generator)


def channels_last(tensor: Tensor) -> Tensor:
    """A four-dimensional tensor in channels-last order, which the CPU's convolutions prefer; others
    as they are.

    On a CUDA card channels come first: small networks train faster so in float32
    (``python -m benchmarks.layout``).
    """
    if tensor.dim() != 4:
        return tensor
    return tensor.contiguous(
        memory_format=torch.contiguous_format if tensor.is_cuda else torch.channels_last
    )


def examples_are(inputs: Mapping[str, Any]) -> str:
    """One sentence on what examples are, of the field ``inputs`` of a journal's event ``start``;
    empty for images.

    >>> examples_are({"kind": "series", "shape": [9, 128]})
    'examples are series: 9 channels of 128 steps'
    """
    kind, shape = inputs.get("kind", "image"), list(inputs.get("shape", ()))
    if kind == "table":
        names = [str(name) for name in inputs.get("features", ())]
        more = f" and {len(names) - MOST_FEATURES} more" if len(names) > MOST_FEATURES else ""
        of = f": {', '.join(names[:MOST_FEATURES])}{more}" if names else ""
        return f"examples are {MANY['table']}, {shape[0]} features{of}"
    if kind == "series":
        return f"examples are {MANY['series']}: {shape[0]} channels of {shape[1]} steps"
    if kind == "text":
        by = f" by {tokenizer}" if (tokenizer := inputs.get("tokenizer")) else ""
        return (
            f"examples are {MANY['text']} as {shape[0]} token ids{by}, of "
            f"{inputs.get('vocabulary', 0):,}"
        )
    if kind == "vector":
        return f"examples are {MANY['vector']} of {' x '.join(map(str, shape))} numbers"
    return ""
