"""The setup that all clients of a stage train with, and what follows from it for one client: its
examples and its random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedstill.core.extensions import GradientRule
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import Examples, Plan, Stage, TrainingStart, View
from fedstill.data.inputs import Inputs
from fedstill.engines.precision import Precision


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """How a stage trains, the same for all its clients."""

    plan: Plan
    stage: Stage
    inputs: Inputs
    seed: int
    """The run's seed. Every random number is drawn from it by key."""
    precision: Precision = "fp32"
    by_epoch: bool = False
    """Whether to keep the parameters after each epoch, so that they can be measured."""
    lr_round: int | None = None
    """The round that the learning rate follows, if it is not the stage's: its number within a
    task.
    """
    rule: GradientRule | None = None
    """How the gradients of single examples combine; None for the gradient of a batch's mean."""

    @property
    def lr(self) -> float:
        """The learning rate of the round."""
        if self.lr_round is None:
            return self.plan.lr_at(self.stage.round)
        return self.plan.lr_at(self.lr_round)


def replaces_model_or_data(start: TrainingStart) -> bool:
    """Whether a client trains another network than the site's, or on other examples."""
    return start.model is not None or start.examples is not None


def with_replacements(start: TrainingStart, view: View, inputs: Inputs) -> tuple[View, Inputs]:
    """The view and the inputs, with the network and the examples that a start brings along.

    The view then has no validation examples: scores are for the site's network and data. Examples
    from a start are never augmented.
    """
    if start.model is not None:
        view = replace(view, model=start.model, validation=None)
    if start.examples is not None:
        examples = start.examples.to(str(view.data.values.device))
        view = replace(view, data=examples, public=None, validation=None)
        inputs = replace(inputs, steps=())
    return view, inputs


def stage_examples(view: View, stage: Stage) -> Examples:
    """The examples of a site that a stage may train on."""
    if stage.view == "public" and view.public is not None:
        return view.public
    return view.data


def examples_by_client(
    starts: Sequence[TrainingStart], views: Sequence[View], stage: Stage
) -> list[Examples]:
    """The examples that each client trains on. If these are the same for all clients, they are one
    object, which a stack then holds once.
    """
    examples = [stage_examples(view, stage) for view in views]
    if _all_select_the_same(starts, examples):
        return [_training_examples(examples[0], starts[0])] * len(examples)
    return [_training_examples(e, start) for e, start in zip(examples, starts, strict=True)]


def _all_select_the_same(starts: Sequence[TrainingStart], examples: Sequence[Examples]) -> bool:
    """Whether all clients select the same positions of one object."""
    positions = starts[0].only
    if positions is None:
        return False
    if any(start.more is not None for start in starts):
        return False
    if any(e is not examples[0] for e in examples):
        return False
    return all(start.only is not None and torch.equal(start.only, positions) for start in starts)


def _training_examples(examples: Examples, start: TrainingStart) -> Examples:
    """The selected ones of a site's examples, and those that a start adds behind them."""
    if start.only is not None:
        examples = examples.take(start.only.to(examples.labels.device))
    if start.more is not None:
        examples = examples + start.more.to(str(examples.labels.device))
    return examples


def uses_scores(plan: Plan) -> bool:
    """Whether a plan needs a client's score after each epoch: to stop early, or to keep the best
    epoch.
    """
    return plan.keep == "best" or (plan.validation > 0 and plan.patience > 0)


def sees_every_example(plan: Plan, examples: Examples) -> bool:
    """Whether training takes every example at least once."""
    return plan.steps == 0 or plan.steps * plan.batch >= len(examples)


def stage_generator(client: int, setup: TrainingSetup, purpose: str) -> torch.Generator:
    """A client's generator for one purpose in a stage."""
    stage = setup.stage
    return generator(seed_for(setup.seed, stage.round, stage.index, client, purpose))


def on_device(value: Any, device: torch.device) -> Any:
    """A value whose tensors are on a device, also those in mappings and tuples."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: on_device(v, device) for key, v in value.items()}
    if isinstance(value, tuple):
        return tuple(on_device(v, device) for v in value)
    return value
