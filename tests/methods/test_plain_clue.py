"""CLUE's approximation against a plain derivation: the helper, what is taken from it, and the
vote.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from plain import SEED, Federation, Params, assert_same_model, drive
from plain_one_shot import local_models, ready_one_shot
from torch import Tensor, nn

import toys
from double import NEAR
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import State
from fedstill.methods.fit import queries_of
from fedstill.running.journal import read_journal
from fedstill.running.preparation import Prepared
from fedstill.running.runner import run

SHARE = 0.2
"""The share of each tensor that is taken from the helper."""

SINGLE = {"query": {"draw": "single", "fewer_than": 8}}
"""Each client asks for one class."""


def ready_clue(**changes: object) -> Prepared:
    """CLUE with some other fields."""
    return ready_one_shot({"name": "clue", "share": SHARE, **changes}, **SINGLE)


def students_of(state: State) -> dict[int, Params]:
    """The models of the clients that asked their peers."""
    return state.extra.many("student")


def noise() -> Tensor:
    """The inputs on which helpers are chosen."""
    draw = generator(seed_for(SEED, 0, 0, -1, "probe"))
    return torch.randn(20, 1, toys.SIDE, toys.SIDE, generator=draw).double()


class Plain:
    """The models that clients trained alone, as modules, and what CLUE makes of them."""

    def __init__(self, prepared: Prepared) -> None:
        self.fed = Federation(prepared)
        self.noise = noise()
        self.queried_class = {}
        for client, (queried_class,) in queries_of(prepared.world).items():
            self.queried_class[client] = queried_class
        self.networks = {}
        for client, params in local_models(**SINGLE).items():
            self.networks[client] = self.fed.net(params).eval()

    def helper(self, client: int) -> int:
        """The peer that answers noise most often with the class that the client asks for."""
        shares = {}
        for peer, network in self.networks.items():
            if peer != client:
                probabilities = network(self.noise).softmax(1).mean(0)
                shares[peer] = probabilities[self.queried_class[client]].item()
        return max(shares, key=shares.__getitem__)

    def patched(self, client: int) -> nn.Module:
        """The client's model with the entries of the helper's that matter most for the class."""
        helper = self.networks[self.helper(client)]
        helper.zero_grad()
        log_probabilities = helper(self.noise).log_softmax(1)
        (-log_probabilities[:, self.queried_class[client]].mean()).backward()

        patched = self.fed.net(self.networks[client].state_dict()).eval()
        pairs = zip(patched.parameters(), helper.parameters(), strict=True)
        for parameter, helper_parameter in pairs:
            importance = (helper_parameter.grad * helper_parameter.detach()).abs()
            threshold = importance.flatten().sort().values[-patch_size(importance)]
            mask = importance >= threshold
            parameter.data[mask] = helper_parameter.data[mask]
        return patched

    def vote(self, network: nn.Module, client: int) -> float:
        """The weight that AdaBoost gives a model with this error on the client's data."""
        data = self.fed.data(client)
        errors = (network(data.inputs).argmax(1) != data.labels).sum().item()
        error = (errors + 0.5) / (len(data.labels) + 1)
        return max(0.0, math.log((1 - error) / error))

    def votes(self, client: int) -> Tensor:
        """The votes of the client's model and of the patched one."""
        networks = (self.networks[client], self.patched(client))
        votes = [self.vote(network, client) for network in networks]
        if not any(votes):
            votes = [1.0, 1.0]
        return torch.tensor(votes, dtype=torch.float64)


def patch_size(values: Tensor) -> int:
    """The number of entries of a tensor that are taken from the helper."""
    return max(1, round(SHARE * values.numel()))


def test_helper_patch_and_vote_are_those_of_plain_modules() -> None:
    prepared = ready_clue()
    plain = Plain(prepared)
    x = torch.randn(9, 1, toys.SIDE, toys.SIDE, generator=generator(1)).double()

    state = drive(prepared).final
    students = students_of(state)
    predictors = prepared.settings.method.predictors(state, prepared.world)

    assert set(students) == set(plain.queried_class)
    assert set(predictors) == {f"client {client}" for client in plain.queried_class}
    for client, params in students.items():
        local = plain.networks[client]
        patched = plain.patched(client)
        assert_same_model(params, patched.state_dict())
        changed = [int((params[k] != v).sum()) for k, v in local.state_dict().items()]
        assert 0 < sum(changed) <= sum(patch_size(value) for value in params.values())

        votes = plain.votes(client)
        torch.testing.assert_close(state.extra.tensor(f"vote.{client}"), votes, rtol=0, atol=NEAR)
        shares = votes / votes.sum()
        expected = shares[0] * local(x).softmax(1) + shares[1] * patched(x).softmax(1)
        answers = predictors[f"client {client}"](x).exp()
        torch.testing.assert_close(answers, expected.detach(), rtol=0, atol=NEAR)


def test_the_journal_names_helpers_and_measures_each_client_by_its_vote(
    tmp_path: Path,
) -> None:
    """The gain of an answer is that of the vote over the client's model, in the class asked for."""
    toy = toys.toy({"name": "clue", "share": SHARE}, **toys.suited("clue"))

    run(toy, tmp_path / "run", data=toys.blobs())

    events = read_journal(tmp_path / "run" / "journal.jsonl")
    client_events = [event for event in events if event["event"] == "client"]
    helpers = {event["client"]: event["helper"] for event in client_events if "helper" in event}
    test_counts = next(event["test_counts"] for event in events if event["event"] == "start")
    last = next(event for event in events if event["event"] == "round")
    assert last["accuracy"] is None, "there is no global model"
    assert set(last["others"]) == {f"client {client}" for client in helpers}
    assert [answer["client"] for answer in last["answers"]] == sorted(helpers)

    for answer in last["answers"]:
        client = answer["client"]
        (queried_class,) = answer["query"]
        accuracy = last["others"][f"client {client}"]["class_accuracy"][queried_class]
        fitted = next(event for event in client_events if event["client"] == client)
        correct = fitted["correct_by_class"][queried_class]
        assert answer["gain"] == pytest.approx(accuracy - correct / test_counts[queried_class])
        assert helpers[client] != client


def test_parts_of_an_equal_peer_change_nothing() -> None:
    """Untrained models are all the same: a copy with parts of another is the client's model."""
    plan = {"fit": {"epochs": 0, "validation": 0.0}}
    prepared = ready_one_shot({"name": "clue", "share": 1.0}, **SINGLE, plan=plan)

    state = drive(prepared).final

    for client, params in students_of(state).items():
        assert_same_model(params, state.extra.many("model")[client])


def test_a_share_of_one_copies_the_helpers_model() -> None:
    prepared = ready_clue(share=1.0)
    plain = Plain(prepared)

    students = students_of(drive(prepared).final)

    for client, params in students.items():
        helper = plain.networks[plain.helper(client)]
        assert_same_model(params, helper.state_dict())


def test_a_client_without_peers_goes_on_with_its_own_model() -> None:
    state = drive(ready_clue(participants=1)).final

    students = students_of(state)
    assert students
    for client, params in students.items():
        assert_same_model(params, state.extra.many("model")[client])


def test_queries_of_several_classes_and_models_that_differ_are_refused_by_name() -> None:
    with pytest.raises(IncompatibleMethod, match=r"method clue .*set query"):
        ready_one_shot("clue", query={"draw": "multi", "fewer_than": 8, "least": 2})
    with pytest.raises(IncompatibleMethod, match=r"clue .*clients\.models"):
        ready_one_shot("clue", clients={"models": ("mlp", "logistic")}, **SINGLE)
    with pytest.raises(ConfigError, match="queries"):
        ready_one_shot("clue", query={})
