"""The examples that a file names, by their positions in the training set or by values of a column."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.core.files import read_file
from fedstill.core.records import Examples
from fedstill.data.sources import load_dataset
from fedstill.running.client_data import set_public_apart, subset, training_and_test_sets
from fedstill.running.preparation import reading_options
from fedstill.unlearning.strategy import OriginalRun


def read_positions(path: Path) -> tuple[int, ...]:
    """The positions in a file, one on each line; raises ConfigError for a line that is none."""
    positions = []
    for number, line in _lines(path):
        if not line.isdecimal():
            raise ConfigError(
                f"{path}, line {number}: {line[:40]!r} is no position, a whole number from 0; name "
                "the column of such values with --column"
            )
        positions.append(int(line))
    return tuple(sorted(set(positions)))


def read_values(path: Path) -> tuple[str, ...]:
    """The values in a file, one on each line."""
    return tuple(dict.fromkeys(line for _, line in _lines(path)))


def _lines(path: Path) -> Sequence[tuple[int, str]]:
    """The lines of a file that are not empty, with their numbers."""
    try:
        text = read_file(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--examples: cannot read {path}: {error}") from error
    numbered = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    lines = [(number, line) for number, line in numbered if line]
    if not lines:
        raise ConfigError(f"--examples: {path} has no line with an example")
    return lines


def positions_of_values(
    original: OriginalRun, column: str, values: Collection[str]
) -> tuple[int, ...]:
    """The positions, in the training set of a run, of the examples with these values of a column.

    The data are read once more, with the column. Raises ConfigError for a value that no training
    example has, and for data without columns.
    """
    settings = original.settings
    if original.data is not None:
        raise ConfigError("--column: the data of this run are in memory; name positions")
    options = {**reading_options(settings), "owner": column}
    dataset = load_dataset(settings.data.name, **options)
    train, _ = training_and_test_sets(settings, dataset)
    train = subset(train, settings.data.train_size, "train_size")
    train = set_public_apart(settings, dataset, train).train
    _check_same(original, train, column)
    assert train.owners is not None  # they have been asked for

    codes = {name: code for code, name in enumerate(dataset.about.owners)}
    unknown = [value for value in values if value not in codes]
    if unknown:
        raise ConfigError(f"--examples: column {column!r} has no value {unknown[0]!r}")
    wanted = torch.tensor([codes[value] for value in values])
    positions: list[int] = torch.isin(train.owners, wanted).nonzero().flatten().tolist()
    if not positions:
        raise ConfigError(
            f"--examples: no training example has one of these values of column {column!r}"
        )
    return tuple(positions)


def _check_same(original: OriginalRun, train: Examples, column: str) -> None:
    """Raise ConfigError if the data have other rows when they are read with the column."""
    labels: Tensor = original.prepared.sites.train.labels.cpu()
    if not torch.equal(labels, train.labels):
        raise ConfigError(
            f"--column {column}: with this column the data have other rows, for example because "
            "it has missing values; name positions"
        )
