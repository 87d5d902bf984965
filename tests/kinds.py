"""Small data of every kind but images: a table, series and texts, made of tensors; and a network
for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors

CLASSES, VOCABULARY = 4, 30
SHAPES: dict[str, tuple[int, ...]] = {"table": (6,), "series": (2, 16), "text": (12,)}
NETWORKS: dict[str, dict[str, object]] = {
    "table": {"name": "mlp", "hidden": (8,)},
    "series": {"name": "series_cnn", "hidden": 8},
    "text": {"name": "bag", "width": 6, "hidden": (8,)},
}


def small_data(kind: str, size: int = 72) -> Dataset:
    """Four classes of a kind: numbers around a centre of their class, or texts of words that their
    class prefers.
    """
    draw = torch.Generator().manual_seed(0)

    def some(n: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(n) % CLASSES
        return (_texts(labels, draw) if kind == "text" else _numbers(kind, labels, draw)), labels

    names = [f"class {c}" for c in range(CLASSES)]
    own = {"vocabulary": VOCABULARY} if kind == "text" else {"kind": kind}
    return from_tensors(f"small {kind}", some(size), some(40), classes=names, **own)  # type: ignore[arg-type]


def _numbers(kind: str, labels: Tensor, draw: torch.Generator) -> Tensor:
    shape = SHAPES[kind]
    centres = torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(1))
    return centres[labels] + 0.7 * torch.randn(len(labels), *shape, generator=draw)


def _texts(labels: Tensor, draw: torch.Generator) -> Tensor:
    """Half of the words are of the class, each text has another length, and the first has none at
    all.
    """
    length = SHAPES["text"][0]
    own = 1 + 7 * labels.unsqueeze(1) + torch.randint(7, (len(labels), length), generator=draw)
    any_ = torch.randint(1, VOCABULARY, (len(labels), length), generator=draw)
    words = torch.where(torch.rand(len(labels), length, generator=draw) < 0.5, own, any_)
    ends = torch.randint(3, length + 1, (len(labels), 1), generator=draw)
    ends[0] = 0
    return words * (torch.arange(length) < ends)
