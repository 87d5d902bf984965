"""How the clients of a stage train, and what follows from it for each: its examples, its random
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedstill.core.keys import generator, seed_for
from fedstill.core.records import Examples, Plan, Stage, TrainingStart, View
from fedstill.data.inputs import Inputs
from fedstill.engines.precision import Precision
from fedstill.privacy.private_training import Private


@dataclass(frozen=True)
class How:
    """How a stage trains: the same for all its clients. ``by_epoch``: keep each epoch's parameters,
    to measure them.
    """

    plan: Plan
    stage: Stage
    inputs: Inputs
    seed: int
    precision: Precision = "fp32"
    by_epoch: bool = False
    lr_round: int | None = None
    private: Private | None = None

    @property
    def lr(self) -> float:
        """The learning rate: of the stage's round, or of ``lr_round``, its number within a task."""
        return self.plan.lr_at(self.stage.round if self.lr_round is None else self.lr_round)


def trains_its_own(start: TrainingStart) -> bool:
    """Whether what is trained, or on what, is not the site's but the carry's."""
    return start.model is not None or start.examples is not None


def as_carried(start: TrainingStart, view: View, inputs: Inputs) -> tuple[View, Inputs]:
    """The view and the inputs of training: with the carry's network and examples, where it has its
    own.
    """
    if start.model is not None:
        view = replace(view, model=start.model, validation=None)
    if start.examples is None:
        return view, inputs
    there = start.examples.to(str(view.data.values.device))
    return replace(view, data=there, public=None, validation=None), replace(inputs, steps=())


def stage_examples(view: View, stage: Stage) -> Examples:
    """What a site trains on in a stage."""
    return view.public if stage.view == "public" and view.public is not None else view.data


def examples_by_client(
    carries: Sequence[TrainingStart], views: Sequence[View], stage: Stage
) -> list[Examples]:
    """What each site trains on of what it sees in a stage; one object where that is the same for
    all.
    """
    if any(c.more is not None for c in carries):
        return [
            _with_more(_of_site(stage_examples(v, stage), c), c)
            for v, c in zip(views, carries, strict=True)
        ]
    each, first = [stage_examples(v, stage) for v in views], carries[0].only
    if first is not None and all(
        e is each[0] and c.only is not None and torch.equal(c.only, first)
        for e, c in zip(each, carries, strict=True)
    ):
        return [each[0].take(first.to(each[0].labels.device))] * len(each)
    return [_of_site(e, c) for e, c in zip(each, carries, strict=True)]


def _of_site(examples: Examples, start: TrainingStart) -> Examples:
    """What a site trains on of examples that it sees."""
    return examples if start.only is None else examples.take(start.only.to(examples.labels.device))


def _with_more(own: Examples, start: TrainingStart) -> Examples:
    return own if start.more is None else own + start.more.to(str(own.labels.device))


def scores_count(plan: Plan) -> bool:
    """Whether a plan asks for a client's score after each epoch: to stop early, or to keep the best
    one.
    """
    return plan.keep == "best" or (plan.validation > 0 and plan.patience > 0)


def many_passes(plan: Plan, examples: Examples) -> bool:
    """Whether training sees every example at least once."""
    return plan.steps == 0 or plan.steps * plan.batch >= len(examples)


def stage_generator(client: int, how: How, purpose: str) -> torch.Generator:
    """A client's generator for one purpose in a stage."""
    return generator(seed_for(how.seed, how.stage.round, how.stage.index, client, purpose))


def on_device(value: Any, device: torch.device) -> Any:
    """Tensors on a device, through mappings and pairs; everything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: on_device(v, device) for k, v in value.items()}
    return tuple(on_device(v, device) for v in value) if isinstance(value, tuple) else value
