"""What privacy adds to a run: secure sums, private training, noise on logits, and budgets.

Each is imported by the runs that have it.
"""

from __future__ import annotations

from pathlib import Path

from fedstill.config.settings import Settings
from fedstill.core.extensions import ClientHook, Middleware
from fedstill.core.records import World
from fedstill.privacy.noise import NoisedLogits, Privacy
from fedstill.running.extensions import Extensions
from fedstill.running.preparation import Prepared


def secure_sums(prepared: Prepared, folder: Path | None) -> Extensions:
    """Secure sums in a run whose config asks for them; ``folder``: the run's directory."""
    settings = prepared.settings
    if not settings.table(Privacy).secure_sum:
        return Extensions()
    from fedstill.privacy.secure_engine import MaskedBytes, with_masking

    return Extensions(
        middleware=(lambda engine: with_masking(engine, settings, folder),),
        observers=(MaskedBytes(),),
    )


def budgets(prepared: Prepared, folder: Path | None) -> Extensions:
    """The budget that a run's clients spend; with an epsilon, nobody is asked for more."""
    privacy = prepared.settings.table(Privacy)
    if not (privacy.trains or privacy.protects_logits):
        return Extensions()
    from fedstill.privacy.budget import Budget, TrainingBudget, WithinBudget

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
    if privacy.gradient_clip is not None:
        from fedstill.privacy.private_training import Private, PrivateTraining

        rule = Private(privacy.gradient_clip, privacy.sigma, is_real_site)
        hooks.append(PrivateTraining(rule))
    if privacy.protects_logits:
        hooks.append(NoisedLogits(privacy, is_real_site))
    return tuple(hooks)
