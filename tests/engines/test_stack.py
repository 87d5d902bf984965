"""A stack of clients: each is what it would be alone, in float64, whatever it shares with the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedstill.core import trees
from fedstill.core.method import ClientWork
from fedstill.core.records import Examples, Plan, Stage, Step, Tensors, TrainingStart, View
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
OTHER = contract.spec_for("mlp", (1, 8, 8), 5, {"hidden": (6,)})
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


def doubles(params: Tensors) -> Tensors:
    return {k: v.double() for k, v in params.items()}


def view_of(client: int, size: int, public: Examples | None = None) -> View:
    draw = torch.Generator().manual_seed(client)
    labels = torch.randint(5, (size,), generator=draw)
    images = torch.randint(256, (size, 1, 8, 8), dtype=torch.uint8, generator=draw)
    counts = torch.bincount(labels, minlength=5)
    return View(
        client,
        STUDENT,
        Examples(images, labels),
        counts,
        public,
        None,
        None,
        ModelPasses(STUDENT, STILL),
    )


VIEWS = [view_of(client, size) for client, size in enumerate(SIZES)]
START = doubles(contract.initial(STUDENT, 0))
TEACHER = doubles(contract.initial(STUDENT, 1))


def carries(how: str) -> list[TrainingStart]:
    """What clients start with: ``shared``: all the same objects; ``own``: everything of one's
    own.
    """
    if how == "shared":
        constants = {"weight": 0.5, "anchor": START}
        return [
            TrainingStart(START, {"t": TEACHER}, trees.zeros_like(START), constants) for _ in SIZES
        ]
    each = []
    for client in range(len(SIZES)):
        own = doubles(contract.initial(STUDENT, 10 + client))
        teachers = {
            "t": doubles(contract.initial(STUDENT, 20 + client)),
            "other": other(client),
            "all": TEACHER,
        }
        each.append(
            TrainingStart(
                own, teachers, trees.zeros_like(own), {"weight": 0.1 * client, "anchor": own}
            )
        )
    return each


def other(client: int) -> tuple[Any, Tensors]:
    """A teacher of another architecture."""
    return OTHER, doubles(contract.initial(OTHER, 30 + client))


@dataclass(frozen=True)
class Everything(ClientWork):
    """Each part of a carry has a say: teachers, trace, constants; so have gradients and steps."""

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        terms = {"ce": cross_entropy(step.logits(), step.y)}
        for name in start.teachers:
            terms[name] = start["weight"] * kd(step.logits(), step.teacher(name), 2.0)
        far = sum((step.params[k] - v).square().sum() for k, v in start["anchor"].items())
        return {
            **terms,
            "far": 0.01 * far,
            "late": (step.epoch > 0) * cross_entropy(step.logits(), step.y),
        }

    def adjust_gradients(self, grads: Tensors, start: TrainingStart) -> Tensors:
        return {k: g + 0.01 * start["weight"] * start["anchor"][k] for k, g in grads.items()}

    def after_step(
        self, before: Tensors, grads: Tensors, after: Tensors, trace: Tensors, start: TrainingStart
    ) -> tuple[Tensors, Tensors]:
        return after, {k: trace[k] + (grads[k] * (after[k] - before[k])).abs() for k in trace}


def check(
    starts: Sequence[TrainingStart],
    views: Sequence[View],
    setup: TrainingSetup,
    work: ClientWork | None = None,
) -> list[Trained]:
    """That a stack is each client alone; what it gave."""
    work = work or Everything()
    together = train_stack(work, starts, views, setup)
    for carry, view, ours in zip(starts, views, together, strict=True):
        alone = train(work, carry, view, setup)
        near(ours.params, alone.params)
        near(ours.result.trace, alone.result.trace)
        assert ours.losses == pytest.approx(alone.losses, abs=NEAR)
        assert (ours.result.steps, ours.result.lr, ours.epochs) == (
            alone.result.steps,
            alone.result.lr,
            alone.epochs,
        )
        assert len(ours.by_epoch) == len(alone.by_epoch)
        for mine, its in zip(ours.by_epoch, alone.by_epoch, strict=True):
            near(mine, its)
    return together


def near(ours: Tensors, alone: Tensors) -> None:
    assert list(ours) == list(alone)
    for name in alone:
        torch.testing.assert_close(ours[name], alone[name], rtol=0, atol=NEAR)


@pytest.mark.parametrize("inputs", [STILL, MOVING], ids=["still", "moving"])
@pytest.mark.parametrize("what", ["shared", "own"])
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
def test_a_stack_is_each_client_alone(what: str, plan: Plan, inputs: Inputs) -> None:
    trained = check(
        carries(what), VIEWS, TrainingSetup(plan=plan, stage=STAGE, inputs=inputs, seed=7)
    )
    assert all((t.params["body.0.weight"] != START["body.0.weight"]).any() for t in trained)


def test_clipping_is_by_each_clients_own_norm() -> None:
    """A client with gradients far above the bound does not shrink those of one below it."""
    work, plan = ClientWork(), Plan(epochs=1, batch=50, lr=1.0, clip_norm=10.0)
    wild = {k: 30 * v for k, v in START.items()}
    calm, clipped = check(
        [TrainingStart(START), TrainingStart(wild)],
        VIEWS[:2],
        TrainingSetup(plan=plan, stage=STAGE, inputs=STILL, seed=7),
        work,
    )
    free = train(
        work,
        TrainingStart(START),
        VIEWS[0],
        TrainingSetup(plan=replace(plan, clip_norm=0.0), stage=STAGE, inputs=STILL, seed=7),
    )
    moved = trees.norm(trees.sub(clipped.params, wild))
    assert moved == pytest.approx(10.0, rel=1e-6), "one step of length lr × clip_norm"
    assert trees.norm(trees.sub(calm.params, START)) < 10
    near(calm.params, free.params)


def test_a_scalar_that_is_trained_is_clipped_with_the_rest() -> None:
    """The scale of a simplex head is one number a client."""
    spec = contract.spec_for("etf", (1, 8, 8), 5, {"of": "mlp", "arguments": {"hidden": (6,)}})
    plan, start = (
        Plan(epochs=2, batch=6, lr=0.1, clip_norm=0.1),
        TrainingStart(doubles(contract.initial(spec, 0))),
    )
    trained = check(
        [start] * len(VIEWS),
        [replace(v, model=spec) for v in VIEWS],
        TrainingSetup(plan=plan, stage=STAGE, inputs=STILL, seed=7),
        ClientWork(),
    )
    assert all(t.params["head.scale"] != start.params["head.scale"] for t in trained)


def test_clients_on_common_public_data_are_each_alone() -> None:
    public = view_of(9, 17).data
    stage = replace(STAGE, view="public")
    views = [replace(view, public=public) for view in VIEWS]
    for only in (None, torch.tensor([1, 5, 6, 7, 16])):
        starts = [replace(c, only=only) for c in carries("own")]
        check(starts, views, TrainingSetup(plan=PLAN, stage=stage, inputs=STILL, seed=7))
    own = [replace(c, only=torch.arange(k + 1)) for k, c in enumerate(carries("own"))]
    check(own, views, TrainingSetup(plan=PLAN, stage=stage, inputs=STILL, seed=7))


@pytest.mark.parametrize("inputs", [STILL, MOVING], ids=["still", "moving"])
@pytest.mark.parametrize("what", ["shared", "own"])
def test_further_examples_stand_behind_the_clients_own(what: str, inputs: Inputs) -> None:
    """Of unlike numbers, of one client none; the teachers' logits cover them, and a step's index
    counts on.
    """
    more = [view_of(20 + k, n).data if n else None for k, n in enumerate((4, 0, 9, 2))]
    every = [v.data if m is None else v.data + m for v, m in zip(VIEWS, more, strict=True)]
    starts = [replace(c, examples=e) for c, e in zip(carries(what), every, strict=True)]
    setup = TrainingSetup(plan=PLAN, stage=STAGE, inputs=inputs, seed=7)
    together = check(starts, VIEWS, setup)
    views = [replace(v, data=e) for v, e in zip(VIEWS, every, strict=True)]
    for trained, same in zip(together, check(carries(what), views, setup), strict=True):
        near(trained.params, same.params)
    last = [torch.tensor([len(e) - 1]) for e in every]
    some = [replace(start, only=index) for start, index in zip(starts, last, strict=True)]
    views = [replace(v, data=e.take(index)) for v, e, index in zip(VIEWS, every, last, strict=True)]
    for trained, same in zip(
        check(some, VIEWS, setup), check(carries(what), views, setup), strict=True
    ):
        near(trained.params, same.params)


def test_each_epochs_parameters_are_kept_for_each_client() -> None:
    trained = check(
        carries("own"),
        VIEWS,
        TrainingSetup(plan=PLAN, stage=STAGE, inputs=STILL, seed=7, by_epoch=True),
    )
    assert [len(t.by_epoch) for t in trained] == [2, 2, 2, 2]


def test_no_epochs_train_nothing() -> None:
    for trained in check(
        carries("shared"),
        VIEWS,
        TrainingSetup(plan=Plan(epochs=0), stage=STAGE, inputs=STILL, seed=7),
    ):
        near(trained.params, START)


def test_a_short_batch_is_padded_with_what_has_no_weight() -> None:
    stack = Stack(
        carries("shared"), VIEWS, TrainingSetup(plan=PLAN, stage=STAGE, inputs=STILL, seed=7)
    )
    seen = [list[int]() for _ in SIZES]
    for batch in stack.batches():
        inputs = stack.step_inputs(batch)
        images, labels = inputs.x, inputs.y
        assert images.shape[:2] == labels.shape == batch.positions.shape == (len(SIZES), 6)
        assert batch.mask is not None
        for k, n in enumerate(batch.counts):
            # one that has finished is put back
            weights = [1.0] * n + [0.0] * (6 - n) if n else [1.0] * 6
            assert batch.mask[k].tolist() == weights
            assert labels[k].tolist() == VIEWS[k].data.labels[batch.positions[k]].tolist()
            seen[k] += batch.positions[k, :n].tolist()
    assert [sorted(s) for s in seen] == [sorted([*range(n), *range(n)]) for n in SIZES]


@pytest.mark.parametrize(("what", "expected"), [("shared", [31]), ("own", [3, 20, 7, 1])])
def test_a_teacher_that_all_share_is_run_once_over_the_data_and_an_own_one_on_its_clients(
    what: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    teachers = [carry.teachers["t"] for carry in carries(what)]
    plainly = [
        ModelPasses(STUDENT, STILL).logits(t, v.data) for t, v in zip(teachers, VIEWS, strict=True)
    ]
    passes: list[int] = []
    forward = contract.forward

    def counted(module: Any, params: Tensors, x: Tensor) -> Tensor:
        passes.append(len(x))
        return forward(module, params, x)

    monkeypatch.setattr(contract, "forward", counted)
    stack = Stack(carries(what), VIEWS, TrainingSetup(plan=PLAN, stage=STAGE, inputs=STILL, seed=7))
    table = stack.teacher_table("t", "logits")
    assert table is not None
    assert table is stack.teacher_table("t", "logits"), "made once"
    assert passes == expected
    torch.testing.assert_close(table, torch.cat(plainly), rtol=0, atol=NEAR)


def test_what_all_clients_share_is_not_copied_and_each_finds_its_own_again() -> None:
    starts = carries("own")
    stacked = StackedStart.of(starts, torch.device("cpu"))
    assert stacked.start.teachers["all"]["body.0.weight"] is TEACHER["body.0.weight"]
    assert stacked.axes.teachers["all"]["body.0.weight"] is None
    assert stacked.start.teachers["t"]["body.0.weight"].shape[0] == len(SIZES)
    assert stacked.axes.teachers["t"]["body.0.weight"] == 0
    for k, carry in enumerate(starts):
        own = stacked.of_client(k)
        near(own.params, carry.params)
        assert own.teachers["other"][0] is OTHER
        near(own.teachers["other"][1], carry.teachers["other"][1])
        assert float(own["weight"]) == carry["weight"]


def test_a_teacher_has_one_form_for_the_engines() -> None:
    both = frozen_teachers({"same": TEACHER, "another": other(0)}, STUDENT)
    assert (both["same"].spec, both["another"].spec) == (STUDENT, OTHER)
    assert both["same"].params is TEACHER


@pytest.mark.parametrize(
    ("one", "another"),
    [
        ({}, {"params": {**START, "more": torch.zeros(1)}}),
        ({}, {"params": {k: v.float() for k, v in START.items()}}),
        ({"teachers": {"t": TEACHER}}, {"teachers": {}}),
        ({"teachers": {"t": (STUDENT, TEACHER)}}, {"teachers": {"t": other(0)}}),
        ({"constants": {"a": 1}}, {"constants": {"a": 1.0}}),
        ({"constants": {"a": "x"}}, {"constants": {"a": "y"}}),
        ({}, {"only": torch.arange(2)}),
    ],
    ids=["names", "types", "teachers", "architectures", "numbers", "words", "only"],
)
def test_clients_whose_tensors_do_not_fit_on_each_other_have_other_structures(
    one: dict[str, Any], another: dict[str, Any]
) -> None:
    structures = Structures()
    first, second = (
        structures.of(TrainingStart(**{"params": START, **c}), VIEWS[0]) for c in (one, another)
    )
    assert first != second
    like = {"params": {k: v + 1 for k, v in START.items()}, **one}
    assert structures.of(TrainingStart(**like), VIEWS[1]) == first, "values do not matter"


def test_an_infinite_term_after_a_clients_end_is_not_in_its_loss() -> None:
    """A client that has ended repeats its first example in the following steps."""
    nothing = torch.zeros(2, 2, dtype=torch.int64)
    first = Batch(
        positions=nothing,
        rows=nothing,
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
    layer = nn.Conv2d(3, 4, **window, bias=bias).double()
    x = torch.randn(2, 5, 3, 9, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(
        2, *layer.weight.shape, generator=draw, dtype=torch.float64, requires_grad=True
    )
    biases = torch.randn(2, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    inputs = [x, weight]
    if bias:
        inputs.append(biases)

    stacked = convolved_by_products(layer, x, weight, biases if bias else None)
    alone = []
    for k in range(2):
        entries = {"weight": weight[k]}
        if bias:
            entries["bias"] = biases[k]
        alone.append(torch.func.functional_call(layer, entries, x[k]))
    torch.testing.assert_close(stacked, torch.stack(alone), rtol=0, atol=1e-12)

    upstream = torch.randn(stacked.shape, generator=draw, dtype=torch.float64)
    gradients = torch.autograd.grad(stacked, inputs, upstream)
    expected = torch.autograd.grad(torch.stack(alone), inputs, upstream)
    for gradient, value in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, value, rtol=0, atol=1e-11)
