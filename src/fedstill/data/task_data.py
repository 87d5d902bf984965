"""Which of a client's examples belong to which task, and how a task shows its images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedstill.records import Examples
from fedstill.stream import Stream, Transform


@dataclass(frozen=True)
class TaskData:
    """A cut of the training set, on the clock of a stream.

    ``task_of``: (n,) int64, the task of each training example; None where every task shows all of
    them. ``transforms``: how each task shows its images; empty: as they are. ``by_domain``: whether
    each task has test examples of its own, those of its value of a column. ``tests``: a real site's
    own test sets of the tasks so far.
    """

    stream: Stream
    task_of: Tensor | None
    transforms: tuple[Transform | None, ...] = ()
    by_domain: bool = False
    tests: Mapping[int, Examples] = field(default_factory=dict)

    def had(self, client: int, round: int) -> list[int]:
        """The tasks whose data a client has in a round: its own first, then the older ones in
        order, if these are kept.

        The older ones are those that it has been in; none before it joins.
        """
        been = self.stream.been_in(client, round)
        return [*been[-1:], *(been[:-1] if self.stream.kept else ())]

    def of_task(self, part: Tensor, task: int) -> Tensor:
        """Which of a client's examples, given their positions in the training set, belong to a
        task, by number.
        """
        if self.task_of is None:
            return torch.arange(len(part))
        return (self.task_of[part] == task).nonzero().flatten()

    def shown(self, examples: Examples, task: int) -> Examples:
        """Examples as a task shows them."""
        change = self.transforms[task] if self.transforms else None
        return (
            examples
            if change is None
            else Examples(change(examples.values), examples.labels, examples.owners)
        )


def below(pieces: list[Examples]) -> Examples:
    """Examples of several tasks, one below another; one alone as it is."""
    if len(pieces) == 1:
        return pieces[0]
    owners = [p.owners for p in pieces if p.owners is not None]
    values, labels = torch.cat([p.values for p in pieces]), torch.cat([p.labels for p in pieces])
    return Examples(values, labels, torch.cat(owners) if len(owners) == len(pieces) else None)
