"""The two halves of a method: the server's (``Method``) and the clients' (``ClientWork``)."""

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

    The base class is federated averaging. A method overrides the hooks in which it differs. The
    flags of ``needs``, ``adds`` and ``permits`` are in ``fedstill.core.capabilities``.

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
    """The names of the stages that the method defines."""
    needs: ClassVar[Need] = Need.SAME_SHAPES
    """What the method requires of a run, such as ``Need.SAME_SHAPES | Need.HEAD``."""
    adds: ClassVar[Addition] = Addition.NOTHING
    """What the method adds to every network; the additions start at zero."""
    permits: ClassVar[Permit] = Permit.NOTHING
    """What the method permits on its replies, such as secure sums."""
    labelled: ClassVar[frozenset[str]] = frozenset()
    """The stages that read the labels of public data. In all other stages these labels are -1."""
    plans: ClassVar[Mapping[str, Plan]] = {"train": Plan()}
    """The paper's training settings by stage."""
    personal: ClassVar[frozenset[str]] = frozenset()
    """The stages after which a client's own model answers for it. Of several, the last one in which
    the client acted counts. Without such a stage, the server's models answer
    (``client_predictors``).
    """
    reusable: ClassVar[frozenset[str]] = frozenset()
    """The stages whose replies may be stored for other runs. They depend only on the client's data,
    model, state, plan, seed and work.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raise ConfigError for a name that resembles a hook or a declaration, and for needs,
        permits or additions that are not flags.
        """
        super().__init_subclass__(**arguments)
        _check_class(cls)

    def __post_init__(self) -> None:
        check_ranges(self)

    def requires(self) -> Need:
        """What the method requires with these hyper-parameters; ``needs`` by default."""
        return self.needs

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        """Why the method cannot run with a schedule, and a remedy; empty if it can.

        stages: those of round 1.
        """
        return ""

    def setting_warnings(self, world: World) -> str:
        """A warning about settings that have no effect on this run, or an empty string.

        The warning is shown when a run begins, and by ``fedstill explain``.
        """
        return ""

    def initial_state(self, world: World) -> State:
        """The state before round 1."""
        return State(params=world.initial(SERVER))

    def begin_round(self, state: State, stages: Sequence[Stage], world: World) -> State:
        """The state at the start of a round; stages: its schedule."""
        return state

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        """The payload that a client receives in a stage; None if it has nothing to do."""
        return Payload(params=state.params)

    def work(self, stage: Stage) -> ClientWork:
        """The work of clients in a stage."""
        return ClientWork()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        """A payload with the groups, names, shapes and types of a valid reply. Its values do not
        matter.
        """
        return Payload(params=world.initial(client))

    def refuses(self, reply: Reply, stage: Stage) -> str:
        """Why the values of a reply are impossible, such as counts of more examples than the client
        claims; empty if they are possible.

        It is called before the content is compared with ``expected_reply``, so groups can be
        missing or have another type.
        """
        return ""

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        """The next state from the accepted replies, sorted by client id."""
        return state.next(params=weighted_mean(replies))

    def idle_reply(self, reply: Reply, payload: Payload) -> Payload | None:
        """The reply that a client would have sent if it had changed nothing; None if this is
        unknown.

        By default, the reply has the received model and a ``change`` of 0, and is otherwise the
        same. The measure ``contributions`` repeats rounds with such replies to find out which
        clients contributed to the change of a round.
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
        logits (B, C). By default, the global model if there is one.
        """
        if not state.params:
            return {}
        return {"global": world.predictor(state.params, state.model)}

    def client_predictors(self, state: State, world: World) -> dict[int, str]:
        """The name of the predictor that answers for each client, such as ``{3: "cluster 0"}``, if
        the server has several models. All clients are in it, also before round 1.

        By default empty: the predictor ``client N`` answers for client N if it exists, and
        otherwise the first predictor. A predictor such as ``cluster 0``, whose name ends with a
        number, answers for some clients only. A method that has only such predictors overrides
        this hook.
        """
        return {}

    @property
    def has_client_predictors(self) -> bool:
        """Whether the method defines the server's model that each client uses."""
        return type(self).client_predictors is not Method.client_predictors


class ClientWork:
    """The client's half of a method. It has no state, batch loop, device, file or seed.

    The base class is plain local training: it starts from the received parameters, minimises the
    cross-entropy, and sends the parameters back. In every step, the hooks are called in this order:
    ``ascent_terms`` and ``perturb`` (a first pass, if the method has one), ``terms``,
    ``adjust_gradients``, the optimiser, ``after_step``.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raise ConfigError for a name that resembles a hook."""
        super().__init_subclass__(**arguments)
        _check_class(cls)

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        """The start of training, from the received payload and this client's state."""
        return TrainingStart(params=payload.params)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        """Named terms of the objective. A (B,) tensor is averaged over real examples, a () tensor
        is added unchanged.
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
        """The reply's content, and the client's state until it acts again; ``KEEP`` if the state
        does not change.
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
        """Further fields of this client's event in the journal: numbers, texts, lists of them."""
        return {}

    def ascent_terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        """Named terms of a first pass, as in sharpness-aware minimisation. ``perturb`` gets their
        gradient, or zeros if there are no terms.
        """
        return {}

    def perturb(self, params: Tensors, grads: Tensors, start: TrainingStart) -> Tensors:
        """The point at which the gradient of ``terms`` is computed. The step still starts from
        ``params``.

        Both have only the trained entries. Normalisation layers update their statistics in the
        first pass only.
        """
        return params

    def adjust_gradients(self, grads: Tensors, start: TrainingStart) -> Tensors:
        """The gradients that the optimiser gets."""
        return grads

    def after_step(
        self, before: Tensors, grads: Tensors, after: Tensors, trace: Tensors, start: TrainingStart
    ) -> tuple[Tensors, Tensors]:
        """Parameters and trace after an optimiser step from ``before`` to ``after``, which have
        only the trained entries.
        """
        return after, trace

    def validation_score(self, params: Tensors, view: View) -> float | None:
        """The score of these parameters, for early stopping; by default, the accuracy on the
        client's held-out data. It is computed once an epoch.

        Outputs that take no part in training are excluded. None if nothing is held out, as at the
        server and at a client with one example: then all epochs run, and the last one counts.
        """
        validation = view.validation
        if validation is None or len(validation) == 0:
            return None
        model = view.model
        answer = self.answer(params, model)
        if isinstance(answer, tuple):
            model, answer = answer
        logits = view.passes.logits(answer, validation, model)
        if view.head is not None:
            logits = logits.where(view.head.to(logits.device), RULED_OUT)
        return float((logits.argmax(1) == validation.labels).double().mean())

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
