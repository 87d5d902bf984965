"""Cuts of a training set: by class, by domain, and drift; whole-number transforms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedstill.continual.streams import class_stream, domain_stream, drift_stream
from fedstill.core.errors import ConfigError

LABELS = np.arange(200) % 10


def test_classes_are_divided_and_each_example_follows_its_class() -> None:
    cut = class_stream(LABELS, 4, 3, 10)
    assert [len(own) for own in cut.classes] == [3, 3, 2, 2]
    assert sorted(c for own in cut.classes for c in own) == list(range(10))
    assert cut.task is not None
    for task, own in enumerate(cut.classes):
        assert set(LABELS[cut.task == task]) == set(own)


def test_the_orders() -> None:
    assert class_stream(LABELS, 5, 3, 10, order="given").classes == (
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
        (8, 9),
    )
    legacy = [c for own in class_stream(LABELS, 5, 1993, 10, order="legacy").classes for c in own]
    assert legacy == np.random.RandomState(1993).permutation(10).tolist()
    assert class_stream(LABELS, 3, 0, 10, order="given", first=6).classes == (
        (0, 1, 2, 3, 4, 5),
        (6, 7),
        (8, 9),
    )
    assert class_stream(LABELS, 5, 0, 10).classes != class_stream(LABELS, 5, 1, 10).classes
    written = ((9, 0), (1, 2, 3), (4, 5, 6, 7, 8))
    assert class_stream(LABELS, 3, 0, 10, order=written).classes == written


@pytest.mark.parametrize(
    ("tasks", "fields", "said"),
    [
        (11, {}, r"stream\.tasks"),
        (3, {"first": 9}, r"stream\.first"),
        (2, {"order": ((0, 1), (2, 3), (4,))}, "3 tasks"),
        (2, {"order": ((0, 1), (1, 2))}, r"stream\.order"),
    ],
)
def test_class_orders_that_cannot_be(tasks: int, fields: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        class_stream(LABELS, tasks, 0, 10, **fields)


def test_examples_of_domains_are_stratified() -> None:
    cut = domain_stream(LABELS, None, 4, 0, 10, transform="permute")
    assert cut.task is not None
    assert all(
        np.bincount(LABELS[cut.task == t], minlength=10).tolist() == [5] * 10 for t in range(4)
    )
    assert domain_stream(LABELS, None, 4, 0, 10, transform="permute", share="all").task is None


def test_domains_of_a_column() -> None:
    cut = domain_stream(LABELS, np.arange(200) // 100, 2, 0, 10, column="site")
    assert cut.task is not None
    assert cut.task.tolist() == [0] * 100 + [1] * 100
    with pytest.raises(ConfigError, match=r"stream\.tasks = 2"):
        domain_stream(LABELS, np.arange(200) // 100, 5, 0, 10, column="site")
    with pytest.raises(ConfigError, match="no such column"):
        domain_stream(LABELS, None, 2, 0, 10, column="site")
    with pytest.raises(ConfigError, match=r"stream\.column"):
        domain_stream(LABELS, None, 2, 0, 10)
    with pytest.raises(ConfigError, match=r"stream\.tasks"):
        domain_stream(LABELS, None, 5, 0, 10, transform="rotate90")


IMAGES = torch.randint(
    0, 256, (3, 2, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)


@pytest.mark.parametrize("name", ["rotate90", "permute", "invert", "blur", "noise"])
def test_transforms_are_whole_numbers_of_the_same_shape(name: str) -> None:
    first, second = domain_stream(LABELS, None, 2, 0, 10, transform=name).transforms  # type: ignore[arg-type]
    assert first is None
    assert second is not None
    shown = second(IMAGES)
    assert (shown.dtype, shown.shape) == (torch.uint8, IMAGES.shape)
    assert not torch.equal(shown, IMAGES)
    assert torch.equal(second(IMAGES), shown)
    assert torch.equal(second(IMAGES[1:2]), shown[1:2])  # each image by itself


def test_four_turns_are_the_identity_and_a_permutation_keeps_every_histogram() -> None:
    _, turn, *_ = domain_stream(LABELS, None, 4, 0, 10, transform="rotate90").transforms
    assert turn is not None
    assert torch.equal(turn(turn(turn(turn(IMAGES)))), IMAGES)
    _, permuted = domain_stream(LABELS, None, 2, 0, 10, transform="permute").transforms
    assert permuted is not None
    assert torch.equal(permuted(IMAGES).flatten(2).sort().values, IMAGES.flatten(2).sort().values)
    _, inverted = domain_stream(LABELS, None, 2, 0, 10, transform="invert").transforms
    assert inverted is not None
    assert torch.equal(inverted(inverted(IMAGES)), IMAGES)
    with pytest.raises(ConfigError, match="square"):
        turn(IMAGES[:, :, :, :5])


@pytest.mark.parametrize(
    ("path", "mix"),
    [("line", (0, 0.25, 0.5, 0.75, 1)), ("jump", (0, 0, 0, 1, 1)), ("return", (0, 0.5, 1, 0.5, 0))],
)
def test_paths_of_drift(path: str, mix: tuple[float, ...]) -> None:
    assert drift_stream(LABELS, 5, 0, 10, path).mix == mix  # type: ignore[arg-type]
    assert drift_stream(LABELS, 1, 0, 10, path).mix == (0,)  # type: ignore[arg-type]
