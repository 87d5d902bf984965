"""Ensemble: the mean of what all clients' models predict; nothing is trained but the models
themselves.

Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments"
(QKT), section 4.1 and appendix A.6.2.
State: no global parameters; model.N = what client N fitted alone; size.N = its number of examples.
Memory: nothing.
Reading: the mean is of probabilities, and a client's own model is one of them.
Reading: with ``participants``, each client asks that many clients, itself included, drawn by key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.core.fields import CountOrZero
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import State, Tensors, World
from fedstill.core.registry import method
from fedstill.methods.local_only import LocalOnly, fitted
from fedstill.models.contract import predictor
from fedstill.models.ensemble import Joined, MeanOfProbabilities


@method("ensemble")
@dataclass(frozen=True)
class Ensemble(LocalOnly):
    """The mean of all local models' probabilities."""

    personal: ClassVar[frozenset[str]] = frozenset()

    participants: CountOrZero = 0
    """Clients whose models predict for a client, itself included; 0 is all."""

    def predictors(self, state: State, world: World) -> dict[str, Callable[[Tensor], Tensor]]:
        models = fitted(state)
        if not models:
            return {}
        everyone: dict[str, Callable[[Tensor], Tensor]] = {"ensemble": mixture(models, world)}
        if not self.participants:
            return everyone
        groups = {c: asked_peers(c, self.participants, world) for c in range(world.clients)}
        some = {
            c: {m: models[m] for m in sorted((c, *peers)) if m in models}
            for c, peers in groups.items()
        }
        return everyone | {f"client {c}": mixture(m, world) for c, m in some.items() if m}


def mixture(models: Mapping[int, Tensors], world: World) -> Joined:
    """x -> log of the mean probabilities (B, C) of some clients' models."""
    return Joined(
        [predictor(world.model(c), params) for c, params in models.items()], MeanOfProbabilities()
    )


def asked_peers(client: int, participants: int, world: World) -> list[int]:
    """The other clients that a client asks, sorted: all, or ``participants`` - 1 of them, drawn by
    key.
    """
    others = [c for c in range(world.clients) if c != client]
    if not participants:
        return others
    order = torch.randperm(
        len(others), generator=generator(seed_for(world.seed, 1, 0, client, "participants"))
    )
    return sorted(others[i] for i in order[: participants - 1].tolist())
