"""Private training: its steps compared with a plain implementation, its random draws, its cost, and
the configs that are refused.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import toys
from fedstill.cli import call
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.capabilities import Permit
from fedstill.core.errors import BudgetSpent, ConfigError, IncompatibleMethod, Refused
from fedstill.core.keys import generator, seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NOTHING,
    Payload,
    Plan,
    Reply,
    Stage,
    Tensors,
    TrainingStart,
    View,
)
from fedstill.core.registry import register
from fedstill.core.trees import same_bits
from fedstill.data.inputs import augment
from fedstill.engines.clients import TrainingSetup
from fedstill.engines.loop import train
from fedstill.flower.messages import Request
from fedstill.methods.fedavg import FedAvg
from fedstill.privacy.extensions import TrainingBudget, WithinBudget
from fedstill.privacy.leakage import epsilon_at_least
from fedstill.privacy.noise import Privacy, gaussian_epsilon, rows_of
from fedstill.privacy.private_training import (
    Private,
    noised_mean,
    poisson_batches,
    rate_and_steps,
    training_epsilon,
)
from fedstill.privacy.site_guards import NoiseNotes, TrainingGuard
from fedstill.running.journal import read_journal
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import resume, run
from flowers import needs_flower
from loops import record
from run_bits import assert_same_bits, bits, stopped

pytestmark = pytest.mark.usefixtures("with_threads")

pytest.importorskip("opacus")

ON = {"gradient_clip": 0.5, "gradient_noise": 1.0}


def private(
    method: object = "fedavg", *, privacy: dict[str, object] = ON, **changes: Any
) -> Experiment:
    """Two rounds of private training by four clients."""
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


def trained_parameters(ready: Prepared) -> Mapping[str, torch.Tensor]:
    """The parameters that client 0 sends in the first stage of round 1."""
    stage = ready.settings.schedule(1, ready.world)[0]
    method = ready.settings.method
    start = method.initial_state(ready.world).params
    payloads = {0: Payload(params=start)}
    reply, *_ = ready.engine().run(method.work(stage), stage, payloads, ready.world.seed)
    return reply.content.params


CLIP = 0.5
NOISE = 1.0
BATCH = 10


@pytest.mark.parametrize(
    ("class_weights", "weights"),
    [("none", (1.0,) * toys.CLASSES), ((0.1, 1.0, 0.0, 3.0, 0.5), (0.1, 1.0, 0.0, 3.0, 0.5))],
)
def test_a_step_is_that_of_a_plain_implementation(
    class_weights: object, weights: tuple[float, ...]
) -> None:
    """A step draws each example with the same probability, clips the weighted gradient of each,
    adds noise to their sum, and divides by the expected number of examples.
    """
    plan = {"momentum": 0.9, "weight_decay": 1e-3, "class_weights": class_weights}
    experiment = private(model={"name": "mlp", "hidden": (6,)}, rounds=1, plan=plan)
    ready = prepare(resolve(experiment), toys.blobs())
    seed = ready.world.seed
    data = ready.sites.view(0, ready.settings.schedule(1, ready.world)[0]).data
    inputs = ready.sites.inputs.plain(data.values)

    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, toys.CLASSES))
    start = ready.settings.method.initial_state(ready.world).params
    for parameter, value in zip(net.parameters(), start.values(), strict=True):
        parameter.data.copy_(value)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    order = generator(seed_for(seed, 1, 0, 0, "order"))
    noise = generator(seed_for(seed, 1, 0, 0, "noise"))
    examples = len(data.labels)
    epochs = 2
    for _ in range(epochs * math.ceil(examples / BATCH)):
        uniform = torch.rand(examples, generator=order, dtype=torch.float64)
        drawn = (uniform < BATCH / examples).nonzero().flatten()
        sums = [torch.zeros(p.shape, dtype=torch.float64) for p in net.parameters()]
        for i in drawn:
            net.zero_grad()
            label = data.labels[i]
            loss = nn.functional.cross_entropy(net(inputs[i : i + 1]), label[None])
            (weights[int(label)] * loss).backward()
            gradients = [p.grad.double() for p in net.parameters()]
            norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
            scale = CLIP / max(norm, CLIP)
            for total, gradient in zip(sums, gradients, strict=True):
                total += scale * gradient
        for parameter, total in zip(net.parameters(), sums, strict=True):
            normal = torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
            parameter.grad = ((total + CLIP * NOISE * normal) / BATCH).float()
        optimiser.step()

    trained = trained_parameters(ready)
    for parameter, value in zip(net.parameters(), trained.values(), strict=True):
        torch.testing.assert_close(value, parameter.data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("secret", [True, False])
def test_only_a_real_site_augments_with_numbers_that_no_seed_repeats(secret: bool) -> None:
    augmented = private(data={"augment": ("flip", "crop")}, plan={"batch": 1000})
    ready = prepare(resolve(augmented), toys.blobs())
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
    """Private training draws each example independently, and so sometimes none."""
    images = torch.zeros(0, 1, 8, 8, dtype=torch.uint8)
    for crop in ("crop", "crop_reflect"):
        batch = augment(images, ("rotation", "flip", crop, "cutout"), (0.5,), (0.5,), generator(0))
        assert batch.shape == (0, 1, 8, 8)


@pytest.mark.parametrize("setting", ["balanced", "balanced_overall"])
def test_class_weights_from_label_counts_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"class_weights"):
        prepare(resolve(private(plan={"class_weights": setting})), toys.blobs())


def test_without_noise_and_with_a_wide_clip_a_full_batch_is_plain_training() -> None:
    full_batch = {"batch": 1000}
    wide = {"gradient_clip": 1e6, "gradient_noise": 0.0}
    plain = prepare(resolve(private(privacy={}, rounds=1, plan=full_batch)), toys.blobs())
    clipped = prepare(resolve(private(privacy=wide, rounds=1, plan=full_batch)), toys.blobs())

    parameters = trained_parameters(clipped)
    for name, expected in trained_parameters(plain).items():
        torch.testing.assert_close(parameters[name], expected, rtol=1e-4, atol=1e-6)


CPU = torch.device("cpu")


def assert_binomial(batches: list[torch.Tensor], examples: int, rate: float) -> None:
    """Assert that the sizes of batches are binomial, and not fixed."""
    sizes = np.array([len(batch) for batch in batches])
    assert sizes.mean() == pytest.approx(examples * rate, abs=1)
    assert sizes.var() == pytest.approx(examples * rate * (1 - rate), rel=0.3)


def test_poisson_batches_have_each_example_independently() -> None:
    plan = Plan(epochs=200, batch=20)
    epochs = list(poisson_batches(50, plan, generator(1), CPU))
    assert [len(epoch) for epoch in epochs] == [3] * 200
    assert_binomial(list(itertools.chain(*epochs)), examples=50, rate=0.4)
    assert list(poisson_batches(0, plan, generator(1), CPU)) == []


def test_poisson_batches_end_after_the_steps_of_a_plan() -> None:
    plan = Plan(epochs=0, steps=7, batch=20)
    assert rate_and_steps(50, plan) == (0.4, 7)
    epochs = poisson_batches(50, Plan(steps=7, batch=20), generator(1), CPU)
    assert [len(epoch) for epoch in epochs] == [3, 3, 1]


def test_no_seed_repeats_the_batches_of_a_real_site() -> None:
    plan = Plan(epochs=200, batch=20)
    first = next(poisson_batches(50, plan, generator(1), CPU, secret=True))
    second = next(poisson_batches(50, plan, generator(1), CPU, secret=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_secret_batches_are_drawn_by_no_generator_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seeds have 32 bits: an attacker who tries them all would know the examples of each
    batch.
    """
    monkeypatch.setattr(torch, "rand", None)
    monkeypatch.setattr(torch, "Generator", None)
    plan = Plan(epochs=200, batch=20)
    epochs = poisson_batches(50, plan, None, CPU, secret=True)  # type: ignore[arg-type]
    batches = list(itertools.chain(*epochs))
    assert_binomial(batches, examples=50, rate=0.4)
    frequencies = np.bincount(torch.cat(batches).numpy(), minlength=50) / len(batches)
    assert frequencies.min() > 0.3
    assert frequencies.max() < 0.5


def budget(**privacy: float) -> TrainingBudget:
    """The budget of a real site, as the server accounts for it."""
    settings = Privacy(gradient_clip=1.0, gradient_noise=1.0, delta=1e-5, **privacy)
    world: Any = SimpleNamespace(plans={"train": Plan(epochs=2, batch=50)}, clients=1)
    return TrainingBudget(settings, world, {})


def stage_of(round: int, name: str = "train", index: int = 0) -> Stage:
    """A stage in which client 0 trains."""
    return Stage(round, index, name, (0,))


def report(client: int, examples: int | None = None, **fields: Any) -> dict[str, Any]:
    """The event of a client that trained on some examples."""
    event = {"name": "train", "client": client, **fields}
    if examples is not None:
        event["examples"] = examples
    return event


TIMED_OUT = "failed: did not reply"


def round_of_the_limit(budget: TrainingBudget, epsilon: float) -> int:
    """The first round that a client of a thousand examples may not train in."""
    for round_index in itertools.count(1):
        stage = stage_of(round_index)
        if budget.over(stage, 0):
            return round_index
        record(budget, stage, [report(0, 1000)], {})
        assert (budget.spent(0) or 0) <= epsilon
    raise AssertionError("unreachable")


@pytest.mark.parametrize("epsilon", [3.0, 5.0, 8.0])
def test_the_server_stops_before_the_stage_that_costs_a_real_site_too_much(epsilon: float) -> None:
    """The server learns a site's number of examples from its reports, and stops in the same round
    as in a simulation.
    """
    site = budget(epsilon=epsilon)
    simulated = replace(budget(epsilon=epsilon), examples={("train", 0): 1000})
    assert round_of_the_limit(site, epsilon) == round_of_the_limit(simulated, epsilon) > 1


class Answering:
    """An engine whose clients reply at once; it records the clients of the last stage."""

    def __init__(self) -> None:
        self.clients: list[int] = []

    def run(
        self, work: Any, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        self.clients = sorted(payloads)
        return [
            Reply(client, NOTHING, examples=10, round=stage.round, stage=stage.index)
            for client in payloads
        ]

    def commit(self, stage: Stage, clients: Any) -> None: ...


def test_a_site_whose_budget_is_spent_is_left_out_and_the_others_continue() -> None:
    """A site that claims to have one example uses it in every step, and so spends its budget in one
    stage.
    """
    account = replace(budget(epsilon=8.0), on_sites=True)
    engine = Answering()
    within = WithinBudget(engine, account)
    payloads = {0: NOTHING, 1: NOTHING}
    work: Any = None
    within.run(work, Stage(1, 0, "train", (0, 1)), payloads, 0)
    record(account, Stage(1, 0, "train", (0, 1)), [report(0, 1000), report(1, 1)], {})

    second = Stage(2, 0, "train", (0, 1))
    failures = {reply.client: reply.failure for reply in within.run(work, second, payloads, 0)}
    assert engine.clients == [0]
    assert failures[0] == ""
    assert re.match(r"client 1 has spent epsilon .* privacy.epsilon = 8", failures[1])

    epsilon = account.spent(1)
    reports = [report(0, 1000), report(1)]
    record(account, second, reports, {})
    assert account.spent(1) == epsilon, "it did not train"
    assert "private_steps" in reports[0]

    simulated = WithinBudget(engine, replace(account, on_sites=False))
    with pytest.raises(BudgetSpent, match="client 1 has spent"):
        simulated.run(work, second, payloads, 0)
    with pytest.raises(BudgetSpent, match="client 1 has spent"):
        within.run(work, second, {1: NOTHING}, 0)


def test_rows_without_numbers_cost_nothing() -> None:
    assert rows_of(Payload(logits=torch.empty(10**15, 0))) == 0
    assert rows_of(Payload(logits=torch.zeros(3, 2))) == 3


def test_a_site_that_times_out_counts_with_the_examples_of_its_last_report() -> None:
    """Also after a resume."""
    site = budget()
    resumed = budget()
    for round_index in (1, 2, 3):
        events = [report(0, 10_000)]
        record(site, stage_of(round_index), events, {})
        resumed.on_event(events[0])

    record(site, stage_of(4), [report(0, refused=TIMED_OUT)], {})
    record(resumed, stage_of(4), [report(0, refused=TIMED_OUT)], {})
    assert site.steps == resumed.steps == {0: Counter({0.005: 4 * 400})}


def test_a_site_that_times_out_without_an_earlier_report_counts_with_those_of_its_next() -> None:
    site = budget()
    record(site, stage_of(1), [report(0, refused=TIMED_OUT)], {})
    assert site.steps == {}
    assert site.spent(0) is None
    assert site.over(stage_of(2), 0) == ""

    record(site, stage_of(2), [report(0, 10_000)], {})
    assert site.steps == {0: Counter({0.005: 2 * 400})}
    assert site.spent(0) is not None


def test_the_report_of_a_stage_does_not_count_for_another_stage() -> None:
    site = budget(epsilon=5.0)
    record(site, stage_of(1), [report(0, 10_000)], {})
    plans = dict.fromkeys(("train", "fit"), Plan(epochs=2, batch=50))
    world: Any = SimpleNamespace(plans=plans, clients=1)
    site = replace(site, world=world)
    assert site.visit(stage_of(2), 0, None) == (0.005, 400)
    assert site.visit(stage_of(2, "fit", 1), 0, None) == (1.0, None)


class GrowingSite:
    """A site whose data grow from 200 to 20,000 examples in round 3."""

    def __init__(self) -> None:
        self.examples = 200

    def training_size(self, client: int, stage: Stage) -> int:
        return self.examples

    def advance_to(self, round: int) -> None:
        if round >= 3:
            self.examples = 20_000


def test_a_site_accounts_for_a_step_with_the_sampling_rate_of_its_round(tmp_path: Path) -> None:
    """More data make later steps cheaper, and not those of earlier rounds."""
    plan = Plan(epochs=2, batch=100)
    privacy = Privacy(gradient_clip=1.0, gradient_noise=1.0, epsilon=11.0, delta=1e-5)
    settings = SimpleNamespace(
        plans={"train": plan}, package_table=lambda kind: privacy, on_sites=True
    )
    site = GrowingSite()
    ready: Any = SimpleNamespace(settings=settings, sites=site)
    notes = NoiseNotes(tmp_path)
    guard = TrainingGuard(ready, notes)
    steps_by_rate = Counter[float]()

    def train_until_refused() -> None:
        for round_index in itertools.count(1):
            site.advance_to(round_index)
            stage = stage_of(round_index)
            request = Request(version="", config="", sha="", run="run1", client=0, stage=stage)
            guard.admit(request, ClientWork())
            guard.leaving(request, Reply(0, Payload(), site.examples))
            rate, steps = rate_and_steps(site.examples, plan)
            steps_by_rate[rate] += steps
            assert notes.steps(0) == steps_by_rate
            assert (training_epsilon(1.0, steps_by_rate, 1e-5) or 0) <= 11.0

    with pytest.raises(Refused, match="this site"):
        train_until_refused()
    assert len(steps_by_rate) == 2

    (tmp_path / "noised").write_text("0000001-0000000:7\n0000002-0000000\n")
    assert notes.steps(4) == Counter({1.0: 11}), "steps without a rate count with the largest"


@pytest.mark.parametrize("cached", [1, 7, 40, 10**9])
def test_large_gradients_that_are_summed_in_parts_are_clipped_by_example(
    monkeypatch: pytest.MonkeyPatch, cached: int
) -> None:
    """Gradients that are not finite do not count."""
    monkeypatch.setattr("fedstill.privacy.private_training.CACHED", cached)
    gradients = {
        "w": torch.randn(5, 3, 4, generator=generator(1)),
        "b": torch.randn(5, 3, generator=generator(2)),
        "s": torch.randn(5, generator=generator(3)),
    }
    gradients["w"][2, 1, 1] = math.nan
    gradients["b"][4, 0] = math.inf
    zeros = {k: torch.zeros(v.shape[1:], dtype=torch.float64) for k, v in gradients.items()}
    mean = noised_mean(gradients, zeros, Private(0.5, 0.0), 4.0, generator(0))

    sums = {name: zero.clone() for name, zero in zeros.items()}
    for example in (0, 1, 3):
        of_example = {name: values[example].double() for name, values in gradients.items()}
        norm = math.sqrt(sum(float((g**2).sum()) for g in of_example.values()))
        scale = min(1.0, 0.5 / norm)
        for name, gradient in of_example.items():
            sums[name] += scale * gradient
    for name, total in sums.items():
        assert torch.allclose(mean[name], total / 4, rtol=1e-14, atol=1e-16)


def test_the_gradient_of_an_example_is_clipped_and_does_not_count_if_it_is_not_finite() -> None:
    rows = [[3.0, 4.0], [0.03, 0.04], [math.nan, 1.0], [math.inf, 0.0]]
    gradients = {"w": torch.tensor(rows)}
    without_noise = Private(0.5, 0.0)
    mean = noised_mean(gradients, {"w": torch.zeros(2)}, without_noise, 1.0, generator(0))
    torch.testing.assert_close(mean["w"], torch.tensor([0.3 + 0.03, 0.4 + 0.04]))


def test_a_step_without_examples_is_noise() -> None:
    zeros = {"w": torch.zeros(1000)}
    mean = noised_mean({}, zeros, Private(0.5, 2.0), 4.0, generator(0))
    assert float(mean["w"].std()) == pytest.approx(0.5 * 2.0 / 4.0, rel=0.1)


def permits_private_training(name: str) -> bool:
    """Whether a method of the package permits private training."""
    permits = registry.lookup("method", name).build().permits
    return not name.startswith("toy_") and Permit.PRIVATE_TRAINING in permits


PERMITTED = [name for name in registry.names("method") if permits_private_training(name)]


@pytest.mark.parametrize("name", PERMITTED)
def test_a_method_that_permits_private_training_reads_the_data_in_no_other_way(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client cannot read its label counts and label shares, or compute logits, features and
    gradients.
    """
    changes = toys.suited(name)
    topology = {**changes.pop("topology", {}), "clients": 4}
    ready = prepare(resolve(private(name, **{**changes, "topology": topology})), toys.blobs())
    engine = ready.engine()
    method = ready.settings.method
    world = ready.world
    view_of = engine.sites.view

    def refuse(*_: Any, **__: Any) -> Any:
        pytest.fail("the data are read")

    def closed_view(sites: Any, client: int, stage: Stage) -> View:
        view = view_of(client, stage)
        monkeypatch.setattr(View, "proportions", property(refuse))
        for pass_over_data in ("logits", "features", "gradients"):
            monkeypatch.setattr(View, pass_over_data, refuse)
        object.__setattr__(view, "counts", None)
        return view

    monkeypatch.setattr(type(engine.sites), "view", closed_view)
    stages = ready.settings.schedule(1, world)
    stage = next(stage for stage in stages if len(stage.clients) > 1)
    state = method.begin_round(method.initial_state(world), stages, world)
    payloads = {c: method.payload_for_client(state, c, stage, world) for c in stage.clients}
    replies = engine.run(method.work(stage), stage, payloads, world.seed)
    assert [reply.failure for reply in replies] == [""] * len(replies)
    assert set(replies[0].content) <= {"params"}


@pytest.mark.parametrize(
    "name", ["fedlc", "fedrs", "fedsam", "fedadkd", "scaffold", "ccvr", "fedcurv", "dsfl", "feddbe"]
)
def test_a_method_that_does_not_permit_it_is_refused_before_the_run(name: str) -> None:
    experiment = private(name, **{"topology": {"clients": 4}, **toys.suited(name)})
    message = f"privacy.gradient_clip with method {name}"
    with pytest.raises((IncompatibleMethod, ConfigError), match=message):
        prepare(resolve(experiment), toys.blobs())


@pytest.mark.parametrize(
    ("changes", "message"),
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
def test_settings_that_would_reveal_more_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(resolve(private(**changes)), toys.blobs())


def test_hardly_any_noise_has_a_large_epsilon_and_no_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    epsilon = training_epsilon(0.1, {0.1: 400}, 1e-5)
    assert epsilon is not None
    assert epsilon > 1e4
    assert [str(w.message) for w in recwarn if "order" in str(w.message)] == []


def bounded_epsilon(noise: float, steps_by_rate: Mapping[float, int]) -> float:
    """The epsilon of training with noise; there must be one."""
    epsilon = training_epsilon(noise, steps_by_rate, 1e-5)
    assert epsilon is not None
    return epsilon


def test_epsilon_is_a_little_above_that_of_other_accountants() -> None:
    """If each step has all examples, the exact epsilon is that of Gaussian noise. For a sample, the
    PRV accountant of Opacus is tight.
    """
    from opacus.accountants import PRVAccountant

    for noise, steps in [(2.0, 1), (10.0, 40), (50.0, 10)]:
        exact = gaussian_epsilon(noise / math.sqrt(steps), 1e-5)
        assert exact <= bounded_epsilon(noise, {1.0: steps}) <= 1.3 * exact

    for noise, rate, steps in [(1.0, 0.1, 100), (1.5, 0.3, 40), (0.8, 0.02, 500)]:
        accountant = PRVAccountant()
        accountant.history = [(noise, rate, steps)]
        tight = accountant.get_epsilon(1e-5)
        assert tight <= bounded_epsilon(noise, {rate: steps}) <= 1.35 * tight

    assert training_epsilon(1.0, {}, 1e-5) == 0.0
    assert training_epsilon(0.0, {0.5: 1}, 1e-5) is None
    assert bounded_epsilon(1.0, {0.1: 60, 0.3: 5}) > bounded_epsilon(1.0, {0.1: 60})


def test_a_canary_confirms_the_claimed_epsilon() -> None:
    """The outputs of a step with and without an example whose gradient is as large as clipping
    permits.
    """
    rule = Private(1.0, 1.0)

    def scores(gradients: torch.Tensor, seeds: range) -> np.ndarray:
        zeros = {"w": torch.zeros(4)}
        means = [noised_mean({"w": gradients}, zeros, rule, 1.0, generator(s)) for s in seeds]
        return np.array([float(mean["w"][0]) for mean in means])

    other_examples = torch.zeros(3, 4)
    canary = torch.tensor([[50.0, 0, 0, 0]])
    scores_with = scores(torch.cat([other_examples, canary]), range(1000))
    scores_without = scores(other_examples, range(1000, 2000))
    claim = training_epsilon(1.0, {1.0: 1}, 1e-3)
    assert claim is not None
    assert claim * 0.2 < epsilon_at_least(scores_with, scores_without, 1e-3) < claim


def test_the_budget_is_in_the_journal_and_continued_by_a_resume(tmp_path: Path) -> None:
    uninterrupted = run(private(), tmp_path / "whole", data=toys.blobs())
    events = read_journal(tmp_path / "whole" / "journal.jsonl")
    round_1, round_2 = (e["privacy"]["epsilon"] for e in events if e["event"] == "round")
    account = {"epsilon": round_2, "delta": 1e-5, "covers": "training, by example"}
    assert uninterrupted.summary["privacy"] == account
    parts = prepare(resolve(private()), toys.blobs()).sites.split.tensors()
    for client, part in enumerate(parts):
        rate = min(1, BATCH / len(part))
        steps = 2 * math.ceil(len(part) / BATCH)
        assert round_1[client] == training_epsilon(1.0, {rate: steps}, 1e-5)
        assert round_2[client] == training_epsilon(1.0, {rate: 2 * steps}, 1e-5)

    resume(stopped(private(), tmp_path / "cut", stages=1), data=toys.blobs())
    assert_same_bits(bits(tmp_path / "cut"), bits(tmp_path / "whole"))

    limit = (max(round_1) + max(round_2)) / 2
    limited = private(privacy={**ON, "epsilon": limit})
    with pytest.raises(BudgetSpent, match=r"round 2, stage 'train': client \d has spent"):
        run(limited, tmp_path / "short", data=toys.blobs())
    with pytest.raises(BudgetSpent, match="round 2"):
        resume(tmp_path / "short", data=toys.blobs())


def test_the_table_of_a_run_has_the_largest_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = "[privacy]\ngradient_clip = 1.0\ngradient_noise = 1.0\ndelta = 1e-5\n"
    (tmp_path / "my.toml").write_text(toys.SMALL + settings)
    assert call(["run", str(tmp_path / "my.toml"), "--out", str(tmp_path / "run"), "-q"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "epsilon" in line]
    (*_, last) = [e for e in read_journal(tmp_path / "run/journal.jsonl") if e["event"] == "round"]
    assert float(line.split()[-1]) == pytest.approx(max(last["privacy"]["epsilon"]), abs=0.005)


@needs_flower
def test_over_flower_it_has_the_same_bits(tmp_path: Path) -> None:
    simulated = run(private("fedntd"), tmp_path / "simulated", data=toys.blobs())
    over_flower = run(private("fedntd", engine="flower"), tmp_path / "flower", data=toys.blobs())
    accuracies = [event["class_accuracy"] for event in simulated.history]
    assert [event["class_accuracy"] for event in over_flower.history] == accuracies


class Moved(ClientWork):
    """Computes its gradient at other parameters."""

    def perturb(self, params: Tensors, grads: Tensors, start: TrainingStart) -> Tensors:
        return {name: value + 0.1 * grads[name] for name, value in params.items()}


@register("method", "toy_moved")
class WithMovedClients(FedAvg):
    """A user's method that still has the permits of FedAvg."""

    def work(self, stage: Stage) -> ClientWork:
        return Moved()


def test_gradients_at_other_parameters_are_refused() -> None:
    with pytest.raises(IncompatibleMethod, match=r"toy_moved: Moved\.perturb"):
        prepare(resolve(private("toy_moved")), toys.blobs())
