"""Small data and experiments, and a toy method for each topology."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedstill.config.experiment import Experiment
from fedstill.core.capabilities import Need
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    NOTHING,
    SERVER,
    Payload,
    Plan,
    Reply,
    Stage,
    State,
    Step,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
    many,
)
from fedstill.core.registry import lookup, method, register
from fedstill.core.trees import dtype_of, sub, zeros_like
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors
from fedstill.losses import cross_entropy, kd
from fedstill.models.predictors import predictor

CLASSES = 5

SIDE = 4
"""The height and width of the images."""

THREADS = int(os.environ.get("FEDSTILL_TEST_THREADS", "1"))
"""Torch threads in tests and in their runs; ``make grid`` varies them."""
DEVICE = os.environ.get("FEDSTILL_TEST_DEVICE", "cpu")
"""Where the toy experiments train; with ``cuda`` the suite is a test of that device."""

SHORT = Plan(epochs=2, batch=10, lr=0.1, momentum=0.9)

SMALL = """
rounds = 2
method = "fedntd"
[data]
train_size = 300
test_size = 60
[topology]
clients = 6
sampled = 3
[plan]
epochs = 1
"""
"""A config that the commands run in seconds."""


def blobs(seed: int = 0, size: int = 300) -> Dataset:
    """Five Gaussian classes as one-channel images of 4 × 4."""
    return blobs_of(SIDE, seed, size)


def blobs_of(side: int, seed: int = 0, size: int = 300) -> Dataset:
    """Five Gaussian classes as one-channel images of side × side."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, side * side, generator=draw)

    def images(count: int) -> tuple[Tensor, Tensor]:
        """Images and their labels."""
        labels = torch.arange(count) % CLASSES
        values = centres[labels] + 0.7 * torch.randn(count, side * side, generator=draw)
        pixels = (128 + 45 * values).clamp(0, 255).to(torch.uint8)
        return pixels.reshape(count, 1, side, side), labels

    names = [f"class {number}" for number in range(CLASSES)]
    return from_tensors("blobs", images(size), images(100), classes=names)


SMALLER: dict[str, object] = {
    "analytic": {"name": "analytic", "width": 40},
    "fedgen": {"name": "fedgen", "samples": 320},
}
"""Methods whose defaults compute for long, by name, with smaller fields."""


def toy(method: object = "fedavg", **changes: object) -> Experiment:
    """A small experiment on blobs: six clients, three rounds.

    Its engine has the bits of the serial engine; ``auto`` would stack these clients.
    """
    if isinstance(method, str):
        method = SMALLER.get(method, method)
    values: dict[str, object] = {
        "rounds": 3,
        "seed": 7,
        "engine": "pooled",
        "threads": (THREADS, THREADS),
        "device": DEVICE,
        "reuse": False,
        "measure_every": 2,
        "model": {"name": "mlp", "hidden": (8,)},
        "method": method,
        "partition": {"kind": "dirichlet", "alpha": 1.0, "min_size": 4},
        "topology": {"clients": 6, "sampled": 4},
        "plan": {"epochs": 2, "batch": 20, "lr": 0.2},
    }
    return Experiment(**{**values, **changes})  # type: ignore[arg-type]


def stopping_early(method: object = "fedavg", **changes: object) -> Experiment:
    """A run whose best round is kept by held-out data, and that stops four rounds after it."""
    values: dict[str, object] = {
        "rounds": 20,
        "stop": {"patience": 4},
        "plan": {"epochs": 1, "batch": 20, "lr": 0.5, "validation": 0.2},
    }
    return toy(method, **{**values, **changes})


def asking_again(**changes: object) -> Experiment:
    """QKT with queries that clients raise in the run, twice, the second time with more of their
    data.
    """
    query = {
        "draw": "all",
        "by": ["lack", "accuracy"],
        "fewer_than": 3,
        "accuracy_under": 0.9,
        "again": "mixed",
        "data_at_first": 0.5,
    }
    values: dict[str, object] = {
        "rounds": 2,
        "topology": {"clients": 6},
        "query": query,
        "plan": {"epochs": 3, "batch": 10, "lr": 0.05, "validation": 0.2},
    }
    return toy("qkt", **{**values, **changes})


TOLERANT = {"failures": "tolerate"}
"""The table ``[clients]`` of a run that leaves out clients that fail, as a federation of machines
does.
"""


def on_simplex(of: str = "mlp", **arguments: object) -> dict[str, object]:
    """A network with a simplex as its head."""
    return {"name": "etf", "of": of, "arguments": arguments or {"hidden": (8,)}}


def two_networks(own: str = "mlp", **arguments: object) -> dict[str, object]:
    """A client's own network and a shared one."""
    if own == "mlp" and not arguments:
        arguments = {"hidden": (6,)}
    return {
        "name": "pair",
        "own": own,
        "own_arguments": arguments,
        "shared": "mlp",
        "shared_arguments": {"hidden": (8,)},
    }


def has(package: str) -> bool:
    """Whether an outer package of fedstill is installed; ``pytest --block PACKAGE`` blocks one."""
    try:
        return find_spec(f"fedstill.{package}") is not None
    except ModuleNotFoundError:
        return False


def suited(name: str) -> dict[str, object]:
    """The settings that a toy experiment with a method needs: one round among peers, public data,
    queries, a network of its kind.
    """
    built = lookup("method", name).build()
    needs = built.requires()
    settings: dict[str, object] = {
        "rounds": 3,
        "topology": {"clients": 6, "sampled": 4},
        "data": {"public": 0},
    }
    if built.topology == "peer_to_peer":
        settings |= {"rounds": 1, "topology": {"clients": 6}}
        # Without queries, CLUE and QKT fit the clients' models and do nothing more.
        if has("querying") or name.startswith(("clue", "qkt")):
            settings["query"] = {"draw": "single", "fewer_than": 5}
    if Need.PUBLIC_DATA in needs:
        settings["data"] = {"public": PUBLIC}
    if Need.ETF in needs:
        settings["model"] = on_simplex()
    if name == "fot":  # it protects layers below the head
        settings["model"] = {"name": "mlp", "hidden": (8,)}
    if Need.PAIR in needs:
        settings["model"] = two_networks()
    return settings


@register("model", "toy_batchnorm")
class BatchNormed(nn.Module):
    """A body with batch normalisation, whose running statistics must survive averaging, saving and
    resuming.
    """

    def __init__(self, input_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(input_shape[0], 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(4 * input_shape[1] * input_shape[2], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@method("toy_chain")
@dataclass(frozen=True)
class Chain(Method):
    """A chain in which the importance of parameters travels with the model. Clients count how often
    they acted.
    """

    topology: ClassVar[str] = "sequential"
    plans: ClassVar[dict[str, Plan]] = {"train": SHORT}

    def initial_state(self, world: World) -> State:
        start = State(params=world.initial(SERVER))
        return start.next(importance=zeros_like(start.params))

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        return Payload(params=state.params, importance=state.extra.tensors("importance"))

    def work(self, stage: Stage) -> ClientWork:
        return ChainWork()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(params=world.initial(client), importance=world.initial(client), visits=0)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        (reply,) = replies
        return state.next(
            params=reply.content.params, importance=reply.content.tensors("importance")
        )


class ChainWork(ClientWork):
    """Training with a penalty on changes of important parameters."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        visits = 0
        if client_state:
            visits = int(client_state.number("visits"))
        return TrainingStart(
            payload.params,
            trace=payload.tensors("importance"),
            constants={"anchor": payload.params, "visits": visits},
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        penalties = []
        for name, importance in start.trace.items():
            change = step.params[name] - start["anchor"][name]
            penalties.append((importance * change**2).sum())
        penalty = torch.as_tensor(sum(penalties))
        return {"ce": cross_entropy(step.logits(), step.y), "pull": 0.1 * penalty}

    def after_step(
        self, before: Tensors, grads: Tensors, after: Tensors, trace: Tensors, start: TrainingStart
    ) -> tuple[Tensors, Tensors]:
        moved = sub(after, before)
        return after, {k: trace[k] + (grads[k] * moved[k]).abs() for k in trace}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        visits = start["visits"] + 1
        content = Payload(params=params, importance=result.trace, visits=visits)
        return content, Payload(visits=visits)


@method("toy_logits")
@dataclass(frozen=True)
class Logits(Method):
    """Public logits: clients of any architecture keep their models, and the server learns from the
    mean of their logits.
    """

    topology: ClassVar[str] = "public_logits"
    stages: ClassVar[frozenset[str]] = frozenset({"local", "teach_server", "distil"})
    needs: ClassVar[Need] = Need.PUBLIC_DATA | Need.LABEL_COUNTS
    plans: ClassVar[dict[str, Plan]] = {"local": SHORT, "teach_server": SHORT, "distil": SHORT}

    def initial_state(self, world: World) -> State:
        return State(params=world.initial(SERVER))

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        if stage.name == "local":
            return Payload()
        mean = state.extra.tensor("mean")
        if client == SERVER:
            return Payload(mean=mean, params=state.params)
        return Payload(mean=mean)

    def work(self, stage: Stage) -> ClientWork:
        return LogitsWork(stage.name)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name == "local":
            dtype = dtype_of(world.initial(client))
            return Payload(logits=torch.zeros(PUBLIC, world.classes, dtype=dtype))
        if client == SERVER:
            return Payload(params=world.initial(SERVER))
        return Payload()

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == "local":
            logits = torch.stack([reply.content.tensor("logits") for reply in replies])
            return state.next(mean=logits.mean(0))
        if stage.name == "teach_server":
            return state.next(params=replies[0].content.params)
        return state


PUBLIC = 50
"""The number of public examples."""


@dataclass(frozen=True)
class LogitsWork(ClientWork):
    """Local training, or distillation from mean logits."""

    stage: str

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        params = world.initial(view.client)
        if "params" in client_state:
            params = client_state.params
        if view.client == SERVER:
            params = payload.params
        return TrainingStart(params, constants={"mean": payload.get("mean")})

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        if self.stage == "local":
            return super().terms(step, start)
        return {"kd": kd(step.logits(), start["mean"][step.index])}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        if self.stage == "teach_server":
            return Payload(params=params), NOTHING
        content = Payload()
        if self.stage == "local":
            content = Payload(logits=view.logits(params, "public"))
        return content, Payload(params=params)


@method("toy_peers")
@dataclass(frozen=True)
class Peers(Method):
    """Peer to peer: fit alone, learn from all peers' models, refine the head only."""

    topology: ClassVar[str] = "peer_to_peer"
    stages: ClassVar[frozenset[str]] = frozenset({"fit", "transfer", "refine"})
    needs: ClassVar[Need] = Need.HEAD
    plans: ClassVar[dict[str, Plan]] = {"fit": SHORT, "transfer": SHORT, "refine": SHORT}

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        if stage.name == "fit":
            return Payload(params=world.initial(client))
        models = state.extra.many("model")
        if client not in models:
            return None
        peers = {}
        if stage.name == "transfer":
            peers = {peer: params for peer, params in models.items() if peer != client}
        return Payload({"params": models[client], **many("peer", peers)})

    def work(self, stage: Stage) -> ClientWork:
        return PeersWork(stage.name)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        return state.next(**many("model", {r.client: r.content.params for r in replies}))

    def predictors(self, state: State, world: World) -> dict[str, object]:  # type: ignore[override]
        models = state.extra.many("model") or {0: world.initial(0)}
        predictors = [predictor(world.model(client), params) for client, params in models.items()]

        def mean_probabilities(x: Tensor) -> Tensor:
            return torch.stack([predict(x).softmax(1) for predict in predictors]).mean(0)

        return {"ensemble": mean_probabilities}


@dataclass(frozen=True)
class PeersWork(ClientWork):
    """Local training, with the peers' models as teachers if there are any."""

    stage: str

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        peers = payload.many("peer")
        teachers = {str(peer): (world.model(peer), params) for peer, params in peers.items()}
        return TrainingStart(payload.params, teachers=teachers)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        terms = super().terms(step, start)
        for name in start.teachers:
            terms[f"peer {name}"] = 0.1 * kd(step.logits(), step.teacher(name))
        return terms

    def trainable(self, name: str) -> bool:
        return self.stage != "refine" or name.startswith("head.")


NOBODY = -9
"""The number of no client."""


@method("toy_failing")
@dataclass(frozen=True)
class Failing(Method):
    """Averaging in which one client (``who``) fails or sends a bad reply (``how``), from round 2
    on.
    """

    plans: ClassVar[dict[str, Plan]] = {"train": SHORT}
    who: int = 0
    how: str = "raise"

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        if self.how == "absent" and client == self.who and stage.round > 1:
            return None
        return super().payload_for_client(state, client, stage, world)

    def work(self, stage: Stage) -> ClientWork:
        client = NOBODY
        if stage.round > 1:
            client = self.who
        return FailingWork(client, self.how)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(params=world.initial(client), seen=0)


@dataclass(frozen=True)
class FailingWork(ClientWork):
    """Local training that counts rounds, and the bad reply of one client."""

    who: int
    how: str

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        seen = 0
        if client_state:
            seen = int(client_state.number("seen"))
        return TrainingStart(payload.params, constants={"seen": seen})

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        seen = start["seen"] + 1
        content = Payload(params=params, seen=seen)
        if view.client == self.who:
            content = self.spoiled(content)
        return content, Payload(seen=seen)

    def spoiled(self, content: Payload) -> Payload:
        """The content with the fault."""
        params = dict(content.params)
        name = next(iter(params))
        match self.how:
            case "raise":
                raise RuntimeError("the disk of this site is gone")
            case "nan":
                params[name] = params[name] * float("nan")
            case "shape":
                params[name] = params[name][:1]
            case "type":
                params[name] = params[name].double()
            case "huge":
                params = {k: v * 1000 for k, v in params.items()}
            case "extra":
                return Payload(content, more=1)
            case "missing":
                del params[name]
            case "sparse":
                params[name] = params[name].to_sparse()
        return Payload(content, params=params)


@method("toy_gated")
@dataclass(frozen=True)
class Gated(Method):
    """Averaging in which clients wait in round 1 until a folder has a file ``open``. Without a
    folder, they do not wait.
    """

    plans: ClassVar[dict[str, Plan]] = {"train": SHORT}
    folder: str = ""

    def work(self, stage: Stage) -> ClientWork:
        return GatedWork(stage.round, self.folder)


@dataclass(frozen=True)
class GatedWork(ClientWork):
    """A client that waits in round 1; its file in ``folder`` shows that it does."""

    round: int
    folder: str

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        if self.folder and self.round == 1:
            folder = Path(self.folder)
            (folder / f"client{view.client}").touch()
            while not (folder / "open").exists():
                time.sleep(0.1)
        return Payload(params=params), NOTHING


@method("toy_troubled")
@dataclass(frozen=True)
class Troubled(Method):
    """Averaging among three clients, two of which fail in different ways in rounds 1 and 2."""

    plans: ClassVar[dict[str, Plan]] = {"train": SHORT}
    gate: str = ""

    def work(self, stage: Stage) -> ClientWork:
        return TroubledWork(stage.round, self.gate)


@dataclass(frozen=True)
class TroubledWork(ClientWork):
    """Client 1 raises, then sends NaN. Client 2 waits for a file ``gate``, then sends too much."""

    round: int
    gate: str

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        match self.round, view.client:
            case 1, 1:
                raise RuntimeError("the disk of this site is gone")
            case 1, 2:
                while not Path(self.gate).exists():
                    time.sleep(0.5)
            case 2, 1:
                params = {k: v * float("nan") for k, v in params.items()}
            case 2, 2:
                return Payload(params=params, more=torch.zeros(1 << 19)), NOTHING
        return Payload(params=params), NOTHING
