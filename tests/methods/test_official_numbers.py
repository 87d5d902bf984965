"""Every client's objective against what its authors' code gives for the same tensors: one batch,
loss and gradient.

``official_numbers.toml`` has the numbers, and which file of which commit gave them. Here the engine
takes one step at a learning rate of 1 from the network ``w``; the network ``global`` was received.
So the way that the step goes is the gradient.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import official_tensors
import pytest
import torch
from official_tensors import BATCH, CLASSES, COUNTS, INPUTS, WIDTH, drawn, network, summary_of
from torch import Tensor

import toys
from double import NEAR, in_double
from fedstill import from_tensors
from fedstill.config.resolve import resolve
from fedstill.core import registry
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
    View,
    many,
)
from fedstill.core.trees import only, sub
from fedstill.data.dataset import Dataset
from fedstill.engines.clients import TrainingSetup
from fedstill.engines.loop import train
from fedstill.methods.fedgen import POOL
from fedstill.methods.partly_shared import PartlyShared
from fedstill.models.contract import trainable_names
from fedstill.running.preparation import Prepared, prepare

Entry = Mapping[str, Any]
"""An entry of ``official_numbers.toml``."""

FILE = Path(__file__).parent / "official_numbers.toml"
ENTRIES: list[Entry] = tomllib.loads(FILE.read_text(encoding="utf-8"))["number"]
WITH_NUMBERS = [entry for entry in ENTRIES if "norm" in entry]

TWO_LAYERS = {"hidden": (official_tensors.HIDDEN, WIDTH)}
NETWORKS: dict[str, dict[str, Any]] = {
    "fedetf": {"name": "etf", "of": "mlp", "arguments": TWO_LAYERS, "projection": CLASSES},
    "fml": {
        "name": "pair",
        "own": "mlp",
        "own_arguments": TWO_LAYERS,
        "shared": "mlp",
        "shared_arguments": TWO_LAYERS,
    },
    "afl": {"name": "logistic"},
}
"""By method; the others have a network of two hidden layers."""

OF_LABEL_COUNTS = ("fedetf", "fedlc", "fedlmd", "fedlmd_tf", "fedrod", "fedrs")
"""Methods whose objective depends on the labels of all examples of a client."""


@functools.cache
def table() -> Dataset:
    """Enough for a run to be prepared; training is on the authors' batch."""
    values = drawn("table", 48, INPUTS).float()
    labels = torch.arange(48) % CLASSES
    names = [str(c) for c in range(CLASSES)]
    return from_tensors("table", (values, labels), (values, labels), classes=names)


def prepared(entry: Entry, **fields: object) -> Prepared:
    """A run with the method and the fields of an entry, and some other fields."""
    name = entry["method"]
    changes: dict[str, Any] = {"partition": "iid", "topology": {"clients": 2}, "plan": {}}
    if name == "fedgkd_vote":
        changes["data"] = {"public": 12}
    changes["model"] = NETWORKS.get(name, {"name": "mlp", **TWO_LAYERS})
    method = {"name": name, **entry.get("fields", {}), **fields}
    return in_double(prepare(resolve(toys.toy(method, **changes)), table()))


def shapes_of(params: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each entry."""
    return {name: tuple(value.shape) for name, value in params.items()}


# What clients are sent, and what they remember.


@dataclass(frozen=True)
class ClientInputs:
    """What a client was sent, and what it remembers."""

    payload: Payload
    memory: Payload = NOTHING


def client_model(ready: Prepared) -> Payload:
    """The network that a client has kept."""
    return Payload(params=network("w", shapes_of(ready.world.initial(0))))


def inputs_of_fedgkd_vote(ready: Prepared) -> ClientInputs:
    """Three models, and their votes by their losses."""
    losses = torch.tensor([0.5, 1.25, 0.75], dtype=torch.float64)
    votes = torch.softmax(-losses / 0.5, 0)
    past = many("past", {1: network("past 1"), 2: network("past 2")})
    return ClientInputs(Payload({"params": network("global"), "votes": votes, **past}))


def inputs_of_feddc(ready: Prepared) -> ClientInputs:
    """Gradients of the server and the client, and the client's drift."""
    payload = Payload(params=network("global"), gradient=network("everyone"), relative_size=2.0)
    return ClientInputs(payload, Payload(drift=network("drift"), gradient=network("own")))


def inputs_of_fd(ready: Prepared) -> ClientInputs:
    """Logits of all classes."""
    logits = drawn("class logits", CLASSES, CLASSES)
    return ClientInputs(Payload(values=logits, seen=torch.ones(CLASSES)), client_model(ready))


def inputs_with_prototypes(ready: Prepared) -> ClientInputs:
    """Prototypes of four classes."""
    is_known = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    prototypes = drawn("prototypes", CLASSES, WIDTH)
    return ClientInputs(Payload(values=prototypes, seen=is_known), client_model(ready))


def inputs_of_fedtgps_server(ready: Prepared) -> ClientInputs:
    """The class means of two clients; the method itself computes the margin."""
    method = ready.settings.method
    world = ready.world
    replies = []
    for client, counts in enumerate(([1, 0, 1, 0, 1, 0], [0, 1, 1, 1, 0, 1])):
        means = drawn(f"means {client}", CLASSES, WIDTH)
        replies.append(Reply(client, Payload(means=means, counts=torch.tensor(counts)), 1))
    train_stage = Stage(2, 0, "train", (0, 1))
    state = method.aggregate(method.initial_state(world), replies, train_stage, world)
    stage = Stage(2, 1, "prototypes", (SERVER,))
    payload = method.payload_for_client(state, SERVER, stage, world)
    assert payload is not None
    return ClientInputs(payload)


def initial_generator(ready: Prepared) -> Mapping[str, Tensor]:
    """FedGen's generator before round 1."""
    return ready.settings.method.initial_state(ready.world).extra["generator"]


def inputs_of_fedgens_server(ready: Prepared) -> ClientInputs:
    """The heads and label counts of two clients."""
    heads = {}
    for client in (0, 1):
        heads[client] = {
            "head.weight": drawn(f"head {client} weight", CLASSES, WIDTH),
            "head.bias": drawn(f"head {client} bias", CLASSES),
        }
    counts = torch.tensor([[3, 1, 4, 2, 2, 6], [1, 3, 4, 6, 2, 2]])
    content = {"generator": initial_generator(ready), "counts": counts, **many("head", heads)}
    return ClientInputs(Payload(content))


def inputs_of_fedgen(ready: Prepared) -> ClientInputs:
    """The global model and the generator."""
    payload = Payload(
        params=network("global"), generator=initial_generator(ready), counts=torch.ones(CLASSES)
    )
    return ClientInputs(payload)


def inputs_of_ditto(ready: Prepared) -> ClientInputs:
    """The global model and the client's."""
    return ClientInputs(Payload(params=network("global")), client_model(ready))


def inputs_of_metafed(ready: Prepared) -> ClientInputs:
    """The predecessor's model, and the client's, which it keeps."""
    memory = Payload(client_model(ready), ready=1)
    return ClientInputs(Payload(params=network("global")), memory)


INPUTS_BY_METHOD: dict[str, Callable[[Prepared], ClientInputs]] = {
    "fedgkd_vote": inputs_of_fedgkd_vote,
    "feddc": inputs_of_feddc,
    "fd": inputs_of_fd,
    "fedproto": inputs_with_prototypes,
    "fedtgp": inputs_with_prototypes,
    "fedtgp prototypes": inputs_of_fedtgps_server,
    "fedgen": inputs_of_fedgen,
    "fedgen generate": inputs_of_fedgens_server,
    "ditto": inputs_of_ditto,
    "metafed": inputs_of_metafed,
}
"""By method, or by method and stage."""


def client_inputs(entry: Entry, ready: Prepared) -> ClientInputs:
    """What the client of an entry was sent, and what it remembers."""
    name = entry["method"]
    for key in (f"{name} {entry.get('stage')}", name):
        if key in INPUTS_BY_METHOD:
            return INPUTS_BY_METHOD[key](ready)
    method = ready.settings.method
    if isinstance(method, PartlyShared):
        memory = client_model(ready)
        shared = method.shared(memory.params)
        consensus = drawn("consensus", WIDTH)
        return ClientInputs(Payload(shared=shared, consensus=consensus), memory)
    params = network("global", shapes_of(ready.world.initial(0)))
    return ClientInputs(Payload(params=params))


# One step.


def with_official_draws(entry: Entry, start: TrainingStart, y: Tensor) -> TrainingStart:
    """The start, in which what a method draws by itself is what its authors' code was given."""
    labels = torch.arange(BATCH) % CLASSES
    if entry.get("stage") == "generate":
        noise = (drawn("noise", BATCH, 3) + 1) / 2
        examples = Examples(torch.cat([noise, torch.eye(CLASSES)[labels]], 1), labels)
        # The authors' code has the batch's mean for all examples.
        omega = start["omega"].mean(1, keepdim=True).expand_as(start["omega"])
        return replace(start, examples=examples, constants={**start.constants, "omega": omega})
    if entry["method"] == "fedgen":
        by_class = torch.zeros(CLASSES, POOL, WIDTH, dtype=torch.float64)
        by_class[y, torch.arange(BATCH)] = drawn("features of the label", BATCH, WIDTH)
        shuffled = drawn("features of any label", BATCH, WIDTH)
        constants = {"by_class": by_class, "shuffled": shuffled, "labels": labels}
        return replace(start, constants=constants)
    return start


@dataclass(frozen=True)
class Step:
    """The objective of the authors' batch, and its gradient, as the engine steps along it."""

    loss: float
    gradients: dict[str, Tensor]


def view_with(view: View, x: Tensor, y: Tensor) -> View:
    """A client whose training examples are these, and whose label counts are the authors'."""
    counts = torch.tensor(COUNTS)
    return replace(view, data=Examples(x, y), counts=counts, validation=None)


def one_step(entry: Entry, **fields: object) -> Step:
    """Take one step on the batch, with some other fields of the method."""
    ready = prepared(entry, **fields)
    world = ready.world
    name = entry.get("stage", "train")
    stage = next(stage for stage in ready.settings.schedule(2, world) if stage.name == name)
    work = ready.settings.method.work(stage)
    x, y = official_tensors.batch(entry.get("batch", BATCH))
    view = view_with(ready.sites.view(stage.clients[0], stage), x, y)
    view_at_start = view
    if entry["method"] in OF_LABEL_COUNTS:
        labels = torch.arange(CLASSES).repeat_interleave(torch.tensor(COUNTS))
        examples = Examples(torch.zeros(len(labels), INPUTS), labels)
        view_at_start = replace(view, data=examples)

    inputs = client_inputs(entry, ready)
    start = work.begin(inputs.payload, inputs.memory, view_at_start, world)
    start = with_official_draws(entry, start, y)
    params = network("w", shapes_of(start.params))
    missing = entry.get("zero", ())  # entries that the authors' code lacks
    for key in missing:
        params[key] = torch.zeros(CLASSES, dtype=torch.float64)
    plan = Plan(epochs=1, batch=BATCH, lr=1.0)
    setup = TrainingSetup(plan=plan, stage=stage, inputs=ready.sites.inputs, seed=7)
    trained = train(work, replace(start, params=params), view, setup)

    assert trained.result.steps == 1
    names = trainable_names(start.model or view.model) - set(missing)
    gradients = sub(only(params, sorted(names)), trained.params)
    return Step(sum(trained.losses.values()), gradients)


def solved_head(entry: Entry) -> dict[str, Tensor]:
    """The layer that a server solves for from what two clients send."""
    ready = prepared(entry)
    method = ready.settings.method
    world = ready.world
    stage = ready.settings.schedule(1, world)[0]
    state = method.initial_state(world)
    batch = official_tensors.batch()
    x = torch.cat([batch.x, drawn("more x", 20, INPUTS)])
    y = torch.cat([batch.y, torch.arange(20) % 6])

    replies = []
    for client, rows in enumerate((slice(0, 14), slice(14, 32))):
        view = replace(ready.sites.view(client, stage), data=Examples(x[rows], y[rows]))
        work = method.work(stage)
        payload = method.payload_for_client(state, client, stage, world) or NOTHING
        start = work.begin(payload, NOTHING, view, world)
        content, _ = work.end({}, start, TrainingResult(0, 0.0, {}), view, world)
        replies.append(Reply(client, content, len(view.data)))
    return dict(method.aggregate(state, replies, stage, world).params)


def entry_id(entry: Entry) -> str:
    """The method, and what of which file was executed."""
    file_name = entry["file"].rpartition("/")[2]
    return f"{entry['method']} {file_name} {entry['ran']}"


@pytest.mark.parametrize("entry", WITH_NUMBERS, ids=entry_id)
def test_the_loss_and_its_gradient_are_those_of_the_authors_code(entry: Entry) -> None:
    """Of AFL, which trains nothing, the layer is compared."""
    if entry["method"] == "afl":
        gradients = solved_head(entry)
    else:
        step = one_step(entry)
        gradients = step.gradients
        if "loss" in entry:
            assert step.loss == pytest.approx(entry["loss"], rel=NEAR, abs=NEAR)
    if "slope_of" in entry:
        gradients = one_step(entry, **entry["slope_of"]).gradients

    expected = (entry["norm"], entry["along"])
    assert summary_of(gradients) == pytest.approx(expected, rel=NEAR, abs=NEAR)


def test_every_entry_is_of_a_method() -> None:
    assert {entry["method"] for entry in ENTRIES} <= set(registry.names("method"))
