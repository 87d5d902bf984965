"""Every client's objective against what its authors' code gives for the same tensors: one batch,
loss and gradient.

``official_numbers.toml`` has the numbers, and which file of which commit gave them. Here the engine
takes one step at a learning rate of 1 from the network ``w``, received was ``global``; so the way
it goes is the gradient.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import given
import pytest
import torch
from given import BATCH, CLASSES, COUNTS, INPUTS, WIDTH, drawn, network
from torch import Tensor

import toys
from double import NEAR, in_double
from fedstill import from_tensors
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NOTHING,
    SERVER,
    Examples,
    Payload,
    Plan,
    Reply,
    Stage,
    TrainingResult,
    TrainingStart,
    many,
)
from fedstill.core.trees import sub
from fedstill.data.dataset import Dataset
from fedstill.engines.clients import TrainingSetup
from fedstill.engines.loop import train
from fedstill.methods.fedgen import POOL
from fedstill.methods.partly_shared import PartlyShared
from fedstill.models.contract import trainable_names
from fedstill.running.preparation import Prepared, prepare

HERE = Path(__file__).parent
ENTRIES: list[dict[str, Any]] = tomllib.loads((HERE / "official_numbers.toml").read_text())[
    "number"
]
WITH_NUMBERS = [e for e in ENTRIES if "norm" in e]
DEEP = {"hidden": (given.HIDDEN, WIDTH)}
MODELS: dict[str, dict[str, Any]] = {
    "fedetf": {"name": "etf", "of": "mlp", "arguments": DEEP, "projection": CLASSES},
    "fml": {
        "name": "pair",
        "own": "mlp",
        "own_arguments": DEEP,
        "shared": "mlp",
        "shared_arguments": DEEP,
    },
    "afl": {"name": "logistic"},
}
Given = tuple[Payload, Payload]
"""What a client was sent, and what it remembers."""


@functools.cache
def table() -> Dataset:
    """Enough for a run to be prepared; what is trained on is given."""
    values, labels = drawn("table", 48, INPUTS).float(), torch.arange(48) % CLASSES
    return from_tensors(
        "given", (values, labels), (values, labels), classes=[str(c) for c in range(CLASSES)]
    )


def prepared(entry: Mapping[str, Any], **fields: object) -> Prepared:
    method, model = entry["method"], {"name": "mlp", **DEEP}
    changes: dict[str, Any] = {"partition": "iid", "topology": {"clients": 2}, "plan": {}}
    changes |= {"data": {"public": 12} if method == "fedgkd_vote" else {}}
    asked = {"name": method, **entry.get("fields", {}), **fields}
    return in_double(
        prepare(resolve(toys.toy(asked, model=MODELS.get(method, model), **changes)), table())
    )


def remembered(ready: Prepared) -> Payload:
    """A client's own network."""
    return Payload(params=network("w", shapes_of(ready.world.initial(0))))


def shapes_of(params: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {k: tuple(v.shape) for k, v in params.items()}


def votes(ready: Prepared) -> Given:
    omega = torch.softmax(-torch.tensor([0.5, 1.25, 0.75], dtype=torch.float64) / 0.5, 0)
    past = many("past", {r: network(f"past {r}") for r in (1, 2)})
    return Payload({"params": network("global"), "votes": omega, **past}), NOTHING


def drift(ready: Prepared) -> Given:
    down = Payload(params=network("global"), gradient=network("everyone"), relative_size=2.0)
    return down, Payload(drift=network("drift"), gradient=network("own"))


def prototypes(ready: Prepared) -> Given:
    seen = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    return Payload(values=drawn("prototypes", CLASSES, WIDTH), seen=seen), remembered(ready)


def pairs(ready: Prepared) -> Given:
    """What two clients say of their classes; the margin is the server's own doing."""
    method, world = ready.settings.method, ready.world
    has = {0: [1, 0, 1, 0, 1, 0], 1: [0, 1, 1, 1, 0, 1]}
    up = {
        k: Payload(means=drawn(f"means {k}", CLASSES, WIDTH), counts=torch.tensor(n))
        for k, n in has.items()
    }
    state = method.aggregate(
        method.initial_state(world),
        [Reply(k, u, 1) for k, u in up.items()],
        Stage(2, 0, "train", (0, 1)),
        world,
    )
    return method.payload_for_client(
        state, SERVER, Stage(2, 1, "prototypes", (SERVER,)), world
    ) or NOTHING, NOTHING


def heads(ready: Prepared) -> Given:
    layers = {
        k: (drawn(f"head {k} weight", CLASSES, WIDTH), drawn(f"head {k} bias", CLASSES))
        for k in (0, 1)
    }
    named = many("head", {k: {"head.weight": w, "head.bias": b} for k, (w, b) in layers.items()})
    made = ready.settings.method.initial_state(ready.world).extra["generator"]
    counts = torch.tensor([[3, 1, 4, 2, 2, 6], [1, 3, 4, 6, 2, 2]])
    return Payload({"generator": made, "counts": counts, **named}), NOTHING


def generated(ready: Prepared) -> Given:
    made = ready.settings.method.initial_state(ready.world).extra["generator"]
    return Payload(params=network("global"), generator=made, counts=torch.ones(CLASSES)), NOTHING


GIVEN: dict[str, Callable[[Prepared], Given]] = {
    "fedgkd_vote": votes,
    "feddc": drift,
    "fd": lambda ready: (
        Payload(values=drawn("class logits", CLASSES, CLASSES), seen=torch.ones(CLASSES)),
        remembered(ready),
    ),
    "fedproto": prototypes,
    "fedtgp": prototypes,
    "fedtgp prototypes": pairs,
    "fedgen": generated,
    "fedgen generate": heads,
    "ditto": lambda ready: (Payload(params=network("global")), remembered(ready)),
    "metafed": lambda ready: (
        Payload(params=network("global")),
        Payload(remembered(ready), ready=1),
    ),
}


def received(entry: Mapping[str, Any], ready: Prepared) -> Given:
    makes = GIVEN.get(f"{entry['method']} {entry.get('stage')}", GIVEN.get(entry["method"]))
    if makes is not None:
        return makes(ready)
    method, own = ready.settings.method, remembered(ready)
    if isinstance(method, PartlyShared):
        return Payload(shared=method.shared(own.params), consensus=drawn("consensus", WIDTH)), own
    return Payload(params=network("global", shapes_of(ready.world.initial(0)))), NOTHING


def with_given(entry: Mapping[str, Any], start: TrainingStart, y: Tensor) -> TrainingStart:
    """What a method would draw by itself is what its authors' code was given."""
    if entry.get("stage") == "generate":
        labels = torch.arange(BATCH) % CLASSES
        noise = (drawn("noise", BATCH, 3) + 1) / 2
        # the code's: the batch's mean for all
        omega = start["omega"].mean(1, keepdim=True).expand_as(start["omega"])
        points = Examples(torch.cat([noise, torch.eye(CLASSES)[labels]], 1), labels)
        return replace(start, examples=points, constants={**start.constants, "omega": omega})
    if entry["method"] == "fedgen":
        same = torch.zeros(CLASSES, POOL, WIDTH, dtype=torch.float64)
        same[y, torch.arange(BATCH)] = drawn("features of the label", BATCH, WIDTH)
        other, labels = drawn("features of any label", BATCH, WIDTH), torch.arange(BATCH) % CLASSES
        return replace(start, constants={"by_class": same, "shuffled": other, "labels": labels})
    return start


OF_LABEL_COUNTS = ("fedetf", "fedlc", "fedlmd", "fedlmd_tf", "fedrod", "fedrs")
"""Methods whose objective depends on the labels of all examples of a client."""


def one_step(entry: Mapping[str, Any], **fields: object) -> tuple[float, dict[str, Tensor]]:
    """The objective of the batch that is given, and its gradient, as the engine steps along it."""
    ready, name = prepared(entry, **fields), entry.get("stage", "train")
    method, world = ready.settings.method, ready.world
    stage = next(s for s in ready.settings.schedule(2, world) if s.name == name)
    x, y = given.batch(entry.get("batch", BATCH))
    view = ready.sites.view(stage.clients[0], stage)
    view = replace(view, data=Examples(x, y), counts=torch.tensor(COUNTS), validation=None)
    work = method.work(stage)
    down, memory = received(entry, ready)
    held = view
    if entry["method"] in OF_LABEL_COUNTS:
        labels = torch.arange(CLASSES).repeat_interleave(torch.tensor(COUNTS))
        held = replace(view, data=Examples(torch.zeros(len(labels), INPUTS), labels))
    carry = with_given(entry, work.begin(down, memory, held, world), y)
    start = network("w", shapes_of(carry.params)) | {
        k: torch.zeros(CLASSES).double() for k in entry.get("zero", ())
    }
    plan = Plan(epochs=1, batch=BATCH, lr=1.0)
    setup = TrainingSetup(plan=plan, stage=stage, inputs=ready.sites.inputs, seed=7)
    made = train(work, replace(carry, params=start), view, setup)
    assert made.result.steps == 1
    trained = sorted(trainable_names(carry.model or view.model) - set(entry.get("zero", ())))
    return sum(made.losses.values()), sub({k: start[k] for k in trained}, made.params)


def solved_head(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """The layer that a server solves for from what two clients send."""
    ready = prepared(entry)
    method, world, stage = (
        ready.settings.method,
        ready.world,
        ready.settings.schedule(1, ready.world)[0],
    )
    x, y = (
        torch.cat([given.batch()[0], drawn("more x", 20, INPUTS)]),
        torch.cat([given.batch()[1], torch.arange(20) % 6]),
    )
    replies = []
    for client, part in enumerate((slice(0, 14), slice(14, 32))):
        view = replace(ready.sites.view(client, stage), data=Examples(x[part], y[part]))
        work: ClientWork = method.work(stage)
        carry = work.begin(
            method.payload_for_client(method.initial_state(world), client, stage, world) or NOTHING,
            NOTHING,
            view,
            world,
        )
        replies.append(
            Reply(
                client,
                work.end({}, carry, TrainingResult(0, 0.0, {}), view, world)[0],
                len(view.data),
            )
        )
    return dict(method.aggregate(method.initial_state(world), replies, stage, world).params)


@pytest.mark.parametrize(
    "entry", WITH_NUMBERS, ids=lambda e: f"{e['method']} {e['file'].rpartition('/')[2]} {e['ran']}"
)
def test_the_loss_and_its_gradient_are_those_of_the_authors_code(entry: dict[str, Any]) -> None:
    if entry["method"] == "afl":
        loss, slope = None, solved_head(entry)
    else:
        loss, slope = one_step(entry)
    if "loss" in entry:
        assert loss == pytest.approx(entry["loss"], rel=NEAR, abs=NEAR)
    if "slope_of" in entry:
        slope = one_step(entry, **entry["slope_of"])[1]
    assert given.summed_up(slope) == pytest.approx(
        (entry["norm"], entry["along"]), rel=NEAR, abs=NEAR
    )


def test_every_entry_is_of_a_method() -> None:
    assert {entry["method"] for entry in ENTRIES} <= set(registry.names("method"))
