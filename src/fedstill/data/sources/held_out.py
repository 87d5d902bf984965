"""A test split for data that have none: a fifth of every class, the same on every machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedstill.data.sources.decoded import Decoded

TEST_SHARE = 0.2
SEED = 0


def hold_out(data: Decoded) -> Decoded:
    """``data`` with a test split: as it is if it has one, else a stratified fifth of train, in data-set order.

    A class gives round(n / 5) examples, drawn by NumPy's frozen legacy stream at seed 0; one of a single example none.
    """
    if "test" in data.splits:
        return data
    values, labels = data.splits["train"]
    stream = np.random.RandomState(SEED)
    held = np.zeros(len(labels), dtype=bool)
    for c in np.unique(labels):
        own = stream.permutation(np.flatnonzero(labels == c))
        held[own[: round(TEST_SHARE * len(own))]] = True
    splits = {**data.splits, "train": (values[~held], labels[~held]), "test": (values[held], labels[held])}
    owners = {**data.owners}
    if "train" in owners:
        owners |= {"train": owners["train"][~held], "test": owners["train"][held]}
    return replace(data, splits=splits, owners=owners)
