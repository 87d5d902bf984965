"""Drift: classes and examples stay what they are, and who has which of them changes with the
tasks.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedstill.continual.domains import stratified_tasks
from fedstill.core.registry import register
from fedstill.core.stream import Cut

Path = Literal["line", "jump", "return"]


@register("stream", "drift")
def drift_stream(
    labels: NDArray[np.int64], tasks: int, seed: int, classes: int, path: Path = "line"
) -> Cut:
    """Clients' label mixes move from one split to another: both are drawn by the run's partition,
    with two seeds.

    Each example of a task goes to its client of the second split with the task's probability, else
    of the first. A client may be without examples in a task.

    path: How the share of the second split goes: 0 to 1 evenly, 0 then 1 from the middle on, or 0
    to 1 and back.
    """
    at = [t / (tasks - 1) if tasks > 1 else 0.0 for t in range(tasks)]
    if path == "jump":
        mix = [float(2 * t >= tasks and tasks > 1) for t in range(tasks)]
    else:
        mix = at if path == "line" else [1 - abs(2 * x - 1) for x in at]
    every = tuple(tuple(range(classes)) for _ in range(tasks))
    return Cut(stratified_tasks(labels, tasks, seed), every, mix=tuple(mix))
