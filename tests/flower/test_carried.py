"""Work that brings its own network and examples, at clients and at a server without public data."""

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
class FitsLine(ClientWork):
    """Logistic regression: a network of its own on its own points, independent of the site."""

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
        assert view.model != LINE, "the site's network is not replaced"
        return Payload(line=params), Payload()


def prepared(engine: str = "serial", **changes: object) -> Prepared:
    """A toy run whose clients are measured after each epoch."""
    experiment = toys.toy(engine=engine, measure=("local", "epochs"), measure_every=1, **changes)
    return prepare(resolve(experiment), toys.blobs())


def replies(stage: Stage, engine: str = "serial", **changes: object) -> list[Reply]:
    """The replies of a stage with that work."""
    ready = prepared(engine, **changes)
    ready = replace(ready, world=replace(ready.world, plans={"train": PLAN}))
    payloads = {client: Payload() for client in stage.clients}
    return ready.engine().run(FitsLine(), stage, payloads, 7)


def fitted(stage: Stage, client: int) -> dict[str, Tensor]:
    """The same parameters with torch's own optimiser."""
    model = nn.Linear(3, 2)
    start = contract.initial(LINE, 0)
    model.load_state_dict(
        {"weight": start["head.weight"], "bias": start["head.bias"]},
    )
    sgd = torch.optim.SGD(model.parameters(), lr=PLAN.lr, momentum=PLAN.momentum)
    order = generator(seed_for(7, stage.round, stage.index, client, "order"))
    for _ in range(PLAN.epochs):
        for index in torch.randperm(20, generator=order).split(PLAN.batch):
            batch = POINTS.take(index)
            sgd.zero_grad()
            nn.functional.cross_entropy(model(batch.values), batch.labels).backward()
            sgd.step()
    return {"head.weight": model.weight.detach(), "head.bias": model.bias.detach()}


def test_the_server_trains_such_work_without_public_data() -> None:
    """Its numbers are not those of a model of the site."""
    stage = Stage(1, 0, "train", (SERVER,), "public")

    (reply,) = replies(stage)

    assert not reply.failure
    torch.testing.assert_close(dict(reply.content.tensors("line")), fitted(stage, SERVER))
    assert reply.metrics["steps"] == 9
    assert reply.metrics.keys().isdisjoint({"correct_by_class", "site_accuracy"})


@pytest.mark.parametrize("engine", ["serial", "pooled", "vectorised"])
def test_clients_do_under_every_engine_each_in_its_own_order(engine: str) -> None:
    stage = Stage(1, 0, "train", (0, 1, 2))

    for reply in replies(stage, engine, clients=toys.TOLERANT):
        assert not reply.failure
        params = dict(reply.content.tensors("line"))
        torch.testing.assert_close(params, fitted(stage, reply.client))


@dataclass(frozen=True)
class Client:
    """Client 0 in the first stage of a run."""

    ready: Prepared

    @property
    def view(self) -> View:
        """What the client sees."""
        return self.ready.sites.view(0, Stage(1, 0, "train", (0,)))

    @property
    def start(self) -> Tensors:
        """The parameters that it receives."""
        return self.ready.world.initial(0)

    def trained(self, start: TrainingStart, inputs: Inputs | None = None) -> Tensors:
        """The parameters after training from a start; with other inputs than the run's."""
        setup = TrainingSetup(
            plan=PLAN,
            stage=Stage(1, 0, "train", (0,)),
            inputs=inputs or self.ready.sites.inputs,
            seed=7,
        )
        return train(ClientWork(), start, self.view, setup).params


def test_naming_the_sites_own_network_and_data_changes_no_bit() -> None:
    client = Client(prepared())
    explicit = TrainingStart(client.start, model=client.view.model, examples=client.view.data)

    assert same_bits(client.trained(explicit), client.trained(TrainingStart(client.start)))


@pytest.mark.parametrize("names_network", [True, False])
def test_examples_are_not_augmented_if_a_network_is_named(names_network: bool) -> None:
    client = Client(prepared(data={"augment": ["flip"]}))
    augmenting = client.ready.sites.inputs
    assert augmenting.steps
    with_examples = TrainingStart(client.start, examples=client.view.data)
    inputs = augmenting
    if names_network:
        with_examples = replace(with_examples, model=client.view.model)
        inputs = Inputs(augmenting.mean, augmenting.std)

    params = client.trained(with_examples)

    expected = client.trained(TrainingStart(client.start), inputs)
    assert same_bits(params, expected)


def test_only_selects_among_the_examples() -> None:
    client = Client(prepared())
    start = contract.initial(LINE, 0)
    positions = torch.tensor([3, 1, 2])
    selecting = TrainingStart(start, model=LINE, examples=POINTS, only=positions)
    selected = TrainingStart(start, model=LINE, examples=POINTS.take(positions))

    assert same_bits(client.trained(selecting), client.trained(selected))
