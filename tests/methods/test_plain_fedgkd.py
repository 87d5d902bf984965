"""FedGKD and its vote against a plain implementation, and what they are at their edges."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from plain import (
    Federation,
    Loss,
    Params,
    assert_same_model,
    assert_unlike_fedavg,
    average,
    ce,
    drive,
    kl,
    ready_for,
    run_of,
    weighted_mean,
)
from torch import Tensor, nn

import toys
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.trees import same_bits
from fedstill.running.runner import run

PUBLIC = {"data": {"public": toys.PUBLIC}}
ROUNDS = 4
WEIGHT = 0.7
TEMPERATURE = 2.0
VOTE_TEMPERATURE = 0.3
FIELDS = {"weight": WEIGHT, "temperature": TEMPERATURE}


@dataclass(frozen=True)
class Teacher:
    """A network that clients learn from, and its share of the distillation."""

    network: nn.Module
    vote: float


def distilling_from(teachers: list[Teacher]) -> Loss:
    """Cross-entropy, and the divergence from each teacher."""
    tau = TEMPERATURE

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        total = ce(model, x, y)
        for teacher in teachers:
            p = (teacher.network(x).detach() / tau).softmax(1)
            q = (model(x) / tau).softmax(1)
            total = total + WEIGHT * teacher.vote * tau**2 * kl(p, q).mean()
        return total

    return loss


def mean_teacher(fed: Federation, window: list[Params]) -> list[Teacher]:
    """FedGKD's teacher: the mean of the last models."""
    if not window:
        return []
    mean = weighted_mean(window, [1] * len(window))
    return [Teacher(fed.net(mean).eval(), 1.0)]


def voting_teachers(fed: Federation, window: list[Params]) -> list[Teacher]:
    """FedGKD-Vote's teachers: a model weighs more if its loss on public data is small."""
    public = fed.ready.sites.public
    assert public is not None
    inputs = fed.inputs(public.values)
    labels = public_labels(fed)
    networks = [fed.net(params).eval() for params in window]
    losses = [float(ce(network, inputs, labels).detach()) for network in networks]
    scores = [math.exp(-loss / VOTE_TEMPERATURE) for loss in losses]
    return [
        Teacher(network, score / sum(scores))
        for network, score in zip(networks, scores, strict=True)
    ]


def public_labels(fed: Federation) -> Tensor:
    """The labels that the server reads in its stage."""
    stage = fed.ready.settings.schedule(1, fed.ready.world)[-1]
    view = fed.ready.sites.view(-1, stage)
    assert view.public is not None
    assert int(view.public.labels.min()) >= 0
    return view.public.labels


def global_models(fed: Federation, window_size: int, *, vote: bool = False) -> list[Params]:
    """The server's model at first and after each round."""
    models = [fed.start]
    for round_index in range(1, ROUNDS + 1):
        window = models[1:][-window_size:]  # averaged models only
        teachers = mean_teacher(fed, window)
        if vote:
            teachers = voting_teachers(fed, window)
        models.append(average(fed.fit_cohort(models[-1], distilling_from(teachers), round_index)))
    return models


@pytest.mark.parametrize("models", [1, 2, 5])
def test_fedgkd(models: int) -> None:
    """Clients distil from the mean of the server's last models."""
    ready = ready_for({"name": "fedgkd", "models": models, **FIELDS}, rounds=ROUNDS)
    expected = global_models(Federation(ready), models)

    ours = drive(ready)

    for state, params in zip(ours.states, expected, strict=True):
        assert_same_model(state.params, params)
        assert len(state.extra.many("past")) <= models - 1
    assert_unlike_fedavg(ours.params, ready, rounds=ROUNDS)


@pytest.mark.parametrize("models", [2, 5])
def test_fedgkd_vote(models: int) -> None:
    """Clients distil from each of the server's last models."""
    method = {
        "name": "fedgkd_vote",
        "models": models,
        "vote_temperature": VOTE_TEMPERATURE,
        **FIELDS,
    }
    ready = ready_for(method, rounds=ROUNDS, **PUBLIC)
    expected = global_models(Federation(ready), models, vote=True)

    ours = drive(ready)

    for state, params in zip(ours.states, expected, strict=True):
        assert_same_model(state.params, params)
    votes = ours.final.extra.tensor("votes")
    assert len(votes) == min(models, 3)
    assert float(votes.max() - votes.min()) > 0.01


@pytest.mark.parametrize(
    ("at_its_edge", "equivalent", "changes"),
    [
        ({"name": "fedgkd", "weight": 0.0}, "fedavg", {}),
        ({"name": "fedgkd_vote", "weight": 0.0}, "fedavg", PUBLIC),
        ({"name": "fedgkd", "models": 1, "weight": 1.0, "from_round": 1}, "kd", {}),
        ({"name": "fedgkd_vote", "models": 1}, {"name": "fedgkd", "models": 1}, PUBLIC),
    ],
    ids=str,
)
def test_at_its_edge_it_is_another_method_to_the_bit(
    at_its_edge: object, equivalent: object, changes: dict[str, object]
) -> None:
    ours = run_of(at_its_edge, rounds=3, **changes).params
    expected = run_of(equivalent, rounds=3, **changes).params

    assert same_bits(ours, expected)


def test_models_with_equal_losses_have_equal_votes() -> None:
    ready = ready_for({"name": "fedgkd_vote", "models": 3}, rounds=ROUNDS, **PUBLIC)
    state = drive(ready).states[3]
    losses = {f"loss.{round_index}": 1.7 for round_index in (2, 3, 4)}

    with_votes = ready.settings.method.begin_round(state.next(groups=losses), [], ready.world)

    votes = with_votes.extra.tensor("votes").tolist()
    assert votes == pytest.approx([1 / 3] * 3)


def test_the_state_forgets_models_beyond_the_window() -> None:
    """Before round 1 and after each round, it has these models besides the current one."""
    states = run_of({"name": "fedgkd", "models": 3}, rounds=6).states

    remembered_rounds = [sorted(state.extra.many("past")) for state in states]
    assert remembered_rounds == [[], [], [2], [2, 3], [3, 4], [4, 5], [5, 6]]


def test_public_data_without_labels_cannot_vote() -> None:
    toy = toys.toy("fedgkd_vote", data={"public": toys.PUBLIC, "public_labels": False})
    with pytest.raises(IncompatibleMethod, match=r"'weigh' of method fedgkd_vote .*public"):
        run(toy, None, data=toys.blobs())
