"""What the clients' own models could do when they were last measured: remembered over rounds, from
journal events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from fedstill.method import Method
from fedstill.metrics import class_accuracy
from fedstill.metrics.client_answers import personal_answers
from fedstill.metrics.values import Values
from fedstill.records import SERVER, State, World
from fedstill.trees import same_bits

log = logging.getLogger("fedstill.measuring")

UNTRAINED = "round 1 left the server's model as it was, so its accuracy says nothing"


@dataclass
class OwnAnswers:
    """The answers of a method that leaves each client a model of its own; empty for all others.

    ``stages``: those after which a client's own model is its answer; of several, the last in which
    it acted counts.
    ``label_counts``: (clients, C), empty where nobody knows them. ``totals``: test examples by
    class (C,).
    """

    stages: Collection[str]
    label_counts: Sequence[Sequence[int]]
    totals: Sequence[int]
    _now: dict[int, Values] = field(default_factory=dict)
    _best: dict[int, Values] = field(default_factory=dict)  # by class, of the rounds before
    _looked: set[int] = field(default_factory=set)  # clients that were measured in this round

    def note(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Remember what clients measured in a stage of this round."""
        for event in events:
            if event["name"] in self.stages and "correct_by_class" in event and self.label_counts:
                self._now[event["client"]] = class_accuracy(event["correct_by_class"], self.totals)
                self._looked.add(event["client"])

    def round(self) -> dict[str, Any]:
        """Fields of the round's event; empty if no client was measured in it. Ends the round."""
        told = personal_answers(self._now, self._best, self.label_counts) if self._looked else {}
        for client in self._looked:
            self._best[client] = np.fmax(
                self._best.get(client, self._now[client]), self._now[client]
            )
        self._looked.clear()
        return told


def evaluated_answers(
    method: Method, state: State, world: World
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The method's predictors; none where clients have models of their own and nobody has trained
    the server's.
    """
    if state.round == 1 or not same_bits(state.params, world.initial(SERVER)):
        return dict(method.predictors(state, world))
    if state.round == 2 and not method.personal:
        log.warning("%s: %s", UNTRAINED, _why_untrained(world))
    return {} if method.personal else dict(method.predictors(state, world))


def _why_untrained(world: World) -> str:
    """What most likely left it so, and what to do."""
    if not any(plan.epochs or plan.steps for plan in world.plans.values()):
        return "no plan has epochs or steps, so nobody trained; set plan.epochs above 0"
    own = "the method says after which stages: personal = frozenset({'train'})"
    return (
        f"if clients have models of their own, {own}; if not, look at what fold gives, and at "
        "plan.lr"
    )
