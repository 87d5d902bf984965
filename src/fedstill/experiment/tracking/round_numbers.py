"""The numbers of each round, gathered from the events of a journal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedstill.experiment.run_directory.journal import Event

PLACES = ("event", "measure", "round", "stage", "client", "previous")
"""What says in an event where it comes from."""


class RoundNumbers:
    """Takes a journal's events in order, and gives the numbers of a round when its last event has
    come.

    Names of classes stand below ``class_accuracy/``, what a measure saw below the measure's name
    (``divergence/mean_l2``: the mean over the round's looks), and below ``loss/`` the terms of the
    training loss: the mean over the round's clients, weighted by their examples. Lists are left
    out.
    """

    def __init__(self, classes: Sequence[str] = ()) -> None:
        self.classes = list(classes)
        self._losses: list[tuple[float, Mapping[str, float]]] = []
        self._looks: list[Event] = []

    def take(self, event: Event) -> tuple[int, dict[str, float]] | None:
        """One event; (round, numbers) if it ends a round (0: before training)."""
        kind = event["event"]
        if kind == "start":
            self.classes = [str(name) for name in event.get("classes", [])]
        elif kind == "measure":
            self._looks.append(event)
        elif (
            kind == "client" and not event.get("refused") and isinstance(event.get("loss"), Mapping)
        ):
            self._losses.append((event.get("examples") or 0, event["loss"]))
        elif kind in ("initial", "round"):
            numbers = {
                **dict(_of_event(event, self.classes)),
                **_mean_losses(self._losses),
                **_mean_looks(self._looks),
            }
            self._losses, self._looks = [], []
            return int(event.get("round", 0)), numbers
        return None


def _of_event(event: Mapping[str, Any], classes: Sequence[str]) -> Iterator[tuple[str, float]]:
    for key, value in event.items():
        if key == "class_accuracy":
            pairs = zip(classes, value, strict=True) if value else ()
            yield from ((f"class_accuracy/{c}", float(v)) for c, v in pairs if v is not None)
        elif key == "others" and isinstance(value, dict):
            for other, measured in value.items():
                yield from ((f"{other}/{name}", v) for name, v in _of_event(measured, classes))
        elif key not in ("event", "round") and isinstance(value, (int, float)):
            yield key, float(value)


def _mean_losses(losses: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    weights: dict[str, float] = defaultdict(float)
    sums: dict[str, float] = defaultdict(float)
    for examples, terms in losses:
        for name, value in terms.items():
            if isinstance(value, (int, float)):
                weights[f"loss/{name}"] += examples
                sums[f"loss/{name}"] += examples * value
    return {name: sums[name] / weight for name, weight in weights.items() if weight}


def _mean_looks(looks: Sequence[Event]) -> dict[str, float]:
    seen: dict[str, list[float]] = defaultdict(list)
    for look in looks:
        for name, value in _inside(look, look["measure"]):
            seen[name].append(value)
    return {name: sum(each) / len(each) for name, each in seen.items()}


def _inside(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _inside(value, f"{prefix}/{key}")
        elif key not in PLACES and isinstance(value, (int, float)):
            yield f"{prefix}/{key}", float(value)
