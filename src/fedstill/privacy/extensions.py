"""What privacy adds to a run: private training, noise on logits, and budgets."""

from __future__ import annotations

from pathlib import Path

from fedstill.config.settings import Settings
from fedstill.core.extensions import ClientHook, Middleware
from fedstill.core.records import World
from fedstill.privacy.budget import Budget, TrainingBudget, WithinBudget
from fedstill.privacy.noise import NoisedLogits, Privacy
from fedstill.privacy.private_training import Private, PrivateTraining
from fedstill.running.extensions import Extensions
from fedstill.running.preparation import Prepared


def run_extensions(prepared: Prepared, folder: Path | None) -> Extensions:
    """The budget that a run's clients spend; with an epsilon, nobody is asked for more."""
    privacy = prepared.settings.table(Privacy)
    kind = TrainingBudget if privacy.trains else Budget
    budget = kind.of(prepared)
    middleware: list[Middleware] = []
    if privacy.epsilon is not None:
        middleware.append(lambda engine: WithinBudget(engine, budget))
    return Extensions(middleware=tuple(middleware), observers=(budget,))


def client_extensions(
    settings: Settings, world: World, is_real_site: bool
) -> tuple[ClientHook, ...]:
    """What privacy adds to a run's clients; at real sites noise cannot be drawn again."""
    privacy = settings.table(Privacy)
    hooks: list[ClientHook] = []
    rule = Private.of(privacy, is_real_site)
    if rule is not None:
        hooks.append(PrivateTraining(rule))
    if privacy.protects_logits:
        hooks.append(NoisedLogits(privacy, is_real_site))
    return tuple(hooks)
