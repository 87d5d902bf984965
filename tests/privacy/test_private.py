"""Private training: its steps against the algorithm written out, its draws, its costs, and what is
refused.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import toys
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.capabilities import Permit
from fedstill.core.errors import BudgetSpent, ConfigError, IncompatibleMethod, Refused
from fedstill.core.keys import generator, seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import NOTHING, Payload, Plan, Reply, Stage, TrainingStart
from fedstill.core.trees import same_bits
from fedstill.data.inputs import augment
from fedstill.engines.clients import TrainingSetup
from fedstill.engines.loop import train
from fedstill.flower.messages import Request
from fedstill.privacy.extensions import TrainingBudget, WithinBudget
from fedstill.privacy.leakage import epsilon_at_least
from fedstill.privacy.noise import Privacy, rows_of
from fedstill.privacy.private_training import (
    Private,
    noised_mean,
    poisson_batches,
    rate_and_steps,
    training_epsilon,
)
from fedstill.privacy.site_guards import NoiseNotes, TrainingGuard
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from flowers import needs_flower
from loops import record
from run_bits import assert_same_bits, bits, stopped

pytestmark = pytest.mark.usefixtures("with_threads")

pytest.importorskip("opacus")

ON = {"gradient_clip": 0.5, "gradient_noise": 1.0}


def private(method: object = "fedavg", *, privacy: dict[str, object] = ON, **changes: object):
    plan = {"epochs": 2, "batch": 10, "lr": 0.2, **changes.pop("plan", {})}
    return toys.toy(
        method,
        measure=(),
        **{"rounds": 2, "topology": {"clients": 4}, "privacy": privacy, "plan": plan, **changes},
    )


@pytest.mark.parametrize("noise", [1.0, 20.0, 1000.0])
@pytest.mark.parametrize("delta", [1e-5, 0.1, 0.9])
@pytest.mark.parametrize("steps", [1, 100])
def test_epsilon_is_never_negative(noise: float, delta: float, steps: int) -> None:
    for rate in (1e-4, 0.1, 1.0):
        epsilon = training_epsilon(noise, {rate: steps}, delta)
        assert epsilon is not None
        assert epsilon >= 0


@pytest.mark.parametrize("class_weights", ["none", (0.1, 1.0, 0.0, 3.0, 0.5)])
def test_a_step_is_that_of_the_algorithm_written_out(class_weights: Any) -> None:
    """Poisson draws, one weighted gradient an example, clipped, summed, noised, over the batch that
    is expected.
    """
    weights = [1.0] * toys.CLASSES if class_weights == "none" else class_weights
    asked = private(
        model={"name": "mlp", "hidden": (6,)},
        rounds=1,
        plan={"momentum": 0.9, "weight_decay": 1e-3, "class_weights": class_weights},
    )
    ready = prepare(resolve(asked), toys.blobs())
    settings, world = ready.settings, ready.world
    stage = settings.schedule(1, world)[0]
    start = settings.method.initial_state(world).params
    (got, *_) = ready.engine().run(
        settings.method.work(stage), stage, {0: Payload(params=start)}, world.seed
    )

    data = ready.sites.view(0, stage).data
    x, y = ready.sites.inputs.plain(data.values), data.labels
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, toys.CLASSES))
    for p, value in zip(net.parameters(), start.values(), strict=True):
        p.data.copy_(value)
    moving = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    order = generator(seed_for(world.seed, 1, 0, 0, "order"))
    noise = generator(seed_for(world.seed, 1, 0, 0, "noise"))
    rate = 10 / len(y)
    for _ in range(2 * math.ceil(len(y) / 10)):
        taken = (
            (torch.rand(len(y), generator=order, dtype=torch.float64) < rate).nonzero().flatten()
        )
        sums = [torch.zeros(p.shape, dtype=torch.float64) for p in net.parameters()]
        for i in taken:
            net.zero_grad()
            loss = nn.functional.cross_entropy(net(x[i : i + 1]), y[i : i + 1])
            (weights[int(y[i])] * loss).backward()
            each = [p.grad.double() for p in net.parameters()]
            size = math.sqrt(sum(float((g**2).sum()) for g in each))
            sums = [s + g * min(1.0, 0.5 / max(size, 0.5)) for s, g in zip(sums, each, strict=True)]
        for p, s in zip(net.parameters(), sums, strict=True):
            drawn = torch.randn(p.shape, generator=noise, dtype=torch.float64)
            p.grad = ((s + 0.5 * drawn) / 10).float()
        moving.step()
    for p, value in zip(net.parameters(), got.content.params.values(), strict=True):
        torch.testing.assert_close(value, p.data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("secret", [True, False])
def test_only_a_real_site_augments_with_numbers_that_nobody_can_repeat(secret: bool) -> None:
    ready = prepare(
        resolve(private(data={"augment": ("flip", "crop")}, plan={"batch": 1000})), toys.blobs()
    )
    stage = ready.settings.schedule(1, ready.world)[0]
    view = ready.sites.view(0, stage)
    start = TrainingStart(ready.world.initial(0))
    setup = TrainingSetup(
        plan=ready.world.plans["train"],
        stage=stage,
        inputs=ready.sites.inputs,
        seed=7,
        rule=Private(clip=0.5, noise=0.0, secret=secret),
    )
    work = ready.settings.method.work(stage)
    first, second = (train(work, start, view, setup).params for _ in range(2))
    assert same_bits(first, second) != secret


def test_a_step_without_examples_can_be_augmented() -> None:
    """Private training draws each example by itself, and so now and then none."""
    images = torch.zeros(0, 1, 8, 8, dtype=torch.uint8)
    for crop in ("crop", "crop_reflect"):
        batch = augment(images, ("rotation", "flip", crop, "cutout"), (0.5,), (0.5,), generator(0))
        assert batch.shape == (0, 1, 8, 8)


@pytest.mark.parametrize("setting", ["balanced", "balanced_overall"])
def test_class_weights_from_label_counts_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"class_weights"):
        prepare(resolve(private(plan={"class_weights": setting})), toys.blobs())


def test_without_noise_and_with_a_wide_clip_a_full_batch_is_plain_training() -> None:
    wide = {"gradient_clip": 1e6, "gradient_noise": 0.0}
    each = []
    for privacy in (wide, {}):
        ready = prepare(
            resolve(private(privacy=privacy, rounds=1, plan={"batch": 1000})), toys.blobs()
        )
        stage = ready.settings.schedule(1, ready.world)[0]
        start = ready.settings.method.initial_state(ready.world).params
        work = ready.settings.method.work(stage)
        each.append(
            ready.engine()
            .run(work, stage, {0: Payload(params=start)}, ready.world.seed)[0]
            .content.params
        )
    for k, value in each[1].items():
        torch.testing.assert_close(each[0][k], value, rtol=1e-4, atol=1e-6)


def test_poisson_batches_take_each_example_by_itself() -> None:
    plan = Plan(epochs=200, batch=20)
    epochs = list(poisson_batches(50, plan, generator(1), torch.device("cpu")))
    assert [len(e) for e in epochs] == [3] * 200
    sizes = np.array([len(b) for e in epochs for b in e])
    assert sizes.mean() == pytest.approx(20, abs=1)
    assert sizes.var() == pytest.approx(50 * 0.4 * 0.6, rel=0.3), "binomial, not fixed"
    assert list(poisson_batches(0, plan, generator(1), torch.device("cpu"))) == []
    assert rate_and_steps(50, Plan(epochs=0, steps=7, batch=20)) == (0.4, 7)
    assert [
        len(e)
        for e in poisson_batches(50, Plan(steps=7, batch=20), generator(1), torch.device("cpu"))
    ] == [
        3,
        3,
        1,
    ]
    secret = [
        next(poisson_batches(50, plan, generator(1), torch.device("cpu"), secret=True))
        for _ in range(2)
    ]
    assert any(not torch.equal(a, b) for a, b in zip(*secret, strict=True)), (
        "on a real site no seed repeats them"
    )


def test_secret_batches_are_drawn_by_no_generator_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose seeds have 32 bits: who tries them all would know who was in which batch."""
    monkeypatch.setattr(torch, "rand", None)
    monkeypatch.setattr(torch, "Generator", None)
    epochs = poisson_batches(50, Plan(epochs=200, batch=20), None, torch.device("cpu"), secret=True)  # type: ignore[arg-type]
    batches = [b for e in epochs for b in e]
    sizes = np.array([len(b) for b in batches])
    assert sizes.mean() == pytest.approx(20, abs=1)
    assert sizes.var() == pytest.approx(50 * 0.4 * 0.6, rel=0.3)
    often = np.bincount(torch.cat(batches).numpy(), minlength=50) / len(batches)
    assert often.min() > 0.3
    assert often.max() < 0.5


def budget(**privacy: float) -> TrainingBudget:
    """A real site's, at the server."""
    made = Privacy(gradient_clip=1.0, gradient_noise=1.0, delta=1e-5, **privacy)
    world: Any = SimpleNamespace(plans={"train": Plan(epochs=2, batch=50)}, clients=1)
    return TrainingBudget(made, world, {})


def stages() -> Iterator[Stage]:
    return (Stage(r, 0, "train", (0,)) for r in itertools.count(1))


@pytest.mark.parametrize("epsilon", [3.0, 5.0, 8.0])
def test_of_a_real_site_the_server_stops_before_the_stage_that_costs_too_much(
    epsilon: float,
) -> None:
    site, simulated = (
        budget(epsilon=epsilon),
        replace(budget(epsilon=epsilon), examples={("train", 0): 1000}),
    )
    last = []
    for one in (site, simulated):
        for stage in stages():
            if one.over(stage, 0):
                last.append(stage.round)
                break
            record(one, stage, [{"name": "train", "client": 0, "examples": 1000}], {})
            assert (one.spent(0) or 0) <= epsilon
    assert last[0] == last[1] > 1


class Answering:
    """An engine whose clients answer at once; it notes who was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def run(
        self, work: Any, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        self.asked = sorted(payloads)
        return [Reply(client, NOTHING, 10, {}, stage.round, stage.index) for client in payloads]

    def commit(self, stage: Stage, clients: Any) -> None: ...


def test_a_site_whose_budget_is_spent_is_left_out_and_the_others_go_on() -> None:
    """A site that claims one example takes it in every step, and so spends all at once: of its
    own.
    """
    spending, engine = replace(budget(epsilon=8.0), on_sites=True), Answering()
    first, second = (Stage(r, 0, "train", (0, 1)) for r in (1, 2))
    within, payloads = WithinBudget(engine, spending), {0: NOTHING, 1: NOTHING}
    within.run(None, first, payloads, 0)  # type: ignore[arg-type]
    said = [
        {"name": "train", "client": 0, "examples": 1000},
        {"name": "train", "client": 1, "examples": 1},
    ]
    record(spending, first, said, {})
    replies = {reply.client: reply.failure for reply in within.run(None, second, payloads, 0)}  # type: ignore[arg-type]
    assert engine.asked == [0]
    assert replies[0] == ""
    assert re.match(r"client 1 has spent epsilon .* privacy.epsilon = 8", replies[1])
    before = spending.spent(1)
    again: list[dict[str, Any]] = [
        {"name": "train", "client": 0, "examples": 1000},
        {"name": "train", "client": 1},
    ]
    record(spending, second, again, {})
    assert spending.spent(1) == before, "it was asked nothing"
    assert "private_steps" in again[0]
    with pytest.raises(BudgetSpent, match="client 1 has spent"):
        WithinBudget(engine, replace(spending, on_sites=False)).run(None, second, payloads, 0)  # type: ignore[arg-type]
    with pytest.raises(BudgetSpent, match="client 1 has spent"):
        within.run(None, second, {1: NOTHING}, 0)  # type: ignore[arg-type]


def test_rows_without_numbers_cost_nothing() -> None:
    assert rows_of(Payload(logits=torch.empty(10**15, 0))) == 0
    assert rows_of(Payload(logits=torch.zeros(3, 2))) == 3


def test_a_site_that_times_out_once_counts_as_what_it_said_before_also_after_a_resume() -> None:
    site, events = budget(), []
    for stage in itertools.islice(stages(), 3):
        came = [{"name": "train", "client": 0, "examples": 10_000}]
        record(site, stage, came, {})
        events += came
    again = budget()
    for event in events:
        again.on_event(event)
    for one in (site, again):
        record(
            one,
            Stage(4, 0, "train", (0,)),
            [{"name": "train", "client": 0, "refused": "failed: did not reply"}],
            {},
        )
    assert site.steps == again.steps == {0: Counter({0.005: 4 * 400})}
    unknown = budget()
    record(
        unknown,
        Stage(1, 0, "train", (0,)),
        [{"name": "train", "client": 0, "refused": "failed: did not reply"}],
        {},
    )
    assert unknown.steps == {}
    assert unknown.spent(0) is None
    assert unknown.over(Stage(2, 0, "train", (0,)), 0) == ""
    came = [{"name": "train", "client": 0, "examples": 10_000}]
    record(unknown, Stage(2, 0, "train", (0,)), came, {})
    assert unknown.steps == {0: Counter({0.005: 2 * 400})}
    assert unknown.spent(0) is not None


def test_what_a_site_said_in_one_stage_is_not_taken_for_another() -> None:
    site = budget(epsilon=5.0)
    record(
        site, Stage(1, 0, "train", (0,)), [{"name": "train", "client": 0, "examples": 10_000}], {}
    )
    world: Any = SimpleNamespace(
        plans=dict.fromkeys(("train", "fit"), Plan(epochs=2, batch=50)), clients=1
    )
    site = replace(site, world=world)
    assert site.visit(Stage(2, 0, "train", (0,)), 0, None) == (0.005, 400)
    assert site.visit(Stage(2, 1, "fit", (0,)), 0, None) == (1.0, None)


def test_at_a_site_each_step_counts_with_the_rate_that_it_had(tmp_path: Path) -> None:
    """Data that grow make later steps cheaper, and not those that were trained before."""
    n, plan, true = [200], Plan(epochs=2, batch=100), Counter[float]()
    private = Privacy(gradient_clip=1.0, gradient_noise=1.0, epsilon=11.0, delta=1e-5)
    settings = SimpleNamespace(
        plans={"train": plan}, package_table=lambda kind: private, on_sites=True
    )
    ready: Any = SimpleNamespace(
        settings=settings, sites=SimpleNamespace(training_size=lambda client, stage: n[0])
    )
    notes = NoiseNotes(tmp_path)
    guard = TrainingGuard(ready, notes)

    def trained(stage: Stage) -> None:
        n[0] = 200 if stage.round < 3 else 20_000
        request = Request("", "", "", "run1", 0, stage)
        guard.admit(request, ClientWork())
        guard.leaving(request, Reply(0, Payload(), n[0]))
        rate, steps = rate_and_steps(n[0], plan)
        true[rate] += steps
        assert notes.steps(0) == true
        assert (training_epsilon(1.0, true, 1e-5) or 0) <= 11.0

    with pytest.raises(Refused, match="this site"):
        all(trained(stage) is None for stage in stages())
    (tmp_path / "noised").write_text("0000001-0000000:7\n0000002-0000000\n")
    assert notes.steps(4) == Counter({1.0: 11}), "noted without a rate: the worst"


@pytest.mark.parametrize("cached", [1, 7, 40, 10**9])
def test_large_gradients_in_parts_give_the_sum_of_the_clipped(
    monkeypatch: pytest.MonkeyPatch, cached: int
) -> None:
    monkeypatch.setattr("fedstill.privacy.private_training.CACHED", cached)
    grads = {
        "w": torch.randn(5, 3, 4, generator=generator(1)),
        "b": torch.randn(5, 3, generator=generator(2)),
    }
    grads["s"] = torch.randn(5, generator=generator(3))
    grads["w"][2, 1, 1], grads["b"][4, 0] = math.nan, math.inf
    like = {k: torch.zeros(v.shape[1:], dtype=torch.float64) for k, v in grads.items()}
    mean = noised_mean(grads, like, Private(0.5, 0.0), 4.0, generator(0))
    wanted = {k: torch.zeros_like(v) for k, v in like.items()}
    for i in (0, 1, 3):
        each = {k: v[i].double() for k, v in grads.items()}
        size = math.sqrt(sum(float((g**2).sum()) for g in each.values()))
        wanted = {k: wanted[k] + each[k] * min(1.0, 0.5 / size) / 4 for k in like}
    for k, value in wanted.items():
        assert torch.allclose(mean[k], value, rtol=1e-14, atol=1e-16)


def test_no_example_moves_a_step_by_more_than_its_clip() -> None:
    grads = {"w": torch.tensor([[3.0, 4.0], [0.03, 0.04], [math.nan, 1.0], [math.inf, 0.0]])}
    still = noised_mean(grads, {"w": torch.zeros(2)}, Private(0.5, 0.0), 1.0, generator(0))["w"]
    torch.testing.assert_close(still, torch.tensor([0.3 + 0.03, 0.4 + 0.04]))
    nothing = noised_mean({}, {"w": torch.zeros(1000)}, Private(0.5, 2.0), 4.0, generator(0))["w"]
    assert float(nothing.std()) == pytest.approx(0.5 * 2.0 / 4.0, rel=0.1), (
        "a step without examples is noise"
    )


PERMITTED = [
    n
    for n in registry.names("method")
    if not n.startswith("toy_")
    and Permit.PRIVATE_TRAINING in registry.lookup("method", n).build().permits
]


@pytest.mark.parametrize("name", PERMITTED)
def test_every_method_that_permits_it_trains_and_reads_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Label counts, shares, logits and features of the site's own data are closed while it
    works.
    """
    from fedstill.core.records import View

    changes = toys.suited(name)
    topology = {**changes.pop("topology", {}), "clients": 4}
    ready = prepare(resolve(private(name, **{**changes, "topology": topology})), toys.blobs())
    engine, method, world = ready.engine(), ready.settings.method, ready.world
    view = engine.sites.view

    def closed(client: int, stage):
        seen = view(client, stage)
        monkeypatch.setattr(
            View,
            "proportions",
            property(lambda _: pytest.fail("label shares are read")),
            raising=True,
        )
        for reads in ("logits", "features", "gradients"):
            monkeypatch.setattr(
                View, reads, lambda *_, **__: pytest.fail("a pass over its data"), raising=True
            )
        object.__setattr__(seen, "counts", None)
        return seen

    monkeypatch.setattr(
        engine.sites.__class__, "view", lambda _, client, stage: closed(client, stage)
    )
    stage = next(s for s in ready.settings.schedule(1, world) if len(s.clients) > 1)
    state = method.begin_round(
        method.initial_state(world), ready.settings.schedule(1, world), world
    )
    payloads = {c: method.payload_for_client(state, c, stage, world) for c in stage.clients}
    replies = engine.run(method.work(stage), stage, payloads, world.seed)
    assert [r.failure for r in replies] == [""] * len(replies)
    assert set(replies[0].content) <= {"params"}


@pytest.mark.parametrize(
    "name", ["fedlc", "fedrs", "fedsam", "fedadkd", "scaffold", "ccvr", "fedcurv", "dsfl", "feddbe"]
)
def test_others_refuse_at_the_start(name: str) -> None:
    with pytest.raises(
        (IncompatibleMethod, ConfigError), match=f"privacy.gradient_clip with method {name}"
    ):
        prepare(
            resolve(private(name, **{"topology": {"clients": 4}, **toys.suited(name)})),
            toys.blobs(),
        )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"plan": {"validation": 0.2, "patience": 2}}, "plan.patience or plan.keep is set"),
        (
            {"privacy": {"gradient_noise": 1.0}},
            "privacy.gradient_noise needs privacy.gradient_clip",
        ),
        (
            {"privacy": {**ON, "gradient_noise": 0.0, "epsilon": 1.0}},
            "needs privacy.gradient_noise",
        ),
        ({"privacy": {**ON, "clip": 1.0}}, "set one of them"),
        ({"engine": "vectorised"}, "set engine = 'pooled'"),
        ({"plan": {"validation": 0.2}}, "plan.train.validation"),
        ({"topology": {"clients": 4, "last": "ridge"}}, "stage 'ridge'"),
    ],
)
def test_what_would_tell_more_is_one_clear_line(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        prepare(resolve(private(**changes)), toys.blobs())


def test_hardly_any_noise_costs_much_and_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    epsilon = training_epsilon(0.1, {0.1: 400}, 1e-5)
    assert epsilon is not None
    assert epsilon > 1e4
    assert [str(w.message) for w in recwarn if "order" in str(w.message)] == []


def test_epsilon_is_that_of_other_accountants() -> None:
    """At sampling of all it is the Gaussian mechanism, whose epsilon is exact; Rényi orders give a
    bound above it.
    """
    from opacus.accountants import PRVAccountant

    from fedstill.privacy.noise import gaussian_epsilon

    for noise, steps in ((2.0, 1), (10.0, 40), (50.0, 10)):
        exact = gaussian_epsilon(noise / math.sqrt(steps), 1e-5)
        bound = training_epsilon(noise, {1.0: steps}, 1e-5)
        assert exact <= bound <= 1.3 * exact
    for noise, rate, steps in ((1.0, 0.1, 100), (1.5, 0.3, 40), (0.8, 0.02, 500)):
        other = PRVAccountant()
        other.history = [(noise, rate, steps)]
        tight, bound = other.get_epsilon(1e-5), training_epsilon(noise, {rate: steps}, 1e-5)
        assert tight <= bound <= 1.35 * tight
    assert training_epsilon(1.0, {}, 1e-5) == 0.0
    assert training_epsilon(0.0, {0.5: 1}, 1e-5) is None
    parts = training_epsilon(1.0, {0.1: 60, 0.3: 5}, 1e-5)
    assert parts > training_epsilon(1.0, {0.1: 60}, 1e-5)


def test_a_canary_shows_no_more_than_is_claimed() -> None:
    """One step on half of a data set, with and without an example whose gradient is as large as it
    may be.
    """
    how, steps = Private(1.0, 1.0), 1000
    rest, canary = torch.zeros(3, 4), torch.tensor([[50.0, 0, 0, 0]])
    seen = [
        np.array(
            [
                float(
                    noised_mean({"w": grads}, {"w": torch.zeros(4)}, how, 1.0, generator(s))["w"][0]
                )
                for s in seeds
            ]
        )
        for grads, seeds in (
            (torch.cat([rest, canary]), range(steps)),
            (rest, range(steps, 2 * steps)),
        )
    ]
    claim = training_epsilon(1.0, {1.0: 1}, 1e-3)
    assert claim * 0.2 < epsilon_at_least(*seen, 1e-3) < claim


def test_the_budget_is_kept_and_resumed(tmp_path: Path) -> None:
    whole = run(private(), tmp_path / "whole", data=toys.blobs())
    events = read_journal(tmp_path / "whole" / "journal.jsonl")
    after = [e["privacy"]["epsilon"] for e in events if e["event"] == "round"]
    assert whole.summary["privacy"] == {
        "epsilon": after[1],
        "delta": 1e-5,
        "covers": "training, by example",
    }
    for client, n in enumerate(
        len(p) for p in prepare(resolve(private()), toys.blobs()).sites.split.tensors()
    ):
        steps = math.ceil(n / 10) * 2
        assert [row[client] for row in after] == [
            training_epsilon(1.0, {min(1, 10 / n): k * steps}, 1e-5) for k in (1, 2)
        ]
    resume(stopped(private(), tmp_path / "cut", stages=1), data=toys.blobs())
    assert_same_bits(bits(tmp_path / "cut"), bits(tmp_path / "whole"))
    limit = (max(after[0]) + max(after[1])) / 2
    asked = private(privacy={**ON, "epsilon": limit})
    with pytest.raises(BudgetSpent, match=r"round 2, stage 'train': client \d has spent"):
        run(asked, tmp_path / "short", data=toys.blobs())
    with pytest.raises(BudgetSpent, match="round 2"):
        resume(tmp_path / "short", data=toys.blobs())


@needs_flower
def test_over_flower_it_has_the_same_bits(tmp_path: Path) -> None:
    run(private("fedntd"), tmp_path / "here", data=toys.blobs())
    run(private("fedntd", engine="flower"), tmp_path / "there", data=toys.blobs())
    here, there = (
        [
            e["class_accuracy"]
            for e in read_journal(tmp_path / n / "journal.jsonl")
            if e["event"] == "round"
        ]
        for n in ("here", "there")
    )
    assert here == there
