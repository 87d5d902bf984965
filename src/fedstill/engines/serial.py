"""The serial engine, the reference: one client after another, in this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedstill.data.inputs import Inputs
from fedstill.engines.allocator import keep_freed
from fedstill.engines.loop import Trained, train
from fedstill.engines.memory import Memory
from fedstill.engines.passes import correct_by_class
from fedstill.engines.precision import Precision, set_products
from fedstill.engines.reuse import KeptReplies, examples_digest, key_of
from fedstill.errors import CorruptFile, FedstillError
from fedstill.files import digest
from fedstill.fitting import FIT
from fedstill.keys import seed_for
from fedstill.models.contract import predictor
from fedstill.records import NOTHING, SERVER, Carry, Examples, Payload, Ran, Reply, Stage, Tensors, View, World
from fedstill.wire.codec import encode
from fedstill.wire.privacy import Privacy
from fedstill.work import ClientWork

log = logging.getLogger("fedstill.engine")


class Sites(Protocol):
    """Where the data are: one view for each client and stage."""

    @property
    def inputs(self) -> Inputs: ...

    @property
    def public(self) -> Examples | None:
        """The public set with its labels, which only measures may look at."""

    @property
    def common_test(self) -> Examples | None:
        """The test set on which, in a simulation, local models are measured."""

    def view(self, client: int, stage: Stage) -> View:
        """What a client sees in a stage."""

    def size(self, client: int) -> int:
        """About how many examples a client has: only the order in which clients begin depends on it."""


@dataclass(frozen=True)
class Begun:
    """A client that has read what it was sent: what it sees, what it starts with, and the seconds that took."""

    view: View
    carry: Carry
    seconds: float


@dataclass
class SerialEngine:
    """Runs the clients of a stage in the order of the schedule.

    ``threads``: torch threads in a stage of many clients, and in one of a single client or a stack of them; part of a
    run's definition, because the last bit of a sum depends on them. ``measured``: rounds in which local models are
    evaluated, in float32 whatever the ``precision`` of training is; if there are any, models that clients fit alone are
    evaluated in whichever round they are. ``kept``: replies that other runs have kept, for the stages that allow it.
    ``measures``: by what (``local``: on the common test set; ``epochs``: so after every epoch; ``private_public``: on
    held-out and public data).
    ``privacy``: what is done to logits before they leave a client.
    """

    world: World
    sites: Sites
    memory: Memory = field(default_factory=Memory)
    threads: tuple[int, int] = (1, 1)
    measured: frozenset[int] = frozenset()
    precision: Precision = "fp32"
    kept: KeptReplies | None = None
    measures: tuple[str, ...] = ("local",)
    privacy: Privacy = field(default_factory=Privacy)

    def run(self, work: ClientWork, stage: Stage, downs: Mapping[int, Payload], seed: int) -> list[Reply]:
        """The replies of the clients that were sent something; an exception in a client becomes its reply's failure.

        Raises CorruptFile for a damaged memory: to go on without that client would give other bits than before.
        """
        self._set_up(stage)
        return [self._reply(work, stage, client, downs[client], seed) for client in stage.clients if client in downs]

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what these clients remember of a stage."""
        self.memory.commit(stage, clients)

    def close(self) -> None:
        """Nothing to end."""

    def _set_up(self, stage: Stage) -> None:
        keep_freed()
        torch.set_num_threads(self.threads[1] if len(stage.clients) == 1 else self.threads[0])
        torch.backends.cudnn.deterministic = True
        set_products(self.precision)

    def _reply(self, work: ClientWork, stage: Stage, client: int, down: Payload, seed: int) -> Reply:
        try:
            if self.kept is not None and stage.name in self.kept.stages:
                key = self._key(work, stage, client, down, seed)
                return self.kept.reply(key, stage, lambda: self._new(work, stage, client, down, seed))
            return self._new(work, stage, client, down, seed)
        except Exception as error:
            return failed(stage, client, error)

    def _new(self, work: ClientWork, stage: Stage, client: int, down: Payload, seed: int) -> Reply:
        begun = self._begin(work, stage, client, down)
        return self._end(work, stage, begun, *self._train(work, stage, begun, seed))

    def _key(self, work: ClientWork, stage: Stage, client: int, down: Payload, seed: int) -> str:
        """What a client's reply depends on."""
        view, test = self.sites.view(client, stage), self.sites.common_test
        remembered = digest(encode(self.memory.load(client)))
        measured = (self.measures, examples_digest(test)) if self._due(stage) else ()
        more = (self.sites.inputs, torch.get_num_threads(), self.precision, remembered, measured, self.privacy)
        return key_of(work, stage, view, self.world.plans.get(stage.name), seed, down, *more)

    def _begin(self, work: ClientWork, stage: Stage, client: int, down: Payload) -> Begun:
        start = time.perf_counter()
        view = self.sites.view(client, stage)
        carry = work.begin(down, self.memory.load(client), view, self.world)
        return Begun(view, carry, time.perf_counter() - start)

    def _train(self, work: ClientWork, stage: Stage, begun: Begun, seed: int) -> tuple[Trained | None, float]:
        plan = self.world.plans.get(stage.name)
        if plan is None or not begun.carry.params:
            return None, 0.0
        start = time.perf_counter()
        view, inputs = begun.view, self.sites.inputs
        by_epoch = self._epoch_by_epoch(stage)
        trained = train(work, begun.carry, plan, stage, view, inputs, seed, self.precision, by_epoch)
        return trained, time.perf_counter() - start

    def _end(self, work: ClientWork, stage: Stage, begun: Begun, trained: Trained | None, seconds: float) -> Reply:
        """The reply of a client, given what it began with, what training gave, and how long that took."""
        start, view, carry = time.perf_counter(), begun.view, begun.carry
        metrics: dict[str, object] = {}
        params, ran = carry.params, Ran(0, 0.0, carry.trace)
        if trained is not None:
            params, ran = trained.params, trained.ran
            metrics |= {"loss": dict(trained.losses), "steps": ran.steps, "epochs": trained.epochs}
            metrics |= {"scores": list(trained.scores)} if trained.scores else {}
            metrics |= {"teachers": list(carry.teachers)} if carry.teachers else {}
        up, memory = work.end(params, carry, ran, view, self.world)
        seed = seed_for(self.world.seed, stage.round, stage.index, view.client, "privacy")
        up = self.privacy.protect(up, seed)
        self.memory.hold(view.client, memory)
        metrics |= work.report(params, carry, view, self.world)
        metrics["seconds_training"] = seconds
        metrics |= self._measure(stage, view, carry.params, params, trained.by_epoch if trained else ())
        metrics["seconds"] = begun.seconds + seconds + time.perf_counter() - start
        return Reply(view.client, up, len(view.data), metrics, stage.round, stage.index)

    def _due(self, stage: Stage) -> bool:
        return stage.round in self.measured or (stage.name == FIT and bool(self.measured))

    def _epoch_by_epoch(self, stage: Stage) -> bool:
        """Whether local models of this stage are measured after every epoch."""
        return (
            "epochs" in self.measures and self._due(stage) and stage.view == "private" and SERVER not in stage.clients
        )

    def _by_epoch(self, view: View, models: Sequence[Tensors], test: Examples) -> dict[str, object]:
        """What a model that trains knows of each class: as received, and after each epoch."""
        began = time.perf_counter()
        right = [self._right(view, params, test).tolist() for params in models]
        seconds = time.perf_counter() - began
        return {"label_counts": view.counts.tolist(), "correct_by_epoch": right, "seconds_epochs": seconds}

    def _measure(
        self, stage: Stage, view: View, start: Tensors, params: Tensors, epochs: Sequence[Tensors]
    ) -> dict[str, object]:
        if view.test is not None and len(view.test) and params:
            return {"site_accuracy": self._right(view, params, view.test).sum().item() / len(view.test)}
        if not self._due(stage) or not params:
            return {}
        began, found = time.perf_counter(), dict[str, object]()
        test = self.sites.common_test
        if "local" in self.measures and test is not None and view.client != SERVER:
            found |= {
                "label_counts": view.counts.tolist(),
                "correct_by_class": self._right(view, params, test).tolist(),
            }
        if epochs and test is not None:
            found |= self._by_epoch(view, (start, *epochs), test)
        if "private_public" in self.measures:
            half = time.perf_counter()
            models = {"before": start, "after": params} if stage.view == "public" else {"after": params}
            for name, data in (("private", view.validation), ("public", self.sites.public)):
                if data is not None and len(data) and bool((data.labels >= 0).all()):
                    counts = torch.bincount(data.labels, minlength=self.world.classes).tolist()
                    found[name] = {
                        "counts": counts,
                        **{k: self._right(view, m, data).tolist() for k, m in models.items()},
                    }
            found["seconds_private_public"] = time.perf_counter() - half
        return {**found, "seconds_measuring": time.perf_counter() - began} if found else {}

    def _right(self, view: View, params: Tensors, test: Examples) -> Tensor:
        """How many examples of each class these parameters predict right: (C,)."""
        return correct_by_class(predictor(view.model, params), test, self.sites.inputs, self.world.classes)


def failed(stage: Stage, client: int, error: Exception) -> Reply:
    """The reply of a client that failed. Raises a CorruptFile again: to go on would give other bits than before."""
    if isinstance(error, CorruptFile):
        raise error
    log.debug("client %d failed", client, exc_info=error)
    text = str(error) if isinstance(error, FedstillError) else f"{type(error).__name__}: {error}"
    reason = " ".join(text.split()) or "no reason"
    return Reply(client, NOTHING, 0, {}, stage.round, stage.index, failure=reason)
