"""Replay: what is kept, what of it is finetuning and what training on all of the past, and its
objective by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from torch.nn.functional import normalize

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import Examples, Payload, State, TrainingStart
from fedstill.engines.serial import Memory
from fedstill.engines.step import BatchStep, Networks, StepInputs
from fedstill.methods.replay import Rehearse, Replay, herded, lowest, merged
from fedstill.models.contract import initial, module, spec_for
from fedstill.running.journal import read_journal
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run
from loops import context_of, states_after
from run_bits import bits

STREAM = {"kind": "classes", "tasks": 3, "head": "seen"}
ALIKE = {"aggregation": "uniform"}


def model_of(folder: Path, method: Any, **more: Any) -> str:
    values = {"partition": {"kind": "iid"}, "stream": STREAM, **more}
    run(toys.toy(method, **values), folder, toys.blobs())
    return str(bits(folder)["model.safetensors"])


def gone_through(method: Any, until: int = 3, **more: Any) -> tuple[Prepared, State, Memory]:
    """Rounds of a run, each a task of its own, in this process: the state after them, what clients
    remember.
    """
    values = {"partition": {"kind": "iid"}, "stream": STREAM, "engine": "serial", **more}
    ready = prepare(resolve(toys.toy(method, **values)), toys.blobs())
    engine = ready.engine()
    rounds = min(until, ready.world.rounds)
    state = states_after(context_of(ready, engine), rounds)[-1]
    return ready, state, engine.memory


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
def test_with_no_memory_it_is_fedavg(engine: str, tmp_path: Path) -> None:
    plain = model_of(tmp_path / "fedavg", "fedavg", engine=engine)
    assert model_of(tmp_path / "none", {"name": "replay", "size": 0}, engine=engine) == plain
    assert model_of(tmp_path / "some", {"name": "replay", "size": 5}, engine=engine) != plain


def test_in_the_first_task_it_is_fedavg(tmp_path: Path) -> None:
    plain = model_of(tmp_path / "fedavg", "fedavg", stream={})
    for more in ({}, {"alpha": 0.5, "beta": 0.5}, {"nearest_mean": True}, {"choose": "herding"}):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        assert model_of(folder, {"name": "replay", **more}, stream={}) == plain


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
@pytest.mark.parametrize("head", ["all", "seen"])
def test_a_memory_of_all_is_training_on_the_data_of_the_past(
    head: str, engine: str, tmp_path: Path
) -> None:
    """The same examples in the same order: the bound ``past = "kept"``, to the bit."""
    stream = {**STREAM, "head": head}
    bound = model_of(
        tmp_path / "kept",
        {"name": "fedavg", **ALIKE},
        stream={**stream, "past": "kept"},
        engine=engine,
    )
    replay = {"name": "replay", "size": 300, **ALIKE}
    assert model_of(tmp_path / "replay", replay, stream=stream, engine=engine) == bound
    assert (
        model_of(tmp_path / "both", replay, stream={**stream, "past": "kept"}, engine=engine)
        == bound
    )


def test_what_is_kept_is_the_lowest_of_all_keys_so_far() -> None:
    ready, _, memory = gone_through({"name": "replay", "size": 12})
    stream, sites = ready.world.stream, ready.sites
    assert sites.tasks is not None
    for client in range(ready.world.clients):
        keys, values = [], []
        for task in range(2):
            part = sites.positions(client)
            own = sites.train.take(part[sites.tasks.of_task(part, task)])
            draw = generator(seed_for(ready.world.seed, task, 0, client, "reservoir"))
            keys.append(torch.rand(len(own), generator=draw, dtype=torch.float64))
            values.append(own.values)
        both = torch.cat(keys)
        want = sorted(range(len(both)), key=lambda i: float(both[i]))[:12]
        kept = memory.load(client)
        assert torch.equal(kept.tensor("values"), torch.cat(values)[sorted(want)])
        assert set(kept.tensor("labels").tolist()) <= set(stream.seen(1)), (
            "the last task is kept for nobody"
        )


def test_one_group_after_the_other_is_both_together() -> None:
    draw = torch.Generator().manual_seed(3)
    labels, keys = (
        torch.randint(4, (60,), generator=draw),
        torch.rand(60, generator=draw, dtype=torch.float64),
    )
    whole = Payload(labels=labels, keys=keys, places=torch.arange(60))
    first, then = (
        Payload({g: whole.tensor(g)[cut] for g in whole}) for cut in (slice(25), slice(25, None))
    )
    for by_class in (False, True):
        once = merged(Payload(), whole, 13, by_class).tensor("places")
        twice = merged(merged(Payload(), first, 13, by_class), then, 13, by_class).tensor("places")
        assert torch.equal(once, twice)
        assert len(once) == 13
    by_class = labels[lowest(keys, labels, 13, by_class=True)].bincount().tolist()
    assert sorted(by_class) == [3, 3, 3, 4]


def test_herding_takes_what_brings_the_mean_nearest() -> None:
    z = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 0, 1, 1, 0, 1, 1, 1])
    keys = herded(z, labels, 3)
    unit = (z / z.norm(dim=1, keepdim=True)).double().numpy()
    for c in (0, 1):
        own = [i for i in range(9) if int(labels[i]) == c]
        chosen: list[int] = []
        for _ in range(3):
            rest = [i for i in own if i not in chosen]
            off = [np.linalg.norm(unit[own].mean(0) - unit[[*chosen, i]].mean(0)) for i in rest]
            chosen.append(rest[int(np.argmin(off))])
        assert sorted(own, key=lambda i: float(keys[i]))[:3] == chosen


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_the_objective_by_hand(alpha: float) -> None:
    """Over all batches it is the mean over own examples, and beta and alpha times those over kept
    ones.
    """
    spec, draw = spec_for("logistic", (1, 4, 4), 5, {}), torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 1, 4, 4, generator=draw), torch.tensor([3, 4, 3, 3, 4, 4, 0, 2, 0])
    params, stored, own = initial(spec, 1), torch.randn(4, 5, generator=draw), 6
    seen = torch.tensor([True, False, True, True, True])
    known = {
        "new": own,
        "outputs": seen,
        "new_factor": 9 / own,
        "kept_factor": 3.0,
        "logits": stored,
        "stored_outputs": seen,
    }
    carry = TrainingStart(
        params, constants=known, head=torch.tensor([False, False, False, True, True])
    )
    networks = Networks(spec, module(spec), lambda *_: None, "fp32", "fp32", torch.device("cpu"))
    index = torch.arange(9)
    work = Rehearse(Replay(alpha=alpha, beta=0.7), 2)
    terms = work.terms(
        BatchStep(networks, carry, params, StepInputs(x, y, index, index, None, 0)), carry
    )
    got = sum(float(v.detach().mean()) for v in terms.values())

    z = (
        x.flatten(1).double().numpy() @ params["head.weight"].double().numpy().T
        + params["head.bias"].double().numpy()
    )
    of_own = -log_softmax(z[:6, 3:], axis=1)[np.arange(6), y[:6].numpy() - 3]
    columns = np.array([0, 2, 3, 4])
    of_kept = -log_softmax(z[6:, columns], axis=1)[np.arange(3), [0, 1, 0]]
    apart = ((z[6:, columns] - stored[:3].numpy()[:, columns]) ** 2).mean(1)
    want = of_own.mean() + 0.7 * of_kept.mean() + alpha * apart.mean()
    assert got == pytest.approx(want, rel=1e-5)


def test_stored_logits_are_those_of_the_model_at_the_tasks_end() -> None:
    stream = {**STREAM, "tasks": 2}
    method = {"name": "replay", "size": 300, "alpha": 0.5}
    ready, _, memory = gone_through(method, rounds=2, stream=stream)
    _, first, _ = gone_through(method, rounds=2, stream=stream, until=1)
    view = ready.sites.view(0, ready.settings.schedule(1, ready.world)[-1])
    assert torch.equal(memory.load(0).tensor("logits"), view.logits(first.params))


def test_class_means_are_those_of_all_clients_data_and_memories() -> None:
    ready, state, memory = gone_through({"name": "replay", "size": 9, "nearest_mean": True})
    stage = ready.settings.schedule(3, ready.world)[-1]
    sums, counts = np.zeros((5, 8)), np.zeros(5)
    for client in range(6):
        view, kept = ready.sites.view(client, stage), memory.load(client)
        for some in (view.data, Examples(kept.tensor("values"), kept.tensor("labels"))):
            z = view.passes.features(state.params, some).double().numpy()
            for unit, c in zip(
                z / np.linalg.norm(z, axis=1, keepdims=True), some.labels.tolist(), strict=True
            ):
                sums[c] += unit
                counts[c] += 1
    want = sums / counts[:, None]
    assert (counts > 0).all()
    np.testing.assert_allclose(state.extra.tensor("means").numpy(), want, atol=1e-6)
    x = ready.sites.inputs.plain(ready.dataset.test.values)
    z = normalize(view.passes.features(state.params, ready.dataset.test), dim=1).double().numpy()
    mean = want / np.linalg.norm(want, axis=1, keepdims=True)
    nearest = ((z[:, None] - mean) ** 2).sum(2).argmin(1)
    said = ready.settings.method.predictors(state, ready.world)["nearest_mean"](x).argmax(1)
    assert said.tolist() == nearest.tolist()


def test_a_run_whose_answers_are_the_means_has_their_matrix(tmp_path: Path) -> None:
    config = {"name": "replay", "size": 0, "answers": "nearest_mean"}
    run(toys.toy(config, partition={"kind": "iid"}, stream=STREAM), tmp_path / "r", toys.blobs())
    events = read_journal(tmp_path / "r/journal.jsonl")
    first, ready, state = events[0], *gone_through(config)[:2]
    end = [e for e in events if e["event"] == "task"][-1]
    predict, test = (
        ready.settings.method.predictors(state, ready.world)["nearest_mean"],
        ready.dataset.test,
    )
    right = predict(ready.sites.inputs.plain(test.values)).argmax(1) == test.labels
    want = [
        float(right[torch.isin(test.labels, torch.tensor(own))].double().mean())
        for own in first["stream"]["classes"]
    ]
    assert end["row"] == pytest.approx(want)
    assert next(iter(ready.settings.method.predictors(state, ready.world))) == "nearest_mean"


def test_a_class_without_a_mean_is_no_answer() -> None:
    ready, state, _ = gone_through({"name": "replay", "nearest_mean": True}, rounds=3)
    some = state.next(known=torch.tensor([True, False, True, False, False]))
    said = ready.settings.method.predictors(some, ready.world)["nearest_mean"]
    assert set(said(ready.sites.inputs.plain(ready.dataset.test.values)).argmax(1).tolist()) <= {
        0,
        2,
    }


def test_the_journal_says_how_many_are_kept_and_who_has_nothing_to_do(tmp_path: Path) -> None:
    run(
        toys.toy({"name": "replay", "size": 7}, partition={"kind": "iid"}, stream=STREAM),
        tmp_path / "r",
        toys.blobs(),
    )
    ends = [
        e
        for e in read_journal(tmp_path / "r/journal.jsonl")
        if e["event"] == "client" and e["name"] == "remember"
    ]
    assert [e["kept"] for e in ends if e["round"] < 3] == [7] * 12
    assert all(e["idle"] for e in ends if e["round"] == 3)


def test_in_a_chain_clients_remember_too() -> None:
    chain = {"kind": "sequential", "clients": 6, "sampled": 3}
    _, _, memory = gone_through({"name": "replay", "size": 5}, topology=chain)
    assert [len(memory.load(c).tensor("labels")) for c in range(6)] == [5] * 6


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(IncompatibleMethod, match=r"set validation = 0.1 in \[plan.remember\]"):
        prepare(
            resolve(toys.toy("replay", stream=STREAM, plan={"train": {"validation": 0.1}})),
            toys.blobs(),
        )
    with pytest.raises(IncompatibleMethod, match=r"set topology.task_end = 'remember'"):
        prepare(
            resolve(toys.toy("replay", topology={"clients": 6, "task_end": ""}, stream=STREAM)),
            toys.blobs(),
        )
