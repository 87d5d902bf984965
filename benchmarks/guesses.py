"""Whom several rules name first when a class falls: the measure of ``benchmarks.culprits``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedstill.core.extensions import StageResult
from fedstill.core.trees import floats, norm, sub
from fedstill.measures.base import EvaluationContext, Measure, Numbers
from fedstill.measures.contributions import Contributions, StageGame

OF, FALL = 7, 0.10
"""The class, and from which fall on a round counts."""


@dataclass(frozen=True)
class Planted:
    """Who is planted in the runs to come."""

    client: ClassVar[int] = 0


class Guesses(Measure):
    """Whom each rule names first, in rounds in which the planted client acts and the class
    falls.
    """

    needs = frozenset({"test", "local_models"})

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
        """``first``: {rule: client}; ``fall``; ``harm``: what the class lost by the planted
        client.
        """
        clients = [r.client for r in seen.accepted]
        before, after = (_accuracy(context, state.params) for state in (seen.before, seen.after))
        if Planted.client not in clients or before - after < FALL:
            return None
        game = StageGame(
            context.method, seen.before, seen.stage, seen.accepted, seen.payloads, context.world
        )
        everyone = range(len(clients))
        told = Contributions(classes=(OF,)).look(seen, context)
        assert told is not None
        without = [
            _accuracy(context, game.state([p for p in everyone if p != k]).params) for k in everyone
        ]
        local = [_accuracy(context, seen.local_models[c]) for c in clients]
        far = [norm(floats(sub(seen.local_models[c], seen.before.params))) for c in clients]
        first = {
            "contribution": clients[int(np.argmin(told["values"][0]))],
            "leave-one-out": clients[int(np.argmax(without))],
            "own model's fall": clients[int(np.argmin(local))],
            "norm of the update": clients[int(np.argmax(far))],
        }
        harm = without[clients.index(Planted.client)] - after
        return {"first": first, "planted": Planted.client, "fall": before - after, "harm": harm}


def _accuracy(context: EvaluationContext, params: Any) -> float:
    return float(context.accuracy_by_class(params, context.test)[OF])
