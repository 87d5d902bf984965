"""FedGKD and its vote against a plain implementation, and what they are at their edges."""

from __future__ import annotations

import math

import pytest
import torch
from plain import Federation, Params, average, ce, check, check_matters, drive, ready_for
from torch import Tensor, nn

import toys
from fedstill.core.errors import IncompatibleMethod
from fedstill.running.runner import run

PUBLIC = {"data": {"public": toys.PUBLIC}}


def divergence(
    model: nn.Module, teachers: list[nn.Module], votes: list[float], x: Tensor, tau: float
) -> Tensor:
    far = torch.zeros((), dtype=torch.float64)
    for teacher, vote in zip(teachers, votes, strict=True):
        p = (teacher(x).detach() / tau).softmax(1)
        far = far + vote * tau**2 * (p * (p.log() - (model(x) / tau).log_softmax(1))).sum(1).mean()
    return far


def plain_run(
    fed: Federation, rounds: int, models: int, weight: float, tau: float, vote: float = 0.0
) -> list[Params]:
    """The server's models; with ``vote``, its temperature, each teacher speaks for itself."""
    made = [fed.start]
    for round in range(1, rounds + 1):
        window = made[1:][-models:]  # averaged models only
        if vote:
            public = fed.ready.sites.public
            assert public is not None
            x, y = fed.inputs(public.values), public_labels(fed)
            losses = [float(ce(fed.net(p).eval(), x, y).detach()) for p in window]
            raw = [math.exp(-v / vote) for v in losses]
            votes, teachers = [v / sum(raw) for v in raw], [fed.net(p).eval() for p in window]
        elif window:
            mean = {k: sum(p[k] for p in window) / len(window) for k in window[0]}
            votes, teachers = [1.0], [fed.net(mean).eval()]
        else:
            votes, teachers = [], []

        def loss(
            m: nn.Module, x: Tensor, y: Tensor, teachers: list = teachers, votes: list = votes
        ) -> Tensor:
            return ce(m, x, y) + weight * divergence(m, teachers, votes, x, tau)

        made.append(average([fed.fit(made[-1], loss, round, c) for c in fed.cohort(round)]))
    return made


def public_labels(fed: Federation) -> Tensor:
    stage = fed.ready.settings.schedule(1, fed.ready.world)[-1]
    view = fed.ready.sites.view(-1, stage)
    assert view.public is not None
    assert int(view.public.labels.min()) >= 0, "the server reads them in this stage"
    return view.public.labels


@pytest.mark.parametrize("models", [1, 2, 5])
def test_fedgkd(models: int) -> None:
    ready = ready_for(
        {"name": "fedgkd", "models": models, "weight": 0.7, "temperature": 2.0}, rounds=4
    )
    made = plain_run(Federation(ready), 4, models, 0.7, 2.0)
    states, _ = drive(ready)
    for state, params in zip(states, made, strict=True):
        check(state.params, params)
        assert len(state.extra.many("past")) <= models - 1
    check_matters(states[-1].params, ready, rounds=4)


@pytest.mark.parametrize("models", [2, 5])
def test_fedgkd_vote(models: int) -> None:
    fields = {
        "name": "fedgkd_vote",
        "models": models,
        "weight": 0.7,
        "temperature": 2.0,
        "vote_temperature": 0.3,
    }
    ready = ready_for(fields, rounds=4, **PUBLIC)
    made = plain_run(Federation(ready), 4, models, 0.7, 2.0, vote=0.3)
    states, _ = drive(ready)
    for state, params in zip(states, made, strict=True):
        check(state.params, params)
    votes = states[-1].extra.tensor("votes")
    assert len(votes) == min(models, 3)
    assert float(votes.max() - votes.min()) > 0.01


@pytest.mark.parametrize(
    ("one", "other", "changes"),
    [
        ({"name": "fedgkd", "weight": 0.0}, "fedavg", {}),
        ({"name": "fedgkd_vote", "weight": 0.0}, "fedavg", PUBLIC),
        ({"name": "fedgkd", "models": 1, "weight": 1.0, "from_round": 1}, "kd", {}),
        ({"name": "fedgkd_vote", "models": 1}, {"name": "fedgkd", "models": 1}, PUBLIC),
    ],
    ids=str,
)
def test_at_its_edge_it_is_another_method_to_the_bit(
    one: object, other: object, changes: dict[str, object]
) -> None:
    ours, theirs = (drive(ready_for(m, rounds=3, **changes))[0][-1].params for m in (one, other))
    assert all(torch.equal(ours[k], v) for k, v in theirs.items())


def test_models_with_equal_losses_have_equal_votes() -> None:
    ready = ready_for({"name": "fedgkd_vote", "models": 3}, rounds=4, **PUBLIC)
    method, state = ready.settings.method, drive(ready)[0][3]
    equal = state.next(groups={f"loss.{r}": 1.7 for r in (2, 3, 4)})
    assert method.begin_round(equal, [], ready.world).extra.tensor(
        "votes"
    ).tolist() == pytest.approx([1 / 3] * 3)


def test_the_state_forgets_models_beyond_the_window() -> None:
    ready = ready_for({"name": "fedgkd", "models": 3}, rounds=6)
    assert [sorted(s.extra.many("past")) for s in drive(ready)[0]] == [
        [],
        [],
        [2],
        [2, 3],
        [3, 4],
        [4, 5],
        [5, 6],
    ]


def test_public_data_without_labels_cannot_vote() -> None:
    bare = {"data": {"public": toys.PUBLIC, "public_labels": False}}
    with pytest.raises(
        IncompatibleMethod,
        match=r"'weigh' of method fedgkd_vote .*public",
    ):
        run(toys.toy("fedgkd_vote", **bare), None, data=toys.blobs())
