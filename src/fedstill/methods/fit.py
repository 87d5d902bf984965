"""The stage ``fit``: every client trains a model alone, before queries or averaging. Any method can
have it. Also FT-FedAvg, which trains with the same settings: after the last round, every client
trains the global model on its own data once more.

Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments"
(QKT), appendix A.2. FT-FedAvg: 100 rounds of two epochs, then four; Adam as in local training.
State: of FT-FedAvg, the global parameters; student.N = client N's fine-tuned model, after the last
round.
Memory: of FT-FedAvg, nothing.
Reading: section A.2 stops "after 10 epochs without improvement" on a validation set, but according
to A.6.4 there is no validation set. Here a tenth of the client's own data is held out in this stage
only, and the model of the best epoch is kept.
Reading: if clients send queries again in a later round, the stage continues from the client's last
model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedstill.core.capabilities import Permit
from fedstill.core.extensions import StageActor, StageProvider
from fedstill.core.keys import generator, seed_for
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    KEEP,
    SERVER,
    Keep,
    ModelSpec,
    Payload,
    Plan,
    Reply,
    Stage,
    State,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
    many,
)
from fedstill.core.registry import method
from fedstill.core.reports import PROBE
from fedstill.core.trees import dtype_of
from fedstill.methods.fedavg import FedAvg
from fedstill.models.predictors import predictor

FIT = "fit"
"""The name of the stage."""

GOES_ON = "goes_on"
"""The group of a message that instructs a client to continue from its last model, and to store its
new model.
"""

SAMPLES = 20
"""The number of noise examples in a probe. Source: QKT, section 4.3."""

FITTING = Plan(
    epochs=100,
    batch=32,
    optimiser="adam",
    lr=0.001,
    weight_decay=4e-4,
    validation=0.1,
    patience=10,
    keep="best",
)
"""QKT's settings for models that clients train alone."""


@dataclass(frozen=True)
class Queries:
    """The queries of clients. A run's world has this record if there are queries."""

    by_client: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The known queried classes of each querying client."""
    raised: Literal["single", "multi", "all"] | None = None
    """The number of classes in queries that clients raise during the run, after the stage ``fit``;
    None if all queries are known before the run.
    """


def queries_of(world: World) -> Mapping[int, tuple[int, ...]]:
    """The known queried classes of each querying client; empty if there are no queries."""
    queries = world.get(Queries)
    if queries is None:
        return {}
    return queries.by_client


def anyone_asks(world: World) -> bool:
    """Whether any client has a query, or may raise a query later in the run."""
    queries = world.get(Queries)
    return queries is not None and bool(queries.by_client or queries.raised)


def probe_seed(world: World) -> int:
    """The seed of the noise, which is equal for all models of a run."""
    return seed_for(world.seed, 0, 0, SERVER, "probe")


def probed(spec: ModelSpec, params: Tensors, world: World, samples: int = SAMPLES) -> Tensor:
    """A model's mean softmax (C,) on the noise, which is equal for all models of a run."""
    predict = predictor(spec, params)
    dtype = dtype_of(params)
    return noise_probe(
        lambda x: predict(as_inputs(x, dtype)),
        spec.input_shape,
        samples,
        probe_seed(world),
        spec.vocabulary,
    )


class Fit(ClientWork):
    """Plain local training; the journal also contains the model's predictions on noise.

    A client's state does not change, unless the client has to store its model because the server
    does not.
    """

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        if GOES_ON not in payload:
            return TrainingStart(params=payload.params)
        params = payload.params
        if "params" in client_state:
            params = client_state.params
        return TrainingStart(params=params, constants={GOES_ON: 1})

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload | Keep]:
        content = Payload(params=params)
        if GOES_ON in start.constants:
            return content, content
        return content, KEEP

    def report(
        self, params: Tensors, start: TrainingStart, view: View, world: World
    ) -> dict[str, Any]:
        """``probe``: the mean softmax (C,) on Gaussian noise, with which peers estimate the
        knowledge of this model.
        """
        probe = probed(view.model, params, world).double()
        return {PROBE: [round(p, 6) for p in probe.tolist()]}


def with_students(state: State, replies: Sequence[Reply]) -> State:
    """The state with the clients' final models, in groups ``student``."""
    students = many("student", {r.client: r.content.params for r in replies})
    return state.next(groups=students)


def student_models(state: State) -> dict[int, Tensors]:
    """The clients' final models by client, which ``with_students`` stored."""
    return state.extra.many("student")


def fitted_models(state: State) -> dict[int, Tensors]:
    """The models that clients trained alone, by client."""
    return state.extra.many("model")


@dataclass(frozen=True)
class OnlyFit(Method):
    """The stage ``fit`` for methods without it: the separately trained models are measured, but not
    aggregated.
    """

    stages: ClassVar[frozenset[str]] = frozenset({FIT})
    reusable: ClassVar[frozenset[str]] = frozenset({FIT})

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        return Payload(params=world.initial(client))

    def work(self, stage: Stage) -> ClientWork:
        return Fit()

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        return state


ONLY_FIT = OnlyFit()


class FitStage(StageProvider):
    """Provides the actor of the stage for methods that do not have their own."""

    def actors(self) -> Mapping[str, StageActor]:
        """The actor of the stage, by the stage's name."""
        return {FIT: ONLY_FIT}


def noise(input_shape: tuple[int, ...], samples: int, seed: int, vocabulary: int = 0) -> Tensor:
    """The examples (samples, *input_shape) of a probe: Gaussian, in the space after normalisation.

    vocabulary: for texts; every token id from 1 to vocabulary - 1 is then equally likely (int64),
    without padding.
    """
    if vocabulary:
        return torch.randint(1, vocabulary, (samples, *input_shape), generator=generator(seed))
    return torch.randn(samples, *input_shape, generator=generator(seed))


def as_inputs(x: Tensor, kind: torch.dtype) -> Tensor:
    """Convert examples for parameters of a dtype: numbers are cast, and token ids do not change."""
    return x.to(kind) if x.is_floating_point() else x


def noise_probe(
    model: Callable[[Tensor], Tensor],
    input_shape: tuple[int, ...],
    samples: int = 20,
    seed: int = 0,
    vocabulary: int = 0,
) -> Tensor:
    """The mean softmax of a model on noise.

    model: a module or a function from (samples, *input_shape) to logits (samples, C); a module runs
    in evaluation mode, and the mode of each submodule is restored. samples >= 1. Returns (C,) >= 0,
    summing to 1, without gradient. Classes on which the model was trained have large entries.

    Source: QKT, eq. 2.
    Reading: the noise is N(0, 1) in the space after normalisation, drawn once for all models of a
    seed; for texts, it consists of random token ids.

    >>> noise_probe(lambda x: torch.zeros(len(x), 4), (1, 8, 8))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    x = noise(input_shape, samples, seed, vocabulary)
    if not isinstance(model, nn.Module):
        with torch.no_grad():
            return torch.softmax(model(x), dim=-1).mean(0)
    like = next(model.parameters(), x)
    modes = [(part, part.training) for part in model.modules()]
    try:
        with torch.no_grad():
            return torch.softmax(
                model.eval()(as_inputs(x, like.dtype).to(like.device)), dim=-1
            ).mean(0)
    finally:
        for part, mode in modes:
            part.training = mode


LAST = "finetune"
"""The stage after the last round, in which clients fine-tune the global model."""

PARALLEL = replace(FITTING, epochs=2, validation=0.0, patience=0, keep="last")
"""QKT's settings for a client in a round of federated averaging."""


@method("ft_fedavg")
@dataclass(frozen=True)
class FTFedAvg(FedAvg):
    """FedAvg; at the end, every client fine-tunes the global model on its own data."""

    schedule: ClassVar[Mapping[str, Any]] = {"last": LAST}
    stages: ClassVar[frozenset[str]] = frozenset({"train", LAST})
    # the fine-tuned models are each client's own
    permits: ClassVar[Permit] = Permit.ROBUST_AGGREGATE
    plans: ClassVar[Mapping[str, Plan]] = {"train": PARALLEL, LAST: replace(PARALLEL, epochs=4)}
    personal: ClassVar[frozenset[str]] = frozenset({LAST})
    reusable: ClassVar[frozenset[str]] = frozenset({FIT})

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == LAST:
            return with_students(state, replies)
        return super().aggregate(state, replies, stage, world)
