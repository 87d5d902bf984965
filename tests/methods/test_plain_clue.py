"""CLUE's approximation against a plain re-derivation: the helper, what is taken from it, and the
vote.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from plain import Federation, check, drive
from test_plain_one_shot import ready
from torch import Tensor, nn

import toys
from double import NEAR
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.core.keys import generator, seed_for
from fedstill.methods.fit import queries_of
from fedstill.running.journal import read_journal
from fedstill.running.preparation import Prepared
from fedstill.running.runner import run

SINGLE = {"query": {"draw": "single", "fewer_than": 8}}
NOISE = torch.randn(
    20, 1, toys.SIDE, toys.SIDE, generator=generator(seed_for(7, 0, 0, -1, "probe"))
).double()


def clue(**changes: object) -> Prepared:
    return ready({"name": "clue", "share": 0.2, **changes}, **SINGLE)


class Plain:
    """The models that clients trained alone, as modules, and what CLUE makes of them."""

    def __init__(self, prepared: Prepared) -> None:
        self.fed, self.queries = Federation(prepared), queries_of(prepared.world)
        local = drive(ready("local_only", **SINGLE))[0][-1].extra.many("model")
        self.nets = {c: self.fed.net(p).eval() for c, p in local.items()}

    def helper(self, client: int) -> int:
        (q,) = self.queries[client]
        seen = {
            c: net(NOISE).softmax(1).mean(0)[q].item()
            for c, net in self.nets.items()
            if c != client
        }
        return max(seen, key=lambda c: seen[c])

    def patched(self, client: int) -> nn.Module:
        (q,), helper = self.queries[client], self.nets[self.helper(client)]
        helper.zero_grad()
        (-helper(NOISE).log_softmax(1)[:, q].mean()).backward()
        made = self.fed.net(self.nets[client].state_dict()).eval()
        for ours, theirs in zip(made.parameters(), helper.parameters(), strict=True):
            matters = (theirs.grad * theirs.detach()).abs()
            least = matters.flatten().sort().values[-max(1, round(0.2 * matters.numel()))]
            ours.data[matters >= least] = theirs.data[matters >= least]
        return made

    def weight(self, net: nn.Module, client: int) -> float:
        x, y = self.fed.data(client)
        error = ((net(x).argmax(1) != y).sum().item() + 0.5) / (len(y) + 1)
        return max(0.0, math.log((1 - error) / error))

    def votes(self, client: int) -> list[float]:
        both = [self.weight(net, client) for net in (self.nets[client], self.patched(client))]
        return both if any(both) else [1.0, 1.0]


def test_helper_patch_and_vote_are_those_of_plain_modules() -> None:
    prepared = clue()
    plain, state = Plain(prepared), drive(prepared)[0][-1]
    students, predictors = (
        state.extra.many("student"),
        prepared.settings.method.predictors(state, prepared.world),
    )
    assert set(students) == set(plain.queries)
    assert set(predictors) == {f"client {c}" for c in plain.queries}
    x = torch.randn(9, 1, toys.SIDE, toys.SIDE, generator=generator(1)).double()
    for c, params in students.items():
        made, votes = plain.patched(c), torch.tensor(plain.votes(c), dtype=torch.float64)
        check(params, made.state_dict())
        moved = sum(int((params[k] != v).sum()) for k, v in plain.nets[c].state_dict().items())
        assert 0 < moved <= sum(max(1, round(0.2 * v.numel())) for v in params.values())
        torch.testing.assert_close(state.extra.tensor(f"vote.{c}"), votes, rtol=0, atol=NEAR)
        both: Tensor = torch.stack([plain.nets[c](x).softmax(1), made(x).softmax(1)])
        expected = (votes.reshape(2, 1, 1) / votes.sum() * both).sum(0).detach()
        torch.testing.assert_close(predictors[f"client {c}"](x).exp(), expected, rtol=0, atol=NEAR)


def test_the_journal_says_who_helped_and_each_client_is_measured_by_its_vote(
    tmp_path: Path,
) -> None:
    toy = toys.toy({"name": "clue", "share": 0.2}, **toys.suited("clue"))
    run(toy, tmp_path / "run", data=toys.blobs())
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    told = {
        e["client"]: e
        for e in events
        if e["event"] == "client" and e["name"] == "transfer" and "helper" in e
    }
    last = next(e for e in events if e["event"] == "round")
    assert last["accuracy"] is None, "there is no global model"
    assert set(last["others"]) == {f"client {c}" for c in told}
    assert [a["client"] for a in last["answers"]] == sorted(told)
    for answer in last["answers"]:
        accuracy = last["others"][f"client {answer['client']}"]["class_accuracy"]
        before = next(
            e for e in events if e["event"] == "client" and e["client"] == answer["client"]
        )
        (q,) = answer["query"]
        tests = [n for e in events if e["event"] == "start" for n in e["test_counts"]]
        assert answer["gain"] == pytest.approx(
            accuracy[q] - before["correct_by_class"][q] / tests[q]
        )
        assert told[answer["client"]]["helper"] != answer["client"]


def test_nothing_of_a_peer_that_is_the_same_changes_a_client() -> None:
    """Untrained models are all alike: a copy with parts of another is the client's own."""
    prepared = ready(
        {"name": "clue", "share": 1.0}, **SINGLE, plan={"fit": {"epochs": 0, "validation": 0.0}}
    )
    state = drive(prepared)[0][-1]
    for c, params in state.extra.many("student").items():
        check(params, state.extra.many("model")[c])


def test_a_whole_share_makes_the_helpers_model() -> None:
    prepared = clue(share=1.0)
    plain, state = Plain(prepared), drive(prepared)[0][-1]
    for c, params in state.extra.many("student").items():
        check(params, plain.nets[plain.helper(c)].state_dict())


def test_a_client_without_peers_goes_on_with_its_own_model() -> None:
    state = drive(clue(participants=1))[0][-1]
    students = state.extra.many("student")
    assert students
    for c, params in students.items():
        check(params, state.extra.many("model")[c])


def test_queries_of_several_classes_and_models_that_differ_are_refused_by_name() -> None:
    with pytest.raises(
        IncompatibleMethod,
        match=r"method clue .*set query",
    ):
        ready("clue", query={"draw": "multi", "fewer_than": 8, "least": 2})
    with pytest.raises(IncompatibleMethod, match=r"clue .*clients\.models"):
        ready("clue", clients={"models": ("mlp", "logistic")}, **SINGLE)
    with pytest.raises(ConfigError, match="queries"):
        ready("clue", query={})
