"""A test split for data that have none: a fifth of every class, the same on every machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedstill.data.cache import Decoded
from fedstill.data.form import Form, tasks_of_times

TEST_SHARE = 0.2
SEED = 0


def hold_out(data: Decoded, form: Form | None = None) -> Decoded:
    """``data`` with a test split: as it is if it has one, else a stratified fifth of train, in
    data-set order.

    A class gives round(n / 5) examples, drawn by NumPy's frozen legacy stream at seed 0; one of a
    single example none.
    form: if it has cuts, a fifth of each task is held out, the same whatever comes before it and
    after.
    """
    if "test" in data.splits:
        return data
    values, labels = data.splits["train"]
    held = np.zeros(len(labels), dtype=bool)
    for part in (
        _tasks(data, form)
        if form and form.cuts and "train" in data.owners
        else [np.arange(len(labels))]
    ):
        stream = np.random.RandomState(SEED)
        for c in np.unique(labels[part]):
            own = stream.permutation(part[labels[part] == c])
            held[own[: round(TEST_SHARE * len(own))]] = True
    splits = {
        **data.splits,
        "train": (values[~held], labels[~held]),
        "test": (values[held], labels[held]),
    }
    owners = {**data.owners}
    if "train" in owners:
        owners |= {"train": owners["train"][~held], "test": owners["train"][held]}
    unused = "validation" in data.splits
    said = (
        "no test split: a fifth of the training split is held out; the split 'validation' is not "
        "used" * unused
    )
    return replace(data, splits=splits, owners=owners, about=data.about.warned(said))


def _tasks(data: Decoded, form: Form) -> list[NDArray[np.int64]]:
    """The positions of each task's training examples."""
    of_value = np.array(
        tasks_of_times("the data", form.owner, data.about.owners, form.cuts), dtype=np.int64
    )
    tasks = of_value[data.owners["train"]]
    return [np.flatnonzero(tasks == task) for task in range(len(form.cuts) + 1)]
