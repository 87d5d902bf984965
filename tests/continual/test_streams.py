"""Streams of tasks: by class, by domain, and drift; and transformations in integer arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedstill.continual.streams import class_stream, domain_stream, drift_stream
from fedstill.core.errors import ConfigError

LABELS = np.arange(200) % 10
"""Twenty examples of each of ten classes."""
SITES = np.arange(200) // 100
"""A column of the data with two values."""


def class_order(tasks: int, seed: int = 0, **fields: Any) -> tuple[tuple[int, ...], ...]:
    """The classes of each task."""
    return class_stream(LABELS, tasks, seed, 10, **fields).classes


def test_classes_are_divided_and_each_example_follows_its_class() -> None:
    cut = class_stream(LABELS, 4, 3, 10)

    assert [len(task_classes) for task_classes in cut.classes] == [3, 3, 2, 2]
    assert sorted(c for task_classes in cut.classes for c in task_classes) == list(range(10))
    assert cut.task is not None
    for task, task_classes in enumerate(cut.classes):
        assert set(LABELS[cut.task == task]) == set(task_classes)


def test_the_given_order_is_that_of_the_class_numbers() -> None:
    assert class_order(5, order="given") == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
    with_larger_first_task = ((0, 1, 2, 3, 4, 5), (6, 7), (8, 9))
    assert class_order(3, order="given", first=6) == with_larger_first_task


def test_other_orders_are_drawn_from_the_seed_or_written() -> None:
    legacy = class_order(5, seed=1993, order="legacy")
    permutation = np.random.RandomState(1993).permutation(10)
    assert np.concatenate(legacy).tolist() == permutation.tolist()

    assert class_order(5, seed=0) != class_order(5, seed=1)

    written = ((9, 0), (1, 2, 3), (4, 5, 6, 7, 8))
    assert class_order(3, order=written) == written


@pytest.mark.parametrize(
    ("tasks", "fields", "message"),
    [
        (11, {}, r"stream\.tasks"),
        (3, {"first": 9}, r"stream\.first"),
        (2, {"order": ((0, 1), (2, 3), (4,))}, "3 tasks"),
        (2, {"order": ((0, 1), (1, 2))}, r"stream\.order"),
    ],
)
def test_an_impossible_class_order_is_refused(
    tasks: int, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        class_order(tasks, **fields)


def test_examples_of_domains_are_stratified() -> None:
    """Each of four tasks has five of the twenty examples of every class."""
    cut = domain_stream(LABELS, None, 4, 0, 10, transform="permute")
    assert cut.task is not None
    for task in range(4):
        assert np.bincount(LABELS[cut.task == task], minlength=10).tolist() == [5] * 10


def test_every_task_may_have_all_examples() -> None:
    assert domain_stream(LABELS, None, 4, 0, 10, transform="permute", share="all").task is None


def test_each_value_of_a_column_is_a_task() -> None:
    cut = domain_stream(LABELS, SITES, 2, 0, 10, column="site")
    assert cut.task is not None
    assert cut.task.tolist() == [0] * 100 + [1] * 100


@pytest.mark.parametrize(
    ("domains", "tasks", "fields", "message"),
    [
        (SITES, 5, {"column": "site"}, r"stream\.tasks = 2"),
        (None, 2, {"column": "site"}, "no such column"),
        (None, 2, {}, r"stream\.column"),
        (None, 5, {"transform": "rotate90"}, r"stream\.tasks"),
    ],
    ids=["too many tasks", "no column", "neither", "a fifth turn"],
)
def test_impossible_domains_are_refused(
    domains: NDArray[np.int64] | None, tasks: int, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        domain_stream(LABELS, domains, tasks, 0, 10, **fields)


IMAGES = torch.randint(
    0, 256, (3, 2, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)


def second_transform(name: str, tasks: int = 2) -> Callable[[torch.Tensor], torch.Tensor]:
    """The transformation of the second task; the first one has the original images."""
    cut = domain_stream(LABELS, None, tasks, 0, 10, transform=name)  # type: ignore[arg-type]
    first, second, *_ = cut.transforms
    assert first is None
    assert second is not None
    return second


@pytest.mark.parametrize("name", ["rotate90", "permute", "invert", "blur", "noise"])
def test_a_transformation_returns_other_bytes_of_the_same_shape(name: str) -> None:
    transform = second_transform(name)
    transformed = transform(IMAGES)

    assert transformed.dtype == torch.uint8
    assert transformed.shape == IMAGES.shape
    assert not torch.equal(transformed, IMAGES)
    assert torch.equal(transform(IMAGES), transformed)
    assert torch.equal(transform(IMAGES[1:2]), transformed[1:2]), "images do not depend on others"


def test_four_turns_are_the_identity() -> None:
    turn = second_transform("rotate90", tasks=4)
    images = IMAGES
    for _ in range(4):
        images = turn(images)
    assert torch.equal(images, IMAGES)
    with pytest.raises(ConfigError, match="square"):
        turn(IMAGES[:, :, :, :5])


def test_a_permutation_keeps_every_histogram() -> None:
    permuted = second_transform("permute")(IMAGES)
    sorted_pixels = IMAGES.flatten(2).sort().values
    assert torch.equal(permuted.flatten(2).sort().values, sorted_pixels)


def test_two_inversions_are_the_identity() -> None:
    invert = second_transform("invert")
    assert torch.equal(invert(invert(IMAGES)), IMAGES)


@pytest.mark.parametrize(
    ("path", "mix"),
    [("line", (0, 0.25, 0.5, 0.75, 1)), ("jump", (0, 0, 0, 1, 1)), ("return", (0, 0.5, 1, 0.5, 0))],
)
def test_paths_of_drift(path: str, mix: tuple[float, ...]) -> None:
    assert drift_stream(LABELS, 5, 0, 10, path).mix == mix  # type: ignore[arg-type]
    assert drift_stream(LABELS, 1, 0, 10, path).mix == (0,)  # type: ignore[arg-type]
