"""A stack of clients: in float64, each trains as it would alone, whatever it shares with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedstill.core import trees
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    Examples,
    ModelSpec,
    Plan,
    Stage,
    Step,
    Tensors,
    TrainingStart,
    View,
)
from fedstill.data.inputs import Inputs
from fedstill.engines.clients import Batch, TrainingSetup
from fedstill.engines.loop import TermSums, Trained, train
from fedstill.engines.passes import ModelPasses
from fedstill.engines.stack import Stack, StackedStart, Structures, convolved_by_products
from fedstill.engines.step import frozen_teachers
from fedstill.engines.vectorised import train_stack
from fedstill.losses import cross_entropy, kd
from fedstill.models import contract

SIZES = (3, 20, 7, 1)
STAGE = Stage(2, 1, "train", tuple(range(len(SIZES))))
STUDENT = contract.spec_for("digits_cnn", (1, 8, 8), 5, {})
OTHER_NETWORK = contract.spec_for("mlp", (1, 8, 8), 5, {"hidden": (6,)})
PLAN = Plan(epochs=2, batch=6, lr=0.05, momentum=0.9, weight_decay=1e-3)
NEAR = 1e-9
"""What float64 may lose in some steps, where float32 would lose 1e-6."""


class Doubled(Inputs):
    """Inputs in float64, be they augmented or not."""

    def plain(self, images: Tensor) -> Tensor:
        return super().plain(images).double()

    def trained_on(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return super().trained_on(images, generator).double()


STILL = Doubled((0.5,), (0.3,))
MOVING = Doubled((0.5,), (0.3,), ("flip", "crop"))


def setup_of(plan: Plan = PLAN, inputs: Inputs = STILL, **changes: Any) -> TrainingSetup:
    """The setup of a training in the second round."""
    return TrainingSetup(**{"plan": plan, "stage": STAGE, "inputs": inputs, "seed": 7, **changes})


def initial(spec: ModelSpec, seed: int) -> Tensors:
    """The parameters of a network without training, in float64."""
    return {name: entry.double() for name, entry in contract.initial(spec, seed).items()}


def examples_of(client: int, size: int) -> Examples:
    """Random images of five classes."""
    draw = torch.Generator().manual_seed(client)
    labels = torch.randint(5, (size,), generator=draw)
    images = torch.randint(256, (size, 1, 8, 8), dtype=torch.uint8, generator=draw)
    return Examples(images, labels)


def view_of(client: int, size: int) -> View:
    """A client's view of random images."""
    data = examples_of(client, size)
    return View(
        client=client,
        model=STUDENT,
        data=data,
        counts=torch.bincount(data.labels, minlength=5),
        public=None,
        validation=None,
        test=None,
        passes=ModelPasses(STUDENT, STILL),
    )


VIEWS = [view_of(client, size) for client, size in enumerate(SIZES)]
START = initial(STUDENT, 0)
TEACHER = initial(STUDENT, 1)


def carries(sharing: str) -> list[TrainingStart]:
    """What clients start with: the same objects (``shared``), or each with objects of its own
    (``own``).
    """
    if sharing == "shared":
        constants = {"weight": 0.5, "anchor": START}
        start = TrainingStart(START, {"t": TEACHER}, trees.zeros_like(START), constants)
        return [start] * len(SIZES)
    starts = []
    for client in range(len(SIZES)):
        params = initial(STUDENT, 10 + client)
        teachers = {
            "t": initial(STUDENT, 20 + client),
            "other": other_teacher(client),
            "all": TEACHER,
        }
        constants = {"weight": 0.1 * client, "anchor": params}
        starts.append(TrainingStart(params, teachers, trees.zeros_like(params), constants))
    return starts


def other_teacher(client: int) -> tuple[ModelSpec, Tensors]:
    """A teacher of another architecture."""
    return OTHER_NETWORK, initial(OTHER_NETWORK, 30 + client)


@dataclass(frozen=True)
class Everything(ClientWork):
    """Each part of a carry has a say: teachers, trace, constants; so have gradients and steps."""

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        terms = {"ce": cross_entropy(step.logits(), step.y)}
        for name in start.teachers:
            terms[name] = start["weight"] * kd(step.logits(), step.teacher(name), 2.0)
        distances = [
            (step.params[name] - entry).square().sum() for name, entry in start["anchor"].items()
        ]
        terms["far"] = 0.01 * sum(distances)
        terms["late"] = (step.epoch > 0) * terms["ce"]
        return terms

    def adjust_gradients(self, grads: Tensors, start: TrainingStart) -> Tensors:
        pull = 0.01 * start["weight"]
        return {name: grad + pull * start["anchor"][name] for name, grad in grads.items()}

    def after_step(
        self,
        params_before: Tensors,
        grads: Tensors,
        params_after: Tensors,
        trace: Tensors,
        start: TrainingStart,
    ) -> tuple[Tensors, Tensors]:
        change = trees.sub(params_after, params_before)
        importance = {name: (grads[name] * change[name]).abs() for name in trace}
        return params_after, trees.add(trace, importance)


def check(
    starts: Sequence[TrainingStart],
    views: Sequence[View],
    setup: TrainingSetup,
    work: ClientWork | None = None,
) -> list[Trained]:
    """Check that each client of a stack trains as it does alone; return the trainings of the
    stack.
    """
    work = work or Everything()
    together = train_stack(work, starts, views, setup)
    for start, view, ours in zip(starts, views, together, strict=True):
        alone = train(work, start, view, setup)
        near(ours.params, alone.params)
        near(ours.result.trace, alone.result.trace)
        assert ours.losses == pytest.approx(alone.losses, abs=NEAR)
        assert ours.result.steps == alone.result.steps
        assert ours.result.lr == alone.result.lr
        assert ours.epochs == alone.epochs
        for params, params_alone in zip(ours.by_epoch, alone.by_epoch, strict=True):
            near(params, params_alone)
    return together


def near(ours: Tensors, alone: Tensors) -> None:
    """Check that two sets of parameters differ by rounding alone."""
    assert list(ours) == list(alone)
    for name in alone:
        torch.testing.assert_close(ours[name], alone[name], rtol=0, atol=NEAR)


@pytest.mark.parametrize("inputs", [STILL, MOVING], ids=["still", "moving"])
@pytest.mark.parametrize("sharing", ["shared", "own"])
@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        replace(PLAN, clip_norm=0.1),
        replace(PLAN, steps=5),
        Plan(epochs=1, batch=50, optimiser="adam", lr=0.01),
    ],
    ids=["epochs", "clipped", "steps", "adam"],
)
def test_a_stack_is_each_client_alone(sharing: str, plan: Plan, inputs: Inputs) -> None:
    for trained in check(carries(sharing), VIEWS, setup_of(plan, inputs)):
        assert (trained.params["body.0.weight"] != START["body.0.weight"]).any()


def test_clipping_is_by_each_clients_own_norm() -> None:
    """A client with gradients far above the bound does not shrink those of one below it."""
    work = ClientWork()
    plan = Plan(epochs=1, batch=50, lr=1.0, clip_norm=10.0)
    wild = trees.scale(START, 30)
    starts = [TrainingStart(START), TrainingStart(wild)]

    calm, clipped = check(starts, VIEWS[:2], setup_of(plan), work)

    free_plan = replace(plan, clip_norm=0.0)
    free = train(work, TrainingStart(START), VIEWS[0], setup_of(free_plan))
    moved = trees.norm(trees.sub(clipped.params, wild))
    assert moved == pytest.approx(10.0, rel=1e-6), "one step of length lr × clip_norm"
    assert trees.norm(trees.sub(calm.params, START)) < 10
    near(calm.params, free.params)


def test_a_scalar_that_is_trained_is_clipped_with_the_rest() -> None:
    """The scale of a simplex head is one number a client."""
    spec = contract.spec_for("etf", (1, 8, 8), 5, {"of": "mlp", "arguments": {"hidden": (6,)}})
    plan = Plan(epochs=2, batch=6, lr=0.1, clip_norm=0.1)
    start = TrainingStart(initial(spec, 0))
    views = [replace(view, model=spec) for view in VIEWS]
    for trained in check([start] * len(views), views, setup_of(plan), ClientWork()):
        assert trained.params["head.scale"] != start.params["head.scale"]


def test_clients_on_common_public_data_are_each_alone() -> None:
    public = examples_of(9, 17)
    setup = setup_of(stage=replace(STAGE, view="public"))
    views = [replace(view, public=public) for view in VIEWS]
    for only in (None, torch.tensor([1, 5, 6, 7, 16])):
        starts = [replace(start, only=only) for start in carries("own")]
        check(starts, views, setup)

    starts = []
    for client, start in enumerate(carries("own")):
        starts.append(replace(start, only=torch.arange(client + 1)))
    check(starts, views, setup)


@pytest.mark.parametrize("inputs", [STILL, MOVING], ids=["still", "moving"])
@pytest.mark.parametrize("sharing", ["shared", "own"])
def test_further_examples_stand_behind_the_clients_own(sharing: str, inputs: Inputs) -> None:
    """Clients have different numbers of them, and one has none. They train as clients do whose own
    data are all these examples; then the same with the last example alone.
    """
    setup = setup_of(inputs=inputs)
    starts = []
    last_starts = []
    views = []
    last_views = []
    for view, start, count in zip(VIEWS, carries(sharing), (4, 0, 9, 2), strict=True):
        examples = view.data
        if count:
            examples = view.data + examples_of(20 + view.client, count)
        last = torch.tensor([len(examples) - 1])
        starts.append(replace(start, examples=examples))
        last_starts.append(replace(start, examples=examples, only=last))
        views.append(replace(view, data=examples))
        last_views.append(replace(view, data=examples.take(last)))

    trainings = check(starts, VIEWS, setup)
    for trained, expected in zip(trainings, check(carries(sharing), views, setup), strict=True):
        near(trained.params, expected.params)

    trainings = check(last_starts, VIEWS, setup)
    for trained, expected in zip(
        trainings, check(carries(sharing), last_views, setup), strict=True
    ):
        near(trained.params, expected.params)


def test_each_epochs_parameters_are_kept_for_each_client() -> None:
    trainings = check(carries("own"), VIEWS, setup_of(by_epoch=True))
    assert [len(trained.by_epoch) for trained in trainings] == [2, 2, 2, 2]


def test_no_epochs_train_nothing() -> None:
    for trained in check(carries("shared"), VIEWS, setup_of(Plan(epochs=0))):
        near(trained.params, START)


def test_a_short_batch_is_padded_with_what_has_no_weight() -> None:
    stack = Stack(carries("shared"), VIEWS, setup_of())
    positions_of = [list[int]() for _ in SIZES]
    for batch in stack.batches():
        inputs = stack.step_inputs(batch)
        shape = (len(SIZES), PLAN.batch)
        assert inputs.x.shape[:2] == inputs.y.shape == batch.positions.shape == shape
        assert batch.mask is not None
        for client, count in enumerate(batch.counts):
            weights = [1.0] * count + [0.0] * (PLAN.batch - count)
            if count == 0:
                # The parameters of a client that has finished are put back after the step.
                weights = [1.0] * PLAN.batch
            assert batch.mask[client].tolist() == weights
            labels = VIEWS[client].data.labels[batch.positions[client]]
            assert inputs.y[client].tolist() == labels.tolist()
            positions_of[client] += batch.positions[client, :count].tolist()

    for positions, size in zip(positions_of, SIZES, strict=True):
        assert sorted(positions) == sorted([*range(size), *range(size)]), "twice in two epochs"


@pytest.mark.parametrize(("sharing", "expected"), [("shared", [31]), ("own", [3, 20, 7, 1])])
def test_a_teacher_that_all_share_is_run_once_over_the_data_and_an_own_one_on_its_clients(
    sharing: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = carries(sharing)
    expected_logits = []
    for start, view in zip(starts, VIEWS, strict=True):
        expected_logits.append(view.passes.logits(start.teachers["t"], view.data))
    passes: list[int] = []
    forward = contract.forward

    def counted(module: Any, params: Tensors, x: Tensor) -> Tensor:
        passes.append(len(x))
        return forward(module, params, x)

    monkeypatch.setattr(contract, "forward", counted)
    stack = Stack(starts, VIEWS, setup_of())
    table = stack.teacher_table("t", "logits")

    assert table is not None
    assert table is stack.teacher_table("t", "logits"), "made once"
    assert passes == expected
    torch.testing.assert_close(table, torch.cat(expected_logits), rtol=0, atol=NEAR)


def test_what_all_clients_share_is_not_copied_and_each_finds_its_own_again() -> None:
    starts = carries("own")
    stacked = StackedStart.of(starts, torch.device("cpu"))
    assert stacked.start.teachers["all"]["body.0.weight"] is TEACHER["body.0.weight"]
    assert stacked.axes.teachers["all"]["body.0.weight"] is None
    assert stacked.start.teachers["t"]["body.0.weight"].shape[0] == len(SIZES)
    assert stacked.axes.teachers["t"]["body.0.weight"] == 0
    for client, start in enumerate(starts):
        unstacked = stacked.of_client(client)
        near(unstacked.params, start.params)
        spec, teacher_params = unstacked.teachers["other"]
        assert spec is OTHER_NETWORK
        near(teacher_params, start.teachers["other"][1])
        assert float(unstacked["weight"]) == start["weight"]


def test_a_teacher_has_one_form_for_the_engines() -> None:
    teachers = frozen_teachers({"same": TEACHER, "another": other_teacher(0)}, STUDENT)
    assert teachers["same"].spec == STUDENT
    assert teachers["another"].spec == OTHER_NETWORK
    assert teachers["same"].params is TEACHER


@pytest.mark.parametrize(
    ("fields", "other_fields"),
    [
        ({}, {"params": {**START, "more": torch.zeros(1)}}),
        ({}, {"params": contract.initial(STUDENT, 0)}),
        ({"teachers": {"t": TEACHER}}, {"teachers": {}}),
        ({"teachers": {"t": (STUDENT, TEACHER)}}, {"teachers": {"t": other_teacher(0)}}),
        ({"constants": {"a": 1}}, {"constants": {"a": 1.0}}),
        ({"constants": {"a": "x"}}, {"constants": {"a": "y"}}),
        ({}, {"only": torch.arange(2)}),
    ],
    ids=["names", "types", "teachers", "architectures", "numbers", "words", "only"],
)
def test_clients_whose_tensors_do_not_fit_on_each_other_have_other_structures(
    fields: dict[str, Any], other_fields: dict[str, Any]
) -> None:
    structures = Structures()

    def structure(view: View, **start: Any) -> Any:
        return structures.of(TrainingStart(**start), view)

    first = structure(VIEWS[0], **{"params": START, **fields})
    assert first != structure(VIEWS[0], **{"params": START, **other_fields})
    other_values = trees.scale(START, 2)
    assert first == structure(VIEWS[1], **{"params": other_values, **fields})


def test_an_infinite_term_after_a_clients_end_is_not_in_its_loss() -> None:
    """A client that has ended repeats its first example in the following steps."""
    positions = torch.zeros(2, 2, dtype=torch.int64)
    first = Batch(
        positions=positions,
        rows=positions,
        mask=None,
        epoch=torch.zeros(2),
        sizes=torch.tensor([2, 2]),
        begins_epoch=torch.tensor([True, True]),
        counts=(2, 2),
        progress=(),
        ending=(0,),
    )
    second = replace(
        first,
        sizes=torch.tensor([0, 2]),
        begins_epoch=torch.tensor([False, False]),
        running=torch.tensor([False, True]),
    )
    sums = TermSums()
    sums.add({"ce": torch.tensor([1.0, 2.0])}, first)
    sums.add({"ce": torch.tensor([torch.inf, 4.0])}, second)
    assert sums.means(2) == [{"ce": 1.0}, {"ce": 3.0}]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "window",
    [
        {"kernel_size": 5, "padding": 2},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)},
        {"kernel_size": 3, "dilation": (2, 1)},
        {"kernel_size": 3, "padding": "same"},
    ],
)
def test_products_of_windows_are_convolutions(window: dict[str, Any], bias: bool) -> None:
    """The convolution of stacked clients on a GPU, with its gradients."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    layer = nn.Conv2d(3, 4, **window, bias=bias).double()
    x = normal(2, 5, 3, 9, 8)
    entries = {"weight": normal(2, *layer.weight.shape)}
    if bias:
        entries["bias"] = normal(2, 4)

    stacked = convolved_by_products(layer, x, entries["weight"], entries.get("bias"))
    alone = []
    for client in range(2):
        client_entries = {name: entry[client] for name, entry in entries.items()}
        alone.append(torch.func.functional_call(layer, client_entries, x[client]))
    expected = torch.stack(alone)
    torch.testing.assert_close(stacked, expected, rtol=0, atol=1e-12)

    inputs = [x, *entries.values()]
    upstream = torch.randn(stacked.shape, generator=draw, dtype=torch.float64)
    gradients = torch.autograd.grad(stacked, inputs, upstream)
    expected_gradients = torch.autograd.grad(expected, inputs, upstream)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-11)
