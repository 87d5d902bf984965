"""ClientWork: what a client does in one stage; a method overrides the parts it changes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedstill.core.records import (
    NOTHING,
    RULED_OUT,
    Keep,
    ModelSpec,
    Payload,
    Step,
    Teacher,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.user_code import reject_misspelt_hooks
from fedstill.losses import cross_entropy


class ClientWork:
    """The client's half of a method. It holds no state, no loop over batches, no device, no file
    and no seed.

    By default this is plain local training: it starts from the received parameters, minimises the
    cross-entropy, and sends the parameters back. In every step, the hooks are called in this order:
    ``ascent_terms`` and ``perturb`` (a first pass, if the method has one), ``terms``,
    ``adjust_gradients``, the optimiser, ``after_step``.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raises ConfigError for a name that resembles a hook's."""
        super().__init_subclass__(**arguments)
        reject_misspelt_hooks(cls)

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        """What training starts with, from what was received and what this client remembers."""
        return TrainingStart(params=payload.params)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        """Named terms of the objective: a (B,) tensor is averaged over real examples, a () tensor
        is added as it is.
        """
        return {"ce": step.weighted(cross_entropy(step.logits(), step.y))}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload | Keep]:
        """What is sent up, and the client's state until it acts again; ``KEEP`` for the one it
        has.
        """
        return Payload(params=params), NOTHING

    def answer(self, params: Tensors, model: ModelSpec) -> Teacher:
        """The client's final model, from its trained parameters; measures evaluate it.

        Return parameters of the client's network, or another network with its parameters.
        """
        return params

    def report(
        self, params: Tensors, start: TrainingStart, view: View, world: World
    ) -> dict[str, Any]:
        """Further fields of this client's event in the journal: numbers, words, lists of them."""
        return {}

    def ascent_terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        """Named terms of a first pass, as sharpness-aware minimisation has one; ``perturb`` gets
        their gradient, or zeros without terms.
        """
        return {}

    def perturb(self, params: Tensors, grads: Tensors, start: TrainingStart) -> Tensors:
        """The point at which the gradient of ``terms`` is taken. The step still starts from
        ``params``.

        Both have the trained entries only. Normalisation layers update their statistics in the
        first pass only.
        """
        return params

    def adjust_gradients(self, grads: Tensors, start: TrainingStart) -> Tensors:
        """The gradients that the optimiser gets."""
        return grads

    def after_step(
        self, before: Tensors, grads: Tensors, after: Tensors, trace: Tensors, start: TrainingStart
    ) -> tuple[Tensors, Tensors]:
        """Parameters and trace after an optimiser step, which moved trained entries from ``before``
        to ``after``.
        """
        return after, trace

    def validation_score(self, params: Tensors, view: View) -> float | None:
        """How good these parameters are, once an epoch, for early stopping: accuracy on the
        client's held-out data.

        Outputs that take no part in training are left out. None if nothing is held out, as at the
        server and at a client with one example: then all epochs run, and the last counts.
        """
        held = view.validation
        if held is None or len(held) == 0:
            return None
        logits = view.passes.logits(params, held)
        if view.head is not None:
            logits = logits.where(view.head.to(logits.device), RULED_OUT)
        return float((logits.argmax(1) == held.labels).double().mean())

    def trainable(self, name: str) -> bool:
        """Whether the parameter of this name is trained."""
        return True
