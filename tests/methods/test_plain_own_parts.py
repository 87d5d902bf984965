"""FedROD and FedDBE, whose clients keep what was added to the network, against a plain
implementation of each.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plain import PLAN, Federation, Params, check, drive, ready_for
from torch import Tensor
from torch.nn.functional import one_hot

import fedstill
import toys
from double import NEAR
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import Stage, TrainingStart
from fedstill.core.registry import method
from fedstill.core.trees import only, same_bits
from fedstill.losses import cross_entropy
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.feddbe import FedDBE, Shifted
from fedstill.methods.fedlc import Calibrated
from fedstill.models.predictors import predictor
from fedstill.running.journal import read_journal
from fedstill.running.runner import run

HEAD, BODY = ("head.weight", "head.bias"), ("body.1.weight", "body.1.bias")
OWN = ("own.weight", "own.bias")


def by_hand(
    fed: Federation,
    start: Params,
    round: int,
    client: int,
    stage: int,
    loss,
    names: tuple[str, ...],
):
    """SGD with momentum on named tensors; ``loss`` is a function of them, of inputs and labels."""
    w = {k: v.detach().clone().requires_grad_(k in names) for k, v in start.items()}
    (x, y), speed = fed.data(client), {k: torch.zeros_like(v) for k, v in start.items()}
    order = generator(seed_for(7, round, stage, client, "order"))
    for _ in range(fed.epochs):
        for index in torch.randperm(len(y), generator=order).split(PLAN["batch"]):
            grads = torch.autograd.grad(loss(w, x[index], y[index]), [w[k] for k in names])
            with torch.no_grad():
                for k, g in zip(names, grads, strict=True):
                    speed[k] = PLAN["momentum"] * speed[k] + g + PLAN["weight_decay"] * w[k]
                    w[k] -= fed.lr(round) * speed[k]
    return {k: v.detach() for k, v in w.items()}


def features(w: Params, x: Tensor) -> Tensor:
    return (x.flatten(1) @ w["body.1.weight"].T + w["body.1.bias"]).clamp(min=0)


def soft(z: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of positive scores exp z."""
    scores = z.exp()
    return -(scores[torch.arange(len(y)), y] / scores.sum(1)).log().mean()


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_fedrod(gamma: float) -> None:
    ready = ready_for({"name": "fedrod", "gamma": gamma}, rounds=3)
    fed = Federation(ready)
    server = fed.start
    own = {c: {k: server[k] for k in OWN} for c in range(6)}
    for round in (1, 2, 3):
        sent, sizes = {}, {c: len(fed.data(c)[1]) for c in fed.cohort(round)}
        for c in sizes:
            n = one_hot(fed.data(c)[1], toys.CLASSES).sum(0).clamp(min=1).double()

            def loss(w: Params, x: Tensor, y: Tensor, n: Tensor = n) -> Tensor:
                h = features(w, x)
                z = h @ w["head.weight"].T + w["head.bias"]
                scores = n**gamma * z.exp()
                balanced = -(scores[torch.arange(len(y)), y] / scores.sum(1)).log().mean()
                both = z.detach() + h.detach() @ w["own.weight"].T + w["own.bias"]
                return balanced + soft(both, y)

            sent[c] = by_hand(fed, {**server, **own[c]}, round, c, 0, loss, (*BODY, *HEAD, *OWN))
            own[c] = {k: sent[c][k] for k in OWN}
        mean = {
            k: sum(m * sent[c][k] for c, m in sizes.items()) / sum(sizes.values())
            for k in (*BODY, *HEAD)
        }
        server = {**server, **mean}
    states, memory = drive(ready)
    check(states[-1].params, server)
    for c in range(6):
        if memory.load(c):
            check(only(memory.load(c).params, OWN), own[c])
            assert not torch.equal(memory.load(c).params["own.weight"], torch.zeros(5, 8))


@method("toy_balanced")
class Balanced(FedAvg):
    """FedAvg with balanced softmax, and no second head."""

    def work(self, stage: Stage) -> Calibrated:
        return OnlyBalanced(self)  # type: ignore[arg-type]


class OnlyBalanced(Calibrated):
    def begin(self, payload, client_state, view, world):  # type: ignore[no-untyped-def]
        shift = view.counts.clamp(min=1).double().log()
        return TrainingStart(
            payload.params, constants={"shift": shift.to(next(iter(payload.params.values())).dtype)}
        )

    def terms(self, step, start):  # type: ignore[no-untyped-def]
        return {"balanced": cross_entropy(step.logits() + start["shift"], step.y)}


def test_fedrods_global_model_is_balanced_fedavgs_to_the_bit_whatever_the_own_heads_do() -> None:
    ours, theirs = (drive(ready_for(m, rounds=3))[0][-1].params for m in ("fedrod", "toy_balanced"))
    assert same_bits(only(ours, theirs), theirs)


def test_of_equal_counts_or_without_gamma_the_generic_model_is_fedavgs() -> None:
    theirs = drive(ready_for("fedavg"))[0][-1].params
    ours = drive(ready_for({"name": "fedrod", "gamma": 0.0}))[0][-1].params
    check(only(ours, theirs), theirs)
    z, y = (
        torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).double(),
        torch.arange(7) % 5,
    )
    torch.testing.assert_close(soft(z + torch.tensor(3.0).log(), y), soft(z, y))


def test_what_a_client_measures_and_what_is_loaded_is_the_sum_of_both_heads(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(toys.toy("fedrod", topology={"clients": 6}, measure_every=1), folder, toys.blobs())
    told = [
        e
        for e in read_journal(folder / "journal.jsonl")
        if e["event"] == "client" and e["round"] == 3
    ]
    assert [e["client"] for e in told] == list(range(6))
    test = toys.blobs().test
    for event in told:
        loaded = fedstill.load_model(folder, client=event["client"]).eval()
        with torch.no_grad():
            right = loaded(test.values).argmax(1) == test.labels
        assert (
            torch.bincount(test.labels[right], minlength=toys.CLASSES).tolist()
            == event["correct_by_class"]
        )


def test_the_answer_is_the_sum_of_both_heads_logits() -> None:
    ready = ready_for("fedrod", rounds=1)
    states, memory = drive(ready)
    client, stage = Federation(ready).cohort(1)[0], ready.settings.schedule(1, ready.world)[0]
    own = memory.load(client).params
    x = Federation(ready).data(client)[0]
    h = features(own, x)
    both = (h @ own["head.weight"].T + own["head.bias"]) + (
        h @ own["own.weight"].T + own["own.bias"]
    )
    answer = ready.settings.method.work(stage).answer(own, ready.world.model(client))
    torch.testing.assert_close(
        predictor(ready.world.model(client), answer)(x), both, rtol=NEAR, atol=NEAR
    )
    assert list(ready.settings.method.predictors(states[-1], ready.world)) == ["global"]


@pytest.mark.parametrize("kappa", [0.0, 3.0])
def test_feddbe(kappa: float) -> None:
    ready = ready_for({"name": "feddbe", "kappa": kappa}, rounds=3)
    fed = Federation(ready)
    server, sizes = fed.start, {c: len(fed.data(c)[1]) for c in range(6)}

    def plain(w: Params, x: Tensor, y: Tensor) -> Tensor:
        return soft((features(w, x) + w["body.shift"]) @ w["head.weight"].T + w["head.bias"], y)

    means = {}
    for c in range(6):
        visited = by_hand(fed, server, 1, c, 0, plain, (*BODY, *HEAD))
        means[c] = features(visited, fed.data(c)[0]).mean(0)
    g = sum(sizes[c] * means[c] for c in sizes) / sum(sizes.values())

    def drawn(w: Params, x: Tensor, y: Tensor) -> Tensor:
        return plain(w, x, y) + kappa * ((features(w, x).mean(0) - g) ** 2 / 2).mean()

    own = dict.fromkeys(range(6), torch.zeros(8, dtype=torch.float64))
    for round in (1, 2, 3):
        cohort, stage = fed.cohort(round), 1 if round == 1 else 0
        names = (*BODY, *HEAD, "body.shift")
        sent = {
            c: by_hand(fed, {**server, "body.shift": own[c]}, round, c, stage, drawn, names)
            for c in cohort
        }
        own |= {c: w["body.shift"] for c, w in sent.items()}
        total = sum(sizes[c] for c in cohort)
        server = {
            **server,
            **{k: sum(sizes[c] * sent[c][k] for c in cohort) / total for k in (*BODY, *HEAD)},
        }
    states, memory = drive(ready)
    torch.testing.assert_close(states[-1].extra.tensor("consensus"), g, rtol=NEAR, atol=NEAR)
    check(states[-1].params, server)
    for c in range(6):
        kept = memory.load(c)
        torch.testing.assert_close(
            kept.params["body.shift"] if kept else own[c], own[c], rtol=NEAR, atol=NEAR
        )
        assert bool(kept) == any(c in fed.cohort(r) for r in (1, 2, 3))


@method("toy_unshifted")
class Unshifted(FedDBE):
    """FedDBE whose shifts stay zero."""

    def work(self, stage: Stage):  # type: ignore[no-untyped-def]
        return Still(self, stage.name, self.kappa) if stage.name == "train" else super().work(stage)


class Still(Shifted):
    def trainable(self, name: str) -> bool:
        return name != "body.shift"


def test_without_kappa_and_with_shifts_that_stay_zero_feddbe_is_federated_averaging() -> None:
    """In data order: the stage before round 1 draws another."""
    plan = {"shuffle": False}
    ours = drive(ready_for({"name": "toy_unshifted", "kappa": 0.0}, plan=plan))[0][-1].params
    theirs = drive(ready_for("fedavg", plan=plan))[0][-1].params
    assert same_bits(only(ours, theirs), theirs)


def test_a_consensus_mean_costs_nothing_and_a_shift_of_features_is_one_of_the_bias() -> None:
    ready = ready_for("feddbe", rounds=1)
    fed, spec = Federation(ready), ready.world.model(0)
    (x, y), draw = fed.data(0), torch.Generator().manual_seed(0)
    shifted = {**fed.start, "body.shift": torch.randn(8, generator=draw, dtype=torch.float64)}
    step = SimpleNamespace(
        features=lambda: features(shifted, x) + shifted["body.shift"],
        logits=lambda: predictor(spec, shifted)(x),
        weighted=lambda losses: losses,
        **{"params": shifted, "mask": torch.ones(len(y)), "y": y},
    )
    start = TrainingStart(shifted, constants={"consensus": features(shifted, x).mean(0)})
    assert float(Shifted(ready.settings.method, "train", 50.0).terms(step, start)["mean"]) < NEAR  # type: ignore[arg-type]
    bias = shifted["head.bias"] + shifted["head.weight"] @ shifted["body.shift"]
    plain = features(shifted, x) @ shifted["head.weight"].T + bias
    torch.testing.assert_close(step.logits(), plain, rtol=NEAR, atol=NEAR)
