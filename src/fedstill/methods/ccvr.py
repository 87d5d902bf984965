"""CCVR: after the last round, the head is retrained on features drawn from a Gaussian for each
class.

Source: Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with
Non-IID Data" (2021), Algorithm 1.
Symbols: M_c = ``samples``; mu_c, Sigma_c = mean and covariance of a class's features.
Stages: ``train``; after the last round ``statistics``, of all clients, and ``calibrate``, at the
server.
State: the global parameters; before = the head before calibration; counts, sums, products = for
each class, the number of examples, the sum of their features, and the sum of the features' outer
products or squares, in float64, until the head is calibrated.
Memory: nothing.
Reading: the paper's clients send means and covariances. Here they send sums, from which the moments
of all clients' features follow exactly, for any split of the data.
Reading: a class with fewer than two examples gets the mean covariance of the other classes. A class
without examples, such as one of an earlier task, is not drawn: its row of the head does not change,
and the head is trained to tell the other classes apart.
Reading: the paper's M_c is between 100 and 2,000, depending on the data set. We draw 200 features
and use each ten times, which takes as many steps as the paper's maximum.
Reading: there is no official code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedstill.core.capabilities import Need, Permit
from fedstill.core.errors import BadPayload
from fedstill.core.fields import CountOrZero
from fedstill.core.keys import generator, seed_for
from fedstill.core.label_counts import Received, StatisticsWork, count_problem
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NO_TRAINING,
    NOTHING,
    SERVER,
    Examples,
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
)
from fedstill.core.registry import method
from fedstill.core.topology import has_chain
from fedstill.core.trees import dtype_of
from fedstill.methods.fedavg import FEDNTD_PLAN, FedAvg
from fedstill.methods.ridge import no_linear_head
from fedstill.models.contract import width
from fedstill.models.predictors import predictor

STATISTICS = "statistics"
"""The stage in which clients send the moments of their features."""

CALIBRATE = "calibrate"
"""The stage in which the server trains the head."""

MOMENTS = ("counts", "sums", "products")

MOST_RIDGES = 40
"""The largest number of ridges that are tried for a covariance, each ten times the one before."""


@method("ccvr")
@dataclass(frozen=True)
class CCVR(FedAvg):
    """FedAvg, then the server retrains the head on features sampled from a Gaussian for each class,
    equally many per class.
    """

    schedule: ClassVar[Mapping[str, Any]] = {"last": STATISTICS, "closing": CALIBRATE}
    stages: ClassVar[frozenset[str]] = frozenset({"train", STATISTICS, CALIBRATE})
    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.FEATURES | Need.HEAD
    permits: ClassVar[Permit] = Permit.NOTHING  # moments of features are sent, too
    plans: ClassVar[Mapping[str, Plan]] = {
        "train": FEDNTD_PLAN,
        STATISTICS: NO_TRAINING,
        CALIBRATE: Plan(epochs=10, batch=64, lr=0.01, momentum=0.9),
    }

    samples: CountOrZero = 200
    """Number of features sampled per class (M_c); 0: the head does not change."""
    covariance: Literal["full", "diagonal"] = "full"
    """Form of the covariance of each class that clients send: C D² numbers in total, or C D."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if has_chain(stages):
            return "a chain has no server stage at the end; set topology.kind = 'parallel'"
        return no_linear_head(world)

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        if stage.name == STATISTICS:
            return Payload(params=state.params)
        if stage.name != CALIBRATE:
            return super().payload_for_client(state, client, stage, world)
        if "counts" not in state.extra:
            raise BadPayload(
                f"there is nothing to calibrate by; set topology.last = {STATISTICS!r}"
            )
        return Payload({"head": last_layer(state.params), **{g: state.extra[g] for g in MOMENTS}})

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == STATISTICS:
            return SendMoments(self.covariance)
        if stage.name == CALIBRATE:
            return Calibrate(self.samples)
        return super().work(stage)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name == STATISTICS:
            no_features = torch.zeros(0, width(world.model(client)))
            no_labels = torch.zeros(0, dtype=torch.int64)
            return class_moments(no_features, no_labels, world.classes, self.covariance)
        if stage.name == CALIBRATE:
            return Payload(head=last_layer(world.initial(client)))
        return super().expected_reply(client, stage, world)

    def refuses(self, reply: Reply, stage: Stage) -> str:
        return count_problem(reply, "counts", reply.examples)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == STATISTICS:
            moments = {
                group: torch.stack([reply.content.tensor(group) for reply in replies]).sum(0)
                for group in MOMENTS
            }
            return state.next(groups=moments)
        if stage.name == CALIBRATE:
            calibrated = {**state.params, **replies[0].content.tensors("head")}
            return state.without(*MOMENTS).next(params=calibrated, before=last_layer(state.params))
        return super().aggregate(state, replies, stage, world)

    def predictors(self, state: State, world: World) -> dict[str, Callable[[Tensor], Tensor]]:
        """The global model and, at the end, the model before calibration."""
        predictors = super().predictors(state, world)
        if "before" in state.extra:
            uncalibrated = {**state.params, **state.extra.tensors("before")}
            predictors["before"] = predictor(state.model or world.model(SERVER), uncalibrated)
        return predictors


def last_layer(params: Tensors) -> dict[str, Tensor]:
    """A model's last layer: ``head.weight`` (C, D) and ``head.bias`` (C,)."""
    return {k: params[k] for k in ("head.weight", "head.bias")}


def class_moments(features: Tensor, labels: Tensor, classes: int, covariance: str) -> Payload:
    """Sums by class: ``counts`` (C,) int64, ``sums`` (C, D), and ``products`` (C, D, D) or sums of
    squares (C, D), float64.
    """
    by_class = [features[labels == c].double() for c in range(classes)]
    if covariance == "full":
        products = [h.T @ h for h in by_class]
    else:
        products = [h.square().sum(0) for h in by_class]
    return Payload(
        counts=torch.tensor([len(h) for h in by_class]),
        sums=torch.stack([h.sum(0) for h in by_class]),
        products=torch.stack(products),
    )


def gaussians(counts: Tensor, sums: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """The means (C, D) and the lower-triangular roots of the covariances (C, D, D) of each class's
    features, from their sums.

    counts: (C,); products: (C, D, D), or (C, D) if only variances are known. Covariances are
    unbiased. Classes with fewer than two examples get the mean covariance of the other classes.
    """
    n = counts.double().clamp(min=1).unsqueeze(1)
    means = sums / n
    if products.dim() == 2:
        spread = torch.diag_embed(products - n * means.square())
    else:
        spread = products - n.unsqueeze(2) * means.unsqueeze(2) * means.unsqueeze(1)
    has_covariance = counts > 1
    covariances = spread / (n - 1).clamp(min=1).unsqueeze(2)
    mean_covariance = covariances[has_covariance].sum(0) / has_covariance.sum().clamp(min=1)
    covariances = torch.where(has_covariance.view(-1, 1, 1), covariances, mean_covariance)

    return means, covariance_roots(covariances)


def covariance_roots(covariances: Tensor) -> Tensor:
    """The lower-triangular roots (C, D, D) of covariances (C, D, D), each with a ridge on its
    diagonal.

    The ridge is small, and grows until there is a root. Raises LinAlgError if covariances are not
    finite.
    """
    # A class of few examples has a covariance without full rank.
    size = covariances.diagonal(dim1=1, dim2=2).mean(1).clamp(min=0)
    identity = torch.eye(covariances.shape[1], dtype=torch.float64)
    ridge = (1e-6 * size + 1e-12).view(-1, 1, 1) * identity

    # The rounding of sums can exceed the spread of features that hardly vary; the covariance then
    # has negative eigenvalues.
    for _ in range(MOST_RIDGES):
        failures = torch.linalg.cholesky_ex(covariances + ridge).info  # 0 where there is a root
        if not failures.any():
            break
        ridge = torch.where((failures > 0).view(-1, 1, 1), 10 * ridge, ridge)
    roots: Tensor = torch.linalg.cholesky(covariances + ridge)
    return roots


@dataclass(frozen=True)
class SendMoments(StatisticsWork):
    """The client sends the sums of its features by class."""

    covariance: str

    def statistics(self, received: Received, view: View, world: World) -> Payload:
        features = view.features(received["params"])
        labels = view.data.labels.cpu()
        return class_moments(features, labels, world.classes, self.covariance)


@dataclass(frozen=True)
class Calibrate(ClientWork):
    """The server trains the head as a separate network, on features that it draws."""

    samples: int

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        head = payload.tensors("head")
        counts = payload.tensor("counts")  # (C,)
        means, roots = gaussians(counts, payload.tensor("sums"), payload.tensor("products"))

        draw = generator(seed_for(world.seed, 0, 0, SERVER, "virtual features"))
        noise = torch.randn(
            *counts.shape, self.samples, means.shape[1], generator=draw, dtype=torch.float64
        )
        features = means.unsqueeze(1) + noise @ roots.mT  # (C, M, D)

        is_present = counts > 0
        values = features[is_present].flatten(0, 1).to(dtype_of(head))
        labels = is_present.nonzero().squeeze(1).repeat_interleave(self.samples)
        return TrainingStart(
            head,
            model=ModelSpec("logistic", (means.shape[1],), world.classes),
            examples=Examples(values, labels),
            constants={"received": head, "is_present": is_present},
            head=is_present,
        )

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        # Weight decay also changes the rows of classes without examples.
        head = {name: value.clone() for name, value in start["received"].items()}
        for name, rows in head.items():
            rows[start["is_present"]] = params[name][start["is_present"]]
        return Payload(head=head), NOTHING
