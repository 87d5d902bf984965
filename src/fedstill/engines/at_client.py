"""What a hook sees of one client after its work, and the hook that tests the client's model on its
own test sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstill.core.extensions import ClientHook
from fedstill.core.records import RULED_OUT, SERVER, Examples, Stage, Tensors, View, World
from fedstill.data.inputs import Inputs
from fedstill.engines.passes import correct_by_class
from fedstill.models.contract import predictor


@dataclass(frozen=True)
class AtClient:
    """A stage that is done, as a measure sees it at one client.

    ``start``, ``end``: the model's parameters before and after the client's work. ``by_epoch``:
    after each local epoch, where a measure with ``each_epoch`` asks for them and the client trained
    on its own data. ``test``: the common test set, None on real sites. ``public``: the public set
    with its labels, which no method may see. ``sent``: the groups of its reply.
    """

    stage: Stage
    view: View
    start: Tensors
    end: Tensors
    by_epoch: Sequence[Tensors]
    test: Examples | None
    public: Examples | None
    inputs: Inputs
    world: World
    sent: frozenset[str] = frozenset()

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.world.classes

    @property
    def is_server(self) -> bool:
        """Whether the client is the server, at work on public data."""
        return self.view.client == SERVER

    def correct_by_class(self, params: Tensors, examples: Examples) -> list[int]:
        """How many examples of each class (C,) these parameters of the client's network predict
        right.
        """
        predict = predictor(self.view.model, params)
        counts: list[int] = correct_by_class(predict, examples, self.inputs, self.classes).tolist()
        return counts


@dataclass(frozen=True)
class OwnTestSets(ClientHook):
    """Tests a client's model on the client's own test set, or on those of its tasks."""

    def measured(self, seen: AtClient) -> dict[str, Any]:
        """``site_accuracy``, and with tasks ``site_by_task``; nothing without a test set."""
        if seen.view.tests:
            return _tested_by_task(seen)
        test = seen.view.test
        if test is None or len(test) == 0:
            return {}
        return {"site_accuracy": sum(seen.correct_by_class(seen.end, test)) / len(test)}


def _tested_by_task(seen: AtClient) -> dict[str, Any]:
    """The accuracy of a real site's model on its own test sets of the tasks so far, among the
    classes seen by then.

    ``site_by_task``: the accuracy on each task, None if the site has no test examples of it or the
    task is still to come. ``site_accuracy``: on all of them.
    """
    tests = seen.view.tests
    stream = seen.world.stream
    classes_seen = torch.zeros(seen.classes, dtype=torch.bool)
    classes_seen[list(stream.seen(stream.task(seen.stage.round)))] = True
    predict = predictor(seen.view.model, seen.end)

    def logits_of_seen(x: Tensor) -> Tensor:
        logits = predict(x)
        return logits.where(classes_seen.to(logits.device), RULED_OUT)

    correct: dict[int, int] = {}
    for task, test in tests.items():
        counts = correct_by_class(logits_of_seen, test, seen.inputs, seen.classes)
        correct[task] = int(counts.sum())
    by_task: list[float | None] = [None] * stream.tasks
    for task, count in correct.items():
        by_task[task] = count / len(tests[task])
    examples = sum(len(test) for test in tests.values())
    return {"site_accuracy": sum(correct.values()) / examples, "site_by_task": by_task}
