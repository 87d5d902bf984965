"""CCVR against a plain implementation: covariances by NumPy over all clients' features, the head by
torch's SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from plain import (
    HEAD,
    PLAN,
    SEED,
    Federation,
    Params,
    assert_same_model,
    average,
    batches,
    ce,
    drive,
    ready_for,
    run_of,
)
from torch import Tensor, nn

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import BadPayload, IncompatibleMethod
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Stage
from fedstill.core.registry import method
from fedstill.core.trees import only, same_bits
from fedstill.methods.ccvr import CCVR, class_moments, covariance_roots, gaussians
from fedstill.methods.fedntd import FedNTD
from fedstill.running.preparation import prepare

CLASSES = toys.CLASSES
WIDTH = 8
"""The number of features."""

CALIBRATE = {
    "epochs": 2,
    "batch": 16,
    "lr": 0.05,
    "lr_decay": 1.0,
    "momentum": 0.5,
    "weight_decay": 0.0,
}
QUICK = {"calibrate": CALIBRATE}

COVARIANCES = pytest.mark.parametrize("covariance", ["full", "diagonal"])


@method("toy_ccvr_ntd")
@dataclass(frozen=True)
class CalibratedNTD(CCVR, FedNTD):
    """FedNTD, calibrated in the end."""


@dataclass(frozen=True)
class ClassGaussian:
    """The distribution of the features of a class."""

    mean: np.ndarray
    root: np.ndarray
    """The Cholesky factor of the covariance."""


def plain_gaussians(features: Tensor, labels: Tensor, covariance: str) -> dict[int, ClassGaussian]:
    """Of each class that has examples; one with a single example gets the mean covariance."""
    by_class = {c: features[labels == c].numpy() for c in sorted(set(labels.tolist()))}
    covariances = {c: np.cov(rows.T) for c, rows in by_class.items() if len(rows) > 1}
    if covariance == "diagonal":
        covariances = {c: np.diag(np.diag(matrix)) for c, matrix in covariances.items()}
    mean_covariance = sum(covariances.values()) / len(covariances)

    by_label = {}
    for c, rows in by_class.items():
        matrix = covariances.get(c, mean_covariance)
        ridge = 1e-6 * np.trace(matrix) / WIDTH + 1e-12
        root = np.linalg.cholesky(matrix + ridge * np.eye(WIDTH))
        by_label[c] = ClassGaussian(rows.mean(0), root)
    return by_label


def calibrated_head(
    fed: Federation, params: Mapping[str, Tensor], covariance: str, samples: int
) -> Params:
    """The head of a model after training on drawn features."""
    data = [fed.data(client) for client in fed.clients]
    inputs = torch.cat([examples.inputs for examples in data])
    labels = torch.cat([examples.labels for examples in data])
    features = fed.net(params).body(inputs).detach()
    gaussians_by_class = plain_gaussians(features, labels, covariance)

    draw = generator(seed_for(SEED, 0, 0, SERVER, "virtual features"))
    noise = torch.randn(CLASSES, samples, WIDTH, generator=draw, dtype=torch.float64).numpy()
    drawn = [g.mean + noise[c] @ g.root.T for c, g in gaussians_by_class.items()]
    virtual_features = torch.from_numpy(np.concatenate(drawn))
    virtual_labels = torch.tensor(list(gaussians_by_class)).repeat_interleave(samples)

    head = nn.Linear(WIDTH, CLASSES).double()
    head.load_state_dict({name.removeprefix("head."): params[name] for name in HEAD})
    sgd = torch.optim.SGD(
        head.parameters(), lr=CALIBRATE["lr"], momentum=CALIBRATE["momentum"], foreach=False
    )
    for index in batches(len(virtual_labels), CALIBRATE, 2, 2, SERVER):
        sgd.zero_grad()
        ce(head, virtual_features[index], virtual_labels[index]).backward()
        sgd.step()
    return {f"head.{name}": value.detach() for name, value in head.state_dict().items()}


@COVARIANCES
def test_ccvr(covariance: str) -> None:
    """The body is FedAvg's, and the head is trained after the last round."""
    method = {"name": "ccvr", "samples": 20, "covariance": covariance}
    ready = ready_for(method, plan=QUICK)
    fed = Federation(ready)
    params = fed.start
    for round_index in (1, 2):
        params = average(fed.fit_cohort(params, ce, round_index))
    body = [name for name in params if name not in HEAD]

    ours = drive(ready).final

    assert_same_model(only(ours.params, body), only(params, body))
    assert_same_model(ours.extra.tensors("before"), only(params, HEAD))
    head = calibrated_head(fed, params, covariance, samples=20)
    assert_same_model(only(ours.params, HEAD), head)
    assert float((head["head.weight"] - params["head.weight"]).norm()) > 0.01

    predictors = ready.settings.method.predictors(ours, ready.world)
    inputs = fed.data(0).inputs
    uncalibrated = predictors["before"](inputs)
    torch.testing.assert_close(uncalibrated, fed.net(params)(inputs).detach())
    assert not torch.equal(uncalibrated, predictors["global"](inputs))


@pytest.mark.parametrize("sizes", [[60], [7, 7, 7, 7, 7, 7, 7, 7, 4], [0, 31, 29]], ids=str)
@COVARIANCES
def test_the_pooled_moments_are_those_of_all_examples_however_they_are_split(
    sizes: list[int], covariance: str
) -> None:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(60, WIDTH, generator=draw, dtype=torch.float64).relu()
    labels = torch.randint(4, (60,), generator=draw)

    of_all = class_moments(features, labels, CLASSES, covariance)
    parts = []
    for client_features, client_labels in zip(
        features.split(sizes), labels.split(sizes), strict=True
    ):
        parts.append(class_moments(client_features, client_labels, CLASSES, covariance))

    for group in of_all:
        pooled = sum(part.tensor(group) for part in parts)
        torch.testing.assert_close(pooled, of_all.tensor(group), rtol=1e-12, atol=1e-12)


@COVARIANCES
def test_the_gaussians_of_moments_are_those_of_the_examples(covariance: str) -> None:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(60, WIDTH, generator=draw, dtype=torch.float64).relu()
    labels = torch.randint(4, (60,), generator=draw)

    means, roots = gaussians(*class_moments(features, labels, CLASSES, covariance).values())

    for c, expected in plain_gaussians(features, labels, covariance).items():
        np.testing.assert_allclose(means[c], expected.mean, rtol=1e-10)
        np.testing.assert_allclose(roots[c], expected.root, rtol=1e-8, atol=1e-10)


def test_a_class_of_one_example_gets_the_mean_of_the_others_covariances() -> None:
    """If no class has more than one example, there is no spread."""
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(21, WIDTH, generator=draw, dtype=torch.float64)
    labels = torch.tensor([0] * 10 + [1] * 10 + [2])

    _, roots = gaussians(*class_moments(features, labels, 3, "full").values())

    covariances = roots @ roots.mT
    mean_covariance = (covariances[0] + covariances[1]) / 2
    torch.testing.assert_close(covariances[2], mean_covariance, rtol=1e-5, atol=1e-5)

    means, roots = gaussians(*class_moments(features[20:], labels[20:], 3, "full").values())
    assert torch.equal(means[2], features[20])
    assert float(roots.abs().max()) <= 1e-5


@COVARIANCES
@pytest.mark.parametrize("size", [1.0, 10.0, 1e4])
def test_a_class_of_constant_features_gets_a_covariance_of_almost_nothing(
    size: float, covariance: str
) -> None:
    """The rounding of the sums is larger than the spread of the features."""
    draw = torch.Generator().manual_seed(0)
    constant = size * torch.rand(64, generator=draw).repeat(2000, 1)
    varied = torch.randn(2000, 64, generator=draw)
    features = torch.cat([constant, varied])
    labels = torch.arange(2).repeat_interleave(2000)
    moments = class_moments(features, labels, 2, covariance)

    means, roots = gaussians(*moments.values())

    torch.testing.assert_close(means[0], constant[0].double())
    assert float(roots[0].abs().max()) < 1e-3 * size
    _, alone = gaussians(*(group[1:] for group in moments.values()))
    assert torch.equal(roots[1], alone[0]), "other classes keep their roots"


def test_covariances_that_are_not_finite_have_no_roots() -> None:
    with pytest.raises(torch.linalg.LinAlgError):
        covariance_roots(torch.full((1, 2, 2), float("nan"), dtype=torch.float64))


@pytest.mark.parametrize("samples", [0, 50])
@pytest.mark.parametrize(("calibrated", "base"), [("ccvr", "fedavg"), ("toy_ccvr_ntd", "fedntd")])
def test_calibration_changes_the_head_alone_and_without_samples_nothing(
    calibrated: str, base: str, samples: int
) -> None:
    ours = run_of({"name": calibrated, "samples": samples}).final
    expected = run_of(base).params

    body = [name for name in expected if name not in HEAD]
    assert same_bits(only(ours.params, body), only(expected, body))
    for name in HEAD:
        assert torch.equal(ours.params[name], expected[name]) == (samples == 0)
    assert ours.extra.keys() == {"before"}


def test_unsuited_settings_are_refused_in_one_line() -> None:
    on_a_chain = toys.toy("ccvr", topology={"kind": "sequential", "clients": 6})
    with pytest.raises(IncompatibleMethod, match=r"set topology\.kind = 'parallel'"):
        prepare(resolve(on_a_chain), toys.blobs())

    without_linear_head = toys.toy("ccvr", model={"name": "sphere_mlp", "hidden": (8,)})
    with pytest.raises(IncompatibleMethod, match="linear layer"):
        prepare(resolve(without_linear_head), toys.blobs())

    with pytest.raises(BadPayload, match=r"set topology\.last = 'statistics'"):
        run_of("ccvr", topology={"clients": 6, "last": ""})


def test_the_plan_of_training_is_federated_averagings() -> None:
    assert ready_for("ccvr").world.plans["train"].batch == PLAN["batch"]


def test_a_class_that_no_client_has_keeps_its_row_of_the_head() -> None:
    """Such as a class of an earlier task: training the head against it would forget it."""
    ready = ready_for("ccvr", plan={**PLAN, **QUICK})
    method = ready.settings.method
    world = ready.world
    draw = torch.Generator().manual_seed(0)
    labels = torch.tensor([1, 3]).repeat(30)
    features = torch.randn(60, WIDTH, generator=draw) + 3 * labels.unsqueeze(1)
    moments = class_moments(features, labels, CLASSES, "full")
    state = method.initial_state(world).next(groups=dict(moments))
    stage = Stage(4, 0, "calibrate", (SERVER,), view="public")
    payload = method.payload_for_client(state, SERVER, stage, world)

    (reply,) = ready.engine().run(method.work(stage), stage, {SERVER: payload}, 7)

    head = reply.content.tensors("head")
    for name in HEAD:
        changed = (head[name] != state.params[name]).reshape(CLASSES, -1).any(1)
        assert changed.tolist() == [False, True, False, True, False]
