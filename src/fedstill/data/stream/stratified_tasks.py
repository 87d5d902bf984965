"""Examples cut into tasks that all have the classes' shares."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.keys import generator, seed_for
from fedstill.records import SERVER


def stratified_tasks(labels: NDArray[np.int64], tasks: int, seed: int) -> NDArray[np.int64]:
    """The task of each example (n,), from 0: of each class as many in every task, but for one,
    drawn by key.
    """
    draw = generator(seed_for(seed, 0, 0, SERVER, "task of example"))
    out = np.zeros(len(labels), dtype=np.int64)
    # classes go on where the one before ended, so that small ones do not all fall into the first
    # tasks
    turn = 0
    for c in np.unique(labels):
        own = np.flatnonzero(labels == c)
        order = torch.randperm(len(own), generator=draw).numpy()
        out[own[order]] = (turn + np.arange(len(own))) % tasks
        turn = (turn + len(own)) % tasks
    return out
