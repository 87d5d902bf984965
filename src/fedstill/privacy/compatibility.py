"""What private training and secure sums exclude, and the engine that they wrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fedstill.config.settings import Settings
from fedstill.core import trees
from fedstill.core.aggregation import ROBUST
from fedstill.core.capabilities import Permit
from fedstill.core.census import CENSUS
from fedstill.core.errors import ConfigError, IncompatibleMethod, on_one_line
from fedstill.core.extensions import Engine
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Payload, Reply, Stage, State, Tensors, World
from fedstill.engines.vectorised import why_not
from fedstill.flower.engine import FlowerEngine
from fedstill.flower.secure_sums import SummedFleet
from fedstill.measures.base import Measure
from fedstill.measures.choice import measures
from fedstill.methods.fit import FIT
from fedstill.privacy.masking import FEWEST_SUMMED, MaskedEngine, Masking
from fedstill.privacy.primitives import require_secure
from fedstill.privacy.private_training import require_opacus
from fedstill.running.hostile_clients import FACTORS

# What is refused where training is private: whatever would tell of the data past the noised
# gradients.


def refuse_unprivate(settings: Settings, world: World) -> None:
    """Raise ConfigError or IncompatibleMethod where ``privacy.gradient_clip`` cannot keep what
    epsilon says.
    """
    privacy, method = settings.privacy, settings.method
    if not privacy.trains:
        return
    require_opacus()
    name = settings.named.method.label
    if Permit.PRIVATE_TRAINING not in method.permits:
        raise IncompatibleMethod(
            f"privacy.gradient_clip with method {name}: its clients read more of their data than "
            "single examples' "
            "gradients, or send more than a model; choose fedavg, fedprox, fedntd or another that "
            "permits "
            "private_training"
        )
    schedule = [*settings.schedule(1, world), *settings.schedule(settings.rounds, world)]
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
    if settings.stream.tasks > 1 or settings.exchange_each_round:
        return "epsilon counts on data that stay the same; leave [stream] or query.again out"
    if settings.precision != "fp32":
        return f"precision = {settings.precision!r} rounds what is clipped; set fp32"
    if settings.engine == "vectorised":
        return (
            "engine = 'vectorised' stacks clients, and here examples are stacked; set engine = "
            "'pooled'"
        )
    return ""


# Secure sums in a run: around which engine they go, and what is refused because it looks at single
# models.


OF_ONE = frozenset({"local_models", "uploads", "chain", "queries"})
"""What measures need that only single models or reports of clients give."""
NEAR = 1e-4
"""How near a fold must come to what it makes of means, relative to the largest number."""


def with_masking(engine: Engine, settings: Settings, folder: Path | None = None) -> Engine:
    """The engine of a run; where its config asks for them, with secure sums. ``folder``: the run's
    directory.
    """
    masking = Masking.of(settings.privacy, settings.method)
    if masking is None:
        return engine
    return (
        SummedFleet(engine, masking, folder)
        if isinstance(engine, FlowerEngine)
        else MaskedEngine(engine, masking)
    )


def refuse_unmaskable(settings: Settings, world: World) -> None:
    """Raise IncompatibleMethod or ConfigError for what cannot be done when the server knows sums of
    models only.
    """
    if not settings.privacy.secure_sum:
        return
    require_secure()
    refuse_methods_without_sums(settings)
    schedule = [*settings.schedule(1, world), *settings.schedule(settings.rounds, world)]
    if why := _more_than_sums(settings, schedule) or _measured(measures(settings.measure)):
        raise ConfigError(f"privacy.secure_sum: {why}")
    for stage in settings.schedule(1, world):
        if SERVER not in stage.clients and stage.name != CENSUS:
            _demand_linear(settings, stage, world)


def refuse_methods_without_sums(settings: Settings) -> None:
    """Raise IncompatibleMethod for a method whose server does more with replies than a mean of
    models.
    """
    name, method = settings.named.method.label, settings.method
    if Permit.LINEAR_AGGREGATE not in method.permits:
        raise IncompatibleMethod(
            f"privacy.secure_sum with method {name}: its server does more with replies than a mean "
            "of models; choose "
            "fedavg, fedprox, fedntd or another that permits linear_aggregate"
        )
    if (how := getattr(method, "aggregation", "")) in ROBUST:
        raise IncompatibleMethod(
            f"privacy.secure_sum with method.aggregation = {how!r}: a robust mean compares single "
            "models, which a "
            "secure sum hides; choose 'examples' or 'uniform', or leave secure_sum out"
        )


def _more_than_sums(settings: Settings, schedule: Sequence[Stage]) -> str:
    if settings.engine == "flower" and settings.of_clients.attack in FACTORS:
        return (
            "over Flower clients mask their replies before clients.attack could change them; "
            "choose another engine"
        )
    for stage in schedule:
        if SERVER in stage.clients or stage.name == CENSUS:
            continue
        if stage.name not in settings.method.stages:
            return f"stage {stage.name!r} sends what is not summed; leave it out"
        if stage.sequential or len(stage.clients) < FEWEST_SUMMED:
            return (
                f"stage {stage.name!r} has {len(stage.clients)} client(s) side by side, and a sum "
                "hides one among "
                f"{FEWEST_SUMMED} or more; set topology.kind = 'parallel', and topology.sampled"
            )
    if settings.exchange_each_round:
        return "clients that ask again report why, each for itself; leave query.again out"
    if settings.privacy.trains and settings.on_sites:
        return (
            "at real sites with gradient_clip the server could not count each client's epsilon, "
            "because it learns no "
            "number of examples; leave one of them out"
        )
    return ""


def _measured(chosen: Mapping[str, Measure]) -> str:
    for name, measure in chosen.items():
        if (
            measure.needs & OF_ONE
            or type(measure).at_client is not Measure.at_client
            or name == "contributions"
        ):
            return (
                f"measure {name!r} looks at single clients' models; leave it out of measure "
                "(measure = [])"
            )
    return ""


def _demand_linear(settings: Settings, stage: Stage, world: World) -> None:
    """Raise IncompatibleMethod if the fold of a stage gives another result for single models than
    for their mean.
    """
    method, name = settings.method, settings.named.method.label
    try:
        state = method.begin_round(method.initial_state(world), [stage], world)
        replies = _drawn(stage, state.params, settings.seed)
        by_examples = getattr(method, "aggregation", "examples") == "examples"
        mean = trees.mean(
            [r.content.params for r in replies],
            [float(r.examples) if by_examples else 1.0 for r in replies],
        )
        summed = [Reply(r.client, Payload(params=mean), 0, {}, r.round, r.stage) for r in replies]
        near = _alike(
            method.aggregate(state, replies, stage, world),
            method.aggregate(state, summed, stage, world),
        )
    except Exception as error:
        raise IncompatibleMethod(
            f"privacy.secure_sum with method {name}: its aggregate of stage {stage.name!r} needs "
            f"more than models' mean: {on_one_line(error)}"
        ) from error
    if not near:
        raise IncompatibleMethod(
            f"privacy.secure_sum with method {name}: as it is set, its aggregate of stage "
            f"{stage.name!r} gives another "
            "result for single models than for their mean; with method.aggregation = 'uniform' it "
            "may, or choose fedavg"
        )


def _drawn(stage: Stage, params: Tensors, seed: int) -> list[Reply]:
    """Three replies that could have come: models near the first, of clients with 1, 2 and 3
    examples.
    """
    draw = generator(seed_for(seed, 0, 0, SERVER, "is the fold linear"))
    out = []
    for examples, client in enumerate(stage.clients[:3], 1):
        up = {
            k: v + 0.1 * torch.randn(v.shape, generator=draw).to(v)
            for k, v in trees.floats(params).items()
        }
        out.append(
            Reply(client, Payload(params={**params, **up}), examples, {}, stage.round, stage.index)
        )
    return out


def _alike(one: State, other: State) -> bool:
    groups = {"": (one.params, other.params)}
    if one.extra.keys() != other.extra.keys():
        return False
    groups |= {k: (_tree(one.extra[k]), _tree(other.extra[k])) for k in one.extra}
    return all(
        torch.allclose(
            a[k].double(),
            b[k].double(),
            rtol=0,
            atol=NEAR * max(1.0, float(a[k].double().abs().max())),
        )
        for a, b in groups.values()
        for k in a
        if a[k].numel()
    )


def _tree(group: object) -> Tensors:
    if isinstance(group, Mapping):
        return group
    return {"": group if isinstance(group, torch.Tensor) else torch.tensor([hash(group) % 2**31])}
