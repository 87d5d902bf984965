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
from fedstill.core.trees import same_bits
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


def trained(
    prepared: Prepared, plan: Plan, work: ClientWork | None = None, **carry: object
) -> Trained:
    """The training of client 0 in the second round."""
    view = prepared.sites.view(0, STAGE)
    start = TrainingStart(prepared.world.initial(0), **carry)  # type: ignore[arg-type]
    return train(work or ClientWork(), start, view, setup_of(prepared, plan))


def setup_of(prepared: Prepared, plan: Plan, **changes: object) -> TrainingSetup:
    """The setup of a training in the second round."""
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

    x = prepared.sites.inputs.plain(view.data.values)
    y = view.data.labels
    order = generator(seed_for(7, 2, 0, 0, "order"))
    for _ in range(plan.epochs):
        for index in torch.randperm(len(y), generator=order).split(plan.batch):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(module(x[index]), y[index]).backward()
            if plan.clip_norm:
                torch.nn.utils.clip_grad_norm_(module.parameters(), plan.clip_norm)
            optimiser.step()
    return dict(module.state_dict())


@pytest.mark.parametrize(
    "plan",
    [
        Plan(epochs=3, batch=7, lr=0.05, lr_decay=0.9, momentum=0.9, weight_decay=1e-3),
        Plan(epochs=2, batch=16, lr=0.05, clip_norm=0.5),
        Plan(epochs=2, batch=8, optimiser="adam", lr=1e-2, weight_decay=4e-4),
    ],
)
def test_it_is_the_plain_loop(prepared: Prepared, plan: Plan) -> None:
    ours = trained(prepared, plan).params
    theirs = plain_loop(prepared, plan)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=NEAR, atol=NEAR)


def test_training_does_not_change_its_start(prepared: Prepared) -> None:
    copies = {name: entry.clone() for name, entry in prepared.world.initial(0).items()}
    trained(prepared, Plan(epochs=1, lr=0.1))
    assert same_bits(prepared.world.initial(0), copies)


def test_losses_are_means_over_the_examples_of_the_last_epoch(prepared: Prepared) -> None:
    """Steps are too small to change the network. A short last batch counts by its examples."""
    view = prepared.sites.view(0, STAGE)
    start = prepared.world.initial(0)
    logits = predictor(view.model, start)(prepared.sites.inputs.plain(view.data.values))
    expected = torch.nn.functional.cross_entropy(logits, view.data.labels).item()
    assert len(view.data) % 7, "the last batch of seven is short"
    for batch in (1, 7, 1000):
        result = trained(prepared, Plan(epochs=2, batch=batch, lr=1e-30))
        # Float32 sums of some tens of numbers.
        assert result.losses == {"ce": pytest.approx(expected, rel=1e-5)}


def test_each_epochs_parameters_are_those_of_a_shorter_training(prepared: Prepared) -> None:
    view = prepared.sites.view(0, STAGE)
    start = TrainingStart(prepared.world.initial(0))
    plan = Plan(epochs=3, batch=7, lr=0.05, momentum=0.9)
    result = train(ClientWork(), start, view, setup_of(prepared, plan, by_epoch=True))
    for epochs, params in enumerate(result.by_epoch, 1):
        shorter = trained(prepared, replace(plan, epochs=epochs))
        assert same_bits(params, shorter.params)
    assert len(result.by_epoch) == 3


def test_steps_count_batches_over_several_epochs(prepared: Prepared) -> None:
    assert trained(prepared, Plan(steps=23, batch=10, lr=0.1)).result.steps == 23


def test_no_epochs_train_nothing(prepared: Prepared) -> None:
    result = trained(prepared, Plan(epochs=0))
    assert result.result.steps == 0
    assert same_bits(result.params, prepared.world.initial(0))


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
    trained_params = trained(prepared, plan, HeadOnly()).params
    initial_params = prepared.world.initial(0)
    for name, entry in initial_params.items():
        is_frozen = not name.startswith("head.")
        assert torch.equal(trained_params[name], entry) == is_frozen


@dataclass(frozen=True)
class Halted(ClientWork):
    """Undoes each step, and counts it in the trace."""

    def after_step(self, params_before, grads, params_after, trace, start):  # type: ignore[no-untyped-def]
        return params_before, {"steps": trace["steps"] + 1}


def test_parameters_after_a_step_are_those_that_after_step_returns(prepared: Prepared) -> None:
    plan = Plan(epochs=2, batch=10, lr=0.1)
    result = trained(prepared, plan, Halted(), trace={"steps": torch.zeros(())})
    assert same_bits(result.params, prepared.world.initial(0))
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
        difference = step.logits() - step.teacher("t")
        return {**super().terms(step, start), "far": difference.square().sum(1)}


@pytest.mark.parametrize("augment", [(), ("flip",)])
def test_a_teacher_gives_the_same_looked_up_or_run(
    prepared: Prepared, augment: tuple[str, ...]
) -> None:
    view: View = prepared.sites.view(0, STAGE)
    start = prepared.world.initial(0)
    carry = TrainingStart(start, teachers={"t": start}, constants={"spec": view.model})
    inputs = replace(prepared.sites.inputs, steps=augment)
    setup = setup_of(prepared, Plan(epochs=2, lr=0.01), inputs=inputs)
    result = train(FromTeacher(), carry, view, setup)
    assert set(result.losses) == {"ce", "far"}


def test_early_stopping_keeps_the_best_epoch() -> None:
    plan = {"epochs": 40, "batch": 10, "lr": 0.5, "validation": 0.3, "patience": 3, "keep": "best"}
    ready = prepare(resolve(toys.toy(plan=plan)), toys.blobs())
    view = ready.sites.view(0, STAGE)
    assert view.validation is not None
    assert len(view.validation) + len(view.data) == int(view.counts.sum())
    work = ClientWork()
    train_plan = ready.world.plans["train"]
    start = TrainingStart(ready.world.initial(0))

    result = train(work, start, view, setup_of(ready, train_plan))

    assert result.epochs < 40
    scores = []
    for epochs in range(1, result.epochs + 1):
        shorter_plan = replace(train_plan, epochs=epochs, patience=0, keep="last")
        shorter = train(work, start, view, setup_of(ready, shorter_plan))
        scores.append(work.validation_score(shorter.params, view))
    assert work.validation_score(result.params, view) == max(scores)


def test_dropout_draws_by_key() -> None:
    experiment = toys.toy(model="simple_cnn")
    ready = prepare(resolve(experiment), toys.blobs_of(8))
    view = ready.sites.view(0, STAGE)
    start = TrainingStart(ready.world.initial(0))
    plan = Plan(epochs=1, lr=0.1)

    first = train(ClientWork(), start, view, setup_of(ready, plan)).params
    torch.manual_seed(99)
    second = train(ClientWork(), start, view, setup_of(ready, plan)).params
    of_another_seed = train(ClientWork(), start, view, setup_of(ready, plan, seed=8)).params

    assert same_bits(first, second)
    assert not same_bits(first, of_another_seed)


class InParts(ClientWork):
    """Runs parts of the network one after another, and checks that they give its logits."""

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        *_, (level, activations) = step.run(run_to_levels).activations.items()
        logits = step.run_teacher("t", run_from_level, activations, level)
        torch.testing.assert_close(logits, step.teacher("t"), rtol=NEAR, atol=NEAR)
        z = step.head(step.run(contract.run_part, "body"))
        assert torch.equal(z, step.logits())
        return {"ce": torch.nn.functional.cross_entropy(z, step.y, reduction="none")}


def test_parts_of_the_network_in_a_step_are_those_of_the_whole(prepared: Prepared) -> None:
    """The teacher is the student of the first step. The gradient reaches all entries."""
    plan = Plan(steps=1, epochs=0, batch=10, lr=0.1)
    teacher = {"t": prepared.world.initial(0)}
    in_parts = trained(prepared, plan, InParts(), teachers=teacher)
    plain = trained(prepared, plan, ClientWork(), teachers=teacher)
    assert same_bits(in_parts.params, plain.params)


@dataclass(frozen=True)
class Tracing(ClientWork):
    """Counts its steps in the trace, and says that the second epoch is the best."""

    def after_step(
        self,
        params_before: dict[str, Tensor],
        grads: dict[str, Tensor],
        params_after: dict[str, Tensor],
        trace: dict[str, Tensor],
        start: TrainingStart,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return params_after, {"steps": trace["steps"] + 1}

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
    positions = torch.zeros(0, dtype=torch.int64)

    def batch_of(size: int, begins_epoch: bool) -> Batch:
        return Batch(
            positions=positions,
            rows=positions,
            mask=None,
            epoch=0,
            sizes=size,
            begins_epoch=begins_epoch,
            counts=(size,),
            progress=(),
            ending=(),
        )

    sums = TermSums()
    sums.add({"ce": torch.tensor(10.0)}, batch_of(2, begins_epoch=True))
    sums.add({}, batch_of(0, begins_epoch=True))
    sums.add({"ce": torch.tensor(1.0)}, batch_of(3, begins_epoch=False))
    assert sums.means(1) == [{"ce": 1.0}]


@pytest.mark.parametrize("norm", ["batch_stats", "group"])
def test_a_teacher_with_batch_statistics_sees_the_students_batch(norm: str) -> None:
    """Then a student that equals its teacher has no distance from it."""
    model = {"name": "resnet10", "norm": norm}
    experiment = toys.toy("fedntd", model=model, measure=())
    ready = prepare(resolve(experiment), toys.blobs_of(16, size=120))
    stage = ready.settings.schedule(1, ready.world)[0]
    view = ready.sites.view(stage.clients[0], stage)
    assert len(view.data) % 8
    params = ready.world.initial(0)
    start = TrainingStart(params, teachers={"global": params})
    plan = Plan(epochs=1, batch=8, lr=1e-12)
    setup = TrainingSetup(plan=plan, stage=stage, inputs=ready.sites.inputs, seed=7)

    losses = train(ready.settings.method.work(stage), start, view, setup).losses

    assert losses["not_true"] == pytest.approx(0.0, abs=1e-6)
    assert losses["ce"] > 0.1
