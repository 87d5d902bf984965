"""The two halves of a method: what the server does (``Method``), and what clients do
(``ClientWork``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedstill.core.aggregation import weighted_mean
from fedstill.core.capabilities import Addition, Need, Permit
from fedstill.core.fields import check_ranges
from fedstill.core.records import (
    NOTHING,
    RULED_OUT,
    SERVER,
    Keep,
    ModelSpec,
    Payload,
    Plan,
    Reply,
    Stage,
    State,
    Step,
    Teacher,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.trees import zeros_like
from fedstill.losses import cross_entropy


@dataclass(frozen=True)
class Method:
    """The server's half of a method. Its fields are the method's hyper-parameters.

    The base class is federated averaging; a method overrides what it does differently. The flags of
    ``needs``, ``adds`` and ``permits`` are in ``fedstill.core.capabilities``.

    A complete method, FedProx with a count of the examples seen:

    >>> import fedstill
    >>> from fedstill.losses import proximal
    >>> @dataclass(frozen=True)
    ... class Near(fedstill.Method):
    ...     mu: float = 0.1
    ...     def work(self, stage):
    ...         return StayNear(self.mu)
    ...     def aggregate(self, state, replies, stage, world):
    ...         seen = state.extra.get("seen", 0) + sum(reply.examples for reply in replies)
    ...         return state.next(params=weighted_mean(replies), seen=seen)
    >>> @dataclass(frozen=True)
    ... class StayNear(fedstill.ClientWork):
    ...     mu: float
    ...     def begin(self, payload, client_state, view, world):
    ...         return fedstill.TrainingStart(payload.params, constants={"start": payload.params})
    ...     def terms(self, step, start):
    ...         near = proximal(step.params, start["start"], self.mu)
    ...         return {**super().terms(step, start), "near": near}
    """

    topology: ClassVar[str] = "parallel"
    """The default topology."""
    schedule: ClassVar[Mapping[str, Any]] = {}
    """Default options of the topology."""
    stages: ClassVar[frozenset[str]] = frozenset({"train"})
    """The names of the stages that the method knows."""
    needs: ClassVar[Need] = Need.SAME_SHAPES
    """What the method requires of a run, such as ``Need.SAME_SHAPES | Need.HEAD``."""
    adds: ClassVar[Addition] = Addition.NOTHING
    """What the method adds to every network; the additions start at zero."""
    permits: ClassVar[Permit] = Permit.NOTHING
    """What may be done to the method's replies."""
    labelled: ClassVar[frozenset[str]] = frozenset()
    """The stages that read the labels of public data. In all other stages these are hidden, as
    -1.
    """
    plans: ClassVar[Mapping[str, Plan]] = {"train": Plan()}
    """The paper's training settings by stage."""
    personal: ClassVar[frozenset[str]] = frozenset()
    """The stages after which a client's own model is its answer; the last of these in which the
    client acted counts. Without such a stage, the server's models are the answers
    (``client_predictors``).
    """
    reusable: ClassVar[frozenset[str]] = frozenset()
    """The stages whose replies may be stored for other runs: they leave no memory, and their
    replies depend only on the client's data, model, plan, seed and work.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raises ConfigError for a name that resembles a hook's or a declaration's, and for needs,
        permits or additions that are no flags.
        """
        super().__init_subclass__(**arguments)
        _check_class(cls)

    def __post_init__(self) -> None:
        check_ranges(self)

    def requires(self) -> Need:
        """What the method requires with these hyper-parameters; ``needs`` by default."""
        return self.needs

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        """Why the method cannot run on a schedule (the stages of round 1), and what to do; empty if
        it can.
        """
        return ""

    def setting_warnings(self, world: World) -> str:
        """A warning about settings that have no effect with a run's classes and tasks; empty if all
        have one.

        The warning is shown when a run begins, and by ``fedstill explain``.
        """
        return ""

    def initial_state(self, world: World) -> State:
        """The state before round 1."""
        return State(params=world.initial(SERVER))

    def begin_round(self, state: State, stages: Sequence[Stage], world: World) -> State:
        """The state at the start of a round, when its schedule is known."""
        return state

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        """What a client receives in a stage; None if it has nothing to do."""
        return Payload(params=state.params)

    def work(self, stage: Stage) -> ClientWork:
        """What a client does in a stage."""
        return ClientWork()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        """A payload of the form that a client's reply must have: groups, names, shapes and types.
        The values do not matter.
        """
        return Payload(params=world.initial(client))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        """The next state from the accepted replies, sorted by client id."""
        return state.next(params=weighted_mean(replies))

    def idle_reply(self, reply: Reply, payload: Payload) -> Payload | None:
        """The reply that a client would have sent if it had changed nothing; None if this cannot be
        determined.

        By default, a model is as it was received, a ``change`` is 0, and everything else is as in
        the reply. The measure ``contributions`` repeats rounds with such replies, to find out which
        clients contributed to what a round did.
        """
        models = {
            group: payload[group]
            for group in ("params", "shared")
            if group in reply.content and group in payload
        }
        if not models:
            return None
        groups = {**reply.content, **models}
        if "change" in groups:
            groups["change"] = zeros_like(reply.content.tensors("change"))
        return Payload(groups)

    def predictors(self, state: State, world: World) -> dict[str, Callable[[Tensor], Tensor]]:
        """The models that the server can evaluate, by name: functions from inputs (B, ...) to
        logits (B, C).

        By default, the global model if there is one.
        """
        if not state.params:
            return {}
        return {"global": world.predictor(state.params, state.model)}

    def client_predictors(self, state: State, world: World) -> dict[int, str]:
        """The name of the predictor that answers for each client, where the server has several
        models: ``{client: "cluster 0"}`` for all clients, before round 1, too.

        By default empty: a client is answered by the predictor ``client N`` if there is one, and by
        the first one otherwise. Predictors whose names end with another number, such as ``cluster
        0``, are models of some clients, so a method that has nothing but these overrides this hook.
        """
        return {}

    @property
    def has_client_predictors(self) -> bool:
        """Whether the method says which of the server's models answers for each client."""
        return type(self).client_predictors is not Method.client_predictors


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
        _check_class(cls)

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


def _check_class(cls: type) -> None:
    """Raise ConfigError for mistakes in a user's class. Tests check the library's own classes."""
    if cls.__module__.startswith("fedstill."):
        return
    from fedstill.core.user_code import check_declarations, reject_misspelt_hooks

    reject_misspelt_hooks(cls)
    check_declarations(cls)
