"""What a client trains that is not its site's: another network, on given tensors; at the server
without public data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import toys
from fedstill.config.resolve import resolve
from fedstill.core.keys import generator, seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    SERVER,
    Examples,
    ModelSpec,
    Payload,
    Plan,
    Reply,
    Stage,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.trees import same_bits
from fedstill.data.inputs import Inputs
from fedstill.engines.clients import TrainingSetup
from fedstill.engines.loop import train
from fedstill.models import contract
from fedstill.running.preparation import Prepared, prepare

pytestmark = pytest.mark.usefixtures("with_threads")

LINE = ModelSpec("logistic", (3,), 2)
PLAN = Plan(epochs=3, batch=8, lr=0.1, momentum=0.9)
POINTS = Examples(
    torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2
)


@dataclass(frozen=True)
class FitsALine(ClientWork):
    """Linear regression to classes, of its own network on its own points, whatever the site has."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return TrainingStart(contract.initial(LINE, 0), model=LINE, examples=POINTS)

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        assert view.model != LINE, "what the site has is as it was"
        return Payload(line=params), Payload()


def ready(engine: str = "serial", **changes: object) -> Prepared:
    return prepare(
        resolve(toys.toy(engine=engine, measure=("local", "epochs"), measure_every=1, **changes)),
        toys.blobs(),
    )


def replies(stage: Stage, engine: str = "serial", **changes: object) -> list[Reply]:
    made = ready(engine, **changes)
    payloads = {c: Payload() for c in stage.clients}
    return (
        replace(made, world=replace(made.world, plans={"train": PLAN}))
        .engine()
        .run(FitsALine(), stage, payloads, 7)
    )


def fitted(stage: Stage, client: int) -> dict[str, Tensor]:
    """The same with torch's own optimiser."""
    model = nn.Linear(3, 2)
    start = contract.initial(LINE, 0)
    model.load_state_dict({k.removeprefix("head."): v for k, v in start.items()})
    sgd = torch.optim.SGD(model.parameters(), lr=PLAN.lr, momentum=PLAN.momentum)
    order = generator(seed_for(7, stage.round, stage.index, client, "order"))
    for _ in range(PLAN.epochs):
        for index in torch.randperm(20, generator=order).split(PLAN.batch):
            sgd.zero_grad()
            nn.functional.cross_entropy(
                model(POINTS.values[index]), POINTS.labels[index]
            ).backward()
            sgd.step()
    return {f"head.{k}": v.detach() for k, v in model.named_parameters()}


def test_the_server_trains_something_small_without_public_data() -> None:
    stage = Stage(1, 0, "train", (SERVER,), "public")
    (reply,) = replies(stage)
    assert not reply.failure
    torch.testing.assert_close(dict(reply.content.tensors("line")), fitted(stage, SERVER))
    assert reply.metrics["steps"] == 9
    assert not {"correct_by_class", "site_accuracy"} & reply.metrics.keys(), (
        "it is no model of the site"
    )


@pytest.mark.parametrize("engine", ["serial", "pooled", "vectorised"])
def test_clients_do_under_every_engine_each_in_its_own_order(engine: str) -> None:
    stage = Stage(1, 0, "train", (0, 1, 2))
    for reply in replies(stage, engine, clients=toys.TOLERANT):
        assert not reply.failure
        torch.testing.assert_close(dict(reply.content.tensors("line")), fitted(stage, reply.client))


def test_the_sites_own_network_and_data_said_aloud_change_no_bit() -> None:
    made = ready()
    stage = Stage(1, 0, "train", (0,))
    view, start = made.sites.view(0, stage), made.world.initial(0)
    setup = TrainingSetup(plan=PLAN, stage=stage, inputs=made.sites.inputs, seed=7)
    silent = train(ClientWork(), TrainingStart(start), view, setup)
    aloud = TrainingStart(start, model=view.model, examples=view.data)
    assert same_bits(silent.params, train(ClientWork(), aloud, view, setup).params)


@pytest.mark.parametrize("named", [True, False])
def test_given_examples_are_taken_as_they_are_where_a_network_is_named(named: bool) -> None:
    made = ready(data={"augment": ["flip"]})
    stage = Stage(1, 0, "train", (0,))
    view, start = made.sites.view(0, stage), made.world.initial(0)
    plain = Inputs(made.sites.inputs.mean, made.sites.inputs.std)
    assert made.sites.inputs.steps
    setup = TrainingSetup(plan=PLAN, stage=stage, inputs=made.sites.inputs, seed=7)
    carry = TrainingStart(start, examples=view.data, model=view.model if named else None)
    given = train(ClientWork(), carry, view, setup)
    inputs = plain if named else made.sites.inputs
    same = train(ClientWork(), TrainingStart(start), view, replace(setup, inputs=inputs))
    assert same_bits(given.params, same.params)


def test_only_says_which_of_the_given_examples() -> None:
    made = ready()
    stage, some = Stage(1, 0, "train", (0,)), torch.tensor([3, 1, 2])
    view, start = made.sites.view(0, stage), contract.initial(LINE, 0)
    few = TrainingStart(start, model=LINE, examples=POINTS, only=some)
    same = TrainingStart(start, model=LINE, examples=POINTS.take(some))
    setup = TrainingSetup(plan=PLAN, stage=stage, inputs=made.sites.inputs, seed=7)
    trained = [train(ClientWork(), carry, view, setup).params for carry in (few, same)]
    assert same_bits(*trained)
