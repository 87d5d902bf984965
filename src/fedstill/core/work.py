"""ClientWork: what a client does in one stage; a method overrides the parts it changes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedstill.core.records import (
    NOTHING,
    OFF,
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

    Without changes it is plain local training: the parameters received, cross-entropy, the
    parameters sent back.
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
        return {"ce": cross_entropy(step.logits(), step.y)}

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
        """The model that this client answers with, made of what training left of its network;
        measures take it.

        Parameters of that network, or another network with its own.
        """
        return params

    def report(
        self, params: Tensors, start: TrainingStart, view: View, world: World
    ) -> dict[str, Any]:
        """Further fields of this client's event in the journal: numbers, words, lists of them."""
        return {}

    def ascent_terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        """Named terms of a first pass, whose gradient ``perturb`` is given; without them it is
        given zeros.
        """
        return {}

    def perturb(self, params: Tensors, grads: Tensors, start: TrainingStart) -> Tensors:
        """Where the gradient of ``terms`` is taken; the step that follows still starts from
        ``params``.

        Both have the trained entries only. Statistics of normalisation take up a batch once, in the
        first pass.
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

        An output that takes no part in training is no answer. None where nothing is held out, as by
        the server and a client of one example: all epochs run, and the last counts.
        """
        held = view.validation
        if held is None or len(held) == 0:
            return None
        logits = view.passes.logits(params, held)
        if view.head is not None:
            logits = logits.where(view.head.to(logits.device), 100 * OFF)
        return float((logits.argmax(1) == held.labels).double().mean())

    def trainable(self, name: str) -> bool:
        """Whether the parameter of this name is trained."""
        return True
