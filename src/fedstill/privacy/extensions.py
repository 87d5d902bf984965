"""What privacy adds to a run: private training, noise on logits, secure sums, and budgets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedstill.config.settings import Settings
from fedstill.core.extensions import ClientHook, Engine, Event, Fields, Middleware, Observer
from fedstill.core.records import World
from fedstill.core.results import StageResult
from fedstill.privacy.budget import Budget, TrainingBudget, WithinBudget
from fedstill.privacy.masking import bytes_of
from fedstill.privacy.noise import NoisedLogits, Privacy
from fedstill.privacy.private_training import Private, PrivateTraining
from fedstill.privacy.secure_engine import with_masking
from fedstill.running.extensions import Extensions
from fedstill.running.preparation import Prepared


@dataclass(frozen=True)
class MaskedBytes(Observer):
    """Counts the bytes of masked models, which are what clients with secure sums send."""

    def client_fields(self, event: Event, result: StageResult) -> Fields:
        """``bytes_up`` of an accepted reply."""
        if "bytes_up" not in event:
            return {}
        return {"bytes_up": bytes_of(result.contents[event["client"]], summed=True)}


def run_extensions(prepared: Prepared, folder: Path | None) -> Extensions:
    """What privacy adds to a run at the server."""
    settings = prepared.settings
    privacy = settings.table(Privacy)
    kind = TrainingBudget if privacy.trains else Budget
    budget = kind.of(prepared)
    middleware: list[Middleware] = []
    observers: list[Observer] = [budget]
    if privacy.secure_sum:
        observers.append(MaskedBytes())

        def mask(engine: Engine) -> Engine:
            return with_masking(engine, settings, folder)

        middleware.append(mask)
    if privacy.epsilon is not None:
        middleware.append(lambda engine: WithinBudget(engine, budget))
    return Extensions(middleware=tuple(middleware), observers=tuple(observers))


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
