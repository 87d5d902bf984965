"""What a client keeps of its examples for later tasks: which of them, merged task by task, and what
it holds by then.

Of two groups of examples the same are kept, whether they come together or one after the other:
nothing depends on rounds, so a run that was killed goes on to the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedstill.labels import means_by_class
from fedstill.payload import NOTHING, Payload
from fedstill.records import Examples, Tensors, View
from fedstill.stream import OFF
from fedstill.trees import dtype_of


def lowest(keys: Tensor, labels: Tensor, size: int, by_class: bool = False) -> Tensor:
    """Which ``size`` examples are kept: those with the lowest keys, as ascending positions.

    keys: (n,) float64; labels: (n,) int64. ``by_class``: of each class there is equally many, as
    far as it has them; where that leaves a rest, the first classes get one more.

    >>> lowest(torch.tensor([0.3, 0.1, 0.2, 0.9]), torch.tensor([0, 0, 0, 1]), 2).tolist()
    [1, 2]
    >>> lowest(
    ...     torch.tensor([0.3, 0.1, 0.2, 0.9]), torch.tensor([0, 0, 0, 1]), 2, by_class=True
    ... ).tolist()
    [1, 3]
    """
    if not by_class:
        return keys.argsort(stable=True)[:size].sort().values
    classes, picked = sorted(set(labels.tolist())), [torch.zeros(0, dtype=torch.int64)]
    for i, c in enumerate(classes):
        own = (labels == c).nonzero().flatten()
        quota = size // len(classes) + (i < size % len(classes))
        picked.append(own[keys[own].argsort(stable=True)[:quota]])
    return torch.cat(picked).sort().values


def herded(features: Tensor, labels: Tensor, size: int) -> Tensor:
    """Keys (n,) float64 by herding: an example's rank in its class, from 0; those beyond ``size``
    come last.

    features: (n, D), taken at length 1. Each next example brings the mean of those chosen nearest
    to the class's mean.

    Source: Rebuffi et al., "iCaRL" (2017), Algorithm 4.

    >>> herded(
    ...     torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]]), torch.zeros(3, dtype=torch.int64), 2
    ... ).tolist()
    [3.0, 1.0, 0.0]
    """
    unit, keys = normalize(features.double(), dim=1), torch.zeros(len(labels), dtype=torch.float64)
    for c in sorted(set(labels.tolist())):
        own = (labels == c).nonzero().flatten()
        z = unit[own]
        ranks, total = torch.arange(len(own)).double() + len(own), torch.zeros_like(z[0])
        for k in range(min(size, len(own))):
            off = torch.linalg.vector_norm(z.mean(0) - (total + z) / (k + 1), dim=1)
            best = int(off.masked_fill(ranks < len(own), torch.inf).argmin())
            ranks[best], total = k, total + z[best]
        keys[own] = ranks
    return keys


def merged(before: Payload, now: Payload, size: int, by_class: bool) -> Payload:
    """What a client keeps after a task: of what it kept, and of that task's examples; ``now`` has
    the same groups.

    values, labels, tasks, places, keys: of each kept example what it is, its label, its task, its
    place among the client's examples of that, its key.
    """
    both = (
        Payload({g: torch.cat([before.tensor(g), now.tensor(g)]) for g in now}) if before else now
    )
    kept = lowest(both.tensor("keys"), both.tensor("labels"), size, by_class)
    return Payload({g: both.tensor(g)[kept] for g in both})


def of_other_tasks(memory: Payload, task: int) -> Payload:
    """What a client keeps of all tasks but one, that it is in; nothing where that is no example."""
    other = memory.tensor("tasks") != task if memory else torch.zeros(0)
    return Payload({g: memory.tensor(g)[other] for g in memory}) if bool(other.any()) else NOTHING


def means_to_send(sets: Sequence[Examples], view: View, params: Tensors, classes: int) -> Payload:
    """means = of each class the mean (C, D) of its examples' features at length 1; counts = how
    many, (C,).
    """
    unit = [normalize(view.passes.features(params, e).cpu(), dim=1) for e in sets]
    means, counts = means_by_class(
        torch.cat(unit), torch.cat([e.labels.cpu() for e in sets]), classes
    )
    return Payload(means=means.to(dtype_of(params)), counts=counts)


def nearest_mean_head(means: Tensor, known: Tensor) -> dict[str, Tensor]:
    """A linear head that answers by the nearest mean (C, D), at length 1, of the classes that have
    one (C,).
    """
    bias = torch.where(known, 0.0, 100 * OFF).to(means.dtype)
    return {"head.weight": normalize(means, dim=1), "head.bias": bias}
