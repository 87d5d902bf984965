"""PFNM against a plain derivation: one hidden layer, matched by loops; of several settings the
best is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from plain import SEED, Federation, Params, all_finite, assert_same_model, drive
from plain_one_shot import local_models, ready_one_shot
from scipy.optimize import linear_sum_assignment

import toys
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.core.fields import check_ranges
from fedstill.core.keys import seed_for
from fedstill.methods.pfnm import PFNM
from fedstill.models.predictors import predictor
from fedstill.running.model_files import read_model, save_model
from fedstill.running.preparation import Prepared
from fedstill.running.runner import run

INPUTS = toys.SIDE**2
ONE_SETTING = {"name": "pfnm", "gamma": [1.0], "variance": [0.5], "prior_variance": [10.0]}
PASSES = 5

Unit = tuple[int, int]
"""A client and a row of its hidden layer."""


def label_counts(prepared: Prepared) -> np.ndarray:
    """The number of examples of each client and class."""
    fed = Federation(prepared)
    return np.array([fed.label_counts(client).numpy() for client in fed.clients], dtype=float)


@dataclass
class Gaussian:
    """A product of Gaussians, by its precision and its mean times the precision."""

    weighted_mean: np.ndarray
    precision: np.ndarray


class Matching:
    """PFNM's matching of hidden units.

    A unit is a vector of incoming weights, bias and outgoing weights. An outgoing weight to a class
    is as precise as the client's share of the class's examples.
    """

    def __init__(
        self,
        models: list[Params],
        counts: np.ndarray,
        *,
        gamma: float,
        variance: float,
        prior_variance: float,
    ) -> None:
        self.models = [{key: value.double().numpy() for key, value in m.items()} for m in models]
        self.gamma = gamma
        self.variance = variance
        self.prior_variance = prior_variance
        self.shares = counts / counts.sum(0)
        self.vectors = [
            np.c_[m["body.1.weight"], m["body.1.bias"], m["head.weight"].T] for m in self.models
        ]
        incoming = np.full(INPUTS + 1, 1 / variance)
        self.precisions = [np.r_[incoming, share / variance] for share in self.shares]
        self.prior_mean = np.r_[np.zeros(INPUTS), 0.1, np.zeros(toys.CLASSES)]
        self.groups: list[list[Unit]] = []
        """The units of all clients; those of a group become one unit of the global model."""

    def run(self) -> Params:
        """The global model after all passes."""
        clients = len(self.models)
        for client in range(clients):
            self.join(client)
        draw = np.random.default_rng(seed_for(SEED, 1, 0, -1, "matching"))
        for _ in range(PASSES):
            for client in draw.permutation(clients):
                self.remove(client)
                self.join(int(client))
        return self.global_model()

    def posterior(self, group: list[Unit]) -> Gaussian:
        """What the units of a group say about the global unit, and the prior."""
        weighted_mean = self.prior_mean / self.prior_variance
        precision = np.full(len(self.prior_mean), 1 / self.prior_variance)
        for client, row in group:
            weighted_mean = weighted_mean + self.precisions[client] * self.vectors[client][row]
            precision = precision + self.precisions[client]
        return Gaussian(weighted_mean, precision)

    def gain(self, unit: Unit, group: list[Unit]) -> float:
        """How much likelier a unit is in a group, without constants."""
        alone = self.posterior(group)
        joined = self.posterior([*group, unit])
        gains = joined.weighted_mean**2 / joined.precision
        gains = gains - alone.weighted_mean**2 / alone.precision
        return float(gains.sum())

    def join(self, client: int) -> None:
        """Assign the units of a client to groups or to new ones, at most one to each."""
        clients = len(self.models)
        size = len(self.vectors[client])
        if not self.groups:
            self.groups = [[(client, row)] for row in range(size)]
            return

        old_groups = len(self.groups)
        scores = np.zeros((size, old_groups + size))
        for row in range(size):
            unit = (client, row)
            for column, group in enumerate(self.groups):
                popularity = math.log(len(group) / (clients - len(group)))
                scores[row, column] = self.gain(unit, group) + popularity
            for new in range(size):
                novelty = 2 * math.log(self.gamma / clients) - 2 * math.log(new + 1)
                scores[row, old_groups + new] = self.gain(unit, []) + novelty

        _, columns = linear_sum_assignment(-scores)
        for row, column in enumerate(columns):
            if column < old_groups:
                self.groups[column].append((client, row))
            else:
                self.groups.append([(client, row)])

    def remove(self, client: int) -> None:
        """Take the units of a client out of their groups."""
        without_client = []
        for group in self.groups:
            units = [unit for unit in group if unit[0] != client]
            if units:
                without_client.append(units)
        self.groups = without_client

    def global_model(self) -> Params:
        """The network of one unit for each group."""
        posteriors = [self.posterior(group) for group in self.groups]
        units = np.array([p.weighted_mean / p.precision for p in posteriors])

        bias_precision = 1 / self.prior_variance
        weighted_bias = 0.1 / self.prior_variance
        for model, share in zip(self.models, self.shares, strict=True):
            bias_precision = bias_precision + share / self.variance
            weighted_bias = weighted_bias + share / self.variance * model["head.bias"]

        arrays = {
            "body.1.weight": units[:, :INPUTS],
            "body.1.bias": units[:, INPUTS],
            "head.weight": units[:, INPUTS + 1 :].T,
            "head.bias": weighted_bias / bias_precision,
        }
        return {
            name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()
        }


@pytest.mark.parametrize("gamma", [1e-3, 50.0])
def test_the_model_is_that_of_loops(gamma: float) -> None:
    """With a large gamma it needs more units than a client has."""
    prepared = ready_one_shot({**ONE_SETTING, "gamma": [gamma]})
    models = list(local_models().values())
    counts = label_counts(prepared)
    matching = Matching(models, counts, gamma=gamma, variance=0.5, prior_variance=10.0)

    state = drive(prepared).final

    expected = matching.run()
    width = len(expected["body.1.bias"])
    assert width > 8 or gamma < 1
    assert state.model is not None
    assert state.model.widths == (width,)
    assert_same_model(state.params, expected)


def test_of_several_settings_the_best_on_the_clients_data_is_taken() -> None:
    method = {
        "name": "pfnm",
        "gamma": [1.0, 50.0],
        "variance": [1.0, 0.1],
        "prior_variance": [1.0],
    }
    prepared = ready_one_shot(method)
    fed = Federation(prepared)
    models = list(local_models().values())
    counts = label_counts(prepared)
    data = [fed.data(client) for client in fed.clients]
    inputs = torch.cat([examples.inputs for examples in data]).flatten(1)
    labels = torch.cat([examples.labels for examples in data])

    state = drive(prepared).final

    candidates = []
    correct = []
    for gamma in (1.0, 50.0):
        for variance in (1.0, 0.1):
            matching = Matching(models, counts, gamma=gamma, variance=variance, prior_variance=1.0)
            model = matching.run()
            hidden = torch.relu(inputs @ model["body.1.weight"].T + model["body.1.bias"])
            answers = (hidden @ model["head.weight"].T + model["head.bias"]).argmax(1)
            candidates.append(model)
            correct.append(int((answers == labels).sum()))
    assert len(set(correct)) > 1
    assert_same_model(state.params, candidates[int(np.argmax(correct))])
    assert not state.extra.many("candidate")


@pytest.mark.parametrize("changes", [{"model": "toy_slim"}, {"model": "logistic"}], ids=str)
def test_other_networks_keep_their_widths(changes: dict[str, object]) -> None:
    """Their layers are matched, or averaged, without new units."""
    prepared = ready_one_shot(ONE_SETTING, plan={"epochs": 1, "batch": 50}, **changes)

    assert all_finite(drive(prepared).params)


def test_a_wider_model_is_measured_and_can_be_saved(tmp_path: Path) -> None:
    method = {**ONE_SETTING, "gamma": [50.0]}
    toy = toys.toy(method, **toys.suited("pfnm"))

    result = run(toy, tmp_path / "run", data=toys.blobs())

    assert len(result.model["body.1.bias"]) > 8
    assert 0.4 < result.accuracy <= 1

    state = drive(ready_one_shot(method)).final
    assert state.model is not None
    params = {name: value.float() for name, value in state.params.items()}  # as every run does
    save_model(tmp_path / "model", state.model, params)
    saved_spec, saved_params = read_model(tmp_path / "model")
    assert saved_spec == state.model
    x = torch.randn(3, 1, toys.SIDE, toys.SIDE)
    answers = predictor(saved_spec, saved_params)(x)
    assert torch.equal(answers, predictor(state.model, params)(x))


def test_models_that_differ_or_cannot_be_matched_are_refused_by_name() -> None:
    with pytest.raises(IncompatibleMethod, match=r"pfnm .*clients\.models"):
        ready_one_shot("pfnm", clients={"models": ("mlp", "logistic")})
    with pytest.raises(IncompatibleMethod, match=r"pfnm.*toy_batchnorm is neither.*qkt_cnn"):
        ready_one_shot("pfnm", model="toy_batchnorm")


@pytest.mark.parametrize("field", ["gamma", "variance", "prior_variance"])
def test_candidates_out_of_range_are_refused_by_name(field: str) -> None:
    """In a config, and in Python."""
    for value in ([0.0], [1.0, -1.0], [float("nan")], [], ["1"]):
        with pytest.raises(ConfigError, match=rf"method\.{field} = "):
            ready_one_shot({"name": "pfnm", field: value})
    with pytest.raises(ConfigError, match=rf"PFNM\.{field} = "):
        PFNM(**{field: (1.0, 0.0)})
    with pytest.raises(ConfigError, match=rf"PFNM\.{field} = \[\]"):
        PFNM(**{field: ()})
    check_ranges(PFNM())
