"""What is refused where training is private: whatever would tell of the data past the noised
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedstill.engines.vectorised import why_not
from fedstill.errors import ConfigError, IncompatibleMethod
from fedstill.experiment.config.settings import Settings
from fedstill.fitting import FIT
from fedstill.records import Stage, World
from fedstill.wire.moments_accountant import require_opacus


def refuse_unprivate(settings: Settings, world: World) -> None:
    """Raise ConfigError or IncompatibleMethod where ``privacy.gradient_clip`` cannot keep what
    epsilon says.
    """
    privacy, method = settings.privacy, settings.method
    if not privacy.trains:
        return
    require_opacus()
    name = settings.named.method.label
    if "private_training" not in method.permits:
        raise IncompatibleMethod(
            f"privacy.gradient_clip with method {name}: its clients read more of their data than "
            "single examples' "
            "gradients, or send more than a model; choose fedavg, fedprox, fedntd or another that "
            "permits "
            "private_training"
        )
    schedule = [*settings.topology(1, world), *settings.topology(settings.rounds, world)]
    if why := _more_than_gradients(settings, schedule, method.stages | {FIT}):
        raise ConfigError(f"privacy.gradient_clip: {why}")
    for spec in dict.fromkeys(world.model(client) for client in range(world.clients)):
        for plan in settings.plans.values():
            if why := why_not(spec, plan):
                raise ConfigError(f"privacy.gradient_clip needs each example's gradient, and {why}")


def _more_than_gradients(
    settings: Settings, schedule: Sequence[Stage], known: frozenset[str]
) -> str:
    if others := sorted({stage.name for stage in schedule} - known):
        return f"stage {others[0]!r} sends what has no noise; leave it out"
    if settings.stream.tasks > 1 or settings.query.again:
        return "epsilon counts on data that stay the same; leave [stream] or query.again out"
    if settings.precision != "fp32":
        return f"precision = {settings.precision!r} rounds what is clipped; set fp32"
    if settings.engine == "vectorised":
        return (
            "engine = 'vectorised' stacks clients, and here examples are stacked; set engine = "
            "'pooled'"
        )
    return ""
