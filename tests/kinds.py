"""Small data of every kind but images: a table, series and texts, made of tensors; and a network
for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors

CLASSES = 4
VOCABULARY = 30
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
    train = _examples(kind, size, draw)
    test = _examples(kind, 40, draw)
    names = [f"class {number}" for number in range(CLASSES)]
    if kind == "text":
        return from_tensors("small text", train, test, classes=names, vocabulary=VOCABULARY)
    return from_tensors(f"small {kind}", train, test, classes=names, kind=kind)  # type: ignore[arg-type]


def _examples(kind: str, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """The values of examples, and their labels."""
    labels = torch.arange(count) % CLASSES
    if kind == "text":
        return _texts(labels, draw), labels
    return _numbers(kind, labels, draw), labels


def _numbers(kind: str, labels: Tensor, draw: torch.Generator) -> Tensor:
    shape = SHAPES[kind]
    centres = torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(1))
    return centres[labels] + 0.7 * torch.randn(len(labels), *shape, generator=draw)


def _texts(labels: Tensor, draw: torch.Generator) -> Tensor:
    """Half of the words are typical of the class. Each text has another length, and the first one
    is empty.
    """
    length = SHAPES["text"][0]
    shape = (len(labels), length)
    typical = 1 + 7 * labels.unsqueeze(1) + torch.randint(7, shape, generator=draw)
    arbitrary = torch.randint(1, VOCABULARY, shape, generator=draw)
    is_typical = torch.rand(shape, generator=draw) < 0.5
    words = torch.where(is_typical, typical, arbitrary)

    ends = torch.randint(3, length + 1, (len(labels), 1), generator=draw)
    ends[0] = 0
    return words * (torch.arange(length) < ends)
