"""What is measured on the way: on the server after every round, and by clients in their stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedstill.engines.passes import correct_by_class
from fedstill.experiment.prepare import Prepared
from fedstill.metrics import consistency, forgetting
from fedstill.metrics.local import local_accuracies
from fedstill.records import Payload, Reply, Stage
from fedstill.wire.screen import Refusal


@dataclass
class Measuring:
    """Turns what happens into journal events, and remembers what later measures need; all of it is in the journal."""

    prepared: Prepared
    history: list[dict[str, Any]] = field(default_factory=list)
    start: dict[str, Any] = field(default_factory=dict)
    _replies: list[dict[str, Any]] = field(default_factory=list)

    def split(self) -> dict[str, Any]:
        """How the data are split: classes, and label counts by client."""
        sites, data = self.prepared.sites, self.prepared.dataset
        counts = [sites.counts(c).tolist() for c in range(self.prepared.world.clients)] if sites.parts else []
        return {"classes": list(data.classes), "label_counts": counts}

    def initial(self, predictors: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, Any]:
        """The server's models before round 1."""
        self.start = self._evaluate(predictors)
        return self.start

    def stage(
        self, stage: Stage, replies: Sequence[Reply], refused: Sequence[Refusal], downs: Mapping[int, Payload]
    ) -> Iterator[dict[str, Any]]:
        """The events of a finished stage: one for each client that replied, was refused, or had nothing to do."""
        where = {"event": "client", "round": stage.round, "stage": stage.index, "name": stage.name}
        events = [
            {
                **where,
                "client": r.client,
                "examples": r.examples,
                "bytes_up": r.up.nbytes,
                "bytes_down": downs[r.client].nbytes,
                **r.metrics,
            }
            for r in replies
        ]
        events += [
            {
                **where,
                "client": r.client,
                "refused": r.reason,
                "bytes_down": downs[r.client].nbytes if r.client in downs else 0,
            }
            for r in refused
        ]
        events += [{**where, "client": c, "idle": True} for c in stage.clients if c not in downs]
        self._replies += events
        yield from events

    def round(
        self, round: int, predictors: Mapping[str, Callable[[Tensor], Tensor]], training: float, saving: float
    ) -> dict[str, Any]:
        """The event of a finished round, given the seconds that its stages took and that checkpoints took."""
        began = time.perf_counter()
        replies, self._replies = self._replies, []
        measured = self._evaluate(predictors)
        before = self.history[-1] if self.history else self.start
        classes = [*(e["class_accuracy"] for e in self.history), measured["class_accuracy"]]
        event = {
            "round": round,
            **measured,
            "forgetting": forgetting(classes),
            "consistency": consistency(before["class_accuracy"], measured["class_accuracy"]),
            **local_accuracies(replies, before["class_accuracy"], measured["class_accuracy"], self._totals()),
            "replies": sum("refused" not in e and "idle" not in e for e in replies),
            "refused": sum("refused" in e for e in replies),
            "bytes_up": sum(e.get("bytes_up", 0) for e in replies),
            "bytes_down": sum(e.get("bytes_down", 0) for e in replies),
            "seconds_training": training,
            "seconds_saving": saving,
            "seconds_clients": sum(e.get("seconds_training", 0.0) for e in replies),
            "seconds_measuring": time.perf_counter() - began,
        }
        event["seconds"] = training + saving + event["seconds_measuring"]
        self.history.append(event)
        return event

    def replay(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Remember what a journal says, as if it had happened here."""
        for event in events:
            rest = {k: v for k, v in event.items() if k != "event"}
            if event["event"] == "initial":
                self.start = rest
            elif event["event"] == "round":
                self.history.append(rest)
                self._replies = []
            elif event["event"] == "client":
                self._replies.append(dict(rest))

    def _evaluate(self, predictors: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, Any]:
        """Accuracy of the first predictor, and under ``others`` of any further ones."""
        test, totals = self.prepared.sites.common_test, self._totals()
        if test is None or not predictors:
            return {"accuracy": None, "class_accuracy": [None] * len(totals)}
        found = {}
        for name, predict in predictors.items():
            right = correct_by_class(predict, test, self.prepared.sites.inputs, len(totals))
            by_class = [r / t if t else None for r, t in zip(right.tolist(), totals, strict=True)]
            found[name] = {"accuracy": int(right.sum()) / sum(totals), "class_accuracy": by_class}
        first, *others = found
        return {**found[first], **({"others": {n: found[n] for n in others}} if others else {})}

    def _totals(self) -> list[int]:
        test = self.prepared.sites.common_test
        if test is None:
            return [0] * self.prepared.world.classes
        return torch.bincount(test.labels, minlength=self.prepared.world.classes).tolist()
