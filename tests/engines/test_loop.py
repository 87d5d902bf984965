"""The one training loop: against a plain loop in torch, and the rules that hold for every
objective.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import toys
from double import NEAR, in_double
from fedstill.config.resolve import resolve
from fedstill.core.keys import generator, seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import Examples, Plan, Stage, Step, TrainingStart, View
from fedstill.engines.clients import Batch, TrainingSetup
from fedstill.engines.loop import TermSums, Trained, train
from fedstill.models import contract
from fedstill.models.layer_chain import run_from_level, run_to_levels
from fedstill.models.predictors import predictor
from fedstill.running.preparation import Prepared, prepare

STAGE = Stage(2, 0, "train", (0,))


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return in_double(prepare(resolve(toys.toy()), toys.blobs()))


def trained(prepared: Prepared, plan: Plan, work: ClientWork | None = None, **carry: object):
    view = prepared.sites.view(0, STAGE)
    start = TrainingStart(prepared.world.initial(0), **carry)  # type: ignore[arg-type]
    return train(work or ClientWork(), start, view, setup_of(prepared, plan))


def setup_of(prepared: Prepared, plan: Plan, **changes: object) -> TrainingSetup:
    values = {"plan": plan, "stage": STAGE, "inputs": prepared.sites.inputs, "seed": 7, **changes}
    return TrainingSetup(**values)  # type: ignore[arg-type]


def plain_loop(prepared: Prepared, plan: Plan) -> dict[str, Tensor]:
    """The same training, written out with torch.optim and a module."""
    view = prepared.sites.view(0, STAGE)
    module = contract.build(view.model).double()
    module.load_state_dict(dict(prepared.world.initial(0)))
    common = {"lr": plan.lr_at(2), "weight_decay": plan.weight_decay}
    if plan.optimiser == "adam":
        optimiser: torch.optim.Optimizer = torch.optim.Adam(module.parameters(), **common)
    else:
        optimiser = torch.optim.SGD(module.parameters(), momentum=plan.momentum, **common)
    x, y = prepared.sites.inputs.plain(view.data.values), view.data.labels
    order = generator(seed_for(7, 2, 0, 0, "order"))
    for _ in range(plan.epochs):
        for index in torch.randperm(len(y), generator=order).split(plan.batch):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(module(x[index]), y[index]).backward()
            if plan.clip_norm:
                torch.nn.utils.clip_grad_norm_(module.parameters(), plan.clip_norm)
            optimiser.step()
    return {k: v.detach() for k, v in module.state_dict().items()}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(epochs=3, batch=7, lr=0.05, lr_decay=0.9, momentum=0.9, weight_decay=1e-3),
        Plan(epochs=2, batch=16, lr=0.05, clip_norm=0.5),
        Plan(epochs=2, batch=8, optimiser="adam", lr=1e-2, weight_decay=4e-4),
    ],
)
def test_it_is_the_plain_loop(prepared: Prepared, plan: Plan) -> None:
    ours, theirs = trained(prepared, plan).params, plain_loop(prepared, plan)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=NEAR, atol=NEAR)


def test_what_it_starts_from_is_left_alone(prepared: Prepared) -> None:
    before = {k: v.clone() for k, v in prepared.world.initial(0).items()}
    trained(prepared, Plan(epochs=1, lr=0.1))
    assert all(torch.equal(before[k], v) for k, v in prepared.world.initial(0).items())


def test_losses_are_means_over_the_examples_of_the_last_epoch(prepared: Prepared) -> None:
    """With steps too small to move anything, whatever the batches: a short last one counts by its
    examples.
    """
    view, start = prepared.sites.view(0, STAGE), prepared.world.initial(0)
    logits = predictor(view.model, start)(prepared.sites.inputs.plain(view.data.values))
    expected = torch.nn.functional.cross_entropy(logits, view.data.labels).item()
    for batch in (1, 7, 1000):
        assert len(view.data) % 7
        result = trained(prepared, Plan(epochs=2, batch=batch, lr=1e-30))
        assert result.losses == {"ce": pytest.approx(expected, rel=1e-5)}, (
            "float32 sums of some tens of numbers"
        )


def test_each_epochs_parameters_are_those_of_a_shorter_training(prepared: Prepared) -> None:
    view, start = prepared.sites.view(0, STAGE), TrainingStart(prepared.world.initial(0))
    plan = Plan(epochs=3, batch=7, lr=0.05, momentum=0.9)
    result = train(ClientWork(), start, view, setup_of(prepared, plan, by_epoch=True))
    for epochs, params in enumerate(result.by_epoch, 1):
        shorter = trained(prepared, replace(plan, epochs=epochs)).params
        assert all(torch.equal(params[k], shorter[k]) for k in shorter)
    assert len(result.by_epoch) == 3


def test_steps_count_batches_over_several_epochs(prepared: Prepared) -> None:
    assert trained(prepared, Plan(steps=23, batch=10, lr=0.1)).result.steps == 23


def test_no_epochs_train_nothing(prepared: Prepared) -> None:
    result = trained(prepared, Plan(epochs=0))
    assert result.result.steps == 0
    assert all(torch.equal(result.params[k], v) for k, v in prepared.world.initial(0).items())


def test_a_client_without_examples_trains_nothing(prepared: Prepared) -> None:
    view = prepared.sites.view(0, STAGE)
    empty = replace(view, data=Examples(view.data.values[:0], view.data.labels[:0]))
    start = TrainingStart(prepared.world.initial(0))
    result = train(ClientWork(), start, empty, setup_of(prepared, Plan(epochs=3)))
    assert result.result.steps == 0


@dataclass(frozen=True)
class HeadOnly(ClientWork):
    def trainable(self, name: str) -> bool:
        return name.startswith("head.")


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_frozen_parameters_keep_their_bits(prepared: Prepared, optimiser: str) -> None:
    plan = Plan(epochs=1, lr=0.01, optimiser=optimiser, weight_decay=0.1)  # type: ignore[arg-type]
    after, before = trained(prepared, plan, HeadOnly()).params, prepared.world.initial(0)
    assert all(torch.equal(after[k], before[k]) == (not k.startswith("head.")) for k in before)


@dataclass(frozen=True)
class Halted(ClientWork):
    """Settles every step back to where it began."""

    def after_step(self, before, grads, after, trace, start):  # type: ignore[no-untyped-def]
        return before, {"steps": trace["steps"] + 1}


def test_settle_has_the_last_word_on_every_step(prepared: Prepared) -> None:
    result = trained(
        prepared, Plan(epochs=2, batch=10, lr=0.1), Halted(), trace={"steps": torch.zeros(())}
    )
    assert all(torch.equal(result.params[k], v) for k, v in prepared.world.initial(0).items())
    assert result.result.trace["steps"] == result.result.steps > 0


@dataclass(frozen=True)
class Doubled(ClientWork):
    def adjust_gradients(self, grads, start):  # type: ignore[no-untyped-def]
        return {k: 2 * g for k, g in grads.items()}


def test_adjusted_gradients_reach_the_optimiser(prepared: Prepared) -> None:
    doubled = trained(prepared, Plan(epochs=1, lr=0.05), Doubled()).params
    faster = trained(prepared, Plan(epochs=1, lr=0.1)).params
    for name in faster:
        torch.testing.assert_close(doubled[name], faster[name], rtol=NEAR, atol=NEAR)


@dataclass(frozen=True)
class FromTeacher(ClientWork):
    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        x = step.x
        module = contract.module(start["spec"], "frozen").eval()
        with torch.no_grad():
            expected = functional_call(module, dict(start.teachers["t"]), (x,))  # type: ignore[call-overload]
        torch.testing.assert_close(step.teacher("t"), expected, rtol=NEAR, atol=NEAR)
        return {
            "ce": super().terms(step, start)["ce"],
            "far": (step.logits() - step.teacher("t")).square().sum(1),
        }


@pytest.mark.parametrize("augment", [(), ("flip",)])
def test_a_teacher_gives_the_same_looked_up_or_run(
    prepared: Prepared, augment: tuple[str, ...]
) -> None:
    view: View = prepared.sites.view(0, STAGE)
    start = prepared.world.initial(0)
    carry = TrainingStart(start, teachers={"t": start}, constants={"spec": view.model})
    inputs = replace(prepared.sites.inputs, steps=augment)
    result = train(
        FromTeacher(), carry, view, setup_of(prepared, Plan(epochs=2, lr=0.01), inputs=inputs)
    )
    assert set(result.losses) == {"ce", "far"}


def test_early_stopping_keeps_the_best_epoch() -> None:
    plan = {"epochs": 40, "batch": 10, "lr": 0.5, "validation": 0.3, "patience": 3, "keep": "best"}
    ready = prepare(resolve(toys.toy(plan=plan)), toys.blobs())
    view = ready.sites.view(0, STAGE)
    assert view.validation is not None
    assert len(view.validation) + len(view.data) == int(view.counts.sum())
    work, plans = ClientWork(), ready.world.plans["train"]
    start = TrainingStart(ready.world.initial(0))
    result = train(work, start, view, setup_of(ready, plans))
    assert result.epochs < 40
    each = [replace(plans, epochs=e + 1, patience=0, keep="last") for e in range(result.epochs)]
    runs = [train(work, start, view, setup_of(ready, p)) for p in each]
    best = max(work.validation_score(r.params, view) for r in runs)
    assert work.validation_score(result.params, view) == best


def test_dropout_draws_by_key() -> None:
    experiment = toys.toy(model="simple_cnn")
    ready = prepare(resolve(experiment), toys.blobs_of(8))
    view = ready.sites.view(0, STAGE)
    start, plan = TrainingStart(ready.world.initial(0)), Plan(epochs=1, lr=0.1)
    first = train(ClientWork(), start, view, setup_of(ready, plan)).params
    torch.manual_seed(99)
    second = train(ClientWork(), start, view, setup_of(ready, plan)).params
    other = train(ClientWork(), start, view, setup_of(ready, plan, seed=8)).params
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert any(not torch.equal(first[k], other[k]) for k in first)


@dataclass(frozen=True)
class InParts(ClientWork):
    """Takes the network apart: what its parts give is what the whole one does."""

    whole: bool

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        if self.whole:
            return super().terms(step, start)
        level, activations = list(step.run(run_to_levels).activations.items())[-1]
        logits = step.run_teacher("t", run_from_level, activations, level)
        torch.testing.assert_close(logits, step.teacher("t"), rtol=NEAR, atol=NEAR)
        z = step.head(step.run(contract.run_part, "body"))
        assert torch.equal(z, step.logits())
        return {"ce": torch.nn.functional.cross_entropy(z, step.y, reduction="none")}


def test_parts_of_the_network_in_a_step_are_those_of_the_whole(prepared: Prepared) -> None:
    """In the first step, in which the teacher is the student; and the gradient reaches all
    entries.
    """
    plan, teacher = Plan(steps=1, epochs=0, batch=10, lr=0.1), {"t": prepared.world.initial(0)}
    ours, theirs = (
        trained(prepared, plan, InParts(whole), teachers=teacher).params for whole in (False, True)
    )
    assert all(torch.equal(ours[k], v) for k, v in theirs.items())


@dataclass(frozen=True)
class Tracing(ClientWork):
    """Counts its steps in the trace, and says that the second epoch is the best."""

    def after_step(
        self,
        before: dict[str, Tensor],
        gradients: dict[str, Tensor],
        after: dict[str, Tensor],
        trace: dict[str, Tensor],
        start: TrainingStart,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return after, {"steps": trace["steps"] + 1}

    def validation_score(self, params: dict[str, Tensor], view: View) -> float:
        key = next(iter(params))
        SCORED.append(params[key].clone())
        return float(len(SCORED) == 2)


SCORED: list[Tensor] = []
"""An entry of the network after each epoch."""


def test_the_result_of_the_best_epoch_has_its_steps_and_its_trace(prepared: Prepared) -> None:
    """SCAFFOLD and others divide the change of the parameters by the number of steps."""
    SCORED.clear()
    plan = Plan(epochs=4, batch=10, lr=0.1, keep="best", validation=0.1)
    outcome = trained(prepared, plan, Tracing(), trace={"steps": torch.zeros(1)})
    key = next(iter(outcome.params))
    assert torch.equal(outcome.params[key], SCORED[1])
    assert outcome.epochs == 4
    assert outcome.steps == 2 * outcome.result.steps
    assert outcome.result.trace["steps"].item() == outcome.result.steps


def test_an_epoch_that_begins_without_examples_forgets_the_last_ones_losses() -> None:
    """Private training may sample no example."""
    sums = TermSums()
    no_examples = torch.zeros(0, dtype=torch.int64)
    for begins, size, loss in [(True, 2, 10.0), (True, 0, None), (False, 3, 1.0)]:
        batch = Batch(
            positions=no_examples,
            rows=no_examples,
            mask=None,
            epoch=0,
            sizes=size,
            begins_epoch=begins,
            counts=(size,),
            progress=(),
            ending=(),
        )
        terms = {} if loss is None else {"ce": torch.tensor(loss)}
        sums.add(terms, batch)
    assert sums.means(1) == [{"ce": 1.0}]


@pytest.mark.parametrize("norm", ["batch_stats", "group"])
def test_a_teacher_with_batch_statistics_sees_the_students_batch(norm: str) -> None:
    """Then a student that equals its teacher has no distance from it."""
    model = {"name": "resnet10", "norm": norm}
    ready = prepare(
        resolve(toys.toy("fedntd", model=model, measure=())), toys.blobs_of(16, size=120)
    )
    stage = ready.settings.schedule(1, ready.world)[0]
    view = ready.sites.view(stage.clients[0], stage)
    assert len(view.data) % 8
    params = ready.world.initial(0)
    start = TrainingStart(params, teachers={"global": params})
    plan = Plan(epochs=1, batch=8, lr=1e-12)
    losses = trained_by(ready, start, view, plan).losses
    assert losses["not_true"] == pytest.approx(0.0, abs=1e-6)
    assert losses["ce"] > 0.1


def trained_by(ready: Prepared, start: TrainingStart, view: View, plan: Plan) -> Trained:
    stage = ready.settings.schedule(1, ready.world)[0]
    setup = TrainingSetup(plan=plan, stage=stage, inputs=ready.sites.inputs, seed=7)
    return train(ready.settings.method.work(stage), start, view, setup)
